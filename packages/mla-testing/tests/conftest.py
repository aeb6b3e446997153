# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from amx_support import HERE, run


@pytest.fixture(scope="session")
def compiler() -> str:
    found = shutil.which("gcc") or shutil.which("cc")
    if not found:
        pytest.skip("no C compiler to build the test programs with")
    return found


@pytest.fixture(scope="session")
def build(compiler, tmp_path_factory):
    """Compiles one of the programs beside this file, once."""
    folder = tmp_path_factory.mktemp("amx_machine")
    built: dict[str, Path] = {}

    def compile_(name: str, *flags: str) -> Path:
        if name not in built:
            target = folder / name
            run([compiler, "-O2", "-Wall", "-Werror", "-pthread", *flags, HERE / f"{name}.c", "-o", target])
            built[name] = target
        return built[name]

    return compile_
