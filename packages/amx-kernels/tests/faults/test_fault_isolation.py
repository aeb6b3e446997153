# SPDX-License-Identifier: Apache-2.0
"""What is not a request's own never reaches it: neighbours, padding, the null block, rows of an earlier call."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
from fault_support import attend, attended, normal

import amx_kernels
from amx_kernels import isa
from mla_testing import bf16, cases
from mla_testing.cases import AttentionCase

fault = pytest.mark.fault


@fault(32, "https://github.com/vllm-project/vllm/pull/37442")
def test_padded_requests_are_zero_and_change_nobody(tier: str) -> None:
    """seq_lens [5, 0, 0, 300] over outputs full of NaN."""
    case = AttentionCase(16, (5, 0, 0, 300))
    out, lse = attended(case)
    assert not out[1:3].any()
    assert (lse[1:3] == -np.inf).all()
    data = case.build()
    for i in (0, 3):
        alone = np.full((1, 16, 512), bf16.NAN)
        amx_kernels.decode_attention_cpu(
            alone, None, data.q_latent[i : i + 1], data.q_pe[i : i + 1], data.kv_cache,
            data.block_table[i : i + 1], data.seq_lens[i : i + 1], data.scale,
        )  # fmt: skip
        assert np.array_equal(alone[0], out[i])


@fault(33, "https://github.com/sgl-project/sglang/issues/36207")
@pytest.mark.parametrize("slots", [[-1, 0, -1, 7], [-1, -1, -1, -1], [-(2**31), 47, -2, 16]], ids=str)
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_a_negative_slot_writes_nothing(slots: list[int], dtype: str) -> None:
    cache = normal(1, 3, 16, 48)
    before = cache.copy()
    kv_c, k_pe = normal(2, 4, 32), normal(3, 4, 16)
    dead = np.array(slots) < 0
    kv_c[dead] = k_pe[dead] = bf16.NAN
    amx_kernels.concat_and_cache_mla_cpu(kv_c, k_pe, cache, np.array(slots, dtype))
    expected = before.reshape(48, 48)
    for t, slot in enumerate(slots):
        if slot >= 0:
            expected[slot] = np.concatenate([kv_c[t], k_pe[t]])
    assert np.array_equal(cache.reshape(48, 48), expected)


@fault("P6", "slots are not range-checked above", refused=True)
@pytest.mark.parametrize("slot", [48, 49, 2**31 - 1, 2**40])
def test_a_slot_past_the_cache_is_refused_and_nothing_is_written(slot: int) -> None:
    cache = normal(1, 3, 16, 48)
    before = cache.copy()
    with pytest.raises(ValueError, match=rf"slot_mapping\[1\] is {slot}, expected below 48"):
        amx_kernels.concat_and_cache_mla_cpu(normal(2, 2, 32), normal(3, 2, 16), cache, np.array([3, slot]))
    assert np.array_equal(cache, before)


@fault(34, "https://github.com/vllm-project/vllm/issues/57156")
def test_a_poisoned_null_block_is_never_read(tier: str) -> None:
    """Warm-up batches leave NaN in block 0; tables of real requests are padded with 0."""
    data = AttentionCase(16, (40, 5, 300), query_lens=(4, 5, 1)).build()
    cache = np.concatenate([np.full((1, *data.kv_cache.shape[1:]), bf16.NAN), data.kv_cache])
    table = np.where((data.block_table < 0) | (data.block_table >= len(data.kv_cache)), -1, data.block_table) + 1
    assert (table == 0).any()
    attend(data, kv_cache=cache, block_table=table.astype(np.int32))
    data.check()


@fault(35, "https://github.com/vllm-project/vllm/issues/57716")
def test_one_request_of_nan_among_others(tier: str) -> None:
    """In one call and in concurrent calls: the request with the NaN row fails visibly, every other keeps its bits."""
    case = AttentionCase(4, (70, 300, 33, 600), query_lens=(3, 1, 33, 5), rank=128, rope=64)
    clean, clean_lse = attended(case)
    data = case.build()
    data.kv_cache[data.block_table[1, 2], 3] = bf16.NAN
    row = int(data.query_start_loc[1])
    others = np.arange(data.live_tokens) != row
    failures: list[str] = []

    def call(poisoned: bool) -> None:
        out, lse = np.full_like(clean, bf16.NAN), np.full_like(clean_lse, np.nan)
        source = data if poisoned else healthy
        for _ in range(5):
            attend(source, out=out, lse=lse)
            keep = others if poisoned else slice(None)
            if not (np.array_equal(out[keep], clean[keep]) and np.array_equal(lse[keep], clean_lse[keep])):
                failures.append("poisoned" if poisoned else "healthy")
            if poisoned and not np.isnan(bf16.to_float32(out[row])).all():
                failures.append("the NaN was hidden")

    healthy = case.build()
    threads = [threading.Thread(target=call, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@fault(40, "https://github.com/sgl-project/sglang/pull/15574")
@pytest.mark.parametrize("extra", [1, 3, 70])
def test_tokens_past_the_last_request_are_neither_read_nor_written(tier: str, extra: int) -> None:
    case = AttentionCase(4, (70, 33), query_lens=(65, 1), extra_tokens=extra, rank=128, rope=64, poison="inf")
    plain, _ = attended(replace(case, extra_tokens=0))
    data = case.build()
    attend(data)
    data.check()
    assert np.array_equal(data.out[:66], plain)
    assert (data.out[66:] == bf16.NAN).all()
    assert np.isnan(data.lse[66:]).all()


@fault(41, "https://github.com/sgl-project/sglang/pull/33892")
def test_nothing_to_do_is_no_fault(tier: str) -> None:
    """No requests, requests without tokens, no rows, no tokens to cache, no matrices."""
    for case in (
        AttentionCase(4, ()),
        AttentionCase(4, (), query_lens=()),
        AttentionCase(4, (5, 0), query_lens=(0, 0)),
        AttentionCase(4, (0, 0, 0)),
        AttentionCase(4, (), query_lens=(), extra_tokens=3),
    ):
        data = case.build()
        tokens = len(data.q_latent)
        plan = amx_kernels.plan_attention(data.seq_lens, data.query_start_loc, tokens, 4)
        attend(data)
        attend(data, plan=plan)
        data.check()
    for batch, rows, columns in ((0, 3, 5), (2, 0, 5), (2, 3, 0)):
        amx_kernels.bmm_cpu(
            np.zeros((batch, rows, columns), np.uint16),
            normal(1, batch, rows, 32),
            normal(2, batch, columns, 32),
            False,
        )
    cache = normal(1, 2, 16, 48)
    before = cache.copy()
    amx_kernels.concat_and_cache_mla_cpu(normal(1, 0, 32), normal(1, 0, 16), cache, np.zeros(0, np.int64))
    assert np.array_equal(cache, before)


@fault(47, "https://github.com/vllm-project/vllm/pull/13922")
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_fewer_slots_than_tokens_ignore_the_rest(tokens: int) -> None:
    cache, kv_c, k_pe = normal(1, 2, 16, 48), normal(2, 5, 32), normal(3, 5, 16)
    expected = cache.copy().reshape(32, 48)
    expected[:tokens] = np.concatenate([kv_c, k_pe], axis=1)[:tokens]
    amx_kernels.concat_and_cache_mla_cpu(kv_c, k_pe, cache, np.arange(tokens))
    assert np.array_equal(cache.reshape(32, 48), expected)


@fault(47, "https://github.com/vllm-project/vllm/pull/13922", refused=True)
def test_more_slots_than_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"slot_mapping has 6 entries, expected at most 5 \(tokens of kv_c\)"):
        amx_kernels.concat_and_cache_mla_cpu(normal(2, 5, 32), normal(3, 5, 16), normal(1, 2, 16, 48), np.arange(6))
    with pytest.raises(ValueError, match=r"k_pe\.size\(0\) is 4, expected 5 \(tokens of kv_c\)"):
        amx_kernels.concat_and_cache_mla_cpu(normal(2, 5, 32), normal(3, 4, 16), normal(1, 2, 16, 48), np.arange(4))


@fault("P3", "seq_len 0 gives exp(-inf - -inf)")
@fault("P4", "value rows of a previous work item read as padding")
@pytest.mark.parametrize("threads", [1, 3])
def test_scratch_of_an_earlier_call_is_not_read(tier: str, threads: int) -> None:
    """After a call whose every intermediate is NaN or infinite, short, ragged and empty requests keep their bits."""
    amx_kernels.set_num_threads(threads)
    small = AttentionCase(3, (17, 1, 0, 33, 15), query_lens=(17, 1, 2, 3, 1), rank=96, rope=32)
    before, before_lse = attended(small)
    for poison in (bf16.NAN, bf16.INF):
        dirty = AttentionCase(128, (300, 700), query_lens=(3, 40)).build()
        dirty.kv_cache[...] = poison
        attend(dirty)
        out, lse = attended(small)
        assert np.array_equal(out, before)
        assert np.array_equal(lse, before_lse)
        rows = np.full((2, 70, 100), poison)
        amx_kernels.bmm_cpu(np.zeros((2, 70, 40), np.uint16), rows, np.full((2, 40, 100), poison), False)
        product = cases.BmmCase(3, 5, 33, 30).build()
        amx_kernels.bmm_cpu(product.out, product.mat1, product.mat2, False)
        product.check()


@pytest.mark.parametrize("garbage", [-1, 2**31 - 1, -(2**31), 10**6])
@pytest.mark.parametrize("block_size", [1, 16, 48])
def test_block_ids_past_the_length_are_never_followed(tier: str, garbage: int, block_size: int) -> None:
    data = AttentionCase(2, (33, 1, 0, 129), rank=64, rope=32, block_size=block_size).build()
    table = np.full((4, data.block_table.shape[1] + 5), garbage, np.int32)
    for i, n in enumerate(data.seq_lens):
        live = -(-int(n) // block_size)
        table[i, :live] = data.block_table[i, :live]
    attend(data, block_table=table)
    data.check()


@pytest.mark.parametrize("wrong", [-1, 2**31 - 1, "one past"])
def test_a_live_block_id_outside_the_cache_is_refused(wrong: int | str) -> None:
    data = AttentionCase(2, (33, 129), rank=64, rope=32).build()
    value = len(data.kv_cache) if wrong == "one past" else wrong
    data.block_table[1, 8] = value
    with pytest.raises(ValueError, match=rf"block_table\[1, 8\] is {value}, expected between 0 and"):
        attend(data)


def test_every_tier_is_isolated_from_the_tier_before(tier: str) -> None:
    """Tile and vector state of another tier's call is no input of this one's."""
    case = AttentionCase(16, (300, 17), query_lens=(3, 17))
    before, _ = attended(case)
    with isa.using("portable"):
        attended(case)
    after, _ = attended(case)
    assert np.array_equal(before, after)
