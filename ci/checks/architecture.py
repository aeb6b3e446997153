# SPDX-License-Identifier: Apache-2.0
"""Who may import whom: backend -> kernels; testing <- everybody's tests; patches stand alone.

Checked on the syntax of every shipped source file, so that a lazy import inside a function counts as well. C++ layers
of amx-kernels: base < simd < tile < ops < capi < bindings; a file includes its own layer or lower ones.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Import name -> our packages it may import besides itself.
ALLOWED = {
    "amx_kernels": set(),
    "vllm_mla_patches": set(),
    "amx_mla_backend": {"amx_kernels"},
    # The emulator, benches and checkpoints look at the kernels and the backend, never the other way round.
    "mla_testing": {"amx_kernels", "amx_mla_backend"},
}

#: Third-party modules a package must not import anywhere in its shipped sources.
FORBIDDEN = {
    "amx_kernels": {"vllm", "transformers"},
    "vllm_mla_patches": {"torch", "numpy", "vllm"},
}

LAYERS = ("base", "simd", "tile", "ops", "capi")


def imports(path: Path) -> set[str]:
    """Top-level names of all modules a file imports, wherever it does."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


def python_problems() -> list[str]:
    """Imports that go against the arrows."""
    problems = []
    for source in sorted(ROOT.glob("packages/*/src/*/**/*.py")):
        package = source.relative_to(ROOT).parts[3]
        used = imports(source)
        for other in (used & ALLOWED.keys()) - {package} - ALLOWED[package]:
            problems.append(f"{source.relative_to(ROOT)}: {package} must not import {other}")
        for other in used & FORBIDDEN.get(package, set()):
            problems.append(f"{source.relative_to(ROOT)}: {package} must not import {other}")
    return problems


def include_problems() -> list[str]:
    """Includes that go from a lower layer to a higher one."""
    problems = []
    csrc = ROOT / "packages/amx-kernels/csrc"
    for source in sorted([*csrc.rglob("*.h"), *csrc.rglob("*.cpp")]):
        layer = source.relative_to(csrc).parts[0]
        for included in re.findall(r'#include "([a-z]+)/', source.read_text()):
            if included in LAYERS and LAYERS.index(included) > LAYERS.index(layer):
                problems.append(f"{source.relative_to(ROOT)}: layer {layer} must not include {included}")
    return problems


def main() -> int:
    """Prints every problem; 1 if there is one."""
    problems = python_problems() + include_problems()
    print("\n".join(problems) or "architecture: arrows point one way")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
