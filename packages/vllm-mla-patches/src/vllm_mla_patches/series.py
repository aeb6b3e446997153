# SPDX-License-Identifier: Apache-2.0
"""Series of patches: an order file, one file per patch, and one ledger for all of them.

`patches/<vLLM version>/series` lists patch files in order, one a line. `patches/ledger.toml` says for each of them
why it exists, how it works, what upstream did about it, and when it can be dropped; the order file, the folder and
the ledger must agree both ways, which is checked whenever a series is loaded.
"""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from email import message_from_bytes, policy
from pathlib import Path
from typing import Any

from .diff import FileDiff, parse
from .errors import PatchError, SeriesError, UnsupportedVersionError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PATCHES = Path(__file__).parent / "patches"

# What the ledger says of each patch; the last two may be empty.
LEDGER_KEYS = ("why", "how", "drop_when", "probe", "upstream", "upstream_since")


@dataclass(frozen=True)
class Patch:
    """One patch: its name (the file's, without suffix), subject, file changes, and what the ledger says of it."""

    name: str
    subject: str
    diffs: tuple[FileDiff, ...]
    why: str
    how: str
    drop_when: str
    probe: str
    """Name of the function in `probes` that finds the patch's effect in a tree's code."""
    upstream: str
    """Links to what upstream did or discussed, or empty."""
    upstream_since: str
    """The first release that carries an equal change, or empty while none does."""


@dataclass(frozen=True)
class Series:
    """All patches for one vLLM version, in order."""

    version: str
    patches: tuple[Patch, ...]

    @classmethod
    def available(cls, root: Path = PATCHES) -> list[str]:
        """The versions that have a series, oldest first."""
        return sorted((path.parent.name for path in root.glob("*/series")), key=version_key)

    @classmethod
    def load(cls, version: str, root: Path = PATCHES) -> Series:
        """Reads and checks the series for a vLLM version.

        Raises:
            UnsupportedVersionError: there is none.
            SeriesError: the order file, the folder and the ledger disagree, or a patch cannot be read.
        """
        folder = root / version
        if not (folder / "series").is_file():
            known = ", ".join(cls.available(root)) or "none"
            raise UnsupportedVersionError(f"there is no patch series for vLLM {version} (available: {known})")
        names = [line for line in (folder / "series").read_text().split() if line]
        ledger = load_ledger(root)["series"].get(version, {})
        _check_same(f"{version}/series", names, f"the files in {version}/", (p.name for p in folder.glob("*.patch")))
        _check_same(f"{version}/series", (name.removesuffix(".patch") for name in names), "ledger.toml", ledger)
        return cls(version, tuple(_load_patch(folder / name, ledger[name.removesuffix(".patch")]) for name in names))

    def index(self, name: str) -> int:
        """Position of a patch by name.

        Raises:
            SeriesError: the series has no such patch.
        """
        names = [patch.name for patch in self.patches]
        try:
            return names.index(name)
        except ValueError:
            raise SeriesError(f"series {self.version} has no patch '{name}' (it has: {', '.join(names)})") from None

    @functools.cached_property
    def stages(self) -> tuple[dict[str, str], ...]:
        """`stages[k][path]`: the Git object name of each file of the series once its first k patches are applied."""
        current: dict[str, str] = {}
        for patch in reversed(self.patches):
            current.update({diff.path: diff.old_id for diff in patch.diffs})
        stages = [current]
        for patch in self.patches:
            for diff in patch.diffs:
                if current[diff.path] != diff.old_id:
                    raise SeriesError(f"{self.version}/{patch.name}: {diff.path} does not continue the patch before it")
            current = {**current, **{diff.path: diff.new_id for diff in patch.diffs}}
            stages.append(current)
        return tuple(stages)


@functools.cache
def load_ledger(root: Path = PATCHES) -> dict[str, Any]:
    """`ledger.toml`: `unpatched` (minor versions that need no series) and `series.<version>.<patch>` tables."""
    with open(root / "ledger.toml", "rb") as file:
        return tomllib.load(file)


def export(version: str, folder: Path, root: Path = PATCHES) -> list[Path]:
    """Writes the patches of a series into `folder`, numbered so that `git am folder/*.patch` takes them in order.

    Raises:
        UnsupportedVersionError, SeriesError: see `Series.load`.
        PatchError: `folder` has files already.
    """
    series = Series.load(version, root)
    if folder.exists() and any(folder.iterdir()):
        raise PatchError(f"{folder} is not empty: name a new or an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number, patch in enumerate(series.patches, 1):
        name = f"{patch.name}.patch"
        files.append(Path(shutil.copyfile(root / version / name, folder / f"{number:04}-{name}")))
    return files


def _load_patch(path: Path, entry: dict[str, str]) -> Patch:
    where = f"{path.parent.name}/{path.name}"
    if missing := set(LEDGER_KEYS) ^ set(entry):
        raise SeriesError(f"ledger.toml: {where} lacks or misspells {', '.join(sorted(missing))}")
    text = path.read_bytes()
    diffs = parse(text)
    if not diffs:
        raise SeriesError(f"{where} changes no file")
    if len({diff.path for diff in diffs}) != len(diffs):
        raise SeriesError(f"{where} names a file twice")
    subject = message_from_bytes(text, policy=policy.default)["Subject"]
    return Patch(path.stem, str(subject).removeprefix("[PATCH] "), tuple(diffs), **entry)


def _check_same(left: str, left_names: Iterable[str], right: str, right_names: Iterable[str]) -> None:
    left_list, right_set = list(left_names), set(right_names)
    if len(set(left_list)) != len(left_list):
        raise SeriesError(f"{left} lists a patch twice")
    if only_left := set(left_list) - right_set:
        raise SeriesError(f"{left} lists {', '.join(sorted(only_left))}, which {right} lack")
    if only_right := right_set - set(left_list):
        raise SeriesError(f"{right} have {', '.join(sorted(only_right))}, which {left} does not list")


def version_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
