# SPDX-License-Identifier: Apache-2.0
"""decode_attention_cpu and extend_attention_cpu against the float64 reference, at every boundary, on every tier.

Cache memory outside live rows is NaN or infinity, block ids past a request's end are garbage, outputs begin as NaN
among canaries (``mla_testing.cases``); ``check`` looks at all of it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from calls import attend, plan_of

import amx_kernels
from mla_testing import bf16, cases, compare, reference, tolerances
from mla_testing.cases import AttentionCase


def by_id(table):
    return pytest.mark.parametrize("case", table, ids=lambda case: case.id)


@by_id(cases.DECODE)
def test_decode(tier, case):
    data = case.build()
    attend(data, op="decode")
    data.check()


@by_id(cases.EXTEND)
def test_extend(tier, case):
    data = case.build()
    attend(data)
    data.check()


# Around key blocks (256), splits (512 keys and multiples) and their halves; rows that fill tiles and rows that do not.
_SPLITS = tuple(
    AttentionCase(heads, (511, 512, 513, 767, 768, 769, 1023, 1024, 1025), block_size=block_size, label="splits")
    for heads, block_size in ((1, 64), (16, 48), (22, 16), (128, 32))
)

# Four new tokens each (speculative decoding); lengths from "the new tokens are all there is" on.
_FOUR = tuple(
    AttentionCase(
        heads, (4, 0, 15, 16, 17, 31, 32, 33, 255, 256, 257, 513), query_lens=(4,) * 12, block_size=block_size
    )
    for heads, block_size in ((1, 16), (2, 1), (16, 64), (22, 48), (128, 128))
)

# More heads than a unit aims at rows, and counts around it.
_MANY_HEADS = tuple(AttentionCase(heads, (3, 40), block_size=32, label="many") for heads in (129, 160, 256, 300))

_ODD_WIDTHS = tuple(
    AttentionCase(heads, (1, 33, 270), block_size=block_size, rank=rank, rope=rope, label="odd")
    for heads, block_size in ((3, 16), (16, 5))
    for rank, rope in ((64, 96), (1, 1), (33, 7), (100, 0), (24, 3), (130, 34), (576, 0), (31, 1), (48, 16))
)


@by_id((*_SPLITS, *_MANY_HEADS, *_ODD_WIDTHS))
def test_decode_shapes(tier, case):
    data = case.build()
    attend(data)
    data.check()


@by_id(_FOUR)
@pytest.mark.parametrize("op", ["decode", "extend"])
def test_four_tokens_each(tier, case, op):
    """The same batch as a decode of four tokens a request and as an extend."""
    data = case.build()
    attend(data, op=op)
    data.check()


# Query blocks of a unit are max(1, 128 / H) tokens: one less, as many, one more, several; fresh and on a prefix.
_UNIT_LENS = {1: (127, 128, 129), 2: (63, 64, 65), 16: (7, 8, 9, 17), 22: (4, 5, 6, 11), 128: (1, 2, 3)}
_UNITS = tuple(
    AttentionCase(
        heads,
        tuple(q + prefix for q in lens for prefix in (0, 65)),
        query_lens=tuple(q for q in lens for _ in range(2)),
        block_size=32,
        label="units",
    )
    for heads, lens in (
        (1, (127, 128, 129)),
        (2, (63, 64, 65)),
        (16, (7, 8, 9, 17)),
        (22, (4, 5, 6, 11)),
        (128, (1, 2, 3)),
    )
)
_PREFIXES = tuple(
    AttentionCase(
        heads,
        tuple(prefix + 3 for prefix in (1, 15, 16, 17, 255, 256, 257, 509, 512)),
        query_lens=(3,) * 8 + (1,),
        block_size=block_size,
        index_dtype="int64",
        label="prefixes",
    )
    for heads, block_size in ((2, 16), (16, 48), (128, 64))
)
_LONG = (
    AttentionCase(1, (513,), query_lens=(513,), block_size=64, label="fresh"),
    AttentionCase(16, (257,), query_lens=(257,), block_size=16, label="fresh"),
    AttentionCase(16, (1200,), query_lens=(20,), block_size=32, label="prefix"),
    # A prompt, a continued prompt, tokens to decode and a request without new tokens in one call.
    AttentionCase(16, (100, 600, 37, 1025, 64), query_lens=(100, 40, 1, 1, 0), block_size=16, label="mixed"),
)
_EXTEND_WIDTHS = tuple(
    AttentionCase(5, (17, 290), query_lens=(17, 30), block_size=16, rank=rank, rope=rope, label="odd")
    for rank, rope in ((64, 96), (33, 7), (100, 0))
)


@by_id((*_UNITS, *_PREFIXES, *_LONG, *_EXTEND_WIDTHS))
def test_extend_shapes(tier, case):
    data = case.build()
    attend(data)
    data.check()


_DECODE = AttentionCase(16, (1, 33, 0, 600), block_size=32, index_dtype="int64")
_EXTEND = AttentionCase(16, (17, 300, 0, 5), query_lens=(17, 20, 3, 0), block_size=16)
_BOTH = pytest.mark.parametrize("case", [_DECODE, _EXTEND], ids=["decode", "extend"])


@_BOTH
def test_lse_is_optional(tier, case):
    data = case.build()
    attend(data, lse=None)
    data.check(lse=False)


@_BOTH
@pytest.mark.parametrize("num_threads", [None, 1, 5], ids=["own-threads", "1-thread", "5-threads"])
def test_with_a_plan(tier, case, num_threads):
    """A plan made once serves every layer, whatever number of threads it was made for."""
    data = case.build()
    plan = plan_of(data, num_threads=num_threads)
    before = plan.copy()
    attend(data, plan=plan)
    data.check()
    other_layer = case.build()
    attend(other_layer, plan=plan)
    other_layer.check()
    np.testing.assert_array_equal(plan, before)


def _heads_outermost(array):
    """The same values in memory of [H, T, ...]."""
    return np.ascontiguousarray(array.transpose(1, 0, 2)).transpose(1, 0, 2)


@_BOTH
def test_queries_and_outputs_with_heads_outermost(tier, case):
    """[H, T, ...] memory seen as [T, H, ...]: what the projections before and after attention like best."""
    data = case.build()
    shape = data.out.shape
    out, out_buffer = cases.guarded((shape[1], shape[0], shape[2]), np.uint16, row_padding=8)
    lse, lse_buffer = cases.guarded(shape[:2], np.float32, row_padding=3)
    ops_data = replace(data, q_latent=_heads_outermost(data.q_latent), q_pe=_heads_outermost(data.q_pe))
    attend(ops_data, out=out.transpose(1, 0, 2), lse=lse)
    assert cases.canaries_intact(out, out_buffer) and cases.canaries_intact(lse, lse_buffer)
    data.lse[...] = lse
    data.check(out=out.transpose(1, 0, 2))


@_BOTH
def test_strided_metadata(tier, case):
    """Lengths and tables as columns of larger tensors, whose other columns are garbage."""
    data = case.build()

    def spread(values):
        wide = np.full((*values.shape, 2), -(10**6), values.dtype)
        wide[..., 0] = values
        return wide[..., 0]

    attend(
        replace(
            data,
            block_table=spread(data.block_table.T).T,
            seq_lens=spread(data.seq_lens),
            query_start_loc=spread(data.query_start_loc),
        )
    )
    data.check()


@_BOTH
def test_metadata_types_may_differ(tier, case):
    data = case.build()
    attend(replace(data, block_table=data.block_table.astype(np.int32), seq_lens=data.seq_lens.astype(np.int64)))
    data.check()


def test_blocks_may_be_shared(tier):
    """A cached prefix is the same blocks in several requests' tables."""
    data = AttentionCase(16, (64, 64), block_size=16).build()
    data.block_table[1, :4] = data.block_table[0, :4]
    data.q_latent[1], data.q_pe[1] = data.q_latent[0], data.q_pe[0]
    attend(data)
    np.testing.assert_array_equal(data.out[0], data.out[1])


def test_block_table_may_have_no_columns(tier):
    data = AttentionCase(16, (0, 0)).build()
    attend(replace(data, block_table=data.block_table[:, :0]))
    data.check()


@pytest.mark.parametrize("poison", ["nan", "inf"])
def test_neighbours_with_nan_stay_alone(tier, poison):
    """A request whose own rows or queries are poisoned changes no bit of the others."""
    case = AttentionCase(16, (33, 300, 20), query_lens=(5, 9, 2), block_size=16)
    clean, hurt = case.build(), case.build()
    attend(clean)
    value = bf16.NAN if poison == "nan" else bf16.INF
    hurt.q_latent[5:14] = value
    hurt.kv_cache[hurt.block_table[1, :19]] = value
    attend(hurt)
    for rows in (slice(0, 5), slice(14, 16)):
        np.testing.assert_array_equal(hurt.out[rows], clean.out[rows])
        np.testing.assert_array_equal(hurt.lse[rows], clean.lse[rows])
    assert np.isnan(bf16.to_float32(hurt.out[5:14])).all()


@pytest.mark.parametrize(
    "case",
    [
        AttentionCase(16, (300, 20), block_size=5),
        AttentionCase(3, (40, 20), query_lens=(9, 2), rank=33, rope=7),
        AttentionCase(128, (600, 20), block_size=48),
    ],
    ids=lambda case: case.id,
)
def test_nothing_of_an_earlier_call_is_read(tier, threads, case):
    """A call on NaN leaves NaN in every scratch buffer; the next call on the same threads meets none of it."""
    amx_kernels.set_num_threads(1)
    poisoned = case.build()
    for array in (poisoned.q_latent, poisoned.q_pe, poisoned.kv_cache):
        array[...] = bf16.NAN
    longer = np.full_like(poisoned.seq_lens, max(case.seq_lens))
    poisoned.block_table[...] = poisoned.block_table[0]
    attend(replace(poisoned, seq_lens=longer))
    data = case.build()
    attend(data)
    data.check()


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 30.0])
def test_scales(tier, scale):
    """From weights that are all alike to a softmax that picks one key."""
    data = AttentionCase(16, (300, 40), block_size=32).build()
    attend(data, scale=scale)
    arrays = (data.q_latent, data.q_pe, data.kv_cache, data.block_table, data.seq_lens, None)
    expected = reference.latent_attention_details(*arrays, scale)
    compare.assert_close(data.out, expected.out, tol=tolerances.attention(expected), what=f"scale {scale} out")
    compare.assert_close(data.lse, expected.lse, tol=tolerances.lse(expected), what=f"scale {scale} lse")
