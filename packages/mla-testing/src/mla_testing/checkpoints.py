# SPDX-License-Identifier: Apache-2.0
"""Tiny DeepSeek-V2 checkpoints that know a text by heart, for end-to-end tests that check what is said.

    python -m mla_testing.checkpoints --kind all

The attention has the dimensions of the real models: kv_lora_rank 512, rope 64, nope 128, v 128, 16 heads, YaRN with
DeepSeek-V2's numbers. Four layers, one dense and three mixtures of experts, are narrow. A checkpoint continues its text
(``corpus``) from anywhere, at contexts up to 3,000 tokens, with margins that bfloat16 does not cross.

Three ideas make that cheap enough to be made where it is needed:

*Trained narrow, lifted wide.* A latent space of 64 dimensions is embedded in one of 512 by a random isometry; so are
the keys, queries and values of each head and the residual stream. Scores, values and RMS norms do not change under
isometries, up to constants that fold into the next weight, so the wide model computes the same function as the trained
one, with every dimension alive. Norm weights are random, their inverses folded into the next weight as well.

*Heads that know where to look.* In the first layer, head j starts out looking j tokens back: with a constant query of
phase -j theta_i and a constant key, rotary scores peak at distance j. Only YaRN's unchanged frequencies are used, which
plain rope shares; training alternates between both, so the same weights serve both.

*A gauge of the whole context.* Reciting needs the last few tokens only, and a fault further back would go unnoticed.
So one head per layer is set by hand after training: it weights all keys by a random feature of theirs (a few among
thousands dominate) and averages another. The averages move the probability of one token, <aside>, which training keeps
near 1 in 10: never the likeliest, but what is lost to it or won shows in every log-probability.

The variants are lifted from one training:

- ``yarn``: as DeepSeek-V2-Lite.
- ``rope``: plain rope; YaRN's factor on the scores goes into q_proj.
- ``q_lora``: YaRN with q_lora_rank set, as V2 and V3. q_proj factors exactly, because the input of the norm between the
  factors has a constant RMS.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import inspect
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from mla_testing import corpus, narrow
from mla_testing.narrow import (
    DENSE_WIDTH,
    EXPERT_WIDTH,
    EXPERTS,
    EXPERTS_PER_TOKEN,
    HEADS,
    HIDDEN,
    LAYERS,
    MSCALE_SQUARED,
    NARROW_HIDDEN,
    NARROW_NOPE,
    NARROW_RANK,
    NARROW_V,
    NOPE,
    NORM_EPS,
    Q_LORA_RANK,
    RANK,
    ROPE,
    SCALE,
    THETA,
    TRAINED_HEADS,
    V_DIM,
    YARN_FACTOR,
    YARN_MSCALE,
    YARN_ORIGINAL,
)

__all__ = ["KINDS", "Kind", "default_cache_dir", "make"]

Kind = Literal["yarn", "rope", "q_lora"]
KINDS: tuple[Kind, ...] = get_args(Kind)

#: Scores of the gauge heads have this standard deviation over the keys: about 1 key in 200 counts.
_GAUGE_SHARPNESS = 3.0
#: Largest move of the logit of <aside>: its share stays about within 1 in 20 and 1 in 5.
_GAUGE_RANGE = 0.7


def default_cache_dir() -> Path:
    """``MLA_TESTING_CACHE``, or ``~/.cache/mla-testing``."""
    return Path(os.environ.get("MLA_TESTING_CACHE") or Path.home() / ".cache" / "mla-testing")


def make(kind: Kind = "yarn", cache_dir: str | os.PathLike[str] | None = None, *, progress: bool = True) -> Path:
    """The folder of a checkpoint, made first if the cache does not have it.

    The first call trains for one to two minutes on two cores; the others lift its weights in a second. Several
    processes may call at once: one makes, the others wait.

    Args:
        kind: one of ``KINDS``.
        cache_dir: where checkpoints are kept; default: :func:`default_cache_dir`.
        progress: show a progress bar while training.

    Returns:
        A folder with config.json, model.safetensors (bfloat16) and tokenizer, for vLLM and transformers alike.

    Raises:
        ValueError: unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}, expected one of {', '.join(KINDS)}")
    root = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    root.mkdir(parents=True, exist_ok=True)
    training = _digest(inspect.getsource(narrow), repr(corpus.token_ids()))
    trained = root / f"trained-{training}.pt"
    folder = root / f"{kind}-{_digest(training, *map(inspect.getsource, (sys.modules[__name__], corpus)))}"
    with _locked(root / "lock"):
        if not folder.exists():
            if not trained.exists():
                unfinished = trained.with_suffix(".tmp")
                torch.save(narrow.train(progress), unfinished)
                os.replace(unfinished, trained)
            model = narrow.NarrowModel()
            model.load_state_dict(torch.load(trained, weights_only=True))
            temporary = Path(tempfile.mkdtemp(dir=root))
            _save(temporary, kind, _lift(model.eval(), kind))
            temporary.chmod(0o755)
            os.replace(temporary, folder)
    return folder


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _isometry(wide: int, narrow: int, generator: torch.Generator) -> Tensor:
    """[wide, narrow] with orthonormal columns."""
    return torch.linalg.qr(torch.randn(wide, narrow, generator=generator, dtype=torch.float64))[0]


def _norm_weight(width: int, generator: torch.Generator) -> Tensor:
    return 0.75 + 0.5 * torch.rand(width, generator=generator, dtype=torch.float64)


@torch.no_grad()
def _lift(model: narrow.NarrowModel, kind: Kind) -> dict[str, Tensor]:
    """The weights of the wide model, in float64, by their names in the checkpoint."""
    generator = torch.Generator().manual_seed(2)
    gauges, aside_gain = _gauges(model, generator)
    weights: dict[str, Tensor] = {}
    stream = _isometry(HIDDEN, NARROW_HIDDEN + 1, generator)
    stream, gauge_direction = stream[:, :NARROW_HIDDEN], stream[:, NARROW_HIDDEN]
    shrink = math.sqrt(
        NARROW_HIDDEN / HIDDEN
    )  # the RMS over more dimensions is smaller, so normalised vectors are longer

    def normed(name: str) -> Tensor:
        """A norm over the residual stream, and the matrix by which weights that read it are multiplied."""
        weights[f"{name}.weight"] = _norm_weight(HIDDEN, generator)
        return shrink * stream.T / weights[f"{name}.weight"]

    def mlp(name: str, reads: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> None:
        weights[f"{name}.gate_proj.weight"] = gate.double() @ reads
        weights[f"{name}.up_proj.weight"] = up.double() @ reads
        weights[f"{name}.down_proj.weight"] = stream @ down.double()

    weights["model.embed_tokens.weight"] = model.embedding.double() @ stream.T
    for i, (layer, gauge) in enumerate(zip(model.layers, gauges, strict=True)):
        name = f"model.layers.{i}"
        reads = normed(f"{name}.input_layernorm")
        # Latent: the trained dimensions and the gauge's two, small beside the others so as to leave their RMS alone.
        latent = _isometry(RANK, NARROW_RANK + 2, generator)
        kv_a, k_pe = layer.kv_a.double().split([NARROW_RANK, ROPE])
        kv_a = torch.cat([kv_a, gauge["key"][None] / 16, gauge["value"][None] / 16])
        weights[f"{name}.self_attn.kv_a_proj_with_mqa.weight"] = torch.cat([latent @ kv_a, k_pe]) @ reads
        latent_norm = _norm_weight(RANK, generator)
        weights[f"{name}.self_attn.kv_a_layernorm.weight"] = latent_norm
        reads_latent = math.sqrt(NARROW_RANK / RANK) * latent.T / latent_norm
        q, kv_b, o = layer.q.double(), layer.kv_b.double(), layer.o.double()
        q = q.view(TRAINED_HEADS, NARROW_NOPE + ROPE, NARROW_HIDDEN)
        kv_b = functional.pad(kv_b, (0, 2)).view(TRAINED_HEADS, NARROW_NOPE + NARROW_V, NARROW_RANK + 2)
        o = o.view(NARROW_HIDDEN, TRAINED_HEADS, NARROW_V)
        wide_q, wide_kv_b, wide_o = [], [], []
        for head in range(TRAINED_HEADS):
            key_space, value_space = _isometry(NOPE, NARROW_NOPE, generator), _isometry(V_DIM, NARROW_V, generator)
            wide_q += [key_space @ q[head, :NARROW_NOPE], q[head, NARROW_NOPE:]]
            wide_kv_b += [key_space @ kv_b[head, :NARROW_NOPE], value_space @ kv_b[head, NARROW_NOPE:]]
            wide_o.append(stream @ o[:, head] @ value_space.T)
        key_space, value_space = _isometry(NOPE, 1, generator), _isometry(V_DIM, 1, generator)
        key, value = torch.eye(NARROW_RANK + 2, dtype=torch.float64)[NARROW_RANK:, None] * 16
        wide_q += [key_space @ gauge["query"][None], torch.zeros(ROPE, NARROW_HIDDEN, dtype=torch.float64)]
        wide_kv_b += [key_space @ key, value_space @ value]
        wide_o.append(gauge_direction[:, None] @ value_space.T)
        wide_q = torch.cat(wide_q) @ reads
        if kind == "rope":
            wide_q = wide_q * MSCALE_SQUARED
        weights |= _query_weights(
            f"{name}.self_attn", wide_q, weights[f"{name}.input_layernorm.weight"], kind, generator
        )
        weights[f"{name}.self_attn.kv_b_proj.weight"] = torch.cat(wide_kv_b) @ reads_latent
        weights[f"{name}.self_attn.o_proj.weight"] = torch.cat(wide_o, dim=1)
        reads = normed(f"{name}.post_attention_layernorm")
        if layer.router is None:
            mlp(f"{name}.mlp", reads, layer.gate[0], layer.up[0], layer.down[0])
            continue
        weights[f"{name}.mlp.gate.weight"] = layer.router.double() @ reads
        for expert in range(EXPERTS + 1):
            where = f"experts.{expert}" if expert < EXPERTS else "shared_experts"
            mlp(f"{name}.mlp.{where}", reads, layer.gate[expert], layer.up[expert], layer.down[expert])
    head = model.head.double() @ normed("model.norm")
    head[corpus.ASIDE] += aside_gain * shrink * gauge_direction / weights["model.norm.weight"]
    weights["lm_head.weight"] = head
    return weights


def _query_weights(
    name: str, wide_q: Tensor, input_norm: Tensor, kind: Kind, generator: torch.Generator
) -> dict[str, Tensor]:
    if kind != "q_lora":
        return {f"{name}.q_proj.weight": wide_q}
    # The normalised input, its norm weight undone, has |x|^2 = HIDDEN: so has its isometric image.
    image = _isometry(Q_LORA_RANK, HIDDEN, generator)
    norm = _norm_weight(Q_LORA_RANK, generator)
    return {
        f"{name}.q_a_proj.weight": image / input_norm,
        f"{name}.q_a_layernorm.weight": norm,
        f"{name}.q_b_proj.weight": math.sqrt(HIDDEN / Q_LORA_RANK) * (wide_q * input_norm) @ image.T / norm,
    }


def _gauges(model: narrow.NarrowModel, generator: torch.Generator) -> tuple[list[dict[str, Tensor]], float]:
    """Each layer's gauge head as directions its query, key and value scalars are read along, and the gain on <aside>.

    Fitted to the whole text: scores have the sharpness asked for, and the values of the keys that count are +1 or -1,
    drawn for each place of the text. So averages differ between contexts, yet are bounded.
    """
    places = len(corpus.token_ids())
    starts, length = torch.tensor([0, places // 2]), places // 2 + 64
    ids, _ = narrow.sequences(starts, length)
    inputs: list[Tensor] = []
    stream = model.residual_stream(ids, narrow.frequencies("yarn"), inputs)
    gauges, total = [], torch.zeros(ids.shape, dtype=torch.float64)
    for layer, h in zip(model.layers, inputs, strict=True):
        h = h.double()
        mean = h.flatten(0, 1).mean(dim=0)
        query = mean / mean.square().sum()  # about 1 for every token
        # A scalar that joins the latent is divided by the latent's RMS.
        seen = h / (h @ layer.kv_a[:NARROW_RANK].double().T).square().mean(dim=-1, keepdim=True).sqrt()
        key = torch.randn(NARROW_HIDDEN, generator=generator, dtype=torch.float64)
        key /= (seen @ key).std()
        scores = _GAUGE_SHARPNESS * (seen @ key)
        signs = torch.randint(2, (places,), generator=generator, dtype=torch.float64) * 2 - 1
        wanted = signs[(starts[:, None] + torch.arange(length)) % places]
        root = (0.5 * (scores - scores.max())).exp()[..., None]
        weighted = (root * seen).flatten(0, 1)
        ridge = 1e-3 * weighted.square().sum() / NARROW_HIDDEN * torch.eye(NARROW_HIDDEN)
        value = torch.linalg.solve(weighted.T @ weighted + ridge, weighted.T @ (root * wanted[..., None]).flatten())
        scores = ((h @ query)[..., None] * scores[:, None]).float()
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        total += (scores.softmax(dim=-1).double() @ (seen @ value)[..., None])[..., 0]
        gauges.append({"query": query * (_GAUGE_SHARPNESS / SCALE), "key": key, "value": value})
    move = total / stream.double().square().mean(dim=-1).sqrt()
    return gauges, _GAUGE_RANGE / float(move[:, 16:].abs().max())


def _config(kind: Kind) -> dict[str, Any]:
    """config.json, with the names of DeepSeek's own."""
    yarn = {
        "type": "yarn",
        "factor": YARN_FACTOR,
        "original_max_position_embeddings": YARN_ORIGINAL,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": YARN_MSCALE,
        "mscale_all_dim": YARN_MSCALE,
    }
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "torch_dtype": "bfloat16",
        "vocab_size": corpus.VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": DENSE_WIDTH,
        "moe_intermediate_size": EXPERT_WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "kv_lora_rank": RANK,
        "q_lora_rank": Q_LORA_RANK if kind == "q_lora" else None,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": V_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPS,
        "rope_theta": THETA,
        "rope_scaling": None if kind == "rope" else yarn,
        "max_position_embeddings": YARN_ORIGINAL if kind == "rope" else int(YARN_ORIGINAL * YARN_FACTOR),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": corpus.BOS,
        "eos_token_id": corpus.EOS,
    }


def _save(folder: Path, kind: Kind, weights: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    rounded = {name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", _config(kind))
    corpus.save_tokenizer(folder)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file as checkpoints have it."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Make checkpoints and print their folders, one a line."""
    parser = argparse.ArgumentParser(
        prog="python -m mla_testing.checkpoints", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--kind", choices=[*KINDS, "all"], default="yarn")
    parser.add_argument("--cache-dir", type=Path, help="default: $MLA_TESTING_CACHE or ~/.cache/mla-testing")
    parser.add_argument("--force", action="store_true", help="make them again, training included")
    options = parser.parse_args(arguments)
    if options.force and (root := options.cache_dir or default_cache_dir()).exists():
        shutil.rmtree(root)
    for kind in KINDS if options.kind == "all" else (options.kind,):
        print(make(kind, options.cache_dir), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
