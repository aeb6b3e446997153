# SPDX-License-Identifier: Apache-2.0
"""prefill_attention_cpu against the float64 reference: keys and values of every head expanded from the latent rows."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from calls import torch_ops

import amx_kernels
from mla_testing import bf16, cases, compare, reference, tolerances
from mla_testing.cases import AttentionCase, AttentionData


@dataclass(frozen=True)
class PrefillCase:
    """An ``AttentionCase`` and the two widths of a head: its queries become q_nope, its latent rows stay."""

    attention: AttentionCase
    nope: int = 128
    value: int = 128

    @property
    def id(self) -> str:
        return self.attention.id + (f"-n{self.nope}e{self.value}" if (self.nope, self.value) != (128, 128) else "")

    def build(self) -> Prefill:
        q_nope, w_uk, w_uv = _weights(self.attention.heads, self.attention.tokens, self.attention.rank, self)
        data = self.attention.build()
        if not self.attention.fused_q:
            q_nope = np.ascontiguousarray(q_nope.transpose(1, 0, 2)).transpose(1, 0, 2)
        shape = (self.attention.tokens, self.attention.heads, self.value)
        out, buffer = cases.guarded(shape, np.uint16, row_padding=self.attention.out_padding)
        return Prefill(self, data, q_nope, w_uk, w_uv, out, buffer)

    def expected(self) -> reference.Attention:
        """The float64 result, computed once for all layouts of the same numbers."""
        plain = replace(self.attention, block_size=16, layout="contiguous", index_dtype="int64", fused_q=True)
        return _expected(replace(self, attention=replace(plain, out_padding=0, label="")))


@functools.lru_cache(maxsize=8)
def _weights(heads: int, tokens: int, rank: int, case: PrefillCase) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q_nope [T, H, N], w_uk [H, N, R], w_uv [H, E, R] as bits; expanded keys and values are about 1 in size."""
    rng = np.random.default_rng((heads, tokens, rank, case.nope, case.value))
    q_nope = rng.standard_normal((tokens, heads, case.nope)) * case.attention.sharpness
    w_uk, w_uv = (rng.standard_normal((heads, n, rank)) / math.sqrt(rank) for n in (case.nope, case.value))
    return bf16.from_float(q_nope), bf16.from_float(w_uk), bf16.from_float(w_uv)


@functools.lru_cache(maxsize=16)
def _expected(case: PrefillCase) -> reference.Attention:
    p = case.build()
    d, live = p.data, p.data.live_tokens
    arrays = (p.q_nope[:live], d.q_pe[:live], d.kv_cache, d.block_table, d.seq_lens, d.query_start_loc)
    return reference.mla_prefill_details(*arrays, p.w_uk.transpose(0, 2, 1), p.w_uv, d.scale)


@dataclass(frozen=True)
class Prefill:
    """The arrays of a case; weights are plain."""

    case: PrefillCase
    data: AttentionData
    q_nope: np.ndarray
    w_uk: np.ndarray
    w_uv: np.ndarray
    out: np.ndarray
    out_buffer: np.ndarray

    def run(self, **changes: np.ndarray | None) -> None:
        """One call; keywords replace arguments."""
        d = self.data
        arguments = {
            "out": self.out,
            "lse": d.lse,
            "q_nope": self.q_nope,
            "q_pe": d.q_pe,
            "kv_cache": d.kv_cache,
            "block_table": d.block_table,
            "seq_lens": d.seq_lens,
            "query_start_loc": d.query_start_loc,
            "w_uk": amx_kernels.convert_weight_packed(self.w_uk),
            "w_uv": amx_kernels.convert_weight_packed(self.w_uv),
            "scale": d.scale,
        }
        amx_kernels.prefill_attention_cpu(*{**arguments, **changes}.values())

    def check(self, *, lse: bool = True) -> None:
        expected, live, name = self.case.expected(), self.data.live_tokens, self.case.id
        assert cases.canaries_intact(self.out, self.out_buffer), f"{name}: bytes around out were written"
        assert cases.canaries_intact(self.data.lse, self.data.lse_buffer), f"{name}: bytes around lse were written"
        assert (self.out[live:] == bf16.NAN).all(), f"{name}: rows of tokens past the last request were written"
        if lse:
            tol = tolerances.lse(expected, rounded_operands=True)
            compare.assert_close(self.data.lse[:live], expected.lse, tol=tol, what=f"{name} lse")
        else:
            assert np.isnan(self.data.lse).all()
        assert not self.out[:live][expected.lse == -np.inf].any(), f"{name}: tokens without keys must give exact zeros"
        compare.assert_close(self.out[:live], expected.out, tol=tolerances.prefill(expected), what=f"{name} out")


def by_id(table):
    return pytest.mark.parametrize("case", table, ids=lambda case: case.id)


_MIXED = {"seq_lens": (17, 33, 257, 300, 1, 0, 64, 9), "query_lens": (17, 1, 32, 31, 1, 0, 0, 9)}
_TABLE = (
    # Every block size and both layouts; fresh prompts, prefixes of every kind, a decode, nothing to do, nothing to see.
    *(
        PrefillCase(AttentionCase(2, **_MIXED, block_size=block_size, layout=layout, index_dtype=dtype))
        for block_size in cases.BLOCK_SIZES
        for layout, dtype in (("contiguous", "int64"), ("layered", "int32"))
    ),
    *(PrefillCase(AttentionCase(heads, **_MIXED, block_size=32)) for heads in (1, 16, 22)),
    PrefillCase(AttentionCase(128, (20, 40), query_lens=(20, 3), block_size=64)),
    # Around blocks of queries (64), of keys (256) and of expanded keys (512).
    *(
        PrefillCase(AttentionCase(2, (n,), query_lens=(n,), block_size=16, label="fresh"))
        for n in (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 255, 256, 257, 511, 512, 513)
    ),
    *(
        PrefillCase(AttentionCase(2, (prefix + 67,), query_lens=(67,), block_size=32, label="prefix"))
        for prefix in (1, 64, 189, 255, 256, 445, 446, 511, 1024)
    ),
    PrefillCase(AttentionCase(1, (4097,), query_lens=(3,), block_size=64, label="prefix")),
    PrefillCase(AttentionCase(2, (0, 20), query_lens=(5, 20), label="blind")),
    PrefillCase(AttentionCase(2, (40, 70), query_lens=(40, 33), fused_q=False, out_padding=8, label="strided")),
    PrefillCase(AttentionCase(2, (7, 20), query_lens=(3, 20), extra_tokens=3, label="extra")),
    PrefillCase(AttentionCase(2, (40, 70), query_lens=(40, 33), layout="wide", poison="inf")),
    *(
        PrefillCase(AttentionCase(2, (600,), query_lens=(70,), sharpness=sharpness, label=f"sharp{sharpness:g}"))
        for sharpness in (0.01, 8.0)
    ),
    # GLM-4.7, MiniCPM3, and widths that no tile divides.
    PrefillCase(AttentionCase(3, (90,), query_lens=(70,)), nope=192, value=256),
    PrefillCase(AttentionCase(3, (90,), query_lens=(70,), rank=256, rope=32), nope=64, value=64),
    *(
        PrefillCase(AttentionCase(3, (90, 5), query_lens=(70, 5), rank=rank, rope=rope), nope=nope, value=value)
        for rank, rope, nope, value in ((32, 7, 5, 3), (64, 0, 40, 17), (96, 12, 20, 130), (32, 1, 1, 1))
    ),
)


@by_id(_TABLE)
def test_prefill(tier, case):
    prefill = case.build()
    prefill.run()
    prefill.check()


@by_id([PrefillCase(AttentionCase(2, (40, 300), query_lens=(40, 33)))])
def test_lse_is_optional(tier, case):
    prefill = case.build()
    prefill.run(lse=None)
    prefill.check(lse=False)


INVARIANCE = PrefillCase(AttentionCase(2, (300, 1200, 40, 700), query_lens=(300, 600, 1, 65), block_size=32))


def test_bits_do_not_depend_on_threads(tier, threads):
    results = []
    for count in (1, 2, 3, 7):
        amx_kernels.set_num_threads(count)
        prefill = INVARIANCE.build()
        prefill.run()
        results.append((prefill.out, prefill.data.lse))
    for out, lse in results[1:]:
        np.testing.assert_array_equal(out, results[0][0])
        np.testing.assert_array_equal(lse, results[0][1])


def test_bits_do_not_depend_on_batch_mates(tier):
    whole = INVARIANCE.build()
    whole.run()
    starts = whole.data.query_start_loc
    for request in range(len(starts) - 1):
        tokens = slice(starts[request], starts[request + 1])
        alone = INVARIANCE.build()
        out, lse = alone.out[tokens], alone.data.lse[tokens]
        alone.run(
            out=out,
            lse=lse,
            q_nope=alone.q_nope[tokens],
            q_pe=alone.data.q_pe[tokens],
            block_table=alone.data.block_table[request : request + 1],
            seq_lens=alone.data.seq_lens[request : request + 1],
            query_start_loc=starts[[request, request + 1]] - starts[request],
        )
        np.testing.assert_array_equal(out, whole.out[tokens])
        np.testing.assert_array_equal(lse, whole.data.lse[tokens])


def test_nothing_of_an_earlier_call_is_read(tier, threads):
    amx_kernels.set_num_threads(1)
    case = PrefillCase(AttentionCase(2, (70, 33), query_lens=(70, 20), block_size=5))
    poisoned = case.build()
    originals = {"q_nope": poisoned.q_nope, "q_pe": poisoned.data.q_pe, "kv_cache": poisoned.data.kv_cache}
    poisoned.run(**{name: np.full_like(array, bf16.NAN) for name, array in originals.items()})
    prefill = case.build()
    prefill.run()
    prefill.check()


def test_both_forms_agree(tier):
    """Decompressed, and absorbed by hand: project q, attend over latent rows, expand the result."""
    prefill = INVARIANCE.build()
    prefill.run()
    d, (tokens, heads, _) = prefill.data, prefill.q_nope.shape
    q_latent = np.empty((heads, tokens, 512), np.uint16)
    w_uk = np.ascontiguousarray(prefill.w_uk.transpose(0, 2, 1))
    amx_kernels.bmm_cpu(q_latent, prefill.q_nope.transpose(1, 0, 2), w_uk, False)
    latent, lse = np.empty((tokens, heads, 512), np.uint16), np.empty((tokens, heads), np.float32)
    arrays = (q_latent.transpose(1, 0, 2), d.q_pe, d.kv_cache, d.block_table, d.seq_lens, d.query_start_loc)
    amx_kernels.extend_attention_cpu(latent, lse, *arrays, d.scale)
    out = np.empty((tokens, heads, 128), np.uint16)
    amx_kernels.bmm_cpu(out.transpose(1, 0, 2), latent.transpose(1, 0, 2), prefill.w_uv, False)
    expected = prefill.case.expected()
    compare.assert_close(out, expected.out, tol=tolerances.prefill(expected), what="absorbed")
    compare.assert_close(prefill.out, expected.out, tol=tolerances.prefill(expected), what="decompressed")


def test_torch(tier):
    ops = torch_ops()
    prefill = PrefillCase(AttentionCase(4, (40, 300), query_lens=(40, 33), block_size=32)).build()
    d = prefill.data
    weights = (ops.convert_weight_packed(cases.as_torch(w)) for w in (prefill.w_uk, prefill.w_uv))
    arrays = (prefill.out, d.lse, prefill.q_nope, d.q_pe, d.kv_cache, d.block_table, d.seq_lens, d.query_start_loc)
    ops.prefill_attention_cpu(*map(cases.as_torch, arrays), *weights, d.scale)
    prefill.check()


def test_the_choice_follows_the_multiply_accumulates(monkeypatch):
    """Fresh prompts are decompressed, decodes absorbed; the break-even grows with context to 128 or 150."""
    monkeypatch.delenv("AMX_KERNELS_PREFILL", raising=False)
    choose = amx_kernels.prefill_decompressed
    assert not choose(1, 1000) and not choose(16, 8192)
    assert choose(2048, 2048) and choose(512, 8704) and choose(512, 512)
    for keys in (512, 2048, 8192, 65536):
        chosen = [choose(query, keys) for query in range(1, min(keys, 600))]
        assert chosen == sorted(chosen), "more queries never turn the choice back"
        if keys > 600:
            assert 100 < chosen.index(True) < 160


@pytest.mark.parametrize("value", ["absorbed", "decompressed", "auto", ""])
def test_the_choice_can_be_forced(monkeypatch, value):
    monkeypatch.setenv("AMX_KERNELS_PREFILL", value)
    forced = {"absorbed": (False, False), "decompressed": (True, True)}.get(value, (False, True))
    assert (amx_kernels.prefill_decompressed(1, 100), amx_kernels.prefill_decompressed(900, 900)) == forced


def test_a_wrong_choice_is_refused(monkeypatch):
    monkeypatch.setenv("AMX_KERNELS_PREFILL", "fast")
    with pytest.raises(ValueError, match='AMX_KERNELS_PREFILL is "fast", expected absorbed, decompressed or auto'):
        amx_kernels.prefill_decompressed(5, 5)
    monkeypatch.delenv("AMX_KERNELS_PREFILL")
    with pytest.raises(ValueError, match="query is -1, expected at least 0"):
        amx_kernels.prefill_decompressed(-1, 5)
    with pytest.raises(ValueError, match="keys is 4, expected at least the 5 new tokens"):
        amx_kernels.prefill_decompressed(5, 4)
