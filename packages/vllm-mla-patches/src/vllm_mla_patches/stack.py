# SPDX-License-Identifier: Apache-2.0
"""Which patches of a series a tree has, and moving it from one number of them to another.

What is applied is read off the files themselves: after each patch of a series, the Git object names of all its files
are known. So nothing has to be remembered, applying twice is applying once, and a tree that matches no stage is
modified and left alone. Remembered are only a release's own copies of the changed files and of their byte-code, with
their times, so that reverting gives back the very files that were installed.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import transaction
from .diff import blob_id
from .errors import ModifiedTreeError, UnsupportedVersionError
from .probes import carries
from .series import PATCHES, Patch, Series, load_ledger, version_key
from .transaction import STATE, Change
from .tree import Tree


@dataclass(frozen=True)
class PatchState:
    """A patch and, in one word, how a tree stands to it.

    `applied` or `pending` where the tree's version has the series; otherwise, found by probing the code, `upstream`
    (the release carries an equal change) or `lacking`.
    """

    patch: Patch
    state: str


@dataclass(frozen=True)
class Status:
    """What there is to say of a tree."""

    tree: Tree
    series: str
    """The tree's own series; for a release that needs none, the newest older one."""
    patches: tuple[PatchState, ...]
    modified: tuple[str, ...] = ()
    """Files that match no stage of the series together, one line each."""
    interrupted: bool = False
    """A change was cut short; the next `apply` or `revert` first undoes it."""
    unpatched: bool = False
    """A release that needs no series."""

    @property
    def applied(self) -> int:
        """How many patches of the series the tree has."""
        return sum(patch.state == "applied" for patch in self.patches)


def status(tree: Tree, *, series: str | None = None, root: Path = PATCHES) -> Status:
    """How a tree stands to its series, without changing anything.

    Args:
        tree: an installed vLLM or a source tree.
        series: a version, if the tree does not say its own; by default the tree's.
        root: the folder of all series.

    Raises:
        UnsupportedVersionError: there is nothing to say: the version is unknown, or neither has nor makes do without
            a series; or `series` is not the tree's version.
    """
    name = _choose(tree, series, root)
    cut_short = transaction.interrupted(tree.root)
    if name is None:
        probed = _series_to_probe(str(tree.version), root)
        states = tuple(
            PatchState(patch, "upstream" if carries(tree, patch.probe) else "lacking") for patch in probed.patches
        )
        return Status(tree, probed.version, states, interrupted=cut_short, unpatched=True)
    loaded = Series.load(name, root)
    try:
        applied = _stage(tree, loaded)
    except ModifiedTreeError as error:
        states = tuple(PatchState(patch, "unknown") for patch in loaded.patches)
        return Status(tree, name, states, error.paths, interrupted=cut_short)
    states = tuple(
        PatchState(patch, "applied" if number < applied else "pending") for number, patch in enumerate(loaded.patches)
    )
    return Status(tree, name, states, interrupted=cut_short)


def apply(
    tree: Tree,
    *,
    series: str | None = None,
    through: str | None = None,
    root: Path = PATCHES,
) -> Status:
    """Applies a series up to and including the patch `through` (default: all of it), or nothing.

    A release that needs no series is left as it is. What is applied already stays so.

    Args:
        tree, series, root: see `status`.
        through: name of the last patch to apply.

    Raises:
        UnsupportedVersionError: the tree's version has no series, or `series` is not its version.
        ModifiedTreeError: a file is not as released.
        ReadOnlyTreeError, BusyTreeError, SeriesError, PatchError: see there.
    """
    name = _choose(tree, series, root)
    if name is None:
        return status(tree, series=series, root=root)
    loaded = Series.load(name, root)
    goal = len(loaded.patches) if through is None else loaded.index(through) + 1
    _move(tree, loaded, lambda now: max(now, goal))
    return status(tree, series=series, root=root)


def revert(tree: Tree, *, series: str | None = None, through: str | None = None, root: Path = PATCHES) -> Status:
    """Reverts the last patches of a series back to and including `through` (default: all of them), or nothing.

    Args and errors: see `apply`.
    """
    name = _choose(tree, series, root)
    if name is None:
        return status(tree, series=series, root=root)
    loaded = Series.load(name, root)
    goal = 0 if through is None else loaded.index(through)
    _move(tree, loaded, lambda now: min(now, goal))
    return status(tree, series=series, root=root)


def _choose(tree: Tree, series: str | None, root: Path) -> str | None:
    """The version whose series fits the tree; None if the release needs none.

    Raises:
        UnsupportedVersionError: see `status`.
    """
    available = Series.available(root)
    if series is not None and series not in available:
        Series.load(series, root)  # says which there are
    if tree.version is None:
        if series is None:
            raise UnsupportedVersionError(
                f"{tree.root} does not say its version: name the series (one of {', '.join(available)})"
            )
        return series
    if series is not None and series != tree.version:
        raise UnsupportedVersionError(f"series {series} is not for {tree.root}, which is vLLM {tree.version}")
    if tree.version in available:
        return tree.version
    unpatched = load_ledger(root)["unpatched"]
    minor = re.fullmatch(r"(\d+\.\d+)\.\d+", tree.version)
    if minor and minor[1] in unpatched:
        return None
    raise UnsupportedVersionError(
        f"vLLM {tree.version} at {tree.root} is not supported: there are series for {', '.join(available)}, "
        f"and {', '.join(unpatched)} need none"
    )


def _series_to_probe(version: str, root: Path) -> Series:
    older = [name for name in Series.available(root) if version_key(name) < version_key(version)]
    if not older:
        raise UnsupportedVersionError(f"there is no series older than vLLM {version}")
    return Series.load(older[-1], root)


def _stage(tree: Tree, series: Series) -> int:
    """How many patches the tree has.

    Raises:
        ModifiedTreeError: its files match no stage; it names those that differ from the nearest one.
    """
    found = {path: blob_id(tree.read(path)) for path in series.stages[0]}
    for number, stage in reversed(list(enumerate(series.stages))):
        if stage == found:
            return number
    nearest = min(series.stages, key=lambda stage: sum(stage[path] != found[path] for path in stage))
    differing = tuple(path for path in sorted(found) if found[path] != nearest[path])
    raise ModifiedTreeError(
        f"{tree.root} is not vLLM {series.version} as released, nor as this series leaves it: "
        f"{', '.join(differing)} differ{'s' * (len(differing) == 1)}; nothing was changed",
        differing,
    )


def _move(tree: Tree, series: Series, goal_from: Callable[[int], int]) -> None:
    """Takes the tree to the stage that `goal_from` makes of its present one."""
    with transaction.locked(tree.root):
        transaction.recover(tree.root)
        before = _stage(tree, series)
        goal = goal_from(before)
        if goal == before:
            if before == 0:
                _Originals(tree.root).discard()  # of an apply that was killed before its journal
            return
        contents = {path: tree.read(path) for path in series.stages[0]}
        if goal > before:
            diffs = [diff for patch in series.patches[before:goal] for diff in patch.diffs]
        else:
            diffs = [diff.reversed() for patch in reversed(series.patches[goal:before]) for diff in patch.diffs]
        for diff in diffs:
            contents[diff.path] = diff.apply(contents[diff.path])

        released = series.stages[0]
        keep = _Originals(tree.root)
        changes: list[Change] = []
        stage = before
        try:
            for path in dict.fromkeys(diff.path for diff in diffs):
                if series.stages[before][path] == released[path]:
                    keep.save(path)
                is_original = series.stages[goal][path] == released[path]
                changes.append(Change(path, contents[path], keep.file(path) if is_original else None))
                changes.extend(keep.bytecode_changes(path, is_original))
            transaction.replace_files(tree.root, changes)
            stage = goal
        finally:
            if stage == 0:
                keep.discard()


class _Originals:
    """The released copies of changed files and of their byte-code, kept while any patch is applied.

    Byte-code names its source's time and size. A stale one must not survive a change of the source, and the one that
    was installed is valid again only beside a source with the time it had.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / STATE / "released"

    def file(self, path: str) -> Path:
        return self.folder / path

    def save(self, path: str) -> None:
        # Not inside the transaction: a copy too many is harmless, and is replaced by the next one.
        with transaction.naming_errors(self.root):
            for name in (path, *self._bytecode(self.root, path)):
                if (self.root / name).exists():
                    self.file(name).parent.mkdir(parents=True, exist_ok=True)
                    transaction.copy(self.root / name, self.file(name))

    def bytecode_changes(self, path: str, is_original: bool) -> list[Change]:
        kept = self._bytecode(self.folder, path) if is_original else []
        stale = [name for name in self._bytecode(self.root, path) if name not in kept]
        restored = [Change(name, self.file(name).read_bytes(), self.file(name)) for name in kept]
        return restored + [Change(name, None) for name in stale]

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        transaction.clear(self.root)

    @staticmethod
    def _bytecode(root: Path, path: str) -> list[str]:
        source = root / path
        files = (source.parent / "__pycache__").glob(f"{source.stem}.*.pyc")
        return sorted(file.relative_to(root).as_posix() for file in files)
