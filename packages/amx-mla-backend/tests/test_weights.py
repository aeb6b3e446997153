# SPDX-License-Identifier: Apache-2.0
"""kv_b_proj in every stored form: the two projections equal the dequantised checkpoint, or loading stops."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from backend_support import DIMS, Linear, make_impl, random_weight
from safetensors.torch import save_file

from amx_mla_backend import weights

NAMES = {
    "name": "model.layers.7.self_attn.attn",
    "num_heads": DIMS.heads,
    "nope": DIMS.nope,
    "v_dim": DIMS.v_dim,
    "rank": DIMS.rank,
}


def check(layer: object, expected: torch.Tensor) -> None:
    """expected: the plain weight [H * (nope + v), R]."""
    w_uk, w_uv = weights.absorbed_projections(layer, **NAMES)
    per_head = expected.to(torch.bfloat16).view(DIMS.heads, DIMS.nope + DIMS.v_dim, DIMS.rank)
    assert torch.equal(w_uk, per_head[:, : DIMS.nope].transpose(1, 2)) and w_uk.is_contiguous()
    assert torch.equal(w_uv, per_head[:, DIMS.nope :]) and w_uv.is_contiguous()


def test_plain_bfloat16() -> None:
    weight = random_weight()
    check(Linear(weight), weight)


def test_through_wrappers() -> None:
    """LoRA keeps the layer as base_layer, here twice; release must reach it too."""
    weight = random_weight()
    inner = Linear(weight)
    wrapped = SimpleNamespace(base_layer=SimpleNamespace(base_layer=inner))
    check(wrapped, weight)
    weights.release(wrapped)
    assert inner.weight.numel() == 0


def fp8(weight: torch.Tensor, block: int) -> tuple[Linear, torch.Tensor]:
    """A block-quantised fp8 layer with scales a hundredfold apart, and the weight it stands for."""
    from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod

    rows, columns = weight.shape[0] // block, weight.shape[1] // block
    scales = torch.logspace(-2, 0, rows * columns).view(rows, columns)
    wide = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)
    stored = (weight.float() * 100).to(torch.float8_e4m3fn)
    method = object.__new__(Fp8LinearMethod)
    method.block_quant, method.use_marlin, method.use_deep_gemm = True, False, False
    layer = Linear(stored, method)
    layer.weight_block_size = [block, block]
    layer.weight_scale_inv = torch.nn.Parameter(scales, requires_grad=False)
    return layer, stored.float() * wide


def test_fp8_blocks() -> None:
    layer, expected = fp8(random_weight(), 128)
    check(layer, expected)
    check(layer, expected)  # the post-load hook may run twice before the weight is released


@pytest.mark.parametrize("rows", [0, 64], ids=["freed", "packed"])
def test_a_weight_that_is_not_raw_is_refused(rows: int) -> None:
    """A packed or freed weight is never read as if it were raw."""
    with pytest.raises(ValueError, match=r"model\.layers\.7\.self_attn\.attn\.kv_b_proj.*expected \(1024, 512\)"):
        weights.absorbed_projections(Linear(torch.zeros(rows, 512, dtype=torch.bfloat16)), **NAMES)


def test_an_unknown_format_is_refused() -> None:
    class OddMethod:
        """A quantisation that vLLM can neither dequantise nor apply here."""

        def apply(self, layer: object, x: torch.Tensor, bias: object) -> torch.Tensor:
            raise RuntimeError("needs a GPU")

    layer = Linear(torch.zeros(8, 8, dtype=torch.int32), OddMethod())
    layer.input_size_per_partition = DIMS.rank
    with pytest.raises(ValueError, match=r"layers\.7.*kv_b_proj \(OddMethod\).*needs a GPU"):
        weights.absorbed_projections(layer, **NAMES)


def test_packed_under_another_name() -> None:
    """Some formats have no `weight`, but `weight_packed`: accepted if vLLM can apply it, else the error names both."""

    class FourBit:
        def apply(self, layer: object, x: torch.Tensor, bias: object) -> torch.Tensor:
            return x @ layer.plain.float().T

    weight = random_weight()
    layer = Linear(torch.zeros(1))
    del layer.weight
    layer.quant_method, layer.plain, layer.input_size_per_partition = FourBit(), weight, DIMS.rank
    layer.weight_packed = torch.nn.Parameter(torch.zeros(8, 8, dtype=torch.int32), requires_grad=False)
    check(layer, weight)
    weights.release(layer)
    assert layer.weight_packed.numel() == 0
    del layer.weight_packed
    with pytest.raises(ValueError, match=r"kv_b_proj \(FourBit\)"):
        weights.absorbed_projections(layer, **NAMES)


@pytest.mark.parametrize("target", ["q_proj", "kv_b_proj"])
def test_a_lora_adapter_of_kv_b_proj_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, vllm_config: Any, tmp_path: Path, target: str
) -> None:
    """The packed projections know no adapter, so vLLM's own loading must refuse it; any other layer's is welcome."""
    from vllm.distributed import parallel_state
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.utils import get_supported_lora_modules
    from vllm.model_executor.layers.linear import ColumnParallelLinear

    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(world_size=1, rank_in_group=0))
    layers = {
        name: ColumnParallelLinear(DIMS.rank, 1024, bias=False, params_dtype=torch.bfloat16)
        for name in ("q_proj", "kv_b_proj")
    }
    model = torch.nn.Module()
    model.self_attn = torch.nn.ModuleDict(layers)
    assert sorted(get_supported_lora_modules(model)) == ["kv_b_proj", "q_proj"]
    impl = make_impl(random_weight(), kv_b_proj=layers["kv_b_proj"])
    impl.process_weights_after_loading(torch.bfloat16)

    adapter = {
        f"base_model.model.self_attn.{target}.lora_{side}.weight": torch.zeros(shape, dtype=torch.bfloat16)
        for side, shape in (("A", (8, DIMS.rank)), ("B", (1024, 8)))
    }
    save_file(adapter, tmp_path / "adapter_model.safetensors")
    helper = PEFTHelper(r=8, lora_alpha=8, target_modules=[target])
    supported = set(get_supported_lora_modules(model))
    if target == "kv_b_proj":
        with pytest.raises(ValueError, match=r"received \['self_attn\.kv_b_proj'"):
            LoRAModel.from_local_checkpoint(str(tmp_path), supported, helper, lora_model_id=1, device="cpu")
        with pytest.raises(RuntimeError, match="kv_b_proj was absorbed"):
            layers["kv_b_proj"](torch.zeros(1, DIMS.rank, dtype=torch.bfloat16))
    else:
        lora = LoRAModel.from_local_checkpoint(str(tmp_path), supported, helper, lora_model_id=1, device="cpu")
        assert list(lora.loras) == ["self_attn.q_proj"]
