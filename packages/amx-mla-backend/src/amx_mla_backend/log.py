# SPDX-License-Identifier: Apache-2.0
"""The logger. vLLM shows only loggers below its own namespace."""

from __future__ import annotations

from vllm.logger import init_logger

logger = init_logger("vllm.amx_mla_backend")
