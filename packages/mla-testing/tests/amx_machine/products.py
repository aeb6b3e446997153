# SPDX-License-Identifier: Apache-2.0
"""Dot products of random shapes under the emulator against a scalar model written from the manual.

    products.py <machine.so> <seed> <number of products> <order>

Prints how many products of each kind agreed bit for bit; ends with an error at the first that does not.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections import Counter

import numpy as np
from driver import DOTS, Machine, config, encode
from numpy.typing import NDArray

from mla_testing import amx_emulator

F32 = NDArray[np.float32]
TINY = np.float32(np.finfo(np.float32).tiny)


def flush(x: F32) -> F32:
    """Denormals are zeros of their sign."""
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x).astype(np.float32)


def rounded(exact: NDArray[np.float64]) -> F32:
    """Nearest float32, underflow flushed as after rounding with unbounded exponent."""
    scale = 2.0**64  # exact in double, and far enough from the denormals to round as if there were none
    with np.errstate(over="ignore"):
        wide = (exact * scale).astype(np.float32).astype(np.float64) / scale
        plain = exact.astype(np.float32)
    small = np.abs(wide) < TINY
    return np.where(small, np.copysign(np.float32(0), exact), plain).astype(np.float32)


def fma(a: F32, b: F32, c: F32) -> F32:
    """a * b + c with one rounding: the product of 16-bit floats is exact in double, 53 >= 2 * 24 + 2 does the rest."""
    return rounded(flush(a).astype(np.float64) * flush(b).astype(np.float64) + flush(c).astype(np.float64))


def add(a: F32, b: F32) -> F32:
    return rounded(flush(a).astype(np.float64) + flush(b).astype(np.float64))


def model(name: str, order: str, c: NDArray[np.uint32], a: NDArray[np.uint8], b: NDArray[np.uint8]) -> NDArray:
    """c [M, N] words, a [M, 4K] bytes, b [K, 4N] bytes, all as they lie in tiles; the new c as words."""
    (m, n), k = c.shape, b.shape[0]
    if name in ("TDPBF16PS", "TDPFP16PS"):

        def widen(x: NDArray[np.uint8]) -> F32:
            halves = np.ascontiguousarray(x).view(np.uint16)
            if name == "TDPFP16PS":
                return halves.view(np.float16).astype(np.float32)
            return (halves.astype(np.uint32) << 16).view(np.float32)

        left, right = widen(a).reshape(m, k, 2), widen(b).reshape(k, n, 2)
        total = c.view(np.float32)
        even = odd = np.zeros((m, n), np.float32)
        for i in range(k):
            e = left[:, i, 0, None], right[i, None, :, 0]
            o = left[:, i, 1, None], right[i, None, :, 1]
            if order == "manual":
                even, odd = fma(*e, even), fma(*o, odd)
            elif order == "sequential":
                total = fma(*o, fma(*e, total))
            else:
                total = fma(*e, fma(*o, total))
        if order == "manual":
            total = add(total, add(even, odd))
        return total.view(np.uint32)
    left_type = np.int8 if name in ("TDPBSSD", "TDPBSUD") else np.uint8
    right_type = np.int8 if name in ("TDPBSSD", "TDPBUSD") else np.uint8
    left = a.view(left_type).astype(np.int64).reshape(m, k, 4)
    right = np.ascontiguousarray(b).view(right_type).astype(np.int64).reshape(k, n, 4)
    return (c.astype(np.int64) + np.einsum("mki,kni->mn", left, right)).astype(np.uint64).astype(np.uint32)


def random_operand(rng: np.random.Generator, name: str, shape: tuple[int, int], kind: str) -> NDArray[np.uint8]:
    """Bytes; for floats finite values of one of several kinds, denormals and overflowing sums among them."""
    if name.startswith("TDPB") and name.endswith("D"):
        return rng.integers(0, 256, shape, np.uint8)
    count = (shape[0], shape[1] // 2)
    if kind == "tiny":
        values = rng.normal(size=count) * 2.0 ** rng.integers(-75, -55, count)
        if name == "TDPFP16PS":
            values = rng.normal(size=count) * 2.0 ** rng.integers(-26, -10, count)
    elif kind == "huge":
        values = rng.normal(size=count) * (2.0**12 if name == "TDPFP16PS" else 2.0**60)
    else:
        values = rng.normal(size=count) * 2.0 ** rng.integers(-6, 6, count)
    if name == "TDPFP16PS":
        return values.astype(np.float16).view(np.uint8)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def main(path: str, seed: str, number: str, order: str) -> None:
    library = ctypes.CDLL(path)
    machine = Machine(library, "trap", random.Random(int(seed)))
    rng = np.random.default_rng(int(seed))
    zeros = machine.random_state()
    for i in range(16):
        if i != 4:
            zeros.gpr[i] = 0
    zeros.gpr[0], zeros.gpr[1] = machine.arena, 64  # rax: base, rcx: stride

    def site(code: bytes) -> int:
        return machine.emit(code)

    def at(opcode: int, prefix: str, tile: int, offset: int) -> int:
        # rax + disp32, rows rcx apart
        code = encode(opcode, prefix, tile, 0)[:4] + bytes([0x84 | tile << 3, 0x08]) + offset.to_bytes(4, "little")
        return site(code)

    load_config = site(encode(0x49, "", 0, 0)[:4] + b"\x80" + (0x8000).to_bytes(4, "little"))
    loads = [at(0x4B, "f2", t, t * 0x400) for t in range(3)]
    store = at(0x4B, "f3", 0, 0x4000)
    dots = {name: site(encode(opcode, prefix, 0, 1, 2)) for name, (opcode, prefix) in DOTS.items()}

    def run(code: int) -> None:
        event = library.machine_run(ctypes.byref(zeros), code)
        if event.signal:
            sys.exit(f"signal {event.signal} at {code:#x}")

    def place(offset: int, rows: NDArray[np.uint8]) -> None:
        area = machine.bytes[offset : offset + 1024].reshape(16, 64)
        area[:] = 0xEE  # what a wrong stride or a missed bound would pick up
        area[: rows.shape[0], : rows.shape[1]] = rows

    agreed: Counter[str] = Counter()
    with amx_emulator.emulate(order=order) as emulation:
        for _ in range(int(number)):
            name = str(rng.choice(list(DOTS)))
            kind = str(rng.choice(["ordinary", "tiny", "huge"]))
            m, n, k = (int(x) for x in rng.integers(1, 17, 3))
            a, b = random_operand(rng, name, (m, 4 * k), kind), random_operand(rng, name, (k, 4 * n), kind)
            c = rng.integers(0, 1 << 32, (m, n), np.uint32)
            if name in ("TDPBF16PS", "TDPFP16PS"):
                c = (
                    (rng.normal(size=(m, n)) * {"ordinary": 1, "tiny": 2.0**-125, "huge": 2.0**120}[kind])
                    .astype(np.float32)
                    .view(np.uint32)
                )
            machine.bytes[0x8000:0x8040] = np.frombuffer(
                bytes(config([m, m, k, 0, 0, 0, 0, 0], [4 * n, 4 * k, 4 * n, 0, 0, 0, 0, 0])), np.uint8
            )
            for offset, rows in ((0, c.view(np.uint8)), (0x400, a), (0x800, b)):
                place(offset, rows)
            run(load_config)
            for code in loads:
                run(code)
            run(dots[name])
            run(store)
            got = machine.bytes[0x4000:0x4400].reshape(16, 64)[:m, : 4 * n].copy().view(np.uint32)
            expected = model(name, order, c, a, b)
            if not np.array_equal(got, expected):
                worst = np.argwhere(got != expected)[0]
                sys.exit(
                    f"{name} {order} {kind} M={m} N={n} K={k}: first difference at {worst}: "
                    f"{got[tuple(worst)]:#x} instead of {expected[tuple(worst)]:#x}"
                )
            agreed[name] += 1
        counts = emulation.counters()
    for name, n in agreed.items():
        if counts[name] != n:
            sys.exit(f"{name}: executed {n}, counted {counts[name]}")
        print(name, n)


if __name__ == "__main__":
    main(*sys.argv[1:])
