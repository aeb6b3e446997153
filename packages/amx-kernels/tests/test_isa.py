# SPDX-License-Identifier: Apache-2.0
"""Tier selection on imagined machines: every probe is injected, so every row runs on every host."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from amx_kernels import isa

# CPUID positions by name, from the architecture manuals: (leaf, subleaf, register, bit).
POSITIONS = {
    "fma": (1, 0, 2, 12),
    "avx": (1, 0, 2, 28),
    "f16c": (1, 0, 2, 29),
    "avx2": (7, 0, 1, 5),
    "avx512f": (7, 0, 1, 16),
    "avx512dq": (7, 0, 1, 17),
    "avx512bw": (7, 0, 1, 30),
    "avx512vl": (7, 0, 1, 31),
    "amx_bf16": (7, 0, 3, 22),
    "amx_tile": (7, 0, 3, 24),
    "avx512_bf16": (7, 1, 0, 5),
}
HASWELL = ("avx", "f16c", "fma", "avx2")
SKYLAKE_SP = (*HASWELL, "avx512f", "avx512dq", "avx512bw", "avx512vl")
COOPER_LAKE = (*SKYLAKE_SP, "avx512_bf16")
SAPPHIRE_RAPIDS = (*COOPER_LAKE, "amx_tile", "amx_bf16")

XCR0_SSE, XCR0_AVX, XCR0_AVX512, XCR0_AMX = 0x3, 0x7, 0xE7, 0x600E7
TILE_DATA = 1 << 18


@dataclass
class Machine:
    """An imagined machine that records what it was asked."""

    features: tuple[str, ...] = SAPPHIRE_RAPIDS
    xcr0: int = XCR0_AMX
    vendor: str = "GenuineIntel"
    family: int = 6
    max_leaf: int = 0x20
    osxsave: bool = True
    palette: int = 1
    tile_rows: int = 16
    supported: int | OSError = XCR0_AMX
    permitted: int | OSError = XCR0_AVX512
    request: OSError | None = None
    is_x86: bool = True
    requested: list[int] = field(default_factory=list)
    xgetbv_asked: int = 0

    def cpuid(self, leaf: int, subleaf: int) -> tuple[int, int, int, int]:
        if leaf == 0:
            b, d, c = (int.from_bytes(self.vendor[i : i + 4].encode(), "little") for i in (0, 4, 8))
            return (self.max_leaf, b, c, d)
        if leaf >= 0x80000000:
            return (0x80000000, 0, 0, 0)
        if leaf > self.max_leaf:
            return (0xFFFFFFFF,) * 4  # what real CPUs do is worse than zeros: they repeat another leaf
        regs = [0, 0, 0, 0]
        if leaf == 1:
            extended = max(self.family - 0xF, 0)
            regs[0] = (min(self.family, 0xF) << 8) | (extended << 20) | (8 << 16) | (0xF << 4) | 3
            regs[2] = int(self.osxsave) << 27
        if (leaf, subleaf) == (7, 0):
            regs[0] = 1
        if (leaf, subleaf) == (0x1D, 0):
            regs[0] = self.palette
        if (leaf, subleaf) == (0x1D, 1):
            regs[0], regs[1], regs[2] = 8192 | 1024 << 16, 64 | 8 << 16, self.tile_rows
        if (leaf, subleaf) == (0x1E, 0):
            regs[1] = 16 | 64 << 8
        for name in self.features:
            at_leaf, at_subleaf, register, bit = POSITIONS[name]
            if (at_leaf, at_subleaf) == (leaf, subleaf):
                regs[register] |= 1 << bit
        return (regs[0], regs[1], regs[2], regs[3])

    def probes(self) -> isa.Probes:
        def answer(value: int | OSError) -> Callable[[], int]:
            def ask() -> int:
                if isinstance(value, OSError):
                    raise value
                return value

            return ask

        def xgetbv(index: int) -> int:
            assert index == 0
            self.xgetbv_asked += 1
            return self.xcr0

        def request(feature: int) -> None:
            self.requested.append(feature)
            if self.request is not None:
                raise self.request

        return isa.Probes(
            cpuid=self.cpuid,
            xgetbv=xgetbv,
            xcomp_supported=answer(self.supported),
            xcomp_permitted=answer(self.permitted),
            xcomp_request=request,
            is_x86=self.is_x86,
        )

    def reasons(self) -> dict[str, isa.Tier]:
        return {tier.name: tier for tier in isa.tiers(isa.detect(self.probes()))}


def refused(number: int) -> OSError:
    return OSError(number, "refused")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AMX_KERNELS_ISA", raising=False)
    monkeypatch.delenv("AMX_KERNELS_EMULATED", raising=False)


ALL = isa.TIERS
NO_AMX = ALL[:4]

# machine, tiers usable by the report, tier taken, {tier: part of the reason against it}
MACHINES = {
    "sapphire-rapids": (Machine(), ALL, "amxbf16", {}),
    "permission-already-granted": (Machine(permitted=XCR0_AMX, supported=0), ALL, "amxbf16", {}),
    "xcr0-without-amx": (Machine(xcr0=XCR0_AVX512), NO_AMX, "avx512", {"amxbf16": "does not enable AMX state"}),
    "xcr0-with-tilecfg-only": (Machine(xcr0=XCR0_AVX512 | 1 << 17), NO_AMX, "avx512", {"amxbf16": "XCR0 = 0x200e7"}),
    "xcr0-without-avx512": (
        Machine(xcr0=XCR0_AVX),
        ("portable", "avx2"),
        "avx2",
        {"avx512": "does not enable AVX-512 state", "amxbf16": "does not enable AVX-512 state"},
    ),
    "xcr0-without-avx": (Machine(xcr0=XCR0_SSE), ("portable",), "portable", {"avx2": "does not enable AVX state"}),
    "no-osxsave": (Machine(osxsave=False), ("portable",), "portable", {"avx2": "does not enable AVX state"}),
    "palette-0": (Machine(palette=0), NO_AMX, "avx512", {"amxbf16": "maximum palette 0"}),
    "tiles-of-8-rows": (Machine(tile_rows=8), NO_AMX, "avx512", {"amxbf16": "tiles are too small"}),
    "leaf-1d-missing": (Machine(max_leaf=0x16), NO_AMX, "avx512", {"amxbf16": "maximum palette 0"}),
    "kernel-does-not-know-amx": (
        Machine(supported=refused(errno.EINVAL), permitted=refused(errno.EINVAL)),
        NO_AMX,
        "avx512",
        {"amxbf16": "EINVAL"},
    ),
    "kernel-booted-without-amx": (
        Machine(supported=XCR0_AVX512),
        NO_AMX,
        "avx512",
        {"amxbf16": "does not support AMX tile data"},
    ),
    "sandbox-without-arch_prctl": (
        Machine(supported=refused(errno.ENOSYS), permitted=refused(errno.ENOSYS)),
        NO_AMX,
        "avx512",
        {"amxbf16": "ENOSYS"},
    ),
    "amx-int8-only": (
        Machine(features=(*COOPER_LAKE, "amx_tile")),
        NO_AMX,
        "avx512",
        {"amxbf16": "the CPU lacks amx_bf16"},
    ),
    "amd-zen5": (
        Machine(features=COOPER_LAKE, xcr0=XCR0_AVX512, vendor="AuthenticAMD", family=0x1A),
        NO_AMX,
        "avx512bf16",
        {"amxbf16": "the CPU lacks amx_tile amx_bf16"},
    ),
    "amd-zen4": (
        Machine(features=COOPER_LAKE, xcr0=XCR0_AVX512, vendor="AuthenticAMD", family=0x19),
        NO_AMX,
        "avx512bf16",
        {},
    ),
    "amd-zen3": (
        Machine(features=HASWELL, xcr0=XCR0_AVX, vendor="AuthenticAMD", family=0x19),
        ("portable", "avx2"),
        "avx2",
        {"avx512": "the CPU lacks avx512f avx512dq avx512bw avx512vl"},
    ),
    "intel-without-amx": (Machine(features=COOPER_LAKE, xcr0=XCR0_AVX512), NO_AMX, "avx512", {}),
    "unknown-vendor": (
        Machine(features=COOPER_LAKE, xcr0=XCR0_AVX512, vendor="ACME Silicon", family=0x1A),
        NO_AMX,
        "avx512",
        {},
    ),
    "intel-cascade-lake": (
        Machine(features=SKYLAKE_SP, xcr0=XCR0_AVX512),
        ("portable", "avx2", "avx512"),
        "avx512",
        {"avx512bf16": "the CPU lacks avx512_bf16"},
    ),
    "intel-haswell": (Machine(features=HASWELL, xcr0=XCR0_AVX), ("portable", "avx2"), "avx2", {}),
    "intel-ivy-bridge": (
        Machine(features=("avx", "f16c"), xcr0=XCR0_AVX),
        ("portable",),
        "portable",
        {"avx2": "the CPU lacks fma avx2"},
    ),
    "before-leaf-7": (Machine(features=(), max_leaf=4), ("portable",), "portable", {"avx512": "the CPU lacks"}),
    "not-x86": (
        Machine(is_x86=False),
        ("portable",),
        "portable",
        dict.fromkeys(ALL[1:], "not an x86-64 processor"),
    ),
}


def compiled(names: tuple[str, ...]) -> list[str]:
    """Those of `names` that this build contains: a build without a tier must still choose well."""
    return [tier.name for tier in isa.tiers() if tier.compiled and tier.name in names]


@pytest.mark.parametrize(("machine", "usable", "best", "against"), MACHINES.values(), ids=MACHINES.keys())
def test_machine(machine: Machine, usable: tuple[str, ...], best: str, against: dict[str, str]) -> None:
    report = isa.detect(machine.probes())
    status = {tier.name: tier for tier in isa.tiers(report)}

    assert machine.requested == [], "listing tiers must not request the permission"
    assert [name for name in ALL if status[name].usable] == compiled(usable)
    for name, part in against.items():
        if status[name].compiled:
            assert part in status[name].reason
            assert not (status[name].cpu and status[name].os)
    if best in compiled(usable):
        assert isa.best(report) == best
        assert isa.resolve(probes=machine.probes()) == best
    text = isa.explain(report)
    assert all(
        f"{tier.name:<10} {'usable' if tier.usable else 'not usable'}: {tier.reason}" in text
        for tier in status.values()
    )


def test_every_tier_of_this_build_is_described() -> None:
    listed = isa.tiers()
    assert tuple(tier.name for tier in listed) == ALL
    assert listed[0].compiled
    assert listed[0].usable
    assert listed[0].required == ()
    for lower, higher in itertools.pairwise(listed):
        assert higher.description
        assert set(lower.required) < set(higher.required)
        assert higher.os_check
    assert set(listed[-1].required) == set(POSITIONS)


def test_facts_are_reported_separately() -> None:
    report = isa.detect(Machine(permitted=refused(errno.EPERM)).probes())
    assert (report.vendor, report.family, report.model, report.stepping) == ("GenuineIntel", 6, 0x8F, 3)
    assert set(report.features) == set(SAPPHIRE_RAPIDS)
    assert report.xcr0 == XCR0_AMX
    assert (report.amx_max_palette, report.amx_total_bytes, report.amx_tile_bytes) == (1, 8192, 1024)
    assert (report.amx_tiles, report.amx_rows, report.amx_row_bytes) == (8, 16, 64)
    assert (report.amx_tmul_max_k, report.amx_tmul_max_n) == (16, 64)
    assert (report.xcomp_supported, report.xcomp_permitted, report.request) == (XCR0_AMX, "EPERM", "not made")


def test_extended_family_and_model() -> None:
    report = isa.detect(Machine(vendor="AuthenticAMD", family=0x1A).probes())
    assert (report.vendor, report.family, report.model) == ("AuthenticAMD", 0x1A, 0x8F)


def test_xcr0_is_not_read_without_osxsave() -> None:
    machine = Machine(osxsave=False)
    assert isa.detect(machine.probes()).xcr0 == 0
    assert machine.xgetbv_asked == 0  # XGETBV would be an illegal instruction


def needs(tier: str) -> None:
    if tier not in compiled(ALL):
        pytest.skip(f"this build does not contain the {tier} tier")


@pytest.mark.parametrize("number", [errno.EPERM, errno.EINVAL, errno.ENOSYS, errno.ENOSPC], ids=errno.errorcode.get)
def test_refused_permission(number: int) -> None:
    """Falls back when it may choose, and is an error that names the errno when it may not."""
    needs("amxbf16")
    machine = Machine(request=refused(number))
    assert isa.resolve(probes=machine.probes()) == "avx512"
    assert machine.requested == [18]
    with pytest.raises(
        RuntimeError, match=rf"amxbf16.*ARCH_REQ_XCOMP_PERM\) gave {errno.errorcode[number]} \({number}\)"
    ):
        isa.resolve("amxbf16", probes=machine.probes())


def test_permission_is_requested_only_for_amx() -> None:
    needs("amxbf16")
    machine = Machine()
    for name in NO_AMX:
        if name in compiled(ALL):
            assert isa.resolve(name, probes=machine.probes()) == name
    assert machine.requested == []
    assert isa.resolve("amxbf16", probes=machine.probes()) == "amxbf16"
    assert machine.requested == [18]


def test_granted_permission_is_not_requested_again() -> None:
    needs("amxbf16")
    machine = Machine(permitted=XCR0_AMX)
    assert isa.resolve("amxbf16", probes=machine.probes()) == "amxbf16"
    assert machine.requested == []


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_emulated_never_requests(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("amxbf16")
    machine = Machine()
    if by == "environment":
        monkeypatch.setenv("AMX_KERNELS_EMULATED", "1")
    emulated = by == "argument"
    assert isa.resolve("amxbf16", emulated=emulated, probes=machine.probes()) == "amxbf16"
    assert isa.resolve(emulated=emulated, probes=machine.probes()) == "avx512", "amxbf16 emulated only when forced"
    assert machine.requested == []


@pytest.mark.parametrize("name", ["amd-zen5", "palette-0", "xcr0-without-amx", "kernel-does-not-know-amx"])
def test_emulated_passes_what_concerns_amx(name: str) -> None:
    needs("amxbf16")
    probes = MACHINES[name][0].probes()
    with pytest.raises(RuntimeError, match="amxbf16"):
        isa.resolve("amxbf16", probes=probes)
    assert isa.resolve("amxbf16", emulated=True, probes=probes) == "amxbf16"


@pytest.mark.parametrize(
    ("name", "part"),
    [("intel-haswell", "lacks avx512f"), ("xcr0-without-avx512", "AVX-512 state"), ("not-x86", "not an x86-64")],
)
def test_emulated_passes_nothing_else(name: str, part: str) -> None:
    """The emulator executes AMX, not AVX-512: that must be an error here, not an illegal instruction later."""
    needs("amxbf16")
    with pytest.raises(RuntimeError, match=part):
        isa.resolve("amxbf16", emulated=True, probes=MACHINES[name][0].probes())
    with pytest.raises(RuntimeError, match='"avx512"'):
        isa.resolve("avx512", emulated=True, probes=MACHINES[name][0].probes())


def test_order_argument_environment_best(monkeypatch: pytest.MonkeyPatch) -> None:
    needs("avx2")
    machine = Machine(features=HASWELL, xcr0=XCR0_AVX)
    assert isa.resolve(probes=machine.probes()) == "avx2"
    monkeypatch.setenv("AMX_KERNELS_ISA", "portable")
    assert isa.resolve(probes=machine.probes()) == "portable"
    assert isa.resolve("avx2", probes=machine.probes()) == "avx2"
    monkeypatch.setenv("AMX_KERNELS_ISA", "")
    assert isa.resolve(probes=machine.probes()) == "avx2"


def test_environment_disables_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    needs("avx512bf16")
    machine = Machine()
    monkeypatch.setenv("AMX_KERNELS_ISA", "avx512bf16")
    assert isa.resolve(probes=machine.probes()) == "avx512bf16"
    assert machine.requested == []


@pytest.mark.parametrize("name", ["AVX2", "amx", "avx512 ", "é", "x" * 600])
@pytest.mark.parametrize("by", ["argument", "environment"])
def test_unknown_name(name: str, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(features=(), xcr0=XCR0_SSE)
    if by == "environment":
        monkeypatch.setenv("AMX_KERNELS_ISA", name)
    with pytest.raises(
        ValueError, match="no tier; expected one of portable, avx2, avx512, avx512bf16, amxbf16"
    ) as error:
        isa.resolve(name if by == "argument" else None, probes=machine.probes())
    assert ("AMX_KERNELS_ISA" if by == "environment" else "tier is") in str(error.value)
    assert name[:60] in str(error.value)
    assert "(usable here: portable)" in str(error.value)


def test_impossible_name_says_why_and_what_is_possible() -> None:
    needs("avx512")
    machine = Machine(features=HASWELL, xcr0=XCR0_AVX)
    with pytest.raises(RuntimeError, match=r"lacks avx512f.*\(usable here: portable(, avx2)?\)"):
        isa.resolve("avx512", probes=machine.probes())


def test_name_of_another_type() -> None:
    with pytest.raises(TypeError, match="name is 3; expected one of portable"):
        isa.resolve(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["yes", "2", "true"])
def test_malformed_emulated(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMX_KERNELS_EMULATED", value)
    with pytest.raises(ValueError, match=f'AMX_KERNELS_EMULATED is "{value}"; expected 1, 0 or nothing'):
        isa.resolve(probes=Machine().probes())


def test_failed_set_changes_nothing() -> None:
    with isa.using("portable"):
        with pytest.raises(ValueError, match="no tier"):
            isa.set("fastest")
        assert (isa.current(), isa.source(), isa.is_emulated()) == ("portable", "argument", False)


def test_using_restores() -> None:
    needs("amxbf16")
    if not all(tier.usable for tier in isa.tiers()[:4]):
        pytest.skip("the emulated amxbf16 tier needs AVX512-BF16, which this CPU lacks")
    with isa.using("portable"):
        with isa.using("amxbf16", emulated=True) as name:
            assert (name, isa.current(), isa.is_emulated()) == ("amxbf16", "amxbf16", True)
            assert "amxbf16    usable: AMX instructions are emulated" in isa.explain()
            assert isa.explain().endswith("in use: amxbf16 (argument, emulated)")
        assert (isa.current(), isa.is_emulated()) == ("portable", False)


def test_this_machine_agrees_with_the_kernel() -> None:
    """/proc/cpuinfo names the same features, as far as the kernel lets applications use them."""
    report = isa.detect()
    try:
        with open("/proc/cpuinfo") as file:
            flags = next(line for line in file if line.startswith("flags")).partition(":")[2].split()
    except (OSError, StopIteration):
        pytest.skip("no x86 /proc/cpuinfo to compare with")
    assert {name for name in report.features if name in flags} == {name for name in POSITIONS if name in flags}
