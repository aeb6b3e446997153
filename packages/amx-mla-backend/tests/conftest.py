# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# backend_support and engine_driver, in every import mode of pytest.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "e2e")]


@pytest.fixture
def vllm_config() -> Iterator[Any]:
    """vLLM's default configuration, current while the test runs."""
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config
