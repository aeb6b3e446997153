# SPDX-License-Identifier: Apache-2.0
"""The oracle against independent computations, and its promises about memory it must not read."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from mla_testing import bf16, cases, compare, reference
from mla_testing.tolerances import Tolerance

torch = pytest.importorskip("torch", reason="the independent computation needs torch")

TIGHT = Tolerance(atol=1e-12, rtol=1e-11, bf16_output=False, min_cosine=1 - 1e-12, name="float64")


def _sdpa(query, keys, values, scale, context):
    """torch's own attention in float64: query [H, q, D], keys [H, n, D], token i sees context + i + 1 keys."""
    q, n = query.shape[1], keys.shape[1]
    mask = torch.arange(n)[None] < context + torch.arange(q)[:, None] + 1
    return torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)


@pytest.mark.parametrize("block_size", [1, 16, 48])
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_latent_attention_equals_sdpa(block_size, layout):
    case = cases.AttentionCase(4, (37, 5, 64), query_lens=(3, 5, 1), block_size=block_size, layout=layout)
    data = case.build()
    out, lse = reference.latent_attention(
        data.q_latent, data.q_pe, data.kv_cache, data.block_table, data.seq_lens, data.query_start_loc, data.scale
    )
    token = 0
    for request, (keys, new) in enumerate(zip(case.seq_lens, case.query_lens, strict=True)):
        flat = data.kv_cache[data.block_table[request, : -(-keys // block_size)]].reshape(-1, 576)[:keys]
        rows = torch.from_numpy(bf16.to_float64(flat)).expand(4, -1, -1)
        q = np.concatenate([data.q_latent, data.q_pe], axis=2)[token : token + new]
        query = torch.from_numpy(bf16.to_float64(q)).transpose(0, 1)
        expected = _sdpa(query, rows, rows[..., :512], case.scale, keys - new).transpose(0, 1)
        compare.assert_close(out[token : token + new], expected, tol=TIGHT)
        visible = torch.arange(keys)[None] < keys - new + torch.arange(new)[:, None] + 1
        scores = (query @ rows.transpose(1, 2) * case.scale).masked_fill(~visible, -torch.inf)
        compare.assert_close(lse[token : token + new], scores.logsumexp(-1).T, tol=TIGHT)
        token += new


@pytest.mark.parametrize("nope, v_dim", [(128, 128), (192, 256), (64, 64)])
def test_absorbed_and_decompressed_agree(nope, v_dim):
    heads, rng = 3, np.random.default_rng(1)
    case = cases.AttentionCase(heads, (33, 70, 0), query_lens=(33, 9, 1), layout="layered")
    data = case.build()
    kv_b = rng.standard_normal((heads * (nope + v_dim), 512)) / 22
    w_uk, w_uv = reference.split_kv_b(kv_b, heads, nope, v_dim)
    q_nope = rng.standard_normal((case.tokens, heads, nope))
    paged = (data.kv_cache, data.block_table, data.seq_lens, data.query_start_loc)
    whole = reference.mla_prefill_details(q_nope, data.q_pe, *paged, w_uk, w_uv, case.scale)
    latent, lse = reference.latent_attention(reference.absorb(q_nope, w_uk), data.q_pe, *paged, case.scale)
    compare.assert_close(reference.de_absorb(latent, w_uv), whole.out, tol=TIGHT)
    compare.assert_close(lse, whole.lse, tol=TIGHT)
    assert (whole.lse[-1] == -np.inf).all() and (whole.out[-1] == 0).all()
    # Unlike the per-head values, kv_b's halves must not be swapped or transposed unnoticed.
    np.testing.assert_array_equal(w_uk[1, :, 2], kv_b[nope + v_dim + 2])
    np.testing.assert_array_equal(w_uv[1, 2], kv_b[nope + v_dim + nope + 2])


def test_equals_transformers_attention():
    """transformers' DeepSeek-V2 attention layer in float64, rotation included, is the same mathematics."""
    modeling = pytest.importorskip("transformers.models.deepseek_v2.modeling_deepseek_v2")
    from transformers import DeepseekV2Config

    heads, tokens = 2, 40
    config = DeepseekV2Config(
        hidden_size=64,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        max_position_embeddings=128,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    layer = modeling.DeepseekV2Attention(config, 0).double()
    hidden = torch.randn(1, tokens, 64, dtype=torch.float64)
    frequencies = modeling.DeepseekV2RotaryEmbedding(config)(hidden, torch.arange(tokens)[None])
    mask = torch.full((1, 1, tokens, tokens), -torch.inf, dtype=torch.float64).triu(1)
    with torch.no_grad():
        expected = layer(hidden, attention_mask=mask, position_embeddings=frequencies)[0]
        q = layer.q_proj(hidden)[0].view(tokens, heads, 192)
        latent, k_pe = layer.kv_a_proj_with_mqa(hidden)[0].split([512, 64], dim=-1)
        latent = layer.kv_a_layernorm(latent)
        q_pe, k_pe = modeling.apply_rotary_emb(q[None, :, :, 128:].transpose(1, 2), k_pe[None, None], frequencies)
        q_pe, k_pe = q_pe[0].transpose(0, 1).numpy(), k_pe[0, 0].numpy()
        cache = np.zeros((tokens, 1, 576))
        reference.concat_and_cache(latent.numpy(), k_pe, cache, np.arange(tokens)[::-1])
        w_uk, w_uv = reference.split_kv_b(layer.kv_b_proj.weight.numpy(), heads, 128, 128)
        table = np.arange(tokens)[None, ::-1]
        out, _ = reference.mla_prefill(
            q[..., :128].numpy(), q_pe, cache, table, [tokens], [0, tokens], w_uk, w_uv, layer.scaling
        )
        actual = layer.o_proj(torch.from_numpy(out.reshape(tokens, -1)))
    # Its norm and rotation compute in float32.
    loose = Tolerance(atol=1e-6, rtol=1e-5, bf16_output=False, min_cosine=1 - 1e-10, name="float32 rotation")
    compare.assert_close(actual, expected[0], tol=loose)


@pytest.mark.parametrize("poison", ["nan", "inf"])
def test_reads_only_live_rows(poison):
    """fault class 32, 35: a result is the same to the bit whatever lies outside the live rows."""
    clean = cases.AttentionCase(2, (17, 0, 40), query_lens=(2, 1, 40), poison="zero")
    results = []
    for case in (clean, cases.replace(clean, poison=poison, layout="padded", index_dtype="int64")):
        data = case.build()
        results.append(
            reference.latent_attention(
                data.q_latent, data.q_pe, data.kv_cache, data.block_table, data.seq_lens, data.query_start_loc, 0.07
            )
        )
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.isfinite(results[0][0]).all()


def test_nothing_to_attend():
    data = cases.AttentionCase(2, (0, 3), query_lens=(2, 5)).build()
    out, lse = reference.latent_attention(
        data.q_latent, data.q_pe, data.kv_cache, data.block_table, data.seq_lens, data.query_start_loc, 0.07
    )
    assert (out[:4] == 0).all() and (lse[:4] == -np.inf).all()
    assert (out[4:] != 0).all() and np.isfinite(lse[4:]).all()


def test_nan_in_one_head_stays_there():
    """fault class 38: neither spread nor silently zeroed."""
    data = cases.AttentionCase(3, (20,)).build()
    data.q_latent[0, 1, 7] = bf16.NAN
    out, _ = reference.latent_attention(
        data.q_latent, data.q_pe, data.kv_cache, data.block_table, data.seq_lens, None, 0.07
    )
    assert np.isnan(out[0, 1]).all() and np.isfinite(out[0, [0, 2]]).all()


def test_long_runs_are_cut_without_effect(monkeypatch):
    case = cases.AttentionCase(5, (50, 33), query_lens=(50, 20))
    whole = case.expected()
    monkeypatch.setattr(reference, "_MAX_SCORES", 1)
    data = case.build()
    out, lse = reference.latent_attention(
        data.q_latent, data.q_pe, data.kv_cache, data.block_table, data.seq_lens, data.query_start_loc, data.scale
    )
    compare.assert_close(out, whole.out, tol=TIGHT)
    compare.assert_close(lse, whole.lse, tol=TIGHT)


def test_bmm_is_einsum():
    rng = np.random.default_rng(0)
    mat1, mat2 = rng.standard_normal((3, 4, 5)), rng.standard_normal((3, 6, 5))
    compare.assert_close(reference.bmm(mat1, mat2), np.einsum("nmk,nok->nmo", mat1, mat2), tol=TIGHT)


def test_concat_and_cache():
    """fault class 33: rows with a negative slot write nothing."""
    cache = np.full((3, 2, 5), 9.0)
    kv_c, k_pe = np.arange(12.0).reshape(4, 3), -np.arange(8.0).reshape(4, 2)
    reference.concat_and_cache(kv_c, k_pe, cache, [5, -1, 0])
    np.testing.assert_array_equal(cache[2, 1], [0, 1, 2, 0, -1])
    np.testing.assert_array_equal(cache[0, 0], [6, 7, 8, -4, -5])
    assert (cache == 9.0).sum() == 20
    before = cache.copy()
    with pytest.raises(ValueError, match="slot_mapping holds 6; the cache has 6 slots"):
        reference.concat_and_cache(kv_c, k_pe, cache, [1, 6])
    with pytest.raises(ValueError, match="5 entries for 4 tokens"):
        reference.concat_and_cache(kv_c, k_pe, cache, [1, 2, 3, 4, 5])
    np.testing.assert_array_equal(cache, before)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"seq_lens": [-1, 3]}, "negative length -1"),
        ({"seq_lens": [999, 3]}, "request 0 needs 999 keys"),
        ({"query_start_loc": [0, 3, 2]}, "no rising list"),
        ({"q_pe": np.zeros((2, 1, 64))}, r"q_pe has shape \(2, 1, 64\)"),
        ({"kv_cache": np.zeros((4, 16, 575))}, "rows of 575, expected R \\+ P = 576"),
        ({"block_table": np.zeros((3, 4), int)}, "do not fit together"),
    ],
)
def test_bad_input(change, message):
    data = cases.AttentionCase(2, (5, 3)).build()
    arguments = {
        name: getattr(data, name)
        for name in ("q_latent", "q_pe", "kv_cache", "block_table", "seq_lens", "query_start_loc", "scale")
    }
    with pytest.raises(ValueError, match=message):
        reference.latent_attention(**{**arguments, **change})


def test_bf16_rounding_matches_ml_dtypes():
    every = np.arange(1 << 16, dtype=np.uint16)
    exact = bf16.to_float32(every)
    np.testing.assert_array_equal(exact.view(np.uint32), every.astype(np.uint32) << 16)
    numbers = ~np.isnan(exact)
    np.testing.assert_array_equal(bf16.from_float(exact)[numbers], every[numbers])
    assert np.isnan(bf16.to_float32(bf16.from_float(exact[~numbers]))).all()
    rng = np.random.default_rng(0)
    random = rng.integers(0, 1 << 32, 1 << 20, dtype=np.uint32).view(np.float32)
    ties = (np.arange(0, 1 << 16, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    values = np.concatenate([random, ties])
    values = values[~np.isnan(values)]
    np.testing.assert_array_equal(bf16.from_float(values), values.astype(ml_dtypes.bfloat16).view(np.uint16))
    np.testing.assert_array_equal(bf16.to_float64(values.astype(ml_dtypes.bfloat16)), bf16.round_to_bf16(values))


def test_bf16_rounds_float64_once():
    """Just above a tie: float32 would see the tie and round to even, downwards."""
    above, tie = 1.0 + 2.0**-8 + 2.0**-40, 1.0 + 2.0**-8
    assert bf16.from_float(np.float64(above)) == 0x3F81
    assert bf16.from_float(np.float64(tie)) == 0x3F80
    assert bf16.from_float(np.float64(-above)) == 0xBF81
    assert bf16.from_float(np.float64(1e300)) == 0x7F80
    assert bf16.from_float(np.float64(1e-300)) == 0


def test_half_ulp():
    np.testing.assert_array_equal(bf16.half_ulp([1.0, 1.99, 2.0, -3.0]), np.array([1, 1, 2, 2]) * 2.0**-8)
    assert bf16.half_ulp([0.0])[0] == 2.0**-134
