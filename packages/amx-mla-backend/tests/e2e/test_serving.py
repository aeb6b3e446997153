# SPDX-License-Identifier: Apache-2.0
"""Real engines on tiny checkpoints: what is served agrees with transformers in float32, in every configuration.

Each configuration starts one engine (20 to 70 seconds on two cores); the cells below share them. The measure is the
agreement that ``mla_testing.agreement`` defines, on the log-probabilities of every prompt token and generated token.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import engine_driver
import pytest

from amx_kernels import isa
from mla_testing import agreement, amx_emulator, checkpoints, corpus

pytestmark = pytest.mark.e2e

LAYERS = 4
LENGTHS = [4, 64, 257, 700, 1500]
"""Prompt lengths of the ragged batch: below, at and beyond block boundaries, and far beyond a chunk of 256."""
NEW_TOKENS = 12


@dataclass(frozen=True)
class Engine:
    """One engine configuration."""

    checkpoint: str = "yarn"
    options: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    emulate: bool = False
    zentorch: bool = False
    lengths: tuple[int, ...] = tuple(LENGTHS)
    extra_jobs: bool = False


def second_tier() -> str:
    """The tier below the best usable one: engines on the best tier are plentiful here."""
    usable = [tier.name for tier in isa.tiers() if tier.usable]
    return usable[-2] if len(usable) > 2 else usable[-1]


CPUS = sorted(os.sched_getaffinity(0))
ONE_PASS = {"enforce_eager": True, "max_num_batched_tokens": 8192}
ENGINES: dict[str, Engine] = {
    "yarn-eager": Engine(options=ONE_PASS, extra_jobs=True),
    "rope-eager": Engine("rope", ONE_PASS),
    "q_lora-eager-block128-second-tier": Engine(
        "q_lora", {**ONE_PASS, "block_size": 128}, {"AMX_KERNELS_ISA": second_tier()}
    ),
    "q_lora-compiled": Engine("q_lora", {"max_num_batched_tokens": 8192}),
    "rope-compiled": Engine("rope", {"max_num_batched_tokens": 1024}),
    "yarn-chunked-block32": Engine(options={"enforce_eager": True, "max_num_batched_tokens": 256, "block_size": 32}),
    "yarn-tp2": Engine(
        options={**ONE_PASS, "tensor_parallel_size": 2},
        env={
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, CPUS[:2])),
            "OMP_NUM_THREADS": "",
        },
    ),
    "yarn-emulated-amx": Engine(
        options={**ONE_PASS, "max_num_batched_tokens": 256},
        env={
            "AMX_KERNELS_ISA": "amxbf16",
            "AMX_KERNELS_EMULATED": "1",
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",  # only our tile code is to be emulated
        },
        emulate=True,
        lengths=(4, 40, 120, 120),  # places enough for the 99th percentile to be one
    ),
    "yarn-zentorch": Engine(options=ONE_PASS, zentorch=True, lengths=(4, 64, 257)),
}


@pytest.fixture(scope="session")
def checkpoint() -> Any:
    """Path of a checkpoint kind, made once and kept between sessions."""
    return checkpoints.make


@pytest.fixture(scope="session")
def run(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Observations of an engine, run at first use."""
    done: dict[str, dict[str, Any]] = {}

    def get(name: str) -> dict[str, Any]:
        if name not in done:
            done[name] = start(name, checkpoint(ENGINES[name].checkpoint), tmp_path_factory.mktemp(name))
        return done[name]

    return get


def start(name: str, model: Path, folder: Path) -> dict[str, Any]:
    engine = ENGINES[name]
    prompts = corpus.prompts(7, engine.lengths)
    jobs: dict[str, Any] = {"batch": {"prompts": prompts, "max_tokens": NEW_TOKENS}}
    if engine.extra_jobs:
        jobs["alone"] = {"prompts": prompts, "max_tokens": NEW_TOKENS, "alone": True}
        # vLLM does not read the prefix cache for requests that want prompt log-probabilities.
        for job in ("miss", "hit"):
            jobs[job] = {"prompts": corpus.prompts(8, [900]), "max_tokens": NEW_TOKENS, "prompt_logprobs": False}
    work = {
        "model": str(model),
        "engine": {"max_model_len": 3072, "max_num_seqs": 8, **engine.options},
        "emulate": engine.emulate,
        "amd": engine.zentorch,
        "jobs": jobs,
    }
    # A host whose only tier is `portable` is tested on it.
    result, log = engine_driver.drive(folder, work, {"VLLM_AMX_MLA_BACKEND": "on", **engine.env})
    assert result is not None, f"engine {name} failed:\n" + "\n".join(log[-60:])
    return {**result, "log": log}


def need(name: str) -> None:
    """Skip, with the reason, an engine that this machine or environment cannot run."""
    if ENGINES[name].emulate and (mode := amx_emulator.mode()).startswith("unavailable"):
        pytest.skip(mode)
    if ENGINES[name].options.get("tensor_parallel_size", 1) > len(CPUS):
        pytest.skip(f"two ranks need a core each, this process may use {len(CPUS)}")
    if ENGINES[name].zentorch and find_spec("zentorch") is None:
        pytest.skip("zentorch is not installed here; `nox -s test_zen` has it")


@pytest.mark.parametrize("name", ENGINES)
def test_agrees_with_transformers(run: Any, checkpoint: Any, name: str) -> None:
    need(name)
    result = run(name)
    judge(checkpoint(ENGINES[name].checkpoint), result["jobs"]["batch"]["requests"])


def judge(model: Path, requests: list[dict[str, Any]]) -> Any:
    found = agreement.compare_with_transformers(model, requests)
    print(found)
    found.check(median=agreement.TINY_MEDIAN, p99=agreement.TINY_P99)
    return found


def same_text(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
    """Two runs of the same prompts differ no more than the agreement allows either of them to be wrong."""
    differences = []
    for a, b in zip(first, second, strict=True):
        assert a["prompt"] == b["prompt"]
        shared = next((i for i, (x, y) in enumerate(zip(a["tokens"], b["tokens"], strict=True)) if x != y), NEW_TOKENS)
        pairs = list(zip(a["token_logprobs"][:shared], b["token_logprobs"][:shared], strict=True))
        if a["prompt_logprobs"] and b["prompt_logprobs"]:
            pairs += list(zip(a["prompt_logprobs"][1:], b["prompt_logprobs"][1:], strict=True))
        differences += [abs(x - y) for x, y in pairs]
        assert shared >= 1
    differences.sort()
    median, p99 = differences[len(differences) // 2], differences[int(len(differences) * 0.99)]
    print(f"{len(differences)} log-probabilities: median difference {median:.4f}, p99 {p99:.4f}")
    assert median <= agreement.TINY_MEDIAN and p99 <= agreement.TINY_P99


@pytest.mark.parametrize(
    ("name", "other"),
    [("yarn-chunked-block32", "yarn-eager"), ("yarn-tp2", "yarn-eager"), ("rope-compiled", "rope-eager")],
    ids=["chunks-vs-one-pass", "two-ranks-vs-one", "compiled-vs-eager"],
)
def test_two_configurations_say_the_same(run: Any, name: str, other: str) -> None:
    need(name)
    same_text(run(name)["jobs"]["batch"]["requests"], run(other)["jobs"]["batch"]["requests"])


def test_a_ragged_batch_says_what_each_request_says_alone(run: Any, checkpoint: Any) -> None:
    jobs = run("yarn-eager")["jobs"]
    judge(checkpoint("yarn"), jobs["alone"]["requests"])
    same_text(jobs["batch"]["requests"], jobs["alone"]["requests"])


def test_a_prefix_cache_hit_says_what_a_miss_says(run: Any, checkpoint: Any) -> None:
    jobs = run("yarn-eager")["jobs"]
    (miss,), (hit,) = jobs["miss"]["requests"], jobs["hit"]["requests"]
    assert miss["cached"] == 0 and hit["cached"] >= 832, "a block of 64 at most is not shared"
    judge(checkpoint("yarn"), [miss, hit])
    same_text([miss], [hit])


def test_decode_projections_go_through_our_bmm(run: Any) -> None:
    """One prompt alone: each of its decode steps absorbs and de-absorbs once a layer, with our bmm and nothing else."""
    calls = run("yarn-eager")["jobs"]["miss"]["calls"]
    steps = NEW_TOKENS - 1
    assert calls["decode_attention_cpu"] == LAYERS * steps
    prefills = calls.get("prefill_attention_cpu", 0)
    absorbed_prefills = calls.get("extend_attention_cpu", 0)
    assert prefills + absorbed_prefills == LAYERS  # one chunk
    assert calls["bmm_cpu"] == 2 * (LAYERS * steps + absorbed_prefills)
    assert calls["concat_and_cache_mla_cpu"] == LAYERS * (steps + 1)


def test_layers_are_ours_and_hold_no_raw_weight(run: Any) -> None:
    layers = run("yarn-eager")["layers"]
    assert layers == {"count": LAYERS, "classes": ["AMXMLAAttention"], "raw_weight_elements": 0, "copies": []}


def test_one_line_says_who_serves(run: Any) -> None:
    lines = [line for line in run("yarn-eager")["log"] if "Attention backend" in line]
    assert len(lines) == 1
    assert f"AMX_MLA: tier {isa.current()}, 2 threads, block size 64, chunked prefill on, prefix caching on" in lines[0]


def test_the_platform_extends_the_one_vllm_would_choose(run: Any) -> None:
    from amx_mla_backend import platform

    names = run("yarn-eager")["platform"]
    assert names[1] == "LatentAttentionPlatform" and names[2] == platform.detected().rpartition(".")[2]


def test_zentorch_keeps_its_platform(run: Any) -> None:
    """Our attention, and zentorch's linear and MoE kernels: the platform is a subclass of ZenCpuPlatform."""
    need("yarn-zentorch")
    result = run("yarn-zentorch")
    assert result["platform"][:3] == ["AmxMlaZenCpuPlatform", "LatentAttentionPlatform", "ZenCpuPlatform"]
    assert result["layers"]["classes"] == ["AMXMLAAttention"]


def test_the_forced_tier_serves(run: Any) -> None:
    assert any(f"tier {second_tier()}," in line for line in run("q_lora-eager-block128-second-tier")["log"])


def test_emulated_amx_executes_tiles(run: Any) -> None:
    """The shipped tile code runs end to end on any machine; on one with AMX the other engines run it natively."""
    need("yarn-emulated-amx")
    result = run("yarn-emulated-amx")
    assert any("tier amxbf16," in line for line in result["log"])
    assert result["emulated"]["TDPBF16PS"] > 0
