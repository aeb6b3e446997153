# SPDX-License-Identifier: Apache-2.0
"""The promise of invariance: a request's bits depend on its own lengths and data, on nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from calls import attend, plan_of, torch_ops

import amx_kernels
from mla_testing import bf16, cases
from mla_testing.cases import AttentionCase, AttentionData

DECODE = AttentionCase(16, (1, 33, 0, 257, 1025, 700, 64, 2000), block_size=32)
FEW_HEADS = AttentionCase(3, (1500, 40, 900), block_size=16)
MANY_HEADS = AttentionCase(128, (600, 5, 1100), block_size=64)
EXTEND = AttentionCase(16, (40, 600, 1, 1300, 0), query_lens=(40, 17, 1, 2, 0), block_size=16)
CASES = pytest.mark.parametrize("case", [DECODE, FEW_HEADS, MANY_HEADS, EXTEND], ids=lambda case: case.id)


def result(data: AttentionData, **arguments) -> tuple[np.ndarray, np.ndarray]:
    """out and lse of one call into fresh memory."""
    out, lse = np.full(data.out.shape, bf16.NAN), np.full(data.lse.shape, np.nan, np.float32)
    attend(data, out=out, lse=lse, **arguments)
    return out, lse


def assert_same_bits(actual: tuple[np.ndarray, ...], expected: tuple[np.ndarray, ...]) -> None:
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


def chosen(data: AttentionData, requests: list[int]) -> tuple[AttentionData, np.ndarray]:
    """The batch of these requests of ``data`` in this order, and the indices of their tokens in ``data``."""
    starts = data.query_start_loc.tolist()
    tokens = np.concatenate([np.arange(starts[r], starts[r + 1]) for r in requests]).astype(int)
    lens = [starts[r + 1] - starts[r] for r in requests]
    lens_of_case = None if data.case.query_lens is None else tuple(lens)
    case = replace(data.case, seq_lens=tuple(data.case.seq_lens[r] for r in requests), query_lens=lens_of_case)
    return (
        replace(
            data,
            case=case,
            out=data.out[tokens],
            lse=data.lse[tokens],
            q_latent=data.q_latent[tokens],
            q_pe=data.q_pe[tokens],
            block_table=data.block_table[requests],
            seq_lens=data.seq_lens[requests],
            query_start_loc=np.concatenate([[0], np.cumsum(lens)]).astype(data.query_start_loc.dtype),
        ),
        tokens,
    )


@CASES
def test_threads(tier, threads, case):
    """More threads than items, than cores, and counts that cut the work elsewhere."""
    data = case.build()
    amx_kernels.set_num_threads(1)
    expected = result(data)
    for count in (2, 3, 7):
        amx_kernels.set_num_threads(count)
        assert_same_bits(result(data), expected)


@CASES
def test_torch_threads(tier, threads, case):
    """The same bits from torch's pool, of whatever size, as from the Python module's."""
    ops = torch_ops()
    import torch

    data = case.build()
    amx_kernels.set_num_threads(1)
    expected = result(data)
    before = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            data.out[...], data.lse[...] = bf16.NAN, np.nan
            attend(data.torch(), ops=ops)
            assert_same_bits((data.out, data.lse), expected)
    finally:
        torch.set_num_threads(before)


@CASES
def test_order_of_the_batch(tier, case):
    data = case.build()
    out, lse = result(data)
    count = len(case.seq_lens)
    for seed in range(2):
        order = np.random.default_rng(seed).permutation(count).tolist()
        shuffled, tokens = chosen(data, order)
        assert_same_bits(result(shuffled), (out[tokens], lse[tokens]))


@CASES
def test_each_request_alone(tier, case):
    data = case.build()
    out, lse = result(data)
    for request in range(len(case.seq_lens)):
        alone, tokens = chosen(data, [request])
        assert_same_bits(result(alone), (out[tokens], lse[tokens]))


def test_a_neighbour_of_32k(tier, threads):
    """Short requests beside one that takes nearly all the time of all threads."""
    case = AttentionCase(16, (100, 32768, 700), block_size=64)
    data = case.build()
    amx_kernels.set_num_threads(2)
    out, lse = result(data)
    for request in (0, 2):
        alone, tokens = chosen(data, [request])
        assert_same_bits(result(alone), (out[tokens], lse[tokens]))


@CASES
def test_twenty_repeats(tier, threads, case):
    data = case.build()
    amx_kernels.set_num_threads(2)
    plan = plan_of(data)
    expected = result(data, plan=plan)
    for _ in range(19):
        assert_same_bits(result(data, plan=plan), expected)


@CASES
def test_plan_or_no_plan(tier, case):
    data = case.build()
    expected = result(data)
    for num_threads in (1, 2, 5):
        assert_same_bits(result(data, plan=plan_of(data, num_threads=num_threads)), expected)


@CASES
def test_layout_and_index_type(tier, case):
    """Where the rows lie and how they are found does not matter, only what they hold."""
    expected = result(case.build())
    for other in (
        replace(case, index_dtype="int64"),
        replace(case, layout="layered"),
        replace(case, fused_q=False),
        replace(case, block_size=1),
        replace(case, block_size=48),
    ):
        assert_same_bits(result(other.build()), expected)


@CASES
def test_lse_or_no_lse(tier, case):
    data = case.build()
    expected, _ = result(data)
    out = np.full(data.out.shape, bf16.NAN)
    attend(data, out=out, lse=None)
    assert_same_bits((out,), (expected,))


def test_a_decode_is_an_extend_of_one_token(tier):
    data = DECODE.build()
    assert_same_bits(result(data, op="extend"), result(data, op="decode"))


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
def test_bmm_rows_do_not_see_each_other(tier, threads, packed):
    """A token's projection is the same in a batch of any size, at any place in it, on any number of threads."""
    rng = np.random.default_rng(3)
    mat1, weight = (bf16.from_float(rng.standard_normal(shape, np.float32)) for shape in ((2, 130, 96), (2, 200, 96)))
    mat2 = amx_kernels.convert_weight_packed(weight) if packed else weight

    def product(rows: slice) -> np.ndarray:
        part = mat1[:, rows]
        out = np.full((2, part.shape[1], 200), bf16.NAN)
        amx_kernels.bmm_cpu(out, part, mat2, packed)
        return out

    amx_kernels.set_num_threads(1)
    whole = product(slice(None))
    for count in (2, 3, 7):
        amx_kernels.set_num_threads(count)
        np.testing.assert_array_equal(product(slice(None)), whole)
    for rows in (slice(0, 1), slice(17, 18), slice(5, 22), slice(60, 127), slice(129, 130), slice(1, 130, 2)):
        np.testing.assert_array_equal(product(rows), whole[:, rows])


def test_packed_and_plain_weights_give_the_same_bits(tier):
    for case in cases.BMM[:4]:
        plain, packed = case.build(), case.build()
        amx_kernels.bmm_cpu(plain.out, plain.mat1, plain.mat2, False)
        amx_kernels.bmm_cpu(packed.out, packed.mat1, amx_kernels.convert_weight_packed(packed.mat2), True)
        np.testing.assert_array_equal(plain.out, packed.out)
