# SPDX-License-Identifier: Apache-2.0
"""Pictures made from a report's JSON: a roofline for each thread count, and the time of each case beside its limit.

Nothing is measured here. ``python -m mla_testing.plots reports/bench_decode.json`` draws again.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mla_testing import report
from mla_testing.limits import INSTRUCTION_OF_TIER, Limits

__all__ = ["draw"]

_MARKERS = {"ours": "o", "vllm_amx_op": "s", "vllm_cpu_mla": "D", "torch": "^", "zentorch": "v"}
_COLOURS = {
    "amxbf16": "#1b6ca8",
    "avx512bf16": "#2a9d8f",
    "avx512": "#8ab17d",
    "avx2": "#e9c46a",
    "portable": "#b5b5b5",
    "vllm_amx_op": "#d1495b",
    "vllm_cpu_mla": "#edae49",
    "torch": "#7a5195",
    "zentorch": "#66a182",
}


def _points(entries: list[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Label -> [(FLOP per byte, GFLOP/s)], ours by tier, peers once."""
    found: dict[str, list[tuple[float, float]]] = {}
    seen: set[tuple[str, str]] = set()
    for entry in entries:
        intensity = entry["flop"] / entry["bytes"]
        found.setdefault(entry["tier"], []).append((intensity, entry["gflops"]))
        for name, peer in entry["peers"].items():
            if "ms" in peer and (name, entry["case"]) not in seen:
                seen.add((name, entry["case"]))
                found.setdefault(name, []).append((intensity, entry["flop"] / peer["ms"]["median"] / 1e6))
    return found


def _roofline(found: Mapping[str, Any], threads: int, folder: Path) -> list[Path]:
    from matplotlib.figure import Figure

    entries = [
        entry
        for entry in found["results"]
        if entry["threads"] == threads and "failed" not in entry and entry["flop"] > 0
    ]
    if not entries:
        return []
    limits = Limits.from_json(found["limits"])
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.add_subplot()
    points = _points(entries)
    intensities = [x for group in points.values() for x, _ in group]
    low, high = min(intensities) / 2, max(intensities) * 2
    tiers = [tier for tier in INSTRUCTION_OF_TIER if tier in points and INSTRUCTION_OF_TIER[tier] in limits.peak]
    roof = max((limits.peak[INSTRUCTION_OF_TIER[tier]].get(threads, 0.0) / 1e9 for tier in tiers), default=0.0)
    for tier in tiers:
        peak = limits.peak[INSTRUCTION_OF_TIER[tier]].get(threads)
        if peak:
            axes.axhline(peak / 1e9, color=_COLOURS[tier], linewidth=1)
            axes.annotate(
                f"{INSTRUCTION_OF_TIER[tier].upper()} {peak / 1e9:,.0f}", (high, peak / 1e9), ha="right", va="bottom",
                fontsize=8, color=_COLOURS[tier],
            )  # fmt: skip
    for level, by_threads in found["limits"]["read_gbps"].items():
        rate = by_threads.get(str(threads))
        if rate:
            end = min(high, roof / rate) if roof else high
            axes.plot([low, max(low, end)], [low * rate, max(low, end) * rate], color="#999999", linewidth=1)
            axes.annotate(
                f"{level} {rate:,.0f} GB/s", (1.05 * low, 1.05 * low * rate), rotation=30, fontsize=8, color="#555555",
                rotation_mode="anchor", va="bottom",
            )  # fmt: skip
    for label, group in points.items():
        ours = label in INSTRUCTION_OF_TIER
        axes.scatter(
            *zip(*group, strict=True),
            marker=_MARKERS.get("ours" if ours else label, "x"),
            s=26 if ours else 16,
            color=_COLOURS.get(label, "#333333"),
            label=f"{label} (ours)" if ours else label,
            alpha=0.8,
            linewidths=0,
        )
    axes.set(
        xscale="log", yscale="log", xlim=(low, high), xlabel="FLOP per byte read", ylabel="GFLOP/s",
        title=f"{found['benchmark']}: {found['machine']['cpu']}, {threads} thread{'s' if threads > 1 else ''}",
    )  # fmt: skip
    axes.grid(True, which="both", color="#eeeeee")
    axes.set_axisbelow(True)
    figure.legend(fontsize=8, loc="outside lower center", ncols=4)
    return _save(figure, folder / f"{found['benchmark']}_roofline_{threads}t")


def _times(found: Mapping[str, Any], folder: Path) -> list[Path]:
    from matplotlib.figure import Figure

    threads = max((entry["threads"] for entry in found["results"]), default=0)
    entries = [entry for entry in found["results"] if entry["threads"] == threads and "failed" not in entry]
    if not entries:
        return []
    best = max({entry["tier"] for entry in entries}, key=list(INSTRUCTION_OF_TIER).index)
    entries = [entry for entry in entries if entry["tier"] == best][::-1]
    figure = Figure(figsize=(8, 1.2 + 0.22 * len(entries)), layout="constrained")
    axes = figure.add_subplot()
    rows = range(len(entries))
    axes.hlines(
        rows, [entry["ms"]["min"] for entry in entries], [entry["ms"]["p90"] for entry in entries], color="#999"
    )
    axes.scatter(
        [entry["ms"]["median"] for entry in entries], rows, color=_COLOURS[best], label=f"{best} (ours)", zorder=3
    )
    limited = [(entry["limit_ms"], row) for row, entry in zip(rows, entries, strict=True) if entry["limit_ms"]]
    if limited:
        axes.scatter(*zip(*limited, strict=True), marker="|", s=90, color="#000000", label="limit")
    for name in sorted({name for entry in entries for name, peer in entry["peers"].items() if "ms" in peer}):
        group = [
            (entry["peers"][name]["ms"]["median"], row)
            for row, entry in zip(rows, entries, strict=True)
            if "ms" in entry["peers"].get(name, {})
        ]
        axes.scatter(
            *zip(*group, strict=True),
            marker=_MARKERS.get(name, "x"),
            s=16,
            color=_COLOURS.get(name, "#333333"),
            label=name,
        )
    axes.set(xscale="log", xlabel="milliseconds per call", title=f"{found['benchmark']}, {threads} threads")
    axes.set_yticks(list(rows), [entry["case"] for entry in entries], fontsize=7)
    axes.grid(True, axis="x", which="both", color="#eeeeee")
    axes.set_axisbelow(True)
    figure.legend(fontsize=8, loc="outside lower center", ncols=4)
    return _save(figure, folder / f"{found['benchmark']}_times")


def _save(figure: Any, stem: Path) -> list[Path]:
    paths = [stem.with_name(stem.name + suffix) for suffix in (".svg", ".png")]
    for path in paths:
        figure.savefig(path, dpi=150)
    return paths


def draw(found: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draws all pictures of a report into ``folder`` (SVG and PNG); returns their paths."""
    paths: list[Path] = []
    for threads in sorted({entry["threads"] for entry in found["results"]}):
        paths += _roofline(found, threads, folder)
    return paths + _times(found, folder)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        for picture in draw(report.load(Path(argument)), Path(argument).parent):
            print(picture)
