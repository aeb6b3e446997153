# SPDX-License-Identifier: Apache-2.0
"""Does a tree's code have what a patch brings? Found in the code itself, whatever release it says it is.

Each probe looks for the structure that matters, not for one spelling of it: upstream's own mending of the same fault
has had three names for one flag in three releases. A probe is false on the release that its patch is made for, and
true once the patch is applied; the tests hold it to both, and to what the ledger says of later releases.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable

from .errors import SeriesError
from .tree import Tree

_ATTENTION = "vllm/model_executor/layers/attention/mla_attention.py"
_LINEAR = "vllm/model_executor/layers/linear.py"
_PLATFORM = "vllm/platforms/cpu.py"
_PREFILL = "vllm/v1/attention/backends/mla/prefill"
_REGISTRY = "vllm/v1/attention/backends/registry.py"
_ROTARY = "vllm/model_executor/layers/rotary_embedding/base.py"

Probe = Callable[["_Code"], bool]
_PROBES: dict[str, Probe] = {}


def carries(tree: Tree, probe: str) -> bool:
    """Whether the tree's code has the effect that the probe `probe` looks for.

    Raises:
        SeriesError: there is no such probe.
    """
    if probe not in _PROBES:
        raise SeriesError(f"no probe '{probe}' (there are: {', '.join(sorted(_PROBES))})")
    return _PROBES[probe](_Code(tree))


def _probe(function: Probe) -> Probe:
    _PROBES[function.__name__] = function
    return function


class _Code:
    """Questions to the syntax trees of a vLLM tree's files; a missing file, class or function answers with nothing."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def nodes(self, path: str, *names: str) -> list[ast.AST]:
        """All nodes below the class or function that `names` leads to (`"Class", "method"`), or of the whole file."""
        content = self.tree.read(path)
        scope: ast.AST | None = None if content is None else _parsed(content)
        for name in names:
            inside = ast.walk(scope) if scope else ()
            scope = next((node for node in inside if getattr(node, "name", None) == name), None)
        return list(ast.walk(scope)) if scope else []

    def members(self, path: str, enum: str) -> set[str]:
        """Names that are assigned to in a class."""
        return {target.id for target in _targets(self.nodes(path, enum)) if isinstance(target, ast.Name)}

    def calls(self, path: str, *names: str) -> set[str]:
        """Dotted names of everything called below a class or function."""
        return {ast.unparse(node.func) for node in self.nodes(path, *names) if isinstance(node, ast.Call)}

    def attributes(self, path: str, *names: str) -> set[str]:
        """Names of all attributes read or written below a class or function."""
        return {node.attr for node in self.nodes(path, *names) if isinstance(node, ast.Attribute)}


@functools.lru_cache(maxsize=32)
def _parsed(content: bytes) -> ast.AST:
    return ast.parse(content)


def _targets(nodes: list[ast.AST]) -> list[ast.expr]:
    """What plain assignments among the nodes assign to."""
    return [target for node in nodes if isinstance(node, ast.Assign) for target in node.targets]


def _ends_with(names: set[str], suffix: str) -> bool:
    return any(name == suffix or name.endswith(f".{suffix}") for name in names)


@_probe
def cpu_prefill_member(code: _Code) -> bool:
    """The registry of MLA prefill backends has one for CPU."""
    return any("CPU" in name for name in code.members(f"{_PREFILL}/registry.py", "MLAPrefillBackendEnum"))


@_probe
def cpu_prefill_selected(code: _Code) -> bool:
    """The selector of MLA prefill backends knows CPU."""
    return _ends_with(code.calls(f"{_PREFILL}/selector.py", "get_mla_prefill_backend"), "is_cpu")


@_probe
def raw_weight_kept(code: _Code) -> bool:
    """A flag that MLAAttention sets on kv_b_proj is read where the CPU packs linear weights."""
    method = code.nodes(_LINEAR, "UnquantizedLinearMethod", "process_weights_after_loading")
    getattrs = [node for node in method if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr"]
    read = {node.args[1].value for node in getattrs if isinstance(node.args[1], ast.Constant)}
    targets = _targets(code.nodes(_ATTENTION, "MLAAttention", "__init__"))
    flags = [target for target in targets if isinstance(target, ast.Attribute)]
    return bool(read & {flag.attr for flag in flags if "kv_b_proj" in ast.unparse(flag.value)})


@_probe
def reference_prefill(code: _Code) -> bool:
    """CPU_MLA's prefill computes: in its impl, or in a prefill backend for CPU that returns something."""
    if code.nodes("vllm/v1/attention/backends/mla/cpu_mla.py", "CPUMLAImpl", "forward_mha"):
        return True
    paths = [f"{_PREFILL}/{file.name}" for file in (code.tree.root / _PREFILL).glob("*cpu*.py")]
    return any(isinstance(node, ast.Return) for path in paths for node in code.nodes(path, "run_prefill_new_tokens"))


@_probe
def impl_owns_projections(code: _Code) -> bool:
    """MLAAttention lets the impl prepare its weights, and has a branch for an impl with packed ones."""
    prepares = code.calls(_ATTENTION, "MLAAttention", "process_weights_after_loading")
    decodes = code.attributes(_ATTENTION, "MLAAttention", "forward_impl")
    return "self.impl.process_weights_after_loading" in prepares and "is_amx_bmm_enabled" in decodes


@_probe
def impl_projection_hooks(code: _Code) -> bool:
    """That branch calls the impl, not one particular operator."""
    return "self.impl.absorb_q" in code.calls(_ATTENTION, "MLAAttention", "forward_impl")


@_probe
def amx_mla_member(code: _Code) -> bool:
    """The registry and the CPU platform know AMX_MLA."""
    return "AMX_MLA" in code.members(_REGISTRY, "AttentionBackendEnum") and "AMX_MLA" in code.attributes(
        _PLATFORM, "CpuPlatform"
    )


@_probe
def platform_asks_backend(code: _Code) -> bool:
    """The CPU platform asks the backend class what it supports, instead of testing for AMX itself."""
    asked = code.calls(_PLATFORM, "CpuPlatform", "check_and_update_config")
    return _ends_with(asked, "supports_prefix_caching") and _ends_with(asked, "supports_chunked_prefill")


@_probe
def custom_mla(code: _Code) -> bool:
    """The CPU platform honours CUSTOM for MLA."""
    return "CUSTOM" in code.attributes(_PLATFORM, "CpuPlatform")


@_probe
def amx_permission(code: _Code) -> bool:
    """AMX_MLA asks the operating system for AMX before it says that it can run."""
    return _ends_with(code.calls("vllm/v1/attention/backends/mla/amx_mla.py"), "_init_amx")


@_probe
def rotary_views(code: _Code) -> bool:
    """RotaryEmbedding.forward_cpu folds heads for the CPU operator, or the operator counts them itself."""
    folds = code.calls(_ROTARY, "RotaryEmbedding", "forward_cpu")
    if any(_ends_with(folds, name) for name in ("reshape", "view", "flatten")):
        return True
    operator = code.tree.read("csrc/cpu/pos_encoding.cpp") or b""
    return b"query.dim()" in operator
