# SPDX-License-Identifier: Apache-2.0
"""plan_attention: every (query token, key) pair in exactly one work item, threads loaded alike, and no plan misused."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from calls import attend, plan_of

import amx_kernels
from mla_testing import bf16
from mla_testing.cases import AttentionCase

_HEADER = (Path(__file__).parents[1] / "csrc" / "ops" / "attention" / "plan.h").read_text()


def _fields(struct: str) -> list[str]:
    """Names of the int64 fields of a struct of plan.h, in order: the layout is read where it is written."""
    body = re.search(rf"struct {struct} {{(.*?)\n}};", _HEADER, re.DOTALL)
    assert body, struct
    lines = re.sub(r"//.*", "", body[1])
    return [name.strip() for names in re.findall(r"int64_t ([^;]+);", lines) for name in names.split(",")]


def _constant(name: str) -> int:
    return int(re.search(rf"{name} = (\d+);", _HEADER)[1])


def read(plan: np.ndarray) -> SimpleNamespace:
    """header, requests, units, bounds of a plan."""
    plan = np.asarray(plan).tolist()
    at = 0

    def take(struct: str, count: int) -> list[SimpleNamespace]:
        nonlocal at
        names = _fields(struct)
        taken = [dict(zip(names, plan[at + i * len(names) :], strict=False)) for i in range(count)]
        at += count * len(names)
        return [SimpleNamespace(**values) for values in taken]

    header = take("PlanHeader", 1)[0]
    requests, units = take("Request", header.num_requests), take("Unit", header.num_units)
    assert header.size == len(plan) == at + header.num_threads + 1
    return SimpleNamespace(header=header, requests=requests, units=units, bounds=plan[at:])


def splits(unit: SimpleNamespace) -> list[tuple[int, int]]:
    """Key ranges of a unit's items; one empty range where it sees nothing."""
    ranges = [(k, min(k + unit.split_keys, unit.keys)) for k in range(0, unit.keys, unit.split_keys)]
    return ranges or [(0, 0)]


def batches():
    rng = np.random.default_rng(7)
    yield "none", [], []
    yield "one", [1], [1]
    yield "empty-ones", [0, 0, 5, 0], [0, 1, 0, 3]
    yield "boundaries", [1, 63, 64, 65, 511, 512, 513, 1024, 4097, 40000], [1] * 10
    yield "one-long-many-short", [64] * 255 + [32768], [1] * 256
    yield "prefill", [2048, 8192 + 512, 700], [2048, 512, 1]
    yield "long", [131072], [1]
    for i in range(4):
        keys = rng.integers(0, 3000, 20)
        yield f"random{i}", keys.tolist(), [int(rng.integers(0, min(k, 200) + 1)) for k in keys]


BATCHES = {name: (keys, tokens) for name, keys, tokens in batches()}


def make(keys, tokens, heads, num_threads, dtype=np.int32):
    start = np.concatenate([[0], np.cumsum(tokens)]).astype(dtype)
    return amx_kernels.plan_attention(np.array(keys, dtype), start, int(start[-1]), heads, num_threads)


@pytest.mark.parametrize("num_threads", [1, 2, 7, 64])
@pytest.mark.parametrize("heads", [1, 16, 22, 128, 300])
@pytest.mark.parametrize("batch", BATCHES)
def test_every_pair_is_planned_once(batch, heads, num_threads):
    keys, tokens = BATCHES[batch]
    p = read(make(keys, tokens, heads, num_threads))
    h = p.header
    assert (h.num_requests, h.num_heads, h.num_threads) == (len(keys), heads, num_threads)
    assert [r.keys for r in p.requests] == keys and [r.tokens for r in p.requests] == tokens

    items = 0
    planned = [0] * len(keys)  # tokens of each request that its units have covered so far
    for unit in p.units:
        request = p.requests[unit.request]
        assert unit.first_token == planned[unit.request] and unit.tokens >= 1
        planned[unit.request] += unit.tokens
        # The last token of the unit sees this many keys; each earlier one is masked to its own.
        assert unit.keys == max(0, request.keys - request.tokens + planned[unit.request])
        ranges = splits(unit)
        assert len(ranges) <= _constant("kMaxSplits")
        assert ranges[0][0] == 0 and ranges[-1][1] == unit.keys
        assert unit.first_item == items
        items += len(ranges)
        assert unit.tokens * heads <= h.max_rows
    assert planned == tokens
    assert items == h.num_items

    assert p.bounds[0] == 0 and p.bounds[-1] == items
    assert all(a <= b for a, b in zip(p.bounds, p.bounds[1:], strict=False))


@pytest.mark.parametrize("num_threads", [1, 2, 7])
@pytest.mark.parametrize("batch", BATCHES)
def test_shared_scratch_is_bounded(batch, num_threads):
    """Exactly the units that several threads work on have slots, one for each split, and few units straddle."""
    keys, tokens = BATCHES[batch]
    p = read(make(keys, tokens, 16, num_threads))
    owner = np.repeat(np.arange(num_threads), np.diff(p.bounds))
    slots: list[int] = []
    straddles = []
    for unit in p.units:
        count = len(splits(unit))
        if len(set(owner[unit.first_item : unit.first_item + count].tolist())) > 1:
            slots += range(unit.slot, unit.slot + count)
            straddles.append(unit.straddle)
        else:
            assert unit.slot == unit.straddle == -1
    assert slots == list(range(p.header.num_slots))
    assert straddles == list(range(p.header.num_straddles))
    assert len(straddles) <= num_threads - 1
    assert len(slots) <= (num_threads - 1) * _constant("kMaxSplits")


@pytest.mark.parametrize("heads", [1, 16, 128])
@pytest.mark.parametrize("batch", [name for name in BATCHES if name != "none"])
def test_a_request_is_cut_the_same_way_in_every_company(batch, heads):
    """Units and splits depend on the request's own lengths: the promise of invariance begins here."""
    keys, tokens = BATCHES[batch]

    def cuts(plan):
        return {
            i: [(u.first_token, u.tokens, u.keys, u.split_keys) for u in plan.units if u.request == i]
            for i in range(plan.header.num_requests)
        }

    together = cuts(read(make(keys, tokens, heads, 7)))
    for i in range(0, len(keys), max(1, len(keys) // 5)):
        assert cuts(read(make([keys[i]], [tokens[i]], heads, 1)))[0] == together[i]


@pytest.mark.parametrize("num_threads", [2, 3, 8])
@pytest.mark.parametrize(
    "keys",
    [[4096] * 32, [32768], [64] * 255 + [32768], [100, 9000, 40, 3000] * 4],
    ids=["equal", "one", "mixed", "ragged"],
)
def test_threads_are_loaded_alike(keys, num_threads):
    """No thread has more than its share of the keys by more than one item and a quarter."""
    p = read(make(keys, [1] * len(keys), 16, num_threads))
    sizes = [end - begin for unit in p.units for begin, end in splits(unit)]
    loads = [sum(sizes[a:b]) for a, b in zip(p.bounds, p.bounds[1:], strict=False)]
    assert max(loads) <= 1.25 * sum(sizes) / num_threads + max(sizes)


def test_decode_is_the_plan_of_equal_query_lengths():
    keys = np.array([5, 300, 4097], np.int64)
    for q in (1, 4):
        decode = amx_kernels.plan_attention(keys, None, 3 * q, 16, 2)
        extend = amx_kernels.plan_attention(keys, np.arange(4) * q, 3 * q, 16, 2)
        np.testing.assert_array_equal(decode, extend)


def test_index_types_do_not_matter():
    keys, tokens = BATCHES["prefill"]
    np.testing.assert_array_equal(make(keys, tokens, 16, 2, np.int32), make(keys, tokens, 16, 2, np.int64))


def test_threads_default_to_those_of_the_module(threads):
    amx_kernels.set_num_threads(3)
    assert read(amx_kernels.plan_attention(np.array([5], np.int32), None, 1, 16)).header.num_threads == 3


CASE = AttentionCase(2, (40, 700, 3), query_lens=(3, 5, 1), block_size=16)


def _refused(plan, pattern):
    data = CASE.build()
    with pytest.raises(ValueError, match=pattern):
        attend(data, plan=plan)
    assert (data.out == bf16.NAN).all() and np.isnan(data.lse).all()


def test_plan_for_other_lengths_is_refused():
    right = plan_of(CASE.build())
    attend(CASE.build(), plan=right)
    for other in (
        AttentionCase(2, (41, 700, 3), query_lens=(3, 5, 1)),
        AttentionCase(2, (40, 700, 3), query_lens=(3, 4, 2)),
    ):
        _refused(plan_of(other.build()), r"plan was made for \d+ new tokens and \d+ keys of request \d, expected")
    _refused(plan_of(AttentionCase(4, CASE.seq_lens, query_lens=CASE.query_lens).build()), "plan was made for 4 heads")
    _refused(
        plan_of(AttentionCase(2, (40, 700), query_lens=(3, 5)).build()), "plan was made for 2 requests, expected 3"
    )


def test_corrupted_plan_is_refused():
    """Whichever word was overwritten, and wherever it was cut off."""
    right = plan_of(CASE.build())
    for word in range(len(right)):
        wrong = right.copy()
        wrong[word] ^= 1 << (word % 63)
        _refused(wrong, "plan")
    for size in (0, 1, 5, len(right) - 1):
        _refused(right[:size].copy(), "plan is not an intact result of plan_attention")
    _refused(np.concatenate([right, right]), "plan is not an intact result of plan_attention")
    _refused(np.zeros(100, np.int64), "plan is not an intact result of plan_attention")


def test_plan_of_another_type_is_refused():
    right = plan_of(CASE.build())
    _refused(right.astype(np.int32), "plan is int32, expected int64")
    _refused(right[None], "plan has 2 dimensions, expected 1")
    _refused(np.repeat(right, 2)[::2], r"plan.stride\(0\) is 2, expected a contiguous last dimension")


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        ({"num_tokens": -1}, r"num_tokens is -1, expected between 0 and \d+"),
        ({"num_heads": 0}, "num_heads is 0, expected between 1 and"),
        ({"num_heads": 10**9}, "num_heads is 1000000000, expected between 1 and"),
        ({"num_threads": 0}, "num_threads is 0, expected between 1 and"),
        ({"num_threads": 10**6}, "num_threads is 1000000, expected between 1 and"),
        ({"num_tokens": 3}, "3 query tokens for 2 requests"),
        ({"seq_lens": np.array([5, -2])}, r"seq_lens\[1\] is -2, expected between 0 and \d+"),
        ({"seq_lens": np.array([5.0, 2.0])}, "seq_lens is float64, expected int32 or int64"),
        ({"seq_lens": np.array([[5, 2]])}, "seq_lens has 2 dimensions, expected 1"),
        ({"seq_lens": np.array([], np.int64)}, "seq_lens is empty, expected a length for each of the requests"),
        ({"query_start_loc": np.array([0, 1])}, r"query_start_loc.size\(0\) is 2, expected 3"),
        ({"query_start_loc": np.array([1, 1, 2])}, r"query_start_loc\[0\] is 1, expected 0"),
        ({"query_start_loc": np.array([0, 2, 1])}, r"query_start_loc\[2\] is 1, expected between 2"),
        ({"query_start_loc": np.array([0, 1, 9])}, r"query_start_loc\[2\] is 9, expected between 1 .* and 2"),
        (
            {"query_start_loc": np.array([0, 2, 2]), "seq_lens": np.array([1, 2])},
            r"seq_lens\[0\] is 1, expected 0 or at least",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_arguments_are_refused(arguments, pattern):
    right = {"seq_lens": np.array([5, 2]), "query_start_loc": None, "num_tokens": 2, "num_heads": 16, "num_threads": 2}
    with pytest.raises(ValueError, match=pattern):
        amx_kernels.plan_attention(**{**right, **arguments})
