# SPDX-License-Identifier: Apache-2.0
"""Tests of the tests: breaks the kernels one line at a time and shows that the suite notices each.

    python packages/amx-kernels/tests/mutants/run.py [--only NAME ...] [--list]

Every mutant is one textual edit of a copy of the sources, built there and given to the kernel suite until a test fails
or the process dies. At the end the sources are built unchanged, and every test that caught something must pass: what it
caught was the mutation. Exit status 1 if a mutant survives, an edit no longer applies, or a catching test fails without
it. Needs a compiler, CMake, pybind11, pytest, amx-kernels and mla-testing (installed or on PYTHONPATH).

An algorithm is one text for all tiers, so two of them do; a mutant of what only one tier has is run on that one, where
the CPU has it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from amx_kernels import isa

PACKAGE = Path(__file__).parents[2]
TESTS = PACKAGE / "tests"

ATTENTION = ("test_attention.py",)
BMM = ("test_bmm.py",)
CACHE = ("test_cache.py",)
DIMS = ("faults/test_fault_dims.py",)
ERRORS = ("test_errors.py",)


@dataclass(frozen=True)
class Mutant:
    """``old``, which must occur exactly once in ``file`` (under csrc), becomes ``new``."""

    name: str
    file: str
    old: str
    new: str
    #: Modules of the suite it is given to, from the folder of the tests.
    tests: tuple[str, ...]
    #: The only tier that has it; empty: all have.
    tier: str = ""


MUTANTS = (
    Mutant(
        "causal mask one key late",
        "ops/attention/attention-inl.h",
        "min(r / p.heads, u->tokens - 1) + 1;",
        "min(r / p.heads, u->tokens - 1) + 2;",
        ATTENTION,
    ),
    Mutant(
        "padding keys not masked",
        "ops/attention/attention-inl.h",
        "masked |= limit[i] < padded;",
        "masked |= limit[i] < block.keys;",
        ATTENTION,
    ),
    Mutant(
        "cache row stride ignored",
        "ops/attention/keys-inl.h",
        "+ offset * cache.row_stride, cache.row_stride};",
        "+ offset * width, width};",
        ATTENTION,
    ),
    Mutant(
        "cache block stride ignored",
        "ops/attention/keys-inl.h",
        "{cache.data + block * cache.block_stride + offset",
        "{cache.data + block * cache.block_size * cache.row_stride + offset",
        ATTENTION,
    ),
    Mutant(
        "group straddles blocks unnoticed",
        "ops/attention/keys-inl.h",
        "offset + kGroup <= cache.block_size",
        "offset < cache.block_size",
        ATTENTION,
    ),
    Mutant(
        "tail of copied rows left as found",
        "ops/attention/keys-inl.h",
        "memset(copy + filled, 0, static_cast<size_t>(padded - filled) * sizeof(bf16));",
        "",
        ATTENTION,
    ),
    Mutant(
        "rope part of q with the latent part's head stride",
        "ops/attention/attention-inl.h",
        "h * p.q_pe_head",
        "h * p.q_latent_head",
        ATTENTION,
    ),
    Mutant(
        "queries packed where they lie with the latent part's head stride",
        "ops/attention/attention-inl.h",
        "h0 * p.q_pe_head, p.q_pe_head,",
        "h0 * p.q_pe_head, p.q_latent_head,",
        ATTENTION,
    ),
    Mutant(
        "nine rows in half a panel",
        "ops/attention/attention-inl.h",
        "(rows + kHalf - 1) / kGroup",
        "(rows + kHalf - 2) / kGroup",
        ATTENTION,
        "avx512bf16",
    ),
    Mutant(
        "half panel keeps every second pair only",
        "tile/half_panel-inl.h",
        "vadd(acc[m], _mm512_permute_ps(acc[m], 0xb1))",
        "acc[m]",
        ATTENTION,
        "avx512bf16",
    ),
    Mutant(
        "last register block of values in place left out",
        "tile/in_place-inl.h",
        "if (m < rows) in_place_rows",
        "if (m + 1 < rows) in_place_rows",
        ATTENTION,
        "avx512bf16",
    ),
    Mutant(
        "output not rescaled when the maximum grows",
        "ops/attention/attention-inl.h",
        "if (grows && first > begin) {",
        "if (grows && first > begin + kKeys) {",
        ATTENTION,
    ),
    Mutant(
        "sum not rescaled when the maximum grows",
        "ops/attention/softmax-inl.h",
        "vstore(l, grows ? vfma(vload(l), vload(alpha), sum) : vadd(vload(l), sum));",
        "vstore(l, vadd(vload(l), sum));",
        ATTENTION,
    ),
    Mutant(
        "merge with the other part's weight",
        "ops/attention/attention-inl.h",
        "vstore(fb, vexp2(vsub(b, shift)));",
        "vstore(fb, vexp2(vsub(a, shift)));",
        ATTENTION,
    ),
    Mutant(
        "log-sum-exp in the wrong base",
        "ops/attention/attention-inl.h",
        "state.m[r] * kLn2 + logf(l)",
        "state.m[r] + logf(l)",
        ATTENTION,
    ),
    Mutant(
        "output columns past the last whole 32 dropped",
        "ops/attention/attention-inl.h",
        "memcpy(out + 32 * whole, tail, static_cast<size_t>(p.cache.latent - 32 * whole) * sizeof(bf16));",
        "",
        DIMS,
    ),
    Mutant(
        "bfloat16 by truncation",
        "base/common.h",
        "(bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16",
        "bits >> 16",
        ("test_bmm.py", "test_attention.py"),
    ),
    Mutant(
        "split length depends on the threads",
        "ops/attention/plan.cpp",
        "u.split_keys = split_length(r, u.keys, num_heads);",
        "u.split_keys = split_length(r, u.keys, num_heads) + 64 * (num_threads - 1);",
        ("test_plan.py", "test_invariance.py"),
    ),
    Mutant(
        "last split lost",
        "ops/attention/plan.h",
        "return u.keys > 0 ? ceil_div(u.keys, u.split_keys) : 1;",
        "return u.keys > u.split_keys ? u.keys / u.split_keys : 1;",
        ATTENTION,
    ),
    Mutant(
        "damaged plan accepted",
        "capi/attention.cpp",
        "plan_checksum(memory) == h->checksum",
        "h->checksum != 0",
        ("test_plan.py",),
    ),
    Mutant(
        "block id one too high accepted",
        "capi/step.cpp",
        ">= static_cast<uint64_t>(num_blocks);",
        "> static_cast<uint64_t>(num_blocks);",
        ERRORS,
    ),
    Mutant(
        "slot one too high accepted",
        "capi/cache.cpp",
        "c.require(slot < slots,",
        "c.require(slot <= slots,",
        ERRORS,
    ),
    Mutant("slot -1 written", "ops/cache/concat.cpp", "if (slot < 0) continue;", "if (slot < -1) continue;", CACHE),
    Mutant(
        "overlapping output accepted",
        "capi/check.cpp",
        "require(stride >= span,",
        "require(stride >= 0,",
        ERRORS,
    ),
    Mutant(
        "depth tail of mat1 read past the row",
        "ops/bmm/bmm-inl.h",
        "if (live < read || p.depth != call.depth || conflict) {",
        "if (live < read || conflict) {",
        BMM,
    ),
    Mutant(
        "packed matrices a panel short",
        "ops/bmm/bmm-inl.h",
        "const int64_t panels = ceil_div(call.p.columns, kGroup);",
        "const int64_t panels = call.p.columns / kGroup;",
        BMM,
    ),
    Mutant(
        "last block of a packed weight taken for a whole one",
        "tile/weight-inl.h",
        "min<int64_t>(kWeightPanels, panels - (n - n % kWeightPanels))",
        "static_cast<int64_t>(kWeightPanels)",
        BMM,
    ),
    Mutant(
        "one row fewer widened than is read",
        "tile/vector_gemm-inl.h",
        "while (all < n) all *= 2;",
        "while (all < n - 1) all *= 2;",
        BMM,
        "avx512",
    ),
    Mutant(
        "column tail writes a whole vector",
        "tile/result-inl.h",
        "min<int64_t>(NR, columns / kGroup)",
        "min<int64_t>(NR, ceil_div(columns, kGroup))",
        BMM,
    ),
    Mutant(
        "a row past the last written",
        "tile/vector_gemm-inl.h",
        "if (m * kAccRows + r >= result.rows) return;",
        "if (m * kAccRows + r > result.rows) return;",
        BMM,
    ),
    Mutant(
        "A tile with B's row stride",
        "tile/amxbf16.h",
        "a[M].stride * static_cast<int64_t>(sizeof(bf16))",
        "kLine",
        ATTENTION,
    ),
    Mutant(
        "prefill mask one key late",
        "ops/prefill/prefill-inl.h",
        "min<int64_t>(keys, limit + g * kGroup + i - first - k)",
        "min<int64_t>(keys, limit + g * kGroup + i + 1 - first - k)",
        ("test_prefill.py",),
    ),
    Mutant("tiles never configured", "tile/amx_tiles.h", "    tile_load_config(config);\n", "", ATTENTION),
)


def plugin_arguments() -> list[str]:
    """How pytest finds mla-testing's plugin: by itself where that is installed."""
    names = [point.name for point in importlib.metadata.entry_points(group="pytest11")]
    return [] if "mla_testing" in names else ["-p", "mla_testing.pytest_plugin"]


class Copy:
    """A copy of the package's sources, its build folder, and the suite run against it."""

    def __init__(self, folder: Path, tier: str) -> None:
        self.source, self.build, self.tier = folder / "amx-kernels", folder / "build", tier
        ignore = shutil.ignore_patterns("build", "tests", "*.so", "__pycache__")
        shutil.copytree(PACKAGE, self.source, ignore=ignore)

    def path(self, mutant: Mutant) -> Path:
        return self.source / "csrc" / mutant.file

    def configure(self) -> None:
        tiers = f"portable;{self.tier}" if self.tier else "portable;amxbf16"
        # At -O1 it builds faster and breaks the same ways.
        options = ["-DAMXK_DEV=ON", "-DAMXK_TORCH=OFF", f"-DAMXK_TIERS={tiers}"]
        options.append("-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG")
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        arguments = ["cmake", *generator, f"-DPython_EXECUTABLE={sys.executable}", *options]
        self._run([*arguments, "-S", str(self.source), "-B", str(self.build)])

    def compile(self) -> None:
        self._run(["cmake", "--build", str(self.build), "--parallel", str(os.cpu_count() or 1)])

    @staticmethod
    def _run(command: Sequence[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")

    def test(self, selection: Sequence[str], timeout: float) -> tuple[int | str, str]:
        """Exit status ("timeout" if it took too long) and output of pytest, stopped at the first failure."""
        options = ["-x", "-v", "--tb=no", "-p", "no:cacheprovider", "-p", "no:faulthandler", *plugin_arguments()]
        paths = [str(self.source / "src"), *filter(None, sys.path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
        options += ["-k", f"{self.tier or 'not avx'} and not torch"]
        command = [sys.executable, "-m", "pytest", *options, *(str(TESTS / test) for test in selection)]
        try:
            done = subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            return "timeout", ""
        return done.returncode, done.stdout + done.stderr


def catching_test(output: str) -> str | None:
    """The test that failed, or in which the process died: the last one that was begun."""
    begun = re.findall(r"^((?:\w+/)*test_\w+\.py::\S+)(?: (\w+))?", output, re.MULTILINE)
    failed = [test for test, result in begun if result in ("FAILED", "ERROR")]
    return failed[0] if failed else begun[-1][0] if begun else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="mutants to run, by a part of their names")
    parser.add_argument("--list", action="store_true", help="name the mutants and leave")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of tests after which a mutant survived")
    arguments = parser.parse_args()
    chosen = [m for m in MUTANTS if not arguments.only or any(part in m.name for part in arguments.only)]
    if arguments.list:
        print(*(m.name for m in chosen), sep="\n")
        return 0

    stale = [m for m in chosen if (PACKAGE / "csrc" / m.file).read_text().count(m.old) != 1]
    for m in stale:
        print(f"{m.name}: {m.old!r} does not occur exactly once in csrc/{m.file}; mend the mutant")
    chosen = [m for m in chosen if m not in stale]
    usable = {"", *(tier.name for tier in isa.tiers() if tier.usable)}
    for m in chosen:
        if m.tier not in usable:
            print(f"{m.name}: not run, this CPU lacks {m.tier}")
    survivors: list[str] = []
    status: int | str = 0
    for tier in sorted({m.tier for m in chosen} & usable):
        mine, its_status = run([m for m in chosen if m.tier == tier], tier, arguments.timeout)
        survivors += mine
        status = status or its_status
    total = sum(m.tier in usable for m in chosen)
    print(
        f"{total - len(survivors)} of {total} mutants caught, {len(survivors)} survived, {len(stale)} no longer apply"
    )
    return int(bool(survivors or stale or status != 0))


def run(chosen: Sequence[Mutant], tier: str, timeout: float) -> tuple[list[str], int | str]:
    """The names of those of the mutants of a tier (empty: of all) that survived, and the status of the catching tests
    on the unchanged sources."""
    survivors: list[str] = []
    caught_by: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="amxk-mutants-") as folder:
        copy = Copy(Path(folder), tier)
        copy.configure()
        for m in chosen:
            path, begin = copy.path(m), time.monotonic()
            original = path.read_text()
            path.write_text(original.replace(m.old, m.new))
            copy.compile()
            built = time.monotonic()
            status, output = copy.test(m.tests, timeout)
            path.write_text(original)
            test = catching_test(output) if status not in (0, "timeout") else None
            if test is None:
                survivors.append(m.name)
                verdict = f"SURVIVED ({'timeout' if status == 'timeout' else 'all tests passed'})"
                if status not in (0, "timeout"):
                    verdict = f"pytest failed by itself, status {status}: {output[-500:]}"
            else:
                caught_by.add(test)
                verdict = f"{'caught' if status == 1 else f'crashed ({status})'} by {test}"
            now = time.monotonic()
            times = f"{built - begin:4.0f} s to build, {now - built:4.0f} s to test"
            print(f"{m.name:<52} {times}: {verdict}", flush=True)
        copy.compile()
        status, output = copy.test(sorted(caught_by), 3 * timeout) if caught_by else (0, "")
    if status != 0:
        print(f"tests that caught mutants fail on the unchanged sources too:\n{output[-3000:]}")
    return survivors, status


if __name__ == "__main__":
    sys.exit(main())
