# SPDX-License-Identifier: Apache-2.0
"""Reports: the keys that readers rely on, what a disturbed result looks like, how a summary is made."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from mla_testing import plots, report
from mla_testing.bench.harness import Measurement
from mla_testing.limits import Limits

LIMITS = Limits(
    peak={"vdpbf16ps": {2: 100e9}},
    read={2: [(1 << 20, 100e9), (1 << 24, 50e9), (1 << 30, 10e9)]},
    memcpy={2: [(1 << 20, 40e9)]},
    caches={"L2": 1 << 20, "L3": 1 << 26},
)


def entry(
    ours: list[float], peer: list[float], calibrations: list[float] | None = None, **changes: Any
) -> dict[str, Any]:
    measurement = Measurement(2, {"ours": ours, "torch": peer}, calibrations or [1.0] * len(ours), best=1.0)
    arguments: dict[str, Any] = {
        "case": "b8-h16-q1-kv4096",
        "tier": "avx512bf16",
        "measurement": measurement,
        "ours": "ours",
        "flop": 1e8,
        "size": 1e5,
        "limits": LIMITS,
        "params": {"heads": 16},
        "checked": {"ours": {"max_abs": 0.0}, "torch": {"max_abs": 0.1}},
        "peer_names": ["torch"],
        "unavailable": {"zentorch": "zentorch is not installed"},
    }
    return report.result(**(arguments | changes))


def test_a_result_has_the_keys_of_the_schema() -> None:
    found = entry([2.0, 2.0, 1.0, 2.0, 4.0], [8.0, 9.0, 3.0, 8.0, 8.0])
    assert {"case", "tier", "threads", "ms", "gflops", "gbps", "limit_ms", "limit_fraction", "peers"} <= set(found)
    assert set(found["ms"]) == {"median", "min", "p90", "samples"}
    assert found["gflops"] == pytest.approx(50.0)
    assert found["gbps"] == pytest.approx(0.05)
    assert found["limit_ms"] == pytest.approx(1.0)
    assert found["limit_fraction"] == pytest.approx(0.5)
    assert found["bound"] == "compute"
    assert found["peers"]["torch"]["speedup"] == pytest.approx(4.0)
    assert found["peers"]["torch"]["speedup_min"] == pytest.approx(3.0)
    assert found["peers"]["zentorch"] == {"unavailable": "zentorch is not installed"}
    assert "failed" not in found


def test_discarded_rounds_reach_no_figure() -> None:
    found = entry([2.0] * 5 + [900.0], [4.0] * 5 + [1.0], [1.0] * 5 + [1.2])
    assert found["rounds"] == {"valid": 5, "discarded": 1}
    assert found["ms"]["samples"] == [2.0] * 5
    assert found["peers"]["torch"]["ms"]["min"] == 4.0


def test_a_failed_result_says_so_and_has_no_figures() -> None:
    found = entry([2.0] * 5, [4.0] * 5, [1.0] * 4 + [1.2])
    assert found["failed"] == "4 valid rounds of at least 5"
    assert found["gflops"] is None
    assert found["limit_fraction"] is None
    assert "torch" not in found["peers"]
    assert report.summarise([found]) is None


def test_a_tier_without_a_peak_has_no_limit_but_a_reason() -> None:
    found = entry([2.0] * 5, [4.0] * 5, tier="amxbf16")
    assert found["limit_ms"] is None
    assert found["limit_fraction"] is None
    assert "tdpbf16ps" in found["no_limit"]
    assert found["peers"]["torch"]["speedup"] == pytest.approx(2.0)


def test_summary() -> None:
    results = [
        entry([2.0] * 5, [4.0] * 5),
        entry([1.25] * 5, [10.0] * 5),
        entry([4.0] * 5, [4.0] * 5, peer_names=[]),
        entry([4.0] * 5, [1.0] * 5, [2.0] * 5),
    ]
    found = report.summarise(results)
    assert found is not None
    assert (found["cases"], found["failed"]) == (3, 1)
    assert found["limit_fraction_median"] == pytest.approx(0.5)
    assert found["limit_fraction_min"] == pytest.approx(0.25)
    assert found["speedup_geomean"] == {"torch": pytest.approx(4.0)}
    assert found["speedup_min"] == {"torch": pytest.approx(2.0)}
    assert found["speedup_geomean_from_minima"] == {"torch": pytest.approx(4.0)}


def test_geomean() -> None:
    assert report.geomean([1.0, 4.0]) == pytest.approx(2.0)
    assert report.geomean([]) is None


def test_a_document_is_written_whole_read_back_and_drawn(tmp_path: Path) -> None:
    results = [entry([2.0] * 5, [4.0] * 5), entry([2.0] * 5, [4.0] * 5, [9.0] * 5)]
    found = report.document("bench_decode", limits=LIMITS, results=results, summary=report.summarise(results))
    assert {"machine", "versions", "limits", "results", "summary"} <= set(found)
    assert {"id", "cpu", "features", "cpus"} <= set(found["machine"])
    assert {"torch", "vllm", "zentorch", "amx-kernels"} <= set(found["versions"])
    path = report.write(found, tmp_path)
    assert path == tmp_path / "bench_decode.json"
    assert [child.name for child in tmp_path.iterdir()] == ["bench_decode.json"]
    again = report.load(path)
    assert again["results"][0]["limit_fraction"] == pytest.approx(0.5)
    assert again["summary"]["failed"] == 1
    drawn = plots.draw(again, tmp_path)
    assert {p.suffix for p in drawn} == {".svg", ".png"}
    assert all(p.stat().st_size > 1000 for p in drawn)


def test_json_has_no_nan(tmp_path: Path) -> None:
    path = report.write({"benchmark": "x", "value": math.nan, "list": [math.inf, 1.0]}, tmp_path)
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {
        "benchmark": "x",
        "value": None,
        "list": [None, 1.0],
    }
