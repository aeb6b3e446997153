# SPDX-License-Identifier: Apache-2.0
"""What each patch mends, in one process and without an engine: red without the patch, green with it.

    python effects.py <series> [<patch> ...]          (prints one JSON object)

`EFFECTS[series][patch]` is a check that passes once the patch is applied, and the cause it fails of without: `findings`
runs them all on whatever vLLM the interpreter imports. Expected values are computed in float64.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

H, R, NOPE, ROPE, V = 4, 512, 128, 64, 128
SCALE = (NOPE + ROPE) ** -0.5


@dataclass(frozen=True)
class Effect:
    """A check and the cause (a regular expression for "ErrorType: message") that it fails of without its patch."""

    check: Callable[[], None]
    cause: str


@contextlib.contextmanager
def vllm_context(**options: Any) -> Iterator[Any]:
    """A current VllmConfig and a process group of one, as layers need to be built."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    config = VllmConfig(**options)
    with set_current_vllm_config(config):
        if not parallel_state.model_parallel_is_initialized():
            rendezvous = f"file://{tempfile.mkdtemp()}/rendezvous"
            parallel_state.init_distributed_environment(1, 0, rendezvous, 0, "gloo")
            parallel_state.initialize_model_parallel(1, 1)
        yield config


def kv_b_projection(dtype: torch.dtype = torch.float32) -> Any:
    """A real kv_b_proj with random weights."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear

    layer = ColumnParallelLinear(R, H * (NOPE + V), bias=False, params_dtype=dtype, prefix="kv_b_proj")
    generator = torch.Generator().manual_seed(0)
    layer.weight.data.copy_(torch.randn(layer.weight.shape, generator=generator) * R**-0.5)
    return layer


class InertPrefill:
    """Stands where MLAAttention wants a prefill backend, so that choosing one is not part of the check."""

    def __init__(self, **arguments: Any) -> None:
        pass


def mla_attention(config: Any, kv_b_proj: Any, backend: type, name: str) -> Any:
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    return MLAAttention(
        num_heads=H, scale=SCALE, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=V, q_lora_rank=None,
        kv_lora_rank=R, kv_b_proj=kv_b_proj, cache_config=config.cache_config, prefix=name, attn_backend=backend,
        prefill_backend_cls=InertPrefill,
    )  # fmt: skip


def float64(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def assert_close(actual: torch.Tensor, expected: np.ndarray, tolerance: float, what: str) -> None:
    error = np.abs(float64(actual) - expected).max()
    assert error <= tolerance, f"{what}: off by {error:.3g}, more than {tolerance:g}"


# 0.28.0 ------------------------------------------------------------------------------------------------------------


def cpu_native_prefill_member() -> None:
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

    backend_cls = MLAPrefillBackendEnum["CPU_NATIVE"].get_class()
    assert backend_cls.get_name() == "CPU_NATIVE" and backend_cls.is_available()
    backend = backend_cls(
        num_heads=H, scale=SCALE, kv_lora_rank=R, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=V,
        vllm_config=None,
    ).clone()  # fmt: skip
    nothing = torch.empty(0)
    calls = {
        "run_prefill_new_tokens": lambda: backend.run_prefill_new_tokens(nothing, nothing, nothing, False),
        "run_prefill_context_chunk": lambda: backend.run_prefill_context_chunk(None, nothing, nothing, nothing),
    }
    for name, call in calls.items():
        try:
            call()
        except NotImplementedError as error:
            assert f"CPU_NATIVE has no {name}" in str(error)
        else:
            raise AssertionError(f"{name} computed something")


def cpu_native_prefill_selected() -> None:
    from vllm.v1.attention.backends.mla.prefill import get_mla_prefill_backend

    with vllm_context() as config:
        assert get_mla_prefill_backend(config).get_name() == "CPU_NATIVE"


def keep_raw_kv_b_weight() -> None:
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    with vllm_context() as config:
        layer = kv_b_projection()
        raw = layer.weight.detach().clone()
        attention = mla_attention(config, layer, CPUMLABackend, "raw.0.attn")
        layer.quant_method.process_weights_after_loading(layer)
        attention.process_weights_after_loading(torch.float32)
        w_uk, w_uv = float64(raw).reshape(H, NOPE + V, R)[:, :NOPE], float64(raw).reshape(H, NOPE + V, R)[:, NOPE:]
        assert_close(attention.W_UK_T, w_uk, 0, "W_UK")
        assert_close(attention.W_UV, w_uv.transpose(0, 2, 1), 0, "W_UV")
        x = torch.randn(3, R)
        assert_close(layer(x)[0], float64(x) @ float64(raw).T, 1e-4, "kv_b_proj, called after packing")

        # A wrapper is not what is packed: the flag has to reach the layer inside.
        inner = kv_b_projection()
        wrapper = torch.nn.Module()
        wrapper.base_layer = inner
        wrapper.weight = inner.weight
        mla_attention(config, wrapper, CPUMLABackend, "raw.1.attn")
        inner.quant_method.process_weights_after_loading(inner)
        assert inner.weight.shape == raw.shape, "the weight of a wrapped kv_b_proj was freed"

        # Every other layer is still freed.
        other = kv_b_projection()
        other.quant_method.process_weights_after_loading(other)
        assert other.weight.numel() == 0, "a weight that nothing reads was kept"


def cpu_mla_prefill() -> None:
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    class Refusing:
        def run_prefill_new_tokens(self, *arguments: Any, **options: Any) -> None:
            raise NotImplementedError("no prefill backend computes anything on CPU")

    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    weight = random(H * (NOPE + V), R) * R**-0.5
    for v_dim in (V, NOPE + ROPE):  # smaller than the query's heads, as in DeepSeek's models, and equal to them
        weight = random(H * (NOPE + v_dim), R) * R**-0.5
        impl = CPUMLAImpl(
            H, R + ROPE, SCALE, 1, None, None, "auto", None, "decoder", None, q_lora_rank=None, kv_lora_rank=R,
            qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, qk_head_dim=NOPE + ROPE, v_head_dim=v_dim,
            kv_b_proj=lambda x, weight=weight: (x @ weight.T, None),
        )  # fmt: skip
        starts = [0, 1, 18, 18, 60]  # one token, some, none, many
        tokens = starts[-1]
        q, kv_c, k_pe = random(tokens, H, NOPE + ROPE), random(tokens, R), random(tokens, 1, ROPE)
        prefill = SimpleNamespace(
            query_start_loc=torch.tensor(starts, dtype=torch.int32), chunked_context=None, prefill_backend=Refusing(),
            q_data_type=torch.float32,
        )  # fmt: skip
        output = torch.empty(tokens, H * v_dim)
        metadata = SimpleNamespace(prefill=prefill)
        impl.forward_mha(q, kv_c, k_pe, torch.empty(0), metadata, torch.ones(1), output)

        kv = (float64(kv_c) @ float64(weight).T).reshape(tokens, H, NOPE + v_dim)
        expected = np.zeros((tokens, H, v_dim))
        for start, end in itertools.pairwise(starts):
            for h in range(H):
                k = np.concatenate([kv[start:end, h, :NOPE], float64(k_pe)[start:end, 0]], axis=1)
                scores = float64(q)[start:end, h] @ k.T * SCALE
                scores[np.triu_indices(end - start, 1)] = -np.inf
                weights = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-1e9))
                expected[start:end, h] = weights / weights.sum(axis=1, keepdims=True) @ kv[start:end, h, NOPE:]
        assert_close(output, expected.reshape(tokens, H * v_dim), 2e-5, f"prefill with v_head_dim {v_dim}")

        prefill.chunked_context = object()
        try:
            impl.forward_mha(q, kv_c, k_pe, torch.empty(0), metadata, torch.ones(1), output)
        except NotImplementedError as error:
            assert "chunked prefill" in str(error)
        else:
            raise AssertionError("cached context was ignored")


def impl_owned_projections() -> None:
    """Also the check of the 0.33.0 patch `impl-projection-hooks`."""
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

    class Impl(CPUMLAImpl):
        uses_amx_bmm = True
        raw: torch.Tensor | None = None

        def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
            self.raw = self.kv_b_proj.weight.detach().clone()
            self.w_uk, self.w_uv = self.raw.view(H, NOPE + V, R).split([NOPE, V], dim=1)

        def absorb_q(self, q_nope: torch.Tensor, out: torch.Tensor) -> None:
            assert q_nope.shape == (H, q_nope.shape[1], NOPE) and q_nope.stride(-1) == 1
            assert out.shape == (H, q_nope.shape[1], R) and out.stride(-1) == 1
            out.copy_(torch.bmm(q_nope, self.w_uk))

        def project_v(self, x: torch.Tensor, out: torch.Tensor) -> None:
            assert x.shape == (H, x.shape[1], R) and x.stride(-1) == 1
            assert out.shape == (H, x.shape[1], V) and out.stride(-1) == 1
            out.copy_(torch.bmm(x, self.w_uv.transpose(1, 2)))

        def forward_mqa(self, q: Any, kv_cache: Any, metadata: Any, layer: Any) -> tuple[torch.Tensor, None]:
            assert isinstance(q, tuple) and q[0].shape == (3, H, R) and q[1].shape == (3, H, ROPE)
            return q[0] * 2, None  # a latent output that the check can predict

    class Backend(CPUMLABackend):
        @staticmethod
        def get_impl_cls() -> type[Impl]:
            return Impl

    with vllm_context() as config:
        layer = kv_b_projection()
        raw = float64(layer.weight).reshape(H, NOPE + V, R)
        attention = mla_attention(config, layer, Backend, "owned.0.attn")
        layer.quant_method.process_weights_after_loading(layer)
        attention.process_weights_after_loading(torch.float32)
        assert attention.impl.raw is not None, "the impl was not asked to prepare its weights"
        assert layer.weight.numel() == 0, "the raw weight was not released"
        assert not hasattr(attention, "W_UK_T") and not hasattr(attention, "W_UV"), "unused copies were made"

        q = torch.randn(3, H, NOPE + ROPE)
        output = torch.empty(3, H * V)
        metadata = SimpleNamespace(
            num_actual_tokens=3, num_decodes=3, num_prefills=0, num_decode_tokens=3, decode=object(), prefill=None
        )
        attention.forward_impl(
            q, torch.empty(3, R), torch.empty(3, 1, ROPE), torch.empty(0), metadata, output=output
        )  # fmt: skip
        latent = 2 * np.einsum("bhp,hpr->bhr", float64(q)[..., :NOPE], raw[:, :NOPE])
        expected = np.einsum("bhr,hvr->bhv", latent, raw[:, NOPE:])
        assert_close(output, expected.reshape(3, H * V), 1e-4, "absorbed, doubled and projected query")

        # An impl that owns nothing is served as before.
        plain = kv_b_projection()
        attention = mla_attention(config, plain, CPUMLABackend, "owned.1.attn")
        plain.quant_method.process_weights_after_loading(plain)
        attention.process_weights_after_loading(torch.float32)
        assert attention.W_UK_T.shape == (H, NOPE, R) and attention.W_UV.shape == (H, R, V)
        assert plain.weight.numel() > 0, "a weight that may still be called was released"


def rotary_views() -> None:
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    load_operators()
    calls = []
    operator = ops.rotary_embedding
    with vllm_context(), mock.patch.object(ops, "rotary_embedding", lambda *a: (calls.append(a), operator(*a))):
        for neox in (False, True):
            rope = RotaryEmbedding(ROPE, ROPE, 256, 10000.0, neox, torch.float32)
            for tokens, heads in ((1, H), (7, H), (7, 1)):
                positions = torch.arange(tokens) + 3
                q, kv = torch.randn(tokens, heads, NOPE + ROPE), torch.randn(tokens, R + ROPE)
                q_before, kv_before = q.clone(), kv.clone()
                inputs = q_before[..., NOPE:].contiguous(), kv_before[:, R:].unsqueeze(1).contiguous()
                expected_q, expected_k = rope.forward_native(positions, *inputs)
                returned = rope.forward_cpu(positions, q[..., NOPE:], kv[:, R:].unsqueeze(1))
                what = f"{tokens} tokens, {heads} heads, neox {neox}"
                assert_close(kv[:, :R], float64(kv_before[:, :R]), 0, f"the latent kv beside k_pe, {what}")
                assert_close(q[..., :NOPE], float64(q_before[..., :NOPE]), 0, f"what is not rotated, {what}")
                assert_close(returned[1], float64(expected_k), 1e-5, f"k_pe, {what}")
                assert_close(returned[0], float64(expected_q), 1e-5, f"q_pe, {what}")
                assert_close(q[..., NOPE:], float64(expected_q), 1e-5, f"q_pe in place, {what}")
            # The form that all other models pass reaches the operator as it is, uncopied.
            flat_q, flat_k = torch.randn(7, (H + 2) * ROPE).split([H * ROPE, 2 * ROPE], dim=-1)
            expected_q, expected_k = rope.forward_native(positions, flat_q, flat_k)
            rope.forward_cpu(positions, flat_q, flat_k)
            assert calls[-1][1] is flat_q and calls[-1][2] is flat_k
            assert_close(flat_q, float64(expected_q), 1e-5, "folded q")
            assert_close(flat_k, float64(expected_k), 1e-5, "folded k")


def load_operators() -> None:
    """The CPU operators; a source tree has none, but those of a built release beside it are of the same source."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if not hasattr(torch.ops._C, "rotary_embedding"):
        torch.ops.load_library(os.environ["VLLM_OPERATORS"])


# The platform's choice ---------------------------------------------------------------------------------------------

SELECTED = "vllm_effects_backends"


def _backend_module() -> Any:
    """A module of backend classes that can be registered by path: available, not available, and not MLA."""
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    def make(name: str, **members: Any) -> type:
        members = {key: classmethod(value) for key, value in members.items()}
        return type(name, (CPUMLABackend,), {**members, "get_name": staticmethod(lambda: "AMX_MLA")})

    any_block_of_32 = {
        "supports_block_size": lambda cls, size: size is None or size % 32 == 0,
        "supports_dtype": lambda cls, dtype: dtype == torch.bfloat16,
    }
    supports = {"supports_chunked_prefill": lambda cls: True, "supports_prefix_caching": lambda cls: True}
    module = sys.modules[SELECTED] = SimpleNamespace(
        Available=make("Available", get_unavailable_reason=lambda cls: None, **any_block_of_32, **supports),
        Unavailable=make("Unavailable", get_unavailable_reason=lambda cls: "no tiles here", **any_block_of_32),
        NotMla=make("NotMla", is_mla=lambda cls: False, get_unavailable_reason=lambda cls: None),
    )
    for name, cls in vars(module).items():
        cls.__module__, cls.__qualname__ = SELECTED, name
    return module


def engine_config(backend: str | None, **options: Any) -> Any:
    """The VllmConfig that the engine would make for a small DeepSeek-V2 model."""
    from vllm.engine.arg_utils import EngineArgs

    folder = Path(tempfile.mkdtemp())
    folder.joinpath("config.json").write_text(json.dumps({
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "torch_dtype": "bfloat16",
        "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": H,
        "num_key_value_heads": H, "kv_lora_rank": R, "q_lora_rank": None, "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE, "v_head_dim": V, "vocab_size": 128, "max_position_embeddings": 256,
        "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "moe_intermediate_size": 32, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    }))  # fmt: skip
    arguments = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, enforce_eager=True, attention_backend=backend, **options
    )
    return arguments.create_engine_config()


@dataclass(frozen=True)
class Choice:
    """What the platform made of a request: the backend's class path, and what it decided with it."""

    path: str
    block_size: int
    chunked_prefill: bool
    prefix_caching: bool


def choose(backend: str | None, **options: Any) -> Choice:
    from vllm.platforms.cpu import CpuPlatform

    config = engine_config(backend, **options)
    selector = SimpleNamespace(use_mla=True, use_sparse=False, kv_cache_dtype="auto", dtype=config.model_config.dtype)
    path = CpuPlatform.get_attn_backend_cls(config.attention_config.backend, selector)
    return Choice(
        path.rpartition(".")[2], config.cache_config.block_size, config.scheduler_config.enable_chunked_prefill,
        config.cache_config.enable_prefix_caching,
    )  # fmt: skip


def refusal(backend: str | None, **options: Any) -> str:
    try:
        choice = choose(backend, **options)
    except ValueError as error:
        return str(error)
    raise AssertionError(f"{backend} was not refused: {choice}")


REFERENCE = Choice("CPUMLABackend", 16, False, False)


def registered_amx_mla() -> None:
    """AMX_MLA {not registered, not available, available} x {auto, CPU_MLA, AMX_MLA} x {fresh, cached prefix}."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    amx_mla = AttentionBackendEnum["AMX_MLA"]
    assert amx_mla not in (AttentionBackendEnum.CUSTOM, AttentionBackendEnum.TORCH_SDPA), "an alias"
    _backend_module()
    try:
        for cached_prefix in (False, True):
            options = {"enable_prefix_caching": cached_prefix}
            assert choose(None, **options) == REFERENCE
            assert choose("CPU_MLA", **options) == REFERENCE
            assert "must be registered before use" in refusal("AMX_MLA", **options)

            register_backend(amx_mla, f"{SELECTED}.Unavailable")
            assert choose(None, **options) == REFERENCE
            assert choose("CPU_MLA", **options) == REFERENCE
            assert "Cannot use AMX_MLA backend on CPU: no tiles here" in refusal("AMX_MLA", **options)

            register_backend(amx_mla, f"{SELECTED}.Available")
            fast = Choice("Available", 128, True, cached_prefix)
            assert choose(None, **options) == fast
            assert choose("CPU_MLA", **options) == REFERENCE
            assert choose("AMX_MLA", **options) == fast
            assert choose("TRITON_MLA", **options) == fast, "a backend that no CPU has is not a choice"
            amx_mla.clear_override()
        register_backend(amx_mla, f"{SELECTED}.Available")
        assert choose(None, dtype="float32") == REFERENCE
        assert "it does not support torch.float32" in refusal("AMX_MLA", dtype="float32")
        assert choose(None, block_size=64).block_size == 64, "the user's block size"
        assert "does not support block_size=48" in refusal(None, block_size=48)
        assert choose("CPU_MLA", block_size=64) == REFERENCE
    finally:
        amx_mla.clear_override()


# 0.33.0 ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def amx(flag: bool, permission: bool) -> Iterator[None]:
    """A CPU with or without AMX, and a kernel that permits it or not."""
    with (
        mock.patch("torch.cpu._is_amx_tile_supported", return_value=flag),
        mock.patch("torch.cpu._init_amx", return_value=permission),
    ):
        yield


def platform_asks_backend() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    _backend_module()
    with amx(False, False):
        assert choose(None) == choose("CPU_MLA") == REFERENCE
        assert "Cannot use AMX_MLA backend on CPU: it needs a CPU with AMX" in refusal("AMX_MLA")
        try:
            # A class registered in place of AMX_MLA answers for itself, whatever the CPU's flags are.
            register_backend(AttentionBackendEnum.AMX_MLA, f"{SELECTED}.Available")
            assert choose(None) == choose("AMX_MLA") == Choice("Available", 128, True, True)
            register_backend(AttentionBackendEnum.AMX_MLA, f"{SELECTED}.Unavailable")
            assert choose(None) == REFERENCE
            assert "no tiles here" in refusal("AMX_MLA")
        finally:
            AttentionBackendEnum.AMX_MLA.clear_override()
    with amx(True, True):
        assert choose("CPU_MLA", enable_prefix_caching=True) == REFERENCE
        for cached_prefix in (False, True):
            fast = Choice("AMXMLABackend", 128, True, cached_prefix)
            assert choose(None, enable_prefix_caching=cached_prefix) == fast
            assert choose("AMX_MLA", enable_prefix_caching=cached_prefix) == fast
        assert choose(None, dtype="float32") == REFERENCE
        assert "it does not support torch.float32" in refusal("AMX_MLA", dtype="float32")


def custom_mla() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    _backend_module()
    custom = AttentionBackendEnum.CUSTOM
    with amx(False, False):
        try:
            assert "must be registered before use" in refusal("CUSTOM")
            register_backend(custom, f"{SELECTED}.Available")
            assert choose("CUSTOM") == Choice("Available", 128, True, True)
            assert choose(None) == REFERENCE, "only if asked for"
            register_backend(custom, f"{SELECTED}.Unavailable")
            assert "Cannot use CUSTOM backend on CPU: no tiles here" in refusal("CUSTOM")
            register_backend(custom, f"{SELECTED}.NotMla")
            assert "Cannot use CUSTOM backend on CPU: it is not an MLA backend" in refusal("CUSTOM")
        finally:
            custom.clear_override()


def amx_permission() -> None:
    with amx(True, False):
        assert choose(None) == REFERENCE, "AMX_MLA was selected without permission"
        assert "the operating system does not permit AMX" in refusal("AMX_MLA")
    with amx(True, True):
        assert choose(None).path == "AMXMLABackend"


EFFECTS: dict[str, dict[str, Effect]] = {
    "0.28.0": {
        "cpu-native-prefill-member": Effect(
            cpu_native_prefill_member, "ValueError: Unknown MLA prefill backend: 'CPU_NATIVE'"
        ),
        "cpu-native-prefill-selected": Effect(cpu_native_prefill_selected, "ImportError: .*flash_attn"),
        "keep-raw-kv-b-weight": Effect(
            keep_raw_kv_b_weight, r"AssertionError: kv_b_proj_weight.shape=torch.Size\(\[0\]\)"
        ),
        "cpu-mla-prefill": Effect(cpu_mla_prefill, "NotImplementedError: no prefill backend computes anything"),
        "impl-owned-projections": Effect(
            impl_owned_projections,
            r"AssertionError: (the impl was not asked to prepare|kv_b_proj_weight.shape=torch.Size\(\[0\]\))",
        ),
        "registered-amx-mla": Effect(registered_amx_mla, "ValueError: Unknown attention backend: 'AMX_MLA'"),
        "rotary-views": Effect(rotary_views, "AssertionError: (the latent kv beside k_pe|q_pe|k_pe).*: off by"),
    },
    "0.33.0": {
        "impl-projection-hooks": Effect(
            impl_owned_projections, "AttributeError: 'Impl' object has no attribute '_w_uk_packed'"
        ),
        "rotary-views": Effect(rotary_views, "AssertionError: (the latent kv beside k_pe|q_pe|k_pe).*: off by"),
        "platform-asks-backend": Effect(platform_asks_backend, "AssertionError: AMX_MLA was not refused"),
        "custom-mla": Effect(custom_mla, "AssertionError: CUSTOM was not refused"),
        "amx-permission": Effect(amx_permission, "AssertionError: AMX_MLA was selected without permission"),
    },
}


# What must not change ----------------------------------------------------------------------------------------------


def selector_branches() -> dict[str, str]:
    """What the prefill selector answers on stubbed platforms: the same with and without the series."""
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.mla.prefill import selector
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

    valid = {member: mock.Mock(get_name=lambda member=member: member.name) for member in MLAPrefillBackendEnum}
    for stub in valid.values():
        stub.validate_configuration.return_value = []
    answers = {}
    for name, capability, is_rocm, chosen in (
        ("hopper", DeviceCapability(9, 0), False, None),
        ("blackwell", DeviceCapability(10, 0), False, None),
        ("ampere", DeviceCapability(8, 0), False, None),
        ("rocm", DeviceCapability(9, 4), True, None),
        ("explicit", DeviceCapability(10, 0), False, MLAPrefillBackendEnum.FLASHINFER),
        ("no capability", None, False, None),
    ):
        platform = mock.Mock()
        platform.get_device_capability.return_value = capability
        platform.is_rocm.return_value = is_rocm
        platform.is_cuda.return_value = not is_rocm
        # A stub that calls itself a CPU but has a capability is one more that must not be diverted.
        platform.is_cpu.return_value = capability is not None
        config = mock.Mock(model_config=None)
        config.attention_config.mla_prefill_backend = chosen
        selector._auto_select_mla_prefill_backend.cache_clear()
        with (
            mock.patch("vllm.platforms.current_platform", platform),
            mock.patch.object(MLAPrefillBackendEnum, "get_class", lambda self: valid[self]),
        ):
            answers[name] = selector.get_mla_prefill_backend(config).get_name()
    selector._auto_select_mla_prefill_backend.cache_clear()
    return answers


def findings(series: str, *patches: str) -> dict[str, Any]:
    """What the vLLM that this process imports does: `{"effects": {patch: "green" or "red: <cause>"}, "branches": ...}`.

    Of all patches of the series unless some are named.
    """
    effects = {}
    for name in patches or EFFECTS[series]:
        try:
            EFFECTS[series][name].check()
            effects[name] = "green"
        except Exception as error:
            effects[name] = f"red: {type(error).__name__}: {error}"
            if os.environ.get("EFFECTS_TRACEBACK"):
                traceback.print_exc()
    branches = selector_branches() if series == "0.28.0" else {}
    return {"effects": effects, "branches": branches}


def is_red_as_expected(series: str, patch: str, finding: str) -> bool:
    """Whether a finding is red of the cause that the patch is there for."""
    return bool(re.match(f"red: {EFFECTS[series][patch].cause}", finding, re.DOTALL))


if __name__ == "__main__":
    # Here, not above: whoever imports this module starts processes of their own, with plugins among them.
    os.environ["VLLM_PLUGINS"] = ""  # what is installed beside vLLM is no part of what the patches do
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    print(json.dumps(findings(*sys.argv[1:])))
