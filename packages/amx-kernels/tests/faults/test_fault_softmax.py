# SPDX-License-Identifier: Apache-2.0
"""Online softmax: any range of scores, any number of keys, rows without keys, NaN that stays where it was put."""

from __future__ import annotations

import numpy as np
import pytest
from fault_support import Batch, attend, attended, normal

import amx_kernels
from mla_testing import bf16
from mla_testing.cases import AttentionCase

fault = pytest.mark.fault


@fault(13, "https://github.com/sgl-project/sglang/pull/20220")
@pytest.mark.parametrize("keys", [40, 300, 600, 1100])
@pytest.mark.parametrize("first", [60.0, -60.0], ids=["falling", "rising"])
def test_scores_of_opposite_extremes_in_successive_blocks(tier: str, first: float, keys: int) -> None:
    """A prefix scored near +60, what follows near -60, and the reverse: one-shot and online softmax agree."""
    rank, rope, heads = 64, 32, 3
    rng = np.random.default_rng(keys)
    rows = rng.standard_normal((keys, rank + rope)).astype(np.float32) * 0.5
    rows[: keys // 2, 0], rows[keys // 2 :, 0] = first, -first
    query = rng.standard_normal((5, heads, rank + rope)).astype(np.float32) * 0.1
    query[..., 0] = 1.0
    Batch(bf16.from_float(query), [bf16.from_float(rows)], rank, [5], 1.0).check(f"{keys} keys, {first:+g} first")


@fault(24, "https://github.com/ikawrakow/ik_llama.cpp/pull/2031")
@pytest.mark.parametrize("keys", [255, 256, 257, 511, 512, 513, 575, 576, 577, 1153])
def test_lengths_around_key_blocks(tier: str, keys: int) -> None:
    attended(AttentionCase(3, (keys,), block_size=64))
    attended(AttentionCase(3, (keys,), query_lens=(2,), block_size=16))


@fault(38, "https://github.com/pytorch/pytorch/issues/141128")
@pytest.mark.parametrize("value", [np.nan, np.inf], ids=["nan", "inf"])
def test_a_query_that_is_not_a_number_shows_in_its_own_row_only(tier: str, value: float) -> None:
    case = AttentionCase(16, (300, 20), query_lens=(4, 2), fused_q=False)
    clean, clean_lse = attended(case)
    data = case.build()
    data.q_latent[2, 5, 7] = bf16.from_float([np.float32(value)])[0]
    attend(data)
    assert np.isnan(bf16.to_float32(data.out[2, 5])).all(), "hidden, as if nothing were wrong"
    other = np.ones((6, 16), bool)
    other[2, 5] = False
    assert np.array_equal(data.out[other], clean[other])
    assert np.array_equal(data.lse[other], clean_lse[other])


@fault(21, "https://github.com/ikawrakow/ik_llama.cpp/issues/1910")
@fault(39, "https://github.com/pytorch/pytorch/issues/156487")
def test_rows_without_a_visible_key_are_zero_with_lse_minus_infinity(tier: str) -> None:
    case = AttentionCase(5, (0, 70, 0), query_lens=(3, 20, 1))
    out, lse = attended(case)
    blind = np.r_[0:3, 23:24]
    assert not out[blind].any()
    assert (lse[blind] == -np.inf).all()
    assert np.isfinite(bf16.to_float32(out)).all()


@fault(20, "https://github.com/ikawrakow/ik_llama.cpp/issues/809")
def test_requests_with_different_visible_ranges_share_a_call(tier: str) -> None:
    """Many short requests, each seeing other keys, in one batch and alone: the same bits."""
    lens, new = (1, 2, 17, 64, 65, 300, 16, 15), (1, 2, 3, 1, 64, 1, 16, 2)
    case = AttentionCase(2, lens, query_lens=new, rank=64, rope=32)
    data = case.build()
    attend(data)
    data.check()
    for i, (first, n) in enumerate(zip(data.query_start_loc, new, strict=False)):
        out, lse = np.zeros((n, 2, 64), np.uint16), np.zeros((n, 2), np.float32)
        amx_kernels.extend_attention_cpu(
            out, lse, data.q_latent[first : first + n], data.q_pe[first : first + n], data.kv_cache,
            data.block_table[i : i + 1], data.seq_lens[i : i + 1], np.array([0, n], np.int32), data.scale,
        )  # fmt: skip
        assert np.array_equal(out, data.out[first : first + n]), f"request {i}"
        assert np.array_equal(lse, data.lse[first : first + n]), f"request {i}"


@fault(26, "https://github.com/ROCm/aiter/issues/4350")
def test_repeats_are_bit_identical_whatever_the_parallel_split(tier: str) -> None:
    case = AttentionCase(2, (5000, 700), rank=64, rope=32, block_size=64)
    plain, plain_lse = attended(case)
    assert np.isfinite(bf16.to_float32(plain)).all()
    for threads in range(1, 34):
        amx_kernels.set_num_threads(threads)
        for _ in range(20 if threads < 4 else 3):
            data = case.build()
            attend(data)
            assert np.array_equal(data.out, plain), f"{threads} threads"
            assert np.array_equal(data.lse, plain_lse), f"{threads} threads"


@fault(61, "https://github.com/ml-explore/mlx-lm/pull/868")
def test_the_scale_multiplies_both_parts_of_the_score(tier: str) -> None:
    """Queries twice as large at half the scale are the same softmax, exactly; another scale is another one."""
    rank, rope = 64, 32
    queries, rows = normal(1, 4, 3, rank + rope), [normal(2, 90, rank + rope)]
    half = Batch(queries, rows, rank, [4], 0.25)
    double = Batch(bf16.from_float(bf16.to_float32(queries) * 2), rows, rank, [4], 0.125)
    half.check("scale 0.25")
    assert np.array_equal(half.run()[0], double.run()[0])
    assert not np.array_equal(half.run()[0], Batch(queries, rows, rank, [4], 0.125).run()[0])


@fault(61, "https://github.com/ml-explore/mlx-lm/pull/868", refused=True)
@pytest.mark.parametrize("scale", [0.0, -0.1, np.nan, np.inf, 1e300])
def test_a_scale_that_cannot_be_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match=r"scale is .*, expected a finite float32 above 0"):
        attend(AttentionCase(2, (5,)).build(), scale=scale)


@fault(22, "https://github.com/sgl-project/sglang/pull/35434", refused=True)
@pytest.mark.parametrize("keyword", ["is_causal", "attn_mask", "sliding_window", "logit_cap", "key", "value"])
@pytest.mark.parametrize("op", ["decode_attention_cpu", "extend_attention_cpu"])
def test_attention_that_is_not_causal_cannot_be_asked_for(op: str, keyword: str) -> None:
    """The ops are causal by definition; an argument that would change it does not exist, so it cannot be ignored."""
    with pytest.raises(TypeError, match=keyword):
        getattr(amx_kernels, op)(**{keyword: False})
