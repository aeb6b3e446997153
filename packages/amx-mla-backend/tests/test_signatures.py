# SPDX-License-Identifier: Apache-2.0
"""Every method we override, against every supported vLLM's own classes; and every vLLM name we import.

Both sides are read as syntax trees, so a version needs no installation: the folder named by VLLM_SOURCES holds one tree
per version (``<version>/vllm/...``). The installed vLLM is always checked.
"""

from __future__ import annotations

import ast
import functools
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

OURS = Path(__file__).parents[1] / "src" / "amx_mla_backend"

MLA = "model_executor/layers/attention/mla_attention.py"
BASES = {
    ("backend.py", "AMXMLABackend"): [(MLA, "MLACommonBackend"), ("v1/attention/backend.py", "AttentionBackend")],
    ("metadata.py", "AMXMLAMetadataBuilder"): [
        (MLA, "MLACommonMetadataBuilder"),
        ("v1/attention/backend.py", "AttentionMetadataBuilder"),
    ],
    ("impl.py", "AMXMLAImpl"): [
        (MLA, "MLACommonImpl"),
        (MLA, "MLACommonBaseImpl"),
        ("v1/attention/backend.py", "MLAAttentionImpl"),
        ("v1/attention/backend.py", "AttentionImplBase"),
    ],
    ("attention.py", "AMXMLAAttention"): [(MLA, "MLAAttention")],
    ("attention.py", "AMXMLAWrapper"): [("model_executor/layers/mla.py", "MultiHeadLatentAttentionWrapper")],
    ("prefill.py", "CPUNativeMLAPrefillBackend"): [("v1/attention/backends/mla/prefill/base.py", "MLAPrefillBackend")],
    ("platform.py", "LatentAttentionPlatform"): [
        ("platforms/cpu.py", "CpuPlatform"),
        ("platforms/interface.py", "Platform"),
    ],
}
"""Our class -> the vLLM classes it overrides methods of, nearest first."""

OWN = {
    "impl.py": {"absorb_q", "project_v", "decode", "prefill", "_prefill_run", "_absorbed"},
    "metadata.py": {"_decode_part", "_prefill_runs"},
    "backend.py": {"get_unavailable_reason"},
    "attention.py": {"adopt"},
}
"""Methods that are ours alone; any other method must override one of vLLM's, in every version that has it."""

ABSENT = {("0.28.0", "process_weights_after_loading")}
"""Overrides without a counterpart in a version's stock source: (version, method). The 0.28.0 patches add it."""


def trees() -> list[pytest.param]:
    found = []
    if (spec := find_spec("vllm")) and spec.origin:
        found.append(pytest.param(Path(spec.origin).parent, id="installed"))
    folder = os.environ.get("VLLM_SOURCES")
    if folder:
        for path in sorted(Path(folder).glob("[0-9]*.[0-9]*.[0-9]*/vllm")):
            found.append(pytest.param(path, id=path.parent.name))
    return found


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def methods(path: Path, name: str) -> dict[str, ast.FunctionDef]:
    for node in parse(path).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    raise AssertionError(f"{path} has no class {name}")


def kind(function: ast.FunctionDef) -> str:
    names = {d.id for d in function.decorator_list if isinstance(d, ast.Name)}
    return next((k for k in ("staticmethod", "classmethod", "property") if k in names), "method")


def problems(ours: ast.FunctionDef, base: ast.FunctionDef) -> list[str]:
    """Calls that the base's signature allows and ours does not."""
    found = []
    if kind(ours) != kind(base):
        found.append(f"is a {kind(ours)}, the base has a {kind(base)}")
    skip = 0 if kind(base) == "staticmethod" else 1
    a, b = ours.args, base.args
    own, theirs = [p.arg for p in a.posonlyargs + a.args][skip:], [p.arg for p in b.posonlyargs + b.args][skip:]
    own_required = own[: len(own) - len(a.defaults)]
    theirs_required = theirs[: len(theirs) - len(b.defaults)]
    for index, name in enumerate(theirs):
        if index < len(own):
            if own[index] != name:
                found.append(f"argument {index} is {own[index]!r}, the base has {name!r}")
            elif name in own_required and name not in theirs_required:
                found.append(f"{name!r} is required, optional in the base")
        elif a.kwarg is None:
            found.append(f"{name!r} is not accepted")
    for name in own_required:
        if name not in theirs and not (b.kwarg or b.vararg):
            found.append(f"{name!r} is required, the base does not have it")
    keywords = {p.arg for p in a.kwonlyargs} | set(own)
    for parameter in b.kwonlyargs:
        if parameter.arg not in keywords and a.kwarg is None:
            found.append(f"keyword {parameter.arg!r} is not accepted")
    if b.kwarg and not a.kwarg:
        found.append("the base accepts further keywords")
    return found


@pytest.mark.parametrize("tree", trees())
@pytest.mark.parametrize("ours", BASES, ids=lambda key: key[1])
def test_overrides_accept_every_call(tree: Path, ours: tuple[str, str]) -> None:
    version = tree.parent.name
    chain = [methods(tree / path, name) for path, name in BASES[ours]]
    own = methods(OURS / ours[0], ours[1])
    checked = 0
    for name, function in own.items():
        base = next((table[name] for table in chain if name in table), None)
        if base is None:
            assert name in OWN.get(ours[0], ()) or (version, name) in ABSENT, f"{ours[1]}.{name} overrides nothing"
            continue
        found = problems(function, base)
        assert not found, f"{ours[1]}.{name}: " + "; ".join(found)
        checked += 1
    assert checked, f"{ours[1]} overrides nothing"


@pytest.mark.parametrize("tree", trees())
def test_imported_names_exist(tree: Path) -> None:
    missing = []
    for file in sorted(OURS.glob("*.py")):
        for node in ast.walk(parse(file)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                for alias in node.names:
                    if not defines(tree, node.module, alias.name):
                        missing.append(f"{file.name}: from {node.module} import {alias.name}")
    assert not missing


def defines(tree: Path, module: str, name: str) -> bool:
    """Whether the module of this tree binds the name at its top level, or has it as a submodule."""
    path = tree.joinpath(*module.split(".")[1:])
    if (path / f"{name}.py").exists():
        return True
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not path.exists():
        return False
    # current_platform, and the names vllm.config gathers, are bound by module __getattr__ or star imports.
    return name in {n.id for n in ast.walk(parse(path)) if isinstance(n, ast.Name)} | {
        alias.asname or alias.name for n in ast.walk(parse(path)) if isinstance(n, ast.ImportFrom) for alias in n.names
    } | {n.name for n in parse(path).body if isinstance(n, (ast.ClassDef, ast.FunctionDef))}


def test_a_wrong_override_is_noticed() -> None:
    base = ast.parse("def f(self, a, b=1): ...").body[0]
    for text, expected in (
        ("def f(self, a): ...", "'b' is not accepted"),
        ("def f(self, a, b): ...", "'b' is required"),
        ("def f(self, c, b=1): ...", "argument 0 is 'c'"),
        ("def f(self, a, **rest): ...", None),
    ):
        found = problems(ast.parse(text).body[0], base)  # type: ignore[arg-type]
        assert (expected is None and not found) or any(expected in item for item in found), (text, found)
