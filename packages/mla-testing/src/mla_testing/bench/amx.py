# SPDX-License-Identifier: Apache-2.0
"""``reports/amx_model.json``: modelled AMX cycles per 32 keys from counted instructions. Never a measurement.

Counts come from the emulator (tile instructions) and from disassembly x trip counts (vector shuffles), for one decode
call of 4,096 keys in all, set-up and merge included; vLLM's operator is counted the same way where the emulator can run
it. Decompressed prefill of fresh prompts is counted for one head and set against the longer of two bounds: every needed
multiply-accumulate at 512 a cycle, and the softmax on two vector ports. The cycle model is ``mla_testing.amx_model``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from mla_testing import fingerprint, peers
from mla_testing.amx_model import modelled
from mla_testing.bench.attention import MAC_PER_KEY, P, R
from mla_testing.bench.common import Options
from mla_testing.bench.prefill import NOPE, V

__all__ = ["run"]

HEADS = (16, 22, 128)
KEYS = 4096
#: Stepping through every instruction is slow; trip counts are linear in keys.
STEPPED_KEYS = 1024
#: Cycles per 32 keys that the kernels are held to.
GOALS = {16: 2200.0, 22: 3300.0, 128: 11500.0}
PREFILL_TOKENS = (512, 1024, 2048)
#: Modelled cycles of prefill over the longer bound, at most.
PREFILL_GOAL = 1.4
#: Vector instructions for 16 probabilities: maximum, 2^x in eight (two of them two operations each), sum, and half of a
#: conversion of 32; two ports take them.
SOFTMAX_CYCLES = (1 + 10 + 1 + 1) / 2 / 16


def _counted(*arguments: str) -> dict[str, Any]:
    """The JSON of a counting process, or {"unavailable": reason}."""
    env = {**os.environ, "AMX_KERNELS_ISA": "amxbf16", "AMX_KERNELS_EMULATED": "1"}
    paths = [path for path in sys.path if path]
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    done = subprocess.run(
        [sys.executable, "-m", "mla_testing.bench.amx_counts", *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()]
        return {"unavailable": last[-1] if last else f"ended with {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def per_32_keys(counts: dict[str, int], heads: int, keys: int) -> dict[str, Any]:
    """Counts and modelled cycles per 32 keys, and executed multiply-accumulates over those of whole tiles."""
    scale = 32 / keys
    model = modelled(counts)
    whole = -(-heads // 16) * 16 * keys * MAC_PER_KEY
    return {
        "cycles": model.cycles * scale,
        "bound": model.bound,
        "parts": {name: getattr(model, name) * scale for name in ("matrix", "loads", "stores", "drains")},
        "counts": {name: count * scale for name, count in counts.items() if count},
        "macs_over_whole_tiles": counts["macs"] / whole,
    }


def prefill_model(counts: dict[str, int], tokens: int) -> dict[str, Any]:
    """Modelled cycles of a head's fresh prompt, both bounds, and the model over the longer one."""
    pairs = tokens * (tokens + 1) / 2
    model = modelled(counts)
    bounds = {
        "matrix": (pairs * (NOPE + P + V) + tokens * R * (NOPE + V)) / 512,
        "softmax": pairs * SOFTMAX_CYCLES,
    }
    return {
        "cycles": model.cycles,
        "bounds": bounds,
        "over_bound": model.cycles / max(bounds.values()),
        "counts": {name: count for name, count in counts.items() if count},
    }


def run(options: Options) -> tuple[dict[str, Any], int]:
    """Counts; the report, and 1 where a goal is missed or a count failed."""
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    for heads in HEADS[:1] if options.quick else HEADS:
        counted = _counted("tiles", "ours", str(heads), str(KEYS))
        if "counts" in counted:
            ours[str(heads)] = per_32_keys(counted["counts"], heads, KEYS) | {"checked": counted["checked"]}
        else:
            ours[str(heads)] = counted
        stepped = _counted("shuffles", str(heads), str(STEPPED_KEYS))
        if "shuffles" in stepped:
            scale = 32 / STEPPED_KEYS
            stepped = {
                "total": sum(stepped["shuffles"].values()) * scale,
                "by_mnemonic": {name: count * scale for name, count in stepped["shuffles"].items()},
                "instructions": sum(stepped["instructions"].values()) * scale,
                "instructions_by_mnemonic": {n: count * scale for n, count in stepped["instructions"].items()},
            }
        ours[str(heads)]["vector_shuffles"] = stepped
        if options.peers:
            peer = _counted("tiles", "vllm", str(heads), str(KEYS))
            theirs[str(heads)] = per_32_keys(peer["counts"], heads, KEYS) if "counts" in peer else peer
    prefill: dict[str, Any] = {}
    for tokens in PREFILL_TOKENS[:1] if options.quick else PREFILL_TOKENS:
        counted = _counted("prefill", str(tokens))
        if "counts" in counted:
            counted = prefill_model(counted["counts"], tokens) | {"checked": counted["checked"]}
        prefill[str(tokens)] = counted
    cycles = {heads: found.get("cycles") for heads, found in ours.items()}
    over_bound = {tokens: found.get("over_bound") for tokens, found in prefill.items()}
    missed = {
        heads: f"{value} modelled cycles per 32 keys, at most {GOALS[int(heads)]:.0f} expected"
        for heads, value in cycles.items()
        if value is None or value > GOALS[int(heads)]
    } | {
        f"prefill {tokens}": f"{ratio} times the bound, at most {PREFILL_GOAL} expected"
        for tokens, ratio in over_bound.items()
        if ratio is None or ratio > PREFILL_GOAL
    }
    return {
        "benchmark": "amx_model",
        "note": "modelled from counted instructions, not measured",
        "machine": fingerprint.machine(),
        "versions": peers.versions(),
        "keys": KEYS,
        "cycles_per_32_keys": cycles,
        "goals": {str(heads): goal for heads, goal in GOALS.items()},
        "missed": missed,
        "counts": ours,
        "peer": {"vllm_amx_op": theirs},
        "prefill": prefill,
        "summary": {
            "cycles_per_32_keys": cycles,
            "peer_cycles_per_32_keys": {heads: found.get("cycles") for heads, found in theirs.items()},
            "prefill_cycles_over_bound": over_bound,
        },
        "results": [],
    }, int(bool(missed))
