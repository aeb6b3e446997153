# SPDX-License-Identifier: Apache-2.0
"""Kernels for Multi-head Latent Attention on x86 CPUs, chosen at run time for the CPU at hand.

Usable without torch: the functions below take NumPy arrays (bfloat16 as ``ml_dtypes.bfloat16`` or as its ``uint16``
bits) and anything that speaks DLPack. ``import amx_kernels.torch`` registers the same functions as
``torch.ops.amx_kernels.*``. ``amx_kernels.isa`` lists, explains and sets the instruction-set tier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amx_kernels import isa
from amx_kernels._version import __version__

if TYPE_CHECKING:
    from amx_kernels.ops import (
        bmm_cpu,
        concat_and_cache_mla_cpu,
        convert_weight_packed,
        decode_attention_cpu,
        extend_attention_cpu,
        get_num_threads,
        plan_attention,
        prefill_attention_cpu,
        prefill_decompressed,
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
    "prefill_attention_cpu",
    "prefill_decompressed",
    "set_num_threads",
]


def __getattr__(name: str) -> Any:
    """Loads the ops at their first use, so that isa and doctor work where the extension module or NumPy does not."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from amx_kernels import ops

    globals()[name] = value = getattr(ops, name)
    return value
