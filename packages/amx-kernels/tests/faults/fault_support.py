# SPDX-License-Identifier: Apache-2.0
"""What the fault tests share: calling the ops on the cases of mla_testing, and batches made of chosen numbers."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import amx_kernels
from mla_testing import bf16, cases, compare, reference, tolerances

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named since Python 3.13; this is Linux's value


def attend(data: Any, **replaced: Any) -> None:
    """Runs decode_attention_cpu or extend_attention_cpu on a built case; keywords replace its arguments."""
    names = ["out", "lse", "q_latent", "q_pe", "kv_cache", "block_table", "seq_lens"]
    decode = data.case.query_lens is None
    names += [] if decode else ["query_start_loc"]
    op = amx_kernels.decode_attention_cpu if decode else amx_kernels.extend_attention_cpu
    plan = replaced.pop("plan", None)
    scale = replaced.pop("scale", data.scale)
    op(*(replaced.get(name, getattr(data, name)) for name in names), scale, plan)


def attended(case: cases.AttentionCase) -> tuple[np.ndarray, np.ndarray]:
    """The case's out and lse, checked against float64."""
    data = case.build()
    attend(data)
    data.check()
    return data.out.copy(), data.lse.copy()


@dataclass
class Batch:
    """A batch of chosen numbers: queries [T, H, R + P] and the latent rows [keys, R + P] of each request, as bits."""

    queries: np.ndarray
    rows: Sequence[np.ndarray]
    rank: int
    query_lens: Sequence[int]
    scale: float
    block_size: int = 16

    def __post_init__(self) -> None:
        self.cache, self.table = cases.paged_cache(list(self.rows), self.block_size, width=self.queries.shape[2])
        self.seq_lens = np.array([len(r) for r in self.rows], np.int32)
        self.starts = np.concatenate([[0], np.cumsum(self.query_lens)]).astype(np.int32)

    def run(self) -> tuple[np.ndarray, np.ndarray]:
        """out [T, H, R] bits and lse [T, H] of extend_attention_cpu."""
        tokens, heads, _ = self.queries.shape
        out = np.full((tokens, heads, self.rank), bf16.NAN)
        lse = np.full((tokens, heads), np.nan, np.float32)
        amx_kernels.extend_attention_cpu(
            out, lse, self.queries[..., : self.rank], self.queries[..., self.rank :],
            self.cache, self.table, self.seq_lens, self.starts, self.scale,
        )  # fmt: skip
        return out, lse

    def expected(self) -> reference.Attention:
        return reference.latent_attention_details(
            self.queries[..., : self.rank], self.queries[..., self.rank :],
            self.cache, self.table, self.seq_lens, self.starts, self.scale,
        )  # fmt: skip

    def check(self, what: str) -> None:
        out, lse = self.run()
        expected = self.expected()
        compare.assert_close(lse, expected.lse, tol=tolerances.lse(expected), what=f"{what} lse")
        compare.assert_close(out, expected.out, tol=tolerances.attention(expected), what=f"{what} out")


def normal(seed: int, *shape: int) -> np.ndarray:
    """Standard normal numbers as bfloat16 bits."""
    return bf16.from_float(np.random.default_rng(seed).standard_normal(shape, np.float32))


def lazily_mapped(elements: int, dtype: Any) -> np.ndarray:
    """A zeroed array of which only touched pages take memory."""
    size = elements * np.dtype(dtype).itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype)
