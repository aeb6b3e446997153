# SPDX-License-Identifier: Apache-2.0
"""The ops under vLLM's names: signatures, semantics, and what they refuse. Results are judged against float64."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

from amx_mla_backend import ops
from mla_testing import reference, tolerances
from mla_testing.compare import assert_close

RANK, ROPE, HEADS = 512, 64, 4
D = RANK + ROPE


@pytest.mark.parametrize("name", ["cpu_mla_decode", "cpu_mla_extend", "bmm_cpu", "amx_mla_concat_and_cache"])
def test_signatures_are_vllms(name: str) -> None:
    import vllm._custom_ops

    if not hasattr(vllm._custom_ops, name):
        pytest.skip(f"this vLLM has no {name}")
    ours, theirs = inspect.signature(getattr(ops, name)), inspect.signature(getattr(vllm._custom_ops, name))
    assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
        (p.name, p.kind, p.default) for p in theirs.parameters.values()
    ]


def flat_case(lengths: list[int], index: torch.dtype = torch.int64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A flat cache [slots, 1, D], a pool of token rows (request i at pool row 2 i + 1), seq_lens."""
    generator = torch.Generator().manual_seed(1)
    slots = 2 * sum(lengths) + 1
    cache = torch.randn(slots, 1, D, generator=generator).to(torch.bfloat16)
    order = torch.randperm(slots, generator=generator)
    table = torch.zeros(2 * len(lengths) + 1, max(lengths), dtype=index)
    taken = 0
    for i, n in enumerate(lengths):
        table[2 * i + 1, :n] = order[taken : taken + n]
        taken += n
    return cache, table, torch.tensor(lengths)


def expected(q: torch.Tensor, cache: torch.Tensor, rows: torch.Tensor, lengths: Any, starts: Any, scale: float) -> Any:
    return reference.latent_attention_details(
        q[..., :RANK].float().numpy(), q[..., RANK:].float().numpy(), cache.float().numpy(), rows.numpy(),
        np.asarray(lengths), starts, scale,
    )  # fmt: skip


OFF: dict[str, Any] = {
    "logit_cap": 0.0,
    "is_cross_attn": False,
    "sliding_window_size": 0,
    "encoder_lens": None,
    "sinks": None,
}


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("new_rows", [False, True], ids=["cached", "with-key"])
def test_decode(index: torch.dtype, new_rows: bool) -> None:
    cache, table, lengths = flat_case([1, 33, 300], index)
    pool = torch.tensor([1, 3, 5])
    rows = table[pool]
    q = torch.randn(3, HEADS, D).to(torch.bfloat16)
    out = torch.full((3, HEADS, RANK), float("nan"), dtype=torch.bfloat16)
    key = value = loc = None
    before = cache.clone()
    if new_rows:
        loc = torch.stack([rows[i, n - 1] for i, n in enumerate(lengths.tolist())]).long()
        key = torch.randn(3, 1, D).to(torch.bfloat16)
        value = key[..., :RANK]
        before[loc] = key
    ops.cpu_mla_decode(
        q, cache, cache[..., :RANK], out, key, value, loc, torch.empty(0), table, pool, lengths, 0.07, **OFF
    )
    assert torch.equal(cache, before)
    want = expected(q, cache, rows, lengths, None, 0.07)
    assert_close(out, want.out, tol=tolerances.attention(want), what="decode")


def test_extend() -> None:
    cache, table, lengths = flat_case([9, 81, 160])
    new = torch.tensor([9, 17, 32])
    starts = torch.tensor([0, 9, 26])
    pool = torch.tensor([1, 3, 5])
    tokens = int(new.sum())
    q = torch.randn(tokens, HEADS, D).to(torch.bfloat16)
    rows = torch.cat([cache[table[p, n - e : n]] for p, n, e in zip(pool, lengths, new, strict=True)])
    out = torch.full((tokens, HEADS, RANK), float("nan"), dtype=torch.bfloat16)
    ops.cpu_mla_extend(
        q, rows, rows[..., :RANK], out, cache, cache[..., :RANK], table, pool, lengths, new, starts, 32, 0.07, **OFF
    )
    want = expected(q, cache, table[pool], lengths, [0, 9, 26, 58], 0.07)
    assert_close(out, want.out, tol=tolerances.attention(want), what="extend")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_bmm(packed: bool, scaled: bool) -> None:
    a = torch.randn(4, 7, 128).to(torch.bfloat16)
    b = torch.randn(4, 96, 128).to(torch.bfloat16)
    out = torch.empty(4, 7, 96, dtype=torch.bfloat16)
    factor = 0.5 if scaled else 1.0
    scale = torch.tensor(factor) if scaled else None
    ops.bmm_cpu(out, a, ops.convert_weight_packed(b) if packed else b, packed, scale)
    want = factor * reference.bmm(a.float().numpy(), b.float().numpy())
    assert_close(out, want, tol=tolerances.gemm(128), what="bmm")


def test_concat_and_cache() -> None:
    cache = torch.zeros(2, 16, D, dtype=torch.bfloat16)
    rows = torch.randn(3, D).to(torch.bfloat16)
    ops.amx_mla_concat_and_cache(rows[:, :RANK], rows[:, RANK:], cache, torch.tensor([17, -1, 2]))
    flat = cache.view(32, D)
    assert torch.equal(flat[17], rows[0]) and torch.equal(flat[2], rows[2])
    flat[[17, 2]] = 0
    assert not flat.any()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_cap", 30.0),
        ("is_cross_attn", True),
        ("sliding_window_size", 128),
        ("encoder_lens", torch.ones(1)),
        ("sinks", torch.ones(1)),
        ("tree_mask", torch.ones(1)),
    ],
)
def test_what_the_kernels_do_not_do_is_refused(name: str, value: Any) -> None:
    cache, table, lengths = flat_case([3])
    q, out = torch.zeros(1, HEADS, D, dtype=torch.bfloat16), torch.zeros(1, HEADS, RANK, dtype=torch.bfloat16)
    one, pool = torch.ones(1, dtype=torch.int64), torch.tensor([1])
    options = OFF | {name: value}
    with pytest.raises(NotImplementedError, match=name):
        ops.cpu_mla_extend(
            q, None, None, out, cache, cache[..., :RANK], table, pool, lengths, one, one - 1, 1, 1.0, **options
        )
    if name != "tree_mask":
        with pytest.raises(NotImplementedError, match=name):
            ops.cpu_mla_decode(
                q, cache, cache[..., :RANK], out, None, None, None, torch.empty(0), table, pool, lengths, 1.0, **options
            )


def test_values_of_their_own_are_refused() -> None:
    cache, table, lengths = flat_case([3])
    q, out = torch.zeros(1, HEADS, D, dtype=torch.bfloat16), torch.zeros(1, HEADS, RANK, dtype=torch.bfloat16)
    pool = torch.tensor([1])

    def decode(values: torch.Tensor, key: Any = None, value: Any = None, loc: Any = None) -> None:
        ops.cpu_mla_decode(q, cache, values, out, key, value, loc, torch.empty(0), table, pool, lengths, 1.0, **OFF)

    with pytest.raises(ValueError, match="v_buffer"):
        decode(cache[..., :RANK].clone())
    key = torch.zeros(1, 1, D, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="value=None"):
        decode(cache[..., :RANK], key, None, pool)
    with pytest.raises(ValueError, match="loc=None"):
        decode(cache[..., :RANK], key, key[..., :RANK], None)


def test_extend_starts_must_be_running_sums() -> None:
    cache, table, lengths = flat_case([3, 4])
    q, out = torch.zeros(4, HEADS, D, dtype=torch.bfloat16), torch.zeros(4, HEADS, RANK, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"extend_start_loc=\[0, 1\]"):
        ops.cpu_mla_extend(
            q, None, None, out, cache, cache[..., :RANK], table, torch.tensor([1, 3]), lengths, torch.tensor([2, 2]),
            torch.tensor([0, 1]), 2, 1.0, **OFF,
        )  # fmt: skip
