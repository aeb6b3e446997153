# SPDX-License-Identifier: Apache-2.0
"""Calling the ops on the arrays of ``mla_testing.cases``, from NumPy or from torch."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

import amx_kernels
from mla_testing.cases import AttentionData


def torch_ops() -> Any:
    """``torch.ops.amx_kernels``; skips the test where torch is not installed."""
    torch = pytest.importorskip("torch")
    importlib.import_module("amx_kernels.torch")
    return torch.ops.amx_kernels


def plan_of(data: AttentionData, *, op: str | None = None, num_threads: int | None = None) -> Any:
    """The plan for one call of ``attend`` with the same ``op``."""
    decode = op == "decode" if op else data.case.query_lens is None
    tokens = data.live_tokens if decode else len(data.q_latent)
    start = None if decode else data.query_start_loc
    return amx_kernels.plan_attention(data.seq_lens, start, tokens, data.case.heads, num_threads)


def attend(
    data: Any,
    *,
    ops: Any = amx_kernels,
    op: str | None = None,
    out: Any = None,
    lse: Any = "own",
    plan: Any = None,
    scale: float | None = None,
) -> None:
    """One call of decode_attention_cpu or extend_attention_cpu.

    Args:
        data: of NumPy arrays or, with ``ops=torch.ops.amx_kernels``, of tensors.
        op: "decode" or "extend"; None: as the case's query lengths say. Decode divides all tokens it is given among the
            requests, so padding tokens are cut off for it.
        out, lse: used instead of the case's own; lse None: not wanted.
    """
    case = data.case
    decode = op == "decode" if op else case.query_lens is None
    out = data.out if out is None else out
    lse = data.lse if isinstance(lse, str) else lse
    scale = data.scale if scale is None else scale
    queries = (data.q_latent, data.q_pe)
    if decode:
        live = case.tokens - case.extra_tokens
        out, lse, queries = out[:live], None if lse is None else lse[:live], tuple(q[:live] for q in queries)
        ops.decode_attention_cpu(out, lse, *queries, data.kv_cache, data.block_table, data.seq_lens, scale, plan)
    else:
        ops.extend_attention_cpu(
            out, lse, *queries, data.kv_cache, data.block_table, data.seq_lens, data.query_start_loc, scale, plan
        )
