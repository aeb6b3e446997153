# SPDX-License-Identifier: Apache-2.0
"""Property tests: any ragged batch, block table, stride, dtype and slot mapping, on every tier, against float64.

Hypothesis draws a case; each tier runs it, so that one drawn example is one example of every tier, and tiers are held
against the same reference. Memory the op has no business with is NaN or infinity, outputs lie among canaries.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import numpy as np
from fault_support import attend, normal
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from reliability import Tiers

import amx_kernels
from mla_testing import bf16, cases, compare, reference, tolerances

#: Lengths near the edges of vectors, tiles and blocks, and anything else.
LENGTHS = st.one_of(st.sampled_from([0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65]), st.integers(0, 90), st.just(257))
WIDTHS = st.one_of(st.sampled_from([1, 2, 15, 16, 17, 31, 32, 33, 48, 64, 96]), st.integers(1, 80))
INDEX = st.sampled_from(["int32", "int64"])


#: Widths of an output's rows. Below 16 it has so few columns that all may be near zero by chance; its direction, which
#: the tolerance also judges, means nothing; the fault tests run those widths on fixed numbers.
RANKS = st.one_of(st.sampled_from([16, 17, 31, 32, 33, 48, 64, 96]), st.integers(16, 80))
HEADS = st.sampled_from([*range(1, 21), 32, 40, 128])
#: The decompressed form takes whole groups of latent columns.
WHOLE_RANKS = st.sampled_from([32, 64, 96, 128])


@st.composite
def attention_cases(
    draw: st.DrawFn, decode: bool, ranks: st.SearchStrategy[int] = RANKS, heads: st.SearchStrategy[int] = HEADS
) -> cases.AttentionCase:
    requests = draw(st.integers(0, 5))
    lens = [draw(LENGTHS) for _ in range(requests)]
    new: tuple[int, ...] | None = None
    if not decode:
        new = tuple(draw(st.integers(0, min(n, 40))) if n else draw(st.integers(0, 3)) for n in lens)
    return cases.AttentionCase(
        heads=draw(heads),
        seq_lens=tuple(lens),
        query_lens=new,
        block_size=draw(st.sampled_from([1, 2, 7, 16, 24, 32, 48, 64, 128])),
        layout=draw(st.sampled_from(cases.LAYOUTS)),
        index_dtype=draw(INDEX),
        rank=draw(ranks),
        rope=draw(st.one_of(st.just(0), st.sampled_from([8, 16, 32]), st.integers(0, 40))),
        fused_q=draw(st.booleans()),
        out_padding=draw(st.sampled_from([0, 0, 1, 8, 24])),
        extra_tokens=0 if decode else draw(st.integers(0, 3)),
        poison=draw(st.sampled_from(["nan", "inf"])),
        sharpness=draw(st.sampled_from([0.01, 1.0, 4.0, 16.0])),
        seed=draw(st.integers(0, 2**16)),
    )


BMM_CASES = st.builds(
    cases.BmmCase,
    batch=st.integers(0, 4),
    rows=st.one_of(st.integers(0, 40), st.sampled_from([63, 64, 65, 130])),
    out_features=st.one_of(WIDTHS, st.integers(0, 300)),
    in_features=st.one_of(WIDTHS, st.integers(1, 200)),
    transposed=st.booleans(),
    out_padding=st.sampled_from([0, 0, 1, 24]),
    seed=st.integers(0, 2**16),
)

CONCAT_CASES = st.builds(
    cases.ConcatCase,
    tokens=st.one_of(st.integers(0, 70), st.sampled_from([128, 200])),
    block_size=st.sampled_from([1, 2, 7, 16, 48, 64]),
    layout=st.sampled_from(cases.LAYOUTS),
    index_dtype=INDEX,
    skipped=st.booleans(),
    extra_tokens=st.integers(0, 4),
    rank=WIDTHS,
    rope=st.integers(0, 40),
    seed=st.integers(0, 2**16),
)

PACK_SHAPES = st.tuples(st.integers(0, 4), st.integers(0, 140), st.integers(1, 140), st.sampled_from([0, 1, 2, 8]))


def attention(case: cases.AttentionCase, planned: bool) -> None:
    data = case.build()
    plan = None
    if planned:
        start = None if case.query_lens is None else data.query_start_loc
        plan = amx_kernels.plan_attention(data.seq_lens, start, len(data.q_latent), case.heads)
    attend(data, plan=plan)
    data.check()


@functools.lru_cache(maxsize=2)
def prefill_values(
    case: cases.AttentionCase, nope: int, value: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, reference.Attention]:
    """q_nope, W_UK, W_UV and the float64 answer, once for all tiers. Keys and values are about 1 in size, as a model's
    are: rounding larger keys to bfloat16, which the op does by its nature, moves a peaked softmax by more than the
    tolerance of its slope provides for."""
    data = case.build()
    q_nope = normal(case.seed, len(data.q_latent), case.heads, nope)
    q_nope[data.live_tokens :] = bf16.NAN
    rng = np.random.default_rng(case.seed)
    w_uk, w_uv = (
        bf16.from_float(rng.standard_normal((case.heads, width, case.rank), np.float32) / np.float32(case.rank) ** 0.5)
        for width in (nope, value)
    )
    live = data.live_tokens
    expected = reference.mla_prefill_details(
        q_nope[:live], data.q_pe[:live], data.kv_cache, data.block_table, data.seq_lens, data.query_start_loc,
        w_uk.transpose(0, 2, 1), w_uv, data.scale,
    )  # fmt: skip
    return q_nope, w_uk, w_uv, expected


def prefill(drawn: tuple[cases.AttentionCase, int, int], with_lse: bool) -> None:
    """The decompressed form."""
    case, _, value = drawn
    data = case.build()
    q_nope, w_uk, w_uv, expected = prefill_values(*drawn)
    out, buffer = cases.guarded((len(q_nope), case.heads, value), np.uint16, row_padding=case.out_padding)
    amx_kernels.prefill_attention_cpu(
        out, data.lse if with_lse else None, q_nope, data.q_pe, data.kv_cache, data.block_table, data.seq_lens,
        data.query_start_loc, amx_kernels.convert_weight_packed(w_uk), amx_kernels.convert_weight_packed(w_uv),
        data.scale,
    )  # fmt: skip
    live = data.live_tokens
    compare.assert_close(out[:live], expected.out, tol=tolerances.prefill(expected), what="out")
    if with_lse:
        tol = tolerances.lse(expected, rounded_operands=True)
        compare.assert_close(data.lse[:live], expected.lse, tol=tol, what="lse")
    if not cases.canaries_intact(out, buffer) or not (out[live:] == bf16.NAN).all():
        raise AssertionError("bytes around out, or rows past the last request, were written")


def bmm(case: cases.BmmCase, packed: bool) -> None:
    data = case.build()
    weight = amx_kernels.convert_weight_packed(data.mat2) if packed else data.mat2
    amx_kernels.bmm_cpu(data.out, data.mat1, weight, packed)
    data.check()


def concat(case: cases.ConcatCase, _: bool) -> None:
    data = case.build()
    amx_kernels.concat_and_cache_mla_cpu(data.kv_c, data.k_pe, data.kv_cache, data.slot_mapping)
    data.check()


def pack(shape: tuple[int, int, int, int], _: bool) -> None:
    """Through an identity product every weight comes back, bit for bit, whatever the row stride was."""
    batch, columns, depth, gap = shape
    weight = np.full((batch, columns, depth + gap), bf16.NAN)
    weight[..., :depth] = normal(depth, batch, columns, depth)
    weight = weight[..., :depth]
    packed = amx_kernels.convert_weight_packed(weight)
    identity = np.broadcast_to(bf16.from_float(np.eye(depth, dtype=np.float32)), (batch, depth, depth))
    out = np.full((batch, depth, columns), bf16.NAN)
    amx_kernels.bmm_cpu(out, identity, packed, True)
    if not np.array_equal(out, weight.transpose(0, 2, 1)):
        raise AssertionError(f"weight {shape}: unpacking gives other bits")


@dataclass
class Property:
    """One op: how cases are drawn and what must hold for each."""

    op: str
    draw: st.SearchStrategy[Any]
    holds: Callable[[Any, bool], None]


PROPERTIES = (
    Property("decode_attention_cpu", attention_cases(True), attention),
    Property("extend_attention_cpu", attention_cases(False), attention),
    Property(
        "prefill_attention_cpu",
        st.tuples(attention_cases(False, WHOLE_RANKS, st.integers(1, 7)), WIDTHS, RANKS),
        prefill,
    ),
    Property("bmm_cpu", BMM_CASES, bmm),
    Property("convert_weight_packed", PACK_SHAPES, pack),
    Property("concat_and_cache_mla_cpu", CONCAT_CASES, concat),
)


@dataclass
class Outcome:
    """Examples by "op tier", and what failed."""

    examples: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


class OutOfTime(Exception):
    """The session's time is up."""


def examine(one: Property, tiers: Tiers, examples: int, seconds: float, seed: int, outcome: Outcome) -> None:
    """`examples` examples of one property on every tier; raises at the first that fails, shrunk."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @hypothesis.given(one.draw, st.booleans(), st.sampled_from([1, 2, 3, 5, 8]))
    def check(case: Any, flag: bool, threads: int) -> None:
        if time.process_time() > seconds:
            raise OutOfTime
        amx_kernels.set_num_threads(threads)
        for tier in tiers.names:
            with tiers.using(tier):
                try:
                    one.holds(case, flag)
                except Exception as error:
                    where = f"{one.op} on {tier}, {threads} threads, {flag}: {case}"
                    raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
            outcome.examples[f"{one.op} {tier}"] += 1

    check()


def run(tiers: Tiers, examples: int, seconds: float, seed: int, only: list[str] | None) -> Outcome:
    """Every property (or those of `only`) on every tier, `examples` examples each, in `seconds` of processor time."""
    outcome = Outcome()
    for one in PROPERTIES:
        if only and not any(part in one.op for part in only):
            continue
        started = time.process_time()
        try:
            examine(one, tiers, examples, seconds, seed, outcome)
        except OutOfTime:
            outcome.failures.append(f"{one.op}: the time was up before {examples} examples")
            break
        except Exception as error:
            outcome.failures.append(str(error))
        counts = [outcome.examples[f"{one.op} {tier}"] for tier in tiers.names]
        if min(counts) < examples and not outcome.failures:
            outcome.failures.append(f"{one.op}: only {min(counts)} of {examples} examples were run")
        print(f"{one.op}: {min(counts)} examples a tier, {time.process_time() - started:.0f} s", flush=True)
    return outcome
