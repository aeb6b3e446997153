# SPDX-License-Identifier: Apache-2.0
"""The ops for NumPy arrays and DLPack tensors.

Terms: T tokens, H query heads, R = kv_lora_rank, P = qk_rope_head_dim, D = R + P. bfloat16 arrays are
``ml_dtypes.bfloat16`` or ``uint16`` holding its bits; any other object with ``__dlpack__`` (a torch tensor, for one) is
used in place as well. Strides are honoured; only the last dimension must be contiguous. Outputs are written in place.

Every function raises ValueError naming the argument, its value and what was expected, before it touches any data;
TypeError for an object that is no array; RuntimeError if no tier can run here.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from amx_kernels import _core

__all__ = [
    "bmm_cpu",
    "concat_and_cache_mla_cpu",
    "convert_weight_packed",
    "decode_attention_cpu",
    "extend_attention_cpu",
    "get_num_threads",
    "plan_attention",
    "prefill_attention_cpu",
    "prefill_decompressed",
    "set_num_threads",
]

Array = Any
"""A NumPy array, or an object with ``__dlpack__``."""


def _array(tensor: Array) -> Array:
    """The same memory as a NumPy array; bfloat16, which NumPy's DLPack lacks, arrives as its uint16 bits."""
    if tensor is None or isinstance(tensor, np.ndarray) or not hasattr(tensor, "__dlpack__"):
        return tensor
    if type(tensor).__module__.split(".")[0] == "torch" and str(tensor.dtype) == "torch.bfloat16":
        import torch

        tensor = tensor.detach().view(torch.uint16)
    return np.from_dlpack(tensor)


def _aligned(size: int) -> np.ndarray:
    """`size` bytes that start at a cache line: a tile row that straddles two lines is read twice."""
    memory = np.empty(size + 63, dtype=np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


def convert_weight_packed(weight: Array) -> np.ndarray:
    """Packs a weight for :func:`bmm_cpu`.

    weight: [N, OUT, IN] bfloat16. Returns [N, ceil(OUT/16), ceil(IN/32)*16, 32] of the same dtype, opaque, the same on
    every tier; padding is zero.
    """
    weight = _array(weight)
    sizes = _core.packed_sizes(weight)
    packed = _aligned(math.prod(sizes) * weight.dtype.itemsize).view(weight.dtype).reshape(sizes)
    _core.convert_weight_packed(packed, weight)
    return packed


def bmm_cpu(out: Array, mat1: Array, mat2: Array, is_vnni: bool, scale: Array | None = None) -> None:
    """out[n] = scale[n] * mat1[n] @ mat2[n]^T, accumulated in float32.

    out: [N, M, OUT] bfloat16, written. mat1: [N, M, IN] bfloat16. mat2: [N, OUT, IN] bfloat16, or what
    :func:`convert_weight_packed` made of it if `is_vnni`. scale: float32 of one or N elements.
    """
    _core.bmm_cpu(_array(out), _array(mat1), _array(mat2), is_vnni, _array(scale))


def concat_and_cache_mla_cpu(kv_c: Array, k_pe: Array, kv_cache: Array, slot_mapping: Array) -> None:
    """kv_cache[slot_mapping[t]] = kv_c[t] ++ k_pe[t] for every t whose slot is not negative.

    kv_c: [T', R] bfloat16. k_pe: [T', P] or [T', 1, P] bfloat16. kv_cache: [num_blocks, block_size, D] bfloat16,
    written. slot_mapping: [T] int32 or int64 with T <= T'; tokens past T are ignored.
    """
    _core.concat_and_cache_mla_cpu(_array(kv_c), _array(k_pe), _array(kv_cache), _array(slot_mapping))


def plan_attention(
    seq_lens: Array, query_start_loc: Array | None, num_tokens: int, num_heads: int, num_threads: int | None = None
) -> np.ndarray:
    """The step's plan: computed once, passed to the attention of every layer.

    seq_lens: [num_reqs], query_start_loc: [num_reqs + 1] (None: decode, num_tokens / num_reqs tokens a request),
    int32 or int64. num_threads: threads the work is divided for, those of :func:`get_num_threads` by default. Returns
    an opaque int64 vector; attention refuses it with other lengths.
    """
    threads = get_num_threads() if num_threads is None else num_threads
    return _core.plan_attention(_array(seq_lens), _array(query_start_loc), num_tokens, num_heads, threads)


def decode_attention_cpu(
    out: Array,
    lse: Array | None,
    q_latent: Array,
    q_pe: Array,
    kv_cache: Array,
    block_table: Array,
    seq_lens: Array,
    scale: float,
    plan: Array | None = None,
) -> None:
    """Latent attention of the last T / num_reqs tokens of each request over the paged cache.

    s = scale * (q_latent . kv_c + q_pe . k_pe), out = softmax(s) . kv_c, lse = ln sum exp s (DeepSeek-V2,
    arXiv:2405.04434, in the absorbed form).

    out: [T, H, R] bfloat16, written. lse: [T, H] float32, written, or None. q_latent: [T, H, R], q_pe: [T, H, P]
    bfloat16. kv_cache: [num_blocks, block_size, D] bfloat16. block_table: [num_reqs, max_blocks], seq_lens:
    [num_reqs], including the new tokens, int32 or int64. plan: from :func:`plan_attention`. A row with nothing to
    attend is zero, its lse -inf.
    """
    arrays = map(_array, (out, lse, q_latent, q_pe, kv_cache, block_table, seq_lens))
    _core.attention(*arrays, None, scale, _array(plan))


def extend_attention_cpu(
    out: Array,
    lse: Array | None,
    q_latent: Array,
    q_pe: Array,
    kv_cache: Array,
    block_table: Array,
    seq_lens: Array,
    query_start_loc: Array,
    scale: float,
    plan: Array | None = None,
) -> None:
    """As :func:`decode_attention_cpu`, with the new tokens of request i at query_start_loc[i] .. query_start_loc[i +
    1].

    Causal among the new tokens, everything before them is context: fresh prefill and continuation of a cached prefix
    are one call. Tokens past query_start_loc[num_reqs] are neither read nor written.
    """
    if query_start_loc is None:
        raise ValueError("extend_attention_cpu: query_start_loc is None, expected [num_reqs + 1] int32 or int64")
    arrays = map(_array, (out, lse, q_latent, q_pe, kv_cache, block_table, seq_lens, query_start_loc))
    _core.attention(*arrays, scale, _array(plan))


def prefill_attention_cpu(
    out: Array,
    lse: Array | None,
    q_nope: Array,
    q_pe: Array,
    kv_cache: Array,
    block_table: Array,
    seq_lens: Array,
    query_start_loc: Array,
    w_uk: Array,
    w_uv: Array,
    scale: float,
) -> None:
    """The attention of :func:`extend_attention_cpu` in its decompressed form, with both up-projections inside.

    k = (w_uk . kv_c, k_pe), v = w_uv . kv_c for each head, expanded block by block; s = scale * q . k, out =
    softmax(s) . v. Cheaper than the absorbed form for prompts; :func:`prefill_decompressed` says when.

    out: [T, H, E] bfloat16, written. lse: [T, H] float32, written, or None. q_nope: [T, H, N], q_pe: [T, H, P]
    bfloat16. w_uk: packed [H, N, R], w_uv: packed [H, E, R] (:func:`convert_weight_packed`). The rest as in
    extend_attention_cpu.
    """
    arrays = map(_array, (out, lse, q_nope, q_pe, kv_cache, block_table, seq_lens, query_start_loc, w_uk, w_uv))
    _core.prefill_attention_cpu(*arrays, scale)


def prefill_decompressed(query: int, keys: int) -> bool:
    """Whether :func:`prefill_attention_cpu` serves `query` new tokens of a sequence of `keys` tokens sooner than
    the absorbed form. A function of these lengths and of the tier alone; ``AMX_KERNELS_PREFILL`` = absorbed or
    decompressed overrides it.
    """
    return _core.prefill_decompressed(query, keys)


def set_num_threads(num_threads: int) -> None:
    """Threads of the module's own pool, used by every function here (the torch ops use torch's)."""
    _core.set_num_threads(num_threads)


def get_num_threads() -> int:
    """Threads of the module's own pool: as set, or the CPUs this process may run on."""
    return _core.get_num_threads()
