# SPDX-License-Identifier: Apache-2.0
"""Faults met between vLLM and the kernels: steps, caches, weights and dimensions, without starting an engine."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from backend_support import DIMS, Batch, Linear, make_builder, make_impl, random_weight

fault = pytest.mark.fault


@fault(41, "https://github.com/sgl-project/sglang/pull/33892")
@pytest.mark.parametrize(
    ("requests", "parts"),
    [([], (0, 0)), ([(64, 1), (3, 1)], (2, 0)), ([(0, 17), (64, 40)], (0, 2)), ([(9, 1), (0, 5)], (1, 1))],
    ids=["idle", "decodes-only", "prefills-only", "both"],
)
def test_a_step_with_an_empty_part(vllm_config: Any, requests: list[tuple[int, int]], parts: tuple[int, int]) -> None:
    from amx_mla_backend.attention import AMXMLAAttention

    batch = Batch(requests)
    metadata = make_builder().build(0, batch.common())
    assert (metadata.num_decodes, metadata.num_prefills) == parts
    assert (metadata.decode is None, metadata.prefill is None) == (parts[0] == 0, parts[1] == 0)
    impl = make_impl(weight := random_weight())
    impl.process_weights_after_loading(torch.bfloat16)
    layer = SimpleNamespace(impl=impl, num_heads=DIMS.heads, v_head_dim=DIMS.v_dim, layer_name="layer")
    output = torch.full((batch.tokens + 3, DIMS.heads * DIMS.v_dim), float("nan"), dtype=torch.bfloat16)
    padded = torch.nn.functional.pad(batch.q, (0, 0, 0, 0, 0, 3), value=float("nan"))
    AMXMLAAttention.forward_impl(layer, padded, None, None, batch.cache, metadata, output)
    if requests:
        live = output[: batch.tokens].view(batch.tokens, DIMS.heads, DIMS.v_dim)
        batch.check(live, weight, impl.scale)
    assert output[batch.tokens :].isnan().all(), "rows past the step's tokens were written"


@fault(17, "https://github.com/vllm-project/vllm/pull/14253")
@fault(18, "https://github.com/ROCm/aiter/issues/4076")
def test_successive_chunks_of_a_small_token_budget(vllm_config: Any) -> None:
    """A budget of 32 tokens: a decode, the one-token tail of a prompt and a chunk share steps; each step plans anew."""
    impl = make_impl(weight := random_weight())
    impl.process_weights_after_loading(torch.bfloat16)
    builder = make_builder()
    for requests in ([(300, 1), (64, 1), (31, 30)], [(301, 1), (61, 31)], [(302, 1), (92, 1), (0, 30)]):
        batch = Batch(requests)
        metadata = builder.build(0, batch.common())
        output = torch.zeros(batch.tokens, DIMS.heads, DIMS.v_dim, dtype=torch.bfloat16)
        decodes = metadata.num_decode_tokens
        if decodes:
            impl.decode(batch.q[:decodes], batch.cache, metadata, output[:decodes])
        if decodes < batch.tokens:
            impl.prefill(batch.q[decodes:], batch.cache, metadata, output[decodes:])
        batch.check(output, weight, impl.scale)


@fault(50, "https://github.com/vllm-project/vllm/pull/15848")
@fault(88, "https://github.com/LMCache/LMCache/pull/4451")
@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_the_cache_holds_one_latent_row_per_token(vllm_config: Any, block_size: int) -> None:
    """bf16, 1,152 bytes a token and layer: no second half for V. What vLLM reserves for a block is what one fills."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    spec = MLAAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    assert spec.page_size_bytes == block_size * 1152
    memory = torch.zeros(3 * spec.page_size_bytes // 2, dtype=torch.bfloat16)
    rows = torch.randn(block_size, 576).to(torch.bfloat16)
    second = torch.arange(block_size, 2 * block_size)
    make_impl(random_weight()).do_kv_cache_update(
        rows[:, :512], rows[:, None, 512:], memory.view(3, block_size, 576), second, "auto", torch.ones(())
    )
    page = spec.page_size_bytes // 2
    assert torch.equal(memory[page : 2 * page].view(block_size, 576), rows)
    assert not memory[:page].any()
    assert not memory[2 * page :].any()


@fault(1, "https://github.com/vllm-project/vllm/pull/56773", refused=True)
def test_processing_weights_twice_never_reads_a_packed_weight(vllm_config: Any) -> None:
    """The post-load hook may run twice: the second time the raw weight is gone, and the layer's name says so."""
    from amx_mla_backend.attention import AMXMLAAttention

    impl = make_impl(random_weight())
    impl.layer_name = "model.layers.3.self_attn"
    layer = SimpleNamespace(impl=impl, kv_b_proj=impl.kv_b_proj)
    AMXMLAAttention.process_weights_after_loading(layer, torch.bfloat16)
    packed = impl._w_uk.clone()
    with pytest.raises(ValueError, match=r"model\.layers\.3\.self_attn\.kv_b_proj.*packed or freed"):
        AMXMLAAttention.process_weights_after_loading(layer, torch.bfloat16)
    assert torch.equal(impl._w_uk, packed)


@fault(2, "https://github.com/vllm-project/vllm/pull/51471")
@fault(4, "https://github.com/vllm-project/vllm/pull/13725", refused=True)
@pytest.mark.parametrize("wrappers", [0, 1, 3])
def test_the_raw_weight_lives_in_the_innermost_layer(vllm_config: Any, wrappers: int) -> None:
    """One rule through any number of wrappers, also for freeing it; a layer without a weight is named."""
    from amx_mla_backend import weights

    inner: Any = Linear(random_weight())
    linear = inner
    for _ in range(wrappers):
        linear = SimpleNamespace(base_layer=linear)
    dims = {"num_heads": DIMS.heads, "nope": DIMS.nope, "v_dim": DIMS.v_dim, "rank": DIMS.rank}
    w_uk, w_uv = weights.absorbed_projections(linear, name="layers.0", **dims)
    rows = inner.weight.view(DIMS.heads, DIMS.nope + DIMS.v_dim, DIMS.rank)
    assert torch.equal(w_uk.transpose(1, 2), rows[:, : DIMS.nope])
    assert torch.equal(w_uv, rows[:, DIMS.nope :])
    weights.release(linear)
    assert inner.weight.numel() == 0
    with pytest.raises(ValueError, match=r"layers\.0\.kv_b_proj"):
        weights.absorbed_projections(linear, name="layers.0", **dims)
    with pytest.raises(ValueError, match=r"layers\.0\.kv_b_proj"):
        weights.absorbed_projections(SimpleNamespace(quant_method=None), name="layers.0", **dims)


MODELS = {
    "glm-4.7-flash": SimpleNamespace(heads=20, nope=192, v_dim=256, rank=512, rope=64),
    "minicpm3": SimpleNamespace(heads=40, nope=64, v_dim=64, rank=256, rope=32),
    "kimi-k3-0.40b": SimpleNamespace(heads=4, nope=64, v_dim=64, rank=64, rope=96),
    "moonlight": SimpleNamespace(heads=16, nope=128, v_dim=128, rank=512, rope=64),
    "tp6-share": SimpleNamespace(heads=11, nope=128, v_dim=128, rank=512, rope=64),
}


@fault(56, "https://github.com/vllm-project/vllm/issues/52008")
@fault(58, "https://github.com/vllm-project/vllm/pull/25742")
@fault(59, "https://github.com/eugr/spark-vllm-docker/pull/17")
@fault(48, "https://github.com/vllm-project/vllm/issues/16658")
@pytest.mark.parametrize("model", MODELS)
def test_models_whose_value_head_differs_from_the_query_head(vllm_config: Any, model: str) -> None:
    """Split of kv_b_proj, absorb, attention, de-absorb with each model's own dimensions and q_lora_rank None."""
    dims = MODELS[model]
    impl = make_impl(weight := random_weight(dims), dims, q_lora_rank=None)
    impl.process_weights_after_loading(torch.bfloat16)
    for requests in ([(40, 1), (3, 1)], [(0, 17), (33, 5)]):
        batch = Batch(requests, dims)
        metadata = make_builder(dims).build(0, batch.common())
        output = torch.zeros(batch.tokens, dims.heads, dims.v_dim, dtype=torch.bfloat16)
        if metadata.decode is not None:
            impl.decode(batch.q, batch.cache, metadata, output)
        else:
            impl.prefill(batch.q, batch.cache, metadata, output)
        batch.check(output, weight, impl.scale)


@fault(29, "https://github.com/vllm-project/vllm/issues/54300", refused=True)
def test_no_log_sum_exp_is_promised_for_decode(vllm_config: Any) -> None:
    """Decode context parallelism needs it; without the promise vLLM refuses at start, before any token is wrong."""
    assert make_impl(random_weight()).can_return_lse_for_decode is False


@fault(34, "https://github.com/vllm-project/vllm/issues/57156")
def test_a_profiling_run_leaves_no_trace(vllm_config: Any) -> None:
    """No metadata: the output is zero and neither the cache nor the null block is written."""
    from amx_mla_backend.attention import AMXMLAAttention

    impl = make_impl(random_weight())
    output = torch.full((5, 8), float("nan"), dtype=torch.bfloat16)
    AMXMLAAttention.forward_impl(SimpleNamespace(), None, None, None, None, None, output)
    assert (output == 0).all()
    cache = torch.zeros(2, 32, 576, dtype=torch.bfloat16)
    rows = torch.full((3, 576), float("nan"), dtype=torch.bfloat16)
    nothing = torch.full((3,), -1, dtype=torch.int64)
    impl.do_kv_cache_update(rows[:, :512], rows[:, None, 512:], cache, nothing, "auto", torch.ones(()))
    assert (cache == 0).all()


@fault(79, "https://github.com/sgl-project/sglang/pull/28171", refused=True)
def test_attention_without_keys_reads_the_cache_or_says_what_is_missing() -> None:
    """k = v = None means that the rows are in the cache already; a value without its key cannot be."""
    from amx_mla_backend import ops
    from mla_testing import reference, tolerances
    from mla_testing.compare import assert_close

    batch = Batch([(30, 4)], block_size=1)
    q = torch.randn(4, 4, 576).to(torch.bfloat16)
    out = torch.zeros(4, 4, 512, dtype=torch.bfloat16)
    arguments: dict[str, Any] = {
        "q_extend": q,
        "k_extend": None,
        "v_extend": None,
        "o_extend": out,
        "k_buffer": batch.cache,
        "v_buffer": batch.cache[..., :512],
        "req_to_token": batch.block_table,
        "req_pool_indices": torch.zeros(1, dtype=torch.int64),
        "seq_lens": batch.seq_lens,
        "extend_seq_lens": torch.tensor([4], dtype=torch.int32),
        "extend_start_loc": torch.tensor([0], dtype=torch.int32),
        "max_len_extend": 4,
        "sm_scale": 0.1,
        "logit_cap": 0.0,
        "is_cross_attn": False,
        "sliding_window_size": -1,
        "encoder_lens": None,
        "sinks": None,
    }
    ops.cpu_mla_extend(**arguments)
    bits = q.view(torch.uint16).numpy()
    expected = reference.latent_attention_details(
        bits[..., :512], bits[..., 512:], batch.cache.view(torch.uint16).numpy(), batch.block_table.numpy(), [34],
        [0, 4], 0.1,
    )  # fmt: skip
    assert_close(out, expected.out, tol=tolerances.attention(expected), what="extend without keys")
    with pytest.raises(ValueError, match="v_buffer=None"):
        ops.cpu_mla_extend(**(arguments | {"v_buffer": None}))


@fault(22, "https://github.com/sgl-project/sglang/pull/35434", refused=True)
def test_encoder_attention_is_refused_at_both_ends(vllm_config: Any) -> None:
    for kind in ("encoder", "encoder_only", "encoder_decoder"):
        with pytest.raises(NotImplementedError, match=f"attn_type='{kind}'"):
            make_impl(random_weight(), attn_type=kind)
    batch = Batch([(3, 2)])
    with pytest.raises(NotImplementedError, match="causal=False"):
        make_builder().build(0, replace(batch.common(), causal=False))


@fault(36, "https://github.com/ikawrakow/ik_llama.cpp/issues/1616", refused=True)
@fault(37, "https://github.com/ikawrakow/ik_llama.cpp/issues/538", refused=True)
@pytest.mark.parametrize("kind", ["fp8", "fp8_e4m3", "fp8_ds_mla", "int8"])
def test_quantised_caches_are_refused_by_name(vllm_config: Any, kind: str) -> None:
    """An exception, not an assert: it stays under `python -O`."""
    from amx_mla_backend.backend import AMXMLABackend

    assert kind not in AMXMLABackend.supported_kv_cache_dtypes
    with pytest.raises(NotImplementedError, match=f"kv_cache_dtype='{kind}'"):
        make_impl(random_weight(), kv_cache_dtype=kind)
