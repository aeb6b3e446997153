# SPDX-License-Identifier: Apache-2.0
"""The fuzz session: property tests of every op on every tier, and a coverage-guided fuzzer of the C API.

    python packages/amx-kernels/tests/fuzz/run.py [--quick] [--examples N] [--minutes M] [--amx emulated|native|auto]

Writes reports/fuzz.json {examples, failures, ...}. The C API fuzzer is libFuzzer where clang has it, else a small
coverage-guided loop over gcc's trace-pc instrumentation (driver.cpp); both with the address and undefined-behaviour
sanitizers, over every tier of this machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import reliability  # noqa: E402

SANITIZERS = "address,undefined"
TRIVIAL = 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }'


def libfuzzer() -> str | None:
    """A clang++ that links -fsanitize=fuzzer, or None."""
    for name in ("clang++", *(f"clang++-{n}" for n in range(21, 12, -1))):
        if compiler := shutil.which(name):
            with tempfile.TemporaryDirectory() as folder:
                source = Path(folder, "x.cpp")
                source.write_text(TRIVIAL)
                command = [compiler, "-fsanitize=fuzzer,address", str(source), "-o", str(Path(folder, "x"))]
                if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                    return compiler
    return None


def build() -> tuple[str, Path]:
    """The project's own build of the library, with coverage and sanitizers, and the target; which fuzzer, and where."""
    clang = libfuzzer()
    compiler = clang or os.environ.get("CXX") or "g++"
    sanitize = f"{SANITIZERS},fuzzer-no-link" if clang else SANITIZERS
    coverage = "" if clang else "-fsanitize-coverage=trace-pc"
    library = reliability.cmake_build(
        f"fuzz-{Path(compiler).name}", compiler, sanitize, f"-O1 -g -w -DAMXK_SHOW_ROWS {coverage}", python=False
    )
    program = library / "fuzz_capi"
    sources = [HERE / "capi_target.cpp", *([] if clang else [HERE / "driver.cpp"])]
    flags = [f"-fsanitize={SANITIZERS}{',fuzzer' if clang else ''}", "-fno-sanitize-recover=undefined", "-rdynamic"]
    command = [compiler, "-std=gnu++17", "-O1", "-g", *flags, f"-I{reliability.PACKAGE / 'include'}"]
    command += [*map(str, sources), f"-L{library}", f"-Wl,-rpath,{library}", "-lamx_kernels", "-o", str(program)]
    subprocess.run(command, check=True)
    return ("libFuzzer of " + Path(clang).name if clang else f"trace-pc loop of {compiler}"), program


def fuzz_c_api(seconds: float, seed: int) -> dict[str, object]:
    """Runs the C API fuzzer; the result names runs, edges and, if it crashed, the last lines of the report."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kind, program = build()
        corpus = folder / "corpus"
        corpus.mkdir()
        if kind.startswith("libFuzzer"):
            limits = ["-max_len=512", "-rss_limit_mb=4096", "-malloc_limit_mb=3000", "-timeout=60"]
            command = [str(program), str(corpus), f"-max_total_time={int(seconds)}", f"-seed={seed}", *limits]
            command.append("-print_final_stats=1")
        else:
            command = [str(program), str(seconds), str(seed)]
        # No emulator there: the tiers of this machine, whatever the properties ran on.
        environment = {name: value for name, value in os.environ.items() if name != "AMX_KERNELS_EMULATED"}
        environment["ASAN_OPTIONS"] = "allocator_may_return_null=1:detect_leaks=1"
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)
        text = done.stdout + done.stderr
        runs = re.search(r"(?:stat::number_of_executed_units:|^runs)\s+(\d+)", text, re.MULTILINE)
        edges = re.findall(r"cov: (\d+)|edges (\d+)", text)
        result: dict[str, object] = {
            "fuzzer": kind,
            "runs": int(runs[1]) if runs else 0,
            "edges": int(next(filter(None, edges[-1]))) if edges else 0,
            "failure": "",
        }
        if done.returncode != 0 or not runs:
            crash = next(iter(sorted(folder.glob("crash-*")) + sorted(folder.glob("oom-*"))), None)
            result["failure"] = f"exit {done.returncode}\n{text[-4000:]}"
            result["input"] = crash.read_bytes().hex() if crash else ""
        return result


def main() -> int:
    arguments = reliability.parser(__doc__.split("\n")[0])
    arguments.set_defaults(amx="emulated")  # the same run on every machine; where there is AMX the C API part uses it
    arguments.add_argument("--examples", type=int, default=2000, help="per op and tier")
    arguments.add_argument("--minutes", type=float, default=30.0, help="of processor time at most, both parts together")
    arguments.add_argument("--only", nargs="+", metavar="OP", help="ops to examine, by a part of their names")
    arguments.add_argument("--c-api-seconds", type=float, default=300.0)
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    if options.quick:
        options.examples, options.c_api_seconds, options.minutes = min(options.examples, 60), 10.0, 3.0
    start = time.monotonic()
    tiers = reliability.Tiers(options.amx)
    import properties

    # Processor time: where others take their share of the machine it takes longer, and does not fail.
    seconds = 60 * options.minutes - options.c_api_seconds - 60
    outcome = properties.run(tiers, options.examples, seconds, options.seed, options.only)
    tiers.check()
    c_api = fuzz_c_api(options.c_api_seconds, options.seed + 1)
    failures = [*outcome.failures, *([f"C API: {c_api['failure']}"] if c_api["failure"] else [])]
    print(f"C API, {c_api['fuzzer']}: {c_api['runs']} runs, {c_api['edges']} edges")
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    reliability.write(
        options.out,
        "fuzz",
        {
            "examples": sum(outcome.examples.values()) + int(str(c_api["runs"])),
            "failures": failures,
            "examples_by_op_and_tier": outcome.examples,
            "amx": tiers.amx,
            "tiers_skipped": tiers.skipped,
            "c_api": c_api,
            "seconds": round(time.monotonic() - start, 1),
            "seed": options.seed,
        },
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
