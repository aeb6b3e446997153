# SPDX-License-Identifier: Apache-2.0
"""The plugin, on pytest runs of its own against an imagined amx_kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mla_testing import amx_emulator

if amx_emulator.mode().startswith("unavailable"):
    pytest.skip(amx_emulator.mode(), allow_module_level=True)

SOURCE = Path(amx_emulator.__file__).parents[2]

ISA = """
import contextlib
from types import SimpleNamespace

TIERS = ("portable", "avx2", "avx512", "avx512bf16", "amxbf16")
log = open("tiers.log", "a", buffering=1)

def tiers():
    return [SimpleNamespace(name=n, usable=n != "avx512", reason="this CPU lacks avx512bw") for n in TIERS]

@contextlib.contextmanager
def using(name, *, emulated=False):
    print("set", name, emulated, file=log)
    yield name
    print("restored", name, file=log)
"""

# A configuration, and one product of 16 x 16 x 32, as an op of the library would execute them.
KERNEL = """
import ctypes, mmap
import pytest
code = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
text = bytes.fromhex("c4e2784907 c4e27b49c0 c4e26a5cc1 c4e27849c0 c3")
code[: len(text)] = text
kernel = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
shape = (ctypes.c_uint8 * 64)(1)
for t in range(8):
    shape[48 + t], shape[16 + 2 * t] = 16, 64
"""

DENY = "from mla_testing import amx_emulator; amx_emulator.deny_amx_permission()"


@pytest.fixture
def inner(tmp_path):
    """Runs pytest on a test module; returns exit status and output."""
    (tmp_path / "amx_kernels").mkdir()
    (tmp_path / "amx_kernels" / "__init__.py").touch()
    (tmp_path / "amx_kernels" / "isa.py").write_text(ISA)

    def run(tests: str, *options: str, first: str = "") -> tuple[int, str]:
        (tmp_path / "test_inner.py").write_text(KERNEL + tests)
        arguments = ["-p", "mla_testing.pytest_plugin", "-p", "no:cacheprovider", *options, "test_inner.py"]
        done = subprocess.run(
            [sys.executable, "-c", f"{first}\nimport pytest, sys; sys.exit(pytest.main({arguments!r}))"],
            cwd=tmp_path,
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), str(tmp_path)]), "AMX_KERNELS_EMULATED": ""},
        )
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.fixture(scope="module")
def grantable() -> bool:
    """Whether AMX runs natively here once asked for."""
    ask = "import ctypes, sys; sys.exit(ctypes.CDLL(None).syscall(158, 0x1023, ctypes.c_ulong(18)) and 1)"
    granted = subprocess.run([sys.executable, "-c", ask], check=False).returncode == 0
    mode = "from mla_testing import amx_emulator; print(amx_emulator.mode())"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    before = subprocess.run([sys.executable, "-c", mode], check=True, capture_output=True, text=True, env=environment)
    return granted and before.stdout.strip() == "emulated-on-amx"


GOOD = """
def test_op(tier):
    if tier == "amxbf16":
        kernel(shape); kernel(shape)
"""


def test_every_tier_runs_and_is_accounted_for(inner, tmp_path):
    status, out = inner(GOOD, "--amx=emulated", "-v")
    assert status == 0, out
    for tier in ("portable", "avx2", "avx512bf16", "amxbf16"):
        assert f"test_op[{tier}] PASSED" in out
        assert f"{tier:<11}      1 tests run" in out
    assert "AMX: emulated (emulated" in out
    assert "LDTILECFG 2, " in out and "TILEZERO 2, TDPBF16PS 2" in out
    assert "skipped avx512: Skipped: avx512: this CPU lacks avx512bw" in out
    assert (tmp_path / "tiers.log").read_text().splitlines() == [
        *("set portable False", "restored portable", "set avx2 False", "restored avx2"),
        *("set avx512bf16 False", "restored avx512bf16", "set amxbf16 True", "restored amxbf16"),
    ]


def test_an_amx_column_without_amx_fails(inner):
    status, out = inner("def test_op(tier): pass\n", "--amx=emulated")
    assert status == 1
    assert "FAILED: 1 tests of amxbf16 ran and executed no TDPBF16PS" in out


def test_a_skip_in_the_amx_column_fails(inner):
    status, out = inner(GOOD + "    if tier in ('avx2', 'amxbf16'): pytest.skip('too hard')\n", "--amx=emulated")
    assert status == 1
    assert (
        "FAILED: 1 tests of amxbf16 were skipped, the first test_inner.py::test_op[amxbf16]: Skipped: too hard" in out
    )
    assert "skipped avx2: Skipped: too hard" in out


def test_a_mark_does_not_skip_unseen(inner):
    status, out = inner("@pytest.mark.skip(reason='later')" + GOOD, "--amx=emulated")
    assert status == 1
    assert "1 tests of amxbf16 were skipped" in out


def test_runs_without_kernel_tests_are_left_alone(inner):
    status, out = inner("def test_other(): pass\n")
    assert status == 0
    assert "AMX:" not in out


def test_failures_stay_failures(inner):
    status, out = inner("def test_op(tier): assert tier != 'amxbf16'\n", "--amx=emulated")
    assert status == 1
    assert "amxbf16          1 tests run" in out


def test_counters_fixture_counts_from_the_start_of_the_test(inner):
    tests = """
def test_formula(amx_counters):
    kernel(shape)
    counts = amx_counters.counters()
    assert (counts["TDPBF16PS"], counts["macs"], counts["tmul_rows"]) == (1, 16 * 16 * 32, 16)

def test_formula_again(amx_counters):
    kernel(shape); kernel(shape)
    assert amx_counters.counters()["TDPBF16PS"] == 2
"""
    status, out = inner(tests, "--amx=emulated")
    assert status == 0, out
    assert "2 passed" in out


def test_order_is_passed_on(inner):
    tests = """
def test_order(tier):
    from mla_testing import amx_emulator
    if tier == "amxbf16": kernel(shape)
    assert amx_emulator.set_order("sequential") == "sequential"
"""
    status, out = inner(tests, "--amx=emulated", "--amx-order=sequential")
    assert status == 0, out


def test_the_kernels_are_told_that_amx_is_emulated(inner):
    tests = """
import os
def test_environment():
    assert os.environ["AMX_KERNELS_EMULATED"] == "1"
"""
    assert inner(tests, "--amx=emulated")[0] == 0


def test_refused_permission_means_emulation(inner):
    status, out = inner(GOOD, "--amx=auto", first=DENY)
    assert status == 0, out
    assert "AMX: emulated (emulated" in out
    assert "TDPBF16PS 2" in out


def test_native_is_refused_where_it_cannot_be(inner):
    status, out = inner(GOOD, "--amx=native", first=DENY)
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "--amx=native: this machine does not run AMX natively" in out


def test_native_where_it_can_be(inner, grantable):
    if not grantable:
        pytest.skip("AMX cannot run natively here")
    ask = "import ctypes; ctypes.CDLL(None).syscall(158, 0x1023, ctypes.c_ulong(18))"
    tests = GOOD + "\ndef test_formula(amx_counters): pass\n"
    for options in ((), ("--amx=native",)):
        status, out = inner(tests, *options, first=ask)
        assert status == 0, out
        assert "AMX: native" in out
        assert "amxbf16          1 tests run; AMX instructions: native, not counted" in out
    status, out = inner(tests, "--amx=emulated", first=ask)
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "this process already has AMX permission" in out


MORE = "\ndef test_more(tier): ctypes.CDLL(None).syscall(158, 0x1023, ctypes.c_ulong(18))\n"


def test_permission_asked_for_during_an_emulated_run_is_refused(inner):
    status, out = inner(GOOD + MORE, "--amx=emulated")
    assert status == 0, out


def test_permission_granted_during_an_emulated_run_fails_it(inner, grantable):
    if not grantable:
        pytest.skip("AMX permission cannot be had here")
    unfiltered = "from mla_testing import amx_emulator; amx_emulator.deny_amx_permission = lambda: None"
    status, out = inner(GOOD + MORE, "--amx=emulated", first=unfiltered)
    assert status == 1
    assert "FAILED: the emulation was lost: " in out
