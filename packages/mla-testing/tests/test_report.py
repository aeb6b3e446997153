# SPDX-License-Identifier: Apache-2.0
"""Reports: the keys that readers rely on, what a disturbed result looks like, how a summary is made."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any, ClassVar

import pytest

from mla_testing import limits, plots, report
from mla_testing.bench import bmm, e2e, prefill
from mla_testing.bench.amx import per_32_keys, prefill_model
from mla_testing.bench.amx_counts import shuffles_of
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
    page = report.markdown(again)
    assert "| b8-h16-q1-kv4096 | avx512bf16 | 2 | 2.000 | 50 | 0.1 | 0.50 | compute | 2.00 |" in page
    assert "| b8-h16-q1-kv4096 | avx512bf16 | 2 | disturbed |" in page
    again["results"][0]["peers"]["a peer without a colour"] = again["results"][0]["peers"]["torch"]
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


def test_bmm_is_held_to_the_fastest_peer() -> None:
    results = [
        entry([2.0] * 5, [3.0] * 5) | {"case": "m1", "params": {"rows": 1}},
        entry([2.0] * 5, [4.0] * 5) | {"case": "m512", "params": {"rows": 512}},
    ]
    results[1]["peers"]["torch"] = {"ms": {}, "speedup": 0.9, "speedup_min": 0.9}
    found = bmm.summarise(results)
    assert found["over_fastest_peer"] == {"m1": pytest.approx(1.5), "m512": 0.9}
    assert found["over_fastest_peer_min"] == 0.9
    assert found["limit_fraction_min_many_rows"] == results[1]["limit_fraction"]


def test_the_chooser_is_held_to_the_better_way() -> None:
    def point(case: str, way: str, ours: float, other: float) -> dict[str, Any]:
        peers = {"other_way:avx2": {"ms": {"median": other}}, "other_way:amxbf16": {"ms": {"median": 0.1}}}
        return {"case": case, "tier": "avx2", "params": {"way": way}, "ms": {"median": ours}, "peers": peers}

    right, wrong = point("grid-q1-ctx0", "absorbed", 1.0, 2.0), point("grid-q2-ctx0", "decompressed", 3.0, 2.0)
    found = prefill.chooser([right, wrong, wrong | {"failed": "disturbed"}, right | {"peers": {}}])
    assert found["ratios"] == {"grid-q1-ctx0@avx2": 1.0, "grid-q2-ctx0@avx2": 1.5}
    assert found["worst"] == 1.5
    assert found["ms"]["grid-q2-ctx0@avx2"] == {"absorbed": 2.0, "decompressed": 3.0}
    assert prefill.chooser([])["worst"] is None


def test_tables_of_the_docs_are_their_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(__file__).parents[3] / "ci" / "checks" / "benchmarks.py"
    spec = importlib.util.spec_from_file_location("benchmarks", path)
    checks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(checks)
    for name in ("docs", "docs/kernels", "docs/reports", "reports"):
        (tmp_path / name).mkdir()
    for name, folder in (("ROOT", ""), ("DOCS", "docs"), ("KEPT", "docs/reports"), ("MEASURED", "reports")):
        monkeypatch.setattr(checks, name, tmp_path / folder)
    page = tmp_path / "docs" / "kernels" / "page.md"
    page.write_text("# Page\n\n<!-- report: bench_decode ^b8-h16 -->\n<!-- end of report -->\n")
    assert checks.main(["--check"]) == 1
    assert checks.main(["--write"]) == 0
    assert "No report yet: `nox -s bench -- decode`" in page.read_text()

    results = [entry([2.0] * 5, [4.0] * 5), entry([1.0] * 5, [1.0] * 5) | {"case": "other"}]
    whole = report.document("bench_decode", limits=LIMITS, results=results, summary=None, quick=True)
    report.write(whole, tmp_path / "reports")
    assert checks.main(["--write"]) == 0
    assert "No report yet" in page.read_text(), "a quick run is no source"
    report.write(whole | {"quick": False}, tmp_path / "reports")
    assert checks.main(["--check"]) == 0, "what was not taken changes nothing"
    assert checks.main(["--write"]) == 0
    text = page.read_text()
    assert "Reads at most, GB/s (threads): L2 100 (2), L3 50 (2), DRAM 10 (2)." in text
    assert "| case | threads | ms | GFLOP/s | GB/s | of limit | × torch |" in text
    assert "| b8-h16-q1-kv4096 | 2 | 2 | 50 | 0.1 | 0.50 | 2.00 |" in text
    link = f"(../reports/{checks.machine_name(whole)}/bench_decode.json)"
    assert whole["machine"]["cpu"] in text and link in text and "other" not in text
    machine = whole["machine"] | {"vendor": "AnotherVendor", "family": "1", "model": "2"}
    report.write(whole | {"quick": False, "machine": machine}, tmp_path / "reports" / "zen")
    assert checks.main(["--write"]) == 0
    text = page.read_text()
    assert link in text and "(../reports/anothervendor-1-2/bench_decode.json)" in text, "a table for each machine"
    page.write_text(text.replace("2.00", "3.00"))
    assert checks.main(["--check"]) == 1, "edited by hand"
    page.write_text(text + "\nIt takes 1.5 ms.\n")
    assert checks.main(["--check"]) == 1, "a figure without a report"


LISTING = """
0000000000001000 <kernel>:
    1000:\tvpunpckldq %zmm1,%zmm0,%zmm2
    1006:\tvpermt2d %zmm3,%zmm2,%zmm1
    100c:\tvpbroadcastd (%rax),%zmm4
    1012:\tvpbroadcastd %xmm0,%zmm4
    1018:\tvpmovzxwd (%rsi),%zmm5
    101e:\tvpmovzxwd %ymm5,%zmm5
    1024:\tvfmadd231ps %zmm0,%zmm1,%zmm2
    102a:\tjne    1000 <kernel>
"""


def test_shuffles_are_counted_by_trips_and_loads_do_not_count() -> None:
    trips = dict.fromkeys((0x1000, 0x100C, 0x1012, 0x1018, 0x101E, 0x1024), 10) | {0x1006: 3, 0x102A: 2}
    found, every = shuffles_of(LISTING, trips)
    assert found == {"vpunpckldq": 10, "vpermt2d": 3, "vpbroadcastd": 10, "vpmovzxwd": 10}
    assert sum(every.values()) == 65
    assert every["jne"] == 2


def test_modelled_cycles_per_32_keys() -> None:
    counts = {"tmul_rows": 64000, "TILELOADD": 1000, "TILELOADDT1": 0, "TILESTORED": 40, "macs": 16 * 1280 * 1088}
    found = per_32_keys(counts, heads=16, keys=1280)
    assert found["cycles"] == pytest.approx((64000 + 52 * 10) / 40)
    assert found["bound"] == "matrix"
    assert found["macs_over_whole_tiles"] == pytest.approx(1.0)
    assert per_32_keys(counts, heads=17, keys=1280)["macs_over_whole_tiles"] == pytest.approx(0.5)


def test_modelled_prefill_is_set_against_the_longer_bound() -> None:
    # 512 tokens: 131,328 pairs of 320 multiply-accumulates and 512 keys of 131,072, at 512 a cycle.
    needed = (131_328 * 320 + 512 * 131_072) / 512
    counts = {"tmul_rows": int(needed), "TILELOAD": 0, "TILELOADD": 1000, "TILELOADDT1": 0, "TILESTORED": 400}
    found = prefill_model(counts, 512)
    assert found["bounds"]["matrix"] == needed > found["bounds"]["softmax"] > 0
    assert found["over_bound"] == pytest.approx((needed + 52 * 100) / needed)


def step(seconds: float, first: int, further: int, attention: float = 0.0) -> list[float]:
    return [seconds, first, further, attention, 0.0]


def outcome(*steps: list[float], waited: float = 0.0) -> dict[str, Any]:
    return {"steps": list(steps), "waited": waited, "stolen": 0.0, "calibration_ms": [2.0, 2.0], "rss_mib": 1.0}


def test_a_batch_of_prompts_ends_with_its_last_first_token() -> None:
    prompt, later = e2e.split(outcome(step(2.0, 3, 0), step(1.0, 1, 3), step(0.1, 0, 4), step(0.3, 0, 4)), requests=4)
    assert [s[0] for s in prompt] == [2.0, 1.0]
    assert [s[0] for s in later] == [0.1, 0.3]


@pytest.fixture
def shape(tmp_path: Path) -> e2e.Shape:
    """A whole-model measurement in which vLLM's AMX backend was disturbed all the time, and nothing has run."""
    jobs = {"prefill_1x8192": e2e.Job(1, 8192, 1), "decode_1x8192": e2e.Job(1, 8192, 2, filled=True)}
    plan = e2e.Plan(jobs, e2e.Job(1, 4, 2), rounds=2)
    found = e2e.Shape("tiny", plan, e2e.contenders(True, False), tmp_path, [])
    for name in jobs:
        for who, seconds in (("ours", 1.0), ("stock", 2.0), ("vllm_amx_mla", 4.0)):
            waited = 0.5 if who == "vllm_amx_mla" else 0.0
            steps = (step(seconds, 1, 0, 0.4), step(seconds / 10, 0, 1, 0.05))
            found.samples[name][who] = [outcome(*steps, waited=waited)] * 2
    found.engines = {
        who: {"layers": 2, "threads": len(limits.CPUS), "raw_kv_b_proj_elements": 0, "peak_rss_mib": 10.0}
        for who in ("ours", "stock", "vllm_amx_mla")
    }
    return found


def test_whole_model_entries_and_summary(shape: e2e.Shape, tmp_path: Path) -> None:
    shape.alone["decode_1x8192"] = [0.020, 0.020]
    first, decode = entries = e2e.results(shape, "avx2", 2)
    assert first["tokens_per_s"] == pytest.approx(8192.0)
    assert first["attention_ms_per_layer"]["median"] == pytest.approx(200.0)
    assert decode["ms"]["median"] == pytest.approx(100.0)
    assert decode["attention_share"] == pytest.approx(0.5)
    assert decode["attention_over_standalone"] == pytest.approx(25.0 / 20.0)
    assert decode["peers"]["stock"]["speedup"] == pytest.approx(2.0)
    assert decode["peers"]["vllm_amx_mla"] == {"unavailable": "too few undisturbed samples"}
    found = e2e.summarise(entries)
    assert found["prefill8k_speedup_stock"] == pytest.approx(2.0)
    assert found["prefill_speedup_stock"] is None
    assert found["decode_speedup_amx"] is None
    assert (found["attention_share_prefill"], found["attention_share_decode"]) == pytest.approx((0.4, 0.5))
    shape.samples["decode_1x8192"]["ours"] = shape.samples["decode_1x8192"]["vllm_amx_mla"]
    entries = e2e.results(shape, "avx2", 2)
    assert entries[1]["failed"] == "too few undisturbed samples"
    whole = report.document("bench_e2e", limits=LIMITS, results=entries, summary=e2e.summarise(entries))
    report.print_table(whole)
    assert plots.draw(whole, tmp_path)
    assert json.loads(report.write(whole, tmp_path).read_text())["results"][1]["samples"]["ours"][0]["waited"] == 0.5


def test_a_failing_cell_is_written_down_and_the_rest_goes_on(shape: e2e.Shape) -> None:
    with shape.cell("stock engine"):
        raise e2e.Failure("engine stock ended with -9")
    assert shape.failures[0]["cell"] == "tiny stock engine"
    assert "ended with -9" in shape.failures[0]["error"]


class FakeWorker:
    """An engine that takes a second per batch; vLLM's AMX backend dies at its second decode."""

    alive: ClassVar[set[str]] = set()
    log: ClassVar[list[str]] = []

    def __init__(self, contender: e2e.Contender, arguments: dict[str, Any], folder: Path) -> None:
        self.contender, self.name, self.decodes = contender, contender.name, 0
        self.info = {"layers": 2, "threads": 2, "raw_kv_b_proj_elements": 0}
        self.alive.add(self.name)

    def run(self, prompts: list[list[int]], new_tokens: int, *, filled: bool, logprobs: bool) -> dict[str, Any]:
        self.log.append(f"{self.name} {'decode' if filled else 'agreement' if logprobs else 'prefill'}")
        self.decodes += filled
        if self.name == "vllm_amx_mla" and self.decodes == 2:
            raise e2e.Failure("engine vllm_amx_mla ended with -9")
        return outcome(step(1.0, 1, 0), step(1.0, 0, 1)) | {"tokens": [[5]], "logprobs": [[{5: -0.1, 6: -3.0}]]}

    def close(self) -> None:
        self.alive.discard(self.name)


def test_a_group_of_engines_takes_turns(shape: e2e.Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(e2e, "Worker", FakeWorker)
    monkeypatch.setattr(e2e, "standalone", lambda shape, job: lambda: 0.5)
    monkeypatch.setattr(e2e.limits, "calibrate", lambda threads: 0.002)
    monkeypatch.setattr(e2e, "_available_bytes", lambda: (4 - len(FakeWorker.alive)) * (6 << 30))  # stock's 8k: alone
    FakeWorker.log.clear()
    for by_name in shape.samples.values():
        by_name.update({who: [] for who in by_name})
    shape.group(shape.chosen)
    assert FakeWorker.log == [
        *("ours agreement", "vllm_amx_mla agreement", "stock agreement"),
        *("ours prefill", "vllm_amx_mla prefill", "ours decode", "vllm_amx_mla decode", "stock decode"),
        *("vllm_amx_mla prefill", "ours prefill", "vllm_amx_mla decode", "stock decode", "ours decode"),
        *("ours prefill", "ours decode", "stock decode"),
        *("stock prefill", "stock prefill", "stock prefill"),
    ]
    assert [failure["cell"] for failure in shape.failures] == ["tiny vllm_amx_mla decode_1x8192"]
    assert shape.run_apart == ["stock prefill_1x8192"]
    kept = {name: {who: len(of) for who, of in by_name.items()} for name, by_name in shape.samples.items()}
    assert kept["prefill_1x8192"] == {"ours": 2, "vllm_amx_mla": 1, "stock": 2}, "the first of each is the warm-up"
    assert kept["decode_1x8192"] == {"ours": 2, "vllm_amx_mla": 0, "stock": 2}
    assert shape.alone == {"prefill_1x8192": [0.5, 0.5], "decode_1x8192": [0.5, 0.5]}
    assert not FakeWorker.alive


def test_greedy_tokens_are_held_to_where_margins_are_wide(shape: e2e.Shape) -> None:
    sure, unsure = {7: -0.1, 8: -2.0}, {7: -0.7, 8: -0.71}
    stock = {"tokens": [[7, 7, 7]], "logprobs": [[sure, unsure, sure]]}
    same = e2e.agreement(stock, stock)
    assert (same["places"], same["counted"], same["disagreements"]) == (3, 2, [])
    parted = {"tokens": [[7, 8, 9]], "logprobs": [[sure, unsure, sure]]}  # after the second, another text
    assert e2e.agreement(parted, stock)["disagreements"] == []
    wrong = {"tokens": [[8, 7, 7]], "logprobs": [[{8: -0.1, 7: -2.0}, unsure, sure]]}
    held = e2e.agreement(wrong, stock)
    assert len(held["disagreements"]) == 1
    assert held["logprob_difference_max"] == pytest.approx(1.9)
    shape.texts = {"ours": wrong, "stock": stock}
    assert any("disagree" in text for text in e2e.judge(shape)[1])
    shape.texts = {"ours": parted, "stock": {"tokens": [[7]], "logprobs": [[unsure]]}}
    shape.texts["ours"] = {"tokens": [[7]], "logprobs": [[unsure]]}
    assert any("no token was compared" in text for text in e2e.judge(shape)[1])


def test_servers_take_turns_and_one_that_fails_is_left_out(shape: e2e.Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[str] = []

    class FakeServer:
        def __init__(self, contender: e2e.Contender, *arguments: Any) -> None:
            self.name = contender.name

        def bench(self, prompts: int, lengths: tuple[int, int], round: int) -> dict[str, Any]:
            rounds.append(f"{self.name} {round}")
            if self.name == "stock":
                raise e2e.Failure("no answer")
            found = dict.fromkeys(("output_throughput", "total_token_throughput", "median_tpot_ms"), 10.0 + round)
            return found | {"median_ttft_ms": 1.0, "completed": 2, "ttfts": [0.1, 0.2], "itls": [[0.01, 0.03], []]}

        def close(self) -> None: ...

    monkeypatch.setattr(e2e, "Server", FakeServer)
    monkeypatch.setattr(e2e, "_available_bytes", lambda: 1 << 40)
    shape.plan = e2e.replace(shape.plan, serving=(2, (64, 16), 2))
    assert e2e.serving(shape) is None
    e2e.serve(shape)
    assert rounds == ["ours 0", "vllm_amx_mla 0", "stock 0", "ours 1", "vllm_amx_mla 1", "stock 1"]
    assert [failure["cell"] for failure in shape.failures] == [f"tiny stock serving, round {i}" for i in (0, 1)]
    found = e2e.serving(shape)
    assert found["ours"]["output_tokens_per_s"] == 10.5
    assert found["ours"]["samples"][0]["mean_itls_ms"] == [pytest.approx(20.0)]
    assert "stock" not in found and found["together"] == [["ours", "vllm_amx_mla", "stock"]]


def test_a_raw_weight_that_is_kept_is_wrong(shape: e2e.Shape) -> None:
    assert e2e.judge(shape) == ({"agreement": {}, "raw_kv_b_proj_freed": True, "peak_rss_over_stock": 1.0}, [])
    shape.engines["ours"]["raw_kv_b_proj_elements"] = 5
    found, wrong = e2e.judge(shape)
    assert not found["raw_kv_b_proj_freed"] and "5 elements" in wrong[0]
