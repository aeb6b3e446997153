# SPDX-License-Identifier: Apache-2.0
"""vLLM plugin: Multi-head Latent Attention (DeepSeek V2/V3/R1, Kimi K2, GLM-4.7, MiniCPM3) on x86 CPUs.

vLLM finds the package through its entry points; nothing has to be imported or configured. What it does, and when it
stands back, is decided in :mod:`amx_mla_backend.selection`; its settings are listed in :mod:`amx_mla_backend.envs`.
"""

from __future__ import annotations

from importlib.util import find_spec

__version__ = "0.1.0"

if find_spec("vllm") is None:
    raise ImportError(
        "amx_mla_backend is a plugin of vLLM, and vLLM is not installed in this environment; "
        "install it with `pip install 'amx-mla-backend[vllm]'`"
    )
