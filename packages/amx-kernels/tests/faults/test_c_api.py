# SPDX-License-Identifier: Apache-2.0
"""Every C entry point survives null, negative, huge and misaligned arguments with a status, never a crash."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import capi
import numpy as np
import pytest

HERE = Path(__file__).parent
HEADERS = HERE.parents[1] / "include" / "amx_kernels"


def entry_points() -> set[str]:
    text = "".join((HEADERS / name).read_text() for name in ("amx_kernels.h", "isa.h"))
    return set(re.findall(r"^AMXK_API [^;(]*?\b(amxk_\w+)\(", text, re.MULTILINE))


def test_every_entry_point_has_a_row() -> None:
    declared = entry_points()
    assert declared == set(capi.SIGNATURES)
    without_arguments = {name for name, (_, arguments) in capi.SIGNATURES.items() if not arguments}
    assert declared - without_arguments == {row().function for row in capi.CALLS.values()}


@pytest.mark.parametrize("row", capi.CALLS)
def test_wrong_arguments_give_a_status(row: str) -> None:
    """In a child, so that a crash is this row's failure; its last line then names the call."""
    child = subprocess.run(
        [sys.executable, str(HERE / "abuse_child.py"), row],
        capture_output=True, text=True, timeout=120, check=False, cwd=HERE,
        env={**capi.child_environment(), "PYTHONPATH": ":".join(p for p in sys.path if p)},
    )  # fmt: skip
    failures = [line for line in child.stdout.splitlines() if line.startswith("FAILED")]
    last = child.stdout.splitlines()[-1:]
    assert child.returncode == 0, f"exit {child.returncode} in {last}: {failures[:5]} {child.stderr[-2000:]}"
    assert int(last[0].split()[0]) > 0, "no argument of this row was spoiled"


def test_refused_calls_touch_no_output() -> None:
    """Arguments are checked completely before any data is touched."""
    for row in (
        "bmm",
        "attention",
        "prefill_attention",
        "concat_and_cache_mla",
        "plan_attention",
        "convert_weight_packed",
    ):
        case = capi.CALLS[row]()
        names = {"concat_and_cache_mla": ("kv_cache",)}.get(row, ("out", "lse", "packed", "plan"))
        written = [case.arguments[n].keep for n in names if case.arguments.get(n) is not None]
        assert written
        for array in written:
            array[...] = np.array(7, array.dtype)
        for what, replaced in capi.mutations(case):
            assert case.call(**replaced) == capi.INVALID, what
            for array in written:
                assert (array == np.array(7, array.dtype)).all(), f"{row}: {what} wrote to an output and then failed"


@pytest.mark.parametrize("row", ["bmm", "convert_weight_packed"])
def test_an_empty_tensor_with_a_huge_dimension_is_nothing_to_do(row: str) -> None:
    """2^50 matrices without a column: every size fits an address space, no loop may run over them."""
    case = capi.CALLS[row]()
    batch, names = 2**50, {"bmm": ("out", "mat1", "mat2"), "convert_weight_packed": ("packed", "weight")}[row]
    for name in names:
        t = case.arguments[name]
        t.sizes[0], t.strides[0] = batch, 0
        columns = {"out": 2, "mat2": 1, "packed": 1, "weight": 1}.get(name)
        if columns is not None:
            t.sizes[columns] = 0
    assert case.call(**({"scale": None} if row == "bmm" else {})) in (capi.OK, capi.INVALID)
