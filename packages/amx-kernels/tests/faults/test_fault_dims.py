# SPDX-License-Identifier: Apache-2.0
"""Other models' dimensions: supported through the same parameters, or refused by name."""

from __future__ import annotations

import numpy as np
import pytest
from fault_support import attend, attended, normal

import amx_kernels
from mla_testing import bf16
from mla_testing.cases import AttentionCase, BmmCase

fault = pytest.mark.fault


@fault(56, "https://github.com/vllm-project/vllm/issues/52008")
@fault(62, "https://github.com/vllm-project/vllm/pull/55385")
@pytest.mark.parametrize(
    ("rank", "rope"), [(64, 96), (256, 64), (256, 32), (512, 0), (512, 64), (32, 16), (48, 24), (1, 1), (33, 7)]
)
@pytest.mark.parametrize("query_lens", [None, (5, 1, 20)], ids=["decode", "extend"])
def test_latent_and_rope_widths(tier: str, rank: int, rope: int, query_lens: tuple[int, ...] | None) -> None:
    """Rows of any width, without a rotated part (P = 0) among them."""
    attended(AttentionCase(12, (5, 64, 300), query_lens=query_lens, rank=rank, rope=rope, block_size=32))


@fault(56, "https://github.com/vllm-project/vllm/issues/52008", refused=True)
def test_widths_that_do_not_fit_together_are_one_clear_error() -> None:
    data = AttentionCase(2, (20,), rank=64, rope=96).build()
    with pytest.raises(ValueError, match=r"kv_cache\.size\(2\) is 128, expected 160 \(R of q_latent \+ P of q_pe\)"):
        attend(data, kv_cache=data.kv_cache[..., :128])
    with pytest.raises(ValueError, match=r"q_latent\.size\(2\) is 0, expected between 1 and"):
        attend(data, q_latent=np.zeros((1, 2, 0), np.uint16), out=np.zeros((1, 2, 0), np.uint16))


@fault(57, "https://github.com/pengcuo/FlashMLA-ETAP/issues/1")
@pytest.mark.parametrize("heads", [1, 4, 8, 16, 20, 40, 128])
def test_rank_256_in_49_configurations_three_times(tier: str, heads: int) -> None:
    """Seven head counts by seven lengths: within the float64 tolerance, and equal bits at every repeat."""
    case = AttentionCase(heads, (1, 16, 17, 64, 255, 256, 300), rank=256, rope=64, block_size=64)
    first, first_lse = attended(case)
    for _ in range(2):
        again, again_lse = attended(case)
        assert np.array_equal(again, first)
        assert np.array_equal(again_lse, first_lse)


@fault(59, "https://github.com/eugr/spark-vllm-docker/pull/17")
@pytest.mark.parametrize(
    ("heads", "nope", "value"), [(20, 192, 256), (40, 64, 64), (16, 128, 128)], ids=["glm-4.7", "minicpm3", "v2-lite"]
)
def test_absorbed_and_value_projections_of_unequal_heads(tier: str, heads: int, nope: int, value: int) -> None:
    """W_UK [H, R, nope] and W_UV [H, v, R] where v and nope differ, packed as the model uses them."""
    rank = 256
    for columns, depth in ((rank, nope), (value, rank)):
        data = BmmCase(heads, 3, columns, depth).build()
        amx_kernels.bmm_cpu(data.out, data.mat1, amx_kernels.convert_weight_packed(data.mat2), True)
        data.check()


@fault(59, "https://github.com/eugr/spark-vllm-docker/pull/17", refused=True)
def test_a_projection_of_the_wrong_half_is_refused() -> None:
    """Using W_UK's width where W_UV's is meant cannot pass unnoticed."""
    packed = amx_kernels.convert_weight_packed(normal(1, 2, 192, 64))
    with pytest.raises(ValueError, match=r"mat2\.size\(1\) is 12, expected 16"):
        amx_kernels.bmm_cpu(np.full((2, 3, 256), bf16.NAN), normal(2, 2, 3, 64), packed, True)


@fault(62, "https://github.com/vllm-project/vllm/pull/55385")
def test_rows_without_a_rotated_part_are_cached() -> None:
    """P = 0: k_pe is an empty tensor, of which nothing is read, not even its address."""
    kv_c, cache = normal(1, 3, 64), np.zeros((2, 4, 64), np.uint16)
    amx_kernels.concat_and_cache_mla_cpu(kv_c, np.zeros((3, 0), np.uint16), cache, np.array([5, -1, 0]))
    expected = np.zeros((8, 64), np.uint16)
    expected[5], expected[0] = kv_c[0], kv_c[2]
    assert np.array_equal(cache.reshape(8, 64), expected)
