# SPDX-License-Identifier: Apache-2.0
"""Time of one step's metadata build in vLLM: ours, vLLM's common builder, and that of its AMX_MLA backend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from mla_testing.bench.attention import P, R
from mla_testing.bench.common import Context, Entry, Options, Work

__all__ = ["run"]

BLOCK = 128
HEADS = 16
#: name -> (context, new tokens) of each request
STEPS: dict[str, list[tuple[int, int]]] = {
    "decode64": [(1000, 1)] * 64,
    "mixed60+4": [(1000, 1)] * 60 + [(1000, 128)] * 4,
    "prefill64": [(500, 16)] * 64,
}
#: Microseconds that ours may take beyond vLLM's common builder.
ALLOWANCE = {"decode64": 50.0, "mixed60+4": 100.0, "prefill64": 100.0}
#: Columns of the block table: what max_model_len makes of it. The time must not depend on them.
COLUMNS = (64, 8192)


def _common(requests: list[tuple[int, int]], columns: int) -> Any:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    new = torch.tensor([count for _, count in requests], dtype=torch.int32)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), new.cumsum(0, dtype=torch.int32)])
    seq_lens = torch.tensor([context + count for context, count in requests], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        seq_lens_cpu_upper_bound=seq_lens,
        num_reqs=len(requests),
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(new.max()),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=torch.zeros(len(requests), columns, dtype=torch.int32),
        slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
    )


def _bare(cls: type) -> Any:
    """A builder without an engine: what the build methods read, and nothing else."""
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata, MLACommonMetadataBuilder

    device = torch.device("cpu")
    # The common constructor wants a whole engine configuration; a subclass's own part of it runs.
    with mock.patch.object(MLACommonMetadataBuilder, "__init__", lambda self, *args, **kwargs: None):
        builder = cls(SimpleNamespace(block_size=BLOCK), [], None, device)
    vars(builder).update(
        num_heads=HEADS,
        reorder_batch_threshold=1,
        q_data_type=torch.bfloat16,
        model_config=SimpleNamespace(dtype=torch.bfloat16, get_head_size=lambda: R + P),
        metadata_cls=MLACommonMetadata,
        device=device,
        use_pcp=False,
        page_size=BLOCK,
        dcp_world_size=1,
        dcp_local_block_size=1,
        dcp_virtual_block_size=1,
        dcp_manager=None,
        chunked_prefill_workspace_size=65536,
        chunked_prefill_workspace=torch.empty(65536, R + P, dtype=torch.bfloat16),
        kv_cache_spec=SimpleNamespace(block_size=BLOCK),
        _prefill_backend=SimpleNamespace(prepare_metadata=lambda metadata: None),
    )
    return builder


def _ours() -> Any:
    from amx_mla_backend.metadata import AMXMLAMetadataBuilder

    return _bare(AMXMLAMetadataBuilder)


def _vllm_common() -> Any:
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder

    return _bare(MLACommonMetadataBuilder)


def _vllm_amx() -> Any:
    from vllm.v1.attention.backends.mla.amx_mla import AMXMLAMetadataBuilder

    return _bare(AMXMLAMetadataBuilder)


def _entry(name: str, builder: Any, common: Any, select: Callable[[], Any] | None = None) -> Entry:
    call = functools.partial(builder.build, 0, common)
    return Entry(name, call, call, select)


def _work(name: str, requests: list[tuple[int, int]], columns: int) -> Work:
    common = _common(requests, columns)

    def ours(tier: str, threads: int) -> Entry:
        from amx_kernels import isa

        isa.set(tier)
        return _entry(f"ours:{tier}", _ours(), common, lambda: isa.set(tier))

    def check(metadata: Any) -> dict[str, Any]:
        decodes = sum(1 for _, new in requests if new == 1)
        assert metadata.num_decodes == decodes, f"num_decodes is {metadata.num_decodes}, expected {decodes}"
        assert metadata.num_prefills == len(requests) - decodes, f"num_prefills is {metadata.num_prefills}"
        if decodes:
            assert metadata.decode.seq_lens.tolist() == [old + new for old, new in requests[:decodes]]
        return {"max_abs": 0.0, "of_tolerance": 0.0}

    return Work(
        case=name,
        params={"requests": len(requests), "columns": columns},
        flop=0.0,
        size=0.0,
        make_ours=ours,
        make_peers={
            "vllm_common": lambda threads: _entry("vllm_common", _vllm_common(), common),
            "vllm_amx_mla": lambda threads: _entry("vllm_amx_mla", _vllm_amx(), common),
        },
        check=check,
    )


def run(options: Options) -> tuple[dict[str, Any], int]:
    """Runs the benchmark; the report and an exit status (see ``Context.exit_status``).

    summary: per step {ours_us, common_us, added_us, allowance_us} and ``longest_over_shortest_table``, the ratio of our
    times with the widest and the narrowest block table.
    """
    context = Context(options)
    table = {f"{step}-columns{columns}": (step, columns) for step in STEPS for columns in COLUMNS}
    context.run(
        {name: lambda name=name: _work(name, STEPS[table[name][0]], table[name][1]) for name in context.select(table)}
    )
    threads, tier = max(context.threads), context.tiers[-1]
    summary: dict[str, Any] = {}
    for entry in context.results:
        entry["limit_ms"] = entry["limit_fraction"] = entry["bound"] = None
        if "failed" in entry or entry["threads"] != threads or entry["tier"] != tier:
            continue
        step, columns = table[entry["case"]]
        ours = 1e3 * entry["ms"]["median"]
        found = summary.setdefault(step, {"ours_us": {}, "common_us": {}, "allowance_us": ALLOWANCE[step]})
        found["ours_us"][columns] = ours
        if "ms" in entry["peers"].get("vllm_common", {}):
            found["common_us"][columns] = 1e3 * entry["peers"]["vllm_common"]["ms"]["median"]
    for found in summary.values():
        widths = [columns for columns in COLUMNS if columns in found["ours_us"]]
        added = [found["ours_us"][c] - found["common_us"][c] for c in widths if c in found["common_us"]]
        found["added_us"] = max(added, default=None)
        found["longest_over_shortest_table"] = (
            found["ours_us"][widths[-1]] / found["ours_us"][widths[0]] if len(widths) > 1 else None
        )
    return context.document("bench_step", summary), context.exit_status
