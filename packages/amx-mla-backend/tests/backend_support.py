# SPDX-License-Identifier: Apache-2.0
"""Doubles and small batches of latent attention with their float64 answers, for the unit tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from mla_testing import bf16, cases, reference, tolerances
from mla_testing.compare import assert_close

DIMS = SimpleNamespace(heads=4, nope=128, v_dim=128, rank=512, rope=64)


class Linear(torch.nn.Module):
    """What the backend reads of kv_b_proj: a weight and how it is quantised."""

    def __init__(self, weight: torch.Tensor, quant_method: Any = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.quant_method = quant_method


def make_impl(weight: torch.Tensor, dims: SimpleNamespace = DIMS, **overrides: Any) -> Any:
    """An impl as MLAAttention builds it; its weights still have to be processed."""
    from amx_mla_backend.impl import AMXMLAImpl

    arguments = {
        "num_heads": dims.heads,
        "head_size": dims.rank + dims.rope,
        "scale": (dims.nope + dims.rope) ** -0.5,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        "logits_soft_cap": None,
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
        "q_lora_rank": None,
        "kv_lora_rank": dims.rank,
        "qk_nope_head_dim": dims.nope,
        "qk_rope_head_dim": dims.rope,
        "qk_head_dim": dims.nope + dims.rope,
        "v_head_dim": dims.v_dim,
        "kv_b_proj": Linear(weight),
    }
    return AMXMLAImpl(**(arguments | overrides))


def random_weight(dims: SimpleNamespace = DIMS, seed: int = 0) -> torch.Tensor:
    """A kv_b_proj weight [H * (nope + v), R], bf16, scaled so that outputs have the size of their inputs."""
    generator = torch.Generator().manual_seed(seed)
    rows = dims.heads * (dims.nope + dims.v_dim)
    return (torch.randn(rows, dims.rank, generator=generator) * dims.rank**-0.5).to(torch.bfloat16)


@dataclass
class Batch:
    """A step of ragged requests, decodes first: (context, new tokens) pairs over one paged cache."""

    requests: list[tuple[int, int]]
    dims: SimpleNamespace = field(default_factory=lambda: DIMS)
    block_size: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        width = self.dims.rank + self.dims.rope
        rows = [bf16.from_float(rng.standard_normal((c + n, width))) for c, n in self.requests]
        cache, table = cases.paged_cache(rows, self.block_size, width=width)
        self.cache, self.block_table = cases.as_torch(cache), torch.from_numpy(table)
        self.seq_lens = torch.tensor([c + n for c, n in self.requests], dtype=torch.int32)
        self.new = [n for _, n in self.requests]
        self.starts = torch.tensor([0, *np.cumsum(self.new)], dtype=torch.int32)
        self.tokens = sum(self.new)
        q = bf16.from_float(rng.standard_normal((self.tokens, self.dims.heads, self.dims.nope + self.dims.rope)))
        self.q = cases.as_torch(q)

    def common(self, **overrides: Any) -> Any:
        """The step as vLLM's builder interface describes it."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        arguments = {
            "query_start_loc": self.starts,
            "query_start_loc_cpu": self.starts,
            "seq_lens": self.seq_lens,
            "num_reqs": len(self.requests),
            "num_actual_tokens": self.tokens,
            "max_query_len": max(self.new, default=0),
            "max_seq_len": int(self.seq_lens.max()) if self.requests else 0,
            "block_table_tensor": self.block_table,
            "slot_mapping": torch.zeros(self.tokens, dtype=torch.int64),
        }
        return CommonAttentionMetadata(**(arguments | overrides))

    def check(self, output: torch.Tensor, weight: torch.Tensor, scale: float) -> None:
        """Compare output [T, H, v] with the float64 answer."""
        d = self.dims
        w_uk, w_uv = reference.split_kv_b(weight.float().numpy(), d.heads, d.nope, d.v_dim)
        q = self.q.float().numpy()
        expected = reference.mla_prefill_details(
            q[..., : d.nope],
            q[..., d.nope :],
            self.cache.view(torch.uint16).numpy(),
            self.block_table.numpy(),
            self.seq_lens.numpy(),
            self.starts.numpy(),
            w_uk,
            w_uv,
            scale,
        )
        assert_close(output, expected.out, tol=tolerances.prefill(expected), what="attention output")


def make_builder(dims: SimpleNamespace = DIMS, threshold: int = 1, decompressed: Any = None) -> Any:
    """A metadata builder without an engine: only what build() reads is set. decompressed: another rule of the form."""
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata

    from amx_mla_backend import kernels
    from amx_mla_backend.metadata import AMXMLAMetadataBuilder

    builder = object.__new__(AMXMLAMetadataBuilder)
    builder.num_heads = dims.heads
    builder.reorder_batch_threshold = threshold
    builder.q_data_type = torch.bfloat16
    builder.model_config = SimpleNamespace(dtype=torch.bfloat16, get_head_size=lambda: dims.rank + dims.rope)
    builder.metadata_cls = MLACommonMetadata
    library = kernels.load()
    builder._plan, builder._decompressed = library.ops.plan_attention, decompressed or library.decompressed
    return builder
