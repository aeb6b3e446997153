# SPDX-License-Identifier: Apache-2.0
"""Runs one vLLM engine in a process of its own: jobs in (a JSON file), observations out (another). :func:`drive` does.

Input: {"model", "engine": {LLM arguments}, "emulate": bool, "amd": bool (vLLM takes the CPU for an AMD one), "no_amx":
bool (vLLM takes it for one without AMX), "jobs": {name: {"prompts": [[token ids]], "max_tokens", "prompt_logprobs":
bool, "alone": bool}}}.

Output: {"platform": [class name], "cache": {"block_size", "prefix_caching"}, "layers": {...} (engines in this process),
"emulated": {counter: int}, "jobs": {name: {"requests": [request], "calls": {op: int}}}}, a request being {"prompt",
"tokens", "token_logprobs", "prompt_logprobs" (None for the first), "cached"}.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any


def drive(folder: Path, work: dict[str, Any], env: dict[str, str]) -> tuple[dict[str, Any] | None, list[str]]:
    """Runs an engine as ``work`` says, with ``env`` over the environment ("" takes a variable away).

    Returns its observations, None if it failed, and the lines of its log, which stays in ``folder``.
    """
    (folder / "work.json").write_text(json.dumps(work))
    merged = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "2",
        "HF_HUB_OFFLINE": "1",
        **env,
    }
    command = [sys.executable, __file__, "work.json", "result.json"]
    with open(folder / "log.txt", "w") as log:
        code = subprocess.run(
            command, cwd=folder, env={key: value for key, value in merged.items() if value != ""}, stdout=log,
            stderr=log, timeout=900,
        ).returncode  # fmt: skip
    lines = (folder / "log.txt").read_text(errors="replace").splitlines()
    return (json.loads((folder / "result.json").read_text()) if code == 0 else None), lines


class CountingOps:
    """The kernels' ops, counting calls by name."""

    def __init__(self, ops: Any, calls: Counter[str]) -> None:
        self._ops, self._calls = ops, calls

    def __getattr__(self, name: str) -> Any:
        op = getattr(self._ops, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self._calls[name] += 1
            return op(*args, **kwargs)

        return call


def attention_layers(llm: Any) -> list[Any]:
    """The attention layers of an engine in this process."""
    config = llm.llm_engine.vllm_config
    return [layer for layer in config.compilation_config.static_forward_context.values() if hasattr(layer, "kv_b_proj")]


def observe(output: Any) -> dict[str, Any]:
    def chosen(table: Any, tokens: list[int]) -> list[float | None]:
        return [None if entry is None else entry[token].logprob for entry, token in zip(table, tokens, strict=True)]

    completion, prompt = output.outputs[0], list(output.prompt_token_ids)
    tokens = list(completion.token_ids)
    return {
        "prompt": prompt,
        "tokens": tokens,
        "token_logprobs": chosen(completion.logprobs, tokens),
        "prompt_logprobs": chosen(output.prompt_logprobs, prompt) if output.prompt_logprobs else None,
        "cached": output.num_cached_tokens or 0,
    }


def main(source: str, target: str) -> None:
    with open(source) as file:
        work = json.load(file)
    emulation = contextlib.nullcontext()
    if work.get("emulate"):
        from mla_testing import amx_emulator

        amx_emulator.deny_amx_permission()  # whoever else would ask for it, so that every tile instruction traps
        emulation = amx_emulator.emulate()

    if work.get("amd"):
        import vllm.platforms

        vllm.platforms._is_amd_zen_cpu = lambda: True

    if work.get("no_amx"):
        import torch

        torch.cpu._is_amx_tile_supported = lambda: False

    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    with emulation as counters:
        llm = LLM(model=work["model"], seed=0, disable_log_stats=True, **work["engine"])
        classes = [cls.__name__ for cls in type(current_platform).__mro__]
        cache = llm.llm_engine.vllm_config.cache_config
        result: dict[str, Any] = {
            "jobs": {},
            "platform": classes,
            "cache": {"block_size": cache.block_size, "prefix_caching": cache.enable_prefix_caching},
        }
        calls: Counter[str] = Counter()
        in_process = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
        if in_process:
            layers = attention_layers(llm)
            result["layers"] = {
                "count": len(layers),
                "classes": sorted({type(layer).__name__ for layer in layers}),
                "raw_weight_elements": sum(
                    p.numel() for layer in layers for p in layer.kv_b_proj.parameters(recurse=False)
                ),
                "copies": [name for name in ("W_UK_T", "W_UV") if any(hasattr(layer, name) for layer in layers)],
            }
            for layer in layers if result["layers"]["classes"] == ["AMXMLAAttention"] else ():
                layer.impl._ops = CountingOps(layer.impl._ops, calls)
        for name, job in work["jobs"].items():
            calls.clear()
            parameters = SamplingParams(
                temperature=0,
                max_tokens=job["max_tokens"],
                ignore_eos=True,
                logprobs=0,
                prompt_logprobs=0 if job.get("prompt_logprobs", True) else None,
            )
            batches = [[p] for p in job["prompts"]] if job.get("alone") else [job["prompts"]]
            outputs = [
                output
                for batch in batches
                for output in llm.generate([{"prompt_token_ids": p} for p in batch], parameters, use_tqdm=False)
            ]
            result["jobs"][name] = {"requests": [observe(output) for output in outputs], "calls": dict(calls)}
        if counters is not None:
            result["emulated"] = counters.counters()
    with open(target, "w") as file:
        json.dump(result, file)


if __name__ == "__main__":  # vLLM's worker processes import this file again
    main(sys.argv[1], sys.argv[2])
