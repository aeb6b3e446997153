# SPDX-License-Identifier: Apache-2.0
"""The measuring harness itself: which rounds count, when a run has failed, what a limit is. Nothing here is timed."""

from __future__ import annotations

import itertools

import pytest

from mla_testing.bench import __main__ as program
from mla_testing.bench import common
from mla_testing.bench.harness import Calibration, Contender, Measurement, measure, stats, waited
from mla_testing.limits import Limits, LimitsError


class Clock:
    """Advances by what the contenders say they take."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def call(self, seconds: float):
        def work() -> None:
            self.now += seconds

        return work


def no_waiting() -> float:
    return 0.0


def calibration(*seconds: float) -> Calibration:
    """A calibrator that answers the given times, the last one for ever."""
    times = itertools.chain(seconds, itertools.repeat(seconds[-1]))
    return Calibration(lambda threads: next(times), settle=0.0)


def test_undisturbed_rounds_all_count() -> None:
    clock = Clock()
    contenders = [Contender("ours", clock.call(0.010)), Contender("peer", clock.call(0.030))]
    found = measure(contenders, threads=2, calibration=calibration(0.002), rounds=7, clock=clock, waiting=no_waiting)
    assert found.rounds == {"valid": 7, "discarded": 0}
    assert not found.failed
    assert found.of("ours") == pytest.approx([10.0] * 7)
    assert found.of("peer") == pytest.approx([30.0] * 7)


def test_a_round_above_1_1_times_the_best_is_discarded_for_everybody_and_counted() -> None:
    found = Measurement(
        threads=1,
        samples={"ours": [1.0, 90.0, 2.0, 3.0, 4.0, 5.0], "peer": [10.0, 11.0, 20.0, 30.0, 40.0, 50.0]},
        calibrations=[1.0, 1.11, 1.099, 1.0, 1.1, 1.0],
        best=1.0,
    )
    assert found.rounds == {"valid": 5, "discarded": 1}
    assert found.of("ours") == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert found.of("peer") == [10.0, 20.0, 30.0, 40.0, 50.0]
    assert not found.failed


def test_fewer_than_five_valid_rounds_is_a_failed_run() -> None:
    found = Measurement(1, {"ours": [1.0] * 9}, [1.0] * 4 + [2.0] * 5, best=1.0)
    assert found.rounds == {"valid": 4, "discarded": 5}
    assert found.failed


def test_a_disturbed_machine_ends_after_max_rounds_and_fails() -> None:
    clock = Clock()
    disturbed = calibration(0.001, 0.010)
    disturbed.warm_up(1, times=1)  # the one good sample: the best
    found = measure(
        [Contender("ours", clock.call(0.01))],
        threads=1,
        calibration=disturbed,
        max_rounds=9,
        clock=clock,
        waiting=no_waiting,
    )
    assert found.rounds == {"valid": 0, "discarded": 9}
    assert found.failed


def test_a_disturbance_in_the_middle_of_a_round_is_seen() -> None:
    clock = Clock()
    # Each round calibrates once before and once after every contender: 3 per round.
    seen = calibration(1.0, 1.0, 1.0, 1.0, 5.0, 1.0, 1.0)
    contenders = [Contender("a", clock.call(0.01)), Contender("b", clock.call(0.02))]
    found = measure(contenders, threads=1, calibration=seen, rounds=5, clock=clock, waiting=no_waiting)
    assert found.valid == [True, False, True, True, True, True]
    # The second round began with b and ended there.
    assert found.samples["a"][1] is None
    assert found.samples["b"][1] == pytest.approx(20.0)
    assert found.of("a") == pytest.approx([10.0] * 5)


def test_a_round_in_which_threads_waited_for_a_cpu_is_discarded() -> None:
    clock = Clock()
    account = iter([0.0, 0.0005, 0.0005, 0.0025, *[0.0025] * 10])  # before and after each sample: 5 %, then 20 %
    contenders = [Contender("a", clock.call(0.01))]
    found = measure(
        contenders, threads=1, calibration=calibration(1.0), rounds=5, clock=clock, waiting=lambda: next(account)
    )
    assert found.waits[:3] == pytest.approx([0.05, 0.2, 0.0])
    assert found.valid == [True, False, True, True, True, True]


def test_waiting_is_accounted_in_seconds() -> None:
    before = waited()
    assert 0.0 <= before <= waited()


def test_a_round_waits_for_the_disturbance_to_pass() -> None:
    clock = Clock()
    seen = calibration(1.0, *[3.0] * 40, 1.0)
    seen.warm_up(1, times=1)
    found = measure(
        [Contender("a", clock.call(0.01))], threads=1, calibration=seen, rounds=5, clock=clock, waiting=no_waiting
    )
    assert found.rounds == {"valid": 5, "discarded": 0}


def test_short_calls_are_repeated_within_a_sample() -> None:
    clock = Clock()
    calls = itertools.count()

    def work() -> None:
        next(calls)
        clock.now += 1e-5

    found = measure(
        [Contender("ours", work)], threads=1, calibration=calibration(1.0), rounds=5, clock=clock, waiting=no_waiting
    )
    assert found.of("ours") == pytest.approx([0.01] * 5)
    assert next(calls) >= 5 * 150


@pytest.mark.parametrize(("seconds", "per_round"), [(5e-3, 2), (0.1, 1)], ids=["warmed", "long"])
def test_a_call_that_would_find_cold_caches_is_made_once_before(seconds: float, per_round: int) -> None:
    clock = Clock()
    calls = itertools.count()

    def work() -> None:
        next(calls)
        clock.now += seconds

    ours = [Contender("ours", work)]
    found = measure(ours, threads=1, calibration=calibration(1.0), rounds=5, clock=clock, waiting=no_waiting)
    assert found.of("ours") == pytest.approx([1e3 * seconds] * 5)
    assert next(calls) == 2 + 5 * per_round  # 2: first touch and estimate


def test_the_order_of_contenders_rotates() -> None:
    clock, order = Clock(), []

    def named(name: str):
        def work() -> None:
            order.append(name)
            clock.now += 1.0

        return work

    contenders = [Contender(name, named(name)) for name in "abc"]
    measure(contenders, threads=1, calibration=calibration(1.0), rounds=5, clock=clock, waiting=no_waiting)
    rounds = ["".join(order[i : i + 3]) for i in range(6, len(order), 3)]  # after warm-up and estimate of each
    assert rounds == ["abc", "bca", "cab", "abc", "bca"]


@pytest.mark.parametrize(
    ("names", "rounds", "message"), [(("a", "a"), 5, "distinct names"), (("a",), 4, "expected at least 5")]
)
def test_measure_refuses(names: tuple[str, ...], rounds: int, message: str) -> None:
    contenders = [Contender(name, lambda: None) for name in names]
    with pytest.raises(ValueError, match=message):
        measure(contenders, threads=1, calibration=calibration(1.0), rounds=rounds)


@pytest.mark.parametrize(("seconds", "valid"), [(8.0, 5), (200.0, 2)], ids=["slow", "hopeless"])
def test_slow_work_gets_the_time_for_its_rounds(seconds: float, valid: int) -> None:
    clock = Clock()
    slow = Contender("slow", clock.call(seconds))
    arguments = {"calibration": calibration(0.002), "rounds": 5, "give_up": 30.0, "clock": clock, "waiting": no_waiting}
    assert measure([slow], threads=1, **arguments).rounds == {"valid": valid, "discarded": 0}


def test_stats() -> None:
    found = stats([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (found["median"], found["min"], found["p90"]) == (3.0, 1.0, 5.0)
    assert found["samples"] == [5.0, 1.0, 3.0, 2.0, 4.0]
    assert stats(range(1, 11))["p90"] == 9
    assert stats([]) == {"median": None, "min": None, "p90": None, "samples": []}


MIB = 1 << 20


@pytest.fixture
def limits() -> Limits:
    return Limits(
        peak={"vdpbf16ps": {1: 100e9, 2: 200e9}},
        read={2: [(2 * MIB, 300e9), (16 * MIB, 60e9), (64 * MIB, 40e9), (1024 * MIB, 20e9)]},
        memcpy={2: [(2 * MIB, 90e9)]},
        caches={"L2": 2 * MIB, "L3": 512 * MIB},
        unavailable={"tdpbf16ps": "the CPU or the operating system lacks the instruction"},
    )


@pytest.mark.parametrize(
    ("size", "level", "rate"),
    [
        pytest.param(1 * MIB, "L2", 300e9, id="smaller-than-any-size-measured"),
        pytest.param(4 * MIB, "L2", 300e9, id="l2-of-both-cores"),
        pytest.param(5 * MIB, "L3", 60e9, id="just-above-l2"),
        pytest.param(63 * MIB, "L3", 60e9, id="nearest-size-below"),
        pytest.param(300 * MIB, "L3", 40e9, id="largest-size-below"),
        pytest.param(600 * MIB, "DRAM", 20e9, id="dram"),
    ],
)
def test_bandwidth_of_the_level_that_the_bytes_fit_in(limits: Limits, size: int, level: str, rate: float) -> None:
    assert limits.bandwidth(size, 2) == (level, rate)


def test_limit_is_the_longer_of_arithmetic_and_memory(limits: Limits) -> None:
    compute = limits.limit(flop=2e9, size=2 * MIB, tier="avx512bf16", threads=2)
    assert compute.ms == pytest.approx(10.0)
    assert compute.bound == "compute"
    memory = limits.limit(flop=2e6, size=20e9, tier="avx512bf16", threads=2)
    assert memory.ms == pytest.approx(1000.0)
    assert memory.bound == "DRAM"


def test_no_limit_without_a_measured_peak(limits: Limits) -> None:
    with pytest.raises(LimitsError, match="tier amxbf16: the CPU or the operating system lacks"):
        limits.limit(flop=1, size=1, tier="amxbf16", threads=2)
    with pytest.raises(LimitsError, match="not measured with 3 threads"):
        limits.limit(flop=1, size=1, tier="avx512bf16", threads=3)


def test_limits_survive_json(limits: Limits) -> None:
    assert Limits.from_json(limits.to_json()) == limits


def test_work_that_fails_is_wrong_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    context = object.__new__(common.Context)
    context.threads, context.results, context.wrong, context.interrupted = (1,), [], [], False
    measured: list[str] = []

    def one(self: common.Context, work: common.Work, threads: int) -> None:
        if work.case == "bad":
            raise ValueError("this shape is refused")
        measured.append(work.case)

    monkeypatch.setattr(common.Context, "_one", one)
    works = {name: common.Work(name, {}, 0.0, 0.0, None, {}, None) for name in ("bad", "good")}
    context.run({name: lambda work=work: work for name, work in works.items()})
    assert measured == ["good"]
    assert context.wrong == ["bad: ValueError: this shape is refused"]
    assert context.exit_status == 1


class Started(Exception):
    """A program was started; the argument is its environment."""


def test_kernel_benchmarks_start_again_with_threads_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(path: str, arguments: list[str], environment: dict[str, str]) -> None:
        raise Started(environment)

    monkeypatch.setattr(program.os, "execve", start)
    for name in program.BINDING:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(Started) as started:
        program.main(["decode", "bmm"], bind=True)
    assert program.BINDING.items() <= started.value.args[0].items()


def test_e2e_binds_its_engines_and_is_named_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        program.main(["bmm", "e2e"], bind=True)
    assert "bench is bmm e2e, expected e2e alone" in capsys.readouterr().err
