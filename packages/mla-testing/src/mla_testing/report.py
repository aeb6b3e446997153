# SPDX-License-Identifier: Apache-2.0
"""One JSON schema for every benchmark, and the tables made from it.

    {machine, versions, limits, results: [result], summary, ...}
    result  = {case, tier, threads, params, ms: stats, gflops, gbps, limit_ms, limit_fraction, bound, rounds, checked,
               peers: {name: {ms: stats, speedup, speedup_min, checked} or {unavailable: reason}}}
    stats   = {median, min, p90, samples}, milliseconds per call

``speedup`` is peer / ours of the medians, ``speedup_min`` of the minima, both over the same valid rounds. A result
without enough valid rounds has ``failed`` with the reason and no derived figures (``disturbed_min_ms`` shows the minima
of all its rounds). ``limit_fraction`` is limit_ms /
median. Figures are 10^9 FLOP/s and 10^9 bytes/s.
"""

from __future__ import annotations

import json
import math
import resource
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mla_testing import fingerprint, peers
from mla_testing.bench.harness import MIN_VALID_ROUNDS, Measurement, stats
from mla_testing.limits import Limit, Limits, LimitsError

__all__ = [
    "document",
    "geomean",
    "load",
    "markdown",
    "peak_rss_mib",
    "print_table",
    "result",
    "summarise",
    "write",
]


def geomean(values: Iterable[float]) -> float | None:
    """Geometric mean; None of nothing."""
    values = list(values)
    return math.exp(statistics.fmean(math.log(value) for value in values)) if values else None


def peak_rss_mib() -> float:
    """Largest resident memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def result(
    *,
    case: str,
    tier: str,
    measurement: Measurement,
    ours: str,
    flop: float,
    size: float,
    limits: Limits,
    params: Mapping[str, Any],
    checked: Mapping[str, Any],
    peer_names: Sequence[str],
    unavailable: Mapping[str, str],
) -> dict[str, Any]:
    """One entry of ``results``.

    Args:
        case: readable id without tier and threads, such as ``b8-h16-q1-kv4096``.
        tier: the tier that ``ours`` ran on.
        measurement: the rounds; ``ours`` is the name of our contender there.
        flop, size: the work: additions and multiplications, and bytes that must be read or written once.
        limits: measured limits.
        params: the dimensions of the case.
        checked: name of contender -> outcome of its comparison with the reference.
        peer_names: contenders to compare with.
        unavailable: name of peer -> why it did not take part.
    """
    threads = measurement.threads
    ms = stats(measurement.of(ours))
    entry: dict[str, Any] = {
        "case": case,
        "tier": tier,
        "threads": threads,
        "params": dict(params),
        "ms": ms,
        "rounds": measurement.rounds,
        "calibrator_ms": {
            "best": 1e3 * measurement.best,
            "rounds": [round(1e3 * elapsed, 4) for elapsed in measurement.calibrations],
        },
        "waited_for_cpu": [round(wait, 4) for wait in measurement.waits],
        "checked": checked.get(ours),
        "flop": flop,
        "bytes": size,
    }
    try:
        limit: Limit | None = limits.limit(flop=flop, size=size, tier=tier, threads=threads)
    except LimitsError as error:
        limit = None
        entry["no_limit"] = str(error)
    entry["limit_ms"] = limit.ms if limit else None
    entry["bound"] = limit.bound if limit else None
    compared: dict[str, Any] = {name: {"unavailable": reason} for name, reason in unavailable.items()}
    entry["peers"] = compared
    if measurement.failed:
        entry["failed"] = f"{measurement.rounds['valid']} valid rounds of at least {MIN_VALID_ROUNDS}"
        entry.update(gflops=None, gbps=None, limit_fraction=None)
        # For the eye alone: no summary reads it.
        entry["disturbed_min_ms"] = {
            name: min(sample for sample in samples if sample is not None)
            for name, samples in measurement.samples.items()
            if any(sample is not None for sample in samples)
        }
        return entry
    entry["gflops"] = flop / ms["median"] / 1e6
    entry["gbps"] = size / ms["median"] / 1e6
    entry["limit_fraction"] = limit.ms / ms["median"] if limit else None
    for name in peer_names:
        theirs = stats(measurement.of(name))
        compared[name] = {
            "ms": theirs,
            "speedup": theirs["median"] / ms["median"],
            "speedup_min": theirs["min"] / ms["min"],
            "checked": checked.get(name),
        }
    return entry


def summarise(results: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """limit_fraction_{median,min}, speedup_{geomean,min} per peer from medians, and the same ``_from_minima``.

    Failed results are left out and counted. None where nothing is left.
    """
    results = list(results)
    good = [entry for entry in results if "failed" not in entry]
    if not good:
        return None
    fractions = [entry["limit_fraction"] for entry in good if entry["limit_fraction"] is not None]
    names = sorted({name for entry in good for name, peer in entry["peers"].items() if "ms" in peer})

    def speedups(name: str, key: str) -> list[float]:
        return [entry["peers"][name][key] for entry in good if "ms" in entry["peers"].get(name, {})]

    return {
        "cases": len(good),
        "failed": len(results) - len(good),
        "limit_fraction_median": statistics.median(fractions) if fractions else None,
        "limit_fraction_min": min(fractions, default=None),
        "speedup_geomean": {name: geomean(speedups(name, "speedup")) for name in names},
        "speedup_min": {name: min(speedups(name, "speedup")) for name in names},
        "speedup_geomean_from_minima": {name: geomean(speedups(name, "speedup_min")) for name in names},
        "speedup_min_from_minima": {name: min(speedups(name, "speedup_min")) for name in names},
    }


def document(
    name: str, *, limits: Limits, results: Sequence[Mapping[str, Any]], summary: Any, **extra: Any
) -> dict[str, Any]:
    """A whole report."""
    return {
        "benchmark": name,
        "machine": fingerprint.machine(),
        "versions": peers.versions(),
        "limits": limits.to_json(),
        "peak_rss_mib": peak_rss_mib(),
        **extra,
        "summary": summary,
        "results": list(results),
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _rounded(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(inner) for inner in value]
    return value


def write(report: Mapping[str, Any], folder: Path) -> Path:
    """Writes ``folder/<benchmark name>.json`` as a whole or not at all; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{report['benchmark']}.json"
    temporary = path.with_suffix(".json.part")
    temporary.write_text(json.dumps(_rounded(report), indent=1) + "\n")
    temporary.replace(path)
    return path


def load(path: Path) -> dict[str, Any]:
    """Reads a report."""
    return json.loads(path.read_text())


def _figure(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def markdown(report: Mapping[str, Any]) -> str:
    """A report as a Markdown page: the machine, what it can do at most, and a table of the results."""
    machine = report["machine"]
    measured = report.get("limits", {"peak_gflops": {}, "read_gbps": {}})
    names = sorted({name for entry in report["results"] for name, peer in entry["peers"].items() if "ms" in peer})
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version)
    lines = [
        f"# {report['benchmark']}",
        "",
        f"{machine['cpu']} ({machine['vendor']} family {machine['family']} model {machine['model']}), "
        f"{machine['cpus']} CPUs{', virtual' if machine['virtual'] else ''}, {machine['time']}. {versions}.",
        "",
    ]
    for title, unit, table in (
        ("peak", "GFLOP/s", measured["peak_gflops"]),
        ("read", "GB/s", measured["read_gbps"]),
    ):
        for name, by_threads in table.items():
            figures = ", ".join(f"{rate:,.0f} with {threads}" for threads, rate in by_threads.items())
            lines.append(f"- {title} {name}: {figures} thread(s), {unit}")
    head = ["case", "tier", "threads", "ms", "GFLOP/s", "GB/s", "of limit", "bound", *(f"× {name}" for name in names)]
    lines += ["", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for entry in report["results"]:
        speedups = [
            format(entry["peers"][name]["speedup"], ".2f") if "ms" in entry["peers"].get(name, {}) else "–"
            for name in names
        ]
        cells = [
            entry["case"],
            entry["tier"],
            str(entry["threads"]),
            "disturbed" if "failed" in entry else _figure(entry["ms"]["median"], ".3f"),
            _figure(entry["gflops"], ".0f"),
            _figure(entry["gbps"], ".1f"),
            _figure(entry["limit_fraction"], ".2f"),
            entry["bound"] or "–",
            *speedups,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "```json", json.dumps(_rounded(report["summary"]), indent=1), "```", ""]
    return "\n".join(lines)


def _indicative(entry: Mapping[str, Any]) -> str:
    """Our shortest time in a failed result, in brackets."""
    ours = (ms for name, ms in entry["disturbed_min_ms"].items() if name.startswith(f"ours:{entry['tier']}"))
    return next((f"(≥ {ms:.3f})" for ms in ours), "–")


def print_table(report: Mapping[str, Any], *, where: Callable[[Mapping[str, Any]], bool] = lambda entry: True) -> None:
    """Prints the results as a table (disturbed ones in brackets, minima of all rounds), and the summary below it."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:  # a log has no width
        console = Console(width=160)
    shown = [entry for entry in report["results"] if where(entry)]
    names = sorted({name for entry in shown for name, peer in entry["peers"].items() if "ms" in peer})
    table = Table(title=report["benchmark"], title_justify="left")
    table.add_column("case", no_wrap=True)
    table.add_column("tier")
    for heading in ("thr", "ms", "GFLOP/s", "GB/s", "limit ms", "of limit", "bound", *names):
        table.add_column(heading, justify="right")
    for entry in shown:
        failed = "failed" in entry
        table.add_row(
            entry["case"],
            entry["tier"],
            str(entry["threads"]),
            _indicative(entry) if failed else _figure(entry["ms"]["median"], ".3f"),
            _figure(entry["gflops"], ".0f"),
            _figure(entry["gbps"], ".1f"),
            _figure(entry["limit_ms"], ".3f"),
            _figure(entry["limit_fraction"], ".2f"),
            entry["bound"] or "–",
            *(
                f"{entry['peers'][name]['speedup']:.2f}×" if "ms" in entry["peers"].get(name, {}) else "–"
                for name in names
            ),
            style="red" if failed else None,
        )
    if shown:
        console.print(table)
    console.print_json(json.dumps(_rounded(report["summary"])))


if __name__ == "__main__":  # python -m mla_testing.report reports/bench_decode.json > docs/benchmarks/decode.md
    print("\n".join(markdown(load(Path(argument))) for argument in sys.argv[1:]))
