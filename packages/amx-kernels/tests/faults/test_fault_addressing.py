# SPDX-License-Identifier: Apache-2.0
"""Offsets beyond 2^31 elements and bytes, in memory that is mapped lazily: only the touched pages exist."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fault_support import attended, lazily_mapped, normal
from numpy.lib.stride_tricks import as_strided

import amx_kernels
from mla_testing import bf16
from mla_testing.cases import AttentionCase

fault = pytest.mark.fault

CASE = AttentionCase(3, (40, 17), query_lens=(2, 1), block_size=16, rank=512, rope=64)


def far(array: np.ndarray, stride: int, first: int = 0) -> np.ndarray:
    """A copy whose first dimension has this stride, in elements, starting at the element `first`."""
    inner = array[0].size
    memory = lazily_mapped(first + stride * (len(array) - 1) + inner, array.dtype)
    strides = (stride * array.itemsize, *np.ascontiguousarray(array[0]).strides)
    view = as_strided(memory[first:], array.shape, strides)
    view[...] = array
    return view


@fault(43, "https://github.com/vllm-project/vllm-xpu-kernels/pull/445")
@fault(44, "https://github.com/sgl-project/sglang/pull/36541")
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_blocks_beyond_two_to_the_31_elements(tier: str, dtype: str) -> None:
    """Block stride 1,039,680 elements, the highest block 2066; the indices' type has no part in the arithmetic."""
    plain, plain_lse = attended(CASE)
    data = CASE.build()
    stride, top = 1_039_680, 2066
    assert stride * top > 2**31
    memory = lazily_mapped(stride * (top + 1), np.uint16)
    cache = as_strided(memory, (top + 1, 16, 576), (stride * 2, 576 * 2, 2))
    used = sorted({int(b) for row, n in zip(data.block_table, data.seq_lens, strict=True) for b in row[: -(-n // 16)]})
    moved = {block: top - i for i, block in enumerate(used)}
    for block, place in moved.items():
        cache[place] = data.kv_cache[block]
    table = np.array([[moved.get(int(b), -1) for b in row] for row in data.block_table], dtype)
    out, lse = np.full_like(plain, bf16.NAN), np.full_like(plain_lse, np.nan)
    amx_kernels.extend_attention_cpu(
        out, lse, data.q_latent, data.q_pe, cache, table, data.seq_lens.astype(dtype),
        data.query_start_loc.astype(dtype), data.scale,
    )  # fmt: skip
    assert np.array_equal(out, plain)
    assert np.array_equal(lse, plain_lse)


@fault("P1", "extend with 32-bit strides wraps at token 29,128 for 128 heads")
@pytest.mark.parametrize("which", ["q_latent", "q_pe", "out", "lse", "all"])
def test_token_strides_beyond_two_to_the_31_bytes(tier: str, which: str) -> None:
    plain, plain_lse = attended(CASE)
    data = CASE.build()
    arrays: dict[str, Any] = {"out": np.full_like(plain, bf16.NAN), "lse": np.full_like(plain_lse, np.nan)}
    arrays |= {"q_latent": data.q_latent, "q_pe": data.q_pe}
    for name in arrays:
        if which in (name, "all"):
            arrays[name] = far(arrays[name], 2**31 + 64)
    amx_kernels.extend_attention_cpu(
        *arrays.values(), data.kv_cache, data.block_table, data.seq_lens, data.query_start_loc, data.scale
    )
    assert np.array_equal(arrays["out"], plain)
    assert np.array_equal(arrays["lse"], plain_lse)


@fault(44, "https://github.com/sgl-project/sglang/pull/36541")
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_slots_beyond_two_to_the_31_elements(dtype: str) -> None:
    """Slot 3,728,272 of 576-wide rows lies past element 2^31."""
    blocks = 3_728_300 // 16
    cache = lazily_mapped(blocks * 16 * 576, np.uint16).reshape(blocks, 16, 576)
    slots = np.array([3_728_272, 0, 3_728_281], dtype)
    kv_c, k_pe = normal(1, 3, 512), normal(2, 3, 64)
    amx_kernels.concat_and_cache_mla_cpu(kv_c, k_pe, cache, slots)
    for t, slot in enumerate(slots.tolist()):
        assert np.array_equal(cache[slot // 16, slot % 16], np.concatenate([kv_c[t], k_pe[t]]))
    assert not cache[slots[0] // 16, 15].any()


@pytest.mark.parametrize("which", ["out", "mat1", "mat2"])
def test_matrix_strides_beyond_two_to_the_31_bytes(tier: str, which: str) -> None:
    arrays = {"out": np.full((2, 5, 40), bf16.NAN), "mat1": normal(1, 2, 5, 64), "mat2": normal(2, 2, 40, 64)}
    plain = arrays["out"].copy()
    amx_kernels.bmm_cpu(plain, arrays["mat1"], arrays["mat2"], False)
    arrays[which] = far(arrays[which], 2**31 + 64)
    amx_kernels.bmm_cpu(arrays["out"], arrays["mat1"], arrays["mat2"], False)
    assert np.array_equal(arrays["out"], plain)
