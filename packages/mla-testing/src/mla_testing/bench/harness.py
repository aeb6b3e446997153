# SPDX-License-Identifier: Apache-2.0
"""Timing several implementations of one piece of work against each other on a machine that may be disturbed.

In each round every contender is timed once, in rotating order, and before and after each of them a fixed loop of
multiplications (the calibrator) runs on as many threads: it needs a core's multipliers, so it also sees a neighbour who
has half of them. A round in which the calibrator needed more than 1.1 times its best of the whole
run is discarded for all contenders alike, and counted; it ends there and then. So is one in which threads of this
process waited for a CPU for more than a tenth of a sample: the scheduler's own account sees what a short loop that
fits between two other tasks does not. With fewer than 5 rounds left the measurement has failed: it says so instead of
giving a number. A round begins only when the calibrator is undisturbed, or after a second of waiting. Ratios are made
from medians and, separately, from minima.
"""

from __future__ import annotations

import glob
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "DISTURBED",
    "MIN_VALID_ROUNDS",
    "WAITED",
    "Calibration",
    "Contender",
    "Measurement",
    "measure",
    "stats",
    "waited",
]

#: A round is discarded where the calibrator takes longer than this many times its best.
DISTURBED = 1.1
#: A round is discarded where threads waited for a CPU for more than this part of a sample.
WAITED = 0.1
#: A measurement with fewer valid rounds has failed.
MIN_VALID_ROUNDS = 5
#: Calls are repeated within a sample until it is about this long, so that the clock and one interrupt weigh little.
_SAMPLE_SECONDS = 2e-3
#: A call that takes less is made once, untimed, before each sample: the calibrator and the others left the caches cold,
#: and the limits that it is held against are of warm ones. A longer call warms them itself.
_WARM_SECONDS = 30e-3
#: Threads of a pool spin for a while after a parallel region (those of libgomp for 5 ms here); the calibrator shall not
#: meet them.
_SETTLE_SECONDS = 8e-3


def waited() -> float:
    """Seconds that this process's living threads were ready to run but had no CPU so far; 0.0 where not accounted."""
    total = 0
    for path in glob.iglob("/proc/self/task/*/schedstat"):
        try:
            with open(path) as file:
                total += int(file.read().split()[1])
        except (OSError, IndexError):  # the thread has ended, or the kernel does not say
            continue
    return total / 1e9


@dataclass
class Calibration:
    """The calibrator and its best time per thread count, shared by all measurements of a run."""

    sample: Callable[[int], float]
    settle: float = _SETTLE_SECONDS
    best: dict[int, float] = field(default_factory=dict)

    def __call__(self, threads: int) -> float:
        """Runs the calibrator; seconds."""
        time.sleep(self.settle)
        elapsed = self.sample(threads)
        self.best[threads] = min(elapsed, self.best.get(threads, elapsed))
        return elapsed

    def disturbed(self, elapsed: float, threads: int) -> bool:
        """Whether a calibration took too long."""
        return elapsed > DISTURBED * self.best[threads]

    def calm(self, threads: int, patience: int = 200) -> float:
        """Calibrates until undisturbed, at most ``patience`` times; the last result in seconds."""
        for _ in range(patience):
            elapsed = self(threads)
            if not self.disturbed(elapsed, threads):
                break
        return elapsed

    def warm_up(self, threads: int, times: int = 10) -> None:
        """Finds a first best before anything is measured."""
        for _ in range(times):
            self(threads)


@dataclass
class Contender:
    """One implementation: ``call`` is timed; ``select`` runs before it, untimed (to choose a tier, say)."""

    name: str
    call: Callable[[], Any]
    select: Callable[[], Any] | None = None


@dataclass
class Measurement:
    """Raw samples. ``samples[name][i]`` is the time per call in round i, in ms, None where the round ended before;
    ``calibrations[i]`` is that round's worst calibration, in seconds; ``waits[i]`` the largest part of a sample that
    threads waited for a CPU (an empty list: never)."""

    threads: int
    samples: dict[str, list[float | None]]
    calibrations: list[float]
    best: float
    waits: list[float] = field(default_factory=list)

    @property
    def valid(self) -> list[bool]:
        """Per round: whether the calibrator was undisturbed and no sample waited for a CPU."""
        waits = self.waits or [0.0] * len(self.calibrations)
        pairs = zip(self.calibrations, waits, strict=True)
        return [elapsed <= DISTURBED * self.best and wait <= WAITED for elapsed, wait in pairs]

    @property
    def rounds(self) -> dict[str, int]:
        """Counts of valid and discarded rounds."""
        valid = sum(self.valid)
        return {"valid": valid, "discarded": len(self.calibrations) - valid}

    @property
    def failed(self) -> bool:
        """Whether too few rounds are left."""
        return self.rounds["valid"] < MIN_VALID_ROUNDS

    def of(self, name: str) -> list[float]:
        """Valid samples of one contender, in ms."""
        pairs = zip(self.samples[name], self.valid, strict=True)
        return [sample for sample, valid in pairs if valid and sample is not None]


def stats(samples: Sequence[float]) -> dict[str, Any]:
    """median, min, p90 (nearest rank) and the samples themselves; all None or empty without samples."""
    if not samples:
        return {"median": None, "min": None, "p90": None, "samples": []}
    ordered = sorted(samples)
    rank = max(0, -(-9 * len(ordered) // 10) - 1)
    return {
        "median": statistics.median(ordered),
        "min": ordered[0],
        "p90": ordered[rank],
        "samples": [round(sample, 6) for sample in samples],
    }


def _timed(contender: Contender, calls: int, clock: Callable[[], float]) -> float:
    begin = clock()
    for _ in range(calls):
        contender.call()
    return 1e3 * (clock() - begin) / calls


def measure(
    contenders: Sequence[Contender],
    *,
    threads: int,
    calibration: Calibration,
    rounds: int = 7,
    max_rounds: int = 21,
    give_up: float = 30.0,
    clock: Callable[[], float] = time.perf_counter,
    waiting: Callable[[], float] = waited,
) -> Measurement:
    """Times ``contenders`` in interleaved rounds until ``rounds`` of them are valid or ``max_rounds`` were run.

    Args:
        contenders: implementations of the same work; names must differ.
        threads: what they use; the calibrator uses as many.
        calibration: shared by the run, because its best counts.
        rounds: valid rounds wanted, at least ``MIN_VALID_ROUNDS``.
        max_rounds: rounds after which to give up.
        give_up: seconds after which no further round begins; up to ten times as many where twice the time of the rounds
            wanted is more. A calm machine needs less.
        clock: seconds; for tests.
        waiting: seconds waited for a CPU so far; for tests.

    Raises:
        ValueError: duplicate names, or fewer rounds wanted than needed.
    """
    names = [contender.name for contender in contenders]
    if len(set(names)) != len(names):
        raise ValueError(f"contenders are {names}, expected distinct names")
    if rounds < MIN_VALID_ROUNDS:
        raise ValueError(f"rounds is {rounds}, expected at least {MIN_VALID_ROUNDS}")
    calls: dict[str, int] = {}
    warm: set[str] = set()
    round_seconds = 0.0
    for contender in contenders:
        if contender.select:
            contender.select()
        contender.call()  # first touch, lazy initialisation
        once = _timed(contender, 1, clock) / 1e3
        calls[contender.name] = max(1, min(1000, int(_SAMPLE_SECONDS / max(once, 1e-7))))
        if once < _WARM_SECONDS:
            warm.add(contender.name)
        round_seconds += once
    result = Measurement(threads, {name: [] for name in names}, [], calibration.best.get(threads, float("inf")))
    deadline = clock() + max(give_up, min(10 * give_up, 2 * rounds * round_seconds))
    for index in range(max_rounds):
        if index and clock() > deadline:
            break
        worst = calibration.calm(threads)
        taken: dict[str, float] = {}
        share = 0.0
        shift = index % max(1, len(contenders))
        for contender in [*contenders[shift:], *contenders[:shift]]:
            if contender.select:
                contender.select()
            if contender.name in warm:
                contender.call()
            before = waiting()
            taken[contender.name] = _timed(contender, calls[contender.name], clock)
            wait = waiting() - before
            share = max(share, wait / max(taken[contender.name] / 1e3 * calls[contender.name], 1e-9))
            worst = max(worst, calibration(threads))
            if share > WAITED or calibration.disturbed(worst, threads):
                break
        for name in names:
            result.samples[name].append(taken.get(name))
        result.calibrations.append(worst)
        result.waits.append(share)
        result.best = calibration.best[threads]
        if result.rounds["valid"] >= rounds:
            break
    return result
