# SPDX-License-Identifier: Apache-2.0
"""What the kernel benchmarks share: options, tiers, limits, checks against the reference, one loop over cases."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mla_testing import limits as limits_module
from mla_testing import report
from mla_testing.bench.harness import Calibration, Contender, measure

__all__ = ["HUGE_PAGES", "Context", "Entry", "Options", "Work", "bits", "usable_tiers"]


#: PyTorch reads this at its first tensor: large ones on huge pages then, as under our backend, for all that take part.
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"


@dataclass(frozen=True)
class Options:
    """What the command line says. tiers: empty for the best tier and avx512bf16; only: a pattern that cases match."""

    quick: bool = False
    tiers: tuple[str, ...] = ()
    threads: tuple[int, ...] = ()
    only: str = ""
    peers: bool = True
    out: Path = Path("reports")
    rounds: int = 7


@dataclass
class Entry:
    """An implementation taking part: its timed call, and how to fetch its result for the check (untimed)."""

    name: str
    call: Callable[[], Any]
    fetch: Callable[[], Any]
    select: Callable[[], Any] | None = None


@dataclass
class Work:
    """One case: who takes part, how much work it is, and what is right.

    make_ours(tier, threads) and make_peers[name](threads) build the implementations; check(actual) compares with the
    reference and returns figures, or raises AssertionError.
    """

    case: str
    params: dict[str, Any]
    flop: float
    size: float
    make_ours: Callable[[str, int], Entry]
    make_peers: dict[str, Callable[[int], Entry]]
    check: Callable[[Any], dict[str, Any]]
    threads: tuple[int, ...] | None = None
    tiers: tuple[str, ...] | None = None
    unavailable: dict[str, str] = field(default_factory=dict)


def bits(tensor: torch.Tensor) -> np.ndarray:
    """A bfloat16 tensor as the NumPy array of its bits, without a copy."""
    return tensor.view(torch.uint16).numpy()


def usable_tiers() -> list[str]:
    """Names of the tiers that can run here, best last."""
    from amx_kernels import isa

    return [tier.name for tier in isa.tiers() if tier.usable]


@contextmanager
def _progress(total: int):
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda text: bar.update(task, description=text), lambda: bar.advance(task)


class Context:
    """A run: options resolved against this machine, its measured limits, and the results so far."""

    def __init__(self, options: Options) -> None:
        import amx_kernels.torch  # noqa: F401  registers the operators

        self.options = options
        self.threads = options.threads or tuple(sorted({1, min(2, torch.get_num_threads())}))
        usable = usable_tiers()
        missing = [name for name in options.tiers if name not in usable]
        if missing:
            raise SystemExit(f"--tiers: {', '.join(missing)} cannot run here; usable: {', '.join(usable)}")
        self.usable = usable
        self.tiers = options.tiers or tuple(name for name in usable if name == usable[-1] or name == "avx512bf16")
        self.calibration = Calibration(limits_module.calibrate)
        for count in self.threads:
            self.calibration.warm_up(count, 30)
        self.limits = limits_module.measure(
            self.threads,
            amx="amxbf16" in (*self.tiers, usable[-1]),
            quick=options.quick,
            calm=lambda count: self.calibration.calm(count, patience=20),
        )
        self.results: list[dict[str, Any]] = []
        self.wrong: list[str] = []
        self.interrupted = False

    def select(self, names: Iterable[str]) -> list[str]:
        """Those of the names that --only matches.

        Raises:
            SystemExit: none is left.
        """
        chosen = [name for name in names if re.search(self.options.only, name)]
        if not chosen:
            raise SystemExit(f"--only {self.options.only!r} matches no case")
        return chosen

    def run(self, works: Mapping[str, Callable[[], Work]]) -> None:
        """Builds, checks and measures each piece of work for every thread count; appends to ``results``.

        Work that fails is ``wrong``, and the rest goes on.
        """
        with _progress(len(works)) as (describe, advance):
            try:
                for name, make in works.items():
                    describe(name)
                    try:
                        work = make()
                        for threads in work.threads or self.threads:
                            if threads in self.threads:
                                self._one(work, threads)
                    except Exception as error:
                        traceback.print_exc()
                        self.wrong.append(f"{name}: {type(error).__name__}: {error}")
                    advance()
            except KeyboardInterrupt:  # what was measured so far is still a report, and says that it is not whole
                self.interrupted = True

    def _one(self, work: Work, threads: int) -> None:
        torch.set_num_threads(threads)
        tiers = [tier for tier in work.tiers or self.tiers if tier in self.usable]
        entries = [work.make_ours(tier, threads) for tier in tiers]
        unavailable = dict(work.unavailable)
        peers: list[Entry] = []
        checked = {entry.name: self._check(work, entry, threads, ours=True) for entry in entries}
        for name, make in work.make_peers.items() if self.options.peers else ():
            try:
                peer = make(threads)
                checked[name] = self._check(work, peer, threads, ours=False)
            except RuntimeError as reason:  # Unavailable, or an operator that refuses the case
                unavailable[name] = str(reason).splitlines()[0]
            else:
                peers.append(peer)
        measurement = measure(
            [Contender(entry.name, entry.call, entry.select) for entry in [*entries, *peers]],
            threads=threads,
            calibration=self.calibration,
            rounds=5 if self.options.quick else self.options.rounds,
            max_rounds=15 if self.options.quick else 4 * self.options.rounds,
            give_up=3.0 if self.options.quick else 30.0,
        )
        # What was timed is what is checked: once more after the last sample.
        for entry in entries:
            again = self._check(work, entry, threads, ours=True, call=False)
            checked[entry.name] = again if "beyond_tolerance" in again else checked[entry.name]
        for tier, entry in zip(tiers, entries, strict=True):
            self.results.append(
                report.result(
                    case=work.case,
                    tier=tier,
                    measurement=measurement,
                    ours=entry.name,
                    flop=work.flop,
                    size=work.size,
                    limits=self.limits,
                    params=work.params,
                    checked=checked,
                    peer_names=[peer.name for peer in peers],
                    unavailable=unavailable,
                )
            )

    def _check(self, work: Work, entry: Entry, threads: int, *, ours: bool, call: bool = True) -> dict[str, Any]:
        growth = {}
        if call:
            if entry.select:
                entry.select()
            before = report.peak_rss_mib()
            entry.call()
            growth = {"peak_rss_growth_mib": report.peak_rss_mib() - before}  # of the first call: its scratch
        try:
            return work.check(entry.fetch()) | growth
        except AssertionError as error:
            text = str(error).splitlines()[0]
            if ours:
                self.wrong.append(f"{work.case} {entry.name} with {threads} threads: {text}")
            return {"beyond_tolerance": text}

    def document(self, name: str, summary: Any, **extra: Any) -> dict[str, Any]:
        """The report of the run."""
        return report.document(
            name,
            limits=self.limits,
            results=self.results,
            summary=summary,
            quick=self.options.quick,
            wrong=self.wrong,
            interrupted=self.interrupted,
            threads_bound=os.sched_getaffinity(0) != limits_module.CPUS,
            **extra,
        )

    @property
    def exit_status(self) -> int:
        """0; 1 where one of our results is wrong; 2 where a measurement was too disturbed to count; 130 interrupted."""
        if self.wrong:
            return 1
        if self.interrupted:
            return 130
        return 2 if any("failed" in entry for entry in self.results) else 0
