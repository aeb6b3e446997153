# SPDX-License-Identifier: Apache-2.0
"""Where memory is and where it ends.

Offsets that 32 bits cannot hold: rows, heads and tokens billions of elements apart, in lazily mapped memory of which
only the touched pages exist (block, token and matrix strides and slots: faults/test_fault_addressing.py). And arrays
that end where the next page is inaccessible: whoever reads or writes one byte too many does not survive it.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from dataclasses import replace

import numpy as np
import pytest
from calls import attend, plan_of
from numpy.lib.stride_tricks import as_strided

import amx_kernels
from mla_testing import bf16
from mla_testing.cases import AttentionCase

FAR = 2**31 + 64  # elements
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named since Python 3.13; this is Linux's value

CASE = AttentionCase(3, (40, 17), query_lens=(2, 1), block_size=16)


def spread(array: np.ndarray, dim: int) -> np.ndarray:
    """A copy in which this dimension's stride is FAR and the others are as they would be without it."""
    order = [d for d in range(array.ndim) if d != dim]
    strides = [0] * array.ndim
    step = array.itemsize
    for d in reversed(order):
        strides[d] = step
        step *= array.shape[d]
    strides[dim] = FAR * array.itemsize
    size = strides[dim] * (array.shape[dim] - 1) + math.prod(array.shape[d] for d in order) * array.itemsize
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    view = as_strided(np.frombuffer(memory, array.dtype), array.shape, strides)
    view[...] = array
    return view


@pytest.mark.parametrize(
    ("name", "dim"),
    [("kv_cache", 1), ("kv_cache", 0), ("q_latent", 1), ("q_pe", 1), ("out", 1), ("out", 0), ("block_table", 1)],
    ids=lambda value: str(value),
)
def test_attention(tier, name, dim):
    data = CASE.build()
    far = replace(data, **{name: spread(getattr(data, name), dim)})
    attend(far)
    data.check(out=far.out)
    assert (far.out is data.out) or np.isin(data.out, (bf16.NAN,)).all()


@pytest.mark.parametrize(("name", "dim"), [("mat1", 1), ("mat2", 1), ("out", 1)], ids=lambda value: str(value))
def test_bmm_rows(tier, name, dim):
    rng = np.random.default_rng(1)
    arrays = {"out": np.full((2, 5, 20), bf16.NAN)}
    arrays |= {key: bf16.from_float(rng.standard_normal((2, n, 64))) for key, n in (("mat1", 5), ("mat2", 20))}
    expected = arrays["out"].copy()
    amx_kernels.bmm_cpu(expected, arrays["mat1"], arrays["mat2"], False)
    arrays[name] = spread(arrays[name], dim)
    amx_kernels.bmm_cpu(arrays["out"], arrays["mat1"], arrays["mat2"], False)
    np.testing.assert_array_equal(arrays["out"], expected)


def test_packing_rows(tier):
    weight = bf16.from_float(np.random.default_rng(1).standard_normal((1, 20, 64)))
    np.testing.assert_array_equal(
        amx_kernels.convert_weight_packed(spread(weight, 1)), amx_kernels.convert_weight_packed(weight)
    )


@pytest.mark.parametrize("name", ["kv_c", "k_pe", "kv_cache", "slot_mapping"])
def test_concat(name):
    rng = np.random.default_rng(1)
    kv_c, k_pe = (bf16.from_float(rng.standard_normal((3, width))) for width in (512, 64))
    arrays = {
        "kv_c": kv_c,
        "k_pe": k_pe,
        "kv_cache": np.zeros((2, 4, 576), np.uint16),
        "slot_mapping": np.array([7, 0, 2]),
    }
    arrays[name] = spread(arrays[name], 1 if name == "kv_cache" else 0)
    amx_kernels.concat_and_cache_mla_cpu(*arrays.values())
    expected = np.zeros((2, 4, 576), np.uint16)
    expected.reshape(8, 576)[[7, 0, 2]] = np.concatenate([kv_c, k_pe], axis=1)
    np.testing.assert_array_equal(arrays["kv_cache"], expected)


def at_page_end(array: np.ndarray) -> np.ndarray:
    """A contiguous copy followed immediately by a page that may not be touched."""
    pages = -(-max(array.nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    protect = libc.mprotect(ctypes.c_void_p(start + pages), ctypes.c_size_t(mmap.PAGESIZE), 0)
    assert protect == 0, ctypes.get_errno()
    copy = np.frombuffer(memory, array.dtype, array.size, pages - array.nbytes).reshape(array.shape)
    copy[...] = array
    return copy


_BOUNDED = (
    AttentionCase(3, (40, 17), query_lens=(2, 1), block_size=16, fused_q=False),
    AttentionCase(16, (64, 300), block_size=32, fused_q=False, index_dtype="int64"),
    AttentionCase(22, (20,), block_size=1, fused_q=False),
    AttentionCase(5, (33, 270), query_lens=(33, 2), block_size=48, fused_q=False, rank=33, rope=7),
    AttentionCase(16, (40,), block_size=16, fused_q=False, rank=512, rope=0),
)


@pytest.mark.parametrize("case", _BOUNDED, ids=lambda case: case.id)
def test_attention_keeps_inside_its_arrays(tier, case):
    """The last live block is the cache's last, so that the last key is followed by nothing."""
    data = case.build()
    names = ("out", "lse", "q_latent", "q_pe", "block_table", "seq_lens", "query_start_loc")
    bounded = {name: at_page_end(getattr(data, name)) for name in names}
    live = int(
        max(row[: -(-n // case.block_size)].max() for row, n in zip(data.block_table, case.seq_lens, strict=True))
    )
    rows = data.kv_cache[: live + 1].reshape(-1, data.kv_cache.shape[2])
    cache = at_page_end(rows).reshape(live + 1, case.block_size, -1)
    attend(replace(data, kv_cache=cache, **bounded), plan=at_page_end(plan_of(data)))
    data.lse[...] = bounded["lse"]
    data.check(out=bounded["out"])


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 16, 32), (17, 33, 70), (64, 130, 1), (5, 15, 31)])
def test_bmm_keeps_inside_its_arrays(tier, packed, rows, columns, depth):
    rng = np.random.default_rng(2)
    mat1, weight = (bf16.from_float(rng.standard_normal((2, n, depth))) for n in (rows, columns))
    out = np.full((2, rows, columns), bf16.NAN)
    bounded = at_page_end(weight)
    weight_form = at_page_end(amx_kernels.convert_weight_packed(bounded)) if packed else bounded
    bounded_out = at_page_end(out)
    amx_kernels.bmm_cpu(bounded_out, at_page_end(mat1), weight_form, packed, at_page_end(np.ones(2, np.float32)))
    amx_kernels.bmm_cpu(out, mat1, weight, False)
    np.testing.assert_array_equal(bounded_out, out)


def test_concat_keeps_inside_its_arrays():
    rng = np.random.default_rng(1)
    kv_c, k_pe = (at_page_end(bf16.from_float(rng.standard_normal((3, width)))) for width in (512, 64))
    cache = at_page_end(np.zeros((2, 4, 576), np.uint16))
    amx_kernels.concat_and_cache_mla_cpu(kv_c, k_pe, cache, at_page_end(np.array([7, 0, 2])))
    np.testing.assert_array_equal(cache[1, 3], np.concatenate([kv_c[0], k_pe[0]]))
