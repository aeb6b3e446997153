# SPDX-License-Identifier: Apache-2.0
"""pytest plugin: every kernel test on every tier, and the AMX tier never skipped.

A test that takes the fixture ``tier`` runs once per tier of ``amx_kernels.isa``. Tiers the CPU lacks are skipped with
the reason, except ``amxbf16``: where the machine permits AMX it runs natively, elsewhere on
:mod:`mla_testing.amx_emulator`. The summary says per tier how many tests ran and which AMX instructions they executed;
the run fails if an ``amxbf16`` test was skipped, or if under emulation they executed no TDPBF16PS at all.

``--amx=native`` and ``--amx=emulated`` force one or the other. On a machine with AMX, emulation ends as soon as anybody
in the process asks the kernel for the tile state, and torch does so at its first bf16 matrix product. Hence
AMX_KERNELS_EMULATED=1 is set, and further requests, of this process and its children, are refused with EPERM.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from types import ModuleType

import pytest

from mla_testing import amx_emulator

TIERS = ("portable", "avx2", "avx512", "avx512bf16", "amxbf16")
AMX_TIER = "amxbf16"
_PROPERTY = "mla_testing.tier"

_REQUEST_PERMISSION = """
import ctypes, sys
libc = ctypes.CDLL(None)
sys.exit(0 if libc.syscall(158, 0x1023, ctypes.c_ulong(18)) == 0 else 1)  # arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)
"""


def _permitted_if_asked() -> bool:
    """Whether the kernel would grant AMX to a process that asks: a child asks, as this one may have to stay without."""
    return subprocess.run([sys.executable, "-c", _REQUEST_PERMISSION], check=False, capture_output=True).returncode == 0


def _decide(option: str) -> str:
    """How the amxbf16 tier runs: "native", "emulated", or why it cannot, as an error."""
    mode = amx_emulator.mode()
    can_be_native = mode == "native" or (mode == "emulated-on-amx" and _permitted_if_asked())
    if option == "native" and not can_be_native:
        raise pytest.UsageError(f"--amx=native: this machine does not run AMX natively (emulator: {mode})")
    if option == "emulated" and mode == "native":
        raise pytest.UsageError("--amx=emulated: this process already has AMX permission, nothing would trap")
    if option != "emulated" and can_be_native:
        return "native"
    return "unavailable" if mode.startswith("unavailable") else "emulated"


class AmxRun:
    """How the amxbf16 tier runs in this session, and what the tiers did."""

    def __init__(self, option: str, order: str) -> None:
        self.how = _decide(option)
        self.mode = amx_emulator.mode()
        self.lost = ""
        self.ran: Counter[str] = Counter()
        self.skipped: dict[str, list[str]] = {}
        self.counts: dict[str, Counter[str]] = {}
        if self.how == "emulated":
            os.environ["AMX_KERNELS_EMULATED"] = "1"
            if self.mode == "emulated-on-amx":
                # Where filters are forbidden, a lost emulation is still noticed.
                with contextlib.suppress(OSError):
                    amx_emulator.deny_amx_permission()
            amx_emulator.install(order=order)

    @property
    def emulated(self) -> bool:
        return self.how == "emulated"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts one phase of one test, from this process or an xdist worker."""
        record = dict(report.user_properties).get(_PROPERTY)
        if not isinstance(record, dict):
            return
        tier = record["tier"]
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.skipped.setdefault(tier, []).append(f"{report.nodeid}: {reason}")
        elif report.when == "call":
            self.ran[tier] += 1
        if report.when == "teardown":
            self.counts.setdefault(tier, Counter()).update(record.get("counts", {}))
            self.lost = self.lost or record.get("lost", "")

    def violations(self) -> list[str]:
        found = []
        if self.lost:
            found.append(f"the emulation was lost: {self.lost}")
        if skips := self.skipped.get(AMX_TIER):
            found.append(f"{len(skips)} tests of {AMX_TIER} were skipped, the first {skips[0]}")
        if self.emulated and self.ran[AMX_TIER] and not self.counts.get(AMX_TIER, Counter())["TDPBF16PS"]:
            found.append(f"{self.ran[AMX_TIER]} tests of {AMX_TIER} ran and executed no TDPBF16PS")
        return found

    def lines(self) -> list[str]:
        lines = [f"AMX: {self.how}" + (f" ({self.mode})" if self.emulated else "")]
        for tier in TIERS:
            ran, skipped = self.ran[tier], len(self.skipped.get(tier, []))
            if not ran and not skipped:
                continue
            line = f"{tier:<11} {ran:>6} tests run" + (f", {skipped} skipped" if skipped else "")
            counts = {k: v for k, v in self.counts.get(tier, Counter()).items() if k.isupper() and v}
            if tier == AMX_TIER and not self.emulated:
                line += "; AMX instructions: native, not counted"
            elif counts:
                line += "; AMX instructions: " + ", ".join(f"{name} {n:,}" for name, n in counts.items())
            lines.append(line)
        return lines


_KEY = pytest.StashKey[AmxRun]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mla-testing")
    group.addoption(
        "--amx",
        choices=("auto", "native", "emulated"),
        default="auto",
        help="how the amxbf16 tier runs; auto: natively where the machine permits it, else emulated",
    )
    group.addoption(
        "--amx-order",
        choices=amx_emulator.ORDERS,
        default="manual",
        help="accumulation order of the emulated TDPBF16PS; manual is the hardware's",
    )


@pytest.hookimpl(trylast=True)  # after faulthandler, which must be the one the emulator hands foreign signals to
def pytest_configure(config: pytest.Config) -> None:
    config.stash[_KEY] = AmxRun(config.getoption("--amx"), config.getoption("--amx-order"))
    config.pluginmanager.register(config.stash[_KEY], "mla_testing.amx_run")


def _tier_of(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    tier = callspec.params.get("tier") if callspec is not None else None
    return tier if tier in TIERS else None


def pytest_itemcollected(item: pytest.Item) -> None:
    if (tier := _tier_of(item)) is not None:
        item.user_properties.append((_PROPERTY, {"tier": tier}))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    is_worker = hasattr(session.config, "workerinput")
    if not is_worker and session.exitstatus == pytest.ExitCode.OK and session.config.stash[_KEY].violations():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    run = config.stash[_KEY]
    if not run.ran and not run.skipped:
        return
    terminalreporter.section("tiers")
    for line in run.lines():
        terminalreporter.write_line(line)
    for tier, reasons in run.skipped.items():
        for reason in sorted({r.split(": ", 1)[1] for r in reasons}):
            terminalreporter.write_line(f"skipped {tier}: {reason}")
    for violation in run.violations():
        terminalreporter.write_line(f"FAILED: {violation}", red=True)


def _isa() -> ModuleType:
    return importlib.import_module("amx_kernels.isa")


def _record(request: pytest.FixtureRequest) -> dict[str, object]:
    record = dict(request.node.user_properties).get(_PROPERTY)
    return record if isinstance(record, dict) else {}


@pytest.fixture(params=TIERS, ids=TIERS)
def tier(request: pytest.FixtureRequest) -> Iterator[str]:
    """Name of the tier that all amx_kernels ops run on during the test."""
    name: str = request.param
    run = request.config.stash[_KEY]
    isa = _isa()
    if name == AMX_TIER:
        if run.how == "unavailable":
            pytest.fail(f"{AMX_TIER} can neither run natively nor be emulated: {run.mode}")
    else:
        status = next(t for t in isa.tiers() if t.name == name)
        if not status.usable:
            pytest.skip(f"{name}: {status.reason}")
    if run.emulated:
        amx_emulator.install(order=request.config.getoption("--amx-order"))  # should someone have replaced the handler
        before = amx_emulator.counters()
    with isa.using(name, emulated=name == AMX_TIER and run.emulated):
        yield name
    if run.emulated:
        record = _record(request)
        record["counts"] = {k: v - before[k] for k, v in amx_emulator.counters().items() if v != before[k]}
        if amx_emulator.mode() == "native":
            record["lost"] = f"{request.node.nodeid} or a test before it was granted AMX permission"


@pytest.fixture
def amx_counters(request: pytest.FixtureRequest) -> Iterator[amx_emulator.Emulation]:
    """Counts of AMX instructions since the test began, for tests that hold them against a formula.

    Skipped, with the reason, where the session runs AMX natively, which cannot be counted.
    """
    run = request.config.stash[_KEY]
    if not run.emulated:
        pytest.skip(f"AMX is {run.how} in this session and not counted: run with --amx=emulated")
    with amx_emulator.emulate(order=request.config.getoption("--amx-order")) as emulation:
        yield emulation
