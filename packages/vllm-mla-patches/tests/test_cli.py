# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints, and its exit status."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from vllm_mla_patches import cli

if TYPE_CHECKING:
    from conftest import World

Command = Callable[..., int]


@pytest.fixture
def command(world: World, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs a command on the small tree and its series."""
    for name in ("apply", "revert", "status", "export"):
        monkeypatch.setattr(cli, name, functools.partial(getattr(cli, name), root=world.patches))
    return lambda name, *arguments: cli.main([name, "--tree", str(world.tree.root), *map(str, arguments)])


def test_from_released_to_patched_and_back(command: Command, world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("status") == 0
    assert "Series 9.8.7: 0 of 3 patches applied" in capsys.readouterr().out
    assert command("apply", "--through", "second") == 0
    assert capsys.readouterr().out.splitlines() == [
        f"vLLM 9.8.7 at {world.tree.root}",
        "Series 9.8.7: 2 of 3 patches applied",
        "  applied  first   Make first",
        "  applied  second  Make second",
        "  pending  third   Make third",
    ]
    assert command("apply") == command("revert") == 0
    assert world.contents() == world.after(0)


def test_status_as_json(command: Command, world: World, capsys: pytest.CaptureFixture[str]) -> None:
    command("apply", "--through", "first")
    capsys.readouterr()
    assert command("status", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "root": str(world.tree.root),
        "version": "9.8.7",
        "series": "9.8.7",
        "unpatched": False,
        "interrupted": False,
        "modified": [],
        "patches": [
            {"name": "first", "state": "applied"},
            {"name": "second", "state": "pending"},
            {"name": "third", "state": "pending"},
        ],
    }


def test_a_refusal_is_one_line_on_stderr(command: Command, world: World, capsys: pytest.CaptureFixture[str]) -> None:
    (world.tree.root / "vllm/a.py").write_text("mine\n")
    for name in ("apply", "revert"):
        assert command(name) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("vllm-mla-patches: ") and captured.err.count("\n") == 1
        assert "vllm/a.py differs; nothing was changed" in captured.err
    assert command("status") == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        "Modified: not as released, nor as series 9.8.7 leaves it. Differing files:",
        "  vllm/a.py",
    ]


def test_export(command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("export", tmp_path / "out") == 0  # of the tree's own version
    assert [Path(line).name for line in capsys.readouterr().out.splitlines()] == [
        "0001-first.patch",
        "0002-second.patch",
        "0003-third.patch",
    ]
    assert command("export", "--series", "9.8.7", tmp_path / "out") == 1
    assert "is not empty" in capsys.readouterr().err


def test_a_release_that_needs_none(command: Command, world: World, capsys: pytest.CaptureFixture[str]) -> None:
    (world.tree.root / "vllm/_version.py").write_text("__version__ = version = '9.9.1'\n")
    before = world.snapshot()
    for name in ("status", "apply", "revert"):
        assert command(name) == 0
        out = capsys.readouterr().out
        assert "This release needs no patches. Of what series 9.8.7 does:" in out
        assert out.count("lacking") == 3
    assert world.snapshot() == before


def test_termination_unwinds(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    previous = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(cli, "apply", lambda *a, **k: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        command("apply")
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == previous


def test_as_a_module(world: World) -> None:
    """The shipped series, on a tree of a version that has none."""
    done = subprocess.run(
        [sys.executable, "-m", "vllm_mla_patches", "status", "--tree", str(world.tree.root)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "vLLM 9.8.7" in done.stderr and "is not supported: there are series for 0.28.0" in done.stderr
