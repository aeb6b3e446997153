# SPDX-License-Identifier: Apache-2.0
"""The CPU MLA ops under the names, signatures and semantics that vLLM's ``_custom_ops`` gives them.

For callers written against vLLM's ops: a flat cache ``[slots, 1, D]`` with one physical row index per token is a block
table with block size 1. Scratch arguments are accepted and not read. What the kernels do not do is refused.
"""

from __future__ import annotations

import torch

from amx_mla_backend import kernels


def cpu_mla_decode(
    query: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    output: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    loc: torch.Tensor | None,
    attn_logits: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window_size: int,
    encoder_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    """One new token per request against its cached rows.

    query [B, H, D] absorbed; k_buffer [slots, 1, D] bf16; v_buffer: its first R columns; output [B, H, R], written;
    key [B, 1, D] (value: its first R columns) with loc [B]: rows written to the cache first, or all None;
    attn_logits: not read; req_to_token [pool, max_len] slots; req_pool_indices [B]; seq_lens [B], new token included.

    Raises:
        NotImplementedError: logit_cap, cross attention, a sliding window, encoder lengths or sinks were asked for.
        ValueError: v_buffer or value is not a view of the latent columns; other arguments as the kernels check them.
    """
    _refuse(logit_cap, is_cross_attn, sliding_window_size, encoder_lens, sinks)
    ops = kernels.load().ops
    cache, rank = _latent_cache(k_buffer, v_buffer, "v_buffer")
    if key is not None:
        if loc is None:
            raise ValueError("loc=None: expected the slots of key, [batch]")
        rows, _ = _latent_cache(key, value, "value")
        ops.concat_and_cache_mla_cpu(rows[:, 0, :rank], rows[:, 0, rank:], cache, loc)
    ops.decode_attention_cpu(
        output, None, query[..., :rank], query[..., rank:], cache, req_to_token[req_pool_indices], seq_lens, sm_scale
    )


def cpu_mla_extend(
    q_extend: torch.Tensor,
    k_extend: torch.Tensor | None,
    v_extend: torch.Tensor | None,
    o_extend: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    extend_start_loc: torch.Tensor,
    max_len_extend: int,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window_size: int,
    encoder_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
    tree_mask: torch.Tensor | None = None,
) -> None:
    """Several new tokens per request, causal among themselves, after their cached prefix.

    q_extend [T, H, D] absorbed; k_extend [T, 1, D] and v_extend (its first R columns), or None: the new rows, which
    vLLM has in the cache already, so they are read from there; o_extend [T, H, R], written; k_buffer, v_buffer,
    req_to_token, req_pool_indices, seq_lens as for decode; extend_seq_lens, extend_start_loc [B]: the new tokens of
    each request in q_extend; max_len_extend: not read.

    Raises:
        NotImplementedError: as for decode, or a tree mask was given.
        ValueError: extend_start_loc is not the running sum of extend_seq_lens; as for decode.
    """
    _refuse(logit_cap, is_cross_attn, sliding_window_size, encoder_lens, sinks)
    if tree_mask is not None:
        raise NotImplementedError("tree_mask is not supported, only None")
    cache, rank = _latent_cache(k_buffer, v_buffer, "v_buffer")
    ends = extend_start_loc + extend_seq_lens
    if extend_start_loc.numel() and (int(extend_start_loc[0]) != 0 or not torch.equal(ends[:-1], extend_start_loc[1:])):
        raise ValueError(
            f"extend_start_loc={extend_start_loc.tolist()}: expected the running sum of extend_seq_lens="
            f"{extend_seq_lens.tolist()}, starting at 0"
        )
    starts = torch.cat([ends.new_zeros(1), ends])
    kernels.load().ops.extend_attention_cpu(
        o_extend, None, q_extend[..., :rank], q_extend[..., rank:], cache, req_to_token[req_pool_indices], seq_lens,
        starts, sm_scale,
    )  # fmt: skip


def bmm_cpu(
    out: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, is_vnni: bool, scale: torch.Tensor | None = None
) -> None:
    """``out[n] = scale * mat1[n] @ mat2[n]^T``: out [N, M, OUT], mat1 [N, M, IN], mat2 [N, OUT, IN] bf16, or, with
    is_vnni, what :func:`convert_weight_packed` made of it."""
    kernels.load().ops.bmm_cpu(out, mat1, mat2, is_vnni, scale)


def convert_weight_packed(weight: torch.Tensor) -> torch.Tensor:
    """[N, OUT, IN] bf16 in the kernels' own packed form, for :func:`bmm_cpu`."""
    return kernels.load().ops.convert_weight_packed(weight)


def amx_mla_concat_and_cache(
    kv_c_normed: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write kv_c_normed [T, R] and k_pe [T, P] to the rows slot_mapping [T] of kv_cache [blocks, block_size, R + P]."""
    kernels.load().ops.concat_and_cache_mla_cpu(kv_c_normed, k_pe, kv_cache, slot_mapping)


def _latent_cache(k: torch.Tensor, v: torch.Tensor | None, name: str) -> tuple[torch.Tensor, int]:
    """The flat buffer as a cache of one-row blocks [slots, 1, D], and R; v must be a view of its first R columns."""
    if v is None or v.data_ptr() != k.data_ptr() or v.stride() != k.stride() or v.shape[:-1] != k.shape[:-1]:
        found = None if v is None else f"another tensor of shape {tuple(v.shape)}"
        raise ValueError(f"{name}={found}: expected a view of the key rows' first columns (latent attention has no V)")
    return k, v.shape[-1]


def _refuse(
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window_size: int,
    encoder_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    for name, value, off in (
        ("logit_cap", logit_cap, not logit_cap),
        ("is_cross_attn", is_cross_attn, not is_cross_attn),
        ("sliding_window_size", sliding_window_size, sliding_window_size <= 0),
        ("encoder_lens", encoder_lens, encoder_lens is None),
        ("sinks", sinks, sinks is None),
    ):
        if not off:
            raise NotImplementedError(f"{name}={value} is not supported: causal decoder attention only")
