# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in a process of its own, driven step by step by ``bench.e2e`` over a local socket.

    python -m mla_testing.bench.e2e_worker SOCKET

Messages in: the engine's arguments, then jobs {prompts, new_tokens, profile}; None ends it. Messages out: {"backend"},
then per job {steps: [[seconds, first tokens, further tokens]], tokens, attention_share, rss_mib}.
"""

from __future__ import annotations

import itertools
import re
import sys
import time
from multiprocessing.connection import Client
from typing import Any

from mla_testing.report import peak_rss_mib

#: The opaque operators that hold a layer's attention, and its cache write where that is one of its own.
_ATTENTION = re.compile(r"^vllm::unified_(mla_)?(attention|kv_cache)")


def _steps(engine: Any, job: dict[str, Any], ids: itertools.count) -> tuple[list[list[float]], dict[str, list[int]]]:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=job["new_tokens"], temperature=0.0, ignore_eos=True, detokenize=False)
    names = [str(next(ids)) for _ in job["prompts"]]
    for name, prompt in zip(names, job["prompts"], strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    seen: dict[str, list[int]] = {name: [] for name in names}
    steps = []
    while engine.has_unfinished_requests():
        begin = time.perf_counter()
        outputs = engine.step()
        elapsed = time.perf_counter() - begin
        first = further = 0
        for output in outputs:
            # Ids may carry a suffix that the engine added.
            name = output.request_id.split("-", 1)[0]
            tokens = list(output.outputs[0].token_ids)
            if len(tokens) > len(seen[name]):
                first, further = first + (not seen[name]), further + bool(seen[name])
                seen[name] = tokens
        steps.append([elapsed, first, further])
    return steps, seen


def _attention_share(profile: Any, seconds: float) -> float:
    spent = sum(event.cpu_time_total for event in profile.key_averages() if _ATTENTION.match(event.key))
    return spent / 1e6 / seconds


def main(address: str) -> None:
    """Serves jobs until told to end."""
    import torch
    from vllm import LLM

    connection = Client(address, family="AF_UNIX")
    llm = LLM(**connection.recv())
    engine = llm.llm_engine
    layers = engine.vllm_config.compilation_config.static_forward_context.values()
    backends = {
        type(layer.impl).__module__ + "." + type(layer.impl).__name__ for layer in layers if hasattr(layer, "impl")
    }
    connection.send({"backend": sorted(backends), "threads": torch.get_num_threads()})
    ids = itertools.count()
    while (job := connection.recv()) is not None:
        share = None
        if job.get("profile"):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                steps, seen = _steps(engine, job, ids)
            share = _attention_share(profile, sum(step[0] for step in steps))
        else:
            steps, seen = _steps(engine, job, ids)
        connection.send(
            {"steps": steps, "tokens": list(seen.values()), "attention_share": share, "rss_mib": peak_rss_mib()}
        )


if __name__ == "__main__":
    main(sys.argv[1])
