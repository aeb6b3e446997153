# SPDX-License-Identifier: Apache-2.0
"""Tests of the tests: broken AMX code does not pass under the emulator."""

from __future__ import annotations

import math
import platform
import shutil
import signal
from pathlib import Path

import pytest
from amx_support import HERE, preloaded, run

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason=f"the emulator is for x86-64, this is {platform.machine()}"
)

KERNEL_SOURCES = Path(__file__).parents[2] / "amx-kernels" / "csrc"


def test_correct_code_passes_and_counts_by_formula(build):
    out, counts = preloaded(build("mutants"))
    assert out == "0 of 800 values wrong\n"
    tiles = math.ceil(20 / 16) * math.ceil(40 / 16)
    products = tiles * math.ceil(70 / 32)
    assert counts["TDPBF16PS"] == products
    assert counts["TILELOADD"] == 2 * products
    assert counts["TILESTORED"] == counts["TILEZERO"] == tiles
    assert counts["macs"] == 32 * 48 * 96  # the shape rounded up to whole tiles
    assert counts["tmul_rows"] == 16 * products


@pytest.mark.parametrize(
    ("mutant", "end"),
    [
        ("WRONG_A_STRIDE", 1),
        ("MISSING_CONFIG", -signal.SIGILL),
        ("RELEASED_TOO_EARLY", -signal.SIGILL),
        ("STALE_ROW", 1),
        ("STALE_ACCUMULATOR", 1),
        ("SWAPPED_OPERANDS", 1),
        ("SHORT_TILE", -signal.SIGILL),
        ("WRONG_C_STRIDE", 1),
        ("UNPAIRED_B", 1),
    ],
)
def test_mutant_is_caught(compiler, tmp_path, mutant, end):
    program = tmp_path / mutant
    run([compiler, "-O2", f"-DMUTANT={mutant}", HERE / "mutants.c", "-o", program])
    out, _ = preloaded(program, expect=end)
    if end == 1:
        assert not out.startswith("0 of ")


# ---- Stores the compiler may delete ----------------------------------------------------------------------------------


def compile_elision(target: Path, *flags: object) -> None:
    cxx = shutil.which("g++")
    if not cxx:
        pytest.skip("no g++ here, whose optimiser this is about")
    run(
        [
            cxx,
            "-std=c++17",
            "-Wno-uninitialized",
            "-Wno-maybe-uninitialized",
            *flags,
            HERE / "elision.cpp",
            "-o",
            target,
        ]
    )


@pytest.mark.parametrize("level", ["-O1", "-O2", "-O3"])
def test_kernels_tile_helpers_keep_configuration_and_scratch_stores(tmp_path, level):
    if not (KERNEL_SOURCES / "tile" / "amx_tiles.h").exists():
        pytest.skip(f"{KERNEL_SOURCES} is not beside this package")
    compile_elision(tmp_path / "kept", level, f"-I{KERNEL_SOURCES}")
    out, counts = preloaded(tmp_path / "kept")
    assert out == "0 wrong values\n"
    assert counts["TDPBF16PS"] == 2


@pytest.mark.parametrize("level", ["-O2", "-O3"])
def test_forgetful_helpers_lose_them(tmp_path, level):
    """That the test above tests something: helpers that declare too little are miscompiled, and it shows."""
    compile_elision(tmp_path / "lost", level, "-DFORGETFUL")
    preloaded(tmp_path / "lost", expect=-signal.SIGILL)  # the configuration itself is gone
    compile_elision(tmp_path / "unoptimised", "-O0", "-DFORGETFUL")
    assert preloaded(tmp_path / "unoptimised")[0] == "0 wrong values\n"
