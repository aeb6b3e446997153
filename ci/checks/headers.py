# SPDX-License-Identifier: Apache-2.0
"""Every source file names its licence in its first lines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = {".py", ".c", ".cpp", ".h", ".S", ".cmake", ".sh"}


def main() -> int:
    """Prints the files without an SPDX line; 1 if there is one."""
    command = ["git", "ls-files"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    missing = [
        name
        for name in listed
        if Path(name).suffix in SUFFIXES
        and (ROOT / name).is_file()
        and "SPDX-License-Identifier: Apache-2.0" not in "".join((ROOT / name).read_text().splitlines(True)[:4])
    ]
    print("\n".join(f"{name}: no SPDX-License-Identifier line" for name in missing) or "headers: all files have one")
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
