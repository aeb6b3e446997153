# SPDX-License-Identifier: Apache-2.0
"""Changing several files at once: all of them, or none, whatever interrupts it.

New contents are written aside and renamed into place, never written into a file that something else may read or,
hard-linked, share (package managers link one cached copy into many environments). Before the first rename a journal
says where the copies of the old contents lie. Removing the journal is the commit: whoever finds one, the failing
process itself or the next one after a kill or a power cut, puts the old contents back.

Everything lies in one folder in the tree's root, on the same file system, and is gone when nothing is applied.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import BusyTreeError, PatchError, ReadOnlyTreeError

STATE = ".vllm-mla-patches"
_FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)


@dataclass(frozen=True)
class Change:
    """A file's new content, or None to remove it.

    It gets permissions and owner of the file it replaces, or, if `like` exists, those and the times of `like`.
    """

    path: str
    content: bytes | None
    like: Path | None = None


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Holds the tree against other processes that change it through this module. The lock dies with its holder.

    Raises:
        BusyTreeError: another process holds it.
    """
    handle = os.open(root, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyTreeError(f"another process is changing {root}: wait for it to end") from None
        yield
    finally:
        os.close(handle)


def interrupted(root: Path) -> bool:
    """Whether a change was cut short and waits for `recover`."""
    return (root / STATE / "journal.json").exists()


def recover(root: Path) -> bool:
    """Puts back what an interrupted change had touched; returns whether there was one. Call it under `locked`."""
    with naming_errors(root):
        if not interrupted(root):
            clear(root)
            return False
        state = root / STATE
        journal = json.loads((state / "journal.json").read_text())
        for path, number in journal.items():
            if number is None:
                (root / path).unlink(missing_ok=True)
            else:
                # Copied, then renamed: the copy must survive until the journal is gone.
                copy(state / "before" / number, state / "restore")
                os.replace(state / "restore", root / path)
        _sync_folders(root, journal)
        (state / "journal.json").unlink()
        clear(root)
        return True


def replace_files(root: Path, changes: Sequence[Change]) -> None:
    """Makes all changes, or none. Call it under `locked`, and after `recover`.

    Raises:
        ReadOnlyTreeError: the tree cannot be written.
        PatchError: the operating system refused something else (no space, for one).
    """
    state = root / STATE
    with naming_errors(root):
        try:
            for folder in (state / "before", state / "after"):
                folder.mkdir(parents=True, exist_ok=True)
            journal: dict[str, str | None] = {}
            for number, change in enumerate(changes):
                target = root / change.path
                # Renaming needs the folder, not the file, to be writable; a file set read-only is a wish all the same.
                if not os.access(target if target.exists() else target.parent, os.W_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))
                journal[change.path] = str(number) if target.exists() else None
                if target.exists():
                    copy(target, state / "before" / str(number))
                if change.content is not None:
                    _write(state / "after" / str(number), change.content, target, change.like)
            for folder in (state / "before", state / "after"):
                _sync(folder)
            _write_synced(state / "journal.new", json.dumps(journal, indent=1).encode())
            os.replace(state / "journal.new", state / "journal.json")
            _sync(state)
            for number, change in enumerate(changes):
                if change.content is None:
                    (root / change.path).unlink(missing_ok=True)
                else:
                    os.replace(state / "after" / str(number), root / change.path)
            _sync_folders(root, journal)
            (state / "journal.json").unlink()  # the commit
        except BaseException:  # also a keyboard interrupt
            with contextlib.suppress(OSError, PatchError):
                recover(root)
            raise
        clear(root)


def clear(root: Path) -> None:
    """Removes what a finished or never begun change left in the state folder, and the folder once it is empty.

    Call it under `locked`, and never while a journal exists.
    """
    state = root / STATE
    if not state.is_dir():
        return
    for name in ("before", "after"):
        shutil.rmtree(state / name, ignore_errors=True)
    for name in ("journal.new", "restore"):
        (state / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        state.rmdir()


def copy(source: Path, target: Path) -> None:
    """Copies a file with times, permissions and, where the system lets us, its owner."""
    shutil.copy2(source, target)
    _copy_owner(source, target)
    _sync(target)


def _write(path: Path, content: bytes, target: Path, like: Path | None) -> None:
    _write_synced(path, content)
    if like is not None and like.exists():
        shutil.copystat(like, path)
        _copy_owner(like, path)
    elif target.exists():
        shutil.copymode(target, path)
        _copy_owner(target, path)


def _copy_owner(source: Path, target: Path) -> None:
    owner = source.stat()
    with contextlib.suppress(PermissionError):  # only root may give files away, and nobody else has to
        os.chown(target, owner.st_uid, owner.st_gid)


def _write_synced(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync_folders(root: Path, paths: dict[str, str | None]) -> None:
    for folder in {(root / path).parent for path in paths}:
        if folder.is_dir():
            _sync(folder)


@contextlib.contextmanager
def naming_errors(root: Path) -> Iterator[None]:
    """Operating system errors as refusals that say what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in _FORBIDDEN:
            raise ReadOnlyTreeError(
                f"cannot write {error.filename or root}: {error.strerror}; run this as the owner of a writable vLLM"
            ) from error
        raise PatchError(f"cannot change {root}: {error}") from error
