# SPDX-License-Identifier: Apache-2.0
"""concat_and_cache_mla_cpu: every bit where it belongs, and no other bit touched."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import amx_kernels
from mla_testing import bf16, cases
from mla_testing.cases import ConcatCase


def store(data, **changes):
    data = replace(data, **changes)
    amx_kernels.concat_and_cache_mla_cpu(data.kv_c, data.k_pe, data.kv_cache, data.slot_mapping)
    return data


# Token counts around what makes a second thread worthwhile (64 tokens each), and widths nobody uses.
_MORE = tuple(
    ConcatCase(tokens, 32, label)
    for tokens, label in ((63, "layered"), (64, "wide"), (127, "padded"), (1000, "layered"))
)
_WIDTHS = tuple(ConcatCase(20, rank=rank, rope=rope) for rank, rope in ((1, 1), (33, 7), (512, 0), (64, 96)))


@pytest.mark.parametrize("case", (*cases.CONCAT, *_MORE), ids=lambda case: case.id)
def test_store(tier, case):
    data = case.build()
    store(data).check()


@pytest.mark.parametrize("case", _WIDTHS, ids=lambda case: f"r{case.rank}p{case.rope}")
def test_widths(tier, case):
    store(case.build()).check()


@pytest.mark.parametrize("threads_", [1, 2, 3, 7])
def test_threads(threads, threads_):
    amx_kernels.set_num_threads(threads_)
    data = ConcatCase(513, 48, "layered").build()
    store(data).check()


def test_one_key_head(tier):
    """k_pe as vLLM has it, [T, 1, P]."""
    data = ConcatCase(17).build()
    store(replace(data), k_pe=data.k_pe[:, None])
    data.check()


def test_two_tensors(tier):
    """kv_c and k_pe need not be slices of one tensor; a gap follows each row."""
    data = ConcatCase(33).build()
    kv_c, k_pe = np.full((33, 640), bf16.NAN), np.full((33, 1, 97), bf16.NAN)
    kv_c[:, :512], k_pe[:, 0, :64] = data.kv_c, data.k_pe
    store(data, kv_c=kv_c[:, :512], k_pe=k_pe[..., :64])
    data.check()


def test_strided_slots(tier):
    data = ConcatCase(33).build()
    column = np.full((33, 3), 2**40)
    column[:, 1] = data.slot_mapping
    store(data, slot_mapping=column[:, 1])
    data.check()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_any_negative_slot_is_skipped(tier, dtype):
    data = ConcatCase(4, skipped=False).build()
    slots = np.array([-1, np.iinfo(dtype).min, -17, 3], dtype)
    data.kv_c[:3], data.k_pe[:3] = bf16.NAN, bf16.INF
    data = store(data, slot_mapping=slots)
    data.check()
    assert (data.kv_cache != bf16.INF).any(axis=-1).sum() == 1


def test_all_slots_skipped(tier):
    data = ConcatCase(40).build()
    data = store(data, slot_mapping=np.full(40, -1))
    np.testing.assert_array_equal(data.kv_cache, data.before)


def test_first_and_last_slot(tier):
    data = ConcatCase(2, block_size=16, skipped=False).build()
    last = data.kv_cache.shape[0] * 16 - 1
    data = store(data, slot_mapping=np.array([last, 0]))
    data.check()
    np.testing.assert_array_equal(data.kv_cache[-1, -1, :512], data.kv_c[0])
    np.testing.assert_array_equal(data.kv_cache[0, 0, 512:], data.k_pe[1])


def test_bits_are_copied(tier):
    """Every bfloat16 there is, signalling NaNs and subnormals too."""
    data = ConcatCase(128, skipped=False).build()
    kv_c = np.arange(65536, dtype=np.uint16).reshape(128, 512)
    data = store(data, kv_c=kv_c)
    written = data.kv_cache.reshape(-1, 576)[data.slot_mapping, :512]
    np.testing.assert_array_equal(written, kv_c)
