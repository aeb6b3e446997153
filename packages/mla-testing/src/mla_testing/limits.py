# SPDX-License-Identifier: Apache-2.0
"""What this machine can do at most, measured in the same run as the kernels that are compared with it.

Arithmetic peaks per instruction, read bandwidth per cache level, memcpy bandwidth and a fixed calibration loop, all for
a given number of threads, from the small C library ``native/limits``. Nothing is assumed from the CPU's name.

A kernel's limit is the longer of its arithmetic at the peak of its tier's instruction and its bytes at the bandwidth of
the level that they fit in (the roofline model: Williams, Waterman, Patterson, CACM 52(4), 2009).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

__all__ = [
    "CPUS",
    "INSTRUCTION_OF_TIER",
    "Limit",
    "Limits",
    "LimitsError",
    "calibrate",
    "measure",
    "request_amx",
    "usable",
]

#: Instructions whose peak can be measured, in the order of ``enum mla_limits_kind``.
_KINDS = ("sse2", "fma_avx2", "fma_avx512", "vdpbf16ps", "tdpbf16ps")

#: The instruction that does a tier's multiply-accumulates.
INSTRUCTION_OF_TIER: Mapping[str, str] = {
    "portable": "sse2",
    "avx2": "fma_avx2",
    "avx512": "fma_avx512",
    "avx512bf16": "vdpbf16ps",
    "amxbf16": "tdpbf16ps",
}

_ERRORS = {
    -1: "an argument is out of range",
    -2: "the CPU or the operating system lacks the instruction",
    -3: "AMX tile data was not requested from, or not granted by, the kernel",
    -4: "out of memory or threads",
}

_MIB = 1 << 20

#: The CPUs of this process. Read once, on import: OpenMP may bind the main thread to one of them later.
CPUS = frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


class LimitsError(RuntimeError):
    """A limit cannot be measured here; the message names it and says why."""


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    override = os.environ.get("MLA_LIMITS_LIBRARY")
    path = Path(override) if override else Path(__file__).with_name("libmla_limits.so")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise LimitsError(
            f"cannot load {path}: {error}; build packages/mla-testing (cmake) or set MLA_LIMITS_LIBRARY to the library"
        ) from None
    library.mla_limits_usable.argtypes = [ctypes.c_int]
    library.mla_limits_request_amx.argtypes = []
    for name, arguments in (
        ("compute", [ctypes.c_int, ctypes.c_int, ctypes.c_double]),
        ("read", [ctypes.c_size_t, ctypes.c_int, ctypes.c_double]),
        ("memcpy", [ctypes.c_size_t, ctypes.c_int, ctypes.c_double]),
        ("calibrate", [ctypes.c_int]),
    ):
        function = getattr(library, f"mla_limits_{name}")
        function.argtypes, function.restype = arguments, ctypes.c_double
    library.mla_limits_use_cpus.argtypes = [ctypes.POINTER(ctypes.c_int), ctypes.c_int]
    library.mla_limits_use_cpus((ctypes.c_int * len(CPUS))(*sorted(CPUS)), len(CPUS))
    return library


def _checked(result: float, what: str) -> float:
    if result < 0:
        raise LimitsError(f"{what}: {_ERRORS.get(int(result), f'error {int(result)}')}")
    return result


def usable(instruction: str) -> str | None:
    """None where the peak of ``instruction`` (see ``INSTRUCTION_OF_TIER``) can be measured now, else the reason."""
    if instruction not in _KINDS:
        raise ValueError(f"instruction is {instruction!r}, expected one of {', '.join(_KINDS)}")
    status = _library().mla_limits_usable(_KINDS.index(instruction))
    return None if status == 0 else _ERRORS[status]


def request_amx() -> str | None:
    """Asks the kernel for AMX tile data for this process. None where granted, else the reason."""
    error = _library().mla_limits_request_amx()
    return None if error == 0 else f"arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA): {os.strerror(error)}"


def calibrate(threads: int) -> float:
    """Seconds that the fixed calibration loop (1 to 2 ms) takes on the slowest of ``threads`` threads."""
    return _checked(_library().mla_limits_calibrate(threads), f"calibration with {threads} threads")


def peak(instruction: str, threads: int, seconds: float) -> float:
    """FLOP/s of ``instruction`` on ``threads`` threads, best pass within about ``seconds``."""
    return _checked(
        _library().mla_limits_compute(_KINDS.index(instruction), threads, seconds), f"peak of {instruction}"
    )


def read_bandwidth(size: int, threads: int, seconds: float) -> float:
    """Bytes/s read repeatedly from ``size`` bytes split between ``threads`` threads, best pass."""
    return _checked(_library().mla_limits_read(size, threads, seconds), f"reading {size} bytes")


def memcpy_bandwidth(size: int, threads: int, seconds: float) -> float:
    """Bytes/s copied (each byte counted once) from ``size`` bytes split between ``threads`` threads, best pass."""
    return _checked(_library().mla_limits_memcpy(size, threads, seconds), f"copying {size} bytes")


def cache_sizes() -> dict[str, int]:
    """Bytes of one core's L2 and of the L3 as the operating system reports them; a level unknown is left out."""
    sizes: dict[str, int] = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            level = int((index / "level").read_text())
            kind = (index / "type").read_text().strip()
            text = (index / "size").read_text().strip()
        except (OSError, ValueError):
            continue
        if kind != "Instruction" and level >= 2:
            units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
            sizes[f"L{level}"] = int(text.rstrip("KMG")) * units.get(text[-1], 1)
    return sizes


@dataclass(frozen=True)
class Limit:
    """The shortest possible time of a piece of work, in milliseconds, and what sets it."""

    ms: float
    compute_ms: float
    memory_ms: float
    level: str
    instruction: str

    @property
    def bound(self) -> str:
        """``compute`` or the memory level."""
        return "compute" if self.compute_ms >= self.memory_ms else self.level


@dataclass(frozen=True)
class Limits:
    """Measured limits. Keys of the inner mappings are thread counts.

    peak: FLOP/s of each instruction; read and memcpy: [(bytes, bytes/s)] by ascending size; caches: bytes per level
    (L2 for one core, L3 shared); unavailable: why an instruction has no peak here.
    """

    peak: dict[str, dict[int, float]]
    read: dict[int, list[tuple[int, float]]]
    memcpy: dict[int, list[tuple[int, float]]]
    caches: dict[str, int]
    unavailable: dict[str, str] = field(default_factory=dict)

    def level(self, size: int, threads: int) -> str:
        """Smallest level that ``size`` bytes, split between ``threads`` threads, fit in."""
        if size <= self.caches.get("L2", 0) * threads:
            return "L2"
        return "L3" if size <= self.caches.get("L3", 0) else "DRAM"

    def bandwidth(self, size: int, threads: int) -> tuple[str, float]:
        """The level that ``size`` bytes fit in, and its read bandwidth in bytes/s.

        Of the sizes measured in that level the nearest one not above ``size`` counts, or the smallest: caches shared
        with other machines get slower long before they are full, and a limit must not be slower than the truth.
        """
        points = self.read[threads]
        level = self.level(size, threads)
        inside = [point for point in points if self.level(point[0], threads) == level]
        if not inside:  # nothing measured there: the nearest larger level reads slower, the nearest smaller faster
            inside = [point for point in points if point[0] <= size] or points[:1]
            return level, inside[-1][1]
        below = [rate for measured, rate in inside if measured <= size]
        return level, below[-1] if below else inside[0][1]

    def limit(self, *, flop: float, size: float, tier: str, threads: int) -> Limit:
        """max(flop / peak of the tier's instruction, size / bandwidth of the level it fits in).

        Args:
            flop: additions and multiplications of the work, two per multiply-accumulate.
            size: bytes read at least once.
            tier: a name of ``INSTRUCTION_OF_TIER``.
            threads: how many work; must have been measured.

        Raises:
            LimitsError: the tier's instruction has no measured peak.
        """
        instruction = INSTRUCTION_OF_TIER[tier]
        if threads not in self.peak.get(instruction, {}):
            reason = self.unavailable.get(instruction, f"not measured with {threads} threads")
            raise LimitsError(f"no peak of {instruction} for tier {tier}: {reason}")
        compute_ms = 1e3 * flop / self.peak[instruction][threads]
        level, rate = self.bandwidth(int(size), threads)
        memory_ms = 1e3 * size / rate
        return Limit(max(compute_ms, memory_ms), compute_ms, memory_ms, level, instruction)

    def to_json(self) -> dict[str, Any]:
        """Plain types for a report: GFLOP/s and GB/s (10^9), the raw curves and a figure per level."""
        per_level: dict[str, dict[str, float]] = {}
        for threads, points in self.read.items():
            for size, rate in points:
                best = per_level.setdefault(self.level(size, threads), {})
                best[str(threads)] = max(best.get(str(threads), 0.0), rate / 1e9)
        return {
            "peak_gflops": {
                name: {str(threads): rate / 1e9 for threads, rate in by_threads.items()}
                for name, by_threads in self.peak.items()
            },
            "read_gbps": per_level,
            "read_curve": {str(t): [[size, rate / 1e9] for size, rate in points] for t, points in self.read.items()},
            "memcpy_curve": {
                str(t): [[size, rate / 1e9] for size, rate in points] for t, points in self.memcpy.items()
            },
            "cache_bytes": self.caches,
            "unavailable": self.unavailable,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Limits:
        """The inverse of :meth:`to_json`."""

        def curve(name: str) -> dict[int, list[tuple[int, float]]]:
            return {int(t): [(int(size), rate * 1e9) for size, rate in points] for t, points in data[name].items()}

        return cls(
            peak={
                name: {int(t): rate * 1e9 for t, rate in by_threads.items()}
                for name, by_threads in data["peak_gflops"].items()
            },
            read=curve("read_curve"),
            memcpy=curve("memcpy_curve"),
            caches=dict(data["cache_bytes"]),
            unavailable=dict(data["unavailable"]),
        )


def _sizes(caches: Mapping[str, int], threads: int, largest: int) -> list[int]:
    """Sizes well inside L2, then doubling from the L2 on to ``largest``, then one that no cache holds."""
    level2 = caches.get("L2", _MIB) * threads
    sizes = [level2 // 4, level2 // 2, level2]
    size = 2 * level2
    while size < largest:
        sizes.append(size)
        size *= 2
    sizes.append(largest)
    beyond = 2 * caches.get("L3", 32 * _MIB)
    if beyond > largest:
        sizes.append(min(beyond, 1 << 30))
    return sizes


#: Every point is measured this often, and its best counts: a limit measured on a disturbed machine flatters kernels.
_TIMES = 3


def measure(
    threads: Iterable[int],
    *,
    amx: bool = False,
    quick: bool = False,
    instructions: Iterable[str] = _KINDS,
    calm: Callable[[int], Any] = lambda threads: None,
) -> Limits:
    """Measures this machine.

    Args:
        threads: thread counts of interest.
        amx: ask the kernel for AMX tile data first, so that TDPBF16PS can be measured. Without it, a process that was
            not granted AMX stays so.
        quick: a few coarse points (about 2 s per thread count) instead of the whole curves (about 6 s).
        instructions: peaks wanted.
        calm: called with the thread count before each point is measured; may wait for an undisturbed machine.

    Raises:
        LimitsError: the native library is missing, or memory is short.
    """
    unavailable: dict[str, str] = {}
    if amx and usable("tdpbf16ps") is not None and (reason := request_amx()):
        unavailable["tdpbf16ps"] = reason
    instructions = tuple(instructions)
    for name in instructions:
        if name not in unavailable and (reason := usable(name)):
            unavailable[name] = reason
    caches = cache_sizes()
    seconds = 0.03 if quick else 0.08

    def best(function: Callable[..., float], what: Any, count: int) -> float:
        rates = []
        for _ in range(_TIMES):
            calm(count)
            rates.append(function(what, count, seconds))
        return max(rates)

    peaks: dict[str, dict[int, float]] = {name: {} for name in instructions if name not in unavailable}
    reads: dict[int, list[tuple[int, float]]] = {}
    copies: dict[int, list[tuple[int, float]]] = {}
    for count in sorted(set(threads)):
        for name in peaks:
            peaks[name][count] = best(peak, name, count)
        sizes = _sizes(caches, count, 256 * _MIB)
        if quick:
            sizes = [sizes[0], sizes[2], 32 * _MIB, sizes[-1]]
        sizes = sorted(set(sizes))
        reads[count] = [(size, best(read_bandwidth, size, count)) for size in sizes]
        copies[count] = [(size, best(memcpy_bandwidth, size, count)) for size in sizes]
    return Limits(peaks, reads, copies, caches, unavailable)
