# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's own tests of its AMX MLA ops on our kernels.

Exactly these are replaced, and nothing else: the AMX question and permission request of ``torch.cpu`` (our kernels ask
their own), the four wrappers in ``vllm._custom_ops``, and the packing op. Every replacement counts its calls, and the
session fails if one of our kernels was not called. Used by ``test_conformance.py``, which copies vLLM's file unchanged
beside this one.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import vllm._custom_ops

from amx_mla_backend import ops

CALLS: Counter[str] = Counter()
WRAPPERS = ("cpu_mla_decode", "cpu_mla_extend", "bmm_cpu", "amx_mla_concat_and_cache")


def counted(name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        CALLS[name] += 1
        return getattr(ops, name)(*args, **kwargs)

    return call


def pytest_configure(config: pytest.Config) -> None:
    torch.cpu._is_amx_tile_supported = lambda: True
    torch.cpu._init_amx = lambda: True
    for name in WRAPPERS:
        setattr(vllm._custom_ops, name, counted(name))
    torch.ops._C.convert_weight_packed = counted("convert_weight_packed")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    expected = {*WRAPPERS, "convert_weight_packed"}
    if missing := expected - set(CALLS):
        print(f"not called: {', '.join(sorted(missing))}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    print("\nour kernels were called:", dict(sorted(CALLS.items())))
