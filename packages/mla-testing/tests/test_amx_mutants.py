# SPDX-License-Identifier: Apache-2.0
"""Tests of the tests: broken AMX code does not pass under the emulator."""

from __future__ import annotations

import math
import platform
import re
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


# ---- The kernels themselves ------------------------------------------------------------------------------------------

KERNEL_FLAGS = ["-mavx2", "-mfma", "-mf16c", *(f"-mavx512{x}" for x in ("f", "bw", "vl", "dq", "bf16"))]

# What is replaced, and by what, in the tile vocabulary all kernels are written in.
KERNEL_MUTANTS = {
    "wrong load stride": ("tile/amx_tiles.h", r'(tileloadd .*"r"\()stride_bytes\)', r"\1stride_bytes / 2)", 1),
    "wrong store stride": ("tile/amx_tiles.h", r'(tilestored .*"r"\()stride_bytes\)', r"\1stride_bytes / 2)", 1),
    "no configuration": ("tile/amx_tiles.h", r"\btile_load_config\(config\);", ";", -signal.SIGILL),
    "short tiles": ("tile/amx_tiles.h", r"= kTileRows;", "= kTileRows - (t == 0);", -signal.SIGILL),
    "stale accumulators": ("tile/amx_tiles.h", r'"tilezero %%tmm%c0"', '"# %c0"', 1),
    "stale row": ("tile/amx_tiles.h", r"= kTileRows;", "= t < 6 ? kTileRows - 1 : kTileRows;", 1),
    "operands exchanged": ("tile/amx_tiles.h", r"%%tmm%c2, %%tmm%c1, ", "%%tmm%c1, %%tmm%c2, ", 1),
}


@pytest.fixture
def kernel(tmp_path):
    """Builds kernel.cpp against the kernels' headers, with one replacement in one of them."""
    if not (KERNEL_SOURCES / "tile" / "amxbf16.h").exists():
        pytest.skip(f"{KERNEL_SOURCES} is not beside this package")
    if "avx512bw" not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip("the AMX tier's vector code needs AVX-512, which this CPU lacks")
    cxx = shutil.which("g++") or shutil.which("c++")
    if not cxx:
        pytest.skip("no C++ compiler")

    def build_(header: str | None = None, pattern: str = "", replacement: str = "") -> Path:
        sources = tmp_path / "csrc"
        shutil.copytree(KERNEL_SOURCES, sources, dirs_exist_ok=True)
        if header:
            text, found = re.subn(pattern, replacement, (sources / header).read_text())
            assert found == 1, f"{pattern} stands {found} times in {header}: the mutant has to follow the code"
            (sources / header).write_text(text)
        run(
            [
                cxx,
                "-O2",
                "-std=c++17",
                "-w",
                *KERNEL_FLAGS,
                "-I",
                sources,
                HERE / "kernel.cpp",
                "-o",
                tmp_path / "kernel",
            ]
        )
        return tmp_path / "kernel"

    return build_


def test_kernels_matrix_product_is_right(kernel):
    out, counts = preloaded(kernel())
    assert out.startswith("0 of ")
    # Twice 1..5 groups times 1..6 panels times 3 steps, no product wasted.
    assert counts["TDPBF16PS"] == 2 * 15 * 21 * 3


@pytest.mark.parametrize("mutant", KERNEL_MUTANTS)
def test_mutant_of_the_kernels_is_caught(kernel, mutant):
    header, pattern, replacement, end = KERNEL_MUTANTS[mutant]
    out, _ = preloaded(kernel(header, pattern, replacement), expect=end)
    assert not out.startswith("0 of ")
