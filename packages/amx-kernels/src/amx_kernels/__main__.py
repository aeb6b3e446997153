# SPDX-License-Identifier: Apache-2.0
"""``python -m amx_kernels``: the commands of this package."""

from __future__ import annotations

import sys

from amx_kernels import doctor

USAGE = "usage: python -m amx_kernels doctor [--json]"


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["doctor"]:
        return doctor.main(arguments[1:])
    print(USAGE, file=sys.stdout if arguments in (["-h"], ["--help"]) else sys.stderr)
    return 0 if arguments in (["-h"], ["--help"]) else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
