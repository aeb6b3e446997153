# SPDX-License-Identifier: Apache-2.0
"""The attention of one layer: what vLLM calls an impl.

Latent attention attends in the compressed space. With the up-projections of one head W_UK [nope, R] and W_UV [v, R],

    q_latent = q_nope W_UK            (absorb)
    s        = scale (q_latent . kv_c + q_pe . k_pe),   o_latent = softmax(s) kv_c
    o        = o_latent W_UV^T        (de-absorb)

Decode absorbs, attends and de-absorbs. Prefill does the same for few tokens on much context; for more tokens it is
cheaper to expand keys and values from the latent (k = W_UK kv_c, v = W_UV kv_c), which one op does block by block. The
projections are packed once, when the weights are loaded; afterwards the raw ``kv_b_proj`` is freed. Nothing is
concatenated, zeroed or cast per layer: queries are read and outputs written in place, through whatever strides vLLM's
tensors have.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonImpl, MLACommonMetadata
from vllm.v1.attention.backend import AttentionType

from amx_mla_backend import compat, kernels, weights
from amx_mla_backend.log import logger
from amx_mla_backend.metadata import PrefillRun


class AMXMLAImpl(MLACommonImpl[MLACommonMetadata]):
    """Latent attention on the ops of amx-kernels. Arguments are vLLM's; ``mla_args`` hold the dimensions."""

    # Asked by MLAAttention. Where it calls absorb_q and project_v (patched vLLM) the impl owns both projections. Where
    # it would call vLLM's own bmm on our packed weights it must not think so; our attention layer calls both itself.
    uses_amx_bmm: bool = compat.impl_owns_projections()

    can_return_lse_for_decode: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        for name, value in (
            ("alibi_slopes", alibi_slopes),
            ("sliding_window", sliding_window),
            ("logits_soft_cap", logits_soft_cap),
        ):
            if value is not None:
                raise NotImplementedError(f"AMX_MLA: {name}={value} is not supported, only None")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(
                f"AMX_MLA: attn_type={attn_type!r} is not supported, only causal decoder attention"
            )
        if kv_cache_dtype not in ("auto", "bfloat16"):
            raise NotImplementedError(
                f"AMX_MLA: kv_cache_dtype={kv_cache_dtype!r} is not supported, only 'auto' (bf16)"
            )
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        self.supports_quant_query_input = False
        self._ops = kernels.load().ops
        self.layer_name = "attention"
        self.owns_layer = False
        self._w_uk: torch.Tensor | None = None  # packed [H, R, nope]: absorbs queries
        self._w_uk_keys: torch.Tensor | None = None  # packed [H, nope, R]: expands keys
        self._w_uv: torch.Tensor | None = None  # packed [H, v, R]

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Pack W_UK and W_UV; kv_b_proj is no linear layer from then on.

        Raises:
            ValueError: kv_b_proj cannot be read; with the layer's name.
        """
        if act_dtype != torch.bfloat16:
            raise ValueError(f"{self.layer_name}: AMX_MLA computes in bfloat16, the model in {act_dtype}")
        w_uk, w_uv = weights.absorbed_projections(
            self.kv_b_proj,
            name=self.layer_name,
            num_heads=self.num_heads,
            nope=self.qk_nope_head_dim,
            v_dim=self.v_head_dim,
            rank=self.kv_lora_rank,
        )
        self._w_uk = self._ops.convert_weight_packed(w_uk)
        self._w_uk_keys = self._ops.convert_weight_packed(w_uk.transpose(1, 2).contiguous())
        self._w_uv = self._ops.convert_weight_packed(w_uv)
        weights.absorb(self.kv_b_proj)
        if not (self.owns_layer or self.uses_amx_bmm):
            logger.warning_once(
                "AMX_MLA: this model builds its attention without vLLM's MultiHeadLatentAttentionWrapper; its decode "
                "projections stay with torch.bmm on a second copy of the weights."
            )

    # ---- pieces: also the hooks of patched vLLM ---------------------------------------------------------------------

    def absorb_q(self, q_nope: torch.Tensor, out: torch.Tensor) -> None:
        """``out[h] = q_nope[h] @ W_UK[h]``: q_nope [H, T, nope], out [H, T, R], bf16, last dimension contiguous."""
        self._ops.bmm_cpu(out, q_nope, self._w_uk, True)

    def project_v(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """``out[h] = x[h] @ W_UV[h]^T``: x [H, T, R], out [H, T, v], bf16, last dimension contiguous."""
        self._ops.bmm_cpu(out, x, self._w_uv, True)

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Write the new tokens' latent rows: kv_c_normed [T, R], k_pe [T, 1, P], slot_mapping [T] (< 0: skipped).

        k_scale and skip_scale belong to quantised caches and are not read.
        """
        if kv_cache.numel():
            self._ops.concat_and_cache_mla_cpu(kv_c_normed, k_pe, kv_cache, slot_mapping)

    # ---- whole parts of a step --------------------------------------------------------------------------------------

    def decode(
        self, q: torch.Tensor, kv_cache: torch.Tensor, metadata: MLACommonMetadata, output: torch.Tensor
    ) -> None:
        """The decode tokens of a step: q [T, H, nope + P] unabsorbed, output [T, H, v] written in place."""
        latent = self._absorbed(q)
        attended = torch.empty_like(latent)
        part = metadata.decode
        self._ops.decode_attention_cpu(
            attended, None, latent, q[..., self.qk_nope_head_dim :], kv_cache, part.block_table, part.seq_lens,
            self.scale, part.plan,
        )  # fmt: skip
        self.project_v(attended.transpose(0, 1), output.transpose(0, 1))

    def prefill(
        self, q: torch.Tensor, kv_cache: torch.Tensor, metadata: MLACommonMetadata, output: torch.Tensor
    ) -> None:
        """The other tokens of a step: q [T, H, nope + P] unabsorbed, output [T, H, v] written in place."""
        for run in metadata.prefill.runs:
            self._prefill_run(q[run.tokens], kv_cache, run, output[run.tokens])

    def _prefill_run(self, q: torch.Tensor, kv_cache: torch.Tensor, run: PrefillRun, output: torch.Tensor) -> None:
        q_pe = q[..., self.qk_nope_head_dim :]
        if run.decompressed:
            self._ops.prefill_attention_cpu(
                output, None, q[..., : self.qk_nope_head_dim], q_pe, kv_cache, run.block_table, run.seq_lens,
                run.query_start_loc, self._w_uk_keys, self._w_uv, self.scale,
            )  # fmt: skip
            return
        latent = self._absorbed(q)
        attended = torch.empty_like(latent)
        self._ops.extend_attention_cpu(
            attended, None, latent, q_pe, kv_cache, run.block_table, run.seq_lens, run.query_start_loc,
            self.scale, run.plan,
        )  # fmt: skip
        self.project_v(attended.transpose(0, 1), output.transpose(0, 1))

    def _absorbed(self, q: torch.Tensor) -> torch.Tensor:
        latent = q.new_empty((q.shape[0], self.num_heads, self.kv_lora_rank))
        self.absorb_q(q[..., : self.qk_nope_head_dim].transpose(0, 1), latent.transpose(0, 1))
        return latent

    # ---- vLLM's own entry points, for layers that are not ours ------------------------------------------------------

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Decode with an absorbed query, [T, H, R + P] or (latent, pe); returns ([T, H, R], None)."""
        latent, q_pe = q if isinstance(q, tuple) else (q[..., : self.kv_lora_rank], q[..., self.kv_lora_rank :])
        out = latent.new_empty((latent.shape[0], self.num_heads, self.kv_lora_rank))
        part = attn_metadata.decode
        self._ops.decode_attention_cpu(
            out, None, latent, q_pe, kv_c_and_k_pe_cache, part.block_table, part.seq_lens, self.scale, part.plan
        )
        return out, None

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Prefill with an unabsorbed query; the new tokens are in the cache already. output [T, H * v]."""
        if output_scale is not None:
            raise NotImplementedError("AMX_MLA: output_scale is not supported, only None")
        self.prefill(
            q, kv_c_and_k_pe_cache, attn_metadata, output.view(output.shape[0], self.num_heads, self.v_head_dim)
        )
