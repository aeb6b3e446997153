# SPDX-License-Identifier: Apache-2.0
"""Test cases for the kernels, as tables: every boundary length, layout and index type, in hostile memory.

A case is a few numbers with a readable id; ``build()`` makes its arrays, ``expected()`` the float64 result, ``check()``
compares. All memory a kernel has no business with is poison: cache rows past a request's length, other layers of the
cache, padding between blocks and rows hold NaN or infinity; block table entries past a request's end hold ids that no
cache has; outputs start as NaN, among canaries. bfloat16 arrays are ``uint16`` bit patterns; ``torch()`` turns a built
case into tensors over the same memory.

    for case in cases.DECODE:
        data = case.build()
        kernel(data.out, data.lse, data.q_latent, ...)
        data.check()
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mla_testing import bf16, compare, reference, tolerances

__all__ = [
    "BLOCK_SIZES",
    "BMM",
    "BOUNDARY_LENGTHS",
    "CONCAT",
    "DECODE",
    "EXTEND",
    "HEADS",
    "LAYOUTS",
    "AttentionCase",
    "AttentionData",
    "BmmCase",
    "BmmData",
    "ConcatCase",
    "ConcatData",
    "as_torch",
    "canaries_intact",
    "guarded",
    "paged_cache",
]

HEADS = (1, 2, 16, 22, 128)
BLOCK_SIZES = (1, 16, 32, 48, 64, 128)
#: Around vector and tile widths (16, 32), splits (256) and one beyond a long power of two.
BOUNDARY_LENGTHS = (0, 1, 15, 16, 17, 31, 32, 33, 255, 256, 257, 4097)

#: contiguous: as allocated; layered: one layer of [blocks, layers, block, D]; padded: bytes between blocks;
#: wide: bytes between rows.
Layout = Literal["contiguous", "layered", "padded", "wide"]
LAYOUTS: tuple[Layout, ...] = ("contiguous", "layered", "padded", "wide")

Poison = Literal["nan", "inf", "zero"]
_POISON = {"nan": bf16.NAN, "inf": bf16.INF, "zero": np.uint16(0)}

#: What the tail of a block table may hold.
_GARBAGE_BLOCKS = np.array([-1, 2**31 - 1, -(2**31), 123456789], dtype=np.int64)


def as_torch(array: NDArray) -> Any:
    """A tensor over the same memory and strides; ``uint16`` becomes ``torch.bfloat16``."""
    import torch

    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


def guarded(shape: tuple[int, ...], dtype: Any, *, row_padding: int = 0) -> tuple[NDArray, NDArray]:
    """An output filled with NaN inside a larger buffer of canaries.

    Args:
        shape: of the output; ``row_padding`` canaries follow each last-dimension row, whole rows precede and follow.
        dtype: ``uint16`` (bfloat16) or ``float32``.

    Returns:
        The output (a view, last dimension contiguous) and the buffer; :func:`canaries_intact` takes both.
    """
    width = shape[-1] + row_padding
    rows = math.prod(shape[:-1])
    guard = max(2, -(-64 // max(width, 1)))
    buffer = np.empty((guard + rows + guard, width), dtype)
    bits = buffer.view(np.uint16)
    bits[...] = bf16.CANARY
    view = buffer[guard : guard + rows].reshape(*shape[:-1], width)[..., : shape[-1]]
    view[...] = bf16.NAN if dtype == np.uint16 else np.nan
    return view, buffer


def canaries_intact(view: NDArray, buffer: NDArray) -> bool:
    """Whether every byte of ``buffer`` outside ``view`` is still a canary."""
    if not buffer.size:
        return True  # rows of no columns
    step = view.itemsize // 2
    outside = np.ones(buffer.view(np.uint16).shape, dtype=bool)
    first = (view.__array_interface__["data"][0] - buffer.__array_interface__["data"][0]) // view.itemsize
    guard, width = first // buffer.shape[1], view.shape[-1]
    rows = math.prod(view.shape[:-1])
    outside[guard : guard + rows, : width * step] = False
    return bool((buffer.view(np.uint16)[outside] == bf16.CANARY).all())


def paged_cache(
    rows: list[NDArray[np.uint16]],
    block_size: int,
    *,
    width: int | None = None,
    layout: Layout = "contiguous",
    poison: Poison = "nan",
    index_dtype: Any = np.int32,
    spare_blocks: int = 3,
    seed: int = 0,
) -> tuple[NDArray[np.uint16], NDArray]:
    """Put each request's latent rows into shuffled blocks of a cache whose every other element is poison.

    Args:
        rows: per request, [keys, D] bits.
        block_size: rows in a block.
        width: D; needed only without requests.
        layout: memory around the blocks, see ``Layout``.
        poison: what lies outside live rows.
        index_dtype: of the block table.
        spare_blocks: blocks that belong to nobody.
        seed: of the shuffle.

    Returns:
        kv_cache [num_blocks, block_size, D] with strides of the layout, and block_table [num_reqs, max_blocks] whose
        unused entries are ids outside any cache.
    """
    if width is None:
        width = rows[0].shape[1]
    counts = [-(-len(r) // block_size) for r in rows]
    num_blocks = sum(counts) + spare_blocks
    fill = _POISON[poison]
    if layout == "contiguous":
        cache = np.full((num_blocks, block_size, width), fill)
    elif layout == "layered":
        cache = np.full((num_blocks, 3, block_size, width), fill)[:, 1]
    elif layout == "padded":
        cache = np.full((num_blocks, block_size * width + 40), fill)[:, : block_size * width]
        cache = cache.reshape(num_blocks, block_size, width)
    elif layout == "wide":
        cache = np.full((num_blocks, block_size, width + 64), fill)[..., :width]
    else:
        raise ValueError(f"layout is {layout!r}, expected one of {LAYOUTS}")
    order = np.random.default_rng(seed).permutation(num_blocks)
    limit = np.iinfo(index_dtype)
    table = np.resize(_GARBAGE_BLOCKS.clip(limit.min, limit.max), (len(rows), max(counts, default=0) + 2))
    table = table.astype(index_dtype)
    taken = 0
    for request, (content, count) in enumerate(zip(rows, counts, strict=True)):
        blocks = order[taken : taken + count]
        taken += count
        table[request, :count] = blocks
        positions = np.arange(len(content))
        cache[blocks[positions // block_size], positions % block_size] = content
    return cache, table


class _Torch:
    def torch(self) -> SimpleNamespace:
        """All arrays as tensors over the same memory (bfloat16 for bits), other fields unchanged."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return SimpleNamespace(
            **{k: as_torch(v) if isinstance(v, np.ndarray) else v for k, v in values.items()},
            check=self.check,  # type: ignore[attr-defined]
        )


@dataclass(frozen=True)
class AttentionCase:
    """One batch for ``decode_attention_cpu`` (all query lengths equal) or ``extend_attention_cpu``."""

    heads: int
    seq_lens: tuple[int, ...]
    #: New tokens of each request; None: one each (decode).
    query_lens: tuple[int, ...] | None = None
    block_size: int = 16
    layout: Layout = "contiguous"
    index_dtype: str = "int32"
    rank: int = 512
    rope: int = 64
    #: q_latent and q_pe as slices of one [T, H, R + P] tensor, or as two tensors.
    fused_q: bool = True
    #: Elements between the rows of out.
    out_padding: int = 0
    #: Tokens after the last request's (a padded batch).
    extra_tokens: int = 0
    poison: Poison = "nan"
    #: Multiplies the queries: larger is more peaked.
    sharpness: float = 1.0
    seed: int = 0
    #: Distinguishes cases whose numbers are the same; part of the id.
    label: str = ""

    @property
    def id(self) -> str:
        """Readable and unique within the tables, e.g. ``b4-h16-kv4097-bs16-layered-int64``."""
        parts = [f"b{len(self.seq_lens)}", f"h{self.heads}"]
        if self.query_lens is not None:
            parts.append(f"q{max(self.query_lens, default=0)}")
        parts += [f"kv{max(self.seq_lens, default=0)}", f"bs{self.block_size}", self.layout]
        if (self.rank, self.rope) != (512, 64):
            parts.append(f"r{self.rank}p{self.rope}")
        if self.index_dtype != "int32":
            parts.append(self.index_dtype)
        if not self.fused_q:
            parts.append("split-q")
        if self.poison != "nan":
            parts.append(self.poison)
        if self.label:
            parts.append(self.label)
        return "-".join(parts)

    @property
    def scale(self) -> float:
        """1 / sqrt(nope + rope) of the real models, nope = 128."""
        return 1.0 / math.sqrt(128 + self.rope)

    @property
    def tokens(self) -> int:
        return (sum(self.query_lens) if self.query_lens is not None else len(self.seq_lens)) + self.extra_tokens

    def expected(self) -> reference.Attention:
        """The float64 result with its spreads, computed once for all layouts of the same numbers."""
        return _expected_attention(_content(self))

    def build(self) -> AttentionData:
        """Fresh arrays; nothing is shared with other builds."""
        queries, rows = _attention_values(_content(self))
        dtype = np.dtype(self.index_dtype)
        cache, table = paged_cache(
            list(rows),
            self.block_size,
            width=self.rank + self.rope,
            layout=self.layout,
            poison=self.poison,
            index_dtype=dtype,
            seed=self.seed + 1,
        )
        query = np.full((self.tokens, self.heads, self.rank + self.rope), bf16.NAN)
        query[: len(queries)] = queries
        q_latent, q_pe = query[..., : self.rank], query[..., self.rank :]
        if not self.fused_q:
            q_latent, q_pe = q_latent.copy(), q_pe.copy()
        lens = self.query_lens if self.query_lens is not None else (1,) * len(self.seq_lens)
        out, out_buffer = guarded((self.tokens, self.heads, self.rank), np.uint16, row_padding=self.out_padding)
        lse, lse_buffer = guarded((self.tokens, self.heads), np.float32)
        return AttentionData(
            case=self,
            out=out,
            lse=lse,
            q_latent=q_latent,
            q_pe=q_pe,
            kv_cache=cache,
            block_table=table,
            seq_lens=np.array(self.seq_lens, dtype),
            query_start_loc=np.concatenate([[0], np.cumsum(lens)]).astype(dtype),
            scale=self.scale,
            out_buffer=out_buffer,
            lse_buffer=lse_buffer,
        )


@dataclass(frozen=True)
class AttentionData(_Torch):
    """Arrays of a case, named as the ops' arguments."""

    case: AttentionCase
    out: NDArray[np.uint16]
    lse: NDArray[np.float32]
    q_latent: NDArray[np.uint16]
    q_pe: NDArray[np.uint16]
    kv_cache: NDArray[np.uint16]
    block_table: NDArray
    seq_lens: NDArray
    query_start_loc: NDArray
    scale: float
    out_buffer: NDArray[np.uint16] = field(repr=False)
    lse_buffer: NDArray[np.float32] = field(repr=False)

    @property
    def live_tokens(self) -> int:
        return int(self.query_start_loc[-1])

    def check(
        self, *, out: Any = None, lse: bool = True, rounded_probabilities: bool = True, rounded_sum: bool = False
    ) -> compare.ErrorReport:
        """Compare what a kernel wrote with the reference, and look at the canaries.

        Args:
            out: [T, H, R] result held elsewhere; default: this case's ``out``.
            lse: whether the LSE was asked for; if not it must be untouched.
            rounded_probabilities, rounded_sum: see ``tolerances``.

        Raises:
            AssertionError: naming the case and the worst place.
        """
        expected, live, name = self.case.expected(), self.live_tokens, self.case.id
        actual = self.out if out is None else out
        if not canaries_intact(self.out, self.out_buffer):
            raise AssertionError(f"{name}: bytes around out were written")
        if not canaries_intact(self.lse, self.lse_buffer):
            raise AssertionError(f"{name}: bytes around lse were written")
        if out is None:
            extra = self.out[live:]
            if not np.isin(extra, (bf16.NAN, 0)).all():
                raise AssertionError(f"{name}: out rows after the last request's hold results")
        if lse:
            tol = tolerances.lse(expected, rounded_sum=rounded_sum)
            compare.assert_close(self.lse[:live], expected.lse, tol=tol, what=f"{name} lse")
        elif not np.isnan(self.lse).all():
            raise AssertionError(f"{name}: lse was written though not asked for")
        actual = actual[:live]
        nothing = expected.lse == -np.inf
        if nothing.any() and compare.to_numpy(actual)[nothing].any():
            raise AssertionError(f"{name}: tokens that see no key must give exact zeros")
        tol = tolerances.attention(expected, rounded_probabilities=rounded_probabilities)
        return compare.assert_close(actual, expected.out, tol=tol, what=f"{name} out")


def _content(case: AttentionCase) -> AttentionCase:
    """The case reduced to what decides its numbers: a cache key."""
    return replace(
        case,
        block_size=1,
        layout="contiguous",
        index_dtype="int64",
        fused_q=True,
        out_padding=0,
        extra_tokens=0,
        poison="zero",
        label="",
    )


@functools.lru_cache(maxsize=8)
def _attention_values(content: AttentionCase) -> tuple[NDArray[np.uint16], tuple[NDArray[np.uint16], ...]]:
    """Queries [T, H, R + P] and each request's latent rows, as bits: standard normal."""
    rng = np.random.default_rng((content.seed, content.heads, len(content.seq_lens), content.rank, content.rope))
    width = content.rank + content.rope
    queries = rng.standard_normal((content.tokens, content.heads, width), np.float32) * np.float32(content.sharpness)
    rows = tuple(bf16.from_float(rng.standard_normal((n, width), np.float32)) for n in content.seq_lens)
    return bf16.from_float(queries), rows


@functools.lru_cache(maxsize=64)
def _expected_attention(content: AttentionCase) -> reference.Attention:
    queries, rows = _attention_values(content)
    cache, table = paged_cache(list(rows), 1, width=content.rank + content.rope, poison="zero", index_dtype=np.int64)
    starts = None if content.query_lens is None else np.concatenate([[0], np.cumsum(content.query_lens)])
    return reference.latent_attention_details(
        queries[..., : content.rank],
        queries[..., content.rank :],
        cache,
        table,
        content.seq_lens,
        starts,
        content.scale,
    )


@dataclass(frozen=True)
class BmmCase:
    """One batched product for ``bmm_cpu``: out[n] = mat1[n] @ mat2[n]^T."""

    batch: int
    rows: int
    out_features: int
    in_features: int
    #: mat1 and out as [M, N, ...] tensors seen through a transpose (how absorb and de-absorb call it).
    transposed: bool = True
    #: Elements between the rows of out.
    out_padding: int = 0
    seed: int = 0

    @property
    def id(self) -> str:
        """E.g. ``n16-m4-k128-o512-transposed``."""
        text = f"n{self.batch}-m{self.rows}-k{self.in_features}-o{self.out_features}"
        return text + ("-transposed" if self.transposed else "") + (f"-pad{self.out_padding}" * bool(self.out_padding))

    def build(self) -> BmmData:
        mat1, mat2, _ = _bmm_values(self._content())
        mat1, mat2 = mat1.copy(), mat2.copy()
        if self.transposed:
            mat1 = np.ascontiguousarray(mat1.transpose(1, 0, 2)).transpose(1, 0, 2)
            shape = (self.rows, self.batch, self.out_features)
        else:
            shape = (self.batch, self.rows, self.out_features)
        out, out_buffer = guarded(shape, np.uint16, row_padding=self.out_padding)
        if self.transposed:
            out = out.transpose(1, 0, 2)
        return BmmData(case=self, out=out, mat1=mat1, mat2=mat2, out_buffer=out_buffer)

    def expected(self) -> NDArray[np.float64]:
        """The float64 result, computed once for all layouts of the same numbers."""
        return _bmm_values(self._content())[2]

    def _content(self) -> BmmCase:
        """The case reduced to what decides its numbers: a cache key."""
        return replace(self, transposed=False, out_padding=0)


@functools.lru_cache(maxsize=4)
def _bmm_values(content: BmmCase) -> tuple[NDArray[np.uint16], NDArray[np.uint16], NDArray[np.float64]]:
    """mat1, mat2 (standard normal, as bits) and their product."""
    rng = np.random.default_rng((content.seed, content.batch, content.rows, content.in_features, content.out_features))
    mat1 = bf16.from_float(rng.standard_normal((content.batch, content.rows, content.in_features), np.float32))
    mat2 = bf16.from_float(rng.standard_normal((content.batch, content.out_features, content.in_features), np.float32))
    return mat1, mat2, reference.bmm(mat1, mat2)


@dataclass(frozen=True)
class BmmData(_Torch):
    """Arrays of a case, named as the op's arguments; mat2 is the plain weight."""

    case: BmmCase
    out: NDArray[np.uint16]
    mat1: NDArray[np.uint16]
    mat2: NDArray[np.uint16]
    out_buffer: NDArray[np.uint16] = field(repr=False)

    def check(self) -> compare.ErrorReport:
        """Compare ``out`` with the reference, and look at the canaries."""
        stored = self.out.transpose(1, 0, 2) if self.case.transposed else self.out
        if not canaries_intact(stored, self.out_buffer):
            raise AssertionError(f"{self.case.id}: bytes around out were written")
        tol = tolerances.gemm(self.case.in_features)
        return compare.assert_close(self.out, self.case.expected(), tol=tol, what=f"{self.case.id} out")


@dataclass(frozen=True)
class ConcatCase:
    """One call of ``concat_and_cache_mla_cpu``."""

    tokens: int
    block_size: int = 16
    layout: Layout = "contiguous"
    index_dtype: str = "int64"
    #: Every third slot is -1, with NaN in its token.
    skipped: bool = True
    #: Tokens for which there is no slot (a padded batch).
    extra_tokens: int = 0
    rank: int = 512
    rope: int = 64
    seed: int = 0

    @property
    def id(self) -> str:
        """E.g. ``t33-bs16-layered-int64-skipped``."""
        text = f"t{self.tokens}-bs{self.block_size}-{self.layout}-{self.index_dtype}"
        return text + "-skipped" * self.skipped + f"-extra{self.extra_tokens}" * bool(self.extra_tokens)

    def build(self) -> ConcatData:
        rng = np.random.default_rng((self.seed, self.tokens, self.block_size))
        width, total = self.rank + self.rope, self.tokens + self.extra_tokens
        latent = bf16.from_float(rng.standard_normal((total, width), np.float32))
        num_blocks = -(-max(self.tokens, 1) // self.block_size) + 2
        cache, _ = paged_cache(
            [], self.block_size, width=width, layout=self.layout, poison="inf", spare_blocks=num_blocks
        )
        slots = rng.permutation(num_blocks * self.block_size)[: self.tokens].astype(self.index_dtype)
        if self.skipped:
            slots[::3] = -1
            latent[: self.tokens][::3] = bf16.NAN
        latent[self.tokens :] = bf16.NAN
        # Both halves are views of one projection's output, as in the model.
        return ConcatData(
            case=self,
            kv_c=latent[:, : self.rank],
            k_pe=latent[:, self.rank :],
            kv_cache=cache,
            slot_mapping=slots,
            before=cache.copy(),
        )


@dataclass(frozen=True)
class ConcatData(_Torch):
    """Arrays of a case, named as the op's arguments; ``before`` is the cache as it was."""

    case: ConcatCase
    kv_c: NDArray[np.uint16]
    k_pe: NDArray[np.uint16]
    kv_cache: NDArray[np.uint16]
    slot_mapping: NDArray
    before: NDArray[np.uint16] = field(repr=False)

    def check(self) -> None:
        """Compare every bit of the cache, its memory between blocks and rows included, with the reference."""
        name = self.case.id
        expected = self.before.copy()
        reference.concat_and_cache(self.kv_c, self.k_pe, expected, self.slot_mapping)
        different = self.kv_cache != expected
        if different.any():
            at = tuple(int(i) for i in np.argwhere(different)[0])
            raise AssertionError(
                f"{name}: {int(different.sum())} cache elements differ; first at {list(at)}: "
                f"bits {int(self.kv_cache[at]):#06x}, expected {int(expected[at]):#06x}"
            )
        whole = self.kv_cache.base
        if whole is not None:
            while whole.base is not None:
                whole = whole.base
            outside = whole.size - self.kv_cache.size
            written = int((whole != bf16.INF).sum()) - int((self.kv_cache != bf16.INF).sum())
            if written:
                raise AssertionError(f"{name}: {written} of {outside} elements between blocks or rows were written")


def _decode_table() -> tuple[AttentionCase, ...]:
    ragged, few = BOUNDARY_LENGTHS, (33, 0, 257)
    table = [
        AttentionCase(heads, ragged, block_size=block_size, layout=layout, index_dtype=index_dtype)
        for heads in HEADS
        for block_size in BLOCK_SIZES
        for layout, index_dtype in (("contiguous", "int32"), ("layered", "int64"))
    ]
    # One request of each length alone: nothing hides behind neighbours.
    table += [AttentionCase(16, (n,), label="alone") for n in BOUNDARY_LENGTHS]
    table += [AttentionCase(16, few, layout=layout, poison=poison) for layout in LAYOUTS for poison in ("nan", "inf")]
    table += [
        AttentionCase(heads, (5, 64, 300), fused_q=False, out_padding=16, label="odd-heads")
        for heads in (1, 2, 3, 5, 8, 9, 11, 12, 20, 25, 40, 64, 96, 127, 128)
    ]
    # Several new tokens each: speculative decoding.
    table += [
        AttentionCase(heads, (n, n + 1, 257, q), query_lens=(q,) * 4, block_size=32, label="spec")
        for heads in (2, 16)
        for q, n in ((2, 16), (4, 31))
    ]
    # Scores far apart: online softmax must rescale; and nearly uniform ones.
    table += [
        AttentionCase(16, (257, 1025), block_size=32, sharpness=sharpness, label=f"sharp{sharpness:g}")
        for sharpness in (0.01, 4.0, 16.0)
    ]
    table += [
        AttentionCase(heads, (0, 17, 300), block_size=32, rank=rank, rope=rope)
        for heads in (1, 16, 40)
        for rank, rope in ((256, 32), (256, 64), (64, 32), (512, 0), (32, 16))
    ]
    table += [AttentionCase(16, (), label="empty"), AttentionCase(16, (7, 20), extra_tokens=2, label="extra")]
    return tuple(table)


def _extend_table() -> tuple[AttentionCase, ...]:
    table = [
        # Fresh prompts, cached prefixes of every kind, a decode-like token, requests with nothing to do or to see.
        AttentionCase(
            heads,
            seq_lens=(17, 33, 257, 300, 1, 0, 64),
            query_lens=(17, 1, 32, 31, 1, 0, 0),
            block_size=block_size,
            layout=layout,
            index_dtype=index_dtype,
        )
        for heads in HEADS
        for block_size in BLOCK_SIZES
        for layout, index_dtype in (("contiguous", "int64"), ("layered", "int32"))
    ]
    table += [AttentionCase(2, (n,), query_lens=(n,), label="fresh") for n in BOUNDARY_LENGTHS if n <= 257]
    table += [
        AttentionCase(2, (4097,), query_lens=(q,), block_size=64, label="prefix") for q in (1, 15, 16, 17, 33, 257)
    ]
    table += [
        AttentionCase(16, (40, 70), query_lens=(40, 33), layout=layout, poison=poison)
        for layout in LAYOUTS
        for poison in ("nan", "inf")
    ]
    # New tokens of a request without keys, as a padded batch has them: they see nothing.
    table += [AttentionCase(16, (0, 20), query_lens=(5, 20), fused_q=False, label="blind", out_padding=8)]
    table += [
        AttentionCase(16, (300,), query_lens=(64,), block_size=32, sharpness=sharpness, label=f"sharp{sharpness:g}")
        for sharpness in (0.01, 16.0)
    ]
    table += [
        AttentionCase(heads, (17, 300), query_lens=(17, 20), block_size=32, rank=rank, rope=rope)
        for heads in (1, 16, 40)
        for rank, rope in ((256, 32), (256, 64), (64, 32), (512, 0), (32, 16))
    ]
    table += [
        AttentionCase(16, (), query_lens=(), label="empty"),
        AttentionCase(16, (7, 20), query_lens=(3, 20), extra_tokens=3, label="extra"),
    ]
    return tuple(table)


def _bmm_table() -> tuple[BmmCase, ...]:
    table = [BmmCase(heads, rows, o, k) for heads in HEADS for rows in (1, 17) for k, o in ((128, 512), (512, 128))]
    table += [BmmCase(2, rows, 512, 128, transposed=False) for rows in (0, 1, 2, 15, 16, 17, 31, 32, 33, 256, 257)]
    # GLM-4.7 (192, 256), MiniCPM3 (64, 256) and widths no tile divides.
    table += [BmmCase(3, 5, o, k, out_padding=24) for k, o in ((192, 512), (512, 256), (64, 256), (256, 64))]
    table += [BmmCase(2, 7, o, k) for k, o in ((2, 1), (30, 17), (34, 33), (66, 48), (130, 100))]
    return tuple(table)


def _concat_table() -> tuple[ConcatCase, ...]:
    table = [
        ConcatCase(tokens, block_size, layout, index_dtype)
        for tokens, block_size in ((0, 16), (1, 1), (17, 16), (33, 48), (257, 128))
        for layout in LAYOUTS
        for index_dtype in ("int32", "int64")
    ]
    table += [ConcatCase(12, extra_tokens=4), ConcatCase(12, skipped=False), ConcatCase(9, rank=256, rope=32)]
    return tuple(table)


DECODE = _decode_table()
EXTEND = _extend_table()
BMM = _bmm_table()
CONCAT = _concat_table()
