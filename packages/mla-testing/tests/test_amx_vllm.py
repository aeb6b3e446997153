# SPDX-License-Identifier: Apache-2.0
"""Code the emulator was not written with: vLLM's AMX attention op, as shipped."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
from amx_support import ENVIRONMENT, HERE, run

KERNELS = Path(__file__).parents[2] / "amx-kernels" / "src"


@pytest.fixture(scope="module")
def script() -> Path:
    if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("torch") is None:
        pytest.skip("vLLM is not installed")
    flags = Path("/proc/cpuinfo").read_text().split()
    if "avx512_bf16" not in flags:
        pytest.skip("vLLM's library with the AMX op needs AVX512-BF16 besides, which this CPU lacks")
    return HERE / "vllm_attention.py"


def test_amx_attention_agrees_with_its_vec_path(script):
    lines = run([sys.executable, script, "agree"], timeout=300).stdout.splitlines()
    cases = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(cases) == 3
    for case in cases:
        assert case["mode"] in ("emulated", "emulated-on-amx")
        counts = case["counts"]
        assert counts["TDPBF16PS"] > 100
        # As many loads as products at least, less what a 2 x 2 block of accumulators saves.
        assert counts["TILELOADD"] + counts["TILELOADDT1"] >= counts["TDPBF16PS"]
        # Weights and output each round to bf16 once: twice 2**-9 of the largest value.
        bound = 2**-8 * case["values"]
        assert case["vec_error"] <= bound
        assert case["amx_error"] <= bound


def test_ops_in_turns_with_ours_do_not_disturb_each_other(script):
    if importlib.util.find_spec("amx_kernels") is None and not (KERNELS / "amx_kernels" / "_torch.so").exists():
        pytest.skip("amx_kernels with its torch ops is not built")
    path = os.pathsep.join([ENVIRONMENT["PYTHONPATH"], str(KERNELS), os.environ.get("PYTHONPATH", "")])
    out = run([sys.executable, script, "interleave"], timeout=300, PYTHONPATH=path, AMX_KERNELS_EMULATED="1").stdout
    assert int(out.splitlines()[-1]) == 3 * 7 + 60
