# SPDX-License-Identifier: Apache-2.0
"""Runs a random AMX program and prints what came of every instruction, one JSON line each.

    driver.py <machine.so> <native|trap|trap-unpatched|trap-mprotect|step> <seed> <sections>
              [ordinary|bits] [qemu]

``native``: on the AMX unit, after asking the kernel for it. ``trap``: the emulator as programs meet it, three rounds,
so that instructions are met trapping, freshly patched and in their stubs (``-unpatched``: never patched;
``-mprotect``: patched without /proc/self/mem). ``step``: the emulator's execution alone, which also covers what an AMX
host runs itself. The three must print the same.

``qemu`` leaves out what QEMU's user mode does not get through: it takes a SIGSEGV that a process raises for a fault of
its own.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import random
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

PP = {"": 0, "66": 1, "f3": 2, "f2": 3}
DOTS = {  # name: opcode, prefix
    "TDPBF16PS": (0x5C, "f3"),
    "TDPFP16PS": (0x5C, "f2"),
    "TDPBSSD": (0x5E, "f2"),
    "TDPBSUD": (0x5E, "f3"),
    "TDPBUSD": (0x5E, "66"),
    "TDPBUUD": (0x5E, ""),
}
LOADS = {"TILELOADD": (0x4B, "f2"), "TILELOADDT1": (0x4B, "66")}
STORES = {"TILESTORED": (0x4B, "f3")}
RSP = 4


@dataclass
class Memory:
    """base + (index << scale) + disp."""

    base: int
    index: int | None = None
    scale: int = 0
    disp: int = 0


def encode(
    opcode: int,
    prefix: str,
    reg: int,
    rm: int | Memory,
    vvvv: int = 0,
    *,
    w: int = 0,
    l: int = 0,  # noqa: E741
    legacy: bytes = b"",
) -> bytes:
    """One VEX.0F38 instruction."""
    x = b = 0
    if isinstance(rm, Memory):
        b = rm.base >> 3
        x = rm.index >> 3 if rm.index is not None else 0
        disp8 = -128 <= rm.disp < 128
        mod = 0 if rm.disp == 0 and rm.base & 7 != 5 else 1 if disp8 else 2
        index = 4 if rm.index is None else rm.index & 7
        tail = bytes([mod << 6 | (reg & 7) << 3 | 4, rm.scale << 6 | index << 3 | rm.base & 7])
        tail += b"" if mod == 0 else struct.pack("<b" if mod == 1 else "<i", rm.disp)
    else:
        b = rm >> 3
        tail = bytes([0xC0 | (reg & 7) << 3 | rm & 7])
    r = reg >> 3
    first = (r ^ 1) << 7 | (x ^ 1) << 6 | (b ^ 1) << 5 | 2
    second = w << 7 | (vvvv ^ 15) << 3 | l << 2 | PP[prefix]
    return legacy + bytes([0xC4, first, second, opcode]) + tail


class State(ctypes.Structure):
    _fields_ = [
        ("gpr", ctypes.c_uint64 * 16),
        ("rflags", ctypes.c_uint64),
        ("mxcsr", ctypes.c_uint32),
        ("level", ctypes.c_uint32),
        ("k", ctypes.c_uint64 * 8),
        ("zmm", ctypes.c_uint8 * 64 * 32),
        ("red", ctypes.c_uint8 * 128),
    ]


class Event(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("signal", "code", "address", "rip")]


@dataclass
class Machine:
    """The arena: page-aligned operands, then a page nobody may touch; a stack; the code."""

    library: ctypes.CDLL
    mode: str
    rng: random.Random

    ARENA = 1 << 16

    def __post_init__(self) -> None:
        self.library.machine_code.restype = ctypes.c_void_p
        self.library.machine_run.restype = Event
        self.library.machine_run.argtypes = [ctypes.POINTER(State), ctypes.c_void_p]
        self.library.machine_emit.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int]
        self.library.machine_code.argtypes = [ctypes.c_uint64]
        self._maps = [mmap.mmap(-1, self.ARENA + mmap.PAGESIZE), mmap.mmap(-1, 1 << 16)]
        self.arena, self.stack = (ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in self._maps)
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(self.arena + self.ARENA), mmap.PAGESIZE, 0)
        self.bytes = np.frombuffer(self._maps[0], np.uint8, self.ARENA)
        self.stack_bytes = np.frombuffer(self._maps[1], np.uint8)
        self.code_start = self.code = self.library.machine_code(1 << 24)
        self.steps: list[Callable[[], list[object]]] = []

    def emit(self, code: bytes) -> int:
        at = self.code + self.rng.randrange(8)  # sites begin anywhere, across cache lines and pages too
        self.library.machine_emit(at, code, len(code))
        self.code = at + len(code) + 14
        return at

    def random_state(self) -> State:
        s = State()
        s.level = self.library.machine_level()
        for i in range(16):
            s.gpr[i] = self.rng.getrandbits(64)
        s.gpr[RSP] = self.stack + (1 << 15) + 8 * self.rng.randrange(64)
        s.rflags = 0x202 | self.rng.getrandbits(12) & 0xCD5
        # No denormal exception is unmasked, as none may be raised; rounding, FTZ, DAZ and status bits are anything.
        s.mxcsr = 0x1F80 | self.rng.getrandbits(16) & 0xE07F
        for i in range(8):
            s.k[i] = self.rng.getrandbits(64)
        ctypes.memmove(s.zmm, self.rng.randbytes(2048), 2048)
        ctypes.memmove(s.red, self.rng.randbytes(128), 128)
        return s

    def add(
        self, what: str, code: bytes, state: State | None = None, result: Callable[[], object] | None = None
    ) -> None:
        """An instruction of the program; ``result`` reads what it should have written."""
        at = self.emit(code)
        before = state or self.random_state()

        def relative(address: int) -> object:
            for name, start, size in (
                ("arena", self.arena, self.ARENA + mmap.PAGESIZE),
                ("site", at, 16),
            ):
                if start <= address < start + size:
                    return f"{name}+{address - start}"
            return address

        def step() -> list[object]:
            if self.mode == "step":
                out = (ctypes.c_uint64 * 3)()
                length = emulator().mla_amx_step(ctypes.c_void_p(at), before.gpr, out)
                event = [out[0], out[1], relative(out[2])] if length else [4, 2, relative(at)]
                rip = relative(at) if event[0] else 0
                changed: list[str] = []
            else:
                after = State.from_buffer_copy(before)
                got = self.library.machine_run(ctypes.byref(after), at)
                event = [got.signal, got.code, relative(got.address) if got.signal else 0]
                rip = relative(got.rip) if got.signal else 0
                changed = [name for name, _ in State._fields_ if bytes_of(before, name) != bytes_of(after, name)]
            if not event[0]:
                event = [0, 0, 0]
            return [what, *event, rip, changed, result() if result and not event[0] else None]

        self.steps.append(step)

    def memory(self, offset: int, stride: int, state: State, *, base_address: int | None = None) -> Memory:
        """An operand at arena + offset with that stride (bytes), through random registers; fills them in."""
        base = self.rng.choice([i for i in range(16) if i != RSP])
        disp = self.rng.choice([0, 0, self.rng.randrange(-128, 128), self.rng.randrange(-(1 << 31), 1 << 31)])
        state.gpr[base] = ((self.arena if base_address is None else base_address) + offset - disp) % (1 << 64)
        if stride == 0:
            return Memory(base, None, 0, disp)
        scale = self.rng.randrange(4)
        while stride % (1 << scale):
            scale -= 1
        index = self.rng.choice([i for i in range(16) if i not in (RSP, base)])
        state.gpr[index] = (stride >> scale) % (1 << 64)
        return Memory(base, index, scale, disp)


def bytes_of(state: State, name: str) -> bytes:
    value = getattr(state, name)
    return bytes(value) if isinstance(value, ctypes.Array) else struct.pack("<Q", value)


def emulator() -> ctypes.CDLL:
    from mla_testing import amx_emulator

    return amx_emulator._load()


def config(rows: list[int], colsb: list[int], *, palette: int = 1, start_row: int = 0) -> bytearray:
    c = bytearray(64)
    c[0], c[1] = palette, start_row
    for i, (r, b) in enumerate(zip(rows, colsb, strict=True)):
        c[48 + i] = r
        struct.pack_into("<H", c, 16 + 2 * i, b)
    return c


def random_config(rng: random.Random, sigsegv: bool) -> tuple[str, bytearray]:
    m, n, k = rng.randint(1, 16), rng.randint(1, 16), rng.randint(1, 16)
    rows, colsb = [m] * 4 + [m] * 2 + [k] * 2, [4 * n] * 4 + [4 * k] * 2 + [4 * n] * 2
    kind = rng.choice(["fitting"] * 6 + ["full", "any", "holes", "odd", "start_row", *["bad"][:sigsegv]])
    if kind == "full":
        rows, colsb = [16] * 8, [64] * 8
    if kind == "any":
        rows, colsb = [rng.randint(1, 16) for _ in range(8)], [rng.randint(1, 64) for _ in range(8)]
    if kind == "holes":
        for i in rng.sample(range(8), 3):
            rows[i] = colsb[i] = 0
    if kind == "odd":
        i = rng.randrange(8)
        colsb[i] = max(1, colsb[i] - rng.randint(1, 3))
    c = config(rows, colsb)
    if kind == "start_row":
        c[1] = rng.randint(1, 18)
    if kind == "bad":
        flaw = rng.choice(["palette", "reserved", "rows", "colsb", "no rows", "no colsb", "ninth rows", "ninth colsb"])
        kind += " " + flaw
        i = rng.randrange(8)
        match flaw:
            case "palette":
                c[0] = rng.randint(2, 255)
            case "reserved":
                c[rng.randint(2, 15)] = 1 << rng.randrange(8)
            case "rows":
                c[48 + i] = rng.randint(17, 255)
            case "colsb":
                struct.pack_into("<H", c, 16 + 2 * i, rng.randint(65, 65535))
            case "no rows":
                c[48 + i] = 0
            case "no colsb":
                struct.pack_into("<H", c, 16 + 2 * i, 0)
            case "ninth rows":
                c[48 + rng.randint(8, 15)] = 1
            case "ninth colsb":
                struct.pack_into("<H", c, 16 + 2 * rng.randint(8, 15), 4)
    return kind, c


def fill(machine: Machine, kind: str) -> None:
    """Operands of any of the types at once: ordinary bf16 values, or any bits."""
    generator = np.random.default_rng(machine.rng.getrandbits(32))
    if kind == "bits":
        data = generator.integers(0, 256, machine.ARENA, np.uint8)
    else:
        values = generator.normal(size=machine.ARENA // 2) * 2.0 ** generator.integers(-8, 8, machine.ARENA // 2)
        data = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    machine.bytes[:] = data


def build(machine: Machine, sections: int, qemu: bool) -> None:
    rng = machine.rng
    dump_at, config_at, stored_at = 0x8000, 0x9000, 0xA000

    def digest(at: int, size: int) -> Callable[[], str]:
        def read() -> str:
            data = machine.bytes[at : at + size].view(np.uint32)
            if qemu:  # whose NaNs and denormals are not a CPU's
                exponent, mantissa = data >> 23 & 255, data & 0x7FFFFF
                special = ((exponent == 255) & (mantissa != 0)) | (exponent == 0)
                data = np.where(special, exponent, data)
            return hashlib.sha256(data.tobytes()).hexdigest()[:16]

        return read

    def poke(at: int, data: bytes) -> Callable[[], list[object]]:
        def write() -> list[object]:
            machine.bytes[at : at + len(data)] = np.frombuffer(data, np.uint8)
            return ["poke"]

        return write

    def load_config(kind: str, data: bytes) -> None:
        at = config_at + rng.randrange(64)
        machine.steps.append(poke(at, data))
        state = machine.random_state()
        machine.add(f"LDTILECFG {kind}", encode(0x49, "", 0, machine.memory(at, 0, state)), state)

    def dump(tile: int) -> None:
        machine.steps.append(poke(dump_at, b"\xee" * 1024))
        state = machine.random_state()
        code = encode(0x4B, "f3", tile, machine.memory(dump_at, 64, state))
        machine.add(f"dump {tile}", code, state, digest(dump_at, 1024))

    def store_config() -> None:
        machine.steps.append(poke(stored_at, b"\xee" * 64))
        state = machine.random_state()

        def read() -> object:
            return machine.bytes[stored_at : stored_at + 64].tobytes().hex()

        machine.add("STTILECFG", encode(0x49, "66", 0, machine.memory(stored_at, 0, state)), state, read)

    for _ in range(sections):
        load_config(*random_config(rng, not qemu))
        for _ in range(rng.randint(4, 24)):
            tile = rng.randrange(8)
            state = machine.random_state()
            what = rng.choice(
                ["dot"] * 8 + ["load"] * 6 + ["store"] * 3 + ["zero", "release", "config", "fault", "illegal", "same"]
            )
            if what == "dot":
                name, (opcode, prefix) = rng.choice(list(DOTS.items()))
                c, a, b = rng.randrange(4), rng.randint(4, 5), rng.randint(6, 7)
                if rng.random() < 0.1:
                    c, a, b = (rng.randrange(8) for _ in range(3))
                machine.add(name, encode(opcode, prefix, c, a, b), state)
                tile = c
            elif what == "load":
                name, (opcode, prefix) = rng.choice(list(LOADS.items()))
                stride = rng.choice([64, 64, rng.randrange(1024), -rng.randrange(1, 512), 0])
                offset = rng.randrange(0x4000) if stride >= 0 else 0x4000 + rng.randrange(0x1000)
                code = encode(opcode, prefix, tile, machine.memory(offset, stride, state))
                machine.add(name, code, state)
            elif what == "store":
                stride = rng.choice([64, rng.randrange(64, 1024)])
                code = encode(0x4B, "f3", tile, machine.memory(0xB000 + rng.randrange(64), stride, state))
                machine.add("TILESTORED", code, state, digest(0xB000, 0x5000))
            elif what == "zero":
                machine.add("TILEZERO", encode(0x49, "f2", tile, 0), state)
            elif what == "release":
                machine.add("TILERELEASE", encode(0x49, "", 0, 0), state)
                for t in range(8):
                    dump(t)
                load_config(*random_config(rng, not qemu))
            elif what == "config":
                store_config()
            elif what == "same":
                # The same shapes again: tiles are zero all the same.
                load_config("full", config([16] * 8, [64] * 8))
                code = encode(0x4B, "f2", tile, machine.memory(0, 64, state))
                machine.add("TILELOADD", code, state)
                dump(tile)
                load_config("full again", config([16] * 8, [64] * 8))
            elif what == "fault" and not qemu:
                kind = rng.choice(["guard", "guard store", "non-canonical", "guard config", "null config"])
                opcode, prefix = STORES["TILESTORED"] if "store" in kind else LOADS["TILELOADD"]
                if kind.startswith("guard") and "config" not in kind:
                    # Some rows before the page nobody may touch, the others in it.
                    offset = machine.ARENA - 64 * rng.randrange(5)
                    code = encode(opcode, prefix, tile, machine.memory(offset, 64, state))
                elif kind == "non-canonical":
                    memory = machine.memory(0, 64, state, base_address=1 << 63)
                    code = encode(opcode, prefix, tile, memory)
                elif kind == "guard config":
                    code = encode(0x49, "", 0, machine.memory(machine.ARENA, 0, state))
                else:
                    code = encode(0x49, "", 0, machine.memory(64, 0, state, base_address=0))
                machine.add(kind, code, state)
            elif what == "illegal":
                good = encode(0x5C, "f3", 0, 4, 6)
                forms = {
                    "register 8": encode(0x5C, "f3", 8, 4, 6),
                    "register 8 as A": encode(0x5C, "f3", 0, 12, 6),
                    "register 8 as B": encode(0x5C, "f3", 0, 4, 14),
                    "equal registers": encode(0x5C, "f3", 0, 4, 4),
                    "equal destination": encode(0x5C, "f3", 4, 4, 6),
                    "W": encode(0x5C, "f3", 0, 4, 6, w=1),
                    "L": encode(0x5C, "f3", 0, 4, 6, l=1),
                    "66": b"\x66" + good,
                    "f3": b"\xf3" + good,
                    "rex": b"\x48" + good,
                    "lock": b"\xf0" + good,
                    "segments are fine": b"\x2e\x3e" + good,
                    "address size is fine": b"\x67" + good,
                    "vvvv of TILEZERO": encode(0x49, "f2", 0, 0, 1),
                    "vvvv of TILERELEASE": encode(0x49, "", 0, 0, 1),
                    "rm of TILEZERO": encode(0x49, "f2", 0, 1),
                    "register 8 of TILEZERO": encode(0x49, "f2", 8, 0),
                    "B of TILEZERO is fine": encode(0x49, "f2", 0, 8),
                    "load from a register": encode(0x4B, "f2", 0, 0),
                    "vvvv of TILELOADD": encode(0x4B, "f2", 0, machine.memory(0, 64, state), 1),
                    "register 8 of TILELOADD": encode(0x4B, "f2", 8, machine.memory(0, 64, state)),
                    "UD2": b"\x0f\x0b",
                }
                name = rng.choice(list(forms))
                machine.add(f"illegal {name}", forms[name], state)
            dump(tile)
        store_config()


def main(path: str, mode: str, seed: str, sections: str, values: str = "ordinary", under: str = "") -> None:
    library = ctypes.CDLL(path)
    library.machine_handlers()
    if mode == "native":
        if library.machine_request_permission():
            sys.exit("AMX permission refused")
    else:
        from mla_testing import amx_emulator

        amx_emulator.install()
        emulator().mla_amx_set_patching({"trap-unpatched": 0, "trap-mprotect": 2}.get(mode, 1))
        emulator().mla_amx_step.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    machine = Machine(library, mode, random.Random(int(seed)))
    fill(machine, values)
    pristine = machine.bytes.copy()
    build(machine, int(sections), under == "qemu")
    for round_ in range(3 if mode.startswith("trap") else 1):
        machine.bytes[:] = pristine
        for step in machine.steps:
            print(json.dumps([round_, *step()]))


if __name__ == "__main__":
    main(*sys.argv[1:])
