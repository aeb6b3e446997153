# SPDX-License-Identifier: Apache-2.0
"""Who serves a model: this backend, or stock vLLM. One pure function of vLLM's configuration and this host.

The platform asks it when vLLM checks its configuration (to keep block size, chunked prefill and prefix caching) and
again in each worker when layers pick their backend, so both always agree. Three outcomes:

* served here, and why;
* stock vLLM, and why (not an MLA model, another dtype, switched off, another backend asked for, no fast tier);
* a ValueError: the model would be ours, but the configuration asks for what neither side can serve rightly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from amx_mla_backend import envs, kernels

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BLOCK_MULTIPLE = 32
"""Block sizes are multiples of this: two 16-row tiles of latent rows, so that no tile crosses a block."""

DEFAULT_BLOCK_SIZE = 64
"""The kernels run at one speed from 32 rows on (a block of 64 is 72 KiB of memory in a row), so what decides is the
engine: half the waste and twice the prefix-cache resolution of vLLM's CPU default of 128 (the last, partial block of a
request is never shared), at half the block hashes and table entries of 32."""


@dataclass(frozen=True)
class Choice:
    """The outcome: whether this backend serves the model, and the reason."""

    serves: bool
    reason: str


def requested_backend(vllm_config: VllmConfig) -> str | None:
    """The name given with --attention-backend (for MLA layers, where the version can tell kinds apart), or None."""
    attention = vllm_config.attention_config
    per_kind = getattr(attention, "backend_per_kind", None) or {}
    backend = per_kind.get("mla_attention", attention.backend)
    return None if backend is None else backend.name


def is_mla(vllm_config: VllmConfig) -> bool:
    """Whether the model uses latent attention in the layout this backend knows (kv_lora_rank + qk_rope_head_dim)."""
    model = vllm_config.model_config
    return model is not None and bool(model.use_mla) and getattr(model.hf_text_config, "kv_lora_rank", None) is not None


def choose(vllm_config: VllmConfig) -> Choice:
    """Decide who serves the model.

    Raises:
        ValueError: the configuration can be served by nobody here; names the setting, its value and what is expected.
    """
    mode = envs.MODE.get()
    if mode == "off":
        return Choice(False, f"switched off by {envs.MODE.name}")
    if not is_mla(vllm_config):
        return Choice(False, "not a latent-attention model")
    model = vllm_config.model_config
    requested = requested_backend(vllm_config)
    if requested == "CPU_MLA":
        return Choice(False, "--attention-backend CPU_MLA was asked for")
    explicit = requested == "AMX_MLA"
    if getattr(model, "is_hybrid", False):
        return _stand_back("hybrid models keep vLLM's own block layout", refuse=explicit)
    if model.dtype != torch.bfloat16:
        dtype = str(model.dtype).removeprefix("torch.")
        return _stand_back(f"the model runs in {dtype}, the kernels in bfloat16", refuse=explicit)
    if reason := kernels.unavailable_reason():
        return _stand_back(reason, refuse=explicit or mode == "on")
    why = "asked for with --attention-backend" if explicit else "the best tier permitted on this host"
    _refuse_unserved(vllm_config)
    return Choice(True, why)


def _stand_back(reason: str, *, refuse: bool) -> Choice:
    """Leave the model to stock vLLM, or refuse to start where the user asked for this backend by name."""
    if refuse:
        raise ValueError(f"AMX_MLA was asked for: {reason}")
    return Choice(False, reason)


def _refuse_unserved(vllm_config: VllmConfig) -> None:
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    text = model.hf_text_config
    if cache.cache_dtype not in ("auto", "bfloat16"):
        raise ValueError(
            f"kv_cache_dtype={cache.cache_dtype!r}: AMX_MLA keeps the latent cache in bfloat16; use 'auto'"
        )
    if cache.user_specified_block_size and cache.block_size % BLOCK_MULTIPLE:
        raise ValueError(f"block_size={cache.block_size}: AMX_MLA takes multiples of {BLOCK_MULTIPLE}")
    if getattr(text, "index_topk", None):
        raise ValueError(
            f"index_topk={text.index_topk}: sparse attention is not served on CPU; "
            "--hf-overrides '{\"index_topk\": 0}' runs the model dense (the same up to that many tokens of context)"
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name, 1)) > 1:
            raise ValueError(f"{name}={size}: AMX_MLA serves 1 only; use tensor parallelism")
    for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"):
        value = getattr(text, name, None)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value}: AMX_MLA needs a positive dimension")
