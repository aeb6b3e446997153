# SPDX-License-Identifier: Apache-2.0
"""AMX in software, so that AMX code is executed and counted where there is no AMX.

    with amx_emulator.emulate() as emu:
        run_kernel()
    print(emu.counters()["TDPBF16PS"])

A handler of SIGILL decodes the instruction that trapped, executes it on software tiles of the thread, and rewrites it
into a jump to a stub, so that it traps only once. Results, faults and zeroing follow the manual and were compared with
hardware. What it counts are instructions; the time they take here says nothing about AMX.

Where AMX is, three states have to be told apart (:func:`mode`):

- ``"native"``: the kernel has granted this process the tile state. Nothing traps, nothing is emulated or counted.
- ``"emulated-on-amx"``: the process never asked. Tile data instructions trap and are emulated, while ``LDTILECFG``,
  ``STTILECFG`` and ``TILERELEASE`` run on the host's own unit. The emulator follows the unit's configuration, so faults
  for a missing one are precise and a reload zeroes the tiles; ``LDTILECFG`` is counted once it is followed by a tile
  instruction, ``STTILECFG`` and ``TILERELEASE`` are not counted, and a program's ``STTILECFG`` reads back
  a ``start_row`` of 0x80 or more, which it may load again.
- ``"emulated"``: there is no unit, or the operating system has not enabled it. Everything traps.

``"unavailable: <reason>"`` elsewhere.

Limits: a signal handler of the program that uses tiles itself shares them with the code it interrupts (hardware saves
them); SIGILL must not be blocked in a thread that runs AMX code; code in memory the process cannot write even through
/proc/self/mem is executed trap by trap.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno as _errno
import os
import platform
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "ORDERS",
    "Emulation",
    "EmulationLost",
    "answer_permission_requests",
    "counters",
    "deny_amx_permission",
    "emulate",
    "install",
    "library_path",
    "mode",
    "set_order",
    "uninstall",
]

#: Accumulation orders of TDPBF16PS and TDPFP16PS. ``manual``: even and odd products in chains of their own, then
#: c + (even + odd), which is what hardware does bit for bit; ``sequential``: one chain, even then odd, as the
#: intrinsics guide writes it; ``vdpbf16ps``: one chain, odd then even, as VDPBF16PS does.
ORDERS = ("manual", "sequential", "vdpbf16ps")

_MODES = ("native", "emulated", "emulated-on-amx")
_LIBRARY = Path(__file__).with_name("libmla_amx_emulator.so")


class EmulationLost(RuntimeError):
    """Counts cannot be trusted: instructions ran, or may have run, without the emulator seeing them."""


def library_path() -> Path:
    """The shared library, for ``LD_PRELOAD``.

    Set ``MLA_AMX_EMULATOR=emulate``, ``strict`` or ``denied`` beside it;
    ``native/emulator/preload.c`` lists the other variables.

    Raises:
        RuntimeError: there is none for this platform, or it has not been built.
    """
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise RuntimeError(f"the AMX emulator runs on x86-64 Linux, this is {sys.platform} on {platform.machine()}")
    if not _LIBRARY.exists():
        raise RuntimeError(
            f"{_LIBRARY} is missing: install mla-testing with a C compiler at hand, or build it in place "
            "(see the head of packages/mla-testing/CMakeLists.txt)"
        )
    return _LIBRARY


_library: ctypes.CDLL | None = None
_library_lock = threading.Lock()


def _load() -> ctypes.CDLL:
    global _library
    with _library_lock:
        if _library is None:
            lib = ctypes.CDLL(str(library_path()))
            lib.mla_amx_counter_name.restype = ctypes.c_char_p
            lib.mla_amx_counters.argtypes = [ctypes.POINTER(ctypes.c_uint64)]
            _library = lib
    return _library


def mode() -> str:
    """What AMX instructions do in this process now, without asking the kernel for permission.

    Returns:
        ``"native"``, ``"emulated"``, ``"emulated-on-amx"`` or ``"unavailable: <reason>"``. The first is found by
        executing one tile instruction, not by believing a flag.
    """
    try:
        lib = _load()
    except (RuntimeError, OSError) as e:
        return f"unavailable: {e}"
    return _MODES[lib.mla_amx_mode()]


def install(*, order: str = "manual", patch: bool = True) -> str:
    """Emulates AMX in the whole process from now on.

    Call it after ``faulthandler.enable()``; calling it again takes SIGILL back from whoever has replaced the handler.

    Args:
        order: accumulation order, one of :data:`ORDERS`.
        patch: rewrite instructions into jumps. False keeps every one of them trapping, about 10 µs each.

    Returns:
        The mode. ``"native"`` means that nothing was installed, as nothing would ever trap.

    Raises:
        RuntimeError: the emulator is not available here.
        ValueError: unknown order.
    """
    set_order(order)
    lib = _load()
    lib.mla_amx_set_patching(int(patch))
    result = lib.mla_amx_install()
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return _MODES[result]


def uninstall() -> None:
    """Puts rewritten instructions and former signal handlers back. Harmless when nothing is installed."""
    _load().mla_amx_uninstall()


def set_order(order: str) -> str:
    """Chooses the accumulation order of floating-point dot products; returns the former.

    Raises:
        ValueError: ``order`` is none of :data:`ORDERS`.
    """
    if order not in ORDERS:
        raise ValueError(f"order: expected one of {', '.join(ORDERS)}, got {order!r}")
    return ORDERS[_load().mla_amx_set_order(ORDERS.index(order))]


def counters() -> dict[str, int]:
    """Counts over all threads since the process began.

    One per instruction (``"TDPBF16PS"``, ...), and ``bytes_loaded``, ``bytes_stored`` (tiles only), ``tmul_rows`` (rows
    of A over all dot products, which is what the matrix unit spends cycles on), ``macs`` (multiply-accumulates),
    ``traps`` and ``sites_patched``.
    """
    lib = _load()
    n = lib.mla_amx_counter_count()
    values = (ctypes.c_uint64 * n)()
    lib.mla_amx_counters(values)
    return {lib.mla_amx_counter_name(i).decode(): values[i] for i in range(n)}


@dataclass
class Emulation:
    """Counts since a point in time; what :func:`emulate` yields."""

    mode: str
    _start: Mapping[str, int]

    def counters(self) -> dict[str, int]:
        """As :func:`counters`, but since the start or the last :meth:`reset`. All zero in mode ``native``.

        Raises:
            EmulationLost: since then someone has asked the kernel for AMX permission and got it, or has replaced the
                SIGILL handler.
        """
        if self.mode != "native":
            self.check()
        return {name: value - self._start[name] for name, value in counters().items()}

    def reset(self) -> None:
        """Counts from now on."""
        self._start = counters()

    def check(self) -> None:
        """Raises EmulationLost unless tile instructions still reach the emulator."""
        if _load().mla_amx_installed() < 0:
            raise EmulationLost("the SIGILL handler was replaced; install the emulator after it")
        if mode() == "native":
            raise EmulationLost(
                "this process was granted AMX permission after the emulator was installed: tile instructions no longer "
                "trap, and those already rewritten still go to software tiles. Keep the permission out "
                "(AMX_KERNELS_EMULATED=1, deny_amx_permission()) or run natively from the start"
            )


@contextlib.contextmanager
def emulate(*, order: str = "manual", patch: bool = True) -> Iterator[Emulation]:
    """Emulates AMX inside the ``with`` block and counts what is executed there.

    The emulation is the process's, not the thread's. Nested in another ``emulate`` or after :func:`install` it only
    counts, and the outer emulation goes on afterwards.

    Args: as for :func:`install`.
    """
    lib = _load()
    before = lib.mla_amx_installed()
    former_order = set_order(order)
    former_patch = lib.mla_amx_set_patching(int(patch))
    try:
        yield Emulation(install(order=order, patch=patch), counters())
    finally:
        lib.mla_amx_set_patching(former_patch)
        set_order(former_order)
        if not before:
            uninstall()


def _intercept(error: int) -> None:
    result = _load().mla_amx_intercept_permission(error)
    if result < 0:
        raise OSError(-result, f"cannot filter system calls: {os.strerror(-result)}")


def deny_amx_permission(error: int = _errno.EPERM) -> None:
    """Makes every later request for AMX permission in this process fail, as on a kernel that refuses.

    Irrevocable, and inherited by child processes: for tests, call it in a subprocess. A permission already granted
    stays. It is a seccomp filter, so no way of asking gets around it.

    Args:
        error: what ``arch_prctl(ARCH_REQ_XCOMP_PERM)`` fails with. EPERM, EINVAL (a kernel that knows no such request)
            and ENOSYS are what detection has to cope with.

    Raises:
        ValueError: ``error`` is no errno.
        OSError: filters are not allowed here.
    """
    if not 0 < error < 4096:
        raise ValueError(f"error: expected an errno between 1 and 4095, got {error}")
    _intercept(error)


def answer_permission_requests(*, required: bool = False) -> None:
    """Answers later requests for AMX permission as a kernel that grants, without granting anything.

    So code that asks goes on, and its tile instructions still trap and are emulated, on a host with AMX too.
    Irrevocable and inherited by child processes, which die of SIGSYS when they ask without the emulator loaded: call it
    in a subprocess.

    Args:
        required: tile instructions raise SIGILL until someone asked, as in a kernel.

    Raises:
        OSError: filters are not allowed here.
    """
    _intercept(0)
    _load().mla_amx_set_permission_required(int(required))
