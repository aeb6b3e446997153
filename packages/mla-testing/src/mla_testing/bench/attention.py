# SPDX-License-Identifier: Apache-2.0
"""Data and adapters shared by the attention benchmarks: one big paged cache from which every case takes its blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from mla_testing import compare, reference, tolerances
from mla_testing.bench.common import Entry, bits
from mla_testing.peers import AttentionCase

__all__ = [
    "BLOCK",
    "MAC_PER_KEY",
    "ROW_BYTES",
    "SCALE",
    "P",
    "Pool",
    "R",
    "attention_check",
    "our_attention",
    "peer_maker",
]

R, P = 512, 64
BLOCK = 128
ROW_BYTES = 2 * (R + P)
#: Multiply-accumulates per (query token, head, key): the score over R + P, the value over R.
MAC_PER_KEY = R + P + R
#: 1 / sqrt(nope + rope), as models of this shape have.
SCALE = (128 + P) ** -0.5


class Pool:
    """A cache of ``tokens`` rows in blocks of 128, filled once; cases share it, so that memory stays bounded."""

    def __init__(self, tokens: int) -> None:
        self.generator = torch.Generator().manual_seed(20240507)
        blocks = -(-tokens // BLOCK)
        self.cache = torch.empty(blocks, BLOCK, R + P, dtype=torch.bfloat16)
        # A stretch of random rows repeated: values matter to the check, not that they never recur.
        stretch = torch.empty(min(blocks, 256), BLOCK, R + P).normal_(generator=self.generator).bfloat16()
        for first in range(0, blocks, len(stretch)):
            self.cache[first : first + len(stretch)] = stretch[: blocks - first]

    def case(self, heads: int, seq_lens: Sequence[int], query_lens: Sequence[int]) -> AttentionCase:
        """Random queries over requests of the given lengths, blocks in random physical order."""
        counts = [-(-length // BLOCK) for length in seq_lens]
        if sum(counts) > len(self.cache):
            raise ValueError(f"seq_lens need {sum(counts)} blocks, expected at most {len(self.cache)}")
        order = torch.randperm(sum(counts), generator=self.generator).int()
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        first = 0
        for request, count in enumerate(counts):
            table[request, :count] = order[first : first + count]
            first += count
        tokens = sum(query_lens)
        query = torch.empty(tokens, heads, R + P).normal_(generator=self.generator).bfloat16()
        starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0).int()
        return AttentionCase(
            q_latent=query[..., :R].contiguous(),
            q_pe=query[..., R:].contiguous(),
            kv_cache=self.cache,
            block_table=table,
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            query_start_loc=starts,
            scale=SCALE,
        )


def attended_keys(seq_lens: Sequence[int], query_lens: Sequence[int]) -> int:
    """Pairs of (query token, key) under the causal mask, the new tokens being the last ones of each sequence."""
    return sum(new * length - new * (new - 1) // 2 for length, new in zip(seq_lens, query_lens, strict=True))


def attention_check(case: AttentionCase, requests: Sequence[int] | None = None) -> Callable[[Any], dict[str, Any]]:
    """A function that compares an output [T, H, R] with the float64 reference, computed at its first use.

    Args:
        case: the inputs.
        requests: those to compare; None: all.
    """

    @lru_cache(maxsize=1)
    def expected() -> tuple[np.ndarray, reference.Attention]:
        chosen = range(len(case.seq_lens)) if requests is None else requests
        starts = case.query_start_loc.tolist()
        tokens = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in chosen])
        lengths = [starts[i + 1] - starts[i] for i in chosen]
        details = reference.latent_attention_details(
            bits(case.q_latent)[tokens],
            bits(case.q_pe)[tokens],
            bits(case.kv_cache),
            case.block_table.numpy()[list(chosen)],
            case.seq_lens.numpy()[list(chosen)],
            np.cumsum([0, *lengths]),
            case.scale,
        )
        return tokens, details

    def check(actual: torch.Tensor) -> dict[str, Any]:
        tokens, details = expected()
        found = compare.assert_close(
            actual[torch.from_numpy(tokens)], details.out, tol=tolerances.attention(details), what="attention output"
        )
        return {"max_abs": found.max_abs, "of_tolerance": found.worst_ratio, "tokens": len(tokens)}

    return check


def peer_maker(name: str, adapter: Callable[..., Any], case: Any) -> Callable[[int], Entry]:
    """A function of the thread count that builds a peer for ``case``."""

    def make(threads: int) -> Entry:
        peer = adapter(case, threads)
        return Entry(name, peer, lambda: peer.out)

    return make


def our_attention(case: AttentionCase, tier: str, threads: int, *, decode: bool) -> Entry:
    """Our decode or extend operator with its plan made beforehand, as a serving step does once for all layers."""
    from amx_kernels import isa

    ops = torch.ops.amx_kernels
    isa.set(tier)
    tokens, heads, _ = case.q_latent.shape
    starts = None if decode else case.query_start_loc
    plan = ops.plan_attention(case.seq_lens, starts, tokens, heads, threads)
    out = torch.empty_like(case.q_latent)
    common = (out, None, case.q_latent, case.q_pe, case.kv_cache, case.block_table, case.seq_lens)
    if decode:

        def call() -> None:
            ops.decode_attention_cpu(*common, case.scale, plan)
    else:

        def call() -> None:
            ops.extend_attention_cpu(*common, case.query_start_loc, case.scale, plan)

    return Entry(f"ours:{tier}", call, lambda: out, lambda: isa.set(tier))
