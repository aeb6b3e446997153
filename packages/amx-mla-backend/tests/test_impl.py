# SPDX-License-Identifier: Apache-2.0
"""The impl against float64, through the metadata builder and the layer's forward, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from backend_support import DIMS, Batch, Linear, make_builder, make_impl, random_weight


def forward(impl: Any, batch: Batch, builder: Any, output: torch.Tensor | None = None) -> torch.Tensor:
    """One layer's forward as vLLM calls it; returns [T, H, v]."""
    from amx_mla_backend.attention import AMXMLAAttention

    d = batch.dims
    metadata = builder.build(0, batch.common())
    if output is None:
        output = torch.full((batch.tokens, d.heads * d.v_dim), float("nan"), dtype=torch.bfloat16)
    layer = SimpleNamespace(impl=impl, num_heads=d.heads, v_head_dim=d.v_dim, layer_name="layer")
    result = AMXMLAAttention.forward_impl(layer, batch.q, None, None, batch.cache, metadata, output)
    assert result is output
    return output.view(-1, d.heads, d.v_dim)[: batch.tokens]


BATCHES = {
    "decode": [(0, 1), (31, 1), (300, 1)],
    "fresh": [(0, 5), (0, 33)],
    "continued": [(64, 17), (300, 40)],
    "mixed": [(9, 1), (257, 1), (0, 20), (100, 31)],
    "one": [(40, 1)],
}


FORMS = {"absorbed": lambda query, keys: False, "decompressed": lambda query, keys: True, "chosen": None}


@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_forward_matches_float64(vllm_config, requests: list[tuple[int, int]], form: Any, block_size: int) -> None:
    batch, weight = Batch(requests, block_size=block_size), random_weight()
    impl = make_impl(weight)
    impl.process_weights_after_loading(torch.bfloat16)
    batch.check(forward(impl, batch, make_builder(decompressed=form)), weight, impl.scale)


def test_runs_of_both_forms_in_one_step(vllm_config) -> None:
    batch, weight = Batch([(9, 1), (0, 33), (200, 3), (100, 2), (0, 65)]), random_weight()
    impl = make_impl(weight)
    impl.process_weights_after_loading(torch.bfloat16)
    builder = make_builder(decompressed=lambda query, keys: query > 3)
    assert len(builder.build(0, batch.common()).prefill.runs) == 3
    batch.check(forward(impl, batch, builder), weight, impl.scale)


SHAPES = {  # real models' dimensions, with fewer heads
    "glm47-flash": SimpleNamespace(heads=5, nope=192, v_dim=256, rank=512, rope=64),
    "minicpm3": SimpleNamespace(heads=10, nope=64, v_dim=64, rank=256, rope=32),
    "v3-tp6": SimpleNamespace(heads=22, nope=128, v_dim=128, rank=512, rope=64),
    "single-head": SimpleNamespace(heads=1, nope=128, v_dim=128, rank=512, rope=64),
}


@pytest.mark.parametrize("dims", SHAPES.values(), ids=SHAPES)
def test_dimensions_are_parameters(vllm_config, dims: SimpleNamespace) -> None:
    batch, weight = Batch([(70, 1), (0, 9), (33, 4)], dims=dims), random_weight(dims)
    impl = make_impl(weight, dims)
    impl.process_weights_after_loading(torch.bfloat16)
    batch.check(forward(impl, batch, make_builder(dims)), weight, impl.scale)


def test_speculative_tokens_ride_in_one_decode_call(vllm_config) -> None:
    batch, weight = Batch([(20, 3), (257, 3), (64, 3), (0, 40)]), random_weight()
    impl = make_impl(weight)
    impl.process_weights_after_loading(torch.bfloat16)
    builder = make_builder(threshold=4)
    metadata = builder.build(0, batch.common())
    assert (metadata.num_decodes, metadata.num_decode_tokens, metadata.num_prefills) == (3, 9, 1)
    batch.check(forward(impl, batch, builder), weight, impl.scale)


def test_output_is_written_in_place_through_its_strides(vllm_config) -> None:
    """vLLM may hand a wider buffer: only our rows and columns may change."""
    batch, weight, d = Batch([(9, 1), (0, 6)]), random_weight(), DIMS
    impl = make_impl(weight)
    impl.process_weights_after_loading(torch.bfloat16)
    buffer = torch.full((batch.tokens + 3, d.heads, d.v_dim + 32), 7.0, dtype=torch.bfloat16)
    metadata = make_builder().build(0, batch.common())
    view = buffer[..., : d.v_dim]
    impl.decode(batch.q[:1], batch.cache, metadata, view[:1])
    impl.prefill(batch.q[1:], batch.cache, metadata, view[1 : batch.tokens])
    batch.check(view[: batch.tokens].contiguous(), weight, impl.scale)
    assert (buffer[..., d.v_dim :] == 7).all() and (buffer[batch.tokens :] == 7).all()


def test_the_query_may_be_a_view_of_the_projection(vllm_config) -> None:
    """q arrives as a view with row padding, q_pe and q_nope are its columns: nothing may assume contiguity."""
    batch, weight, d = Batch([(9, 1), (0, 6)]), random_weight(), DIMS
    impl = make_impl(weight)
    impl.process_weights_after_loading(torch.bfloat16)
    wide = torch.full((batch.tokens, d.heads * (d.nope + d.rope) + 96), float("nan"), dtype=torch.bfloat16)
    view = wide[:, : d.heads * (d.nope + d.rope)].view(batch.tokens, d.heads, d.nope + d.rope)
    view.copy_(batch.q)
    batch.q = view
    batch.check(forward(impl, batch, make_builder()), weight, impl.scale)


def test_vllms_own_entry_points(vllm_config) -> None:
    """forward_mqa (absorbed, as a tuple or as one tensor) and forward_mha, for layers that are not ours."""
    d, weight = DIMS, random_weight()
    impl = make_impl(weight)
    impl.process_weights_after_loading(torch.bfloat16)
    batch = Batch([(9, 1), (300, 1)])
    metadata = make_builder().build(0, batch.common())
    latent, q_pe = impl._absorbed(batch.q), batch.q[..., d.nope :]
    for q in ((latent, q_pe), torch.cat([latent, q_pe], dim=-1)):
        attended, lse = impl.forward_mqa(q, batch.cache, metadata, None)
        assert lse is None
        output = torch.empty(batch.tokens, d.heads, d.v_dim, dtype=torch.bfloat16)
        impl.project_v(attended.transpose(0, 1), output.transpose(0, 1))
        batch.check(output, weight, impl.scale)

    batch = Batch([(0, 9), (64, 5)])
    metadata = make_builder().build(0, batch.common())
    output = torch.empty(batch.tokens, d.heads * d.v_dim, dtype=torch.bfloat16)
    impl.forward_mha(batch.q, None, None, batch.cache, metadata, None, output)
    batch.check(output.view(batch.tokens, d.heads, d.v_dim), weight, impl.scale)
    with pytest.raises(NotImplementedError, match="output_scale"):
        impl.forward_mha(batch.q, None, None, batch.cache, metadata, None, output, output_scale=torch.ones(1))


def test_cache_update_takes_vllms_shapes(vllm_config) -> None:
    impl, d = make_impl(random_weight()), DIMS
    fused = torch.randn(5, d.rank + d.rope).to(torch.bfloat16)
    kv_c, k_pe = fused[:, : d.rank], fused[:, d.rank :].unsqueeze(1)
    cache = torch.zeros(2, 32, d.rank + d.rope, dtype=torch.bfloat16)
    slots = torch.tensor([3, -1, 40, 0, 63])
    impl.do_kv_cache_update(kv_c, k_pe, cache, slots, "auto", torch.ones(1))
    impl.do_kv_cache_update(kv_c, k_pe, torch.empty(0), slots, "auto", torch.ones(1), skip_scale=True)  # profiling run
    expected = torch.zeros(64, d.rank + d.rope, dtype=torch.bfloat16)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot] = fused[token]
    assert torch.equal(cache.view(64, -1), expected)


def test_no_metadata_gives_zeros(vllm_config) -> None:
    from amx_mla_backend.attention import AMXMLAAttention

    output = torch.full((3, 8), float("nan"))
    assert (AMXMLAAttention.forward_impl(SimpleNamespace(), None, None, None, None, None, output) == 0).all()


def test_fused_output_quantisation_is_refused(vllm_config) -> None:
    from amx_mla_backend.attention import AMXMLAAttention

    with pytest.raises(NotImplementedError, match=r"layers\.3.*quantisation"):
        AMXMLAAttention.forward_impl(
            SimpleNamespace(layer_name="layers.3"), None, None, None, None, None, torch.zeros(1), torch.ones(1)
        )


def test_raw_weight_is_freed_after_packing(vllm_config) -> None:
    from amx_mla_backend.attention import AMXMLAAttention

    impl = make_impl(random_weight())
    layer = SimpleNamespace(impl=impl, kv_b_proj=impl.kv_b_proj)
    AMXMLAAttention.process_weights_after_loading(layer, torch.bfloat16)
    assert impl.kv_b_proj.weight.numel() == 0
    with pytest.raises(ValueError, match="packed or freed"):
        AMXMLAAttention.process_weights_after_loading(layer, torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alibi_slopes", [1.0]),
        ("sliding_window", 128),
        ("logits_soft_cap", 30.0),
        ("attn_type", "encoder_only"),
        ("attn_type", "encoder_decoder"),
        ("kv_cache_dtype", "fp8"),
        ("kv_cache_dtype", "fp8_ds_mla"),
        ("kv_sharing_target_layer_name", "layers.0"),
    ],
)
def test_what_is_not_served_is_refused(vllm_config, name: str, value: Any) -> None:
    with pytest.raises(NotImplementedError, match=name if name != "kv_sharing_target_layer_name" else "KV sharing"):
        make_impl(random_weight(), **{name: value})


def test_other_dtypes_are_refused(vllm_config) -> None:
    with pytest.raises(ValueError, match=r"bfloat16.*float16"):
        make_impl(random_weight()).process_weights_after_loading(torch.float16)


def test_a_bypassing_model_is_told_once(vllm_config, monkeypatch) -> None:
    from amx_mla_backend import impl as module

    lines: list[str] = []
    monkeypatch.setattr(module.logger, "warning_once", lambda text, *args: lines.append(text % args if args else text))
    impl = make_impl(random_weight())
    impl.process_weights_after_loading(torch.bfloat16)
    assert len(lines) == 1 and "MultiHeadLatentAttentionWrapper" in lines[0]
    assert impl.kv_b_proj.weight.numel()  # vLLM's own layer still makes its copies from it
    lines.clear()
    impl.owns_layer = True
    impl.process_weights_after_loading(torch.bfloat16)
    assert not lines


def test_projections_go_through_our_bmm(vllm_config) -> None:
    """One absorb and one de-absorb with our bmm around every absorbed call, none else: counted at the ops."""
    batch, weight = Batch([(9, 1), (257, 1), (0, 33), (100, 2)]), random_weight()
    impl = make_impl(weight)
    impl.process_weights_after_loading(torch.bfloat16)
    counter = CountingOps(impl._ops)
    impl._ops = counter
    builder = make_builder(decompressed=lambda query, keys: query > 3)
    builder._plan = counter.plan_attention
    batch.check(forward(impl, batch, builder), weight, impl.scale)
    assert counter.calls == {
        "plan_attention": 2,
        "decode_attention_cpu": 1,
        "extend_attention_cpu": 1,
        "prefill_attention_cpu": 1,
        "bmm_cpu": 4,
    }


class CountingOps:
    """The ops, counting calls by name."""

    def __init__(self, ops: Any) -> None:
        self._ops, self.calls = ops, {}

    def __getattr__(self, name: str) -> Any:
        op = getattr(self._ops, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] = self.calls.get(name, 0) + 1
            return op(*args, **kwargs)

        return call


def test_linear_double_is_what_vllm_reads() -> None:
    """The stand-in for kv_b_proj has the attributes that vLLM's dequantisation looks at."""
    from vllm.model_executor.layers.quantization.utils.quant_utils import get_and_maybe_dequant_weights

    weight = random_weight()
    assert torch.equal(get_and_maybe_dequant_weights(Linear(weight), torch.bfloat16), weight)
