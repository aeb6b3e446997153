# SPDX-License-Identifier: Apache-2.0
"""Model folders for whole-model benchmarks: a configuration and a tokenizer; vLLM makes the random weights itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["SHAPES", "make"]

_YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "rope_theta": 10000,
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "beta_fast": 32,
    "beta_slow": 1,
}

#: Attention of DeepSeek-V2-Lite, V3 per rank (128 heads over 8 ranks, and 22 heads as over 6), few layers.
SHAPES: dict[str, dict[str, Any]] = {
    "v2lite": {
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "vocab_size": 102400,
        "q_lora_rank": None,
    },
    "v3_tp8": {
        "hidden_size": 7168,
        "intermediate_size": 2048,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "vocab_size": 16384,
        "q_lora_rank": 1536,
    },
    "v3_tp6": {
        "hidden_size": 7040,  # of V3's 7168 the nearest below that transformers takes with 22 heads
        "intermediate_size": 2048,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 22,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "vocab_size": 16384,
        "q_lora_rank": 1536,
    },
    "tiny": {  # for --quick: the attention of V2-Lite, little else
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "vocab_size": 8192,
        "q_lora_rank": None,
    },
}


def make(shape: str, folder: Path) -> Path:
    """Writes config.json and a word tokenizer (one word per id) into ``folder/shape``; returns that path.

    Raises:
        ValueError: an unknown shape.
    """
    if shape not in SHAPES:
        raise ValueError(f"shape is {shape!r}, expected one of {', '.join(SHAPES)}")
    path = folder / shape
    path.mkdir(parents=True, exist_ok=True)
    dims = SHAPES[shape]
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "torch_dtype": "bfloat16",
        "num_key_value_heads": dims["num_attention_heads"],
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "routed_scaling_factor": 1.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": _YARN,
        "max_position_embeddings": 163840,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **dims,
    }
    (path / "config.json").write_text(json.dumps(config, indent=1))
    _save_tokenizer(path, dims["vocab_size"])
    return path


def _save_tokenizer(path: Path, size: int) -> None:
    from tokenizers import Tokenizer
    from tokenizers.decoders import WordPiece
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = {"<bos>": 0, "<eos>": 1, "<unk>": 2} | {f"w{index}": index for index in range(3, size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.decoder = WordPiece(prefix="##", cleanup=False)  # joins by spaces
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<bos>",
                "eos_token": "<eos>",
                "unk_token": "<unk>",
                "model_max_length": 163840,
                "clean_up_tokenization_spaces": False,
            }
        )
    )
