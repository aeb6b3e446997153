# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def vllm_config() -> Iterator[Any]:
    """vLLM's default configuration, current while the test runs."""
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config
