# SPDX-License-Identifier: Apache-2.0
"""Whole-model speed through vLLM: ours, vLLM's CPU_MLA (``stock``), vLLM's AMX_MLA, each without and with zentorch.

Every contender is an engine in a process of its own with equal settings and equal random weights; all stay alive and
take turns, so that samples interleave (as many at a time as there is memory for; the report says who, ``together``).
The stock backend keeps all scores of a prompt in memory: a job too large for it beside the others is run when they have
ended (``run_apart``). Prompts are random and never repeat, prefix caching is off, each job is run once for warming up.

A prefill sample lasts until every request of the batch has its first token. Decode jobs start from contexts that count
as computed (``e2e_vllm.FilledContext``); their figures are of the steps after the first. Attention is timed where vLLM
enters it, and set beside our operators alone on the same shapes. Samples in which the engine waited for a CPU, or a
hypervisor took it away, for more than a tenth of its CPUs' time do not count. Greedy tokens of real prompts are
compared wherever the other's two likeliest tokens are further apart than ``agreement.MARGIN``.

What fails (an engine, a job, a server) is written into the report, the rest is measured all the same.

The published figure of vLLM's AMX_MLA change stands beside the serving result: 816.9 output and 4084.3 total tokens/s
over 1000 prompts with input : output = 4 : 1, on hardware that was not named.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mla_testing import fingerprint, limits, peers, report
from mla_testing.agreement import MARGIN
from mla_testing.bench import e2e_model
from mla_testing.bench.common import Options
from mla_testing.bench.e2e_processes import Contender, Failure, Server, Worker, contenders
from mla_testing.bench.harness import WAITED, stats

__all__ = ["Failure", "Job", "Plan", "Shape", "contenders", "run"]

PUBLISHED = {
    "output_tokens_per_s": 816.9,
    "total_tokens_per_s": 4084.3,
    "prompts": 1000,
    "hardware": "unknown",
    "source": "https://github.com/vllm-project/vllm pull request of the AMX_MLA backend",
}
#: Memory that an engine keeps, what one needs for a while beside it (loading, a long prompt), and some to spare.
_ENGINE_BYTES = {"v2lite": 6250 << 20, "v3_tp8": 3 << 30, "v3_tp6": 3 << 30, "tiny": 2 << 30}
_BUSY_BYTES = 5 << 29
#: A server's own process, beside its engine's.
_FRONT_END_BYTES = 400 << 20
_SPARE_BYTES = 1 << 30
#: Of rows of the cache: 8 requests of 8k in four layers, and a little.
_CACHE_BYTES = 5 << 26


@dataclass(frozen=True)
class Job:
    """``prompts`` prompts of ``length`` tokens, ``new_tokens`` to generate for each; filled: nothing is prefilled."""

    prompts: int
    length: int
    new_tokens: int
    filled: bool = False

    def dense_bytes(self, heads: int) -> int:
        """Two float32 arrays of one prompt's scores."""
        return 0 if self.filled else 2 * 4 * heads * self.length**2


@dataclass(frozen=True)
class Plan:
    """What is measured of a shape. Names of jobs begin with prefill or decode, which says what of them counts."""

    jobs: dict[str, Job]
    agreement: Job
    rounds: int
    serving: tuple[int, tuple[int, int], int] | None = None  #: prompts, (input, output) tokens, rounds


_V3 = Plan({"prefill_1x2048": Job(1, 2048, 1), "decode_8x2048": Job(8, 2048, 16, True)}, Job(4, 256, 16), rounds=3)
PLANS = {
    "v2lite": Plan(
        {
            "prefill_4x2048": Job(4, 2048, 1),
            "prefill_1x8192": Job(1, 8192, 1),
            "decode_1x2048": Job(1, 2048, 24, True),
            "decode_8x2048": Job(8, 2048, 24, True),
            "decode_1x8192": Job(1, 8192, 24, True),
            "decode_8x8192": Job(8, 8192, 24, True),
        },
        Job(8, 512, 24),
        rounds=3,
        serving=(8, (1024, 256), 2),
    ),
    "v3_tp8": _V3,
    "v3_tp6": _V3,
}
QUICK_PLANS = {
    "tiny": Plan(
        {"prefill_1x1024": Job(1, 1024, 1), "decode_4x512": Job(4, 512, 8, True)},
        Job(4, 64, 8),
        rounds=2,
        serving=(4, (64, 16), 1),
    )
}


def split(outcome: Mapping[str, Any], requests: int) -> tuple[list[list[float]], list[list[float]]]:
    """Steps until every request had its first token, and those after."""
    steps = outcome["steps"]
    have, last = 0, 0
    for index, step in enumerate(steps):
        have += step[1]
        if have >= requests:
            last = index
            break
    return steps[: last + 1], steps[last + 1 :]


def undisturbed(outcome: Mapping[str, Any]) -> bool:
    """Whether the engine had its CPUs while it worked."""
    return outcome["waited"] <= WAITED and outcome["stolen"] <= WAITED


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def standalone(shape: str, job: Job) -> Callable[[], float]:
    """A function that runs one layer's attention of a job on our operators alone, projections included; seconds."""
    import torch

    from amx_kernels import isa
    from mla_testing.bench import prefill
    from mla_testing.bench.attention import BLOCK, Pool

    threads = len(limits.CPUS)
    heads = e2e_model.SHAPES[shape]["num_attention_heads"]
    # Decode: the middle of the steps that are measured.
    context, query = (job.length + job.new_tokens // 2, 1) if job.filled else (0, job.length)
    pool = Pool(job.prompts * (context + query + BLOCK))
    case = prefill.prefill_case(pool, heads, [context] * job.prompts, [query] * job.prompts)

    def call() -> float:
        torch.set_num_threads(threads)
        entry.call()
        begin = time.perf_counter()
        entry.call()
        return time.perf_counter() - begin

    torch.set_num_threads(threads)
    entry = prefill.our_prefill(case, isa.current(), threads)
    return call


class Shape:
    """The measurement of one model shape: samples, engines and failures so far."""

    def __init__(self, name: str, plan: Plan, chosen: Sequence[Contender], folder: Path, failures: list[Any]) -> None:
        self.name, self.plan, self.chosen, self.folder, self.failures = name, plan, list(chosen), folder, failures
        self.model = e2e_model.make(name, folder / "models")
        dims = e2e_model.SHAPES[name]
        self.heads, self.vocabulary = dims["num_attention_heads"], dims["vocab_size"]
        every = [*plan.jobs.values(), plan.agreement]
        longest = max(job.length + job.new_tokens for job in every) + 8
        self.arguments = {
            "dtype": "bfloat16",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "max_model_len": longest,
            "max_num_batched_tokens": max(8448, longest),
            "max_num_seqs": 16,
            "kv_cache_memory_bytes": _CACHE_BYTES,
            "seed": 0,
        }
        self.together: list[list[str]] = []
        self.samples: dict[str, dict[str, list[Any]]] = {job: {c.name: [] for c in chosen} for job in plan.jobs}
        self.alone: dict[str, list[float]] = {job: [] for job in plan.jobs}
        self.run_apart: list[str] = []
        self.served: dict[str, list[dict[str, Any]]] = {contender.name: [] for contender in chosen}
        self.served_together: list[list[str]] = []
        self.engines: dict[str, Any] = {}
        self.texts: dict[str, Any] = {}

    @contextlib.contextmanager
    def cell(self, what: str) -> Iterator[None]:
        """A failure inside is written down, with its place, and ends there."""
        try:
            yield
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            print(f"FAILED: {self.name} {what}: {text}", flush=True)
            self.failures.append({"cell": f"{self.name} {what}", "error": text, "trace": traceback.format_exc()})

    def prompts(self, job: str, sample: int) -> list[list[int]]:
        """Random prompts, equal for all contenders, never repeated."""
        of = self.plan.jobs.get(job, self.plan.agreement)
        place = [*self.plan.jobs, "agreement"].index(job)
        generator = np.random.default_rng([place, sample])
        return generator.integers(3, self.vocabulary, size=(of.prompts, of.length)).tolist()

    def sample(self, worker: Worker, name: str, index: int, *, keep: bool = True) -> None:
        """One sample of a job."""
        job, cpus = self.plan.jobs[name], len(limits.CPUS)
        calibration, stolen, begin = limits.calibrate(cpus), fingerprint.steal_seconds(), time.perf_counter()
        outcome = worker.run(self.prompts(name, index), job.new_tokens, filled=job.filled, logprobs=False)
        elapsed = time.perf_counter() - begin
        outcome["stolen"] = (fingerprint.steal_seconds() - stolen) / elapsed / cpus
        outcome["calibration_ms"] = [1e3 * calibration, 1e3 * limits.calibrate(cpus)]
        self.engines[worker.name]["peak_rss_mib"] = outcome["rss_mib"]
        if keep:
            self.samples[name][worker.name].append(outcome)

    def lacking(self, workers: Sequence[Worker], name: str) -> bool:
        """Whether too few samples that a job has of these engines were undisturbed."""
        return any(
            sum(map(undisturbed, self.samples[name][worker.name])) < min(2, self.plan.rounds)
            for worker in workers
            if (worker.name, name) not in self.deferred
        )

    def round(self, workers: list[Worker], names: Sequence[str], index: int) -> None:
        """Every job of every engine once, engines in turn; one that fails leaves ``workers``."""
        for name in names:
            shift = index % max(1, len(workers))
            for worker in [*workers[shift:], *workers[:shift]]:
                if (worker.name, name) in self.deferred or worker not in workers:
                    continue
                if not self.fits(worker.contender, name):
                    self.deferred.append((worker.name, name))
                    continue
                dead = True
                with self.cell(f"{worker.name} {name}"):
                    self.sample(worker, name, index, keep=index > 0)  # the first one warms up
                    dead = False
                if dead:
                    workers.remove(worker)
                    worker.close()
            if index > 0 and name in self.standalone:
                with self.cell(f"standalone {name}"):
                    self.alone[name].append(self.standalone[name]())

    def fits(self, contender: Contender, name: str) -> bool:
        """Whether there is memory for a job now."""
        needed = self.plan.jobs[name].dense_bytes(self.heads) + _SPARE_BYTES if contender.dense else 0
        return _available_bytes() > needed

    def group(self, chosen: Sequence[Contender]) -> None:
        """Measures contenders whose engines are alive together."""
        self.deferred: list[tuple[str, str]] = []
        self.standalone: dict[str, Callable[[], float]] = {}
        with contextlib.ExitStack() as stack:
            workers: list[Worker] = []
            for contender in chosen:
                with self.cell(f"{contender.name} engine"):
                    worker = Worker(
                        contender, {"model": str(self.model), **self.arguments}, self.folder / contender.name
                    )
                    stack.callback(worker.close)
                    workers.append(worker)
                    self.engines[worker.name] = dict(worker.info)
            for worker in list(workers):
                with self.cell(f"{worker.name} agreement"):
                    job = self.plan.agreement
                    outcome = worker.run(self.prompts("agreement", 0), job.new_tokens, filled=False, logprobs=True)
                    self.texts[worker.name] = {name: outcome[name] for name in ("tokens", "logprobs")}
            if any(worker.name == "ours" for worker in workers):
                for name, job in self.plan.jobs.items():
                    with self.cell(f"standalone {name}"):
                        self.standalone[name] = standalone(self.name, job)
            for index in range(self.plan.rounds + 1):
                self.round(workers, list(self.plan.jobs), index)
            if again := [name for name in self.plan.jobs if self.lacking(workers, name)]:
                self.round(workers, again, self.plan.rounds + 1)
            for worker in workers:
                if names := [job for name, job in self.deferred if name == worker.name]:
                    self.apart(worker, names, [other for other in workers if other is not worker])

    def apart(self, worker: Worker, names: Sequence[str], others: Sequence[Worker]) -> None:
        """Jobs of an engine that there was no memory for beside the others: those end here."""
        for other in others:
            other.close()
        for name in names:
            with self.cell(f"{worker.name} {name}"):
                if not self.fits(worker.contender, name):
                    raise MemoryError(
                        f"its scores need {self.plan.jobs[name].dense_bytes(self.heads) / 2**30:.1f} GiB, "
                        f"{_available_bytes() / 2**30:.1f} GiB are available"
                    )
                self.run_apart.append(f"{worker.name} {name}")
                for index in range(self.plan.rounds + 1):
                    self.sample(worker, name, index, keep=index > 0)

    def run(self) -> None:
        """Measures everything of the plan."""
        for group in self.groups():
            self.together.append([contender.name for contender in group])
            self.group(group)

    def groups(self, beside: int = 0) -> list[list[Contender]]:
        """The contenders, as many at a time as there is memory for; ``beside``: bytes that each needs for the rest."""
        free = _available_bytes() - _BUSY_BYTES - _SPARE_BYTES
        found: list[list[Contender]] = []
        left = 0
        for contender in self.chosen:
            needed = contender.copies * _ENGINE_BYTES[self.name] + beside
            if not found or needed > left:
                found.append([])
                left = free
            found[-1].append(contender)
            left -= needed
        return found


def agreement(mine: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Greedy tokens of one engine held against another's, request by request until the texts part.

    A place counts where the other's two likeliest tokens are further apart than ``MARGIN``.
    """
    places = counted = 0
    disagreements: list[str] = []
    differences: list[float] = []
    requests = zip(mine["tokens"], mine["logprobs"], other["tokens"], other["logprobs"], strict=True)
    for request, (tokens, own, theirs, their) in enumerate(requests):
        for place, (token, expected) in enumerate(zip(tokens, theirs, strict=True)):
            places += 1
            best, second = sorted(their[place].values(), reverse=True)[:2]
            differences += [abs(own[place][t] - their[place][t]) for t in own[place].keys() & their[place].keys()]
            if best - second > MARGIN:
                counted += 1
                if token != expected:
                    disagreements.append(
                        f"request {request}, token {place}: {token}, not {expected} (margin {best - second:.3f})"
                    )
            if token != expected:
                break
    return {
        "places": places,
        "counted": counted,
        "margin": MARGIN,
        "disagreements": disagreements,
        "logprob_difference_median": statistics.median(differences) if differences else None,
        "logprob_difference_max": max(differences, default=None),
    }


def _sample_json(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """A raw sample as the report keeps it: milliseconds of each step."""
    steps = outcome["steps"]
    return {
        "step_ms": [1e3 * step[0] for step in steps],
        "attention_ms": [1e3 * step[3] for step in steps],
        "cache_write_ms": [1e3 * step[4] for step in steps],
        "first_tokens": [step[1] for step in steps],
        "waited": outcome["waited"],
        "stolen": outcome["stolen"],
        "calibration_ms": outcome["calibration_ms"],
    }


def figures(job: Job, decode: bool, outcomes: Sequence[Mapping[str, Any]], layers: int) -> dict[str, Any]:
    """ms of a batch's prompts or of a decode step, tokens per second, the part of attention and its ms per layer."""
    ms: list[float] = []
    rates: list[float] = []
    attention: list[float] = []
    shares: list[float] = []
    for outcome in outcomes:
        prompt, later = split(outcome, job.prompts)
        steps = later if decode else prompt
        total = sum(step[0] for step in steps)
        shares.append(sum(step[3] + step[4] for step in steps) / total)
        if decode:
            ms += [1e3 * step[0] for step in steps]
            attention += [1e3 * step[3] / layers for step in steps]
            rates.append(sum(step[2] for step in steps) / total)
        else:
            ms.append(1e3 * total)
            attention.append(1e3 * sum(step[3] for step in steps) / layers)
            rates.append(job.prompts * job.length / total)
    return {
        "ms": stats(ms),
        "tokens_per_s": statistics.median(rates),
        "attention_share": statistics.median(shares),
        "attention_ms_per_layer": stats(attention),
    }


def results(shape: Shape, tier: str, threads: int) -> list[dict[str, Any]]:
    """Entries in the schema of ``report``; ms are of the whole prompt part (time to the last first token), or of one
    decode step (time per output token)."""
    found = []
    for name, job in shape.plan.jobs.items():
        decode = name.startswith("decode")
        entry: dict[str, Any] = {
            "case": f"{shape.name}_{name}",
            "tier": tier,
            "threads": threads,
            "params": asdict(job),
            "flop": 0.0,
            "bytes": 0.0,
            **dict.fromkeys(("gflops", "gbps", "limit_ms", "limit_fraction", "bound")),
            "peers": {},
            "samples": {who: list(map(_sample_json, outcomes)) for who, outcomes in shape.samples[name].items()},
        }
        of: dict[str, dict[str, Any]] = {}
        disturbed: dict[str, float] = {}
        for who, outcomes in shape.samples[name].items():
            good = [outcome for outcome in outcomes if undisturbed(outcome)]
            layers = shape.engines[who]["layers"] if outcomes else 0
            if len(good) >= min(2, shape.plan.rounds):
                of[who] = figures(job, decode, good, layers)
            elif outcomes:
                disturbed[who] = figures(job, decode, outcomes, layers)["ms"]["min"]
        if disturbed:
            entry["disturbed_min_ms"] = {(f"ours:{tier}" if w == "ours" else w): ms for w, ms in disturbed.items()}
        if "ours" not in of:
            entry["ms"] = stats([])
            entry["failed"] = "too few undisturbed samples" if "ours" in disturbed else "no samples"
            entry.setdefault("disturbed_min_ms", {})
            found.append(entry)
            continue
        entry |= of.pop("ours")
        if shape.alone[name]:
            alone = stats([1e3 * seconds for seconds in shape.alone[name]])
            entry["attention_standalone_ms"] = alone
            entry["attention_over_standalone"] = entry["attention_ms_per_layer"]["median"] / alone["median"]
        for who in shape.samples[name].keys() - {"ours"}:
            if who not in of:
                reason = "too few undisturbed samples" if who in disturbed else "no samples"
                entry["peers"][who] = {"unavailable": reason}
                continue
            entry["peers"][who] = {
                **of[who],
                "speedup": of[who]["ms"]["median"] / entry["ms"]["median"],
                "speedup_min": of[who]["ms"]["min"] / entry["ms"]["min"],
            }
        found.append(entry)
    return found


def summarise(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Speedups over ``stock`` and ``vllm_amx_mla`` by kind of job, rates, and the attention's share of our time."""
    good = [entry for entry in entries if "failed" not in entry]
    kinds = {"prefill": r"_prefill_(?!1x8192)", "prefill8k": r"_prefill_1x8192$", "decode": r"_decode_"}
    found: dict[str, Any] = {}
    for suffix, peer in (("stock", "stock"), ("amx", "vllm_amx_mla")):
        for kind, pattern in kinds.items():
            found[f"{kind}_speedup_{suffix}"] = report.geomean(
                entry["peers"][peer]["speedup"]
                for entry in good
                if re.search(pattern, entry["case"]) and "speedup" in entry["peers"].get(peer, {})
            )
    found["speedup"] = {
        entry["case"]: {who: peer["speedup"] for who, peer in entry["peers"].items() if "speedup" in peer}
        for entry in good
    }
    found["tokens_per_s"] = {
        entry["case"]: {
            "ours": entry["tokens_per_s"],
            **{who: peer["tokens_per_s"] for who, peer in entry["peers"].items() if "tokens_per_s" in peer},
        }
        for entry in good
    }
    for kind in ("prefill", "decode"):
        shares = [entry["attention_share"] for entry in good if f"_{kind}_" in entry["case"]]
        found[f"attention_share_{kind}"] = statistics.median(shares) if shares else None
    over = {entry["case"]: entry.get("attention_over_standalone") for entry in good}
    found["attention_over_standalone"] = over
    found["attention_over_standalone_worst"] = max((value for value in over.values() if value), default=None)
    return found


def judge(shape: Shape) -> tuple[dict[str, Any], list[str]]:
    """What must hold beside speed: tokens agree, the raw weight is freed, memory. The figures, and what is wrong."""
    wrong: list[str] = []
    found: dict[str, Any] = {"agreement": {}}
    names = list(shape.texts)
    for mine, other in (("ours", "stock"), ("ours", "vllm_amx_mla"), ("vllm_amx_mla", "stock")):
        if mine in names and other in names:
            found["agreement"][f"{mine} {other}"] = agreement(shape.texts[mine], shape.texts[other])
    held = found["agreement"].get("ours stock")
    if held is not None:
        wrong += [f"{shape.name}: ours and stock disagree: {text}" for text in held["disagreements"]]
        if held["counted"] == 0:
            wrong.append(f"{shape.name}: no place has a margin above {MARGIN}: no token was compared")
    ours, stock = shape.engines.get("ours"), shape.engines.get("stock")
    if ours is not None:
        found["raw_kv_b_proj_freed"] = ours["raw_kv_b_proj_elements"] == 0
        if not found["raw_kv_b_proj_freed"]:
            wrong.append(f"{shape.name}: {ours['raw_kv_b_proj_elements']} elements of raw kv_b_proj are kept")
        for who, engine in shape.engines.items():
            if engine["threads"] != len(limits.CPUS):
                wrong.append(f"{shape.name}: {who} runs {engine['threads']} threads")
    if ours and stock and "peak_rss_mib" in ours and "peak_rss_mib" in stock:
        found["peak_rss_over_stock"] = ours["peak_rss_mib"] / stock["peak_rss_mib"]
    return found, wrong


def _served(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "output_tokens_per_s": raw["output_throughput"],
        "total_tokens_per_s": raw["total_token_throughput"],
        "ttft_ms": raw["median_ttft_ms"],
        "tpot_ms": raw["median_tpot_ms"],
        "completed": raw["completed"],
        "ttfts_ms": [1e3 * seconds for seconds in raw["ttfts"]],
        "mean_itls_ms": [1e3 * statistics.fmean(gaps) for gaps in raw["itls"] if gaps],
    }


def serve(shape: Shape) -> None:
    """``vllm serve`` and ``vllm bench serve``: fills ``shape.served``.

    Servers stay alive together and take turns where memory allows it.
    """
    prompts, lengths, rounds = shape.plan.serving
    options = [
        "--load-format", "dummy", "--dtype", "bfloat16", "--enforce-eager", "--no-enable-prefix-caching",
        "--max-model-len", str(sum(lengths) + 64), "--max-num-batched-tokens", "8448",
        "--kv-cache-memory-bytes", str(_CACHE_BYTES),
    ]  # fmt: skip
    for group in shape.groups(_FRONT_END_BYTES):
        shape.served_together.append([contender.name for contender in group])
        with contextlib.ExitStack() as stack:
            servers: list[Server] = []
            for contender in group:
                with shape.cell(f"{contender.name} server"):
                    place = shape.folder / f"serve-{contender.name}"
                    server = Server(contender, shape.model, options, place)
                    stack.callback(server.close)
                    servers.append(server)
            for index in range(rounds):
                for server in list(servers):
                    with shape.cell(f"{server.name} serving, round {index}"):
                        served = _served(server.bench(prompts, lengths, index))
                        shape.served[server.name].append(served)
                        if served["completed"] != prompts:
                            raise Failure(f"{served['completed']} of {prompts} requests completed")


def serving(shape: Shape) -> dict[str, Any] | None:
    """What servers did, as the report has it: tokens/s, TTFT and TPOT in milliseconds, medians over rounds."""
    if not any(shape.served.values()):
        return None
    prompts, lengths, _ = shape.plan.serving
    medians = {
        name: {
            **{key: statistics.median(s[key] for s in of) for key in of[0] if isinstance(of[0][key], (int, float))},
            "samples": of,
        }
        for name, of in shape.served.items()
        if of
    }
    return {
        "shape": shape.name,
        "prompts": prompts,
        "input": lengths[0],
        "output": lengths[1],
        "together": shape.served_together,
        **medians,
        "published": PUBLISHED,
    }


def run(options: Options) -> tuple[dict[str, Any], int]:
    """Runs the benchmark; the report and 0, 1 (something wrong or failed), 2 (too disturbed) or 130 (interrupted)."""
    import torch

    from amx_kernels import isa

    plans = QUICK_PLANS if options.quick else PLANS
    if options.only:
        plans = {name: plan for name, plan in (PLANS | QUICK_PLANS).items() if re.search(options.only, name)}
        if not plans:
            raise SystemExit(f"--only {options.only!r} matches no shape of {', '.join(PLANS | QUICK_PLANS)}")
    plans = {name: replace(plan, rounds=min(plan.rounds, options.rounds)) for name, plan in plans.items()}
    threads = len(limits.CPUS)
    machine = fingerprint.machine()
    zentorch = importlib.util.find_spec("zentorch") is not None
    zen = "present" if zentorch else "not installed: no figures with it"
    if zentorch and machine["vendor"] != "AuthenticAMD":
        zen = f"installed, but vLLM uses it on AMD CPUs alone and this is {machine['vendor']}: nothing was measured"
        print(f"zentorch is {zen}")
        plans = {}
    amx = torch.cpu._is_amx_tile_supported()  # as vLLM asks; it never asks for the permission
    chosen = contenders(amx, zentorch)
    tier = isa.current()
    failures: list[dict[str, Any]] = []
    wrong: list[str] = []
    models: dict[str, Any] = {}
    entries: list[dict[str, Any]] = []
    served = None
    interrupted = False
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mla-bench-") as folder:
        for name, plan in plans.items():
            shape = Shape(name, plan, chosen if options.peers else chosen[:1], Path(folder) / name, failures)
            try:
                shape.run()
                if plan.serving:
                    serve(shape)
            except KeyboardInterrupt:
                interrupted = True
            served = serving(shape) or served
            of_shape = results(shape, tier, threads)
            judged, its_wrong = judge(shape)
            wrong += its_wrong
            entries += of_shape
            models[name] = {
                "engines": shape.engines,
                "together": shape.together,
                "run_apart": shape.run_apart,
                "settings": shape.arguments,
                **judged,
                "summary": summarise(of_shape),
            }
            if interrupted:
                break
    first = next(iter(models.values()), {"summary": summarise([])})
    summary = first["summary"] | {key: first.get(key) for key in ("raw_kv_b_proj_freed", "peak_rss_over_stock")}
    for kind in ("prefill", "prefill8k", "decode"):
        key = f"{kind}_speedup"
        # With zentorch present every engine above ran with it.
        summary[f"{key}_zen"] = summary.pop(f"{key}_stock") if zentorch else None
        summary.setdefault(f"{key}_stock", None)
    found = {
        "benchmark": "bench_e2e",
        "machine": machine,
        "versions": peers.versions(),
        "limits": limits.Limits({}, {}, {}, limits.cache_sizes()).to_json(),
        "quick": options.quick,
        "seconds": time.monotonic() - began,
        "zentorch": zen,
        "vllm_amx_mla": "vLLM's choice on this host, which has AMX" if amx else "forced: this host has no AMX",
        "failures": failures,
        "wrong": wrong,
        "interrupted": interrupted,
        "models": models,
        "serving": served,
        "summary": summary,
        "results": entries,
    }
    if wrong or failures:
        return found, 1
    if interrupted:
        return found, 130
    return found, 2 if any("failed" in entry for entry in entries) else 0
