# SPDX-License-Identifier: Apache-2.0
"""``kv_b_proj`` split into the two absorbed projections, whatever form its weight is stored in."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from vllm.model_executor.layers.quantization.utils.quant_utils import get_and_maybe_dequant_weights


def unwrapped(layer: Any) -> Any:
    """The linear layer under any number of wrappers (LoRA keeps the original as ``base_layer``)."""
    while hasattr(layer, "base_layer"):
        layer = layer.base_layer
    return layer


def absorbed_projections(
    layer: Any, *, name: str, num_heads: int, nope: int, v_dim: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """W_UK ``[H, R, nope]`` and W_UV ``[H, v_dim, R]``, contiguous bf16, of ``kv_b_proj`` ``[H * (nope + v_dim), R]``.

    Quantised checkpoints are dequantised once (to float32, then rounded to bf16); the result equals the dequantised
    checkpoint to bf16 rounding. The raw weight must still be there: vLLM keeps it for MLA (``_cpu_skip_gemm_dispatch``
    from 0.29.0 on, ``_cpu_keep_raw_weight`` with the 0.28.0 patches).

    Raises:
        ValueError: the weight is packed, freed, of another shape, or in a format that vLLM cannot dequantise here;
            names the layer and its quantisation method.
    """
    linear = unwrapped(layer)
    method = type(getattr(linear, "quant_method", None)).__name__
    expected = (num_heads * (nope + v_dim), rank)
    try:
        weight = get_and_maybe_dequant_weights(linear, out_dtype=torch.float32)
    except Exception as error:
        raise ValueError(
            f"{name}.kv_b_proj ({method}): AMX_MLA cannot read its weight as a plain matrix: "
            f"{type(error).__name__}: {error}"
        ) from error
    if tuple(weight.shape) != expected:
        raise ValueError(
            f"{name}.kv_b_proj ({method}): weight of shape {tuple(weight.shape)}, AMX_MLA expected {expected} "
            "(heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank): it was packed or freed before it could be read"
        )
    per_head = weight.to(torch.bfloat16).view(num_heads, nope + v_dim, rank)
    return per_head[:, :nope].transpose(1, 2).contiguous(), per_head[:, nope:].contiguous()


class Absorbed(torch.nn.Module):
    """What a packed ``kv_b_proj`` becomes: no linear layer any more.

    vLLM's LoRA takes linear layers only. It refuses an adapter of this one by name, instead of adding the adapter's
    product to one that is never computed.
    """

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("kv_b_proj was absorbed into packed projections and cannot be called any more")


def absorb(layer: Any) -> None:
    """Mark the linear layer as packed: it keeps what it holds, but nothing can call it or take it for linear."""
    unwrapped(layer).__class__ = Absorbed


def release(layer: Any) -> None:
    """Free the raw weight and what belongs to it (scales, zero points): after packing nothing reads them again."""
    linear = unwrapped(layer)
    for name, parameter in list(linear.named_parameters(recurse=False)):
        empty = torch.empty(0, dtype=parameter.dtype)
        linear.register_parameter(name, torch.nn.Parameter(empty, requires_grad=False))
