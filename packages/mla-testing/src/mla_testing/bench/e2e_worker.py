# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in a process of its own, driven step by step by ``bench.e2e`` over a local socket.

    python -m mla_testing.bench.e2e_worker SOCKET

Messages in: the engine's arguments, then jobs {prompts, new_tokens, filled, logprobs}; None ends it. Messages out:
facts about the engine, then per job {steps: [[seconds, first tokens, further tokens, seconds in attention, seconds
writing the cache]], tokens, logprobs, waited: part of its threads' time that they had no CPU, rss_mib}.

Attention is timed where vLLM enters it, ``MLAAttention.forward_impl``: projections from and to the latent space are
inside on every backend.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Client
from typing import Any

from mla_testing.bench.harness import waited
from mla_testing.report import peak_rss_mib


def _timed(function: Callable[..., Any], spent: dict[str, float], key: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent[key] += time.perf_counter() - begin

    return call


def _steps(engine: Any, job: dict[str, Any], ids: itertools.count, spent: dict[str, float]) -> dict[str, Any]:
    from vllm import SamplingParams

    from mla_testing.bench.e2e_vllm import FILLED

    params = SamplingParams(
        max_tokens=job["new_tokens"],
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        logprobs=2 if job["logprobs"] else None,
        extra_args=FILLED if job["filled"] else None,
    )
    names = [str(next(ids)) for _ in job["prompts"]]
    for name, prompt in zip(names, job["prompts"], strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    seen: dict[str, list[int]] = {name: [] for name in names}
    logprobs: dict[str, list[dict[int, float]]] = {}
    steps = []
    while engine.has_unfinished_requests():
        spent.update(attention=0.0, cache=0.0)
        begin = time.perf_counter()
        outputs = engine.step()
        elapsed = time.perf_counter() - begin
        first = further = 0
        for output in outputs:
            # Ids may carry a suffix that the engine added.
            name = output.request_id.split("-", 1)[0]
            completion = output.outputs[0]
            tokens = list(completion.token_ids)
            if len(tokens) > len(seen[name]):
                first, further = first + (not seen[name]), further + bool(seen[name])
                seen[name] = tokens
            if job["logprobs"]:
                logprobs[name] = [{t: entry.logprob for t, entry in at.items()} for at in completion.logprobs]
        steps.append([elapsed, first, further, spent["attention"], spent["cache"]])
    return {"steps": steps, "tokens": list(seen.values()), "logprobs": [logprobs.get(name) for name in names]}


def main(address: str) -> None:
    """Serves jobs until told to end."""
    import torch
    from vllm import LLM
    from vllm.platforms import current_platform

    from mla_testing.bench import e2e_vllm

    connection = Client(address, family="AF_UNIX")
    arguments = {"load_format": e2e_vllm.LOAD_FORMAT, "kv_transfer_config": e2e_vllm.kv_transfer_config()}
    llm = LLM(**arguments, **connection.recv())
    engine = llm.llm_engine
    context = engine.vllm_config.compilation_config.static_forward_context
    layers = [layer for layer in context.values() if hasattr(layer, "kv_b_proj")]
    spent: dict[str, float] = {}
    for layer in layers:
        layer.forward_impl = _timed(layer.forward_impl, spent, "attention")
        layer.impl.do_kv_cache_update = _timed(layer.impl.do_kv_cache_update, spent, "cache")
    connection.send(
        {
            "platform": type(current_platform).__name__,
            "backend": sorted({f"{type(layer.impl).__module__}.{type(layer.impl).__name__}" for layer in layers}),
            "threads": torch.get_num_threads(),
            "layers": len(layers),
            "block_size": engine.vllm_config.cache_config.block_size,
            "raw_kv_b_proj_elements": sum(
                weight.numel() for layer in layers for weight in layer.kv_b_proj.parameters(recurse=False)
            ),
        }
    )
    ids = itertools.count()
    libc = ctypes.CDLL(None)
    while (job := connection.recv()) is not None:
        before, begin = waited(), time.perf_counter()
        outcome = _steps(engine, job, ids, spent)
        share = (waited() - before) / (time.perf_counter() - begin) / torch.get_num_threads()
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)  # engines share the machine: what this one has freed, another may need next
        connection.send({**outcome, "waited": share, "rss_mib": peak_rss_mib()})


if __name__ == "__main__":
    main(sys.argv[1])
