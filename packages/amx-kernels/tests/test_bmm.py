# SPDX-License-Identifier: Apache-2.0
"""bmm_cpu and convert_weight_packed against float64: tails in every dimension, strides, scales, both weight forms."""

from __future__ import annotations

import numpy as np
import pytest

import amx_kernels
from amx_kernels import _core, isa
from mla_testing import bf16, cases, compare, reference, tolerances

FORMS = pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """bfloat16 bits of standard normal values, none of them zero."""
    values = np.random.default_rng((seed, *shape)).standard_normal(shape, np.float32)
    return bf16.from_float(np.where(np.abs(values) < 1e-3, np.float32(0.5), values))


def weight_as(weight: np.ndarray, packed: bool) -> np.ndarray:
    return amx_kernels.convert_weight_packed(weight) if packed else weight


def check(out: np.ndarray, mat1: np.ndarray, mat2: np.ndarray, what: str, scale: np.ndarray | float = 1.0) -> None:
    expected = reference.bmm(mat1, mat2) * np.reshape(scale, (-1, 1, 1))
    magnitude = float(np.max(np.abs(scale), initial=0.0))
    compare.assert_close(out, expected, tol=tolerances.gemm(mat1.shape[2], magnitude), what=what)


@pytest.mark.parametrize("case", cases.BMM, ids=lambda case: case.id)
@FORMS
def test_bmm(tier, case, packed):
    data = case.build()
    amx_kernels.bmm_cpu(data.out, data.mat1, weight_as(data.mat2, packed), packed)
    data.check()


@FORMS
@pytest.mark.parametrize("columns", [1, 15, 16, 17, 127, 128, 129, 145, 257])
@pytest.mark.parametrize("depth", [1, 2, 31, 32, 33, 64, 65])
def test_tails(tier, packed, depth, columns):
    """Every remainder of rows, columns and depth against whole tiles and whole blocks (64 rows, 128 columns)."""
    for rows in (1, 15, 16, 17, 63, 64, 65, 129):
        mat1, weight = normal(2, rows, depth), normal(2, columns, depth)
        out, buffer = cases.guarded((2, rows, columns), np.uint16, row_padding=5)
        amx_kernels.bmm_cpu(out, mat1, weight_as(weight, packed), packed)
        assert cases.canaries_intact(out, buffer)
        check(out, mat1, weight, f"m{rows}-k{depth}-o{columns}")


@FORMS
@pytest.mark.parametrize(
    "shape", [(0, 3, 16, 32), (2, 0, 16, 32), (2, 3, 0, 32)], ids=["no-batch", "no-rows", "no-columns"]
)
def test_nothing_to_do(tier, packed, shape):
    batch, rows, columns, depth = shape
    out = np.empty((batch, rows, columns), np.uint16)
    weight = weight_as(normal(batch, columns, depth), packed)
    amx_kernels.bmm_cpu(out, normal(batch, rows, depth), weight, packed)
    assert out.size == 0


@FORMS
@pytest.mark.parametrize("form", ["scalar", "one", "each"])
def test_scale(tier, packed, form):
    mat1, weight = normal(3, 20, 100), normal(3, 40, 100)
    scale = {"scalar": np.array(0.25), "one": np.array([-3.0]), "each": np.array([0.0, 1e-3, 7.0])}[form]
    out = np.full((3, 20, 40), bf16.NAN)
    amx_kernels.bmm_cpu(out, mat1, weight_as(weight, packed), packed, scale.astype(np.float32))
    for n in range(3):
        own = scale.reshape(-1)[n % scale.size].astype(np.float32)
        check(out[n : n + 1], mat1[n : n + 1], weight[n : n + 1], f"matrix {n}", float(own))


@FORMS
@pytest.mark.parametrize("gap", [1, 2, 33, 576])
def test_row_strides(tier, packed, gap):
    """Rows with gaps in all three operands; what lies in the gaps is NaN and stays there."""
    rows, depth, columns = 35, 72, 50
    values, weight = normal(2, rows, depth), normal(2, columns, depth)

    def gapped(array):
        wide = np.full((*array.shape[:2], array.shape[2] + gap), bf16.NAN)
        wide[..., : array.shape[2]] = array
        return wide[..., : array.shape[2]]

    out, buffer = cases.guarded((2, rows, columns), np.uint16, row_padding=gap)
    amx_kernels.bmm_cpu(out, gapped(values), weight_as(gapped(weight), packed), packed)
    assert cases.canaries_intact(out, buffer)
    check(out, values, weight, f"gap {gap}")


@FORMS
def test_several_blocks_of_rows_and_of_columns(tier, packed):
    """Tokens first in memory, heads first to the op, rows 2048 elements apart as in a model of 32 heads of 64."""
    tokens, heads, depth, columns = 150, 32, 64, 300
    mat1 = normal(tokens, heads, depth).transpose(1, 0, 2)[::11]
    assert mat1.strides[1] == 4096
    weight = normal(len(mat1), columns, depth)
    out = np.full((len(mat1), tokens, columns), bf16.NAN)
    amx_kernels.bmm_cpu(out, mat1, weight_as(weight, packed), packed)
    check(out, mat1, weight, "several blocks")


@FORMS
def test_one_matrix_for_the_whole_batch(tier, packed):
    """A batch stride of 0 in mat1 (expand)."""
    one, weight = normal(1, 9, 64), normal(4, 30, 64)
    mat1 = np.broadcast_to(one, (4, 9, 64))
    out = np.full((4, 9, 30), bf16.NAN)
    amx_kernels.bmm_cpu(out, mat1, weight_as(weight, packed), packed)
    check(out, mat1, weight, "expanded mat1")


@FORMS
def test_reversed_rows(tier, packed):
    """A negative row stride is a stride."""
    mat1, weight = normal(2, 21, 48), normal(2, 33, 48)
    out = np.full((2, 21, 33), bf16.NAN)
    amx_kernels.bmm_cpu(out[:, ::-1], mat1[:, ::-1], weight_as(weight, packed), packed)
    check(out, mat1, weight, "reversed rows")


@FORMS
@pytest.mark.parametrize("poison", [bf16.NAN, bf16.INF], ids=["nan", "inf"])
def test_rows_and_columns_stay_alone(tier, packed, poison):
    """A poisoned row of mat1 and a poisoned row of the weight reach their own results only."""
    mat1, weight = normal(2, 19, 70), normal(2, 37, 70)
    clean = np.empty((2, 19, 37), np.uint16)
    amx_kernels.bmm_cpu(clean, mat1, weight_as(weight, packed), packed)
    mat1[0, 17], weight[1, 36] = poison, poison
    out = np.empty_like(clean)
    amx_kernels.bmm_cpu(out, mat1, weight_as(weight, packed), packed)
    touched = np.zeros(out.shape, bool)
    touched[0, 17], touched[1, :, 36] = True, True
    np.testing.assert_array_equal(out[~touched], clean[~touched])
    assert not np.isfinite(bf16.to_float32(out[touched])).any()


@FORMS
def test_large_and_tiny_values(tier, packed):
    """Sums that overflow become infinite, sums of the smallest normal numbers keep their precision."""
    mat1, weight = normal(1, 17, 64), normal(1, 16, 64)
    huge, small = bf16.from_float(np.float32(2.0**120)), bf16.from_float(np.float32(2.0**-60))
    out = np.empty((1, 17, 16), np.uint16)
    same = np.full_like(mat1, huge), np.full_like(weight, huge)
    amx_kernels.bmm_cpu(out, same[0], weight_as(same[1], packed), packed)
    assert (out == bf16.INF).all()
    tiny = np.full_like(mat1, small), np.full_like(weight, small)
    amx_kernels.bmm_cpu(out, tiny[0], weight_as(tiny[1], packed), packed)
    assert (bf16.to_float64(out) == 64 * 2.0**-120).all()


_PACK_COLUMNS, _PACK_DEPTHS = (1, 2, 15, 16, 17, 33, 48), (1, 2, 3, 31, 32, 33, 64, 95)


@pytest.mark.parametrize("depth", _PACK_DEPTHS)
def test_packing_keeps_every_weight(tier, depth):
    """Identity times packed is the weight, bit for bit; padding is zero; nothing outside is written."""
    for columns in _PACK_COLUMNS:
        weight = normal(3, columns, depth)
        sizes = _core.packed_sizes(weight)
        assert sizes == (3, -(-columns // 16), -(-depth // 32) * 16, 32)
        count = int(np.prod(sizes))
        memory = np.full(64 + count + 64, bf16.CANARY)
        packed = memory[64 : 64 + count].reshape(sizes)
        _core.convert_weight_packed(packed, weight)
        assert (memory[:64] == bf16.CANARY).all() and (memory[64 + count :] == bf16.CANARY).all()
        np.testing.assert_array_equal(np.sort(packed[packed != 0]), np.sort(weight.reshape(-1)))
        identity = np.broadcast_to(bf16.from_float(np.eye(depth, dtype=np.float32)), (3, depth, depth))
        out = np.full((3, depth, columns), bf16.NAN)
        amx_kernels.bmm_cpu(out, identity, packed, True)
        np.testing.assert_array_equal(out, weight.transpose(0, 2, 1))


@pytest.mark.parametrize("row_stride", [71, 72, 96])
def test_packing_a_strided_weight(tier, row_stride):
    """Heads of a kv_b_proj weight are views with gaps between rows and batches."""
    whole = np.full((3, 40, row_stride), bf16.NAN)
    weight = whole[:, 3:37, :70]
    weight[...] = normal(3, 34, 70)
    np.testing.assert_array_equal(
        amx_kernels.convert_weight_packed(weight), amx_kernels.convert_weight_packed(weight.copy())
    )


def test_packed_form_is_the_same_on_every_tier(tier):
    """A model packed once may be served by another tier."""
    weight = normal(2, 50, 70)
    packed = amx_kernels.convert_weight_packed(weight)
    with isa.using("portable"):
        np.testing.assert_array_equal(packed, amx_kernels.convert_weight_packed(weight))


def test_empty_weights_pack_to_nothing(tier):
    assert amx_kernels.convert_weight_packed(np.empty((0, 16, 32), np.uint16)).shape == (0, 1, 16, 32)
    assert amx_kernels.convert_weight_packed(np.empty((2, 0, 32), np.uint16)).shape == (2, 0, 16, 32)
