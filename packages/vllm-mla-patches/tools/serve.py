# SPDX-License-Identifier: Apache-2.0
"""Serves a tiny checkpoint with vLLM and compares it with transformers in float32. Prints one JSON object.

    python serve.py KIND

KIND is one of `mla_testing.checkpoints`; the object is what `mla_testing.agreement` finds, and how it was served.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

# Two tokens, less and more than a block of 16, more than one of 128.
PROMPT_LENGTHS = (2, 5, 17, 150)
NEW_TOKENS = 12


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    options = parser.parse_args()

    from vllm import LLM, SamplingParams

    from mla_testing import agreement, checkpoints, corpus

    checkpoint = checkpoints.make(options.kind, progress=False)
    llm = LLM(model=str(checkpoint), dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=8)
    requests = [{"prompt_token_ids": ids} for ids in corpus.prompts(0, PROMPT_LENGTHS)]
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, logprobs=0, prompt_logprobs=0, ignore_eos=True)
    answers = llm.generate(requests, sampling, use_tqdm=False)

    cache = llm.llm_engine.vllm_config.cache_config
    found = agreement.compare_with_transformers(checkpoint, [agreement.from_vllm(answer) for answer in answers])
    how = {"block_size": cache.block_size, "prefix_caching": cache.enable_prefix_caching}
    print(json.dumps({**how, **dataclasses.asdict(found)}))


if __name__ == "__main__":
    main()
