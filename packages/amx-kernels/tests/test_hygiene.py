# SPDX-License-Identifier: Apache-2.0
"""The wheel runs on any x86-64: instructions above the baseline live in their tier's own objects and nowhere else.

Every instruction of every object is disassembled and given back to the assembler under the feature set that its file
may use. The assembler knows which instruction belongs to which feature, so there is no list to keep here. What a tier
may use is what `isa` says it requires, so code and run-time check cannot drift apart.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from amx_kernels import isa

PACKAGE = Path(isa.__file__).parent
BUILD = Path(os.environ.get("AMX_KERNELS_BUILD", Path(__file__).parents[1] / "build" / "dev"))

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="concerns x86-64 objects"),
    pytest.mark.skipif(
        not BUILD.is_dir() and "AMX_KERNELS_BUILD" not in os.environ,
        reason=f"no build tree at {BUILD}; AMX_KERNELS_BUILD names another",
    ),
]

BASELINE = "generic64"
# Beyond the baseline by the book, harmless on every CPU: TZCNT is REP BSF to a CPU without it, and compilers emit it
# where the results agree; ENDBR64 is a no-op encoding.
HARMLESS = {"tzcnt", "endbr64"}
# Executed only after CPUID said that they exist.
GUARDED = {"cpu": {"xgetbv"}}

_TIER_OBJECT = re.compile(rf"_({'|'.join(isa.TIERS)})(\.cpp)?\.o$")
_FUNCTION = re.compile(r"^[0-9a-f]+ <(.+)>:$")
_INSTRUCTION = re.compile(r"^\s+[0-9a-f]+:\t(.+)$")
_ERROR = re.compile(r"^[^:]*:(\d+): (?:Error|Fatal error): (.*)$")
_PREFIXES = {"bnd", "notrack", "data16", "addr32", "lock", "rep", "repz", "repnz", "cs", "ds", "es", "ss", "rex.W"}


def objects() -> list[Path]:
    return sorted(path for path in BUILD.rglob("*.o") if "CMakeFiles" in path.parts and "CompilerId" not in str(path))


def libraries() -> list[Path]:
    """What the build linked: beside the objects, or in the package for a build in place; installing strips names."""
    linked = [path for path in BUILD.rglob("*.so") if "CMakeFiles" not in path.parts]
    return sorted(linked or PACKAGE.glob("*.so"))


def tier_of(path: Path) -> str | None:
    """Tier whose object this is; None for a file that must run everywhere."""
    match = _TIER_OBJECT.search(path.name)
    return match.group(1) if match else None


def features_of(tier: str | None) -> str:
    """The assembler's name of what a tier's objects may contain."""
    required = next((row.required for row in isa.tiers() if row.name == tier), ())
    return "+".join([BASELINE, *required])


def run(*command: str | Path, **options: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, **options).stdout


def disassemble(path: Path) -> dict[str, set[str]]:
    """Distinct instructions of each function, less branches and no-ops: their operands do not assemble on their own."""
    functions: dict[str, set[str]] = {}
    current: set[str] = set()
    for line in run("objdump", "-d", "--no-show-raw-insn", path).splitlines():
        if function := _FUNCTION.match(line):
            current = functions.setdefault(function.group(1), set())
        elif instruction := _INSTRUCTION.match(line):
            text = re.sub(r"\s*(#.*|<[^>]*>)$", "", instruction.group(1)).strip()
            words = list(itertools.dropwhile(_PREFIXES.__contains__, text.split()))
            if words and not re.match(r"j|call|nop|loop|xbegin", words[0]):
                current.add(text)
    return functions


def above(instructions: Iterable[str], features: str) -> dict[str, str]:
    """Instructions that the assembler refuses under `features`, with its words."""
    lines = sorted(instructions)
    done = subprocess.run(
        ["as", "--64", f"-march={features}", "-o", os.devnull, "-"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        check=False,
    )
    refused = {}
    for line in done.stderr.splitlines():
        if error := _ERROR.match(line):
            refused[lines[int(error.group(1)) - 1]] = error.group(2)
    assert done.returncode == 0 or refused, done.stderr
    return {text: why for text, why in refused.items() if mnemonic(text) not in HARMLESS}


def mnemonic(text: str) -> str:
    return next(itertools.dropwhile(_PREFIXES.__contains__, text.split()), text)


def offences(path: Path) -> list[str]:
    """What in an object must not be there, as lines for a failure message."""
    functions = disassemble(path)
    guarded = GUARDED.get(path.name.partition(".")[0], set())
    refused = above(set().union(*functions.values()), features_of(tier_of(path)))
    return [
        f"{path.name}: {name}: {text}: {refused[text]}"
        for name, instructions in functions.items()
        for text in sorted(instructions & refused.keys())
        if mnemonic(text) not in guarded
    ]


def symbols(path: Path) -> dict[str, str]:
    """Defined symbols and their nm letter."""
    lines = (line.split() for line in run("nm", "--defined-only", "--no-demangle", path).splitlines())
    return {words[2]: words[1] for words in lines if len(words) == 3}


def weak(path: Path) -> list[str]:
    return [name for name, letter in symbols(path).items() if letter in "wWvVu"]


# -- the build ---------------------------------------------------------------------------------------------------------


def test_objects_of_every_compiled_tier_are_there() -> None:
    found = {tier_of(path) for path in objects()}
    assert None in found
    assert found - {None} >= {row.name for row in isa.tiers() if row.compiled}


@pytest.mark.parametrize("path", objects(), ids=lambda path: path.name)
def test_instructions(path: Path) -> None:
    assert offences(path) == []


@pytest.mark.parametrize("path", [path for path in objects() if tier_of(path)], ids=lambda path: path.name)
def test_tier_objects_define_no_weak_symbol(path: Path) -> None:
    """The linker keeps one copy of a weak symbol; it must not be the one compiled for a newer CPU."""
    assert weak(path) == []


@pytest.mark.parametrize("path", [path for path in objects() if tier_of(path)], ids=lambda path: path.name)
def test_tier_objects_do_not_initialise_at_load(path: Path) -> None:
    """A static constructor would run when the library is loaded, on whatever CPU."""
    assert not re.search(r"\.(init_array|ctors)", run("objdump", "-h", path))


@pytest.mark.parametrize("path", libraries(), ids=lambda path: path.name)
def test_library(path: Path) -> None:
    """In what was linked, everything above the baseline is a function of a tier object, within that tier's features."""
    owners: dict[str, set[str]] = {}
    for built in objects():
        if tier := tier_of(built):
            for name in symbols(built):
                owners.setdefault(name, set()).add(tier)
    everywhere = {name for built in objects() if tier_of(built) is None for name in symbols(built)}

    functions = disassemble(path)
    refused = above(set().union(*functions.values()), BASELINE)
    stray = []
    for name, instructions in functions.items():
        found = {text for text in instructions & refused.keys() if mnemonic(text) not in {"xgetbv"}}
        if not found:
            continue
        tiers = owners.get(name, set())
        if not tiers or name in everywhere:
            stray.append(f"{name}: {sorted(found)[0]}")
        elif all(above(found, features_of(tier)) for tier in tiers):
            stray.append(f"{name} is of {sorted(tiers)}: {sorted(found)[0]}")
    assert stray == []


def test_library_exports_only_its_interface() -> None:
    lines = run("nm", "-D", "--defined-only", isa.LIBRARY).splitlines()
    exported = [line.split()[-1] for line in lines]
    assert exported
    assert [name for name in exported if not name.startswith("amxk_")] == []


# -- the test itself: each kind of mistake is noticed ------------------------------------------------------------------

MISTAKES = {
    # file name, compiler flags, code, what the message must contain
    "avx2-in-common-code": (
        "common",
        "-O3 -mavx2",
        "void f(float* x) { for (int i = 0; i < 64; ++i) x[i] += 1; }",
        "vaddps",
    ),
    "fma-in-common-code": (
        "common",
        "-O2 -mfma",
        "float f(float a, float b) { return __builtin_fmaf(a, b, a); }",
        "vfm",
    ),
    "sse4-in-common-code": (
        "common",
        "-O2 -msse4.1 -fno-math-errno",
        "float f(float a) { return __builtin_floorf(a); }",
        "roundss",
    ),
    "popcnt-in-common-code": ("common", "-O2 -mpopcnt", "int f(long a) { return __builtin_popcountl(a); }", "popcnt"),
    "avx512-in-avx2": (
        "op_avx2",
        "-O3 -mavx512f -mprefer-vector-width=512",
        "void f(float* x) { for (int i = 0; i < 64; ++i) x[i] += 1; }",
        "zmm",
    ),
    "bmi-in-avx2": ("op_avx2", "-O2 -mavx2 -mbmi2", "long f(long a, int b) { return a << b; }", "shlx"),
    "bf16-in-avx512": (
        "op_avx512",
        "-O2 -mavx512bf16",
        "#include <immintrin.h>\n__m512 f(__m512 c, __m512bh a) { return _mm512_dpbf16_ps(c, a, a); }",
        "vdpbf16ps",
    ),
    "amx-in-avx512bf16": (
        "op_avx512bf16",
        "-O2 -mamx-tile",
        "#include <immintrin.h>\nvoid f(void) { _tile_zero(1); }",
        "tilezero",
    ),
    "xgetbv-elsewhere": ("common", "-O2", 'int f(void) { int a; asm("xgetbv" : "=a"(a)); return a; }', "xgetbv"),
}


def compile_(tmp_path: Path, name: str, flags: str, code: str) -> Path:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source, target = tmp_path / f"{name}.cpp", tmp_path / f"{name}.cpp.o"
    source.write_text(code)
    run(compiler, "-c", *flags.split(), "-o", target, source)
    return target


@pytest.mark.parametrize(("name", "flags", "code", "part"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistake_is_noticed(name: str, flags: str, code: str, part: str, tmp_path: Path) -> None:
    found = offences(compile_(tmp_path, name, flags, code))
    assert found
    assert part in "\n".join(found)


def test_what_is_allowed_is_not_an_offence(tmp_path: Path) -> None:
    loop = "void f(float* x) { for (int i = 0; i < 64; ++i) x[i] += 1; }"
    ctz = "int g(long a) { return __builtin_ctzl(a); }"
    assert offences(compile_(tmp_path, "common", "-O3", loop + ctz)) == []
    assert offences(compile_(tmp_path, "op_avx2", "-O3 -mavx2 -mfma -mf16c", loop + ctz)) == []
    assert offences(compile_(tmp_path, "op_avx512", "-O3 -mavx512f -mprefer-vector-width=512", loop)) == []
    tile = '#include <immintrin.h>\nvoid f(void) { asm volatile("tdpbf16ps %tmm1, %tmm2, %tmm3"); _tile_zero(1); }'
    assert offences(compile_(tmp_path, "op_amxbf16", "-O2 -mamx-tile -mamx-bf16", tile)) == []
    assert offences(compile_(tmp_path, "cpu", "-O2", MISTAKES["xgetbv-elsewhere"][2])) == []


def test_weak_symbol_is_noticed(tmp_path: Path) -> None:
    code = "inline __attribute__((noinline)) int shared(int a) { return a * 3; } int f(int a) { return shared(a); }"
    assert weak(compile_(tmp_path, "op_avx2", "-O2 -mavx2", code)) == ["_Z6sharedi"]
    assert weak(compile_(tmp_path, "op_avx2", "-O2 -mavx2", code.replace("inline __", "static __", 1))) == []


def test_every_mutant_still_applies() -> None:
    """The tests of the tests (mutants/run.py, too long for every day) edit the sources as they are."""
    path = Path(__file__).parent / "mutants" / "run.py"
    specification = importlib.util.spec_from_file_location("mutants_run", path)
    mutants = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = mutants  # its dataclasses look their module up
    specification.loader.exec_module(mutants)
    sources = {m.file: (mutants.PACKAGE / "csrc" / m.file).read_text() for m in mutants.MUTANTS}
    stale = [m.name for m in mutants.MUTANTS if sources[m.file].count(m.old) != 1]
    assert not stale
