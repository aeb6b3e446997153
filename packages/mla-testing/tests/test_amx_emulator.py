# SPDX-License-Identifier: Apache-2.0
"""The emulator against hardware, a scalar model, the assembler, and the ways processes live and die.

Everything that executes AMX instructions does so in a process of its own: whether this one has AMX permission must not
matter.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import platform
import re
import shutil
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
from amx_support import HERE, preloaded, python, run

from mla_testing import amx_emulator

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason=f"the emulator is for x86-64, this is {platform.machine()}"
)


@pytest.fixture(scope="session")
def machine(build) -> Path:
    return build("machine", "-shared", "-fPIC")


@pytest.fixture(scope="session")
def library() -> ctypes.CDLL:
    return amx_emulator._load()


@pytest.fixture(scope="session")
def host() -> str:
    """Mode of a fresh process here that asks for nothing: "emulated" or "emulated-on-amx"."""
    mode = python("from mla_testing import amx_emulator; print(amx_emulator.mode())").stdout.strip()
    assert mode in ("emulated", "emulated-on-amx")
    return mode


@pytest.fixture(scope="session")
def hardware(host, machine) -> None:
    """Skips where the tests cannot be compared with an AMX unit."""
    if host != "emulated-on-amx":
        pytest.skip("no AMX unit here to compare with")
    asked = python("import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).machine_request_permission())", machine)
    if asked.stdout.strip() != "0":
        pytest.skip("the kernel grants no AMX permission here, nothing to compare with")


# ---- Random programs -------------------------------------------------------------------------------------------------

SEEDS = range(4)


def log(
    machine: Path, mode: str, seed: int, *options: str, emulator: Sequence[str] = (), sections: int = 40
) -> list[list[list[object]]]:
    """Per round what came of each instruction: [what, signal, si_code, si_addr, rip, registers changed, result]."""
    out = run([*emulator, sys.executable, HERE / "driver.py", machine, mode, seed, sections, *options]).stdout
    rounds: dict[int, list[list[object]]] = defaultdict(list)
    for line in out.splitlines():
        number, *entry = json.loads(line)
        rounds[number].append(entry)
    assert len(rounds) == (3 if mode.startswith("trap") else 1)
    return [rounds[i] for i in sorted(rounds)]


def differences(expected: list[list[object]], got: list[list[object]], *, marked: bool) -> list[str]:
    """Where two logs differ. marked: a start_row of 0x80 or more read back by STTILECFG is the emulator's mark."""
    assert len(expected) == len(got)
    found = []
    for i, (e, g) in enumerate(zip(expected, got, strict=True)):
        e, g = list(e), list(g)
        if marked and g[0] == "STTILECFG" and isinstance(g[-1], str) and int(g[-1][2:4], 16) >= 0x80:
            g[-1] = g[-1][:2] + e[-1][2:4] + g[-1][4:]
        if e != g:
            found.append(f"{i}: after {expected[i - 1][0]}: {e} but {g}")
    return found


@pytest.mark.parametrize("values", ["ordinary", "bits"])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", ["trap", "step"])
def test_hardware_and_emulator_print_the_same(hardware, machine, mode, seed, values):
    """Values, NaN payloads, zeroed rows, fault kinds and places, every register, flags, MXCSR, red zone."""
    (native,) = log(machine, "native", seed, values)
    for number, entries in enumerate(log(machine, mode, seed, values)):
        assert not differences(native, entries, marked=mode == "trap"), f"round {number}"


@pytest.mark.parametrize("mode", ["trap", "trap-unpatched", "trap-mprotect"])
def test_trapped_and_stepped_print_the_same(host, machine, mode):
    (stepped,) = log(machine, "step", 5, "bits")
    for number, entries in enumerate(log(machine, mode, 5, "bits")):
        assert not differences(stepped, entries, marked=host == "emulated-on-amx"), f"round {number}"


@pytest.mark.parametrize("mode", ["trap-unpatched", "trap-mprotect"])
def test_a_cpu_without_amx_prints_the_same(machine, mode):
    """Where the configuration traps too, and there is no AVX-512 to save: QEMU's CPU has neither.

    It runs rewritten code when that is written through mprotect.
    """
    qemu = shutil.which("qemu-x86_64")
    if not qemu:
        pytest.skip("no qemu-x86_64 (Debian: qemu-user) for a CPU without AMX")
    (stepped,) = log(machine, "step", 6, "bits", "qemu", sections=12)
    rounds = log(machine, mode, 6, "bits", "qemu", sections=12, emulator=[qemu, "-cpu", "max"])
    for number, entries in enumerate(rounds):
        assert not differences(stepped, entries, marked=False), f"round {number}"


@pytest.fixture(scope="module")
def trapped(machine) -> list[list[object]]:
    """Every instruction of all seeds, three rounds each."""
    return [entry for seed in SEEDS for entries in log(machine, "trap", seed, "ordinary") for entry in entries]


def test_nothing_but_tiles_and_memory_changes(trapped):
    executed = [e for e in trapped if len(e) > 1]
    assert len(executed) > 10000
    assert [e for e in executed if e[5]] == []  # registers, flags, MXCSR, vectors, masks, red zone


def test_every_fault_is_raised_as_hardware_does(trapped):
    """By signal, si_code and si_addr, at the instruction itself."""
    kinds: dict[str, set[tuple[object, ...]]] = defaultdict(set)
    for what, *rest in (e for e in trapped if len(e) > 1):
        sig, code, address, rip = rest[:4]
        kinds[what].add((sig, code, "site" if address == rip == "site+0" else address))
    general_protection = {(signal.SIGSEGV, 0x80, 0)}
    illegal = {(signal.SIGILL, 2, "site")}
    for flaw in ("palette", "reserved", "rows", "colsb", "no rows", "no colsb", "ninth rows", "ninth colsb"):
        assert kinds[f"LDTILECFG bad {flaw}"] == general_protection, flaw
    for what in (k for k in kinds if k.startswith("illegal ") and not k.endswith("fine")):
        assert kinds[what] == illegal, what
    assert sum(k.startswith("illegal ") for k in kinds) > 15
    # Unconfigured and mismatched tiles, and no configuration at all.
    for what in ("TDPBF16PS", "TDPFP16PS", "TDPBSSD", "TDPBSUD", "TDPBUSD", "TDPBUUD", "TILELOADD", "TILESTORED"):
        assert kinds[what] == illegal | {(0, 0, 0)}, what
    # Non-canonical: #GP, through the stack's registers #SS.
    assert kinds["non-canonical"] - illegal <= general_protection | {(signal.SIGBUS, 0x80, 0)}
    assert general_protection <= kinds["non-canonical"]
    # The page nobody may touch begins at 65536.
    assert (signal.SIGSEGV, 2, "arena+65536") in kinds["guard"] | kinds["guard store"]
    assert kinds["guard config"] == {(signal.SIGSEGV, 2, "arena+65536")}
    assert kinds["null config"] == {(signal.SIGSEGV, 1, 64)}


# ---- Products --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", amx_emulator.ORDERS)
def test_products_of_random_shapes_match_the_scalar_model(machine, order):
    lines = run([sys.executable, HERE / "products.py", machine, 7, 400, order]).stdout.split("\n")
    counts = {name: int(n) for name, n in (line.split() for line in lines if line)}
    assert sum(counts.values()) == 400
    assert set(counts) == {"TDPBF16PS", "TDPFP16PS", "TDPBSSD", "TDPBSUD", "TDPBUSD", "TDPBUUD"}


@pytest.mark.parametrize("kind", ["bits", "ordinary"])
def test_all_floors_compute_the_same_bits(library, kind):
    np = pytest.importorskip("numpy")
    rng = np.random.default_rng(3)
    names = [library.mla_amx_counter_name(i).decode() for i in range(library.mla_amx_counter_count())]
    dots = [i for i, name in enumerate(names) if name.startswith("TDP")]
    compared: Counter[int] = Counter()
    for op, order, _ in itertools.product(dots, range(3), range(20)):
        m, n, k = (int(x) for x in rng.integers(1, 17, 3))
        a, b, c = (rng.integers(0, 256, (16, 64), np.uint8) for _ in range(3))
        if kind == "ordinary":
            a, b, c = ((rng.normal(size=(16, 16)).astype(np.float32)).view(np.uint8) for _ in range(3))
        results = []
        for floor in range(3):
            out = c.copy()
            pointers = [ctypes.c_void_p(x.ctypes.data) for x in (out, a, b)]
            if library.mla_amx_dot(floor, op, order, m, k, n, *pointers) == 0:
                compared[floor] += 1
                results.append(out)
        for other in results[1:]:
            assert np.array_equal(results[0], other), (names[op], order, m, n, k)
    if set(compared) != {0, 1, 2}:
        print(f"floors this CPU has: {sorted(compared)} of SSE2, AVX2, AVX-512")
    assert compared[0]


# ---- The decoder -----------------------------------------------------------------------------------------------------

REGISTERS = ["rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi", *(f"r{i}" for i in range(8, 16))]
REGISTERS32 = ["eax", "ecx", "edx", "ebx", "esp", "ebp", "esi", "edi", *(f"r{i}d" for i in range(8, 16))]


def addressing_forms() -> list[tuple[str, dict[str, int]]]:
    """Operand as the assembler writes it, and the fields it has to decode to."""
    forms = []
    displacements = [0, 8, -128, 127, 128, -129, 2**31 - 1, -(2**31)]
    for (base, index), displacement in itertools.product(itertools.product([-1, *range(16)], repeat=2), displacements):
        if index == 4:  # no such index
            continue
        for scale in range(4) if index >= 0 else [0]:
            if (base * 31 + index * 7 + scale * 3 + displacement) % 5 and displacement not in (0, 127):
                continue  # a fifth of the large ones is enough
            for wide in (1, 0):
                names = REGISTERS if wide else REGISTERS32
                if not wide and (base < 0 and index < 0):
                    continue
                inner = (f"%{names[base]}" if base >= 0 else "") + (
                    f",%{names[index]},{1 << scale}" if index >= 0 else ""
                )
                text = f"{displacement}({inner})" if inner else f"{displacement}"
                fields = {"base": base, "index": index, "scale": scale, "disp": displacement, "address32": 1 - wide}
                forms.append((text, fields))
    return forms


def assemble(compiler: str, folder: Path, lines: Sequence[str]) -> list[bytes]:
    """The bytes of each line."""
    source, target = folder / "forms.s", folder / "forms.o"
    source.write_text("".join(f"{line}\n" for line in lines))
    run([compiler, "-c", source, "-o", target])
    listing = run(["objdump", "-d", "-z", "-w", "--insn-width=15", target]).stdout
    codes = []
    for line in listing.splitlines():
        if match := re.match(r"\s+[0-9a-f]+:\t((?:[0-9a-f]{2} )+)", line):
            codes.append(bytes.fromhex(match[1]))
    assert len(codes) == len(lines)
    return codes


def decode(library: ctypes.CDLL, code: bytes) -> tuple[int, dict[str, int]]:
    fields = (ctypes.c_int32 * 11)()
    length = library.mla_amx_decode(code + b"\xcc" * 16, fields)
    names = ["op", "dst", "src_a", "src_b", "base", "index", "scale", "segment", "address32", "rip_relative", "disp"]
    return length, dict(zip(names, fields, strict=True))


def test_decoder_reads_every_addressing_form_the_assembler_writes(compiler, library, tmp_path):
    names = [library.mla_amx_counter_name(i).decode() for i in range(13)]
    lines: list[str] = []
    expected: list[dict[str, int]] = []

    def case(line: str, op: str, **fields: int) -> None:
        lines.append(line)
        expected.append({"op": names.index(op), **fields})

    for i, (operand, fields) in enumerate(addressing_forms()):
        tile, segment = i % 8, i % 3
        prefix = ("", "%fs:", "%gs:")[segment]
        fields = {**fields, "segment": segment}
        case(f"tileloadd {prefix}{operand}, %tmm{tile}", "TILELOADD", dst=tile, **fields)
        case(f"tileloaddt1 {prefix}{operand}, %tmm{tile}", "TILELOADDT1", dst=tile, **fields)
        case(f"tilestored %tmm{tile}, {prefix}{operand}", "TILESTORED", dst=tile, **fields)
        case(f"ldtilecfg {prefix}{operand}", "LDTILECFG", **fields)
        case(f"sttilecfg {prefix}{operand}", "STTILECFG", **fields)
    for displacement in (0, 64, -64, 1 << 20):
        case(f"ldtilecfg {displacement}(%rip)", "LDTILECFG", rip_relative=1, disp=displacement, base=-1, index=-1)
        case(f"sttilecfg {displacement}(%rip)", "STTILECFG", rip_relative=1, disp=displacement, base=-1, index=-1)
    for tile in range(8):
        case(f"tilezero %tmm{tile}", "TILEZERO", dst=tile)
    case("tilerelease", "TILERELEASE")
    for op, (c, a, b) in itertools.product(names[7:], itertools.permutations(range(8), 3)):
        case(f"{op.lower()} %tmm{b}, %tmm{a}, %tmm{c}", op, dst=c, src_a=a, src_b=b)

    assert len(lines) > 10000
    for line, code, fields in zip(lines, assemble(compiler, tmp_path, lines), expected, strict=True):
        length, got = decode(library, code)
        # A lone displacement can be written in two ways; both name the same address.
        assert length == len(code), line
        assert {k: got[k] for k in fields} == fields, line


def test_decoder_takes_no_other_instruction(compiler, library, tmp_path):
    """Neighbours in the same opcode map, and what hardware refuses."""
    lines = [
        "vdpbf16ps %zmm2, %zmm1, %zmm0",
        "vpdpbusd %ymm2, %ymm1, %ymm0",
        "vpshufb %xmm2, %xmm1, %xmm0",
        "andn %eax, %ecx, %edx",
        "bextr %rax, (%rcx), %rdx",
        "vbroadcastss (%rax), %ymm1",
        "vfmadd231ps (%rax,%rcx,4), %ymm1, %ymm2",
        "ud2",
        "mov %fs:0, %rax",
        "vzeroupper",
    ]
    for line, code in zip(lines, assemble(compiler, tmp_path, lines), strict=True):
        assert decode(library, code)[0] == 0, line
    tileload = bytes.fromhex("c4e27b4b0408")  # tileloadd (%rax,%rcx,1), %tmm0
    assert decode(library, tileload)[0] == 6
    assert decode(library, b"\x2e" * 9 + tileload)[0] == 15
    assert decode(library, b"\x2e" * 10 + tileload)[0] == 0  # longer than an instruction may be
    assert decode(library, bytes.fromhex("c4e27b4b00"))[0] == 0  # no SIB
    assert decode(library, bytes.fromhex("c4e26a5cc0"))[0] == 0  # equal registers


# ---- Processes and threads -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patch", ["1", "1", "mprotect"])
def test_threads_race_into_the_same_sites(build, host, patch):
    out, counts = preloaded(build("threads"), patch=patch)
    assert out == "1200 sites, 0 wrong values\n"
    assert counts["TDPBF16PS"] == 2 * 400 * 20  # none lost, none twice
    assert counts["TILELOADD"] == 2 * counts["TDPBF16PS"]
    assert counts["tmul_rows"] == (7 + 16) * 400 * 20
    # And what is compiled: the zero and the store; configuration and release, where no AMX unit runs them.
    assert counts["sites_patched"] == 1200 + (2 if host == "emulated-on-amx" else 4)


@pytest.mark.parametrize("patch", ["1", "mprotect"])
def test_forks_keep_tiles_and_patch_for_themselves(build, patch):
    out, counts = preloaded(build("fork"), patch=patch)
    assert out == "0 wrong, thread 0 wrong\n"
    assert counts["sites_patched"] >= 300


def test_sites_of_unloaded_code_are_forgotten(build):
    """The random programs' memory is written anew: run two different ones in one process at the same addresses."""
    script = """
import ctypes, random, sys
from driver import Machine, encode
from mla_testing import amx_emulator
library = ctypes.CDLL(sys.argv[1])
machine = Machine(library, "trap", random.Random(1))
amx_emulator.install()
state = machine.random_state()
config = machine.arena + 128
machine.bytes[128] = 1
machine.bytes[128 + 48] = machine.bytes[128 + 49] = machine.bytes[128 + 50] = 1
machine.bytes[128 + 16] = machine.bytes[128 + 18] = machine.bytes[128 + 20] = 4
state.gpr[0] = config
at = machine.code
def once(code):
    library.machine_emit(at, code, len(code))
    assert library.machine_run(ctypes.byref(state), at).signal == 0, code.hex()
once(bytes.fromhex("c4e2784900"))  # ldtilecfg (%rax)
with amx_emulator.emulate() as emu:
    for _ in range(3):
        for code in (encode(0x49, "f2", 1, 0), encode(0x5C, "f3", 0, 1, 2), encode(0x49, "f2", 2, 0), b"\\x90" * 5):
            once(code)
            if code[0] != 0x90: assert library.machine_run(ctypes.byref(state), at).signal == 0
    counts = emu.counters()
assert (counts["TILEZERO"], counts["TDPBF16PS"]) == (12, 6), counts
"""
    python(script, build("machine", "-shared", "-fPIC"))


LOAD_ONE_TILE = """
import ctypes, faulthandler, mmap, os, signal, sys, threading
from mla_testing import amx_emulator
flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
code = mmap.mmap(-1, 4096, flags, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code_at = ctypes.addressof(ctypes.c_char.from_buffer(code))
def function(offset, text):
    raw = bytes.fromhex(text)
    code[offset:offset + len(raw)] = raw
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code_at + offset)
configure = function(0, "c4e2784907 c3")       # ldtilecfg (%rdi)
zero = function(64, "c4e27b49c0 c3")           # tilezero %tmm0
product = function(128, "c4e26a5cc1 c3")       # tdpbf16ps %tmm2, %tmm1, %tmm0
release = function(192, "c4e27849c0 c3")       # tilerelease
illegal = function(256, "0f0b c3")             # ud2
shape = (ctypes.c_uint8 * 64)(1)
for t in range(8): shape[48 + t], shape[16 + 2 * t] = 16, 64
wrong = (ctypes.c_uint8 * 64)(9)
"""


def test_context_manager_counts_resets_nests_and_restores():
    script = (
        LOAD_ONE_TILE
        + """
before = bytes(code)
with amx_emulator.emulate() as emu:
    assert emu.mode in ("emulated", "emulated-on-amx"), emu.mode
    configure(shape); zero(None); product(None); product(None)
    counts = emu.counters()
    assert (counts["LDTILECFG"], counts["TILEZERO"], counts["TDPBF16PS"]) == (1, 1, 2), counts
    assert (counts["tmul_rows"], counts["macs"]) == (32, 2 * 16 * 16 * 32), counts
    assert counts["sites_patched"] >= 2 and bytes(code) != before
    emu.reset()
    assert not any(emu.counters().values())
    with amx_emulator.emulate(order="sequential", patch=False) as inner:
        product(None)
        assert inner.counters()["TDPBF16PS"] == 1
    product(None)  # still emulated
    assert emu.counters()["TDPBF16PS"] == 2
    assert amx_emulator.set_order("manual") == "manual"
    release(None)
assert bytes(code) == before
assert amx_emulator._load().mla_amx_installed() == 0
print("done", flush=True)
configure(shape); zero(None)
"""
    )
    done = python(script, expect=-signal.SIGILL)
    assert done.stdout == "done\n"


def test_code_shared_with_other_processes_is_not_rewritten():
    """A jump would lead them nowhere."""
    script = (
        LOAD_ONE_TILE.replace("MAP_PRIVATE", "MAP_SHARED")
        + """
with amx_emulator.emulate() as emu:
    pid = os.fork()
    if pid == 0:
        configure(shape); zero(None); zero(None)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    configure(shape); zero(None); zero(None)
    counts = emu.counters()
assert (counts["TILEZERO"], counts["sites_patched"]) == (2, 0), counts
"""
    )
    python(script)


def test_unpatched_every_instruction_traps():
    script = (
        LOAD_ONE_TILE
        + """
with amx_emulator.emulate(patch=False) as emu:
    configure(shape); zero(None); product(None); product(None)
    counts = emu.counters()
assert counts["TDPBF16PS"] == 2 and counts["traps"] >= 3 and counts["sites_patched"] == 0, counts
"""
    )
    python(script)


@pytest.mark.parametrize(
    ("act", "death", "message"),
    [
        ("zero(None)", signal.SIGILL, "Illegal instruction"),  # no configuration
        ("configure(shape); zero(None); release(None); zero(None)", signal.SIGILL, "Illegal instruction"),
        ("illegal(None)", signal.SIGILL, "Illegal instruction"),  # none of ours
        ("configure(wrong)", signal.SIGSEGV, "Segmentation fault"),
        ("configure(shape); zero(None); configure(64)", signal.SIGSEGV, "Segmentation fault"),
        ("ctypes.string_at(0)", signal.SIGSEGV, "Segmentation fault"),
        ("os.kill(os.getpid(), signal.SIGILL)", signal.SIGILL, "Illegal instruction"),
    ],
)
@pytest.mark.parametrize("faulthandler", ["without", "before", "after"])
def test_faults_kill_as_they_would_and_faulthandler_tells_where(act, death, message, faulthandler):
    script = (
        LOAD_ONE_TILE
        + {
            "without": "amx_emulator.install()",
            "before": "faulthandler.enable(); amx_emulator.install()",
            # Replaced, noticed, taken back.
            "after": """
amx_emulator.install()
with amx_emulator.emulate() as emu:
    faulthandler.enable()
    try: emu.counters()
    except amx_emulator.EmulationLost as e: assert "replaced" in str(e)
    else: raise SystemExit("not noticed")
amx_emulator.install()
""",
        }[faulthandler]
    )
    works = "configure(shape); zero(None); product(None); release(None)"
    done = python(f"{script}\n{works}\nprint('alive', flush=True)\n{act}\n", expect=-death)
    assert done.stdout == "alive\n"
    if faulthandler != "without":
        assert done.stderr.count(f"Fatal Python error: {message}") == 1
        assert 'File "<string>"' in done.stderr


def test_threads_come_and_go_and_their_counts_stay():
    script = (
        LOAD_ONE_TILE
        + """
def work():
    configure(shape); zero(None); product(None); release(None)
with amx_emulator.emulate() as emu:
    work()
    memory = [l for l in open("/proc/self/maps")]
    for _ in range(200):
        threads = [threading.Thread(target=work) for _ in range(3)]
        for t in threads: t.start()
        for t in threads: t.join()
    assert emu.counters()["TDPBF16PS"] == 601, emu.counters()
    assert len([l for l in open("/proc/self/maps")]) < len(memory) + 40
"""
    )
    python(script)


def test_a_tile_belongs_to_its_thread():
    script = (
        LOAD_ONE_TILE
        + """
store = function(320, "c4e27a4b040f c3".replace("040f", "0437"))  # tilestored %tmm0, (%rdi,%rsi,1)
store = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_long)(code_at + 320)
load = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_long)(code_at + 384)
code[384:391] = bytes.fromhex("c4e27b4b0437c3")
failures = []
def work(value):
    mine, back = (ctypes.c_uint8 * 1024)(*[value] * 1024), (ctypes.c_uint8 * 1024)()
    configure(shape)
    load(mine, 64)
    for _ in range(300):
        barrier.wait()
        store(back, 64)
        if bytes(back) != bytes(mine): failures.append(value)
with amx_emulator.emulate():
    barrier = threading.Barrier(4)
    threads = [threading.Thread(target=work, args=(v,)) for v in (1, 2, 3, 4)]
    for t in threads: t.start()
    for t in threads: t.join()
assert not failures, failures
"""
    )
    python(script)


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match=r"order: expected one of manual, sequential, vdpbf16ps, got 'odd'"):
        amx_emulator.set_order("odd")
    with pytest.raises(ValueError, match="order"), amx_emulator.emulate(order="odd"):
        pass
    with pytest.raises(ValueError, match="error: expected an errno"):
        amx_emulator.deny_amx_permission(0)


def test_unavailable_elsewhere(monkeypatch):
    monkeypatch.setattr(amx_emulator.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(amx_emulator, "_library", None)
    assert amx_emulator.mode() == "unavailable: the AMX emulator runs on x86-64 Linux, this is linux on aarch64"
    with pytest.raises(RuntimeError, match="aarch64"):
        amx_emulator.install()


# ---- Permission ------------------------------------------------------------------------------------------------------

ASK = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def ask(): return 0 if libc.syscall(158, 0x1023, ctypes.c_ulong(18)) == 0 else ctypes.get_errno()
"""


@pytest.mark.parametrize("how", ["no", "library", "inline"])
def test_preloaded_strict_form_faults_until_permission_is_asked_for(build, how):
    out, counts = preloaded(build("permission"), how, wish="strict", expect=-signal.SIGILL if how == "no" else 0)
    if how == "no":
        assert out == "no: 0, granted before 0 after 0\n"
        assert counts == {"died": signal.SIGILL}
    else:
        assert out == f"{how}: 0, granted before 0 after 1\n"
        assert (counts["TILELOADD"], counts["TILESTORED"]) == (1, 1)  # emulated, so never granted by the kernel


def test_preloaded_denied_form_refuses_and_emulates(build):
    for how in ("library", "inline"):
        out, counts = preloaded(build("permission"), how, wish="denied")
        assert out == f"{how}: -1, granted before 0 after 0\n"  # -1: the library's errno, the kernel's EPERM
        assert (counts["TILELOADD"], counts["TILESTORED"]) == (1, 1)


def test_preloaded_form_says_what_it_does_not_understand(build):
    done = run([build("permission")], expect=2, LD_PRELOAD=str(amx_emulator.library_path()), MLA_AMX_EMULATOR="perhaps")
    assert "expected emulate, strict or denied, got perhaps" in done.stderr


@pytest.mark.parametrize("error", ["EPERM", "EINVAL", "ENOSYS"])
def test_denied_permission_stays_denied(error):
    script = (
        ASK
        + f"""
import errno
from mla_testing import amx_emulator
before = amx_emulator.mode()
amx_emulator.deny_amx_permission(errno.{error})
assert ask() == errno.{error}
assert amx_emulator.mode() == before != "native"
"""
    )
    python(script)


def test_answered_requests_leave_the_emulation_intact():
    script = (
        LOAD_ONE_TILE
        + ASK
        + """
amx_emulator.answer_permission_requests(required=True)
with amx_emulator.emulate() as emu:
    pid = os.fork()
    if pid == 0:
        configure(shape); zero(None)  # nobody asked
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGILL
    assert ask() == 0
    configure(shape); zero(None)
    assert emu.counters()["TILEZERO"] == 1 and emu.mode != "native"
"""
    )
    python(script)


def test_permission_granted_later_is_noticed(hardware):
    script = (
        LOAD_ONE_TILE
        + ASK
        + """
with amx_emulator.emulate() as emu:
    configure(shape); zero(None)
    assert emu.counters()["TILEZERO"] == 1
    assert ask() == 0
    try: emu.counters()
    except amx_emulator.EmulationLost as e: assert "granted AMX permission" in str(e), e
    else: raise SystemExit("not noticed")
"""
    )
    python(script)


def test_native_process_is_left_alone(hardware):
    script = (
        LOAD_ONE_TILE
        + ASK
        + """
assert amx_emulator.mode() == "emulated-on-amx"
assert ask() == 0
assert amx_emulator.mode() == "native"
assert amx_emulator.install() == "native"
assert amx_emulator._load().mla_amx_installed() == 0
with amx_emulator.emulate() as emu:
    configure(shape); zero(None); product(None); release(None)
    assert emu.mode == "native" and not any(emu.counters().values())
"""
    )
    python(script)
