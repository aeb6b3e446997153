# SPDX-License-Identifier: Apache-2.0
"""The step's metadata: the split into decodes and the rest, the plans, their number, and their price."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from backend_support import Batch, make_builder
from torch.utils._python_dispatch import TorchDispatchMode


@pytest.mark.parametrize(
    ("new", "threshold", "expected"),
    [
        ([], 1, (0, 0)),
        ([1], 1, (1, 1)),
        ([1, 1, 1], 1, (3, 3)),
        ([1, 1, 5, 7], 1, (2, 2)),
        ([5, 7], 1, (0, 0)),
        ([2, 2, 2], 1, (0, 0)),  # two tokens each are no decodes without speculation
        ([2, 2, 2], 2, (3, 6)),
        ([3, 3, 1, 9], 4, (2, 6)),  # a shorter draft ends the decode call: its request is extended
        ([1, 3, 3, 9], 4, (1, 1)),
        ([5, 5], 4, (0, 0)),
        ([1, 0, 3], 1, (1, 1)),  # a request without new tokens
        ([0, 3], 1, (0, 0)),
    ],
    ids=str,
)
def test_split(new: list[int], threshold: int, expected: tuple[int, int]) -> None:
    batch = Batch([(4, n) for n in new])
    metadata = make_builder(threshold=threshold).build(0, batch.common())
    decodes, tokens = expected
    assert (metadata.num_decodes, metadata.num_decode_tokens) == expected
    assert metadata.num_prefills == len(new) - decodes
    assert (metadata.decode is not None) == (decodes > 0)
    assert (metadata.prefill is not None) == (decodes < len(new))
    if metadata.decode:
        assert torch.equal(metadata.decode.seq_lens, batch.seq_lens[:decodes])
        assert torch.equal(metadata.decode.block_table, batch.block_table[:decodes])
    if metadata.prefill:
        assert torch.equal(metadata.prefill.seq_lens, batch.seq_lens[decodes:])
        assert torch.equal(metadata.prefill.query_start_loc, batch.starts[decodes:] - tokens)
        assert torch.equal(metadata.prefill.block_table, batch.block_table[decodes:])


def test_runs_are_cut_where_the_form_changes() -> None:
    """Forms D D A A D after one decode: three runs that tile the prefill part, plans for the absorbed one only."""
    batch = Batch([(7, 1), (0, 40), (0, 50), (90, 2), (80, 3), (0, 60)])
    builder = make_builder(decompressed=lambda query, keys: query >= 40)
    runs = builder.build(0, batch.common()).prefill.runs
    assert [(run.tokens, run.decompressed) for run in runs] == [
        (slice(0, 90), True),
        (slice(90, 95), False),
        (slice(95, 155), True),
    ]
    assert [run.query_start_loc.tolist() for run in runs] == [[0, 40, 90], [0, 2, 5], [0, 60]]
    assert [run.seq_lens.tolist() for run in runs] == [[40, 50], [92, 83], [60]]
    assert [run.plan is not None for run in runs] == [False, True, False]
    assert torch.equal(torch.cat([run.block_table for run in runs]), batch.block_table[1:])


def test_the_form_follows_a_requests_own_lengths() -> None:
    """The rule is asked once a request and step, with (new tokens, all tokens), whoever else is in the batch."""
    asked: list[tuple[int, int]] = []

    def rule(query: int, keys: int) -> bool:
        asked.append((query, keys))
        return False

    make_builder(decompressed=rule).build(0, Batch([(7, 1), (0, 40), (90, 2)]).common())
    assert asked == [(40, 40), (2, 92)]


def test_successive_steps_share_no_plan() -> None:
    """Two steps with the same longest sequence but other lengths: each has its own plan and lengths."""
    builder = make_builder()
    first = builder.build(0, Batch([(300, 30), (10, 20)]).common())
    second = builder.build(0, Batch([(10, 20), (300, 30)]).common())
    assert first.prefill.runs[0] is not second.prefill.runs[0]
    assert first.prefill.seq_lens.tolist() == [330, 30] and second.prefill.seq_lens.tolist() == [30, 330]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_metadata_of_either_integer_type(dtype: torch.dtype) -> None:
    batch = Batch([(5, 1), (0, 9)])
    common = batch.common(
        seq_lens=batch.seq_lens.to(dtype),
        query_start_loc=batch.starts.to(dtype),
        query_start_loc_cpu=batch.starts.to(dtype),
        block_table_tensor=batch.block_table.to(dtype),
    )
    metadata = make_builder().build(0, common)
    assert metadata.prefill.query_start_loc.tolist() == [0, 9]


def test_non_causal_batches_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="causal"):
        make_builder().build(0, Batch([(5, 1)]).common(causal=False))


def test_no_workspace_is_allocated() -> None:
    from amx_mla_backend.metadata import AMXMLAMetadataBuilder

    assert AMXMLAMetadataBuilder.determine_chunked_prefill_workspace_size(SimpleNamespace()) == 0


class Work(TorchDispatchMode):
    """Names of the torch ops of a build, and the largest tensor one of them made that is no view."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.ops.append(str(func))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.largest = max(self.largest, result.numel())
        return result


def test_build_does_not_depend_on_the_model_length() -> None:
    """What a build does is the same whatever the table's width; the step benchmark measures how long it takes."""
    builder, seen = make_builder(), []
    for columns in (32, 8192):
        common = sized([(1000, 1)] * 16 + [(1000, 128)] * 2, columns=columns)
        with Work() as work:
            builder.build(0, common)
        seen.append((work.ops, work.largest))
    assert seen[0] == seen[1]
    assert seen[0][0]


def sized(requests: list[tuple[int, int]], columns: int = 64) -> Any:
    """Common metadata of the lengths alone."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    new = torch.tensor([n for _, n in requests], dtype=torch.int32)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), new.cumsum(0, dtype=torch.int32)])
    seq_lens = torch.tensor([c + n for c, n in requests], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        seq_lens_cpu_upper_bound=seq_lens,
        num_reqs=len(requests),
        num_actual_tokens=int(new.sum()),
        max_query_len=int(new.max()),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=torch.zeros(len(requests), columns, dtype=torch.int32),
        slot_mapping=torch.zeros(int(new.sum()), dtype=torch.int64),
    )
