# SPDX-License-Identifier: Apache-2.0
"""Compiles the programs in amx_machine/ and runs them, in processes of their own, under the emulator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mla_testing import amx_emulator

HERE = Path(__file__).parent / "amx_machine"
SOURCE = Path(amx_emulator.__file__).parents[2]
ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if not k.startswith(("MLA_AMX_EMULATOR", "AMX_KERNELS"))},
    "PYTHONPATH": os.pathsep.join([str(SOURCE), str(HERE)]),
}


def run(
    command: Sequence[object], *, expect: int | None = 0, timeout: float = 120, **variables: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(c) for c in command],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=ENVIRONMENT | variables,
    )
    if expect is not None:
        assert done.returncode == expect, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def python(script: str, *arguments: object, expect: int | None = 0) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-c", script, *arguments], expect=expect)


def preloaded(
    program: Path, *arguments: object, wish: str = "emulate", expect: int | None = 0, patch: str = "1"
) -> tuple[str, dict]:
    """Runs a program on the preloaded emulator; its output, and its counters or the signal it died of."""
    report = program.with_suffix(".json")
    report.unlink(missing_ok=True)
    done = run(
        [program, *arguments],
        expect=expect,
        LD_PRELOAD=str(amx_emulator.library_path()),
        MLA_AMX_EMULATOR=wish,
        MLA_AMX_EMULATOR_PATCH=patch,
        MLA_AMX_EMULATOR_REPORT=str(report),
    )
    return done.stdout, json.loads(report.read_text()) if report.exists() else {"died": -done.returncode}
