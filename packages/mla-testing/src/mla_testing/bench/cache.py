# SPDX-License-Identifier: Apache-2.0
"""Writing new latent rows into the paged cache, against memcpy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mla_testing import peers, report
from mla_testing.bench.attention import BLOCK, P, R
from mla_testing.bench.common import Context, Entry, Options, Work

__all__ = ["run"]

TOKENS = (1, 32, 512, 2048, 8192)
#: Fewer tokens than this are an operator call and little else; bandwidth says nothing of them.
BULK = 512


def _make(name: str, adapter: type, arguments: Callable[[], tuple[torch.Tensor, ...]]) -> Callable[[int], Entry]:
    def make(threads: int) -> Entry:
        peer = adapter(*arguments())
        return Entry(name, peer, lambda: peer.out)

    return make


def _work(name: str, tokens: int, tiers: tuple[str, ...]) -> Work:
    generator = torch.Generator().manual_seed(tokens)
    # As in a model: two slices of one projection's output, so rows lie R + P apart.
    source = torch.empty(tokens, R + P).normal_(generator=generator).bfloat16()
    kv_c, k_pe = source[:, :R], source[:, R:]
    blocks = -(-tokens // BLOCK) + 1
    # Whole blocks in random order, rows of a block in sequence: what a paged allocator hands out.
    order = torch.randperm(blocks, generator=generator)
    slots = (order[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[:tokens]

    def arguments() -> tuple[torch.Tensor, ...]:
        return kv_c, k_pe, torch.zeros(blocks, BLOCK, R + P, dtype=torch.bfloat16), slots

    def ours(tier: str, threads: int) -> Entry:
        from amx_kernels import isa

        ops = torch.ops.amx_kernels
        given = arguments()
        return Entry(
            f"ours:{tier}", lambda: ops.concat_and_cache_mla_cpu(*given), lambda: given[2], lambda: isa.set(tier)
        )

    expected = torch.zeros(blocks * BLOCK, R + P, dtype=torch.bfloat16)
    expected[slots] = source

    def check(actual: torch.Tensor) -> dict[str, Any]:
        same = actual.flatten(0, 1).view(torch.uint16) == expected.view(torch.uint16)
        if not bool(same.all()):
            row, column = (int(index) for index in (~same).nonzero()[0])
            raise AssertionError(f"cache row {row}, column {column}: not the bits that were written")
        return {"max_abs": 0.0, "of_tolerance": 0.0, "rows": len(expected)}

    return Work(
        case=name,
        params={"tokens": tokens},
        flop=0.0,
        size=float(2 * tokens * (R + P)),
        make_ours=ours,
        make_peers={n: _make(n, adapter, arguments) for n, adapter in peers.CACHE.items()},
        check=check,
        tiers=tiers,
    )


def run(options: Options) -> tuple[dict[str, Any], int]:
    """Runs the benchmark; the report and an exit status (see ``Context.exit_status``).

    ``memcpy_fraction`` of a result is its bytes per second over those of memcpy, of the sizes measured the largest not
    above. summary: {memcpy_fraction: {case: fraction}, memcpy_fraction_min: over writes of ``BULK`` tokens and more}
    and what every benchmark has.
    """
    context = Context(options)
    best = context.tiers[-1:]  # copying is the same code on every tier
    table = {f"write{tokens}": tokens for tokens in (TOKENS[::2] if options.quick else TOKENS)}
    context.run({name: lambda name=name: _work(name, table[name], best) for name in context.select(table)})
    for entry in context.results:
        points = context.limits.memcpy[entry["threads"]]
        rate = next((rate for size, rate in reversed(points) if size <= entry["bytes"]), points[0][1])
        entry["limit_ms"], entry["bound"] = 1e3 * entry["bytes"] / rate, "memcpy"
        median = entry["ms"]["median"]
        entry["limit_fraction"] = entry["memcpy_fraction"] = None if "failed" in entry else entry["limit_ms"] / median
    threads = max(context.threads)
    of_threads = [entry for entry in context.results if entry["threads"] == threads]
    fractions = {entry["case"]: entry["memcpy_fraction"] for entry in of_threads}
    bulk = [e["memcpy_fraction"] for e in of_threads if e["params"]["tokens"] >= BULK and e["memcpy_fraction"]]
    summary = (report.summarise(of_threads) or {}) | {
        "memcpy_fraction": fractions,
        "memcpy_fraction_min": min(bulk, default=None),
    }
    return context.document("bench_cache", summary), context.exit_status
