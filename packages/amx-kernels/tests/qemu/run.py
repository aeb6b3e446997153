# SPDX-License-Identifier: Apache-2.0
"""The library on CPUs this machine is not, under Debian's qemu-user.

    python packages/amx-kernels/tests/qemu/run.py [x86] [aarch64]

x86: the library as built, under CPU models with AVX2 but no AVX-512, and with neither: import, doctor, a NumPy call
per tier, clear errors for tiers the model lacks, and the test cases of mla-testing on the best tier it has.
aarch64: the portable tier cross-compiled (g++-aarch64-linux-gnu), and the same cases under qemu-aarch64.

Cases are built and judged by this process, natively, against the float64 reference; under qemu only runner.cpp and
the library run. Needs numpy, and amx_kernels (built) and mla_testing importable. Exit status 0 if all passed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amx_kernels import isa
from mla_testing import cases

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parents[1]

#: x86 CPU model of qemu-user -> tiers it has. Features the emulation lacks anyway are dropped to keep it quiet.
X86_MODELS = {
    "Haswell,-pcid,-x2apic,-tsc-deadline,-hle,-invpcid,-rtm": ("portable", "avx2"),
    "Westmere": ("portable",),
}

#: Emulated fused multiply-adds run at some millions a second. Cases of more than MOST_MACS are left to the native
#: tests; those of more than EACH_WAY_MACS run with a plan only, the others also without.
MOST_MACS = 6_000_000
EACH_WAY_MACS = 1_000_000

_DTYPES = {"uint16": 0, "float32": 1, "int32": 2, "int64": 3}
_BMM, _BMM_PACKED, _ATTENTION, _ATTENTION_PLANNED, _CONCAT = range(5)


@dataclass(frozen=True)
class Call:
    """One call for the runner: tensors in the order of the C function, outputs marked."""

    id: str
    op: int
    tensors: tuple[NDArray | None, ...]
    outputs: tuple[NDArray, ...]
    check: Callable[[], Any]
    scale: float = 0.0


def calls() -> Iterator[Call]:
    """Every case small enough."""
    for case in cases.BMM:
        if case.batch * case.rows * case.in_features * case.out_features > MOST_MACS:
            continue
        for op, suffix in ((_BMM, "plain"), (_BMM_PACKED, "packed")):
            data = case.build()
            yield Call(f"bmm-{case.id}-{suffix}", op, (data.out, data.mat1, data.mat2), (data.out,), data.check)
    for case in cases.CONCAT:
        data = case.build()
        tensors = (data.kv_c, data.k_pe, data.kv_cache, data.slot_mapping)
        yield Call(f"concat-{case.id}", _CONCAT, tensors, (data.kv_cache,), data.check)
    for kind, table in (("decode", cases.DECODE), ("extend", cases.EXTEND)):
        for case in table:
            lens = case.query_lens or (1,) * len(case.seq_lens)
            keys = sum(query * keys for query, keys in zip(lens, case.seq_lens, strict=True))
            macs = case.heads * keys * (2 * case.rank + case.rope)
            if macs > MOST_MACS:
                continue
            ways = ((_ATTENTION_PLANNED, "planned"), (_ATTENTION, "unplanned"))
            for op, suffix in ways if macs <= EACH_WAY_MACS else ways[:1]:
                data = case.build()
                # Decode divides all tokens it is given among the requests: padding is cut off for it.
                tokens = data.live_tokens if kind == "decode" else case.tokens
                out, lse, q_latent, q_pe = (array[:tokens] for array in (data.out, data.lse, data.q_latent, data.q_pe))
                starts = None if kind == "decode" else data.query_start_loc
                tensors = (out, lse, q_latent, q_pe, data.kv_cache, data.block_table, data.seq_lens, starts)
                yield Call(f"{kind}-{case.id}-{suffix}", op, tensors, (out, lse), data.check, data.scale)


def memory_of(array: NDArray) -> NDArray[np.uint8]:
    """The whole allocation an array is a view of, as bytes."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    assert array.flags.c_contiguous
    return array.reshape(-1).view(np.uint8)


def encode(call: Call) -> bytes:
    """A call in the format of runner.cpp."""
    parts = [struct.pack("<qd", call.op, call.scale)]
    for tensor in call.tensors:
        if tensor is None:
            parts.append(struct.pack("<q", 0))
            continue
        memory = memory_of(tensor)
        offset = tensor.__array_interface__["data"][0] - memory.__array_interface__["data"][0] if tensor.size else 0
        strides = [stride // tensor.itemsize for stride in tensor.strides]
        is_output = any(tensor is output for output in call.outputs)
        numbers = [1, is_output, _DTYPES[tensor.dtype.name], tensor.ndim, *tensor.shape, *strides, offset, memory.size]
        parts += [struct.pack(f"<{len(numbers)}q", *numbers), memory.tobytes()]
    return b"".join(parts)


class Tally:
    """Counts what passed and prints what did not."""

    def __init__(self) -> None:
        self.passed = self.failed = 0

    def check(self, what: str, test: Callable[[], Any]) -> None:
        try:
            test()
        except Exception:
            self.failed += 1
            print(f"FAILED {what}\n{traceback.format_exc(limit=-2)}", flush=True)
        else:
            self.passed += 1


def run_cases(tally: Tally, where: str, runner: list[str], tier: str, environment: dict[str, str]) -> None:
    """Runs all cases on one tier in one process of the runner, and judges them."""
    start, count = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        input_, output = Path(folder, "calls"), Path(folder, "results")
        with input_.open("wb") as file:
            for call in calls():
                file.write(encode(call))
        variables = {**environment, "AMX_KERNELS_ISA": tier}
        done = subprocess.run([*runner, input_, output], env=variables, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            tally.failed += 1
            print(f"FAILED {where} {tier}: runner ended with {done.returncode}: {done.stderr.strip()}", flush=True)
            return
        with output.open("rb") as file:
            tally.check(f"{where} runs on {tier}", lambda: expect(isa.TIERS[read_int(file)], tier))
            for call in calls():  # built anew, the same: all at once would not fit in memory
                count += 1
                tally.check(f"{where} {tier} {call.id}", lambda call=call: judge(call, file))
    print(f"{where}: {count} cases on {tier}, {time.monotonic() - start:.0f} s", flush=True)


def read_int(file: Any) -> int:
    return struct.unpack("<q", file.read(8))[0]


def judge(call: Call, file: Any) -> None:
    """Takes over what the runner left in the outputs' memory, then lets the case compare."""
    code, length = read_int(file), read_int(file)
    message = file.read(length).decode()
    for output in call.outputs:
        memory = memory_of(output)
        memory[:] = np.frombuffer(file.read(memory.size), np.uint8)
    if code != 0:
        raise AssertionError(f"error {code}: {message}")
    call.check()


def expect(actual: object, wanted: object) -> None:
    if actual != wanted:
        raise AssertionError(f"got {actual!r}, expected {wanted!r}")


def tool(name: str, package: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise SystemExit(f"{name} is missing (Debian, Ubuntu: apt install {package})")
    return path


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("AMX_", "LD_PRELOAD"))}


# argv: how to start Python. Importing torch would take minutes, emulated, and is not ours to test.
DOCTOR = """
import sys
from amx_kernels import doctor

sys.executable = sys.argv[1]
doctor.DISTRIBUTIONS = tuple(name for name in doctor.DISTRIBUTIONS if name != "torch")
sys.exit(doctor.main(["--json"]))
"""

NUMPY_CALL = """
import numpy as np
import amx_kernels
from amx_kernels import isa

ones = lambda rows: np.full((1, rows, 64), 0x3F80, np.uint16)
for tier in isa.tiers():
    if tier.usable:
        isa.set(tier.name)
        out = np.zeros((1, 20, 32), np.uint16)
        amx_kernels.bmm_cpu(out, ones(20), amx_kernels.convert_weight_packed(ones(32)), True)
        assert (out == 0x4280).all(), (tier.name, out)
    else:
        try:
            isa.set(tier.name)
            raise SystemExit(f"{tier.name} was accepted")
        except RuntimeError as error:
            assert tier.reason in str(error), error
"""


def test_x86(tally: Tally) -> None:
    compiler = tool(os.environ.get("CXX", "g++"), "g++")
    with tempfile.TemporaryDirectory() as folder:
        build_runner(compiler, Path(folder, "runner"), isa.LIBRARY)
        for model, tiers in X86_MODELS.items():
            test_x86_model(tally, model, tiers, Path(folder))


def test_x86_model(tally: Tally, model: str, tiers: tuple[str, ...], folder: Path) -> None:
    name = model.partition(",")[0]
    emulated = [tool("qemu-x86_64", "qemu-user"), "-cpu", model]
    environment = clean_environment()
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    # A child of an emulated process is native unless it is started through this.
    python = folder / f"python-{name}"
    python.write_text(f'#!/bin/sh\nexec {" ".join(emulated)} {sys.executable} "$@"\n')
    python.chmod(0o755)

    def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [python, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)

    def doctor() -> None:
        done = run_python("-c", DOCTOR, str(python))
        findings = json.loads(done.stdout)
        expect((done.returncode, findings["problems"]), (0, []))
        expect(tuple(tier["name"] for tier in findings["isa"]["tiers"] if tier["usable"]), tiers)
        expect(findings["isa"]["current"], tiers[-1])

    def numpy_call() -> None:
        done = run_python("-c", NUMPY_CALL)
        expect((done.returncode, done.stderr), (0, ""))

    tally.check(f"{name}: doctor", doctor)
    tally.check(f"{name}: NumPy calls", numpy_call)
    run_cases(tally, name, [*emulated, str(folder / "runner")], tiers[-1], environment)


def test_aarch64(tally: Tally) -> None:
    qemu = tool("qemu-aarch64", "qemu-user")
    compiler = tool("aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu")
    build = PACKAGE / "build" / "aarch64"
    configure = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={compiler}"]
    options = ["-DAMXK_PYTHON=OFF", "-DAMXK_TORCH=OFF"]
    cmake = tool("cmake", "cmake")
    subprocess.run([cmake, "-S", PACKAGE, "-B", build, *configure, *options], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([cmake, "--build", build, "--parallel"], check=True, stdout=subprocess.DEVNULL)
    build_runner(compiler, build / "runner", build / "libamx_kernels.so")
    runner = [qemu, "-L", "/usr/aarch64-linux-gnu", str(build / "runner")]

    def refuses(tier: str) -> None:
        environment = {**clean_environment(), "AMX_KERNELS_ISA": tier}
        command = [*runner, os.devnull, os.devnull]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        expect(done.returncode, 2)
        wanted = (
            f'AMX_KERNELS_ISA is "{tier}", which cannot be used: not compiled into this build (usable here: portable)'
        )
        expect(done.stderr.strip(), f"runner: {wanted}")

    for tier in isa.TIERS[1:]:
        tally.check(f"aarch64 refuses {tier}", lambda tier=tier: refuses(tier))
    run_cases(tally, "aarch64", runner, "portable", clean_environment())


def build_runner(compiler: str, target: Path, library: Path) -> None:
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", f"-I{PACKAGE / 'include'}", f"-Wl,-rpath,{library.parent}"]
    subprocess.run([compiler, *flags, HERE / "runner.cpp", library, "-o", target], check=True)


SESSIONS: dict[str, Callable[[Tally], None]] = {"x86": test_x86, "aarch64": test_aarch64}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("sessions", nargs="*", choices=[*SESSIONS, []], help="default: all")
    chosen = parser.parse_args(arguments).sessions or list(SESSIONS)
    tally = Tally()
    for name in chosen:
        SESSIONS[name](tally)
    print(f"{tally.passed} passed, {tally.failed} failed")
    return 1 if tally.failed or not tally.passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
