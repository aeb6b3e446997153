# SPDX-License-Identifier: Apache-2.0
"""Whole MLA prefill: per-head queries in, per-head outputs out, absorption and de-absorption counted on every side.

Ours has two ways: *absorbed* (two products around attention over latent rows) and *decompressed* (keys and values
expanded per head), and chooses by a request's lengths alone. The limit is that of the way with fewer operations. A grid
of query x context lengths times the chosen and the other way in turn, and shows how far the choice is from the better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from mla_testing import compare, peers, reference, tolerances
from mla_testing.bench.attention import (
    MAC_PER_KEY,
    ROW_BYTES,
    SCALE,
    P,
    Pool,
    R,
    attended_keys,
    attention_check,
    our_attention,
    peer_maker,
)
from mla_testing.bench.common import Context, Entry, Options, Work, bits

__all__ = ["run"]

NOPE, V = 128, 128
WAYS = ("absorbed", "decompressed")
GRID_QUERIES = (16, 64, 128, 256, 512, 2048)
GRID_CONTEXTS = (0, 512, 1024, 2048, 4096, 8192)
#: Name of the contender that goes the way not chosen, before the tier's.
_OTHER = "other_way"

#: Name of a case -> heads, context lengths, new tokens of each request.
CASES: dict[str, tuple[int, list[int], list[int]]] = {
    "fresh512_h16": (16, [0], [512]),
    "fresh2048_h16": (16, [0], [2048]),
    "fresh8192_h16": (16, [0], [8192]),
    "fresh4x2048_h16": (16, [0] * 4, [2048] * 4),
    "chunk512_ctx8192_h16": (16, [8192], [512]),
    "chunk2048_ctx8192_h16": (16, [8192], [2048]),
    "q1_ctx8192_h16": (16, [8191], [1]),
    "q8_ctx8192_h16": (16, [8184], [8]),
    "q64_ctx8192_h16": (16, [8128], [64]),
    "fresh512_h128": (128, [0], [512]),
    "fresh2048_h22": (22, [0], [2048]),
}
#: The same for the attention in latent space alone (``extend_attention_cpu``), the absorbed way's middle part.
EXTEND_CASES: dict[str, tuple[int, list[int], list[int]]] = {
    "extend_fresh512_h16": (16, [0], [512]),
    "extend_fresh2048_h16": (16, [0], [2048]),
    "extend_q512_ctx7680_h16": (16, [7680], [512]),
    "extend_q8_ctx8184_h16": (16, [8184], [8]),
    "extend_fresh512_h128": (128, [0], [512]),
}
#: Few new tokens on much context: the absorbed way's.
SHORT = ("q1_ctx8192_h16", "q8_ctx8192_h16", "q64_ctx8192_h16")
QUICK = ("fresh512_h16", "fresh2048_h16", "chunk512_ctx8192_h16", "q8_ctx8192_h16", "extend_fresh2048_h16")


def flop(way: str, heads: int, contexts: Sequence[int], queries: Sequence[int]) -> float:
    """Additions and multiplications of a way: ``absorbed`` or ``decompressed``."""
    keys = [context + new for context, new in zip(contexts, queries, strict=True)]
    pairs = attended_keys(keys, queries)
    if way == "absorbed":
        return 2.0 * heads * (MAC_PER_KEY * pairs + sum(queries) * R * (NOPE + V))
    return 2.0 * heads * ((NOPE + P + V) * pairs + sum(keys) * R * (NOPE + V))


def least(heads: int, contexts: Sequence[int], queries: Sequence[int]) -> tuple[float, list[str]]:
    """Operations with the cheaper way for each request, and that way."""
    total, chosen = 0.0, []
    for context, new in zip(contexts, queries, strict=True):
        costs = {way: flop(way, heads, [context], [new]) for way in WAYS}
        chosen.append(min(costs, key=costs.__getitem__))
        total += costs[chosen[-1]]
    return total, chosen


def chosen_way(case: peers.PrefillCase) -> str:
    """The library's choice; the requests of a case have equal lengths.

    Raises:
        ValueError: requests for which the choices differ.
    """
    import amx_kernels

    pairs = zip(case.latent(case.q_nope).query_lens.tolist(), case.seq_lens.tolist(), strict=True)
    choices = {amx_kernels.prefill_decompressed(new, keys) for new, keys in pairs}
    if len(choices) != 1:
        raise ValueError(f"requests of lengths {case.seq_lens.tolist()} take different ways, expected one for all")
    return WAYS[choices.pop()]


def our_prefill(case: peers.PrefillCase, tier: str, threads: int, way: str = "auto") -> Entry:
    """Our operators with plan and packed weights made beforehand; ``way``: absorbed, decompressed, or auto."""
    import amx_kernels.torch  # noqa: F401
    from amx_kernels import isa

    ops = torch.ops.amx_kernels
    isa.set(tier)
    name = f"ours:{tier}"
    if way == "auto":
        way = chosen_way(case)
    out = case.empty_out()
    paged = (case.kv_cache, case.block_table, case.seq_lens, case.query_start_loc)
    if way == "decompressed":
        w_uk = ops.convert_weight_packed(case.w_uk.transpose(1, 2).contiguous())
        w_uv = ops.convert_weight_packed(case.w_uv)

        def call() -> None:
            ops.prefill_attention_cpu(out, None, case.q_nope, case.q_pe, *paged, w_uk, w_uv, case.scale)
    else:
        w_uk, w_uv = ops.convert_weight_packed(case.w_uk), ops.convert_weight_packed(case.w_uv)
        tokens, heads, _ = case.q_nope.shape
        plan = ops.plan_attention(case.seq_lens, case.query_start_loc, tokens, heads, threads)
        query, latent = case.empty_latent(), case.empty_latent()

        def call() -> None:
            ops.bmm_cpu(query.transpose(0, 1), case.q_nope.transpose(0, 1), w_uk, True)
            ops.extend_attention_cpu(latent, None, query, case.q_pe, *paged, case.scale, plan)
            ops.bmm_cpu(out.transpose(0, 1), latent.transpose(0, 1), w_uv, True)

    return Entry(name, call, lambda: out, lambda: isa.set(tier))


def prefill_case(pool: Pool, heads: int, contexts: Sequence[int], queries: Sequence[int]) -> peers.PrefillCase:
    """Random queries and weights of the size that trained ones have, over the pool's cache."""
    keys = [context + new for context, new in zip(contexts, queries, strict=True)]
    latent = pool.case(heads, keys, queries)
    generator = pool.generator
    tokens = sum(queries)

    def normal(*shape: int, deviation: float = 1.0) -> torch.Tensor:
        return torch.empty(*shape).normal_(std=deviation, generator=generator).bfloat16()

    return peers.PrefillCase(
        # As in a model, nope and rope parts are slices of one projection.
        q_nope=(query := normal(tokens, heads, NOPE + P))[..., :NOPE],
        q_pe=query[..., NOPE:],
        kv_cache=latent.kv_cache,
        block_table=latent.block_table,
        seq_lens=latent.seq_lens,
        query_start_loc=latent.query_start_loc,
        w_uk=normal(heads, R, NOPE, deviation=R**-0.5),
        w_uv=normal(heads, V, R, deviation=R**-0.5),
        scale=SCALE,
    )


def prefill_check(case: peers.PrefillCase) -> Callable[[Any], dict[str, Any]]:
    """Compares some tokens of the first and of the last request: the first two, some between, the last four."""

    @lru_cache(maxsize=1)
    def expected() -> tuple[np.ndarray, reference.Attention]:
        starts = case.query_start_loc.tolist()
        tokens: list[int] = []
        lengths: list[int] = []
        tables: list[np.ndarray] = []
        for request in {0, len(starts) - 2}:
            first, end = starts[request], starts[request + 1]
            count = end - first
            inside = {0, 1, count // 3, count // 2, *range(count - 4, count)} & set(range(count))
            for token in sorted(inside):  # each as a request of its own, with one new token
                tokens.append(first + token)
                lengths.append(int(case.seq_lens[request]) - count + token + 1)
                tables.append(case.block_table.numpy()[request])
        chosen = np.array(tokens)
        return chosen, reference.mla_prefill_details(
            bits(case.q_nope)[chosen],
            bits(case.q_pe)[chosen],
            bits(case.kv_cache),
            np.stack(tables),
            np.array(lengths),
            None,
            bits(case.w_uk),
            bits(case.w_uv),
            case.scale,
        )

    def check(actual: torch.Tensor) -> dict[str, Any]:
        tokens, details = expected()
        found = compare.assert_close(
            actual[torch.from_numpy(tokens)], details.out, tol=tolerances.prefill(details), what="prefill output"
        )
        return {"max_abs": found.max_abs, "of_tolerance": found.worst_ratio, "tokens": len(tokens)}

    return check


def _other_way(case: peers.PrefillCase, tier: str) -> Callable[[int], Entry]:
    """The way that the library does not choose, as a peer."""

    def make(threads: int) -> Entry:
        way = next(way for way in WAYS if way != chosen_way(case))
        entry = our_prefill(case, tier, threads, way)
        entry.name = f"{_OTHER}:{tier}"
        return entry

    return make


def _work(
    pool: Pool,
    name: str,
    heads: int,
    contexts: Sequence[int],
    queries: Sequence[int],
    *,
    ways_of: Sequence[str] = (),
    **changes: Any,
) -> Work:
    """Against the peers; where ``ways_of`` names tiers, against the other way on each of them instead."""
    case = prefill_case(pool, heads, contexts, queries)
    keys = [context + new for context, new in zip(contexts, queries, strict=True)]
    operations, chosen = least(heads, contexts, queries)
    tokens = sum(queries)
    return Work(
        case=name,
        params={
            "heads": heads,
            "contexts": list(contexts),
            "queries": list(queries),
            "way": chosen_way(case),
            "fewer_operations": chosen,
        },
        flop=operations,
        size=float(sum(keys) * ROW_BYTES + tokens * heads * 2 * (NOPE + P + V) + heads * R * 2 * (NOPE + V)),
        make_ours=lambda tier, threads: our_prefill(case, tier, threads),
        make_peers={f"{_OTHER}:{tier}": _other_way(case, tier) for tier in ways_of}
        or {n: peer_maker(n, adapter, case) for n, adapter in peers.PREFILL.items()},
        check=prefill_check(case),
        **changes,
    )


def _extend_work(pool: Pool, name: str, heads: int, contexts: Sequence[int], queries: Sequence[int]) -> Work:
    keys = [context + new for context, new in zip(contexts, queries, strict=True)]
    case = pool.case(heads, keys, queries)
    return Work(
        case=name,
        params={"heads": heads, "contexts": list(contexts), "queries": list(queries), "way": "latent"},
        flop=2.0 * MAC_PER_KEY * heads * attended_keys(keys, queries),
        size=float(sum(keys) * ROW_BYTES + sum(queries) * heads * 2 * (R + P + R)),
        make_ours=lambda tier, threads: our_attention(case, tier, threads, decode=False),
        make_peers={n: peer_maker(n, adapter, case) for n, adapter in peers.EXTEND.items()},
        check=attention_check(case),
    )


def chooser(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Over the grid: time of the library's choice over the better way's. ``worst`` is the largest of those ratios."""
    times: dict[str, dict[str, float]] = {}
    choices: dict[str, str] = {}
    for entry in results:
        other = entry["peers"].get(f"{_OTHER}:{entry['tier']}", {})
        if "failed" in entry or "ms" not in other:
            continue
        point, way = f"{entry['case']}@{entry['tier']}", entry["params"]["way"]
        choices[point] = way
        times[point] = {w: (entry if w == way else other)["ms"]["median"] for w in WAYS}
    ratios = {point: by_way[choices[point]] / min(by_way.values()) for point, by_way in times.items()}
    return {"ms": times, "choices": choices, "ratios": ratios, "worst": max(ratios.values(), default=None)}


def run(options: Options) -> tuple[dict[str, Any], int]:
    """Runs the benchmark; the report and an exit status (see ``Context.exit_status``).

    summary: {speedup: {case: {peer}}, limit_fraction: {case}, limit_fraction_short_min: over ``SHORT``, chooser_worst,
    chooser_points: how many points of the grid count}.
    """
    context = Context(options)
    threads = max(context.threads)
    cases = {name: case for name, case in (CASES | EXTEND_CASES).items() if not options.quick or name in QUICK}
    step = 3 if options.quick else 1
    grid = {
        f"grid-q{new}-ctx{old}": (16, [old], [new]) for new in GRID_QUERIES[::step] for old in GRID_CONTEXTS[::step]
    }
    table = cases | grid
    chosen = context.select(table)
    pool = Pool(max(sum(-(-(a + b) // 128) * 128 for a, b in zip(*table[name][1:3], strict=True)) for name in chosen))

    def work(name: str) -> Work:
        if name in EXTEND_CASES:
            return _extend_work(pool, name, *table[name])
        if name in grid:
            return _work(pool, name, *table[name], ways_of=context.tiers, threads=(threads,))
        return _work(pool, name, *table[name])

    context.run({name: lambda name=name: work(name) for name in chosen})
    by_tier = {}
    for tier in context.tiers:
        of_tier = [entry for entry in context.results if entry["tier"] == tier and entry["threads"] == threads]
        good = [entry for entry in of_tier if entry["case"] in cases and "failed" not in entry]
        fractions = {entry["case"]: entry["limit_fraction"] for entry in good}
        ways = chooser(of_tier)
        by_tier[tier] = {
            "speedup": {
                entry["case"]: {name: peer["speedup"] for name, peer in entry["peers"].items() if "ms" in peer}
                for entry in good
            },
            "limit_fraction": fractions,
            "limit_fraction_short_min": min((fractions[name] for name in SHORT if fractions.get(name)), default=None),
            "chooser_worst": ways["worst"],
            "chooser_points": len(ways["ratios"]),
        }
    found = context.document(
        "bench_prefill",
        by_tier.get("avx512bf16") or by_tier.get(context.tiers[-1]),
        summary_by_tier=by_tier,
        chooser=chooser(context.results),
    )
    return found, context.exit_status
