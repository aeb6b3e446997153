# SPDX-License-Identifier: Apache-2.0
"""Serves a tiny checkpoint with vLLM and compares every probability with transformers'. Prints one JSON object.

    python serve.py CHECKPOINT [--dtype float32] [--attention-backend CPU_MLA] [--repeat]

`worst` and `median` are absolute differences of log-probabilities over all tokens of prompts and answers; `greedy`
tells whether each generated token is transformers' most probable one. `--repeat` sends the prompts twice, so that the
second time their prefixes are cached where the backend caches any.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

PROMPT_LENGTHS = (1, 5, 17, 150)  # one token, less and more than a block of 16, more than one of 128
NEW_TOKENS = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--attention-backend")
    parser.add_argument("--repeat", action="store_true")
    options = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=options.checkpoint, dtype=options.dtype, enforce_eager=True, skip_tokenizer_init=True, max_model_len=256,
        max_num_seqs=8, attention_backend=options.attention_backend, enable_prefix_caching=options.repeat,
    )  # fmt: skip
    config = llm.llm_engine.vllm_config
    vocabulary = config.model_config.get_vocab_size()
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    # A request for the log-probabilities of its prompt reuses no cached prefix: those of the answer alone, then.
    wanted = {} if options.repeat else {"prompt_logprobs": 0}
    sampling = SamplingParams(
        max_tokens=NEW_TOKENS, temperature=0, logprobs=0, detokenize=False, ignore_eos=True, **wanted
    )
    for _ in range(2 if options.repeat else 1):
        answers = llm.generate(requests, sampling, use_tqdm=False)

    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=getattr(torch, options.dtype))
    differences, greedy = [], True
    for prompt, answer in zip(prompts, answers, strict=True):
        new = list(answer.outputs[0].token_ids)
        tokens = prompt + new
        with torch.no_grad():
            expected = torch.log_softmax(model(torch.tensor([tokens])).logits[0].float(), dim=-1)
        given = [entry and entry[token].logprob for entry, token in zip(answer.prompt_logprobs or [], prompt)]  # noqa: B905
        given = given or [None] * len(prompt)
        given += [entry[token].logprob for entry, token in zip(answer.outputs[0].logprobs, new, strict=True)]
        for at in range(1, len(tokens)):
            if given[at] is not None:
                differences.append(abs(given[at] - expected[at - 1, tokens[at]].item()))
        greedy &= all(expected[len(prompt) + i - 1].argmax().item() == token for i, token in enumerate(new))
    print(json.dumps({
        "block_size": config.cache_config.block_size,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "cached_tokens": [answer.num_cached_tokens for answer in answers],
        "compared": len(differences),
        "median": statistics.median(differences),
        "worst": max(differences),
        "greedy": greedy,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
