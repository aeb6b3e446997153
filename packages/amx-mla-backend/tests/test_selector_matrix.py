# SPDX-License-Identifier: Apache-2.0
"""Who serves what: {fast tier permitted, not} x {auto, CPU_MLA, AMX_MLA} x {fresh, cached prefix}, each cell through
vLLM's own configuration of a real checkpoint, under the platform that the plugin has made vLLM choose.

`nox -s test` runs it on vLLM 0.32.0, `nox -s patches` on patched 0.28.0. e2e/test_serving_matrix.py serves some cells.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.platforms import current_platform

from amx_mla_backend import envs, kernels, platform, register, selection
from mla_testing import checkpoints

REFERENCE = ("CPUMLABackend", 16, False, False)


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plugin as vLLM loads it, whatever other tests have registered or withdrawn."""
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    assert isinstance(current_platform, platform.LatentAttentionPlatform), "vLLM has not found the plugin"
    monkeypatch.delenv(envs.MODE.name, raising=False)
    register.general_plugin()
    assert AttentionBackendEnum.AMX_MLA.get_path() == platform.BACKEND_PATH
    yield
    AttentionBackendEnum.AMX_MLA.clear_override()
    op_registry_oot.pop("MultiHeadLatentAttentionWrapper", None)


def choose(backend: str | None, cached_prefix: bool) -> tuple[str, int, bool, bool]:
    """Backend class, block size, chunked prefill and prefix caching, as the engine would have them."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(
        model=str(checkpoints.make("yarn", progress=False)), max_model_len=256, enforce_eager=True,
        attention_backend=backend, enable_prefix_caching=cached_prefix,
    ).create_engine_config()  # fmt: skip
    layer = SimpleNamespace(use_mla=True, use_sparse=False, kv_cache_dtype="auto", dtype=config.model_config.dtype)
    with set_current_vllm_config(config):
        path = current_platform.get_attn_backend_cls(config.attention_config.backend, layer)
    cache = config.cache_config
    chunked_prefill = config.scheduler_config.enable_chunked_prefill
    return path.rpartition(".")[2], cache.block_size, chunked_prefill, cache.enable_prefix_caching


@pytest.mark.parametrize("cached_prefix", [False, True], ids=["fresh", "cached"])
@pytest.mark.parametrize("backend", [None, "CPU_MLA", "AMX_MLA"], ids=["auto", "CPU_MLA", "AMX_MLA"])
@pytest.mark.parametrize("permitted", [True, False], ids=["permitted", "not-permitted"])
def test_who_serves(monkeypatch: Any, permitted: bool, backend: str | None, cached_prefix: bool) -> None:
    tier = "amxbf16" if permitted else kernels.PORTABLE
    monkeypatch.setattr(kernels, "load", lambda: kernels.Kernels(None, tier, None))
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: permitted)
    if backend == "AMX_MLA" and not permitted:
        with pytest.raises(ValueError, match="AMX_MLA was asked for: no tier above `portable` is permitted"):
            choose(backend, cached_prefix)
    elif backend == "CPU_MLA" or not permitted:
        assert choose(backend, cached_prefix) == REFERENCE
    else:
        assert choose(backend, cached_prefix) == ("AMXMLABackend", selection.DEFAULT_BLOCK_SIZE, True, cached_prefix)
