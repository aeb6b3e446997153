# SPDX-License-Identifier: Apache-2.0
"""Views: every stride is the tensor's own, and what is not contiguous where it must be is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from fault_support import attend, attended, normal

import amx_kernels
from mla_testing import bf16, cases
from mla_testing.cases import AttentionCase, ConcatCase

fault = pytest.mark.fault

RAGGED = AttentionCase(16, (33, 5, 300), query_lens=(4, 1, 9), block_size=32)


@fault(5, "https://github.com/vllm-project/vllm/pull/14946")
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_latent_rows_are_views_of_the_fused_projection(tier: str, index_dtype: str) -> None:
    """kv_c and k_pe are the two parts of one [T, R + P] tensor (so row stride R + P), on a cache hit as on a miss."""
    data = ConcatCase(37, 32, index_dtype=index_dtype).build()
    assert data.kv_c.strides == data.k_pe.strides == (1152, 2)
    amx_kernels.concat_and_cache_mla_cpu(data.kv_c, data.k_pe, data.kv_cache, data.slot_mapping)
    data.check()


@fault(5, "https://github.com/vllm-project/vllm/pull/14946", refused=True)
@pytest.mark.parametrize("name", ["out", "q_latent", "q_pe", "kv_cache"])
def test_a_last_dimension_with_gaps_is_refused_by_name(name: str) -> None:
    data = RAGGED.build()
    array = getattr(data, name)
    wide = np.zeros((*array.shape[:-1], array.shape[-1] * 2), array.dtype)
    with pytest.raises(ValueError, match=rf"{name}\.stride\(2\) is 2, expected a contiguous last dimension"):
        attend(data, **{name: wide[..., ::2]})


@fault(16, "https://github.com/local-inference-lab/vllm/pull/17")
@pytest.mark.parametrize("keys", [300, 1500])
def test_every_tensor_keeps_its_own_head_stride(tier: str, keys: int) -> None:
    """Head strides of out, lse, q_latent and q_pe all differ; with one key split and with several."""
    case = AttentionCase(6, (keys,), query_lens=(3,), block_size=32)
    plain, plain_lse = attended(case)
    data = case.build()
    q_latent = np.full((3, 6, 700), bf16.NAN)
    q_pe = np.full((6, 3, 100), bf16.NAN)
    q_latent[..., :512], q_pe[..., :64] = data.q_latent, data.q_pe.transpose(1, 0, 2)
    out, lse = np.full((3, 6, 530), bf16.NAN), np.full((3, 9), np.nan, np.float32)
    attend(
        data,
        q_latent=q_latent[..., :512],
        q_pe=q_pe[..., :64].transpose(1, 0, 2),
        out=out[..., :512],
        lse=lse[:, :6],
    )
    assert np.array_equal(out[..., :512], plain)
    assert (out[..., 512:] == bf16.NAN).all()
    assert np.array_equal(lse[:, :6], plain_lse)
    assert np.isnan(lse[:, 6:]).all()


@fault(48, "https://github.com/vllm-project/vllm/issues/16658")
def test_slices_of_a_fused_query_give_the_bits_of_separate_tensors(tier: str) -> None:
    fused, fused_lse = attended(RAGGED)
    split, split_lse = attended(replace(RAGGED, fused_q=False))
    assert np.array_equal(fused, split)
    assert np.array_equal(fused_lse, split_lse)


@fault(49, "https://github.com/sgl-project/sglang/pull/20598")
def test_query_strides_are_not_used_for_the_one_key_head(tier: str) -> None:
    """64 query heads of stride 256 beside a cache of one key head whose rows and blocks lie far apart."""
    case = AttentionCase(64, (40, 70), query_lens=(3, 2), rank=128, rope=64, layout="wide")
    plain, _ = attended(replace(case, layout="contiguous"))
    data = case.build()
    query = np.full((5, 64, 256), bf16.NAN)
    query[..., :128], query[..., 192:] = data.q_latent, data.q_pe
    attend(data, q_latent=query[..., :128], q_pe=query[..., 192:])
    data.check()
    assert np.array_equal(data.out, plain)


@fault(46, "https://github.com/LMCache/LMCache/issues/4463")
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_padded_and_interleaved_caches_give_the_bits_of_a_contiguous_one(tier: str, layout: cases.Layout) -> None:
    plain, plain_lse = attended(RAGGED)
    other, other_lse = attended(replace(RAGGED, layout=layout, poison="inf"))
    assert np.array_equal(other, plain)
    assert np.array_equal(other_lse, plain_lse)


@fault(46, "https://github.com/LMCache/LMCache/issues/4463")
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_cache_writes_keep_out_of_the_padding(layout: cases.Layout) -> None:
    data = ConcatCase(50, 16, layout=layout).build()
    amx_kernels.concat_and_cache_mla_cpu(data.kv_c, data.k_pe, data.kv_cache, data.slot_mapping)
    data.check()


@fault(60, "https://github.com/lightseekorg/tokenspeed/pull/348", refused=True)
def test_the_output_is_as_wide_as_the_latent_not_as_the_value_head() -> None:
    data = RAGGED.build()
    with pytest.raises(ValueError, match=r"out\.size\(2\) is 128, expected 512 \(R of q_latent\)"):
        attend(data, out=np.zeros((14, 16, 128), np.uint16))


@fault(8, "https://github.com/sgl-project/sglang/pull/29497")
@fault(51, "https://github.com/sgl-project/sglang/pull/27840")
def test_every_mix_of_index_types_gives_the_same_bits(tier: str) -> None:
    plain, _ = attended(RAGGED)
    for table, lens, starts in itertools.product((np.int32, np.int64), repeat=3):
        data = RAGGED.build()
        attend(
            data,
            block_table=data.block_table.astype(table),
            seq_lens=data.seq_lens.astype(lens),
            query_start_loc=data.query_start_loc.astype(starts),
        )
        assert np.array_equal(data.out, plain), (table, lens, starts)


@fault(51, "https://github.com/sgl-project/sglang/pull/27840", refused=True)
@pytest.mark.parametrize("dtype", ["int16", "uint32", "float64", "bool"])
def test_other_index_types_are_refused_by_name(dtype: str) -> None:
    data = RAGGED.build()
    with pytest.raises(ValueError, match=f"seq_lens is {dtype}, expected int32 or int64"):
        attend(data, seq_lens=data.seq_lens.astype(dtype))
    with pytest.raises(ValueError, match=f"block_table is {dtype}, expected int32 or int64"):
        attend(data, block_table=np.abs(data.block_table).astype(dtype))


@fault(9, "https://github.com/vllm-project/vllm/pull/50801", refused=True)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "uint8"])
@pytest.mark.parametrize("name", ["out", "q_latent", "q_pe", "kv_cache"])
def test_element_types_without_a_kernel_are_refused_by_name(name: str, dtype: str) -> None:
    data = RAGGED.build()
    with pytest.raises(ValueError, match=f"{name} is {dtype}, expected bfloat16"):
        attend(data, **{name: np.zeros(getattr(data, name).shape, dtype)})


@fault(36, "https://github.com/ikawrakow/ik_llama.cpp/issues/1616", refused=True)
@fault(37, "https://github.com/ikawrakow/ik_llama.cpp/issues/538", refused=True)
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_a_quantised_cache_is_refused_not_misread(dtype: str) -> None:
    data = RAGGED.build()
    quantised = np.zeros(data.kv_cache.shape, dtype)
    with pytest.raises(ValueError, match=f"kv_cache is {dtype}, expected bfloat16"):
        attend(data, kv_cache=quantised)
    with pytest.raises(ValueError, match=f"kv_cache is {dtype}, expected bfloat16"):
        amx_kernels.concat_and_cache_mla_cpu(normal(1, 2, 512), normal(2, 2, 64), quantised, np.arange(2))
