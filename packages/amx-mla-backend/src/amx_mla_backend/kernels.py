# SPDX-License-Identifier: Apache-2.0
"""The one place that loads amx-kernels, so that a missing or broken library is a reason in a log line, not a crash."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from amx_mla_backend import envs

PORTABLE = "portable"


@dataclass(frozen=True)
class Kernels:
    """The loaded library: the ops (``torch.ops.amx_kernels``), the name of the tier in use, and the rule that says
    whether a request of (new tokens, all tokens) prefills sooner in the decompressed form."""

    ops: Any
    tier: str
    decompressed: Callable[[int, int], bool]


class KernelsUnavailable(RuntimeError):
    """amx-kernels cannot be used in this process; the message says why."""


@functools.cache
def _ops() -> Any:
    import torch

    try:
        import amx_kernels.torch  # noqa: F401  registers the ops
    except Exception as error:  # a missing library, a wrong torch, a file damaged on disk: anything may come out of it
        raise KernelsUnavailable(f"amx_kernels cannot be loaded: {type(error).__name__}: {error}") from error
    return torch.ops.amx_kernels


def load() -> Kernels:
    """Load the ops and pick the tier.

    Raises:
        KernelsUnavailable: the library cannot be loaded, or AMX_KERNELS_ISA names a tier that this host cannot run.
    """
    ops = _ops()
    try:
        from amx_kernels import isa, prefill_decompressed

        return Kernels(ops, str(isa.current()), prefill_decompressed)
    except Exception as error:
        raise KernelsUnavailable(f"amx_kernels: {error}") from error


def unavailable_reason() -> str | None:
    """Why the backend does not serve on this host; None if it does.

    The portable tier is right everywhere but no faster than vLLM's own reference, so it serves only when asked to.
    """
    try:
        tier = load().tier
    except KernelsUnavailable as error:
        return str(error)
    if tier == PORTABLE and envs.MODE.get() != "on":
        return (
            f"no tier above `{PORTABLE}` is permitted on this host (see `python -m amx_kernels doctor`); "
            f"{envs.MODE.name}=on serves on that tier"
        )
    return None
