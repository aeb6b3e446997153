# SPDX-License-Identifier: Apache-2.0
"""Whether served text agrees with Hugging Face transformers in float32.

The measure is teacher-forced: transformers reads the prompt and the served text at once and says, for each place, what
it would have said there. With a right backend in bfloat16

- every served token is transformers' likeliest, or its second with a margin below 0.3 (natural logarithm);
- at least 98 % are the likeliest outright (``greedy_match``);
- the log-probabilities of the served tokens, and of the prompt's where they were asked for, differ by at most 0.05 in
  the median and 0.2 at the 99th percentile.

    reference = Reference(checkpoint_folder)
    agreement = compare_with_transformers(reference, [Served(prompt_ids, token_ids, logprobs)])
    assert agreement.ok, agreement.explain()
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "MARGIN",
    "MEDIAN_LIMIT",
    "MIN_GREEDY_MATCH",
    "P99_LIMIT",
    "Agreement",
    "LogprobDiff",
    "Reference",
    "Served",
    "compare_with_transformers",
    "from_vllm",
]

MARGIN = 0.3
MIN_GREEDY_MATCH = 0.98
MEDIAN_LIMIT, P99_LIMIT = 0.05, 0.2


@dataclass(frozen=True)
class Served:
    """One served request, decoded greedily.

    Attributes:
        prompt: token ids of the prompt, BOS included.
        tokens: token ids of the served text.
        logprobs: natural-log probability of each served token, or None if they were not asked for.
        prompt_logprobs: that of each prompt token but the first (len(prompt) - 1 of them), or None.
        name: shown in messages.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float] | None = None
    prompt_logprobs: Sequence[float] | None = None
    name: str = ""

    def __post_init__(self) -> None:
        for name, values, count in (
            ("logprobs", self.logprobs, len(self.tokens)),
            ("prompt_logprobs", self.prompt_logprobs, len(self.prompt) - 1),
        ):
            if values is not None and len(values) != count:
                raise ValueError(f"{name} has {len(values)} entries, expected {count}")
        if not self.prompt:
            raise ValueError("prompt is empty, expected at least one token (BOS)")


@dataclass(frozen=True)
class LogprobDiff:
    """Absolute differences of log-probabilities."""

    median: float
    p99: float
    max: float


@dataclass(frozen=True)
class Agreement:
    """The outcome over all requests given. ``ok`` is the verdict, ``explain()`` says why."""

    ok: bool
    requests: int
    tokens: int
    #: Share of served tokens that are transformers' likeliest.
    greedy_match: float
    #: None: no log-probabilities were given.
    logprob_diff: LogprobDiff | None
    #: Each rule that was broken, in words; the first offending token is named.
    faults: tuple[str, ...] = field(default=())

    def explain(self) -> str:
        """The figures, then every broken rule, a line each."""
        text = f"{self.requests} requests, {self.tokens} tokens served, {self.greedy_match:.2%} transformers' likeliest"
        if self.logprob_diff is not None:
            diff = self.logprob_diff
            text += (
                f", log-probabilities differ by {diff.median:.4f} (median) {diff.p99:.4f} (p99) {diff.max:.4f} (max)"
            )
        return "\n".join([text, *self.faults])

    def report(self) -> dict[str, Any]:
        """For JSON: ok, greedy_match, logprob_diff {median, p99, max}."""
        diff = asdict(self.logprob_diff) if self.logprob_diff is not None else None
        return {"ok": self.ok, "greedy_match": self.greedy_match, "logprob_diff": diff}


@dataclass(frozen=True)
class _Scores:
    """What transformers says of a sequence: for each token but the first, [n - 1]."""

    logprobs: NDArray[np.float32]
    #: Places below the likeliest: 0 is the likeliest.
    rank: NDArray[np.int64]
    likeliest: NDArray[np.int64]
    #: Log-probability of the likeliest less that of the token.
    margin: NDArray[np.float32]


class Reference:
    """A checkpoint in transformers, float32, on the CPU. Loads at first use; keeps what it said of each sequence.

    Args:
        checkpoint: folder of the checkpoint; its bfloat16 weights are widened exactly.
        cache_dir: where scores are kept between processes; default: beside the checkpoint. None at call time of
            :meth:`scores` is never needed: equal sequences are computed once.
    """

    def __init__(self, checkpoint: str | os.PathLike[str], cache_dir: str | os.PathLike[str] | None = None) -> None:
        self.checkpoint = Path(checkpoint)
        self.cache_dir = Path(cache_dir) if cache_dir is not None else self.checkpoint / "transformers-scores"
        self._model: Any = None
        self._scores: dict[tuple[int, ...], _Scores] = {}

    @property
    def model(self) -> Any:
        """The transformers model."""
        if self._model is None:
            import torch
            from transformers import AutoModelForCausalLM

            self._model = AutoModelForCausalLM.from_pretrained(
                self.checkpoint, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
            ).eval()
        return self._model

    def scores(self, token_ids: Sequence[int]) -> _Scores:
        """Teacher-forced scores of a sequence."""
        key = tuple(int(t) for t in token_ids)
        if key not in self._scores:
            digest = hashlib.sha256(np.array(key, np.int64).tobytes()).hexdigest()[:20]
            file = self.cache_dir / f"{digest}.npz"
            if file.exists():
                with np.load(file) as stored:
                    self._scores[key] = _Scores(**stored)
            else:
                self._scores[key] = self._compute(key)
                self.cache_dir.mkdir(parents=True, exist_ok=True)
                temporary = file.with_suffix(f".{os.getpid()}.tmp.npz")
                np.savez(temporary, **asdict(self._scores[key]))
                os.replace(temporary, file)
        return self._scores[key]

    def _compute(self, token_ids: tuple[int, ...]) -> _Scores:
        import torch

        ids = torch.tensor([token_ids])
        with torch.inference_mode():
            log_p = self.model(ids, use_cache=False).logits[0, :-1].float().log_softmax(dim=-1)
            own = log_p.gather(1, ids[0, 1:, None])
            best, likeliest = log_p.max(dim=1)
            return _Scores(
                logprobs=own[:, 0].numpy(),
                rank=(log_p > own).sum(dim=1).numpy(),
                likeliest=likeliest.numpy(),
                margin=(best - own[:, 0]).numpy(),
            )

    def generate(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """Greedy continuation by transformers itself."""
        import torch

        ids = torch.tensor([list(prompt)])
        made = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
        )
        return made[0, len(prompt) :].tolist()


def compare_with_transformers(
    reference: Reference | str | os.PathLike[str],
    served: Sequence[Served],
    *,
    margin: float = MARGIN,
    min_greedy_match: float = MIN_GREEDY_MATCH,
    median_limit: float = MEDIAN_LIMIT,
    p99_limit: float = P99_LIMIT,
) -> Agreement:
    """Judge served requests, all together.

    Args:
        reference: a :class:`Reference`, or the folder of the checkpoint served.
        served: the requests. Requests without served tokens count by their prompt_logprobs alone.
        margin, min_greedy_match, median_limit, p99_limit: the rules; see the module.

    Returns:
        The verdict. Log-probabilities that are not finite are faults.
    """
    if not isinstance(reference, Reference):
        reference = Reference(reference)
    faults: list[str] = []
    differences: list[NDArray[np.float64]] = []
    matches = total = wrong = 0
    for index, request in enumerate(served):
        name = request.name or f"request {index}"
        scores = reference.scores([*request.prompt, *request.tokens])
        first = len(request.prompt) - 1
        rank, below = scores.rank[first:], scores.margin[first:]
        total += len(request.tokens)
        matches += int((rank == 0).sum())
        bad = np.flatnonzero((rank > 1) | ((rank == 1) & (below >= margin)))
        wrong += len(bad)
        if len(bad) and not any("served token" in fault for fault in faults):
            at = int(bad[0])
            faults.append(
                f"{name}: served token {at} is {request.tokens[at]}, transformers' number {int(rank[at]) + 1}, "
                f"{below[at]:.3f} below its likeliest {int(scores.likeliest[first + at])}; the second within {margin} "
                f"is right (context of {len(request.prompt) + at} tokens)"
            )
        for kind, given, expected in (
            ("token", request.logprobs, scores.logprobs[first:]),
            ("prompt token", request.prompt_logprobs, scores.logprobs[:first]),
        ):
            if given is None:
                continue
            values = np.asarray(given, np.float64)
            if not np.isfinite(values).all():
                at = int(np.flatnonzero(~np.isfinite(values))[0])
                faults.append(f"{name}: the log-probability of {kind} {at} is {values[at]}")
            difference = np.abs(values - expected)
            differences.append(difference[np.isfinite(difference)])
    if wrong > 1:
        faults.append(f"{wrong} of {total} served tokens are neither the likeliest nor the second within {margin}")
    greedy_match = matches / total if total else 1.0
    if greedy_match < min_greedy_match:
        faults.append(
            f"{greedy_match:.2%} of the served tokens are the likeliest, at least {min_greedy_match:.0%} is right"
        )
    diff = None
    if differences and (every := np.concatenate(differences)).size:
        diff = LogprobDiff(float(np.median(every)), float(np.percentile(every, 99)), float(every.max()))
        for name, value, limit in (("median", diff.median, median_limit), ("p99", diff.p99, p99_limit)):
            if value > limit:
                faults.append(f"log-probabilities differ by {value:.4f} in the {name}, at most {limit} is right")
    return Agreement(
        ok=not faults,
        requests=len(served),
        tokens=total,
        greedy_match=greedy_match,
        logprob_diff=diff,
        faults=tuple(faults),
    )


def from_vllm(output: Any, name: str = "") -> Served:
    """A :class:`Served` from a ``vllm.RequestOutput`` (its first completion), with whatever log-probabilities it has."""
    completion = output.outputs[0]
    prompt, tokens = list(output.prompt_token_ids), list(completion.token_ids)

    def of(entries: Any, ids: Sequence[int]) -> list[float] | None:
        return None if entries is None else [e[t].logprob for e, t in zip(entries, ids, strict=True)]

    prompt_entries = output.prompt_logprobs[1:] if output.prompt_logprobs else None
    return Served(prompt, tokens, of(completion.logprobs, tokens), of(prompt_entries, prompt[1:]), name)
