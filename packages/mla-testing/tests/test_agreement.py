# SPDX-License-Identifier: Apache-2.0
"""The agreement measure: each rule, broken alone, and the real thing on a checkpoint."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the measure compares with transformers, which needs torch")
pytest.importorskip("transformers", reason="the measure compares with transformers")

from mla_testing import agreement, checkpoints, corpus  # noqa: E402
from mla_testing.agreement import Served, compare_with_transformers  # noqa: E402

VOCAB = 8


class TableReference(agreement.Reference):
    """transformers replaced by a model whose logits depend on the last token alone."""

    def __init__(self, tmp_path, logits):
        super().__init__(tmp_path)
        self.calls = 0
        table = torch.tensor(logits, dtype=torch.float32)

        def forward(ids, use_cache):
            self.calls += 1
            return SimpleNamespace(logits=table[ids])

        self._model = forward

    def logprob(self, last, token):
        return self.scores([last, token]).logprobs[0].item()


@pytest.fixture
def reference(tmp_path):
    """After token t comes t + 1 with certainty; after 6, 7 and 0 are 0.2 apart; after 7, 0 and 1 are 0.5 apart."""
    logits = np.full((VOCAB, VOCAB), -3.0)
    for t in range(VOCAB):
        logits[t, (t + 1) % VOCAB] = 6.0
    logits[6, 0], logits[7, 1] = 5.8, 5.5
    return TableReference(tmp_path, logits)


def test_agreement(reference):
    served = Served(
        [0, 1], [2, 3, 4], [reference.logprob(t, t + 1) for t in (1, 2, 3)], [None, reference.logprob(0, 1) + 0.01]
    )
    result = compare_with_transformers(reference, [served])
    assert result.ok and not result.faults
    assert (result.requests, result.tokens, result.greedy_match) == (1, 3, 1.0)
    assert result.max == pytest.approx(0.01, abs=1e-6) and result.median == 0.0
    assert "1 requests, 3 tokens served, 100.00% transformers' likeliest" in str(result)
    result.check(median=0.0, p99=0.011)
    with pytest.raises(AssertionError, match=r"differ by more than 0\.05"):
        result.check(p99=0.001)


def test_runner_up_within_the_margin(reference):
    served = [Served([0], [1, 2, 3, 4, 5, 6])] * 20 + [Served([5, 6], [0])]
    assert compare_with_transformers(reference, served).ok


@pytest.mark.parametrize("served, words", [([1], "number 2, 0.500 below its likeliest 0"), ([4], "number 3, ")])
def test_wrong_token_is_named(reference, served, words):
    result = compare_with_transformers(reference, [Served([0], [1, 2]), Served([6, 7], served, name="second")])
    with pytest.raises(AssertionError, match="second: served token 0"):
        result.check()
    assert result.faults[0].startswith(f"second: served token 0 is {served[0]}, transformers' {words}")
    assert "context of 2 tokens" in result.faults[0]


def test_too_many_runners_up(reference):
    result = compare_with_transformers(reference, [Served([6], [0])] * 3 + [Served([0], [1])] * 97)
    assert not result.ok and result.greedy_match == 0.97
    assert result.faults == ("97.00% of the served tokens are the likeliest, at least 98% is right",)


@pytest.mark.parametrize(
    "error, fault",
    [([0.06] * 10, "0.0600 in the median"), ([0.0] * 9 + [0.9], "0.8190 in the 99th percentile"), ([math.nan], "nan")],
)
def test_log_probabilities(reference, error, fault):
    served = [Served([0], [1], [reference.logprob(0, 1) + e]) for e in error]
    result = compare_with_transformers(reference, served)
    assert not result.ok and fault in str(result)


class RoutedReference(TableReference):
    """The same behind a router of three experts, two of which are chosen; the last token decides by how much."""

    def __init__(self, tmp_path, logits, gaps):
        super().__init__(tmp_path, logits)
        whole = self._model

        class FakeTopkRouter(torch.nn.Module):
            def forward(self, ids):
                gap = torch.tensor(gaps)[ids[0]]
                router_logits = torch.stack([torch.zeros(len(gap)), gap + 1, gap], dim=1)
                return router_logits, None, router_logits.topk(2).indices

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.gate = FakeTopkRouter()

            def forward(self, ids, use_cache):
                self.gate(ids)
                return whole(ids, use_cache)

        self._model = Model()


def test_places_near_a_tie_of_the_router_are_judged_apart(tmp_path):
    gaps = [0.5] * VOCAB
    gaps[2] = 0.01
    reference = RoutedReference(tmp_path, np.roll(9 * np.eye(VOCAB), 1, axis=1), gaps)
    assert reference.scores([1, 2, 3]).routing == pytest.approx([0.5, 0.01])
    logprobs = [reference.logprob(t, t + 1) for t in (1, 2, 3)]

    def judged(errors):
        served = [value + error for value, error in zip(logprobs, errors, strict=True)]
        return compare_with_transformers(reference, [Served([1], [2, 3, 4], served)])

    tie = judged([0.0, 0.1, 0.0])
    assert tie.settled == pytest.approx(2 / 3) and tie.max == pytest.approx(0.1) and tie.settled_p99 < 1e-6
    elsewhere = judged([0.1, 0.0, 0.0])
    assert elsewhere.settled_p99 == pytest.approx(0.1, rel=0.02)  # of two places
    with pytest.raises(AssertionError, match=r"0\.06 \(p99 where routers are settled\)"):
        elsewhere.check(settled_p99=0.06)


def test_prompt_log_probabilities_are_judged_alone(reference):
    good = [reference.logprob(t, t + 1) for t in (0, 1)]
    assert compare_with_transformers(reference, [Served([0, 1, 2], [], None, [None, *good])]).ok
    result = compare_with_transformers(reference, [Served([0, 1, 2], [], None, [None, good[0], good[1] - 1.0])])
    assert not result.ok and result.max == pytest.approx(1.0)


def test_accepts_mappings(reference):
    observed = {"prompt": [0], "tokens": [1], "token_logprobs": None, "prompt_logprobs": [None], "text": "ignored"}
    result = compare_with_transformers(reference, [observed])
    assert result.ok and result.median is None
    assert not compare_with_transformers(reference, [{**observed, "tokens": [5]}]).ok


def test_sequences_are_scored_once(reference, tmp_path):
    for _ in range(3):
        reference.scores([0, 1, 2])
    assert reference.calls == 1
    again = agreement.Reference(tmp_path)
    again._model = pytest.fail
    np.testing.assert_array_equal(again.scores([0, 1, 2]).logprobs, reference.scores([0, 1, 2]).logprobs)


def test_bad_input():
    with pytest.raises(ValueError, match="token_logprobs has 1 entries, expected 2"):
        Served([0], [1, 2], [0.0])
    with pytest.raises(ValueError, match="prompt_logprobs has 1 entries, expected 3"):
        Served([0, 1, 2], [3], None, [0.0])
    with pytest.raises(ValueError, match="prompt is empty"):
        Served([], [1])


def test_from_vllm():
    def entry(token, value):
        return {token: SimpleNamespace(logprob=value), 99: SimpleNamespace(logprob=0.0)}

    output = SimpleNamespace(
        prompt_token_ids=[0, 5, 6],
        prompt_logprobs=[None, entry(5, -1.0), entry(6, -2.0)],
        outputs=[SimpleNamespace(token_ids=(7, 8), logprobs=[entry(7, -0.1), entry(8, -0.2)])],
    )
    assert agreement.from_vllm(output) == Served([0, 5, 6], [7, 8], [-0.1, -0.2], [None, -1.0, -2.0])
    output.prompt_logprobs = output.outputs[0].logprobs = None
    assert agreement.from_vllm(output) == Served([0, 5, 6], [7, 8])


def test_transformers_agrees_with_itself_and_not_with_a_fault():
    """Its own greedy text passes; the same text claimed for another prompt does not."""
    reference = agreement.Reference(checkpoints.make("yarn"))
    one, other = corpus.prompts(7, [40, 300])
    tokens = reference.generate(one, 12)
    scores = reference.scores([*one, *tokens])
    logprobs = scores.logprobs[len(one) - 1 :].tolist()
    assert compare_with_transformers(reference, [Served(one, tokens, logprobs)]).ok
    result = compare_with_transformers(reference, [Served(other, tokens, logprobs)])
    assert not result.ok and "served token 0" in result.faults[0]
