# SPDX-License-Identifier: Apache-2.0
"""A vLLM platform plugin for benchmarks: makes vLLM pick its own AMX_MLA backend on a host without AMX.

Its operators run on AVX512-BF16 as well. "AMX is there" is answered only inside the platform's two methods that choose
the backend: other parts of vLLM that ask would run tile instructions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform


@contextmanager
def _amx_is_there() -> Iterator[None]:
    truth = torch.cpu._is_amx_tile_supported
    torch.cpu._is_amx_tile_supported = lambda: True
    try:
        yield
    finally:
        torch.cpu._is_amx_tile_supported = truth


class ForcedAmxPlatform(CpuPlatform):
    """The CPU platform with the two choices forced."""

    @classmethod
    def get_attn_backend_cls(cls, *args: Any, **kwargs: Any) -> str:
        with _amx_is_there():
            return super().get_attn_backend_cls(*args, **kwargs)

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        with _amx_is_there():
            super().check_and_update_config(vllm_config)


def plugin() -> str:
    """Entry point of ``vllm.platform_plugins``."""
    return "mla_testing.bench.forced_platform.ForcedAmxPlatform"
