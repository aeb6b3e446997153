# SPDX-License-Identifier: Apache-2.0
"""The inert prefill backend. vLLM gives every MLA layer one, but our impl owns prefill whole and never calls it."""

from __future__ import annotations

from typing import Any, NoReturn

from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend


class CPUNativeMLAPrefillBackend(MLAPrefillBackend):
    """Holds the place that vLLM reserves; being called is a fault."""

    @staticmethod
    def get_name() -> str:
        return "CPU_NATIVE"

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        pass

    def run_prefill_new_tokens(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("CPU_NATIVE is inert: AMX_MLA's impl owns prefill (run_prefill_new_tokens was called)")

    def run_prefill_context_chunk(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("CPU_NATIVE is inert: AMX_MLA's impl owns prefill (run_prefill_context_chunk was called)")
