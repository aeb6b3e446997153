# SPDX-License-Identifier: Apache-2.0
"""torch.ops.amx_kernels: right results from tensors, honest schemas and fakes, torch.compile without graph breaks."""

from __future__ import annotations

import numpy as np
import pytest
from calls import attend, plan_of, torch_ops

import amx_kernels
from mla_testing import bf16, cases
from mla_testing.cases import AttentionCase, BmmCase, ConcatCase

torch = pytest.importorskip("torch")
OPS = torch_ops()


def tensor_plan(data):
    """As ``plan_of``, by the torch op."""
    start = None if data.case.query_lens is None else cases.as_torch(data.query_start_loc)
    lens = cases.as_torch(data.seq_lens)
    return OPS.plan_attention(lens, start, data.live_tokens, data.case.heads, torch.get_num_threads())


ATTENTION = (
    AttentionCase(16, (1, 33, 0, 600), block_size=32, index_dtype="int64"),
    AttentionCase(22, (17, 300), block_size=48, layout="layered", fused_q=False, out_padding=16),
    AttentionCase(128, (40,), block_size=64),
    AttentionCase(16, (17, 300, 5), query_lens=(17, 20, 0), block_size=16),
    AttentionCase(2, (40, 70), query_lens=(40, 1), block_size=16, layout="wide", index_dtype="int64", extra_tokens=2),
)


@pytest.mark.parametrize("case", ATTENTION, ids=lambda case: case.id)
@pytest.mark.parametrize("variant", ["plain", "plan", "no-lse"])
def test_attention(tier, case, variant):
    data = case.build()
    plan = tensor_plan(data) if variant == "plan" and not case.extra_tokens else None
    attend(data.torch(), ops=OPS, plan=plan, **({"lse": None} if variant == "no-lse" else {}))
    data.check(lse=variant != "no-lse")


@pytest.mark.parametrize("case", [BmmCase(16, 5, 512, 128), BmmCase(3, 33, 60, 70, out_padding=4)], ids=lambda c: c.id)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
def test_bmm(tier, case, packed):
    data = case.build()
    tensors = data.torch()
    weight = OPS.convert_weight_packed(tensors.mat2) if packed else tensors.mat2
    OPS.bmm_cpu(tensors.out, tensors.mat1, weight, packed)
    data.check()


def test_packed_weights_are_those_of_the_python_module(tier):
    data = BmmCase(2, 1, 50, 70).build()
    packed = OPS.convert_weight_packed(data.torch().mat2)
    assert packed.dtype == torch.bfloat16 and packed.is_contiguous()
    np.testing.assert_array_equal(packed.view(torch.uint16).numpy(), amx_kernels.convert_weight_packed(data.mat2))


@pytest.mark.parametrize("case", [ConcatCase(33), ConcatCase(200, 64, "layered", "int32")], ids=lambda case: case.id)
def test_concat(case):
    data = case.build()
    tensors = data.torch()
    OPS.concat_and_cache_mla_cpu(tensors.kv_c, tensors.k_pe[:, None], tensors.kv_cache, tensors.slot_mapping)
    data.check()


def test_plan_is_that_of_the_python_module():
    for case in ATTENTION[:4]:
        data = case.build()
        expected = plan_of(data, num_threads=torch.get_num_threads())
        np.testing.assert_array_equal(tensor_plan(data).numpy(), expected)


def test_inference_mode_and_views():
    """Outputs that are slices of a larger tensor, written under inference mode."""
    data = ATTENTION[0].build()
    with torch.inference_mode():
        whole = torch.zeros(6, 16, 700, dtype=torch.bfloat16)
        attend(data.torch(), ops=OPS, out=whole[1:5, :, 50:562])
    data.check(out=whole[1:5, :, 50:562])
    assert not whole[0].any() and not whole[5].any() and not whole[..., :50].any() and not whole[..., 562:].any()


def test_layouts_without_strides_are_refused():
    data = BmmCase(2, 5, 40, 64).build().torch()
    with pytest.raises(RuntimeError):
        OPS.bmm_cpu(data.out, data.mat1.to_sparse(), data.mat2, False)
    assert data.out.isnan().all()


def _opcheck_arguments():
    decode, extend = ATTENTION[0].build().torch(), ATTENTION[3].build().torch()
    plan = OPS.plan_attention(decode.seq_lens, None, 4, 16, torch.get_num_threads())
    for data in (decode, extend):  # opcheck compares outputs, and NaN is not equal to itself
        data.out.zero_()
        data.lse.zero_()
    queries = (decode.q_latent, decode.q_pe, decode.kv_cache.nan_to_num(0), decode.block_table, decode.seq_lens)
    new = (extend.q_latent, extend.q_pe, extend.kv_cache.nan_to_num(0), extend.block_table, extend.seq_lens)
    w_uk, w_uv = (OPS.convert_weight_packed(torch.ones(16, n, 512, dtype=torch.bfloat16)) for n in (96, 80))
    prefill = torch.zeros(37, 16, 80, dtype=torch.bfloat16), extend.lse, extend.q_latent[..., :96], *new[1:]
    bmm = BmmCase(2, 5, 40, 64).build().torch()
    bmm.out.zero_()
    packed = OPS.convert_weight_packed(bmm.mat2)
    concat = ConcatCase(9, skipped=False).build().torch()
    yield "convert_weight_packed", (bmm.mat2,)
    yield "bmm_cpu", (bmm.out, bmm.mat1, packed, True)
    yield "bmm_cpu", (bmm.out, bmm.mat1, bmm.mat2, False, torch.ones(2))
    yield "concat_and_cache_mla_cpu", (concat.kv_c, concat.k_pe, concat.kv_cache, concat.slot_mapping)
    yield "plan_attention", (decode.seq_lens, None, 4, 16, 2)
    yield "plan_attention", (extend.seq_lens, extend.query_start_loc, 37, 16, 2)
    yield "decode_attention_cpu", (decode.out, decode.lse, *queries, 0.1, plan)
    yield "decode_attention_cpu", (decode.out, None, *queries, 0.1)
    yield "extend_attention_cpu", (extend.out, extend.lse, *new, extend.query_start_loc, 0.1)
    yield "prefill_attention_cpu", (*prefill, extend.query_start_loc, w_uk, w_uv, 0.1)


@pytest.mark.parametrize("index", range(10))
def test_opcheck(index):
    """torch's own check of schema (mutations, aliases), fake, autograd registration and dynamic shapes."""
    name, arguments = list(_opcheck_arguments())[index]
    results = torch.library.opcheck(getattr(OPS, name).default, arguments)
    assert set(results.values()) == {"SUCCESS"}, (name, results)


def test_every_op_was_checked():
    names = {name for name, _ in _opcheck_arguments()}
    registered = {str(s.name) for s in torch._C._jit_get_all_schemas() if str(s.name).startswith("amx_kernels::")}
    assert {f"amx_kernels::{name}" for name in names} == registered


def layer(hidden_q, q_pe, latent, w_uk, w_uv, kv_cache, slots, table, lens, start, plan, heads):
    """A whole MLA attention as a model has it: cache write, absorb, attention, de-absorb."""
    tokens = hidden_q.shape[0]
    OPS.concat_and_cache_mla_cpu(latent[:, :512], latent[:, None, 512:], kv_cache, slots)
    q_latent = torch.empty(heads, tokens, 512, dtype=torch.bfloat16)
    OPS.bmm_cpu(q_latent, hidden_q.transpose(0, 1), w_uk, True)
    out = torch.empty(tokens, heads, 512, dtype=torch.bfloat16)
    lse = torch.empty(tokens, heads)
    OPS.extend_attention_cpu(out, lse, q_latent.transpose(0, 1), q_pe, kv_cache, table, lens, start, 192**-0.5, plan)
    values = torch.empty(tokens, heads, 128, dtype=torch.bfloat16)
    OPS.bmm_cpu(values.transpose(0, 1), out.transpose(0, 1), w_uv, True)
    return values * 2, lse


def layer_arguments(tokens, heads=4):
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    blocks = tokens // 16 + 3  # neither 1 nor len(start): torch compiles such coincidences apart
    lens, start = torch.tensor([tokens]), torch.tensor([0, tokens])
    return (
        normal(tokens, heads, 128),
        normal(tokens, heads, 64),
        normal(tokens, 576),
        OPS.convert_weight_packed(normal(heads, 512, 128)),
        OPS.convert_weight_packed(normal(heads, 128, 512)),
        torch.zeros(blocks, 16, 576, dtype=torch.bfloat16),
        torch.arange(tokens),
        torch.arange(blocks)[None],
        lens,
        start,
        OPS.plan_attention(lens, start, tokens, heads, torch.get_num_threads()),
        heads,
    )


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_with_dynamic_tokens(backend):
    """One graph, no breaks, one compilation for every number of tokens, and the bits of eager mode."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (5, 17, 40, 2):
        expected_arguments, arguments = layer_arguments(tokens), layer_arguments(tokens)
        expected = layer(*expected_arguments)
        actual = compiled(*arguments)
        for a, b in zip(actual, expected, strict=True):
            assert torch.equal(a, b)
        assert torch.equal(arguments[5], expected_arguments[5]), "the cache was written otherwise"
    assert counter.frame_count == 1


def test_fakes_compute_nothing_and_know_shapes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        packed = OPS.convert_weight_packed(torch.empty(2, 40, 70, dtype=torch.bfloat16))
    assert packed.shape == (2, 3, 48, 32) and packed.dtype == torch.bfloat16
    meta = OPS.convert_weight_packed(torch.empty(2, 40, 70, dtype=torch.bfloat16, device="meta"))
    assert meta.shape == packed.shape
    real = OPS.convert_weight_packed(torch.zeros(2, 40, 70, dtype=torch.bfloat16))
    assert real.shape == packed.shape and not bf16.to_float32(real.view(torch.uint16).numpy()).any()
