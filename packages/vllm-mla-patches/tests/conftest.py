# SPDX-License-Identifier: Apache-2.0
"""A tree of four small files and a series of three patches for it, made afresh for each test."""

from __future__ import annotations

import py_compile
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from vllm_mla_patches import Tree
from vllm_mla_patches.testing import format_patch

VERSION = "9.8.7"
FILES = {
    "vllm/__init__.py": "",
    "vllm/_version.py": f"__version__ = version = '{VERSION}'\n",
    "vllm/a.py": "".join(f"a{i} = {i}\n" for i in range(12)),
    "vllm/sub/b.py": "def f():\n    return 'as released'\n",
}
# Patch by patch: path -> content afterwards.
PATCHES: dict[str, dict[str, str]] = {
    "first": {"vllm/a.py": FILES["vllm/a.py"].replace("a3 = 3", "a3 = 33")},
    "second": {
        "vllm/a.py": FILES["vllm/a.py"].replace("a3 = 3", "a3 = 33").replace("a9 = 9\n", ""),
        "vllm/sub/new.py": "g = 1\n",
    },
    "third": {"vllm/sub/b.py": FILES["vllm/sub/b.py"].replace("released", "patched!")},  # of equal size, like the old
}
ENTRY = '{ why = "w", how = "h", drop_when = "never", probe = "rotary_views", upstream = "", upstream_since = "" }'


@dataclass(frozen=True)
class World:
    """A fake tree and its series; `snapshot()` is all there is to know of the tree's files."""

    tree: Tree
    patches: Path
    version: str = VERSION
    names: tuple[str, ...] = tuple(PATCHES)
    entry: str = ENTRY
    """What the ledger says of each patch."""

    @staticmethod
    def after(count: int) -> dict[str, str]:
        """Contents of the package's source files once `count` patches are applied."""
        result = dict(FILES)
        for changes in list(PATCHES.values())[:count]:
            result.update(changes)
        return result

    def snapshot(self) -> dict[str, tuple[bytes, int, int]]:
        files = (path for path in self.tree.root.rglob("*") if path.is_file())
        return {
            path.relative_to(self.tree.root).as_posix(): (
                path.read_bytes(),
                path.stat().st_mtime_ns,
                path.stat().st_mode,
            )
            for path in files
        }

    def contents(self) -> dict[str, str]:
        """Source files of the package only."""
        return {
            path: content.decode()
            for path, (content, _, _) in self.snapshot().items()
            if path.startswith("vllm/") and path.endswith(".py")
        }


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("template"))


@pytest.fixture
def new_world(tmp_path: Path, template: World) -> Callable[[], World]:
    def copy() -> World:
        shutil.rmtree(tmp_path / "world", ignore_errors=True)
        shutil.copytree(template.patches.parent, tmp_path / "world")  # with times and permissions
        return World(Tree.at(tmp_path / "world" / "site-packages"), tmp_path / "world" / "patches")

    return copy


@pytest.fixture
def world(new_world: Callable[[], World]) -> World:
    return new_world()


def make_world(folder: Path) -> World:
    root = folder / "site-packages"
    for path, content in FILES.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)
        py_compile.compile(str(root / path), doraise=True)
    (root / "vllm/sub/b.py").chmod(0o640)

    series = folder / "patches" / VERSION
    series.mkdir(parents=True)
    current = dict(FILES)
    for name, changes in PATCHES.items():
        patch = format_patch(f"Make {name}", {path: (current.get(path), new) for path, new in changes.items()})
        (series / f"{name}.patch").write_bytes(patch)
        current.update(changes)
    (series / "series").write_text("".join(f"{name}.patch\n" for name in PATCHES))
    entries = "".join(f"{name} = {ENTRY}\n" for name in PATCHES)
    (folder / "patches" / "ledger.toml").write_text(f'unpatched = ["9.9"]\n[series."{VERSION}"]\n{entries}')
    return World(Tree.at(root), folder / "patches")
