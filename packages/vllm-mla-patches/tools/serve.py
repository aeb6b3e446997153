# SPDX-License-Identifier: Apache-2.0
"""Serves a tiny checkpoint with vLLM and compares every probability with transformers'. Prints one JSON object.

    python serve.py CHECKPOINT [--dtype float32] [--attention-backend CPU_MLA] [--repeat]

Expected are the log-probabilities of transformers in float32. `worst` and `median` are absolute differences to them
over all tokens of prompts and answers, `own_worst` and `own_median` those of transformers in the served dtype: what
that dtype costs without vLLM. `gap` tells how much more probable than a generated token the most probable one is, at
worst.
`--repeat` sends the prompts twice, so that the second time their prefixes are cached where the backend caches any.
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

    def log_probabilities(dtype: torch.dtype) -> list[torch.Tensor]:
        model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=dtype)
        with torch.no_grad():
            return [torch.log_softmax(model(torch.tensor([tokens])).logits[0].float(), dim=-1) for tokens in texts]

    texts = [prompt + list(answer.outputs[0].token_ids) for prompt, answer in zip(prompts, answers, strict=True)]
    expected = log_probabilities(torch.float32)
    own = log_probabilities(getattr(torch, options.dtype))
    served, dtype_alone, gaps = [], [], []
    for prompt, tokens, answer, wide, narrow in zip(prompts, texts, answers, expected, own, strict=True):
        entries = [*(answer.prompt_logprobs or [None] * len(prompt)), *answer.outputs[0].logprobs]
        for at in range(1, len(tokens)):
            token, before = tokens[at], at - 1  # the position that predicts it
            if entries[at] is not None:
                served.append(abs(entries[at][token].logprob - wide[before, token].item()))
                dtype_alone.append(abs(narrow[before, token].item() - wide[before, token].item()))
            if at >= len(prompt):
                gaps.append((wide[before].max() - wide[before, token]).item())
    print(json.dumps({
        "block_size": config.cache_config.block_size,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "cached_tokens": [answer.num_cached_tokens for answer in answers],
        "compared": len(served),
        "median": statistics.median(served),
        "worst": max(served),
        "own_median": statistics.median(dtype_alone),
        "own_worst": max(dtype_alone),
        "gap": max(gaps),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
