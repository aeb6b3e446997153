# SPDX-License-Identifier: Apache-2.0
"""Who serves what, with the project's backend installed: {fast tier permitted, not} x {auto, CPU_MLA, AMX_MLA} x
{fresh, cached prefix}, each cell through vLLM's own configuration of a small model, in one process, without an engine.

    python matrix.py          (prints one JSON object: cell -> "ok", or what is wrong with it; fails if anything is)

It holds on patched 0.28.0 and on 0.32.0 alike.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import effects

OURS = "AMXMLABackend"
REFERENCE = ("CPUMLABackend", 16, False, False)


def choose(backend: str | None, cached_prefix: bool) -> tuple[str, int, bool, bool] | str:
    """Backend class, block size, chunked prefill, prefix caching; or the text of the refusal."""
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform

    try:
        config = effects.engine_config(backend, enable_prefix_caching=cached_prefix)
        selector = SimpleNamespace(
            use_mla=True, use_sparse=False, kv_cache_dtype="auto", dtype=config.model_config.dtype
        )
        with set_current_vllm_config(config):
            path = current_platform.get_attn_backend_cls(config.attention_config.backend, selector)
    except ValueError as error:
        return str(error)
    cache = config.cache_config
    chunked = config.scheduler_config.enable_chunked_prefill
    return path.rpartition(".")[2], cache.block_size, chunked, cache.enable_prefix_caching


def verdict(permitted: bool, backend: str | None, cached_prefix: bool, found: Any) -> str:
    if backend != "CPU_MLA" and permitted:
        right = found[0] == OURS and found[1] % 32 == 0 and found[2:] == (True, cached_prefix)
    elif backend == "AMX_MLA":
        right = isinstance(found, str) and "AMX_MLA" in found and "portable" in found
    else:
        right = found == REFERENCE
    return "ok" if right else f"unexpected: {found}"


def main() -> int:
    from amx_mla_backend import kernels

    cells = {}
    for permitted in (True, False):
        tier = "amxbf16" if permitted else "portable"
        with (
            mock.patch.object(kernels, "load", lambda tier=tier: kernels.Kernels(None, tier, None)),
            mock.patch("torch.cpu._is_amx_tile_supported", return_value=permitted),
        ):
            for backend in (None, "CPU_MLA", "AMX_MLA"):
                for cached_prefix in (False, True):
                    name = f"{tier}-{backend or 'auto'}-{'cached' if cached_prefix else 'fresh'}"
                    cells[name] = verdict(permitted, backend, cached_prefix, choose(backend, cached_prefix))
    print(json.dumps(cells))
    return any(finding != "ok" for finding in cells.values())


if __name__ == "__main__":
    sys.exit(main())
