# SPDX-License-Identifier: Apache-2.0
"""Real engines on tiny checkpoints: what is served agrees with transformers in float32, in every configuration.

Each configuration starts one engine (20 to 70 seconds on two cores); the cells below share them. The measure is the
agreement that ``mla_testing.agreement`` defines, on the log-probabilities of every prompt token and generated token.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    lengths: tuple[int, ...] = tuple(LENGTHS)
    extra_jobs: bool = False


def second_tier() -> str:
    """The tier below the best usable one: engines on the best tier are plentiful here."""
    usable = [tier.name for tier in isa.tiers() if tier.usable]
    return usable[-2] if len(usable) > 2 else usable[-1]


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
        env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1", "OMP_NUM_THREADS": ""},
    ),
    "yarn-emulated-amx": Engine(
        options={**ONE_PASS, "max_num_batched_tokens": 256},
        env={
            "AMX_KERNELS_ISA": "amxbf16",
            "AMX_KERNELS_EMULATED": "1",
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",  # only our tile code is to be emulated
        },
        emulate=True,
        lengths=(4, 40),
    ),
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Path of a checkpoint kind, made once and kept between sessions."""
    cache = Path(os.environ.get("MLA_CHECKPOINTS") or Path.home() / ".cache" / "mla-testing" / "checkpoints")
    return lambda kind: checkpoints.make(kind, cache)


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
        "jobs": jobs,
    }
    (folder / "work.json").write_text(json.dumps(work))
    env = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "2",
        "HF_HUB_OFFLINE": "1",
        "VLLM_AMX_MLA_BACKEND": "on",  # a host whose only tier is `portable` is tested on it
        **engine.env,
    }
    env = {key: value for key, value in env.items() if value != ""}
    command = [sys.executable, str(Path(__file__).with_name("engine_driver.py")), "work.json", "result.json"]
    with open(folder / "log.txt", "w") as log:
        code = subprocess.run(command, cwd=folder, env=env, stdout=log, stderr=log, timeout=400).returncode
    assert code == 0, f"engine {name} failed:\n" + "\n".join((folder / "log.txt").read_text().splitlines()[-60:])
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize("name", ENGINES)
def test_agrees_with_transformers(run: Any, checkpoint: Any, name: str) -> None:
    if ENGINES[name].emulate and (mode := amx_emulator.mode()).startswith("unavailable"):
        pytest.skip(mode)
    result = run(name)
    judge(checkpoint(ENGINES[name].checkpoint), result["jobs"]["batch"]["requests"])


def judge(model: Path, requests: list[dict[str, Any]]) -> Any:
    found = agreement.compare_with_transformers(model, requests)
    print(found)
    found.check()
    return found
