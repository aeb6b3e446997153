# SPDX-License-Identifier: Apache-2.0
"""The absorb and de-absorb products: out[n] = mat1[n] @ mat2[n]^T with packed weights, row-strided operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from mla_testing import compare, peers, reference, report, tolerances
from mla_testing.bench.common import Context, Entry, Options, Work, bits

__all__ = ["run"]

#: name -> N (heads), IN, OUT
SHAPES = {"absorb_h16": (16, 128, 512), "de_absorb_h16": (16, 512, 128), "absorb_h128": (128, 128, 512)}
ROWS = (1, 8, 32, 512, 2048)
#: Fewer rows are read by bandwidth alone, most of it the weights'.
_MANY_ROWS = 32
#: Above this many rows (over all heads) only some of them are compared with the reference.
_CHECKED_ROWS = 64


def _our_bmm(mat1: torch.Tensor, mat2: torch.Tensor, make_out: Callable[[], torch.Tensor], tier: str) -> Entry:
    from amx_kernels import isa

    ops = torch.ops.amx_kernels
    isa.set(tier)
    packed, out = ops.convert_weight_packed(mat2), make_out()
    return Entry(f"ours:{tier}", lambda: ops.bmm_cpu(out, mat1, packed, True), lambda: out, lambda: isa.set(tier))


def _peer(name: str, adapter: type, mat1: torch.Tensor, mat2: torch.Tensor, make_out: Callable[[], torch.Tensor]):
    def make(threads: int) -> Entry:
        peer = adapter(mat1, mat2, make_out())
        return Entry(name, peer, lambda: peer.out)

    return make


def _check(mat1: torch.Tensor, mat2: torch.Tensor) -> Callable[[Any], dict[str, Any]]:
    rows = mat1.shape[1]
    chosen = np.unique(np.linspace(0, rows - 1, min(rows, _CHECKED_ROWS)).astype(int))

    @lru_cache(maxsize=1)
    def expected() -> tuple[np.ndarray, tolerances.Tolerance]:
        left, right = bits(mat1)[:, chosen], bits(mat2)
        magnitude = float(mat1.float().square().mean().sqrt() * mat2.float().square().mean().sqrt())
        return reference.bmm(left, right), tolerances.gemm(mat1.shape[2], magnitude)

    def check(actual: torch.Tensor) -> dict[str, Any]:
        right, tolerance = expected()
        found = compare.assert_close(actual[:, torch.from_numpy(chosen)], right, tol=tolerance, what="product")
        return {"max_abs": found.max_abs, "of_tolerance": found.worst_ratio, "rows": len(chosen)}

    return check


def _work(name: str, shape: tuple[int, int, int], rows: int) -> Work:
    heads, width_in, width_out = shape
    generator = torch.Generator().manual_seed(rows)
    # Tokens first in memory, heads first to the operator: the strides that a model gives.
    mat1 = torch.empty(rows, heads, width_in).normal_(generator=generator).bfloat16().transpose(0, 1)
    mat2 = torch.empty(heads, width_out, width_in).normal_(std=width_in**-0.5, generator=generator).bfloat16()

    def make_out() -> torch.Tensor:
        return torch.empty(rows, heads, width_out, dtype=torch.bfloat16).transpose(0, 1)

    return Work(
        case=name,
        params={"heads": heads, "rows": rows, "in": width_in, "out": width_out},
        flop=2.0 * heads * rows * width_in * width_out,
        size=2.0 * heads * (rows * (width_in + width_out) + width_in * width_out),
        make_ours=lambda tier, threads: _our_bmm(mat1, mat2, make_out, tier),
        make_peers={n: _peer(n, adapter, mat1, mat2, make_out) for n, adapter in peers.BMM.items()},
        check=_check(mat1, mat2),
    )


def summarise(results: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """What every benchmark has, and {over_fastest_peer: {case: time of the fastest peer over ours}, its minimum, and
    limit_fraction_min_many_rows: over cases of 32 rows and more}."""
    good = [entry for entry in results if "failed" not in entry]
    fastest = {
        entry["case"]: min(speedups)
        for entry in good
        if (speedups := [peer["speedup"] for peer in entry["peers"].values() if "speedup" in peer])
    }
    many = [e["limit_fraction"] for e in good if e["params"]["rows"] >= _MANY_ROWS and e["limit_fraction"]]
    found = report.summarise(results)
    return found and found | {
        "over_fastest_peer": fastest,
        "over_fastest_peer_min": min(fastest.values(), default=None),
        "limit_fraction_min_many_rows": min(many, default=None),
    }


def run(options: Options) -> tuple[dict[str, Any], int]:
    """Runs the benchmark; the report and an exit status (see ``Context.exit_status``)."""
    context = Context(options)
    shapes = {name: shape for name, shape in SHAPES.items() if not options.quick or "h16" in name}
    table = {f"{name}_m{rows}": (shape, rows) for name, shape in shapes.items() for rows in ROWS}
    context.run({name: lambda name=name: _work(name, *table[name]) for name in context.select(table)})
    threads = max(context.threads)
    by_tier = {
        tier: summarise([e for e in context.results if e["tier"] == tier and e["threads"] == threads])
        for tier in context.tiers
    }
    summary = by_tier.get("avx512bf16") or by_tier[context.tiers[-1]]
    return context.document("bench_bmm", summary, summary_by_tier=by_tier), context.exit_status
