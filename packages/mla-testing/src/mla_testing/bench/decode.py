# SPDX-License-Identifier: Apache-2.0
"""Decode attention: heads x batch x context x threads, mixed batches, several query tokens, linearity, tiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mla_testing import peers, report
from mla_testing.bench.attention import (
    MAC_PER_KEY,
    ROW_BYTES,
    P,
    Pool,
    R,
    attended_keys,
    attention_check,
    our_attention,
    peer_maker,
)
from mla_testing.bench.common import Context, Options, Work

__all__ = ["run"]

HEADS = (16, 22, 64, 128)
BATCHES = (1, 8, 32)
CONTEXTS = (1024, 4096, 16384)
LINEARITY = (4096, 8192, 16384, 32768, 65536)
#: Slow peers are compared where they need seconds, not minutes.
_SLOW_PEERS_GFLOP = 20.0
#: The point at which every tier is measured.
TIER_POINT = "b8-h16-q1-kv4096"


def _lognormal(requests: int, seed: int = 7) -> list[int]:
    """Context lengths as traffic has them: median 1,100, a few ten times as long."""
    lengths = np.random.default_rng(seed).lognormal(mean=7.0, sigma=0.9, size=requests)
    return [int(length) for length in np.clip(lengths, 16, 16384)]


def _work(pool: Pool, name: str, heads: int, seq_lens: Sequence[int], query: int, **changes: Any) -> Work:
    requests = len(seq_lens)
    query_lens = [query] * requests
    case = pool.case(heads, seq_lens, query_lens)
    flop = 2.0 * MAC_PER_KEY * heads * attended_keys(seq_lens, query_lens)
    size = float(sum(seq_lens) * ROW_BYTES + requests * query * heads * 2 * (R + P + R))
    # Several query tokens per request are prefill to vLLM: its extend operator takes them.
    adapters = dict(peers.DECODE if query == 1 else peers.EXTEND)
    unavailable = {}
    if flop > _SLOW_PEERS_GFLOP * 1e9:
        for slow in ("vllm_cpu_mla", "torch"):
            if adapters.pop(slow, None):
                unavailable[slow] = f"left out above {_SLOW_PEERS_GFLOP:.0f} GFLOP per call"
    return Work(
        case=name,
        params={
            "heads": heads,
            "requests": requests,
            "query_tokens": query,
            "keys": sum(seq_lens),
            "longest": max(seq_lens),
        },
        flop=flop,
        size=size,
        make_ours=lambda tier, threads: our_attention(case, tier, threads, decode=True),
        make_peers={name: peer_maker(name, adapter, case) for name, adapter in adapters.items()},
        check=attention_check(case),
        unavailable=unavailable,
        **changes,
    )


#: Name of a case -> heads, context lengths, query tokens, and what differs from the default (threads, tiers).
Cases = dict[str, tuple[int, list[int], int, dict[str, Any]]]


def cases(quick: bool, best_threads: int, usable: Sequence[str]) -> Cases:
    """All cases by name."""
    found: Cases = {}
    heads_of = (16, 128) if quick else HEADS
    for heads in heads_of:
        for batch in (1, 8) if quick else BATCHES:
            for context in (1024, 4096) if quick else CONTEXTS:
                found[f"b{batch}-h{heads}-q1-kv{context}"] = (heads, [context] * batch, 1, {})
    both = {"threads": (best_threads,)}
    found["b8-h12-q1-kv4096"] = (12, [4096] * 8, 1, both)
    found["mixed-b255x64-1x32768-h16-q1"] = (16, [64] * 255 + [32768], 1, both)
    found["lognormal-b32-h16-q1"] = (16, _lognormal(32), 1, both)
    for heads in (16,) if quick else (16, 128):
        for batch in (8,) if quick else (1, 8):
            found[f"b{batch}-h{heads}-q4-kv4096"] = (heads, [4096] * batch, 4, both)
    for context in LINEARITY[:: 2 if quick else 1]:
        found.setdefault(f"b1-h16-q1-kv{context}", (16, [context], 1, both))
    found[f"tiers-{TIER_POINT}"] = (16, [4096] * 8, 1, {"threads": (1,), "tiers": tuple(usable)})
    return found


def derived(results: Sequence[dict[str, Any]], peak_threads: int) -> dict[str, Any]:
    """Figures over several results: scaling, linearity, cost per head, mixed batch against its limit, tiers."""
    good = [entry for entry in results if "failed" not in entry]
    ms = {(entry["case"], entry["tier"], entry["threads"]): entry["ms"]["median"] for entry in good}
    tiers = sorted({tier for _, tier, _ in ms})
    found: dict[str, Any] = {"scaling": {}, "linearity": {}, "heads": {}, "mixed": {}, "tiers": {}}
    for tier in tiers:
        found["scaling"][tier] = {
            case: ms[case, tier, 1] / ms[case, tier, peak_threads]
            for case, its_tier, threads in ms
            if its_tier == tier and threads == peak_threads and (case, tier, 1) in ms
        }
        curve = {
            context: ms[f"b1-h16-q1-kv{context}", tier, peak_threads]
            for context in LINEARITY
            if (f"b1-h16-q1-kv{context}", tier, peak_threads) in ms
        }
        if len(curve) > 1:
            per_key = {context: 1e6 * time / context for context, time in curve.items()}
            found["linearity"][tier] = {
                "ns_per_key": per_key,
                "largest_over_smallest": max(per_key.values()) / min(per_key.values()),
            }

        def at(heads: int, tier: str = tier) -> float | None:
            return ms.get((f"b8-h{heads}-q1-kv4096", tier, peak_threads))

        if (base := at(16)) is not None:
            found["heads"][tier] = {
                "h12_over_h16": at(12) / base if at(12) else None,
                "h22_per_head_over_h16": at(22) / 22 / (base / 16) if at(22) else None,
            }
    for entry in good:
        if entry["case"].startswith(("mixed", "lognormal")) and entry["limit_ms"]:
            key = f"{entry['case']}@{entry['tier']}"
            found["mixed"][key] = {"time_over_limit": entry["ms"]["median"] / entry["limit_ms"]}
        if entry["case"] == f"tiers-{TIER_POINT}":
            found["tiers"][entry["tier"]] = {
                "ms": entry["ms"]["median"],
                "gflops": entry["gflops"],
                "limit_fraction": entry["limit_fraction"],
            }
    return found


def summary(results: Sequence[dict[str, Any]], tier: str, heads: int, threads: int) -> dict[str, Any] | None:
    """The summary of the grid's cases of one head count and tier: one query token, equal lengths, ``threads``."""
    return report.summarise(
        entry
        for entry in results
        if entry["tier"] == tier
        and entry["threads"] == threads
        and entry["params"]["heads"] == heads
        and entry["params"]["query_tokens"] == 1
        and entry["case"].startswith("b")
        and entry["params"]["longest"] <= max(CONTEXTS)
        and entry["params"]["requests"] in BATCHES
        and entry["params"]["longest"] in CONTEXTS
    )


def run(options: Options) -> tuple[dict[str, Any], int]:
    """Runs the benchmark; the report and an exit status (see ``Context.exit_status``)."""
    context = Context(options)
    peak_threads = max(context.threads)
    table = cases(options.quick, peak_threads, context.usable)
    chosen = context.select(table)
    pool = Pool(max(sum(-(-length // 128) * 128 for length in table[name][1]) for name in chosen))
    context.run(
        {
            name: lambda name=name: _work(pool, name, table[name][0], table[name][1], table[name][2], **table[name][3])
            for name in chosen
        }
    )
    by_tier = {
        tier: {
            "summary": summary(context.results, tier, 16, peak_threads),
            "summary_h128": summary(context.results, tier, 128, peak_threads),
        }
        for tier in context.tiers
    }
    named = by_tier.get("avx512bf16", {"summary": None, "summary_h128": None})
    found = context.document(
        "bench_decode",
        named["summary"],
        summary_h128=named["summary_h128"],
        summary_by_tier=by_tier,
        derived=derived(context.results, peak_threads),
    )
    return found, context.exit_status
