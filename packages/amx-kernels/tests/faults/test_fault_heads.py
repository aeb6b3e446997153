# SPDX-License-Identifier: Apache-2.0
"""Any number of heads, by the same code: no list of allowed counts, no special case, no cliff."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from fault_support import attend, attended

import amx_kernels
from mla_testing import amx_emulator, bf16
from mla_testing.cases import AttentionCase, BmmCase

fault = pytest.mark.fault

HEADS = (1, 2, 3, 4, 5, 8, 11, 12, 16, 20, 22, 32, 40, 64, 96, 127, 128)
LENS = tuple((37 * i) % 90 + 1 for i in range(17))


@fault(52, "https://github.com/sgl-project/sglang/pull/6771")
@fault(53, "https://github.com/vllm-project/vllm/pull/50578")
@fault(54, "https://github.com/vllm-project/vllm-ascend/issues/1451")
@fault(55, "https://github.com/sgl-project/sglang/pull/37762")
@pytest.mark.parametrize("heads", HEADS)
def test_every_head_count_and_batch(tier: str, heads: int) -> None:
    for batch in (1, 2, 17):
        attended(AttentionCase(heads, LENS[:batch], rank=64, rope=32, block_size=32))


@fault(55, "https://github.com/sgl-project/sglang/pull/37762")
@pytest.mark.parametrize("heads", [11, 12, 13, 22, 40])
def test_a_head_has_the_same_bits_whatever_its_neighbours(tier: str, heads: int) -> None:
    """No head count selects another kernel: heads 0..n of 128 are those of a call with n heads."""
    case = AttentionCase(128, (300, 17), query_lens=(1, 3), rank=128, rope=64)
    many, _ = attended(case)
    data = case.build()
    out = np.full((4, heads, 128), bf16.NAN)
    attend(data, q_latent=data.q_latent[:, :heads], q_pe=data.q_pe[:, :heads], out=out, lse=None)
    assert np.array_equal(out, many[:, :heads])


@fault(7, "https://github.com/sgl-project/sglang/pull/8243")
@fault(52, "https://github.com/sgl-project/sglang/pull/6771")
@pytest.mark.parametrize(("heads", "padded"), [(11, 16), (21, 22), (22, 32), (5, 128)])
def test_padded_heads_never_reach_the_output(tier: str, heads: int, padded: int) -> None:
    """Heads added to make a rank's share divisible hold NaN; those of the model keep their bits."""
    case = AttentionCase(padded, (70, 5), query_lens=(2, 5), rank=64, rope=32, fused_q=False)
    plain, _ = attended(case)
    data = case.build()
    data.q_latent[:, heads:] = data.q_pe[:, heads:] = bf16.NAN
    attend(data)
    assert np.array_equal(data.out[:, :heads], plain[:, :heads])
    weights = BmmCase(padded, 7, 64, 32).build()
    weights.mat2[heads:] = bf16.NAN
    amx_kernels.bmm_cpu(weights.out, weights.mat1, amx_kernels.convert_weight_packed(weights.mat2), True)
    clean = np.full_like(weights.out, bf16.NAN)
    amx_kernels.bmm_cpu(clean, weights.mat1, np.where(np.arange(padded)[:, None, None] < heads, weights.mat2, 0), False)
    assert np.array_equal(weights.out[:heads], clean[:heads])


def ratio(heads: int, full: int) -> float:
    """Single-threaded decode over 4,096 keys: time with `heads` heads over that with `full`, least of several runs."""
    best = {}
    built = {n: AttentionCase(n, (4096,), block_size=64).build() for n in (heads, full)}
    for _ in range(15):
        for n, data in built.items():
            start = time.perf_counter()
            attend(data, lse=None)
            best[n] = min(best.get(n, math.inf), time.perf_counter() - start)
    return best[heads] / best[full]


@fault(53, "https://github.com/vllm-project/vllm/pull/50578")
@pytest.mark.parametrize(("heads", "full"), [(12, 16), (20, 32), (40, 48)])
def test_a_partial_group_of_heads_costs_no_more_than_a_whole_one(tier: str, heads: int, full: int) -> None:
    """12 heads may cost what 16 do, never more. Emulated tiles are counted; elsewhere time is measured, again if a busy
    machine came between, and with slack: a cliff is a factor of two or more."""
    amx_kernels.set_num_threads(1)
    if tier == "amxbf16" and amx_emulator.mode() != "native":
        counts = []
        for n in (heads, full):
            with amx_emulator.emulate() as emulation:
                data = AttentionCase(n, (600,), block_size=64).build()
                attend(data)
                counts.append(emulation.counters()["TDPBF16PS"])
        assert 0 < counts[0] <= counts[1]
        return
    ratios: list[float] = []
    while not ratios or (ratios[-1] > 1.5 and len(ratios) < 5):
        ratios.append(ratio(heads, full))
    assert ratios[-1] <= 1.5, ratios
