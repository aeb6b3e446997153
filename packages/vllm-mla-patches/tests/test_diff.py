# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mla_patches import DiffError
from vllm_mla_patches.diff import ABSENT, apply_hunks, blob_id, parse, split_lines
from vllm_mla_patches.testing import format_patch

# Few different lines, so that hunks meet repeated and empty ones; the last line may lack its terminator.
LINES = st.sampled_from(
    [b"\n", b"x\n", b"y\n", b"-x\n", b"+x\n", b" x\n", b"@@ -1 +1 @@\n", b"\r\n", b"\x0c\n", b"\xff\n"]
)
TEXTS = st.builds(
    lambda lines, tail: b"".join(lines) + tail, st.lists(LINES, max_size=30), st.sampled_from([b"", b"end"])
)


@given(old=TEXTS, new=TEXTS, context=st.integers(0, 3))
def test_a_diff_takes_old_to_new_and_its_reverse_back(old: bytes, new: bytes, context: int) -> None:
    if old == new:
        return
    (diff,) = parse(format_patch("change", {"f.py": (old, new)}, context))
    assert diff.apply(old) == new
    assert diff.reversed().apply(new) == old
    assert diff.reversed().reversed() == diff


@given(old=TEXTS, new=TEXTS, other=TEXTS)
def test_a_diff_applies_to_nothing_but_its_own_text(old: bytes, new: bytes, other: bytes) -> None:
    if old == new or other == old:
        return
    (diff,) = parse(format_patch("change", {"f.py": (old, new)}))
    with pytest.raises(DiffError, match="expected content"):
        diff.apply(other)


@given(st.data(), TEXTS, TEXTS)
def test_hunks_match_every_line_that_they_show(data: st.DataObject, old: bytes, new: bytes) -> None:
    (diff,) = parse(format_patch("change", {"f.py": (old, new + b"z\n")}))
    hunk = data.draw(st.sampled_from(diff.hunks))
    if not hunk.old:
        return
    at = hunk.old_start + data.draw(st.integers(0, len(hunk.old) - 1))
    lines = split_lines(old)
    lines[at] = b"something else\n"
    with pytest.raises(DiffError, match=rf"line {at + 1} is not what the patch expects"):
        apply_hunks(lines, diff.hunks)


def test_a_new_file_appears_and_disappears() -> None:
    (diff,) = parse(format_patch("add", {"f.py": (None, "one\ntwo\n")}))
    assert diff.old_id == ABSENT
    assert diff.apply(None) == b"one\ntwo\n"
    assert diff.reversed().apply(b"one\ntwo\n") is None
    with pytest.raises(DiffError, match="expected content 000000000000"):
        diff.apply(b"")


def test_it_reads_what_git_writes(tmp_path: Path) -> None:
    def git(*arguments: str) -> bytes:
        identity = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
        return subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True).stdout

    versions = {
        "a.py": (b"".join(b"%d\n" % i for i in range(40)), b"".join(b"%d\n" % (i * (i % 15 != 0)) for i in range(38))),
        "b.py": (b"no end", b"no end\nmore"),
        "c.py": (None, b"diff --git a/x b/x\n"),
    }
    git("init", "-q")
    for number in (0, 1):
        for path, contents in versions.items():
            if contents[number] is not None:
                (tmp_path / path).write_bytes(contents[number])
        git("add", "-A")
        git("commit", "-qm", f"Version {number}\n\nA message with a\ndiff that is not one.")
    diffs = parse(git("format-patch", "--stdout", "--full-index", "--no-signature", "-1"))
    assert [diff.path for diff in diffs] == list(versions)
    for diff in diffs:
        old, new = versions[diff.path]
        assert (diff.old_id, diff.new_id) == (blob_id(old), blob_id(new))
        assert diff.apply(old) == new
        assert diff.reversed().apply(new) == old


GOOD = format_patch("p", {"f.py": ("a\nb\nc\n", "a\nB\nc\n")}).decode()


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        pytest.param(GOOD.replace("index ", "index_"), "no 'index' line", id="no-index"),
        pytest.param(
            GOOD.replace("index ", "old mode 100644\nindex "), "'old mode 100644' is not supported", id="mode"
        ),
        pytest.param(GOOD.replace("index ", "rename from x\nindex "), "'rename from x' is not supported", id="rename"),
        pytest.param(GOOD.replace(" b/f.py", " b/g.py"), "renames are not supported", id="two-names"),
        pytest.param(GOOD.replace("f.py", "../f.py"), "inside the tree", id="outside"),
        pytest.param(GOOD.replace("@@ -1,3 +1,3 @@", "@@ -1,4 +1,4 @@"), "cut short", id="short"),
        pytest.param(GOOD.replace("@@ -1,3 +1,3 @@", "@@ -1,2 +1,3 @@"), "more lines than it says", id="long"),
        pytest.param(GOOD.replace("\n-b", "\n*b"), "contains '\\*'", id="kind"),
        pytest.param(GOOD[: GOOD.index("@@")], "no hunks", id="no-hunks"),
    ],
)
def test_a_malformed_patch_is_refused(patch: str, message: str) -> None:
    with pytest.raises(DiffError, match=message):
        parse(patch.encode())
