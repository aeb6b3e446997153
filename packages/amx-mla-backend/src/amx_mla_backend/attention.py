# SPDX-License-Identifier: Apache-2.0
"""The attention layer, through vLLM's seam for out-of-tree layers.

``MLAAttention.forward_impl`` wires both projections of the decode path to vLLM's own bmm op, or to ``torch.bmm`` on two
more copies of the weights. vLLM lets a plugin replace ``MultiHeadLatentAttentionWrapper``, the module that builds the
attention object; ours lets the parent build everything and then makes the attention object one of ours. Replacing the
class of the object, instead of the object, keeps the one that vLLM has already entered in its layer table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper

from amx_mla_backend import kernels, selection, weights
from amx_mla_backend.impl import AMXMLAImpl
from amx_mla_backend.log import logger
from amx_mla_backend.prefill import CPUNativeMLAPrefillBackend

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata


class AMXMLAAttention(MLAAttention):
    """MLAAttention whose forward runs on one impl that owns absorb, attention and de-absorb."""

    impl: AMXMLAImpl

    @classmethod
    def adopt(cls, layer: MLAAttention) -> None:
        """Turn a freshly built MLAAttention into one of ours."""
        layer.__class__ = cls
        layer.impl.owns_layer = True
        layer.impl.layer_name = layer.layer_name
        layer.prefill_backend = CPUNativeMLAPrefillBackend(
            num_heads=layer.num_heads,
            scale=layer.scale,
            kv_lora_rank=layer.kv_lora_rank,
            qk_nope_head_dim=layer.qk_nope_head_dim,
            qk_rope_head_dim=layer.qk_rope_head_dim,
            v_head_dim=layer.v_head_dim,
            vllm_config=layer._vllm_config,
        )

    def forward_impl(
        self,
        q: torch.Tensor,
        k_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
        **quantisation: Any,
    ) -> torch.Tensor:
        """q [T, H, nope + P] unabsorbed; output [T, H * v] written in place and returned. The new tokens' rows are in
        the cache already. Without metadata (a profiling run) the output is zeroed."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(f"{self.layer_name}: AMX_MLA does not fuse output quantisation")
        if attn_metadata is None:
            return output.zero_()
        tokens, decodes = attn_metadata.num_actual_tokens, attn_metadata.num_decode_tokens
        heads = output.view(-1, self.num_heads, self.v_head_dim)
        if decodes:
            self.impl.decode(q[:decodes], kv_cache, attn_metadata, heads[:decodes])
        if tokens > decodes:
            self.impl.prefill(q[decodes:tokens], kv_cache, attn_metadata, heads[decodes:tokens])
        return output

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Pack the projections, then free the raw weight: neither side reads it again."""
        self.impl.process_weights_after_loading(act_dtype)
        weights.release(self.kv_b_proj)


class AMXMLAWrapper(MultiHeadLatentAttentionWrapper):
    """vLLM's outer MLA layer with an :class:`AMXMLAAttention` inside, where the backend is ours."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if isinstance(self.mla_attn.impl, AMXMLAImpl):
            AMXMLAAttention.adopt(self.mla_attn)
            _announce(self.mla_attn)


def _announce(layer: AMXMLAAttention) -> None:
    config = layer._vllm_config
    logger.info_once(
        "Attention backend AMX_MLA: tier %s, %d threads, block size %d, chunked prefill %s, prefix caching %s (%s).",
        kernels.load().tier,
        torch.get_num_threads(),
        config.cache_config.block_size,
        "on" if config.scheduler_config.enable_chunked_prefill else "off",
        "on" if config.cache_config.enable_prefix_caching else "off",
        selection.choose(config).reason,
    )


def register() -> None:
    """Enter the wrapper in vLLM's table of out-of-tree layers; safe to call again."""
    from vllm.model_executor.custom_op import op_registry_oot

    name = MultiHeadLatentAttentionWrapper.__name__
    if op_registry_oot.get(name) is not AMXMLAWrapper:
        MultiHeadLatentAttentionWrapper.register_oot(AMXMLAWrapper)
