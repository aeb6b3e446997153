# SPDX-License-Identifier: Apache-2.0
"""Offsets that 32 bits cannot hold: rows, heads and tokens billions of elements apart, in lazily mapped memory.

Only the touched pages exist. Block, token and matrix strides and slots are in faults/test_fault_addressing.py.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import replace

import numpy as np
import pytest
from calls import attend
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
