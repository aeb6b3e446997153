# SPDX-License-Identifier: Apache-2.0
"""Unified diffs as `git format-patch --full-index` writes them: parsing, applying, reverting.

Matching is exact. A hunk applies at the line it names, with every context and removed line equal to the byte, and
the Git object names in the `index` line say what the whole file is before and after. There is no fuzz and no
offset: a file that differs anywhere is not the file that the patch was written for.

Only what the series need is understood: text changes and new files. Renames, deletions, mode changes and binary
patches are refused when a patch is read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import DiffError

ABSENT = "0" * 40  # the object name that Git gives to a file that does not exist

_FILE = re.compile(rb"^diff --git a/(.+) b/(.+)$")
_INDEX = re.compile(rb"^index ([0-9a-f]{40})\.\.([0-9a-f]{40})(?: 100644)?$")
_HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NO_NEWLINE = b"\\ No newline at end of file"
_UNSUPPORTED = (b"rename ", b"copy ", b"old mode ", b"new mode ", b"deleted file", b"GIT binary patch", b"Binary files")


def blob_id(content: bytes | None) -> str:
    """The Git object name of a file's content (40 hex digits); `ABSENT` for None, a file that does not exist."""
    if content is None:
        return ABSENT
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@dataclass(frozen=True)
class Hunk:
    """One run of changed lines. Lines keep their terminator; `start`s are zero-based."""

    old_start: int
    new_start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]

    def reversed(self) -> Hunk:
        return Hunk(self.new_start, self.old_start, self.new, self.old)


@dataclass(frozen=True)
class FileDiff:
    """The change of one file: `path` relative to the tree's root, Git object names before and after, and hunks."""

    path: str
    old_id: str
    new_id: str
    hunks: tuple[Hunk, ...]

    def reversed(self) -> FileDiff:
        return FileDiff(self.path, self.new_id, self.old_id, tuple(hunk.reversed() for hunk in self.hunks))

    def apply(self, content: bytes | None) -> bytes | None:
        """The file's content after the change; None stands for a file that does not exist.

        Raises:
            DiffError: `content` is not the file that the diff was made from, or does not become the one it names.
        """
        if blob_id(content) != self.old_id:
            raise DiffError(f"{self.path}: expected content {self.old_id[:12]}, found {blob_id(content)[:12]}")
        lines = apply_hunks(split_lines(content or b""), self.hunks, self.path)
        result = None if self.new_id == ABSENT and not lines else b"".join(lines)
        if blob_id(result) != self.new_id:
            raise DiffError(f"{self.path}: expected result {self.new_id[:12]}, made {blob_id(result)[:12]}")
        return result


def apply_hunks(lines: Sequence[bytes], hunks: Sequence[Hunk], path: str = "text") -> list[bytes]:
    """The lines after all hunks, each at exactly its place.

    Raises:
        DiffError: a hunk overlaps the one before it, or a line differs from what the hunk expects there.
    """
    result: list[bytes] = []
    done = 0
    for hunk in hunks:
        if hunk.old_start < done:
            raise DiffError(f"{path}: hunk at line {hunk.old_start + 1} overlaps the one before it")
        result.extend(lines[done : hunk.old_start])
        done = hunk.old_start + len(hunk.old)
        found = tuple(lines[hunk.old_start : done])
        if found != hunk.old:
            pairs = enumerate(zip(found, hunk.old, strict=False))  # `found` is shorter at the end of the file
            where = next((i for i, (is_, expected) in pairs if is_ != expected), len(found))
            raise DiffError(f"{path}: line {hunk.old_start + where + 1} is not what the patch expects there")
        if len(result) != hunk.new_start:
            raise DiffError(f"{path}: hunk at line {hunk.old_start + 1} lands on line {len(result) + 1}")
        result.extend(hunk.new)
    result.extend(lines[done:])
    return result


def parse(text: bytes) -> list[FileDiff]:
    """All file changes in a patch; text before, between and after them (a commit message, a diffstat) is skipped.

    Raises:
        DiffError: the patch is malformed, or uses something that the series must not (see the module's text).
    """
    lines = split_lines(text)
    diffs: list[FileDiff] = []
    at = 0
    while at < len(lines):
        header = _FILE.match(lines[at].rstrip(b"\n"))
        at += 1
        if header is None:
            continue
        path = header[2].decode()
        if header[1] != header[2]:
            raise DiffError(f"{path}: renames are not supported")
        if path.startswith("/") or ".." in path.split("/"):
            raise DiffError(f"{path}: a patch may only name files inside the tree")
        ids: tuple[str, str] | None = None
        while at < len(lines) and not lines[at].startswith((b"@@ ", b"diff --git ")):
            line = lines[at].rstrip(b"\n")
            if line.startswith(_UNSUPPORTED):
                raise DiffError(f"{path}: '{line.decode()}' is not supported")
            if index := _INDEX.match(line):
                ids = (index[1].decode(), index[2].decode())
            at += 1
        if ids is None:
            raise DiffError(f"{path}: no 'index' line with full object names (git format-patch --full-index)")
        hunks: list[Hunk] = []
        while at < len(lines) and (hunk_header := _HUNK.match(lines[at])):
            hunk, at = _parse_hunk(lines, at + 1, hunk_header, path)
            hunks.append(hunk)
        if not hunks:
            raise DiffError(f"{path}: no hunks")
        diffs.append(FileDiff(path, *ids, tuple(hunks)))
    return diffs


def _parse_hunk(lines: list[bytes], at: int, header: re.Match[bytes], path: str) -> tuple[Hunk, int]:
    old_start, new_start = int(header[1]), int(header[3])
    old_count, new_count = (1 if count is None else int(count) for count in (header[2], header[4]))
    old: list[bytes] = []
    new: list[bytes] = []
    while len(old) < old_count or len(new) < new_count:
        if at == len(lines):
            raise DiffError(f"{path}: the hunk at line {old_start} is cut short")
        kind, line = lines[at][:1], lines[at][1:]
        at += 1
        # A line without a terminator, in a patch, is followed by a marker; elsewhere it is the patch itself cut short.
        if at < len(lines) and lines[at].startswith(_NO_NEWLINE):
            line = line[:-1]
            at += 1
        if kind not in (b" ", b"-", b"+"):
            raise DiffError(f"{path}: the hunk at line {old_start} contains '{kind.decode(errors='replace')}'")
        if kind != b"+":
            old.append(line)
        if kind != b"-":
            new.append(line)
    if len(old) != old_count or len(new) != new_count:
        raise DiffError(f"{path}: the hunk at line {old_start} has more lines than it says")
    # An empty side names the line before it, not its first.
    start = old_start - 1 if old_count else old_start, new_start - 1 if new_count else new_start
    return Hunk(*start, tuple(old), tuple(new)), at


def split_lines(content: bytes) -> list[bytes]:
    """Lines with their terminators. Only a line feed ends a line, as in Git: a form feed or a lone CR does not."""
    lines = content.split(b"\n")
    return [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
