# SPDX-License-Identifier: Apache-2.0
"""The sanitize session: the kernels and bindings under AddressSanitizer, UBSan and ThreadSanitizer, on every tier.

    python packages/amx-kernels/tests/sanitize/run.py [--quick] [--only asan|tsan|python] [--amx auto|native|emulated]

Writes reports/sanitize.json {runs, findings, ...}. Three parts:

* a C++ program of concurrent callers (concurrency.cpp) with ASan, UBSan and leak detection, on every tier; amxbf16
  natively where the machine has it, and emulated in any case, with the emulator itself built with UBSan;
* the same program with TSan, on every tier that needs no emulator: TSan cannot follow code that a signal handler
  rewrites while other threads run it. What TSan looks for, the sharing of memory between threads, is the same text on
  every tier; only the products differ, and they touch a thread's own scratch;
* the Python suite with the ASan library preloaded. Leak detection is off there (the interpreter's own allocations are
  reported as leaks); tests of time and of resident memory are left out, as sanitizers change both.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import reliability  # noqa: E402

TIERS = ("portable", "avx2", "avx512", "avx512bf16", "amxbf16")
MARKS = ("AddressSanitizer", "runtime error:", "ThreadSanitizer", "LeakSanitizer", "UndefinedBehaviorSanitizer")
FLAGS = "-O1 -g -w"

#: Python test files run under ASan, and what is left out of them.
FILES = (
    "faults", "test_bmm.py", "test_cache.py", "test_plan.py", "test_errors.py", "test_prefill.py", "test_attention.py",
)  # fmt: skip
LEFT_OUT = {
    "keeps_every_thread_busy": "measures time",
    "costs_no_more_than": "measures time",
    "take_no_memory_of_its_length": "measures resident memory, which the sanitizer holds on to",
    "no_network": "imports torch, which is not instrumented",
    "torch": "the shim is not part of the sanitized build",
    "mixed_devices": "calls the shim",
}


@dataclass
class Runs:
    """Names of finished runs and what they found."""

    runs: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def run(self, name: str, command: list[str], environment: dict[str, str], timeout: float) -> None:
        with tempfile.TemporaryDirectory() as folder:
            # Reports of every process, children included, go to files that exist only if something was found.
            log = f"{folder}/report"
            options = {
                key: f"{environment.get(key, '')}:log_path={log}"
                for key in ("ASAN_OPTIONS", "UBSAN_OPTIONS", "TSAN_OPTIONS")
            }
            started = time.monotonic()
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=timeout, check=False,
                    env={**os.environ, **environment, **options},
                )  # fmt: skip
            except subprocess.TimeoutExpired as error:
                self.runs.append(name)
                done_so_far = (error.stdout or b"").decode(errors="replace")[-300:]
                self.findings.append(f"{name}: not finished after {timeout:.0f} s: {done_so_far}")
                return
            reports = "".join(path.read_text(errors="replace") for path in sorted(Path(folder).glob("report*")))
            text = done.stdout + done.stderr
            print(
                f"{name}: exit {done.returncode}, {time.monotonic() - started:.0f} s: {text.strip()[-120:]!r}",
                flush=True,
            )
            if done.returncode == 0 and not reports and text.startswith("skipped:"):
                self.skipped[name] = text.strip()
                return
            self.runs.append(name)
            if done.returncode != 0 or reports or any(mark in text for mark in MARKS):
                self.findings.append(f"{name}: exit {done.returncode}\n{(reports or text)[:6000]}")


def compiler() -> str:
    return os.environ.get("CXX") or "g++"


def program(sanitize: str, name: str) -> Path:
    """concurrency.cpp and the library, built with a sanitizer."""
    library = reliability.cmake_build(name, compiler(), sanitize, FLAGS, python=False)
    target = library / "concurrency"
    command = [compiler(), "-std=gnu++17", *FLAGS.split(), f"-fsanitize={sanitize}", "-fno-omit-frame-pointer"]
    command += [f"-I{reliability.PACKAGE / 'include'}", str(HERE / "concurrency.cpp"), f"-L{library}"]
    command += [f"-Wl,-rpath,{library}", "-lamx_kernels", "-lpthread", "-o", str(target)]
    subprocess.run(command, check=True)
    return target


def emulator() -> Path:
    """The emulator built with UBSan. (ASan's shadow calls would clobber the registers of the code it interrupts.)"""
    source = reliability.ROOT / "packages" / "mla-testing"
    folder = source / "build" / "sanitize"
    flags = "-g -fsanitize=undefined -fno-sanitize=alignment -fno-sanitize-recover=undefined"
    for command in (
        ["cmake", "-S", str(source), "-B", str(folder), f"-DCMAKE_C_FLAGS={flags}", f"-DCMAKE_CXX_FLAGS={flags}"],
        ["cmake", "--build", str(folder), "--target", "mla_amx_emulator", "-j2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    return next(folder.rglob("libmla_amx_emulator.so"))


def runtime(name: str) -> str:
    """Path of a sanitizer's shared runtime, for LD_PRELOAD."""
    found = subprocess.run([compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return str(Path(found.stdout.strip()).resolve())


def asan(runs: Runs, rounds: int, amx: str) -> None:
    target = program("address,undefined", "sanitize-asan")
    environment = {"ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    for tier in TIERS:
        if tier == "amxbf16" and amx == "emulated":
            continue
        runs.run(f"asan+ubsan {tier}", [str(target), tier, str(rounds)], environment, 600)
    counts = target.with_name("amx_counts.json")
    counts.unlink(missing_ok=True)
    emulated = {
        "AMX_KERNELS_EMULATED": "1",
        "MLA_AMX_EMULATOR": "emulate",
        "MLA_AMX_EMULATOR_REPORT": str(counts),
        "LD_PRELOAD": f"{runtime('libasan.so')} {emulator()}",
        "ASAN_OPTIONS": "detect_leaks=1:handle_sigill=0:use_sigaltstack=0",
    }
    runs.run("asan+ubsan amxbf16, emulated", [str(target), "amxbf16", str(rounds), "emulated"], emulated, 600)
    text = counts.read_text() if counts.exists() else "{}"
    if not re.search(r'"TDPBF16PS": [1-9]', text):
        runs.findings.append(f"asan+ubsan amxbf16, emulated: no TDPBF16PS was counted: {text[:300]}")


def tsan(runs: Runs, rounds: int, amx: str) -> None:
    target = program("thread", "sanitize-tsan")
    # Address randomisation beyond what TSan's shadow expects makes it give up on newer kernels.
    prefix = ["setarch", "-R"] if shutil.which("setarch") else []
    for tier in TIERS:
        if tier == "amxbf16" and amx == "emulated":
            continue
        runs.run(f"tsan {tier}", [*prefix, str(target), tier, str(rounds)], {"TSAN_OPTIONS": "halt_on_error=0"}, 600)


def python(runs: Runs, quick: bool, amx: str, seconds: float) -> None:
    """The Python suite on the sanitized library and extension module."""
    library = reliability.cmake_build("sanitize-python", compiler(), "address,undefined", FLAGS, python=True)
    package = library / "package" / "amx_kernels"
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir(parents=True)
    for path in [*(reliability.PACKAGE / "src" / "amx_kernels").glob("*.py"), *library.glob("*.so")]:
        (package / path.name).symlink_to(path)
    keep = [p for p in sys.path if p and not Path(p, "amx_kernels", "__init__.py").exists()]
    environment = {
        "PYTHONPATH": os.pathsep.join([str(package.parent), *keep]),
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libubsan.so')} {runtime('libstdc++.so.6')}",
        "ASAN_OPTIONS": "detect_leaks=0:handle_sigill=0:use_sigaltstack=0:allocator_may_return_null=1",
        "PYTHONMALLOC": "malloc",
    }
    tests = [str(HERE.parent / name) for name in (FILES[:1] if quick else FILES)]
    chosen = " and ".join([*(f"not {name}" for name in LEFT_OUT), *(["(strides or isolation or weights)"] * quick)])
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "mla_testing.pytest_plugin", "-p", "no:cacheprovider"]
    both = amx == "auto" and native()
    for mode in ["native", "emulated"] if both else [amx]:
        # The second time only the tier that differs.
        tiers = " and amxbf16" if both and mode == "emulated" else ""
        selected = [*command, *tests, "-k", chosen + tiers, f"--amx={mode}"]
        runs.run(f"asan+ubsan python, --amx={mode}{tiers}", selected, environment, seconds)


def native() -> bool:
    """Whether AMX runs natively here; asked in a child, so that this process stays without the permission."""
    script = "from amx_kernels import isa\nisa.set('amxbf16')"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode == 0


def main() -> int:
    arguments = reliability.parser(__doc__.split("\n")[0])
    arguments.add_argument("--only", choices=("asan", "tsan", "python"))
    arguments.add_argument("--python-minutes", type=float, default=20.0, help="for each run of the Python suite")
    options = arguments.parse_args()
    start = time.monotonic()
    runs = Runs()
    rounds = 5 if options.quick else 40
    if options.only in (None, "asan"):
        asan(runs, rounds, options.amx)
    if options.only in (None, "tsan"):
        tsan(runs, rounds, options.amx)
    if options.only in (None, "python"):
        python(runs, options.quick, options.amx, 60 * options.python_minutes)
    for finding in runs.findings:
        print(f"FOUND {finding}", file=sys.stderr)
    reliability.write(
        options.out,
        "sanitize",
        {
            "runs": runs.runs,
            "findings": runs.findings,
            "skipped": runs.skipped,
            "left_out": LEFT_OUT,
            "compiler": compiler(),
            "seconds": round(time.monotonic() - start, 1),
        },
    )
    return 1 if runs.findings else 0


if __name__ == "__main__":
    sys.exit(main())
