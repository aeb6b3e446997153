# SPDX-License-Identifier: Apache-2.0
"""The compare tool notices each kind of error, and the derived tolerances leave no room for real ones."""

from __future__ import annotations

import numpy as np
import pytest

from mla_testing import bf16, cases, compare, reference, tolerances

KEYS = (1, 2, 33, 257, 1025, 4096)


def simulated_kernel(data, *, drop_key=False, factor=1.0, rounded_sum=False):
    """What a right kernel computes: float32 sums, bfloat16 probabilities relative to a stale maximum, one rounding."""
    rank, block_size = data.case.rank, data.kv_cache.shape[1]
    stale = np.random.default_rng(0).random(128, np.float32)
    query = bf16.to_float32(np.concatenate([data.q_latent, data.q_pe], axis=2))
    for request, keys in enumerate(data.seq_lens.tolist()):
        first, end = data.query_start_loc[request : request + 2].tolist()
        at = np.arange(keys)
        rows = bf16.to_float32(data.kv_cache[data.block_table[request][at // block_size], at % block_size])
        for token in range(first, end):
            visible = keys - (end - first) + (token - first) + 1
            if visible <= 0:
                data.out[token], data.lse[token] = 0, -np.inf
                continue
            scores = query[token] @ rows[:visible].T * np.float32(data.scale)
            peak = scores.max(axis=1, keepdims=True) - stale[: len(scores), None]
            weights = np.exp(scores - peak)
            rounded = bf16.round_to_bf16(weights)
            total = (rounded if rounded_sum else weights).sum(axis=1, keepdims=True)
            if drop_key:
                rounded[:, visible // 2] = 0
            data.out[token] = bf16.from_float(factor * (rounded @ rows[:visible, :rank] / total))
            data.lse[token] = (peak + np.log(total))[:, 0]


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("sharpness", [0.01, 1.0, 8.0])
@pytest.mark.parametrize("rounded_sum", [False, True])
def test_a_right_kernel_passes(keys, sharpness, rounded_sum):
    data = cases.AttentionCase(16, (keys,), sharpness=sharpness).build()
    simulated_kernel(data, rounded_sum=rounded_sum)
    report = data.check(rounded_sum=rounded_sum)
    assert keys == 1 or report.worst_ratio > 0.25, f"the tolerance is slack: {report}"


@pytest.mark.parametrize("keys", KEYS)
def test_a_dropped_key_is_caught(keys):
    data = cases.AttentionCase(16, (keys,)).build()
    simulated_kernel(data, drop_key=True)
    with pytest.raises(AssertionError, match="elements beyond the attention limit; worst at"):
        data.check()


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("factor", [1.01, 0.99])
def test_a_wrong_scale_is_caught(keys, factor):
    data = cases.AttentionCase(16, (keys,)).build()
    simulated_kernel(data, factor=factor)
    with pytest.raises(AssertionError, match=r"beyond the attention limit|biased"):
        data.check()


@pytest.mark.parametrize("keys", KEYS)
def test_one_key_too_many_is_caught(keys):
    """A mask bound off by one at the end of the sequence."""
    data = cases.AttentionCase(16, (keys + 1,)).build()
    simulated_kernel(data)
    expected = reference.latent_attention_details(
        data.q_latent, data.q_pe, data.kv_cache, data.block_table, [keys], None, data.scale
    )
    with pytest.raises(AssertionError):
        compare.assert_close(data.out, expected.out, tol=tolerances.attention(expected))
    with pytest.raises(AssertionError):
        compare.assert_close(data.lse, expected.lse, tol=tolerances.lse(expected))


def _gemm(k=512, shape=(3, 17, 128)):
    rng = np.random.default_rng(0)
    mat1 = bf16.from_float(rng.standard_normal((shape[0], shape[1], k)))
    mat2 = bf16.from_float(rng.standard_normal((shape[0], shape[2], k)))
    return bf16.from_float(reference.bmm(mat1, mat2)), reference.bmm(mat1, mat2)


def test_right_rounding_passes_and_uses_the_tolerance():
    actual, expected = _gemm()
    assert 0.9 < compare.assert_close(actual, expected, tol=tolerances.gemm(512)).worst_ratio <= 1.0


@pytest.mark.parametrize("step", [1, -1])
def test_one_ulp_bias_is_caught(step):
    """Away from or towards zero: bits are ordered by magnitude."""
    actual, expected = _gemm()
    with pytest.raises(AssertionError, match="elements beyond the gemm K=512 limit"):
        compare.assert_close((actual + np.uint16(step % 65536)).astype(np.uint16), expected, tol=tolerances.gemm(512))


def test_truncation_instead_of_rounding_is_caught():
    _, expected = _gemm()
    truncated = (expected.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    with pytest.raises(AssertionError, match="beyond the gemm"):
        compare.assert_close(truncated, expected, tol=tolerances.gemm(512))


@pytest.mark.parametrize("keys", KEYS)
def test_one_ulp_bias_of_attention_is_caught(keys):
    data = cases.AttentionCase(16, (keys,)).build()
    simulated_kernel(data)
    data.out[...] += np.uint16(1)
    with pytest.raises(AssertionError, match=r"beyond the attention limit|biased"):
        data.check()


def test_bias_below_every_element_limit_is_caught():
    """Each element is within its limit; only together they show the fault."""
    expected = np.random.default_rng(0).standard_normal((64, 64))
    tol = tolerances.Tolerance(rtol=0.02, bf16_output=False, max_bias=0.004)
    compare.assert_close(expected * 1.003, expected, tol=tol)
    with pytest.raises(AssertionError, match=r"biased: actual values are 1\.01000 times the expected"):
        compare.assert_close(expected * 1.01, expected, tol=tol)


def test_wrong_element_is_named():
    actual, expected = _gemm()
    actual[1, 5, 77] = 0x3FC0
    with pytest.raises(AssertionError) as caught:
        compare.assert_close(actual, expected, tol=tolerances.gemm(512), what="absorb")
    message = str(caught.value)
    assert message.startswith("absorb: 1 of 6528 elements")
    assert "worst at [1, 5, 77]" in message and "actual 1.5" in message and f"{expected[1, 5, 77]:.9g}" in message


def test_swapped_rows_are_caught():
    actual, expected = _gemm()
    actual[:, [3, 4]] = actual[:, [4, 3]]
    with pytest.raises(AssertionError, match=r"elements beyond.* worst at \[\d, [34], \d+\]"):
        compare.assert_close(actual, expected, tol=tolerances.gemm(512))


@pytest.mark.parametrize("value, kind", [(np.nan, "NaN"), (np.inf, r"\+inf"), (-np.inf, "-inf")])
@pytest.mark.parametrize("side", ["actual", "expected"])
def test_non_finite_must_match(value, kind, side):
    values = np.ones((2, 3))
    sides = {"actual": values.copy(), "expected": values.copy()}
    sides[side][1, 2] = value
    with pytest.raises(AssertionError, match=rf"1 places where only one side is {kind}; first at \[1, 2\]"):
        compare.assert_close(**sides, tol=tolerances.EXACT)
    compare.assert_close(sides[side], sides[side].copy(), tol=tolerances.EXACT)


def test_infinity_of_the_wrong_sign():
    with pytest.raises(AssertionError, match="only one side is"):
        compare.assert_close([np.inf], [-np.inf], tol=tolerances.EXACT)


def test_shape_and_cosine():
    with pytest.raises(AssertionError, match=r"shape \(2,\), expected \(1, 2\)"):
        compare.assert_close([1.0, 2.0], [[1.0, 2.0]], tol=tolerances.EXACT)
    with pytest.raises(AssertionError, match="cosine"):
        compare.assert_close([1.0, -1.0], [1.0, 1.0], tol=tolerances.Tolerance(atol=9.0))


def test_lse_limit_is_float32_tight():
    expected = cases.AttentionCase(16, (4096,)).expected()
    limit = tolerances.lse(expected).limit(expected.lse)
    assert limit.max() < 1e-4, "one key of 4,096 moves the LSE by 2.4e-4"


def test_max_error_reports_without_judging():
    report = compare.max_error([1.0, 2.5, np.nan], [1.0, 2.0, np.nan])
    assert (report.max_abs, report.max_rel, report.elements) == (0.5, 0.25, 2)
    assert report.worst_position == (1,)
    assert "max |error| 5.000e-01" in str(report)
    assert compare.max_error(np.zeros(0), np.zeros(0)).elements == 0


def test_accepts_torch():
    torch = pytest.importorskip("torch", reason="torch tensors are optional")
    actual, expected = _gemm()
    tensor = torch.from_numpy(actual).view(torch.bfloat16)
    compare.assert_close(tensor, torch.from_numpy(expected), tol=tolerances.gemm(512))


def test_prefill_tolerance_covers_both_paths_and_catches_a_dropped_key():
    """Rounding q_latent (absorbed) or k_nope and v (decompressed) to bfloat16 passes; losing a key does not."""
    heads, rng = 4, np.random.default_rng(3)
    case = cases.AttentionCase(heads, (300,), query_lens=(40,))
    data = case.build()
    w_uk, w_uv = (bf16.from_float(rng.standard_normal(s) / 22) for s in ((heads, 512, 128), (heads, 128, 512)))
    q_nope = bf16.from_float(rng.standard_normal((40, heads, 128)))
    paged = (data.kv_cache, data.block_table, data.seq_lens, data.query_start_loc)
    expected = reference.mla_prefill_details(q_nope, data.q_pe, *paged, w_uk, w_uv, case.scale)
    tol, lse_tol = tolerances.prefill(expected), tolerances.lse(expected, rounded_operands=True)

    q_latent = bf16.from_float(reference.absorb(q_nope, w_uk))
    latent, lse = reference.latent_attention(q_latent, data.q_pe, *paged, case.scale)
    absorbed = bf16.from_float(reference.de_absorb(bf16.from_float(latent), w_uv))
    assert compare.assert_close(absorbed, expected.out, tol=tol).worst_ratio > 0.25
    compare.assert_close(lse, expected.lse, tol=lse_tol)

    row = bf16.to_float64(data.kv_cache)[data.block_table[0, :19]].reshape(-1, 576)[:300]
    keys = bf16.round_to_bf16(np.einsum("kr,hrn->hkn", row[:, :512], bf16.to_float64(w_uk)))
    values = bf16.round_to_bf16(np.einsum("kr,hvr->hkv", row[:, :512], bf16.to_float64(w_uv)))
    scores = np.einsum("thn,hkn->htk", bf16.to_float64(q_nope), keys)
    scores = (scores + np.einsum("thp,kp->htk", bf16.to_float64(data.q_pe), row[:, 512:])) * case.scale
    scores[:, np.arange(300)[None] > 260 + np.arange(40)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    rounded, total = bf16.round_to_bf16(weights), weights.sum(axis=2, keepdims=True)
    out = bf16.from_float((rounded @ values / total).transpose(1, 0, 2))
    assert compare.assert_close(out, expected.out, tol=tol).worst_ratio > 0.25

    rounded[:, :, 100] = 0
    out = bf16.from_float((rounded @ values / total).transpose(1, 0, 2))
    with pytest.raises(AssertionError):
        compare.assert_close(out, expected.out, tol=tol)
