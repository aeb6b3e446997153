# SPDX-License-Identifier: Apache-2.0
"""Per-step metadata: everything the layers share is worked out once here, and nothing per layer.

vLLM orders a batch as decodes first (every request with at most ``reorder_batch_threshold`` new tokens), then the rest.
The decodes become one attention call; of the rest, each run of neighbours that prefill in the same form becomes one.
Which form, absorbed or decompressed, follows from a request's own lengths alone, and so does a call's plan (work items,
split boundaries), so both are made once a step. The parent's build is replaced whole: its chunked-context plan and
workspace serve prefill methods that gather the context, which the kernels here never do. Nothing is sized by the
model's maximum length.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    MLACommonPrefillMetadata,
    QueryLenSupport,
)

from amx_mla_backend import kernels

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata


@dataclass
class AMXMLADecodeMetadata(MLACommonDecodeMetadata):
    """The decode part: block_table [num_decodes, max_blocks], seq_lens [num_decodes] and its plan (opaque int64)."""

    plan: torch.Tensor | None = None


@dataclass(frozen=True)
class PrefillRun:
    """Neighbouring requests that prefill in one call: tokens (of the prefill part), block_table [n, max_blocks],
    seq_lens [n], query_start_loc [n + 1] from 0, the form, and the plan of an absorbed call."""

    tokens: slice
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    decompressed: bool
    plan: torch.Tensor | None


@dataclass
class AMXMLAPrefillMetadata(MLACommonPrefillMetadata):
    """The other part: seq_lens [num_prefills] (context and new tokens) beside the parent's fields, and its runs."""

    seq_lens: torch.Tensor | None = None
    runs: list[PrefillRun] = field(default_factory=list)


class AMXMLAMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """Builds :class:`MLACommonMetadata` with the two parts above."""

    # A decode call takes the same number of new tokens from every request: speculative tokens ride along in one call.
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device, **kwargs: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, **kwargs)
        library = kernels.load()
        self._plan, self._decompressed = library.ops.plan_attention, library.decompressed

    @staticmethod
    def determine_chunked_prefill_workspace_size(vllm_config: VllmConfig) -> int:
        return 0  # no context is ever gathered, so the parent allocates no workspace

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> MLACommonMetadata:
        """One step's metadata. Raises NotImplementedError for attention that is not causal."""
        common = common_attn_metadata
        if common.causal is False:
            raise NotImplementedError("AMX_MLA: causal attention only, got a batch with causal=False")
        num_reqs, num_tokens = common.num_reqs, common.num_actual_tokens
        starts, seq_lens, block_table = common.query_start_loc, common.seq_lens, common.block_table_tensor
        num_decodes, num_decode_tokens = self._decode_part(common)
        threads = torch.get_num_threads()

        decode = None
        if num_decodes > 0:
            lengths = seq_lens[:num_decodes]
            decode = AMXMLADecodeMetadata(
                block_table=block_table[:num_decodes],
                seq_lens=lengths,
                dcp_tot_seq_lens=None,
                plan=self._plan(lengths, None, num_decode_tokens, self.num_heads, threads),
            )

        prefill = None
        if num_decodes < num_reqs:
            lengths = seq_lens[num_decodes:num_reqs]
            part = starts[num_decodes : num_reqs + 1]
            if num_decode_tokens > 0:
                part = part - num_decode_tokens
            prefill = AMXMLAPrefillMetadata(
                block_table=block_table[num_decodes:num_reqs],
                query_start_loc=part,
                max_query_len=common.max_query_len,
                output_dtype=self.model_config.dtype,
                q_data_type=self.q_data_type,
                seq_lens=lengths,
            )
            prefill.runs = self._prefill_runs(prefill, threads)

        return self.metadata_cls(
            num_reqs=num_reqs,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            num_actual_tokens=num_tokens,
            query_start_loc=starts,
            slot_mapping=common.slot_mapping,
            num_decodes=num_decodes,
            num_decode_tokens=num_decode_tokens,
            num_prefills=num_reqs - num_decodes,
            prefill=prefill,
            decode=decode,
        )

    def _prefill_runs(self, prefill: AMXMLAPrefillMetadata, threads: int) -> list[PrefillRun]:
        """Cut the prefill part where the cheaper form changes."""
        starts, keys = prefill.query_start_loc.tolist(), prefill.seq_lens.tolist()
        forms = [self._decompressed(starts[i + 1] - starts[i], keys[i]) for i in range(len(keys))]
        cuts = [0, *(i for i in range(1, len(forms)) if forms[i] != forms[i - 1]), len(forms)]
        runs = []
        for first, end in pairwise(cuts):
            lengths, part = prefill.seq_lens[first:end], prefill.query_start_loc[first : end + 1]
            if first > 0:
                part = part - starts[first]
            plan = None
            if not forms[first]:
                plan = self._plan(lengths, part, starts[end] - starts[first], self.num_heads, threads)
            tokens = slice(starts[first], starts[end])
            runs.append(PrefillRun(tokens, prefill.block_table[first:end], lengths, part, forms[first], plan))
        return runs

    def _decode_part(self, common: CommonAttentionMetadata) -> tuple[int, int]:
        """How many leading requests, and tokens, one decode call can take: equal query lengths within the threshold."""
        if common.max_query_len <= 1 and common.num_reqs == common.num_actual_tokens:
            return common.num_reqs, common.num_reqs
        if common.num_reqs == 0:
            return 0, 0
        starts = common.query_start_loc_cpu.numpy()[: common.num_reqs + 1]
        lengths = starts[1:] - starts[:-1]
        first = int(lengths[0])
        if not 0 < first <= self.reorder_batch_threshold:
            return 0, 0
        different = (lengths != first).nonzero()[0]
        count = int(different[0]) if different.size else common.num_reqs
        return count, count * first
