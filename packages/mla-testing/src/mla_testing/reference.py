# SPDX-License-Identifier: Apache-2.0
"""The oracle: Multi-head Latent Attention in float64 NumPy, written for clarity, from the published formulas.

Formulas: DeepSeek-V2 (arXiv 2405.04434), section 2.1. With c the normalised latent of a key (width R), k_pe its rotated
part (width P), W_UK [H, R, nope] and W_UV [H, v, R] the two halves of ``kv_b_proj``:

    decompressed   k_nope = c W_UK,  v = W_UV c,  s = scale (q_nope . k_nope + q_pe . k_pe),  out = softmax(s) v
    absorbed       q_latent = W_UK q_nope,        s = scale (q_latent . c + q_pe . k_pe),     latent = softmax(s) c
                   out = W_UV latent

Every function takes bfloat16 either as bits (``uint16``), as ``ml_dtypes.bfloat16`` or as floats that hold its values,
so the inputs are exact and the only errors measured are the kernel's own. Only live cache rows are read: whatever lies
beyond a request's length, in other requests' blocks or in block table entries past the end has no influence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mla_testing import bf16

__all__ = [
    "Attention",
    "absorb",
    "bmm",
    "concat_and_cache",
    "de_absorb",
    "latent_attention",
    "latent_attention_details",
    "mla_prefill",
    "mla_prefill_details",
    "split_kv_b",
]

Float = NDArray[np.float64]

#: Most scores held at once; longer products are cut into runs of query tokens.
_MAX_SCORES = 1 << 22


class Attention(NamedTuple):
    """A result with what the error of an implementation scales with (see ``tolerances.attention``).

    Shapes: out and the two spreads [T, H, R or v], all others [T, H]. p are the normalised probabilities of a row,
    v the values.
    """

    out: Float
    #: Natural logarithm of the sum of exponentials of the scaled scores; -inf where nothing is attended.
    lse: Float
    #: sqrt(sum p v^2): no relative error common to all probabilities can move ``out`` by more than its share of this.
    value_rms: Float
    #: sqrt(sum p^2 v^2): what independent relative errors of the probabilities add up to.
    noise: Float
    #: sqrt(sum p^2): the same for the sum of the probabilities.
    sum_noise: Float
    #: 1 where the probabilities are so alike (within about 10 %) that their roundings may be, too; else 0.
    alike: Float
    #: scale * |q| * max |k|: bounds every partial sum of a score.
    score_bound: Float
    #: scale * max sqrt(sum (q_nope k_nope)^2): what rounding q or k to bfloat16 does to a score (0 if nothing rounds).
    score_noise: Float


def latent_attention(
    q_latent: ArrayLike,
    q_pe: ArrayLike,
    kv_cache: NDArray,
    block_table: ArrayLike,
    seq_lens: ArrayLike,
    query_start_loc: ArrayLike | None,
    scale: float,
) -> tuple[Float, Float]:
    """Causal attention of new tokens over a paged cache of latent rows, in float64.

    Args:
        q_latent: [T, H, R] absorbed queries.
        q_pe: [T, H, P] rotated queries; P may be 0.
        kv_cache: [num_blocks, block_size, R + P], any strides.
        block_table: [num_reqs, max_blocks] integers; entries past a request's last block are not read.
        seq_lens: [num_reqs] keys of each request, its new tokens included; the new tokens are the last ones.
        query_start_loc: [num_reqs + 1] first token of each request; None: T / num_reqs tokens for each (decode).
        scale: multiplies q . k.

    Returns:
        out [T, H, R] and the natural-log LSE [T, H]. Tokens that see no key, and tokens past ``query_start_loc[-1]``,
        have exact zeros and -inf.

    Raises:
        ValueError: shapes that do not fit together, negative lengths, or a live block id outside the cache.
    """
    details = latent_attention_details(
        q_latent, q_pe, kv_cache, block_table, seq_lens, query_start_loc, scale, spreads=False
    )
    return details.out, details.lse


def latent_attention_details(
    q_latent: ArrayLike,
    q_pe: ArrayLike,
    kv_cache: NDArray,
    block_table: ArrayLike,
    seq_lens: ArrayLike,
    query_start_loc: ArrayLike | None,
    scale: float,
    *,
    spreads: bool = True,
) -> Attention:
    """As :func:`latent_attention`, with the spreads from which a tolerance is derived."""
    q_latent, q_pe = bf16.to_float64(q_latent), bf16.to_float64(q_pe)
    num_tokens, heads, rank = q_latent.shape
    if q_pe.shape[:2] != (num_tokens, heads):
        raise ValueError(f"q_pe has shape {q_pe.shape}, expected ({num_tokens}, {heads}, P) as q_latent has")
    if kv_cache.shape[-1] != rank + q_pe.shape[2]:
        raise ValueError(f"kv_cache has rows of {kv_cache.shape[-1]}, expected R + P = {rank + q_pe.shape[2]}")
    query = np.concatenate([q_latent, q_pe], axis=2)
    result = _nothing_attended(num_tokens, heads, rank)
    for tokens, first_visible, rows in _requests(kv_cache, block_table, seq_lens, query_start_loc, num_tokens):
        _attend(result, tokens, first_visible, query, rows[None], rows[None, :, :rank], scale, spreads)
    return result


def mla_prefill(
    q_nope: ArrayLike,
    q_pe: ArrayLike,
    kv_cache: NDArray,
    block_table: ArrayLike,
    seq_lens: ArrayLike,
    query_start_loc: ArrayLike | None,
    w_uk: ArrayLike,
    w_uv: ArrayLike,
    scale: float,
) -> tuple[Float, Float]:
    """Whole MLA attention, decompressed: keys and values of every head are made from the latent rows.

    Args:
        q_nope: [T, H, nope] queries before absorption.
        w_uk: [H, R, nope]; w_uv: [H, v, R] (see :func:`split_kv_b`).
        q_pe, kv_cache, block_table, seq_lens, query_start_loc, scale: as in :func:`latent_attention`.

    Returns:
        out [T, H, v] and the natural-log LSE [T, H].
    """
    details = mla_prefill_details(
        q_nope, q_pe, kv_cache, block_table, seq_lens, query_start_loc, w_uk, w_uv, scale, spreads=False
    )
    return details.out, details.lse


def mla_prefill_details(
    q_nope: ArrayLike,
    q_pe: ArrayLike,
    kv_cache: NDArray,
    block_table: ArrayLike,
    seq_lens: ArrayLike,
    query_start_loc: ArrayLike | None,
    w_uk: ArrayLike,
    w_uv: ArrayLike,
    scale: float,
    *,
    spreads: bool = True,
) -> Attention:
    """As :func:`mla_prefill`, with the spreads from which a tolerance is derived."""
    q_nope, q_pe, w_uk, w_uv = (bf16.to_float64(x) for x in (q_nope, q_pe, w_uk, w_uv))
    num_tokens, heads, nope = q_nope.shape
    rank, v_dim = w_uk.shape[1], w_uv.shape[1]
    if w_uk.shape != (heads, rank, nope) or w_uv.shape != (heads, v_dim, rank):
        raise ValueError(f"w_uk {w_uk.shape} and w_uv {w_uv.shape} do not fit {heads} heads of {nope}")
    query = np.concatenate([q_nope, q_pe], axis=2)
    result = _nothing_attended(num_tokens, heads, v_dim)
    for tokens, first_visible, rows in _requests(kv_cache, block_table, seq_lens, query_start_loc, num_tokens):
        latent, k_pe = rows[:, :rank], rows[:, rank:]
        k_pe = np.broadcast_to(k_pe, (heads, *k_pe.shape))
        keys = np.concatenate([latent @ w_uk, k_pe], axis=2)  # [H, keys, nope + P]
        values = latent @ w_uv.transpose(0, 2, 1)  # [H, keys, v]
        _attend(result, tokens, first_visible, query, keys, values, scale, spreads, rounded_width=nope)
    return result


def _nothing_attended(num_tokens: int, heads: int, width: int) -> Attention:
    wide, narrow = (num_tokens, heads, width), (num_tokens, heads)
    return Attention(
        out=np.zeros(wide),
        lse=np.full(narrow, -np.inf),
        value_rms=np.zeros(wide),
        noise=np.zeros(wide),
        sum_noise=np.zeros(narrow),
        alike=np.zeros(narrow),
        score_bound=np.zeros(narrow),
        score_noise=np.zeros(narrow),
    )


def _requests(
    kv_cache: NDArray,
    block_table: ArrayLike,
    seq_lens: ArrayLike,
    query_start_loc: ArrayLike | None,
    num_tokens: int,
) -> Iterator[tuple[range, int, Float]]:
    """Each request with something to attend: its tokens, the keys its first token sees, its live rows [keys, R + P]."""
    block_table, seq_lens = np.asarray(block_table), np.asarray(seq_lens)
    if kv_cache.ndim != 3:
        raise ValueError(f"kv_cache has shape {kv_cache.shape}, expected [num_blocks, block_size, R + P]")
    if seq_lens.ndim != 1 or block_table.ndim != 2 or len(block_table) != len(seq_lens):
        raise ValueError(f"block_table {block_table.shape} and seq_lens {seq_lens.shape} do not fit together")
    num_reqs, (num_blocks, block_size, _) = len(seq_lens), kv_cache.shape
    if query_start_loc is None:
        if num_reqs and num_tokens % num_reqs:
            raise ValueError(f"{num_tokens} tokens do not divide into {num_reqs} requests; give query_start_loc")
        query_start_loc = np.arange(num_reqs + 1) * (num_tokens // max(num_reqs, 1))
    starts = np.asarray(query_start_loc)
    if starts.shape != (num_reqs + 1,) or (np.diff(starts) < 0).any() or starts[-1] > num_tokens or starts[0] != 0:
        raise ValueError(f"query_start_loc {starts.tolist()} is no rising list of {num_reqs + 1} starts from 0")
    if (seq_lens < 0).any():
        raise ValueError(f"seq_lens holds the negative length {int(seq_lens.min())}")
    for request in range(num_reqs):
        first, end, keys = int(starts[request]), int(starts[request + 1]), int(seq_lens[request])
        if first == end or keys == 0:
            continue
        positions = np.arange(keys)
        blocks = block_table[request, : -(-keys // block_size)].astype(np.int64)
        if len(blocks) * block_size < keys or (blocks < 0).any() or (blocks >= num_blocks).any():
            raise ValueError(f"request {request} needs {keys} keys; its blocks {blocks.tolist()} do not hold them")
        rows = kv_cache[blocks[positions // block_size], positions % block_size]
        yield range(first, end), keys - (end - first) + 1, bf16.to_float64(rows)


def _attend(
    result: Attention,
    tokens: range,
    first_visible: int,
    query: Float,  # [T, H, D]
    keys: Float,  # [H or 1, keys, D]
    values: Float,  # [H or 1, keys, V]
    scale: float,
    spreads: bool,
    rounded_width: int = 0,
) -> None:
    """Attention of one request, in runs of query tokens; token i of it sees the first ``first_visible + i`` keys."""
    heads, num_keys, shared = query.shape[1], keys.shape[1], keys.shape[0] == 1
    run = max(1, _MAX_SCORES // (heads * num_keys))
    squares = (values * values).astype(np.float32) if spreads else None
    for first in range(tokens.start, tokens.stop, run):
        chunk = slice(first, min(first + run, tokens.stop))
        length = chunk.stop - first
        # One product per set of keys: with shared keys all heads are rows of one matrix.
        q = query[chunk].reshape(1, -1, query.shape[2]) if shared else query[chunk].transpose(1, 0, 2)
        visible = first_visible + np.arange(first, chunk.stop) - tokens.start
        hidden = np.arange(num_keys) >= (np.repeat(visible, heads)[None] if shared else visible[None])[..., None]
        scores = scale * (q @ keys.transpose(0, 2, 1))
        scores[np.broadcast_to(hidden, scores.shape)] = -np.inf
        peak = scores.max(axis=2, keepdims=True)
        peak[peak == -np.inf] = 0.0
        weights = np.exp(scores - peak)
        total = weights.sum(axis=2, keepdims=True)
        empty = total == 0.0

        def stored(x: NDArray, length: int = length) -> NDArray:
            """Back to [tokens, heads, ...]."""
            return x.reshape(length, heads, *x.shape[2:]) if shared else np.moveaxis(x, 0, 1)

        with np.errstate(divide="ignore"):
            result.lse[chunk] = stored((np.log(total) + peak)[..., 0])
        weights /= np.where(empty, 1.0, total)
        result.out[chunk] = stored(weights @ values)
        if squares is None:
            continue
        narrow = weights.astype(np.float32)
        result.value_rms[chunk] = stored(np.sqrt(narrow @ squares))
        result.noise[chunk] = stored(np.sqrt((narrow * narrow) @ squares))
        square_sum = (weights * weights).sum(axis=2)
        result.sum_noise[chunk] = stored(np.sqrt(square_sum))
        # The squared coefficient of variation of n numbers that add up to 1 is n times the sum of squares, less 1.
        result.alike[chunk] = stored((square_sum * (num_keys - hidden.sum(axis=2)) < 1.0 + 0.1**2).astype(float))
        longest = np.linalg.norm(keys, axis=2).max(axis=1)[:, None]
        result.score_bound[chunk] = stored(abs(scale) * np.linalg.norm(q, axis=2) * longest)
        if rounded_width:
            q2, k2 = (np.square(x[..., :rounded_width]).astype(np.float32) for x in (q, keys))
            worst = (q2 @ k2.transpose(0, 2, 1)).max(axis=2)
            result.score_noise[chunk] = stored(abs(scale) * np.sqrt(worst))


def bmm(mat1: ArrayLike, mat2: ArrayLike) -> Float:
    """out[n] = mat1[n] @ mat2[n]^T in float64; mat1 [N, M, IN], mat2 [N, OUT, IN], out [N, M, OUT]."""
    return bf16.to_float64(mat1) @ bf16.to_float64(mat2).transpose(0, 2, 1)


def absorb(q_nope: ArrayLike, w_uk: ArrayLike) -> Float:
    """q_latent [T, H, R] = W_UK q_nope for q_nope [T, H, nope] and w_uk [H, R, nope]."""
    return bmm(np.asarray(q_nope).transpose(1, 0, 2), w_uk).transpose(1, 0, 2)


def de_absorb(latent: ArrayLike, w_uv: ArrayLike) -> Float:
    """out [T, H, v] = W_UV latent for latent [T, H, R] and w_uv [H, v, R]."""
    return bmm(np.asarray(latent).transpose(1, 0, 2), w_uv).transpose(1, 0, 2)


def split_kv_b(weight: NDArray, heads: int, nope: int, v_dim: int) -> tuple[NDArray, NDArray]:
    """The two halves of a ``kv_b_proj`` weight [H * (nope + v), R]: w_uk [H, R, nope] and w_uv [H, v, R] (views)."""
    if weight.ndim != 2 or weight.shape[0] != heads * (nope + v_dim):
        raise ValueError(f"kv_b_proj weight has shape {weight.shape}, expected ({heads * (nope + v_dim)}, R)")
    per_head = weight.reshape(heads, nope + v_dim, weight.shape[1])
    return per_head[:, :nope].transpose(0, 2, 1), per_head[:, nope:]


def concat_and_cache(kv_c: NDArray, k_pe: NDArray, kv_cache: NDArray, slot_mapping: ArrayLike) -> None:
    """Write rows [kv_c | k_pe] into the cache, in place, copying values unchanged.

    Args:
        kv_c: [T, R]; k_pe: [T, P]; kv_cache: [num_blocks, block_size, R + P], all of one dtype.
        slot_mapping: [N] with N <= T: token i goes to block slot // block_size, row slot % block_size. Negative slots
            are skipped, and so are tokens beyond N. A slot used twice holds the later token.

    Raises:
        ValueError: more slots than tokens, or a slot above the cache (nothing is written then).
    """
    slots = np.asarray(slot_mapping)
    num_blocks, block_size, _ = kv_cache.shape
    if len(slots) > len(kv_c):
        raise ValueError(f"slot_mapping has {len(slots)} entries for {len(kv_c)} tokens")
    if len(slots) and slots.max() >= num_blocks * block_size:
        raise ValueError(f"slot_mapping holds {int(slots.max())}; the cache has {num_blocks * block_size} slots")
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            row = kv_cache[slot // block_size, slot % block_size]
            row[: kv_c.shape[1]] = kv_c[token]
            row[kv_c.shape[1] :] = k_pe[token]
