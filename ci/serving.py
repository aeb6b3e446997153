# SPDX-License-Identifier: Apache-2.0
"""A real `vllm serve` with this repository's backend: `python ci/serving.py MODEL [vllm options]`.

Every option goes to vLLM. What is chosen here, unless the environment or the options say otherwise: all usable cores
(vLLM's own choice keeps one back, which on a small machine is half of them), and the portable tier where there is no
other, so that any x86 machine serves.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import NamedTuple

SMALL_MACHINE = 8
"""Up to this many cores, none is kept back from computing."""


class Announcement(NamedTuple):
    """What the server's log says about who serves."""

    backend: str
    tier: str
    threads: int


def command(model: str, *options: str) -> list[str]:
    """The command line of `vllm serve` in this Python's environment (see ``amx_mla_backend.__main__``)."""
    return [sys.executable, "-m", "amx_mla_backend", "serve", model, *options]


def environment(options: tuple[str, ...] = ()) -> dict[str, str]:
    """This process's environment with the defaults above, for a server with these options."""
    env = {"VLLM_AMX_MLA_BACKEND": "on", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", **os.environ}
    cpus = sorted(os.sched_getaffinity(0))
    several_ranks = any(option.startswith(("--tensor-parallel-size", "-tp", "--pipeline")) for option in options)
    if len(cpus) <= SMALL_MACHINE and not several_ranks:
        env.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cpus)))
    return env


class Server:
    """A server on a free local port, as a context manager: it serves once entered, and is gone once left."""

    def __init__(
        self, model: str, *options: str, log: Path, env: dict[str, str] | None = None, timeout: float = 600.0
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._timeout = timeout
        self._env = environment(options) | (env or {})
        self._command = command(model, "--host", "127.0.0.1", "--port", str(self.port), *options)

    def __enter__(self) -> Server:
        with open(self.log, "w") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=self._env, start_new_session=True
            )
        deadline = time.monotonic() + self._timeout
        try:
            while not self._healthy():
                if self._process.poll() is not None:
                    raise RuntimeError(f"vllm serve ended with {self._process.returncode}:\n{self.tail()}")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"vllm serve was not ready after {self._timeout:.0f} s:\n{self.tail()}")
                time.sleep(0.5)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return response.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def _stop(self) -> None:
        """Ask the server to end, as Ctrl-C would; its whole process group goes with it."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def tail(self, lines: int = 20) -> str:
        """The first error in the log, and its end."""
        text = self.log.read_text(errors="replace").splitlines()
        first = next((line for line in text if re.search(r"\w(Error|Exception): ", line)), "")
        return "\n".join([first, "…", *text[-lines:]])

    def announcement(self) -> Announcement | None:
        """Backend, tier and threads as the server announced them; None if our backend does not serve."""
        found = re.search(r"Attention backend (\w+): tier (\w+), (\d+) threads", self.log.read_text(errors="replace"))
        return Announcement(found[1], found[2], int(found[3])) if found else None


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print("usage: nox -s serve -- MODEL [vllm options]", file=sys.stderr)
        return 2
    try:
        return subprocess.call(command(*sys.argv[1:]), env=environment(tuple(sys.argv[2:])))
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
