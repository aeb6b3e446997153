# SPDX-License-Identifier: Apache-2.0
"""Kernels for Multi-head Latent Attention on x86 CPUs, chosen at run time for the CPU at hand.

Usable without torch: the functions below take NumPy arrays (bfloat16 as ``ml_dtypes.bfloat16`` or as its ``uint16``
bits) and anything that speaks DLPack. ``import amx_kernels.torch`` registers the same functions as
``torch.ops.amx_kernels.*``. ``amx_kernels.isa`` lists, explains and sets the instruction-set tier.
"""

from __future__ import annotations

from amx_kernels import isa
from amx_kernels._version import __version__
from amx_kernels.ops import (
    bmm_cpu,
    concat_and_cache_mla_cpu,
    convert_weight_packed,
    decode_attention_cpu,
    extend_attention_cpu,
    get_num_threads,
    plan_attention,
    set_num_threads,
)

__all__ = [
    "__version__",
    "bmm_cpu",
    "concat_and_cache_mla_cpu",
    "convert_weight_packed",
    "decode_attention_cpu",
    "extend_attention_cpu",
    "get_num_threads",
    "isa",
    "plan_attention",
    "set_num_threads",
]
