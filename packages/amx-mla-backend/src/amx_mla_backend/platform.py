# SPDX-License-Identifier: Apache-2.0
"""The platform: exactly the CPU class vLLM would have chosen, with two of its decisions revised for MLA models.

vLLM lets one out-of-tree platform beat every builtin one, so the plugin first asks vLLM's own detection and answers
only when that would choose a CPU class (``CpuPlatform``, or ``ZenCpuPlatform`` where zentorch is installed); the class
returned is a subclass of that one. The parent decides by the AMX flag of the CPU whether an MLA model may keep chunked
prefill, prefix caching and its block size. Our kernels need none of that flag, so the parent is called first and the
user's settings are put back after it.
"""

from __future__ import annotations

import functools
import os
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import vllm.envs
from vllm.platforms import builtin_platform_plugins
from vllm.utils.import_utils import resolve_obj_by_qualname

from amx_mla_backend import compat, selection
from amx_mla_backend.log import logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BACKEND_PATH = "amx_mla_backend.backend.AMXMLABackend"

_CPU_CLASSES = {
    "AmxMlaCpuPlatform": "vllm.platforms.cpu.CpuPlatform",
    "AmxMlaZenCpuPlatform": "vllm.platforms.zen_cpu.ZenCpuPlatform",
}
"""Names under which this module offers its subclasses, and the vLLM class each one extends."""


def detected() -> str | None:
    """The platform vLLM would choose without any plugin, as a class path; None if it would choose none."""
    found: dict[str, str] = {}
    for name, probe in builtin_platform_plugins.items():
        try:
            path = probe()
        except Exception:  # vLLM treats a probe that fails as one that found nothing
            continue
        if path is not None:
            found[name] = path
    # Two at once is vLLM's to report.
    return next(iter(found.values())) if len(found) == 1 else None


@functools.cache
def subclass_path() -> str | None:
    """Class path of the platform to activate; None if vLLM would not choose a CPU class that is known here."""
    stock = detected()
    for name, parent in _CPU_CLASSES.items():
        if parent == stock:
            return f"{__name__}.{name}"
    return None


def other_plugin(own: str = "amx_mla") -> str | None:
    """Name of another platform plugin that is active too; vLLM would refuse to start with two."""
    allowed = vllm.envs.VLLM_PLUGINS
    for entry in entry_points(group="vllm.platform_plugins"):
        if entry.name == own or (allowed is not None and entry.name not in allowed):
            continue
        try:
            if entry.load()() is not None:
                return entry.name
        except Exception:  # vLLM skips a plugin that fails, so it is no rival
            continue
    return None


class LatentAttentionPlatform:
    """Mixin over a CPU platform class; see the module's description."""

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        mla = selection.is_mla(vllm_config)
        if mla:
            _drop_disabled_indexer(vllm_config)
        choice = selection.choose(vllm_config)
        if not choice.serves:
            with compat.without_registration():
                super().check_and_update_config(vllm_config)  # type: ignore[misc]
            if mla:
                _avoid_rotary_embedding_op(vllm_config)
                logger.info_once("AMX_MLA stands back, vLLM's own attention serves this model: %s.", choice.reason)
            return
        cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
        block_size = cache.block_size if cache.user_specified_block_size else selection.DEFAULT_BLOCK_SIZE
        prefix_caching = cache.enable_prefix_caching
        chunked_prefill, max_tokens = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens

        super().check_and_update_config(vllm_config)  # type: ignore[misc]

        _avoid_rotary_embedding_op(vllm_config)
        _ask_for_huge_pages()
        cache.block_size = block_size
        cache.enable_prefix_caching = prefix_caching
        scheduler.enable_chunked_prefill = chunked_prefill
        scheduler.max_num_batched_tokens = max_tokens

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        from vllm.config import get_current_vllm_config

        if attn_selector_config.use_mla and selection.choose(get_current_vllm_config()).serves:
            return BACKEND_PATH
        with compat.without_registration():
            return super().get_attn_backend_cls(  # type: ignore[misc]
                selected_backend, attn_selector_config, num_heads
            )


def _avoid_rotary_embedding_op(vllm_config: VllmConfig) -> None:
    """Keep MLA models away from vLLM's CPU ``rotary_embedding`` op, unless the user asked for it.

    The op takes the head count from the last dimension and the stride of the wrong axis: MLA's 3-D views of q and k_pe
    come out rotated wrongly, and the latent next to k_pe is overwritten. Eager mode with plain rope reaches it.
    """
    custom_ops = vllm_config.compilation_config.custom_ops
    if not {"+rotary_embedding", "-rotary_embedding"} & set(custom_ops):
        custom_ops.append("-rotary_embedding")


def _ask_for_huge_pages() -> None:
    """Weights and cache on huge pages, where the kernel grants them, unless the user decided otherwise.

    A decode step reads all of both, and otherwise misses the TLB every 4 KB. PyTorch reads the variable at its
    first tensor; the engine's process starts after this one has decided, and inherits it.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def _drop_disabled_indexer(vllm_config: VllmConfig) -> None:
    """``index_topk`` of 0 or None means dense attention, but vLLM's models only ask whether the attribute is there."""
    model = vllm_config.model_config
    for config in (model.hf_config, model.hf_text_config):
        if "index_topk" in vars(config) and not config.index_topk:
            del config.index_topk


@functools.cache
def _subclass(name: str) -> type:
    parent = resolve_obj_by_qualname(_CPU_CLASSES[name])
    return type(name, (LatentAttentionPlatform, parent), {"__module__": __name__, "__doc__": parent.__doc__})


def __getattr__(name: str) -> type:
    # The parent cannot be imported with this module: vLLM is still choosing its platform then.
    if name in _CPU_CLASSES:
        return _subclass(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
