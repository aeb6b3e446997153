# SPDX-License-Identifier: Apache-2.0
"""The demonstration: a tiny DeepSeek-V2 checkpoint, served by `vllm serve` with our backend, checked word for word.

Prompts are cut from the text that the checkpoint knows, at places a run-time seed chooses. Every answer is compared
with Hugging Face transformers in float32; reports/demo.json keeps the result, and a mismatch is the exit status.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from openai import OpenAI
from serving import Server

from amx_mla_backend.compat import vllm_version
from mla_testing import agreement, checkpoints, corpus

BATCH = (9, 61, 200, 500, 900, 1500, 2200, 2960)
"""Prompt lengths of the batch, in tokens."""
STREAMED, REPEATED = 120, 1000
NEW_TOKENS = 32


class Client:
    """The openai client, collecting what agreement needs."""

    def __init__(self, url: str, model: str) -> None:
        self._client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
        self._model = model

    def complete(self, prompt: str, *, prompt_logprobs: bool = True) -> dict[str, Any]:
        """One completion as an observation (see ``mla_testing.agreement``)."""
        extra: dict[str, Any] = {"return_token_ids": True}
        if prompt_logprobs:
            extra["prompt_logprobs"] = 0
        answer = self._client.completions.create(
            model=self._model, prompt=prompt, max_tokens=NEW_TOKENS, temperature=0, logprobs=1, extra_body=extra
        )
        choice, usage = answer.choices[0].model_dump(), answer.usage.model_dump()
        ids = choice["prompt_token_ids"]
        given = choice.get("prompt_logprobs")
        return {
            "prompt": ids,
            "tokens": choice["token_ids"],
            "token_logprobs": choice["logprobs"]["token_logprobs"],
            "prompt_logprobs": given
            and [entry and entry[str(token)]["logprob"] for entry, token in zip(given, ids, strict=True)],
            "cached": (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            "text": choice["text"],
        }

    def stream(self, prompt: str) -> dict[str, Any]:
        """The same, received piece by piece and printed as it comes."""
        pieces: list[str] = []
        ids: list[int] = []
        logprobs: list[float] = []
        prompt_ids: list[int] = []
        for event in self._client.completions.create(
            model=self._model,
            prompt=prompt,
            max_tokens=NEW_TOKENS,
            temperature=0,
            logprobs=1,
            stream=True,
            extra_body={"return_token_ids": True},
        ):
            for choice in (c.model_dump() for c in event.choices):
                print(choice["text"], end="", flush=True)
                pieces.append(choice["text"])
                prompt_ids = prompt_ids or choice.get("prompt_token_ids") or []
                ids += choice.get("token_ids") or []
                if choice["logprobs"]:
                    logprobs += choice["logprobs"]["token_logprobs"]
        print()
        return {
            "prompt": prompt_ids,
            "tokens": ids,
            "token_logprobs": logprobs,
            "prompt_logprobs": None,
            "cached": 0,
            "text": "".join(pieces),
            "pieces": len(pieces),
        }


def agrees(found: agreement.Agreement) -> bool:
    """Whether the answers are right, by the limits that a tiny checkpoint allows."""
    try:
        found.check(median=agreement.TINY_MEDIAN, p99=agreement.TINY_P99)
    except AssertionError:
        return False
    return True


def shown(text: str, width: int = 60) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else "…" + text[-width:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=None, help="chooses the prompts; another one every time by default")
    parser.add_argument("--kind", default="yarn", help="checkpoint kind (mla_testing.checkpoints)")
    parser.add_argument("--report", type=Path, default=Path("reports/demo.json"))
    arguments = parser.parse_args()
    seed = secrets.randbelow(1 << 31) if arguments.seed is None else arguments.seed

    print(f"1. A tiny DeepSeek-V2 checkpoint ({arguments.kind}), trained once and kept")
    model = checkpoints.make(arguments.kind)

    with tempfile.TemporaryDirectory(prefix="demo-") as folder:
        log = Path(folder) / "serve.log"
        print("2. vllm serve")
        begin = time.monotonic()
        options = ("--served-model-name", "tiny", "--max-model-len", "3072", "--max-num-seqs", "16",
                   "--enable-prompt-tokens-details", "--max-logprobs", "5")  # fmt: skip
        with Server(str(model), *options, log=log, env={"VLLM_CPU_KVCACHE_SPACE": "1"}) as server:
            who = server.announcement()
            print(f"   ready after {time.monotonic() - begin:.0f} s on {server.url}: {who}")
            client = Client(server.url, "tiny")

            print(f"3. Completions (seed {seed}); one streamed:")
            (prompt,) = corpus.text_prompts(seed, [STREAMED])
            print(f"   {shown(prompt)} ⟶", end=" ")
            streamed = client.stream(prompt)

            print(f"   {len(BATCH)} at once, of {BATCH[0]} to {BATCH[-1]} tokens:")
            prompts = corpus.text_prompts(seed + 1, BATCH)
            begin = time.monotonic()
            with ThreadPoolExecutor(len(BATCH)) as pool:
                batch = list(pool.map(client.complete, prompts))
            seconds = time.monotonic() - begin
            for prompt, answer in zip(prompts, batch, strict=True):
                print(f"   {len(answer['prompt']):5d}  {shown(prompt)} ⟶ {shown(answer['text'])}")

            (prompt,) = corpus.text_prompts(seed + 2, [REPEATED])
            repeated = [client.complete(prompt, prompt_logprobs=False) for _ in range(2)]
            print(
                f"   one prompt of {REPEATED} tokens twice: {repeated[1]['cached']} tokens came from the prefix cache"
            )

    print("4. Hugging Face transformers in float32")
    requests = [streamed, *batch, *repeated]
    found = agreement.compare_with_transformers(model, requests)
    tokens = sum(len(answer["prompt"]) + len(answer["tokens"]) for answer in batch)
    problems = [
        text
        for text, wrong in (
            ("our backend did not serve", who is None or who.backend != "AMX_MLA"),
            ("the stream came in one piece", streamed["pieces"] < 2),
            ("the repeated prompt was not taken from the prefix cache", repeated[1]["cached"] == 0),
            (f"disagreement with transformers: {found}", not agrees(found)),
        )
        if wrong
    ]
    report = {
        "vllm": vllm_version(),
        "backend": who.backend if who else None,
        "tier": who.tier if who else None,
        "threads": who.threads if who else None,
        "requests": len(requests),
        "tokens_per_s": round(tokens / seconds, 1),
        "seed": seed,
        "greedy_match": found.greedy_match,
        "logprob_diff": {"median": found.median, "p99": found.p99, "max": found.max},
        "ok": not problems,
    }
    arguments.report.parent.mkdir(parents=True, exist_ok=True)
    arguments.report.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    for text in problems:
        print(f"MISMATCH: {text}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
