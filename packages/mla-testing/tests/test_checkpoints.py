# SPDX-License-Identifier: Apache-2.0
"""The tiny checkpoints: real dimensions, clear margins at every length, sensitive to the whole context."""

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="checkpoints are trained with torch")
pytest.importorskip("transformers", reason="checkpoints are read with transformers")
pytest.importorskip("tokenizers", reason="checkpoints have a tokenizer")

from safetensors.torch import load_file, save_file  # noqa: E402

from mla_testing import agreement, checkpoints, corpus, narrow  # noqa: E402
from mla_testing.agreement import Reference, Served, compare_with_transformers  # noqa: E402


@pytest.fixture(scope="module", params=checkpoints.KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def reference(kind):
    return Reference(checkpoints.make(kind))


def test_real_attention_dimensions(kind):
    folder = checkpoints.make(kind)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV2ForCausalLM"]
    dims = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "num_attention_heads")
    assert [config[d] for d in dims] == [512, 64, 128, 128, 16]
    assert (config["q_lora_rank"] is None) == (kind != "q_lora")
    assert (config["rope_scaling"] is None) == (kind == "rope")
    weights = load_file(folder / "model.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    kv_b = weights["model.layers.2.self_attn.kv_b_proj.weight"]
    assert kv_b.shape == (16 * 256, 512)
    # Lifted, not padded: no dimension is dead.
    assert (kv_b.float().norm(dim=0) > 0).all() and (kv_b.float().norm(dim=1) > 0).all()


@pytest.mark.parametrize("length", [3000, 900])
def test_recites_with_clear_margins(reference, length):
    """Beyond the first words every token is the text's next one, far ahead of the second, yet not certain."""
    circle = corpus.token_ids()
    prompt = corpus.prompts(11, [length])[0]
    start = next(i for i in range(len(circle)) if list(circle[i : i + 40]) == prompt[1:41])
    sequence = [corpus.BOS, *(circle[(start + i) % len(circle)] for i in range(length + 100))]
    with torch.inference_mode():
        log_p = reference.model(torch.tensor([sequence]), use_cache=False).logits[0, :-1].log_softmax(dim=-1)
    best = log_p.topk(2, dim=-1)
    told = torch.tensor(sequence[1:])
    right = best.indices[:, 0] == told
    assert right[32:].float().mean() > 0.99 and right[len(prompt) :].all()
    margins = best.values[:, 0] - best.values[:, 1]
    assert (margins[64:] > 0.3).float().mean() > 0.995
    assert margins[len(prompt) :].min() > 0.3
    aside = log_p[64:, corpus.ASIDE].exp()
    assert 0.04 < aside.median() < 0.25 and aside.max() < 0.42


def _scores_without(reference, monkeypatch, prompt, hidden):
    """Log-probabilities of a prompt by an attention that does not see ``hidden`` [queries, keys]."""
    real, causal = torch.nn.functional.scaled_dot_product_attention, torch.ones_like(hidden).tril()
    scaling = reference.model.model.layers[0].self_attn.scaling

    def lossy(query, key, value, **_kwargs):
        return real(query, key, value, attn_mask=causal & ~hidden, scale=scaling)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", lossy)
        return reference._compute(tuple(prompt)).logprobs


@pytest.mark.parametrize("seen", [32, 128])
def test_a_forgotten_context_shows(reference, monkeypatch, seen):
    """An attention that sees the latest keys only still recites, but not as surely as it should."""
    prompt = corpus.prompts(5, [2000])[0]
    at = torch.arange(len(prompt))
    forgetful = _scores_without(reference, monkeypatch, prompt, at[None] <= at[:, None] - seen)
    found = compare_with_transformers(reference, [Served(prompt, [], None, [None, *forgetful])])
    with pytest.raises(AssertionError, match="differ by"):
        found.check(median=agreement.TINY_MEDIAN, p99=agreement.TINY_P99)


def test_bfloat16_agrees_closely(reference):
    """transformers' own bfloat16 is the yardstick: far within the limits, and within the tight ones."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(reference.checkpoint, dtype=torch.bfloat16).eval()
    served = []
    for prompt in corpus.prompts(3, [40, 300, 900]):
        with torch.inference_mode():
            log_p = model(torch.tensor([prompt]), use_cache=False).logits[0, :-1].float().log_softmax(dim=-1)
        own = log_p.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        served.append(Served(prompt, [], None, [None, *own.tolist()]))
    compare_with_transformers(reference, served).check(median=agreement.TINY_MEDIAN, p99=agreement.TINY_P99)


@pytest.mark.parametrize("first, end", [(64, 512), (1024, 1280), (1900, 1984)])
def test_lost_keys_show(reference, monkeypatch, first, end):
    """Losing some keys far back moves what follows well beyond the noise of float32."""
    prompt = corpus.prompts(5, [2048])[0]
    hidden = torch.zeros(2048, 2048, dtype=torch.bool)
    hidden[2000:, first:end] = True
    moved = np.abs(_scores_without(reference, monkeypatch, prompt, hidden) - reference.scores(prompt).logprobs)
    assert moved[:1999].max() < 1e-3 and np.median(moved[1999:]) > 0.001


@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_lifting_keeps_the_function(kind, tmp_path, monkeypatch):
    """Without the gauge the wide model is the narrow one; untrained is harder: nothing hides differences."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = narrow.NarrowModel().eval()
        with torch.no_grad():
            model.head.normal_(0, 0.1)
            for layer in model.layers:
                layer.down.normal_(0, 0.05)
    gauges = checkpoints._gauges

    def silent(*arguments):
        found, gain = gauges(*arguments)
        return [{**gauge, "value": torch.zeros_like(gauge["value"])} for gauge in found], gain

    monkeypatch.setattr(checkpoints, "_gauges", silent)
    weights = checkpoints._lift(model, kind)
    checkpoints._save(tmp_path, kind, weights)
    save_file({name: weight.float().contiguous() for name, weight in weights.items()}, tmp_path / "model.safetensors")
    ids, _ = narrow.sequences(torch.tensor([900]), 100)
    with torch.inference_mode():
        expected = model(ids, narrow.frequencies("default" if kind == "rope" else "yarn"))
        actual = Reference(tmp_path).model(ids).logits
    torch.testing.assert_close(actual, expected, atol=2e-3, rtol=2e-3)


def test_unknown_kind():
    with pytest.raises(ValueError, match="kind is 'v4', expected one of yarn, rope, q_lora"):
        checkpoints.make("v4")


def test_made_once(tmp_path, monkeypatch):
    """Training is shared by all kinds, and nothing is made twice."""
    trainings = []

    def untrained(progress):
        trainings.append(progress)
        return narrow.NarrowModel().state_dict()

    monkeypatch.setattr(narrow, "train", untrained)
    folders = {checkpoints.make(kind, tmp_path) for kind in checkpoints.KINDS for _ in range(2)}
    assert len(folders) == 3 and trainings == [True]


def test_prompts_survive_text():
    lengths = [16, 33, 257, 1000, 3000]
    for seed in range(3):
        ids, text = corpus.prompts(seed, lengths), corpus.text_prompts(seed, lengths)
        assert [len(p) for p in ids] == lengths
        assert [corpus.tokenizer().encode(t).ids for t in text] == ids
    assert corpus.prompts(1, [50]) == corpus.prompts(1, [50]) != corpus.prompts(2, [50])
    for length in (1, 10**6):
        with pytest.raises(ValueError, match=f"length is {length}, expected 2 to"):
            corpus.prompts(0, [length])
