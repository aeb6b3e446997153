# SPDX-License-Identifier: Apache-2.0
"""The case tables: complete, hostile outside what a kernel may touch, and self-checking."""

from __future__ import annotations

import numpy as np
import pytest

from mla_testing import bf16, cases, reference

TABLES = {"decode": cases.DECODE, "extend": cases.EXTEND, "bmm": cases.BMM, "concat": cases.CONCAT}


@pytest.mark.parametrize("name", TABLES)
def test_ids_are_unique(name):
    ids = [case.id for case in TABLES[name]]
    assert len(ids) == len(set(ids))


def test_ids_are_readable():
    assert cases.AttentionCase(16, (4096,) * 4).id == "b4-h16-kv4096-bs16-contiguous"
    case = cases.AttentionCase(22, (9,), query_lens=(3,), block_size=48, layout="layered", index_dtype="int64")
    assert case.id == "b1-h22-q3-kv9-bs48-layered-int64"
    assert cases.BmmCase(16, 4, 512, 128).id == "n16-m4-k128-o512-transposed"


@pytest.mark.parametrize("table", [cases.DECODE, cases.EXTEND], ids=["decode", "extend"])
def test_tables_hold_every_combination(table):
    """Heads x block sizes x (contiguous, strided) and every boundary length."""
    seen = {(c.heads, c.block_size, c.layout) for c in table}
    for heads in cases.HEADS:
        for block_size in cases.BLOCK_SIZES:
            assert {(heads, block_size, "contiguous"), (heads, block_size, "layered")} <= seen
    assert {n for c in table for n in c.seq_lens} >= set(cases.BOUNDARY_LENGTHS)
    assert {c.index_dtype for c in table} == {"int32", "int64"}
    assert {c.layout for c in table} == set(cases.LAYOUTS)
    assert {c.poison for c in table} >= {"nan", "inf"}


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("poison", ["nan", "inf"])
def test_everything_but_live_rows_is_poison(layout, poison):
    case = cases.AttentionCase(2, (17, 0, 33), layout=layout, poison=poison)
    data = case.build()
    whole = data.kv_cache
    while whole.base is not None:
        whole = whole.base
    assert int(np.isfinite(bf16.to_float32(whole)).sum()) == (17 + 33) * 576
    assert data.kv_cache.shape == (2 + 3 + 3, 16, 576) and data.kv_cache.strides[-1] == 2
    assert (layout == "contiguous") == data.kv_cache.flags.c_contiguous
    live = np.concatenate([data.block_table[0, :2], data.block_table[2, :3]])
    assert len(set(live.tolist())) == 5 and live.min() >= 0 and live.max() < 8
    for tail in (data.block_table[0, 2:], data.block_table[1], data.block_table[2, 3:]):
        assert len(tail) and ((tail < 0) | (tail >= 8)).all()


def test_blocks_are_shuffled():
    data = cases.AttentionCase(2, (160,)).build()
    assert (np.diff(data.block_table[0, :10].astype(int)) != 1).any()


def test_builds_are_fresh_and_repeatable():
    case = cases.AttentionCase(2, (5, 40))
    one, two = case.build(), case.build()
    np.testing.assert_array_equal(one.q_latent, two.q_latent)
    np.testing.assert_array_equal(one.kv_cache, two.kv_cache)
    one.kv_cache[...] = 0
    one.q_latent[...] = 0
    assert two.kv_cache.any() and two.q_latent.any()
    assert case.build().q_latent.any()


def test_layout_does_not_change_the_numbers():
    """The expected values are shared by all layouts; so must the content be."""
    for layout in cases.LAYOUTS:
        case = cases.AttentionCase(2, (5, 40), layout=layout, block_size=32, index_dtype="int64", fused_q=False)
        data = case.build()
        out, lse = reference.latent_attention(
            data.q_latent, data.q_pe, data.kv_cache, data.block_table, data.seq_lens, data.query_start_loc, data.scale
        )
        np.testing.assert_array_equal(out, case.expected().out)
        np.testing.assert_array_equal(lse, case.expected().lse)


def test_queries_are_slices_of_one_tensor():
    fused, split = (cases.AttentionCase(2, (5,), fused_q=f).build() for f in (True, False))
    assert np.shares_memory(fused.q_latent.base, fused.q_pe.base) and fused.q_pe.strides[1] == 576 * 2
    assert split.q_pe.flags.c_contiguous and not np.shares_memory(split.q_latent, split.q_pe)


def _solved(case):
    data = case.build()
    data.out[: data.live_tokens] = bf16.from_float(case.expected().out)
    data.lse[: data.live_tokens] = case.expected().lse
    return data


def test_outputs_start_as_nan_and_must_be_written():
    data = cases.AttentionCase(2, (5, 0), extra_tokens=1).build()
    assert np.isnan(bf16.to_float32(data.out)).all() and np.isnan(data.lse).all()
    with pytest.raises(AssertionError, match="only one side is"):
        data.check()


@pytest.mark.parametrize("padding", [0, 16])
def test_canaries(padding):
    case = cases.AttentionCase(2, (5, 0), out_padding=padding)
    _solved(case).check()
    for at in ("before", "after", "between"):
        data = _solved(case)
        if at == "between":
            if not padding:
                continue
            data.out_buffer[3, 512] = 0
        else:
            data.out_buffer[0 if at == "before" else -1, 5] = 0
        with pytest.raises(AssertionError, match="bytes around out were written"):
            data.check()
    data = _solved(case)
    data.lse_buffer[-1, -1] = 0
    with pytest.raises(AssertionError, match="bytes around lse were written"):
        data.check()


def test_check_is_strict_about_what_is_not_a_result():
    case = cases.AttentionCase(2, (5, 0), extra_tokens=2)
    _solved(case).check()
    data = _solved(case)
    data.out[-1, 0, 0] = 0x3F80
    with pytest.raises(AssertionError, match="rows after the last request's"):
        data.check()
    data = _solved(case)
    data.out[1, 1, 3] = 1  # a subnormal where zero is due
    with pytest.raises(AssertionError, match="exact zeros"):
        data.check()
    with pytest.raises(AssertionError, match="lse was written though not asked for"):
        _solved(case).check(lse=False)


def test_bmm_case_checks():
    for case in (cases.BmmCase(3, 5, 17, 34, out_padding=8), cases.BmmCase(3, 5, 16, 32, transposed=False)):
        data = case.build()
        data.out[...] = bf16.from_float(reference.bmm(data.mat1, data.mat2))
        data.check()
        data.out[2, 4, 3] ^= 0x0100
        with pytest.raises(AssertionError, match=r"worst at \[2, 4, 3\]"):
            data.check()
        data.out_buffer[-1, -1] = 0
        with pytest.raises(AssertionError, match="bytes around out"):
            data.check()
    assert cases.BmmCase(3, 5, 16, 32).build().mat1.strides[0] < cases.BmmCase(3, 5, 16, 32).build().mat1.strides[1]


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_concat_case_checks(layout):
    case = cases.ConcatCase(17, layout=layout, extra_tokens=2)
    data = case.build()
    with pytest.raises(AssertionError, match="cache elements differ"):
        data.check()
    reference.concat_and_cache(data.kv_c, data.k_pe, data.kv_cache, data.slot_mapping)
    data.check()
    untouched = np.setdiff1d(np.arange(data.kv_cache.shape[0] * 16), data.slot_mapping)
    data.kv_cache[untouched[0] // 16, untouched[0] % 16, 575] = 0
    with pytest.raises(AssertionError, match="1 cache elements differ"):
        data.check()
    if layout != "contiguous":
        data = case.build()
        reference.concat_and_cache(data.kv_c, data.k_pe, data.kv_cache, data.slot_mapping)
        whole = data.kv_cache
        while whole.base is not None:
            whole = whole.base
        whole.reshape(-1)[-1] = 0
        with pytest.raises(AssertionError, match="between blocks or rows"):
            data.check()


def test_torch_shares_memory_and_strides():
    torch = pytest.importorskip("torch", reason="torch tensors are optional")
    data = cases.AttentionCase(2, (5, 20), layout="layered", index_dtype="int64").build()
    tensors = data.torch()
    assert tensors.kv_cache.dtype == torch.bfloat16 and tensors.block_table.dtype == torch.int64
    assert tensors.lse.dtype == torch.float32 and tensors.scale == data.scale
    assert tensors.kv_cache.stride() == tuple(s // 2 for s in data.kv_cache.strides)
    tensors.out.fill_(1.0)
    assert (data.out == 0x3F80).all()
