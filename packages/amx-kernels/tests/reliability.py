# SPDX-License-Identifier: Apache-2.0
"""What the fuzz, sanitize and soak sessions share: the tiers to run, and the report they write."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "faults")]


def parser(description: str) -> argparse.ArgumentParser:
    """The options all sessions take."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--quick", action="store_true", help="a minute at most")
    result.add_argument("--amx", choices=("auto", "native", "emulated", "none"), default="auto")
    result.add_argument("--out", type=Path, default=ROOT / "reports", help="folder of the report")
    return result


class Tiers:
    """The tiers that can run here; amxbf16 natively, or emulated where the machine has no AMX or it was asked for."""

    def __init__(self, amx: str = "auto") -> None:
        from mla_testing import amx_emulator

        self._emulator = amx_emulator
        self.amx = "none"
        if amx == "emulated":
            os.environ["AMX_KERNELS_EMULATED"] = "1"  # the permission must never be asked for, or nothing would trap
        from amx_kernels import isa

        self._isa = isa
        self.skipped = {t.name: t.reason for t in isa.tiers() if not t.usable and t.name != "amxbf16"}
        self.names = [t.name for t in isa.tiers() if t.usable and t.name != "amxbf16"]
        if amx in ("auto", "native"):
            try:
                with isa.using("amxbf16"):
                    self.amx = "native"
            except (RuntimeError, ValueError) as error:
                if amx == "native":
                    raise SystemExit(f"--amx=native: {error}") from error
        if amx in ("auto", "emulated") and self.amx == "none" and not amx_emulator.mode().startswith("unavailable"):
            os.environ["AMX_KERNELS_EMULATED"] = "1"
            if amx_emulator.install() == "native":
                raise SystemExit("--amx=emulated: this process was already granted AMX, nothing would trap")
            self.amx = "emulated"
        if self.amx == "none":
            self.skipped["amxbf16"] = "not asked for" if amx == "none" else amx_emulator.mode()
        else:
            self.names.append("amxbf16")

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """The ops run on this tier inside the block."""
        with self._isa.using(name, emulated=name == "amxbf16" and self.amx == "emulated"):
            yield

    def set(self, name: str) -> None:
        self._isa.set(name, emulated=name == "amxbf16" and self.amx == "emulated")

    def check(self) -> None:
        """Raises if emulation was asked for and executed nothing, or was lost on the way."""
        if self.amx == "emulated":
            if self._emulator.counters()["TDPBF16PS"] == 0:
                raise AssertionError("amxbf16 was emulated and executed no TDPBF16PS")
            if self._emulator.mode() == "native":
                raise AssertionError("the process was granted AMX permission: part of the run was not emulated")


def cmake_build(name: str, compiler: str, sanitize: str, flags: str, *, python: bool) -> Path:
    """Builds the package into build/<name> with sanitizers, incrementally; returns the folder of libamx_kernels.so."""
    folder = PACKAGE / "build" / name
    settings = {
        "CMAKE_BUILD_TYPE": "Checked",
        "CMAKE_CXX_FLAGS_CHECKED": flags,
        "CMAKE_CXX_COMPILER": compiler,
        "AMXK_SANITIZE": sanitize,
        "AMXK_PYTHON": "ON" if python else "OFF",
        "AMXK_TORCH": "OFF",
        "Python_EXECUTABLE": sys.executable,
    }
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    configure = ["cmake", "-S", str(PACKAGE), "-B", str(folder), *generator]
    for command in (
        [*configure, *(f"-D{key}={value}" for key, value in settings.items())],
        ["cmake", "--build", str(folder), "-j", str(len(os.sched_getaffinity(0)))],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    return folder


def write(out: Path, name: str, report: dict[str, Any]) -> None:
    """reports/<name>.json, with the machine it was made on."""
    from mla_testing.fingerprint import machine

    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    path.write_text(json.dumps({"report": name, "machine": machine(), **report}, indent=1, default=str) + "\n")
    print(f"written: {path}")
