# SPDX-License-Identifier: Apache-2.0
"""The soak session: many threads, forks, pinned and throttled processes, thousands of steps; every result compared.

    python packages/amx-kernels/tests/soak/run.py [--quick] [--minutes M] [--amx auto|native|emulated]

Writes reports/soak.json {checks, mismatches, leaks, ...}. Bits are compared with those of a quiet single-threaded call
on the same tier, which itself was checked against float64.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import reliability  # noqa: E402

STEPS = 10_000
CALLERS = 64


@dataclass
class Score:
    """What was checked, by part, and what went wrong."""

    checks: Counter[str] = field(default_factory=Counter)
    mismatches: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, part: str, wrong: str = "", count: int = 1) -> None:
        with self._lock:
            self.checks[part] += count
            if wrong:
                self.mismatches.append(f"{part}: {wrong}")


class Work:
    """Calls of every op in several shapes, with the bits each must give on the tier in use."""

    def __init__(self) -> None:
        import numpy as np
        from fault_support import attend, normal

        import amx_kernels
        from mla_testing.cases import AttentionCase, BmmCase, ConcatCase

        self._calls: list[tuple[str, Callable[[], bytes]]] = []
        attention = [
            AttentionCase(16, (300, 17, 0, 1500)),
            AttentionCase(5, (2100,), rank=64, rope=32, block_size=64),
            AttentionCase(3, (70, 33, 5), query_lens=(33, 1, 5), rank=128, rope=64, block_size=32),
            AttentionCase(22, (600,), query_lens=(40,), rank=256, rope=32, layout="padded", index_dtype="int64"),
        ]
        for case in attention:
            data = case.build()
            plan = amx_kernels.plan_attention(data.seq_lens, data.query_start_loc, len(data.q_latent), case.heads, 3)

            def attention_call(data=data, plan=plan) -> bytes:
                out, lse = data.out.copy(), data.lse.copy()
                attend(data, out=out, lse=lse, plan=random.choice((None, plan)))
                return out.tobytes() + lse.tobytes()

            self._calls.append((case.id, attention_call))
        for case, nope, value in (
            (AttentionCase(2, (300, 900, 40), query_lens=(300, 65, 1), block_size=32), 128, 128),
            (AttentionCase(3, (90, 5), query_lens=(70, 5), rank=96, rope=12), 20, 130),
        ):
            data = case.build()
            q_nope = normal(1, case.tokens, case.heads, nope)
            weights = [
                amx_kernels.convert_weight_packed(normal(2, case.heads, width, case.rank)) for width in (nope, value)
            ]

            def prefill_call(data=data, q_nope=q_nope, weights=weights, value=value) -> bytes:
                out, lse = np.empty((*q_nope.shape[:2], value), np.uint16), data.lse.copy()
                amx_kernels.prefill_attention_cpu(
                    out, lse, q_nope, data.q_pe, data.kv_cache, data.block_table, data.seq_lens, data.query_start_loc,
                    *weights, data.scale,
                )  # fmt: skip
                return out.tobytes() + lse.tobytes()

            self._calls.append((f"prefill-{case.id}", prefill_call))
        for rows in (1, 2, 7, 16, 17, 32):
            data = BmmCase(4, rows, 130, 66).build()
            packed = amx_kernels.convert_weight_packed(data.mat2)

            def bmm_call(data=data, packed=packed) -> bytes:
                out = data.out.copy()
                weight = random.choice((packed, None))
                amx_kernels.bmm_cpu(out, data.mat1, data.mat2 if weight is None else weight, weight is not None)
                return out.tobytes()

            def pack_call(data=data) -> bytes:
                return amx_kernels.convert_weight_packed(data.mat2).tobytes()

            self._calls += [(data.case.id, bmm_call), (f"pack-{data.case.id}", pack_call)]
        data = ConcatCase(200).build()

        def concat_call(data=data) -> bytes:
            cache = data.before.copy()
            amx_kernels.concat_and_cache_mla_cpu(data.kv_c, data.k_pe, cache, data.slot_mapping)
            return cache.tobytes()

        self._calls.append((data.case.id, concat_call))
        # One thread and nobody else: checked against float64 by the test suite, and here by the first of each kind.
        amx_kernels.set_num_threads(1)
        for case in attention:
            checked = case.build()
            attend(checked)
            checked.check()
        self._wanted = [call() for _, call in self._calls]

    def once(self, rng: random.Random) -> str:
        """Runs one call; empty, or which gave other bits."""
        i = rng.randrange(len(self._calls))
        return "" if self._calls[i][1]() == self._wanted[i] else self._calls[i][0]

    def all(self) -> tuple[int, list[str]]:
        """Runs every call once: how many, and which gave other bits."""
        wrong = [name for (name, call), wanted in zip(self._calls, self._wanted, strict=True) if call() != wanted]
        return len(self._calls), wrong


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def concurrent(score: Score, work: Work, tier: str, seconds: float, forks: bool) -> None:
    """Many Python threads in mixed ops, another changes the number of threads all the time; forks in between."""
    import amx_kernels

    stop = time.monotonic() + seconds

    def caller(seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < stop:
            score.add(f"concurrent {tier}", work.once(rng))

    def changer() -> None:
        rng = random.Random(99)
        while time.monotonic() < stop:
            amx_kernels.set_num_threads(rng.choice((1, 2, 3, 5, 8, 16, 31)))
            time.sleep(0.005)

    threads = [threading.Thread(target=caller, args=(i,)) for i in range(CALLERS)] + [threading.Thread(target=changer)]
    for thread in threads:
        thread.start()
    while forks and time.monotonic() < stop:
        time.sleep(min(1.0, seconds / 4))
        forked(score, work, f"fork amid threads {tier}")
    for thread in threads:
        thread.join()


def forked(score: Score, work: Work, part: str) -> None:
    """A child of a used process, itself using the kernels, must get the same bits and end."""
    child = os.fork()
    if child == 0:
        code = 3
        with suppress(BaseException):
            code = 1 if work.all()[1] else 0
        os._exit(code)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            score.add(part, f"the child ended with {code}" if code else "")
            return
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    score.add(part, "the child hung")


def decode_steps(score: Score, tier: str, steps: int) -> None:
    """A serving loop: each step caches, plans and attends a new token, twice on other threads; RSS must not grow."""
    import numpy as np
    from fault_support import normal

    import amx_kernels
    from mla_testing import compare, reference, tolerances

    requests, heads, rank, rope, block, longest = 4, 8, 64, 32, 32, 1024
    blocks = longest // block
    cache = np.zeros((requests * blocks, block, rank + rope), np.uint16)
    table = np.arange(requests * blocks, dtype=np.int32).reshape(requests, blocks)
    queries, rows = normal(1, 64, requests, heads, rank + rope), normal(2, longest, requests, rank + rope)
    out, again = np.zeros((2, requests, heads, rank), np.uint16)
    lse = np.zeros((requests, heads), np.float32)
    before = 0
    for step in range(steps):
        position = step % longest
        row, query = rows[position], queries[step % 64]
        slots = table[:, position // block].astype(np.int64) * block + position % block
        amx_kernels.concat_and_cache_mla_cpu(row[:, :rank], row[:, rank:], cache, slots)
        lens = np.full(requests, position + 1, np.int32)
        lens[step % requests] -= step % 7 if position > 7 else 0
        q = (query[..., :rank], query[..., rank:])
        amx_kernels.set_num_threads(2)
        plan = amx_kernels.plan_attention(lens, None, requests, heads)
        amx_kernels.decode_attention_cpu(out, lse, *q, cache, table, lens, 0.1, plan)
        amx_kernels.set_num_threads(1 + step % 5)
        amx_kernels.decode_attention_cpu(again, None, *q, cache, table, lens, 0.1)
        score.add(f"decode steps {tier}", "" if np.array_equal(out, again) else f"step {step}: other bits")
        if step % 500 == 499:
            expected = reference.latent_attention_details(*q, cache, table, lens, None, 0.1)
            try:
                compare.assert_close(out, expected.out, tol=tolerances.attention(expected), what=f"step {step}")
                score.add(f"decode steps {tier}, float64")
            except AssertionError as error:
                score.add(f"decode steps {tier}, float64", str(error))
        if step == steps // 5:
            before = resident()
    growth = resident() - before
    score.notes[f"resident growth over {steps * 4 // 5} steps, {tier}"] = f"{growth} bytes"
    if growth > 4 << 20:
        score.leaks.append(f"{tier}: {growth} bytes over {steps * 4 // 5} decode steps")


def repeated_errors(score: Score) -> None:
    """Refusals leak nothing either."""
    from fault_support import attend

    import amx_kernels
    from mla_testing.cases import AttentionCase

    data = AttentionCase(2, (33,), rank=64, rope=32).build()
    before = 0
    for i in range(5000):
        try:
            attend(data, scale=-1.0)
            score.add("refusals", "a negative scale was accepted")
        except ValueError:
            score.add("refusals")
        with suppress(ValueError):
            amx_kernels.plan_attention(data.seq_lens, None, 1, 0)
        if i == 1000:
            before = resident()
    if (growth := resident() - before) > 2 << 20:
        score.leaks.append(f"{growth} bytes over 4,000 refused calls")


def child_main(tier: str, rounds: int) -> int:
    """What spawned, pinned and throttled processes do."""
    import amx_kernels

    tiers = reliability.Tiers(os.environ.get("SOAK_AMX", "auto"))
    tiers.set(tier)
    work = Work()
    cpus = os.sched_getaffinity(0)
    total, wrong = 0, []
    for i in range(rounds):
        amx_kernels.set_num_threads(1 + i % 8)
        count, bad = work.all()
        total, wrong = total + count, wrong + bad
    for task in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            if not os.sched_getaffinity(int(task)) <= cpus:
                wrong.append(f"thread {task} outside the affinity mask")
    print(total, *wrong, sep="\n")
    return 1 if wrong else 0


def run_child(score: Score, part: str, tier: str, rounds: int, around: Callable[[subprocess.Popen[str]], None]) -> None:
    script = f"import sys; sys.path.insert(0, {str(HERE)!r}); import run; sys.exit(run.child_main({tier!r}, {rounds}))"
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    around(child)
    try:
        out, err = child.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        child.kill()
        score.add(part, "hung")
        return
    lines = out.splitlines()
    if child.returncode == 0 and lines:
        score.add(part, count=int(lines[0]))
    else:
        score.add(part, f"exit {child.returncode}: {lines[1:5]} {err[-1000:]}")


def pinned(score: Score, tier: str, rounds: int) -> None:
    """An affinity mask without core 0."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        score.notes["affinity"] = "not run: this process has one CPU only"
        return
    run_child(score, "affinity without the first CPU", tier, rounds, lambda c: os.sched_setaffinity(c.pid, cpus[1:]))


def throttled(score: Score, tier: str, rounds: int) -> None:
    """Half a CPU: by a control group where one can be made, else by stopping the process every other 50 ms."""
    group = Path("/sys/fs/cgroup") / f"amx-kernels-soak-{os.getpid()}"
    try:
        group.mkdir()
        (group / "cpu.max").write_text("50000 100000")
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        score.notes["quota"] = (
            f"simulated by stopping and continuing the process: no control group can be made ({error})"
        )

        def duty(child: subprocess.Popen[str]) -> None:
            def loop() -> None:
                with suppress(ProcessLookupError):
                    while child.poll() is None:
                        os.kill(child.pid, signal.SIGSTOP)
                        time.sleep(0.05)
                        os.kill(child.pid, signal.SIGCONT)
                        time.sleep(0.05)

            threading.Thread(target=loop, daemon=True).start()

        run_child(score, "half a CPU, simulated", tier, rounds, duty)
        return
    score.notes["quota"] = "control group with cpu.max = 50000 100000"
    try:
        run_child(
            score, "half a CPU, cpu.max", tier, rounds,
            lambda c: (group / "cgroup.procs").write_text(str(c.pid)) and None,
        )  # fmt: skip
    finally:
        with suppress(OSError):
            group.rmdir()


def spawn_worker(tier: str, rounds: int) -> int:
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    return child_main(tier, rounds)


def spawned(score: Score, tier: str, rounds: int) -> None:
    """multiprocessing's spawn, as vLLM's workers start, from a process that has used the kernels."""
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        for code in pool.starmap(spawn_worker, [(tier, rounds)] * 3):
            score.add("spawned workers", f"a worker returned {code}" if code else "")


def main() -> int:
    arguments = reliability.parser(__doc__.split("\n")[0])
    arguments.add_argument("--minutes", type=float, default=10.0, help="of concurrent calling, all tiers together")
    arguments.add_argument("--steps", type=int, default=STEPS)
    options = arguments.parse_args()
    if options.quick:
        options.minutes, options.steps = 0.25, 2000
    start = time.monotonic()
    os.environ["SOAK_AMX"] = options.amx
    tiers = reliability.Tiers(options.amx)
    score = Score()
    rounds = 2 if options.quick else 10
    best = tiers.names[-1]
    for tier in tiers.names:
        tiers.set(tier)
        decode_steps(score, tier, options.steps)
        work = Work()
        forked(score, work, f"fork after use {tier}")
        concurrent(score, work, tier, 60 * options.minutes / len(tiers.names), forks=True)
        print(f"{tier}: {sum(score.checks.values())} checks so far, {len(score.mismatches)} mismatches", flush=True)
    repeated_errors(score)
    spawned(score, best, rounds)
    pinned(score, best, rounds)
    throttled(score, best, rounds)
    tiers.check()
    for line in score.mismatches + score.leaks:
        print(f"FAILED {line}", file=sys.stderr)
    reliability.write(
        options.out,
        "soak",
        {
            "checks": sum(score.checks.values()),
            "mismatches": score.mismatches,
            "leaks": score.leaks,
            "by_part": score.checks,
            "notes": score.notes,
            "amx": tiers.amx,
            "tiers_skipped": tiers.skipped,
            "seconds": round(time.monotonic() - start, 1),
        },
    )
    return 1 if score.mismatches or score.leaks else 0


if __name__ == "__main__":
    sys.exit(main())
