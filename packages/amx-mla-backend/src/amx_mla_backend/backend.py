# SPDX-License-Identifier: Apache-2.0
"""The attention backend as vLLM sees it: names, supported configurations, and the classes behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.v1.attention.backend import MultipleOf

from amx_mla_backend import kernels
from amx_mla_backend.selection import BLOCK_MULTIPLE

if TYPE_CHECKING:
    from amx_mla_backend.impl import AMXMLAImpl
    from amx_mla_backend.metadata import AMXMLAMetadataBuilder


class AMXMLABackend(MLACommonBackend):
    """Latent attention over vLLM's paged cache, bf16, on any x86 CPU with a tier of amx-kernels."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "AMX_MLA"

    @staticmethod
    def get_impl_cls() -> type[AMXMLAImpl]:
        from amx_mla_backend.impl import AMXMLAImpl

        return AMXMLAImpl

    @staticmethod
    def get_builder_cls() -> type[AMXMLAMetadataBuilder]:
        from amx_mla_backend.metadata import AMXMLAMetadataBuilder

        return AMXMLAMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # vLLM's way to say "any": the kernels take R and P as parameters

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(BLOCK_MULTIPLE)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return block_size is None or block_size % BLOCK_MULTIPLE == 0

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True  # a promise of the kernels: bits depend on a request's own lengths and data alone

    @classmethod
    def get_unavailable_reason(cls) -> str | None:
        """Why this host cannot use the backend; None if it can. Asked by patched vLLM (0.28.0, 0.33.0)."""
        return kernels.unavailable_reason()
