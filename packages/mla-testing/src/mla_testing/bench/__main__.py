# SPDX-License-Identifier: Apache-2.0
"""``python -m mla_testing.bench decode|prefill|bmm|cache|step|amx|e2e``: measures, checks, writes JSON and pictures."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from pathlib import Path

from mla_testing import plots, report
from mla_testing.bench.common import HUGE_PAGES, Options

BENCHES = ("decode", "prefill", "bmm", "cache", "step", "amx", "e2e")

#: OpenMP reads these when it is loaded. Threads are bound to cores, as in an engine: where they are not, two of them
#: share one now and then, for many calls. e2e's engines decide for themselves.
BINDING = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mla_testing.bench", description=__doc__)
    parser.add_argument("bench", nargs="*", choices=[*BENCHES, []], help="which; all kernel benchmarks by default")
    parser.add_argument("--quick", action="store_true", help="few cases: under two minutes, e2e five")
    parser.add_argument("--tiers", default="", help="comma-separated; default: the best tier here, and avx512bf16")
    parser.add_argument("--threads", type=_numbers, default=(), help="comma-separated thread counts; default 1,2")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose name matches")
    parser.add_argument("--no-peers", action="store_true", help="time our kernels alone")
    parser.add_argument("--rounds", type=int, default=7, help="valid rounds wanted per case (5 and more; e2e: up to 3)")
    parser.add_argument("--out", type=Path, default=Path("reports"), help="folder of the reports")
    parser.add_argument("--no-plots", action="store_true")
    return parser


def main(arguments: list[str] | None = None, *, bind: bool = False) -> int:
    """Runs the named benchmarks. 0 if all is well, 1 if a result is wrong or missing, 2 if a measurement was too
    disturbed, 130 if interrupted. bind: kernel benchmarks start the program again with its threads bound."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if "e2e" in options.bench and len(options.bench) > 1:
        parser.error(f"bench is {' '.join(options.bench)}, expected e2e alone: its threads are bound by its engines")
    if bind and "e2e" not in options.bench and not os.environ.keys() & BINDING:
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **BINDING})
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit ends it like Ctrl-C: with a report
    chosen = Options(
        quick=options.quick,
        tiers=tuple(name for name in options.tiers.split(",") if name),
        threads=options.threads,
        only=options.only,
        peers=not options.no_peers,
        out=options.out,
        rounds=options.rounds,
    )
    status = 0
    for name in options.bench or BENCHES[:-1]:
        if name != "e2e":  # there every engine decides for itself
            os.environ.setdefault(HUGE_PAGES, "1")
        found, its_status = importlib.import_module(f"mla_testing.bench.{name}").run(chosen)
        path = report.write(found, chosen.out)
        report.print_table(found)
        for message in found.get("wrong", ()):
            print(f"WRONG: {message}", file=sys.stderr)
        for failure in found.get("failures", ()):
            lines = failure["error"].splitlines()
            print(f"FAILED: {failure['cell']}: {' … '.join(dict.fromkeys((lines[0], lines[-1])))}", file=sys.stderr)
        missing = {entry["case"]: entry["failed"] for entry in found["results"] if "failed" in entry}
        if missing:
            reasons = ", ".join(f"{case} ({reason})" for case, reason in missing.items())
            print(f"no figures of {len(missing)} cases: {reasons}", file=sys.stderr)
        if found.get("interrupted"):
            print("interrupted: the report holds what was measured until then", file=sys.stderr)
        print(f"{path} written")
        if not options.no_plots:
            for picture in plots.draw(found, chosen.out):
                print(f"{picture} written")
        status = its_status if status == 0 else status
        if found.get("interrupted"):
            break
    return status


if __name__ == "__main__":
    sys.exit(main(bind=True))
