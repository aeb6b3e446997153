# SPDX-License-Identifier: Apache-2.0
"""Packed weights: nothing lost, nothing written beyond them, and never mistaken for plain ones."""

from __future__ import annotations

import numpy as np
import pytest
from fault_support import normal

import amx_kernels
from amx_kernels import isa
from mla_testing import bf16, cases

fault = pytest.mark.fault

SHAPES = ((1, 1), (2, 3), (4, 4), (15, 16), (16, 31), (17, 32), (32, 33), (33, 1), (48, 66), (128, 100), (512, 128))


def ids(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


@fault(10, "https://github.com/ggml-org/llama.cpp/issues/25837")
@pytest.mark.parametrize("shape", SHAPES, ids=ids)
def test_unpacking_gives_back_every_weight(tier: str, shape: tuple[int, int]) -> None:
    """The identity times a packed weight is the weight, bit for bit: no row, column or batch is lost or mixed."""
    columns, depth = shape
    weight = normal(columns + depth, 3, columns, depth)
    packed = amx_kernels.convert_weight_packed(weight)
    identity = np.broadcast_to(bf16.from_float(np.eye(depth, dtype=np.float32)), (3, depth, depth))
    out = np.full((3, depth, columns), bf16.NAN)
    amx_kernels.bmm_cpu(out, identity, packed, True)
    assert np.array_equal(out, weight.transpose(0, 2, 1))


@fault(10, "https://github.com/ggml-org/llama.cpp/issues/25837", refused=True)
@pytest.mark.parametrize("shape", [(2, 4, 0), (4, 4), (1, 2, 3, 4)], ids=ids)
def test_what_cannot_be_packed_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="weight"):
        amx_kernels.convert_weight_packed(np.zeros(shape, np.uint16))


def test_packed_form_is_the_same_on_every_tier(tier: str) -> None:
    """A model packed once may be served by another tier."""
    weight = normal(3, 2, 50, 70)
    packed = amx_kernels.convert_weight_packed(weight)
    with isa.using("portable"):
        assert np.array_equal(packed, amx_kernels.convert_weight_packed(weight))


@fault(11, "https://github.com/uxlfoundation/oneDNN/issues/2414")
@pytest.mark.parametrize("shape", [(4, 4), (16, 4), (32, 33), (1, 1), (17, 65)], ids=ids)
def test_packing_writes_only_its_own_bytes(tier: str, shape: tuple[int, int]) -> None:
    from amx_kernels import _core

    weight = normal(5, 2, *shape)
    sizes = _core.packed_sizes(weight)
    total = int(np.prod(sizes))
    memory = np.full(64 + total + 4096, bf16.CANARY)
    _core.convert_weight_packed(memory[64 : 64 + total].reshape(sizes), weight)
    assert (memory[:64] == bf16.CANARY).all()
    assert (memory[64 + total :] == bf16.CANARY).all()


@fault(75, "https://github.com/pytorch/pytorch/issues/156022")
@pytest.mark.parametrize("padding", [1, 24])
@pytest.mark.parametrize("transposed", [False, True], ids=["batch-first", "rows-first"])
def test_products_write_only_their_rows(tier: str, padding: int, transposed: bool) -> None:
    for rows, columns, depth in ((1, 1, 2), (3, 17, 30), (16, 16, 32), (17, 40, 64), (70, 130, 100)):
        data = cases.BmmCase(2, rows, columns, depth, transposed=transposed, out_padding=padding).build()
        amx_kernels.bmm_cpu(data.out, data.mat1, data.mat2, False)
        data.check()
        data.out[...] = bf16.NAN
        amx_kernels.bmm_cpu(data.out, data.mat1, amx_kernels.convert_weight_packed(data.mat2), True)
        data.check()


@fault(1, "https://github.com/vllm-project/vllm/pull/56773", refused=True)
def test_a_packed_weight_is_never_read_as_plain_nor_a_plain_one_as_packed() -> None:
    weight = normal(7, 2, 32, 64)
    packed = amx_kernels.convert_weight_packed(weight)
    out, rows = np.zeros((2, 5, 32), np.uint16), normal(8, 2, 5, 64)
    with pytest.raises(ValueError, match="mat2 has 4 dimensions, expected 3"):
        amx_kernels.bmm_cpu(out, rows, packed, False)
    with pytest.raises(ValueError, match="mat2 has 3 dimensions, expected 4"):
        amx_kernels.bmm_cpu(out, rows, weight, True)
