# SPDX-License-Identifier: Apache-2.0
"""Instruction-set tiers: which exist, which this process may use and why not, and which one the kernels run on.

The tier in use is decided once, at first use: the name given to :func:`set`, else the environment variable
``AMX_KERNELS_ISA``, else the best permitted tier. ``include/amx_kernels/isa.h`` states the rules in full; this module
is that C API through :mod:`ctypes`, and needs neither the extension module nor NumPy nor torch.
"""

from __future__ import annotations

import ctypes
import errno as _errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

__all__ = [
    "TIERS",
    "CpuReport",
    "Probes",
    "Tier",
    "best",
    "current",
    "detect",
    "explain",
    "is_emulated",
    "resolve",
    "set",
    "source",
    "tiers",
    "using",
]

#: Every tier, lowest first.
TIERS: tuple[str, ...] = ("portable", "avx2", "avx512", "avx512bf16", "amxbf16")

LIBRARY = Path(__file__).with_name("libamx_kernels.so")

_OK, _INVALID_ARGUMENT, _UNSUPPORTED = 0, 1, 2
_REQUESTS = ("not made", "granted", "refused")


class _Error(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int), ("message", ctypes.c_char * 512)]


class _Report(ctypes.Structure):
    _fields_ = [
        ("is_x86", ctypes.c_int32),
        ("vendor", ctypes.c_char * 16),
        ("brand", ctypes.c_char * 64),
        ("family", ctypes.c_int32),
        ("model", ctypes.c_int32),
        ("stepping", ctypes.c_int32),
        ("osxsave", ctypes.c_int32),
        ("features", ctypes.c_uint64),
        ("xcr0", ctypes.c_uint64),
        ("amx_max_palette", ctypes.c_uint32),
        ("amx_total_bytes", ctypes.c_uint32),
        ("amx_tile_bytes", ctypes.c_uint32),
        ("amx_row_bytes", ctypes.c_uint32),
        ("amx_tiles", ctypes.c_uint32),
        ("amx_rows", ctypes.c_uint32),
        ("amx_tmul_max_k", ctypes.c_uint32),
        ("amx_tmul_max_n", ctypes.c_uint32),
        ("xcomp_supported", ctypes.c_uint64),
        ("xcomp_permitted", ctypes.c_uint64),
        ("xcomp_supported_errno", ctypes.c_int32),
        ("xcomp_permitted_errno", ctypes.c_int32),
        ("request", ctypes.c_int32),
        ("request_errno", ctypes.c_int32),
    ]


class _Status(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("required", ctypes.c_char * 256),
        ("os_check", ctypes.c_char * 128),
        ("compiled", ctypes.c_int32),
        ("cpu", ctypes.c_int32),
        ("os", ctypes.c_int32),
        ("usable", ctypes.c_int32),
        ("reason", ctypes.c_char * 512),
    ]


_CpuidProbe = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.POINTER(ctypes.c_uint32))
_XgetbvProbe = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint32)
_MaskProbe = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64))
_RequestProbe = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32)


class _Probes(ctypes.Structure):
    _fields_ = [
        ("context", ctypes.c_void_p),
        ("is_x86", ctypes.c_int),
        ("cpuid", _CpuidProbe),
        ("xgetbv", _XgetbvProbe),
        ("xcomp_supported", _MaskProbe),
        ("xcomp_permitted", _MaskProbe),
        ("xcomp_request", _RequestProbe),
    ]


@dataclass(frozen=True)
class Tier:
    """One tier on one machine."""

    name: str
    description: str
    required: tuple[str, ...]  #: CPU features, named as in /proc/cpuinfo
    os_check: str  #: what the operating system must provide, empty for nothing
    compiled: bool  #: this build contains the tier
    cpu: bool  #: the CPU has every required feature
    os: bool  #: the operating system provides the register state and, for AMX, permits it or may be asked to
    usable: bool  #: may be selected; for amxbf16 under emulation ``cpu`` and ``os`` stay facts and need not hold
    reason: str  #: why it is usable or not


@dataclass(frozen=True)
class CpuReport:
    """What the decision rests on, each fact separately; see ``amxk_cpu_report`` in isa.h for the fields."""

    is_x86: bool
    vendor: str
    brand: str
    family: int
    model: int
    stepping: int
    features: tuple[str, ...]
    osxsave: bool
    xcr0: int
    amx_max_palette: int
    amx_total_bytes: int
    amx_tile_bytes: int
    amx_row_bytes: int
    amx_tiles: int
    amx_rows: int
    amx_tmul_max_k: int
    amx_tmul_max_n: int
    xcomp_supported: int | str  #: mask, or the name of the errno with which the kernel did not answer
    xcomp_permitted: int | str
    request: str  #: "not made", "granted" or "refused: <errno name>"
    _raw: bytes = field(repr=False)


@dataclass(frozen=True)
class Probes:
    """How a machine is asked; a complete imagined machine for tests.

    Args:
        cpuid: ``(leaf, subleaf) -> (eax, ebx, ecx, edx)``.
        xgetbv: ``(index) -> value``; asked only when CPUID reports OSXSAVE.
        xcomp_supported: ``() -> mask`` of ``arch_prctl(ARCH_GET_XCOMP_SUPP)``; raise OSError to refuse.
        xcomp_permitted: the same for ``ARCH_GET_XCOMP_PERM``.
        xcomp_request: ``(feature) -> None`` for ``ARCH_REQ_XCOMP_PERM``; raise OSError to refuse.
        is_x86: False for a processor without CPUID; the other probes are then not called.
    """

    cpuid: Callable[[int, int], tuple[int, int, int, int]] = lambda leaf, subleaf: (0, 0, 0, 0)
    xgetbv: Callable[[int], int] = lambda index: 0
    xcomp_supported: Callable[[], int] = lambda: 0
    xcomp_permitted: Callable[[], int] = lambda: 0
    xcomp_request: Callable[[int], None] = lambda feature: None
    is_x86: bool = True

    def _as_c(self) -> _Probes:
        def cpuid(_context: int, leaf: int, subleaf: int, regs: ctypes._Pointer[ctypes.c_uint32]) -> None:
            for i, value in enumerate(self.cpuid(leaf, subleaf)):
                regs[i] = value

        def mask(probe: Callable[[], int]) -> Callable[..., int]:
            def ask(_context: int, result: ctypes._Pointer[ctypes.c_uint64]) -> int:
                try:
                    result[0] = probe()
                except OSError as refusal:
                    result[0] = 0
                    return refusal.errno or _errno.EINVAL
                return 0

            return ask

        def request(_context: int, feature: int) -> int:
            try:
                self.xcomp_request(feature)
            except OSError as refusal:
                return refusal.errno or _errno.EINVAL
            return 0

        return _Probes(
            None,
            int(self.is_x86),
            _CpuidProbe(cpuid),
            _XgetbvProbe(lambda _context, index: self.xgetbv(index)),
            _MaskProbe(mask(self.xcomp_supported)),
            _MaskProbe(mask(self.xcomp_permitted)),
            _RequestProbe(request),
        )


@cache
def _library() -> ctypes.CDLL:
    """Loads the kernel library; ImportError with the reason if it cannot be used."""
    if not LIBRARY.is_file():
        raise ImportError(f"{LIBRARY} is missing: amx-kernels is not built or not completely installed", name=__name__)
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise ImportError(f"{LIBRARY} cannot be loaded: {error}", name=__name__) from error

    report, error_pointer = ctypes.POINTER(_Report), ctypes.POINTER(_Error)
    signatures: dict[str, tuple[type | None, list[type]]] = {
        "amxk_cpu_report_size": (ctypes.c_size_t, []),
        "amxk_cpu_feature_name": (ctypes.c_char_p, [ctypes.c_int]),
        "amxk_detect": (None, [ctypes.POINTER(_Probes), report]),
        "amxk_tier_info": (ctypes.c_int, [report, ctypes.c_int, ctypes.POINTER(_Status), error_pointer]),
        "amxk_best_tier": (ctypes.c_int, [report]),
        "amxk_resolve_tier": (
            ctypes.c_int,
            [
                ctypes.POINTER(_Probes),
                ctypes.c_char_p,
                ctypes.c_int,
                ctypes.POINTER(ctypes.c_int),
                error_pointer,
            ],
        ),
        "amxk_current_tier": (ctypes.c_int, [error_pointer]),
        "amxk_set_tier": (ctypes.c_int, [ctypes.c_char_p, ctypes.c_int, error_pointer]),
        "amxk_tier_source": (ctypes.c_char_p, []),
        "amxk_tier_is_emulated": (ctypes.c_int, []),
        "amxk_explain": (ctypes.c_size_t, [report, ctypes.c_char_p, ctypes.c_size_t]),
    }
    try:
        for name, (result, arguments) in signatures.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError as error:
        raise ImportError(f"{LIBRARY} is of another version than this package: {error}", name=__name__) from error
    if library.amxk_cpu_report_size() != ctypes.sizeof(_Report):
        raise ImportError(f"{LIBRARY} is of another version than this package: its CPU report differs", name=__name__)
    return library


def _check(code: int, error: _Error) -> None:
    if code == _OK:
        return
    message = error.message.decode(errors="replace")
    if code == _INVALID_ARGUMENT:
        raise ValueError(message)
    raise RuntimeError(message)


def _name_argument(name: str | None) -> bytes | None:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name is {name!r}; expected one of {', '.join(TIERS)}, or None")
    return None if name is None else name.encode()


def _feature_names(mask: int) -> tuple[str, ...]:
    names = []
    i = 0
    while (name := _library().amxk_cpu_feature_name(i)) is not None:
        if mask >> i & 1:
            names.append(name.decode())
        i += 1
    return tuple(names)


def _errno_name(number: int) -> str:
    return _errno.errorcode.get(number, f"errno {number}")


def _raw(report: CpuReport | None) -> ctypes._Pointer[_Report] | None:
    return None if report is None else ctypes.pointer(_Report.from_buffer_copy(report._raw))


def detect(probes: Probes | None = None) -> CpuReport:
    """What CPU and operating system report, without requesting any permission.

    Args:
        probes: how to ask; None asks this machine, and includes the outcome of this process's own request.
    """
    raw = _Report()
    as_c = None if probes is None else probes._as_c()
    _library().amxk_detect(None if as_c is None else ctypes.byref(as_c), ctypes.byref(raw))
    request = _REQUESTS[raw.request]
    return CpuReport(
        is_x86=bool(raw.is_x86),
        vendor=raw.vendor.decode(errors="replace"),
        brand=raw.brand.decode(errors="replace"),
        family=raw.family,
        model=raw.model,
        stepping=raw.stepping,
        features=_feature_names(raw.features),
        osxsave=bool(raw.osxsave),
        xcr0=raw.xcr0,
        amx_max_palette=raw.amx_max_palette,
        amx_total_bytes=raw.amx_total_bytes,
        amx_tile_bytes=raw.amx_tile_bytes,
        amx_row_bytes=raw.amx_row_bytes,
        amx_tiles=raw.amx_tiles,
        amx_rows=raw.amx_rows,
        amx_tmul_max_k=raw.amx_tmul_max_k,
        amx_tmul_max_n=raw.amx_tmul_max_n,
        xcomp_supported=_errno_name(raw.xcomp_supported_errno) if raw.xcomp_supported_errno else raw.xcomp_supported,
        xcomp_permitted=_errno_name(raw.xcomp_permitted_errno) if raw.xcomp_permitted_errno else raw.xcomp_permitted,
        request=f"{request}: {_errno_name(raw.request_errno)}" if raw.request_errno else request,
        _raw=bytes(raw),
    )


def tiers(report: CpuReport | None = None) -> list[Tier]:
    """Every tier, lowest first, with its status on the machine of ``report`` (None: in this process)."""
    result = []
    for i in range(len(TIERS)):
        status, error = _Status(), _Error()
        _check(_library().amxk_tier_info(_raw(report), i, ctypes.byref(status), ctypes.byref(error)), error)
        result.append(
            Tier(
                name=status.name.decode(),
                description=status.description.decode(),
                required=tuple(status.required.decode().split()),
                os_check=status.os_check.decode(),
                compiled=bool(status.compiled),
                cpu=bool(status.cpu),
                os=bool(status.os),
                usable=bool(status.usable),
                reason=status.reason.decode(),
            )
        )
    return result


def best(report: CpuReport | None = None) -> str:
    """The tier taken when none is forced, on the machine of ``report`` (None: this one), if permission is granted."""
    return TIERS[_library().amxk_best_tier(_raw(report))]


def resolve(name: str | None = None, *, emulated: bool = False, probes: Probes | None = None) -> str:
    """The tier that :func:`set` with the same arguments would select, without selecting it.

    May request the AMX permission, of ``probes`` if given. Raises as :func:`set`.
    """
    tier, error = ctypes.c_int(-1), _Error()
    as_c = None if probes is None else probes._as_c()
    pointer = None if as_c is None else ctypes.byref(as_c)
    code = _library().amxk_resolve_tier(
        pointer, _name_argument(name), bool(emulated), ctypes.byref(tier), ctypes.byref(error)
    )
    _check(code, error)
    return TIERS[tier.value]


def current() -> str:
    """The tier the kernels run on; decided now if it was not yet.

    Raises:
        ValueError: AMX_KERNELS_ISA names no tier, or AMX_KERNELS_EMULATED is neither 1, 0 nor empty.
        RuntimeError: AMX_KERNELS_ISA names a tier that cannot be used here.
    """
    error = _Error()
    tier = _library().amxk_current_tier(ctypes.byref(error))
    if tier < 0:
        _check(error.code, error)
    return TIERS[tier]


def set(name: str | None, *, emulated: bool = False) -> None:
    """Selects a tier for the whole process. On error nothing changes.

    Args:
        name: one of :data:`TIERS`; None goes back to AMX_KERNELS_ISA or else the best permitted tier.
        emulated: AMX instructions are carried out by an emulator: amxbf16 is accepted without AMX in CPU and
            operating system, and the permission is not requested. Without meaning for other tiers.

    Raises:
        ValueError: no such tier.
        RuntimeError: the tier cannot be used here; the message says why, and which can.
    """
    error = _Error()
    _check(_library().amxk_set_tier(_name_argument(name), bool(emulated), ctypes.byref(error)), error)


@contextmanager
def using(name: str | None, *, emulated: bool = False) -> Iterator[str]:
    """Selects a tier, as :func:`set`, for the duration of a ``with`` block in the whole process."""
    before, before_emulated = (current(), is_emulated()) if source() == "argument" else (None, False)
    set(name, emulated=emulated)
    try:
        yield current()
    finally:
        set(before, emulated=before_emulated)


def source() -> str:
    """How the tier in use was chosen: "argument", "environment", "best permitted"; empty when not yet decided."""
    return _library().amxk_tier_source().decode()


def is_emulated() -> bool:
    """Whether the tier in use was selected as emulated."""
    return bool(_library().amxk_tier_is_emulated())


def explain(report: CpuReport | None = None) -> str:
    """Why each tier is or is not usable on the machine of ``report`` (None: in this process), as lines of text."""
    pointer = _raw(report)
    size = _library().amxk_explain(pointer, None, 0) + 1
    buffer = ctypes.create_string_buffer(size)
    _library().amxk_explain(pointer, buffer, size)
    return buffer.value.decode(errors="replace").rstrip("\n")
