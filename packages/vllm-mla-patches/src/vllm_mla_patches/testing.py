# SPDX-License-Identifier: Apache-2.0
"""Patches made in memory, for tests: the inverse of `diff.parse`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from .diff import blob_id, split_lines


def format_patch(
    subject: str, changes: Mapping[str, tuple[str | bytes | None, str | bytes]], context: int = 3
) -> bytes:
    """A patch in `git format-patch --full-index` form that takes each path from its first content to its second.

    Args:
        subject: the commit's subject.
        changes: path -> (content before, or None for a new file; content after). They must differ.
        context: unchanged lines around each change.
    """
    head = (
        f"From {'0' * 40} Mon Sep 17 00:00:00 2001\nFrom: A U Thor <author@example.org>\nSubject: [PATCH] {subject}\n"
    )
    body = b"".join(_format_file(path, _bytes(old), _bytes(new), context) for path, (old, new) in changes.items())
    return head.encode() + b"\n---\n\n" + body


def _format_file(path: str, old: bytes | None, new: bytes | None, context: int) -> bytes:
    before, after = split_lines(old or b""), split_lines(new or b"")
    new_file = "new file mode 100644\n" if old is None else ""
    text = f"diff --git a/{path} b/{path}\n{new_file}index {blob_id(old)}..{blob_id(new)}"
    text += "\n--- /dev/null\n" if old is None else f" 100644\n--- a/{path}\n"
    out = [text.encode() + f"+++ b/{path}\n".encode()]
    for group in difflib.SequenceMatcher(None, before, after, autojunk=False).get_grouped_opcodes(context):
        old_range, new_range = _range(group[0][1], group[-1][2]), _range(group[0][3], group[-1][4])
        out.append(f"@@ -{old_range} +{new_range} @@\n".encode())
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                out.extend(_line(b" ", line) for line in before[i1:i2])
            else:
                out.extend(_line(b"-", line) for line in before[i1:i2])
                out.extend(_line(b"+", line) for line in after[j1:j2])
    return b"".join(out)


def _line(kind: bytes, line: bytes) -> bytes:
    return kind + line if line.endswith(b"\n") else kind + line + b"\n\\ No newline at end of file\n"


def _range(start: int, stop: int) -> str:
    # An empty range names the line before it.
    return f"{start + 1 if stop > start else start},{stop - start}"


def _bytes(content: str | bytes | None) -> bytes | None:
    return content.encode() if isinstance(content, str) else content
