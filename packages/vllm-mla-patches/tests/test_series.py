# SPDX-License-Identifier: Apache-2.0
"""The shipped series and their ledger; and that a disagreement anywhere is noticed."""

from __future__ import annotations

import re
from collections.abc import Callable
from email import message_from_bytes, policy
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from vllm_mla_patches import Patch, PatchError, Series, SeriesError, export, load_ledger
from vllm_mla_patches.probes import _PROBES
from vllm_mla_patches.series import PATCHES

if TYPE_CHECKING:
    from conftest import World

SHIPPED = Series.available()
PATCHES_SHIPPED = [(version, patch) for version in SHIPPED for patch in Series.load(version).patches]
each_patch = pytest.mark.parametrize(
    ("version", "patch"), [pytest.param(v, p, id=f"{v}-{p.name}") for v, p in PATCHES_SHIPPED]
)


def test_series_are_shipped() -> None:
    assert "0.28.0" in SHIPPED


@pytest.mark.parametrize("version", SHIPPED)
def test_series_files_and_ledger_agree(version: str) -> None:
    series = Series.load(version)
    assert len(series.stages) == len(series.patches) + 1
    assert set(load_ledger()["series"]) == set(SHIPPED)


@each_patch
def test_each_patch_is_justified_and_reads_like_a_commit(version: str, patch: Patch) -> None:
    entry = load_ledger()["series"][version][patch.name]
    assert all(entry[key] for key in ("why", "how", "drop_when")), f"{patch.name}: the ledger leaves something unsaid"
    assert patch.probe in _PROBES
    assert re.fullmatch(r"|\d+\.\d+\.\d+", patch.upstream_since)
    assert not patch.upstream_since or patch.upstream, "what upstream carries has a link"
    text = (PATCHES / version / f"{patch.name}.patch").read_bytes()
    message = message_from_bytes(text, policy=policy.default)
    assert patch.subject.startswith("[CPU]") and len(patch.subject) <= 72
    body = message.get_content().partition("\n---\n")[0]
    assert len(body.split()) >= 30, "a commit message says why"
    assert "Signed-off-by: " in body
    wide = [line for line in body.splitlines() if len(line) > 76 and not line.startswith("Signed-off-by")]
    assert not wide, "longer than Git shows in 80 columns"


@each_patch
def test_added_lines_are_clean(version: str, patch: Patch) -> None:
    for diff in patch.diffs:
        for hunk in diff.hunks:
            for line in set(hunk.new) - set(hunk.old):
                assert line.rstrip() + b"\n" == line or line == b"\n", f"{diff.path}: trailing blanks"
                assert len(line.decode().rstrip("\n")) <= 88, (
                    f"{diff.path}: longer than upstream's 88 columns: {line!r}"
                )


def write(path: str, text: str) -> Callable[[World], None]:
    return lambda world: (world.patches / path.format(world=world)).write_text(text) and None


def edit(path: str, old: str, new: str) -> Callable[[World], None]:
    def change(world: World) -> None:
        file = world.patches / path
        text = file.read_text()
        assert old.format(world=world) in text
        file.write_text(text.replace(old.format(world=world), new.format(world=world)))

    return change


DISAGREEMENTS = {
    "file-gone": (
        lambda world: (world.patches / world.version / "second.patch").unlink(),
        "lists second.patch, which the",
    ),
    "file-unlisted": (write("{world.version}/x.patch", ""), "have x.patch, which .*series does not list"),
    "listed-twice": (write("{world.version}/series", "first.patch\nfirst.patch\n"), "lists a patch twice"),
    "order": (
        write("{world.version}/series", "second.patch\nfirst.patch\nthird.patch\n"),
        "does not continue the patch",
    ),
    "ledger-lacks": (edit("ledger.toml", "third = {world.entry}\n", ""), "series lists third, which ledger"),
    "ledger-names-other": (edit("ledger.toml", "third", "fourth"), "series lists third, which ledger"),
    "ledger-has-more": (edit("ledger.toml", "third =", "x = {world.entry}\nthird ="), r"ledger\.toml have x, which"),
    "ledger-key": (edit("ledger.toml", 'why = "w", ', ""), "lacks or misspells why"),
    "no-change": (write("{world.version}/second.patch", "Subject: nothing\n"), "second.patch changes no file"),
}


@pytest.mark.parametrize(("change", "message"), DISAGREEMENTS.values(), ids=DISAGREEMENTS)
def test_any_disagreement_is_refused(world: World, change: Callable[[World], None], message: str) -> None:
    change(world)
    load_ledger.cache_clear()
    with pytest.raises(SeriesError, match=message):
        _ = Series.load(world.version, world.patches).stages


def test_export_writes_what_git_am_takes(world: World, tmp_path: Path) -> None:
    files = export(world.version, tmp_path / "out", world.patches)
    assert [file.name for file in files] == ["0001-first.patch", "0002-second.patch", "0003-third.patch"]
    assert sorted((tmp_path / "out").iterdir()) == files, "git am out/*.patch takes them in this order"
    with pytest.raises(PatchError, match="is not empty"):
        export(world.version, tmp_path / "out", world.patches)
