# SPDX-License-Identifier: Apache-2.0
"""A prompt in pieces: any chunking, one-token chunks among others, and plans that belong to one step only."""

from __future__ import annotations

import numpy as np
import pytest
from fault_support import attend, attended

import amx_kernels
from mla_testing import bf16
from mla_testing.cases import AttentionCase

fault = pytest.mark.fault


@fault(15, "https://github.com/vllm-project/vllm/issues/26042")
@fault(19, "https://github.com/ggml-org/llama.cpp/issues/26509")
@pytest.mark.parametrize(
    ("prompt", "chunk"), [(70, 1), (131, 31), (131, 32), (131, 33), (513, 512), (130, 129)], ids=lambda n: str(n)
)
def test_a_prompt_in_chunks_is_the_prompt_in_one_pass(tier: str, prompt: int, chunk: int) -> None:
    """Each chunk sees the rows before it as context; together they meet float64 as the single pass does."""
    case = AttentionCase(2, (prompt,), query_lens=(prompt,), rank=128, rope=32, block_size=32)
    attended(case)
    data = case.build()
    for first in range(0, prompt, chunk):
        last = min(prompt, first + chunk)
        amx_kernels.extend_attention_cpu(
            data.out[first:last], data.lse[first:last], data.q_latent[first:last], data.q_pe[first:last],
            data.kv_cache, data.block_table, np.array([last], np.int32), np.array([0, last - first], np.int32),
            data.scale,
        )  # fmt: skip
    data.check()


@fault(17, "https://github.com/vllm-project/vllm/pull/14253")
@pytest.mark.parametrize("keys", [1, 33, 300, 1200])
def test_a_one_token_chunk_is_a_decode(tier: str, keys: int) -> None:
    """A request still in prefill whose chunk is one token: as part of either call, the same bits."""
    decode, decode_lse = attended(AttentionCase(16, (keys,), block_size=32))
    extend, extend_lse = attended(AttentionCase(16, (keys,), query_lens=(1,), block_size=32))
    assert np.array_equal(decode, extend)
    assert np.array_equal(decode_lse, extend_lse)


@fault(17, "https://github.com/vllm-project/vllm/pull/14253")
def test_a_small_token_budget_mixes_prefill_tails_with_decodes(tier: str) -> None:
    """A budget of 32 tokens over three long prompts and five decodes: every request alone has the same bits."""
    lens, new = (400, 17, 33, 64, 5, 300, 290, 129), (1, 1, 1, 1, 1, 1, 25, 1)
    case = AttentionCase(4, lens, query_lens=new, rank=128, rope=64, block_size=32)
    out, _ = attended(case)
    data = case.build()
    for i, n in enumerate(new):
        first = int(data.query_start_loc[i])
        alone = np.full((n, 4, 128), bf16.NAN)
        amx_kernels.extend_attention_cpu(
            alone, None, data.q_latent[first : first + n], data.q_pe[first : first + n], data.kv_cache,
            data.block_table[i : i + 1], data.seq_lens[i : i + 1], np.array([0, n], np.int32), data.scale,
        )  # fmt: skip
        assert np.array_equal(alone, out[first : first + n]), f"request {i}"


@fault(18, "https://github.com/ROCm/aiter/issues/4076", refused=True)
@pytest.mark.parametrize(
    ("lens", "new"),
    [((100, 40), (10, 6)), ((90, 50), (10, 5)), ((100, 50), (9, 6)), ((100, 50), (11, 4))],
    ids=["other-context", "same-total", "other-split", "other-split-2"],
)
def test_a_plan_serves_only_the_lengths_it_was_made_for(lens: tuple[int, int], new: tuple[int, int]) -> None:
    """The next chunk of the same batch, with the same longest sequence or token count, needs a plan of its own."""
    case = AttentionCase(2, (100, 50), query_lens=(10, 5), rank=64, rope=32)
    data = case.build()
    plan = amx_kernels.plan_attention(data.seq_lens, data.query_start_loc, 15, 2)
    attend(data, plan=plan)
    data.check()
    stale = amx_kernels.plan_attention(np.array(lens, np.int32), np.array([0, new[0], sum(new)], np.int32), sum(new), 2)
    with pytest.raises(ValueError, match="plan each step anew"):
        attend(data, plan=stale)


@fault(18, "https://github.com/ROCm/aiter/issues/4076", refused=True)
def test_a_damaged_or_foreign_plan_is_refused() -> None:
    data = AttentionCase(2, (100, 50), query_lens=(10, 5), rank=64, rope=32).build()
    plan = amx_kernels.plan_attention(data.seq_lens, data.query_start_loc, 15, 2)
    for at in range(len(plan)):
        damaged = plan.copy()
        damaged[at] ^= 1
        with pytest.raises(ValueError, match="plan"):
            attend(data, plan=damaged)
    for foreign in (plan[:-1], plan[:3], np.zeros_like(plan), np.zeros(0, np.int64), np.append(plan, 0)):
        with pytest.raises(ValueError, match="plan is not an intact result of plan_attention"):
            attend(data, plan=foreign)
    with pytest.raises(ValueError, match="plan was made for 3 heads, expected 2"):
        attend(data, plan=amx_kernels.plan_attention(data.seq_lens, data.query_start_loc, 15, 3))
