// SPDX-License-Identifier: Apache-2.0
#include "capi/step.h"

#include <cmath>

namespace amxk {

namespace {

float log2_scale(double scale) { return static_cast<float>(scale) * kLog2e; }

PagedCache paged_cache(const StepTensors& t, int64_t latent) {
  PagedCache c = {};
  c.data = elements(t.kv_cache);
  c.block_stride = t.kv_cache->strides[0];
  c.row_stride = t.kv_cache->strides[1];
  c.block_size = t.kv_cache->sizes[1];
  c.table = t.block_table->data;
  c.table_row = t.block_table->strides[0];
  c.table_column = t.block_table->strides[1];
  c.table_is_64bit = t.block_table->dtype == AMXK_I64;
  c.latent = static_cast<int32_t>(latent);
  c.rope = static_cast<int32_t>(t.q_pe->sizes[2]);
  return c;
}

}  // namespace

void check_tensors(Checker& c, const StepTensors& t) {
  c.tensor(t.query, t.query_name, AMXK_BF16, 3);
  if (c.ok()) c.tensor(t.q_pe, "q_pe", AMXK_BF16, 3);
  if (c.ok()) c.output(t.out, "out", AMXK_BF16, 3);
  if (c.ok() && t.lse != nullptr) c.output(t.lse, "lse", AMXK_F32, 2);
  if (c.ok()) c.tensor(t.kv_cache, "kv_cache", AMXK_BF16, 3);
  if (c.ok()) c.index_tensor(t.block_table, "block_table", 2);
}

void check_queries(Checker& c, const StepTensors& t, double scale) {
  const char* name = t.query_name;
  const int64_t tokens = t.query->sizes[0], heads = t.query->sizes[1], width = t.query->sizes[2];
  char tokens_of[64], heads_of[64];
  std::snprintf(tokens_of, sizeof tokens_of, "tokens of %s", name);
  std::snprintf(heads_of, sizeof heads_of, "heads of %s", name);
  c.require(heads >= 1 && heads <= kMaxHeads, "%s.size(1) is %" PRId64 ", expected between 1 and %" PRId64 " heads", name,
            heads, kMaxHeads);
  c.require(width >= 1 && width <= kMaxWidth, "%s.size(2) is %" PRId64 ", expected between 1 and %" PRId64, name, width,
            kMaxWidth);
  c.require(t.q_pe->sizes[2] <= kMaxWidth, "q_pe.size(2) is %" PRId64 ", expected at most %" PRId64, t.q_pe->sizes[2],
            kMaxWidth);
  c.size(t.q_pe, "q_pe", 0, tokens, tokens_of);
  c.size(t.q_pe, "q_pe", 1, heads, heads_of);
  c.size(t.out, "out", 0, tokens, tokens_of);
  c.size(t.out, "out", 1, heads, heads_of);
  if (t.lse != nullptr) {
    c.size(t.lse, "lse", 0, tokens, tokens_of);
    c.size(t.lse, "lse", 1, heads, heads_of);
  }
  c.require(t.kv_cache->sizes[1] >= 1, "kv_cache.size(1) is 0, expected a block size of at least 1");
  c.require(std::isfinite(log2_scale(scale)) && log2_scale(scale) > 0,
            "scale is %g, expected a finite float32 above 0", scale);
}

void fill_step(StepParams& p, const StepTensors& t, int64_t latent, double scale, const amxk_parallel& pool) {
  p.q_pe = elements(t.q_pe);
  p.q_pe_token = t.q_pe->strides[0];
  p.q_pe_head = t.q_pe->strides[1];
  p.cache = paged_cache(t, latent);
  p.out = static_cast<bf16*>(t.out->data);
  p.out_token = t.out->strides[0];
  p.out_head = t.out->strides[1];
  if (t.lse != nullptr) {
    p.lse = static_cast<float*>(t.lse->data);
    p.lse_token = t.lse->strides[0];
    p.lse_head = t.lse->strides[1];
  }
  p.heads = static_cast<int32_t>(t.query->sizes[1]);
  p.scale_log2 = log2_scale(scale);
  p.parallel = pool;
}

void read_requests(Checker& c, const amxk_tensor* seq_lens, const amxk_tensor* query_start_loc, int64_t tokens,
                   Request* requests) {
  const int64_t n = seq_lens->sizes[0];
  int64_t first = 0;
  if (query_start_loc != nullptr) {
    first = index_at(query_start_loc, 0);
    c.require(first == 0, "query_start_loc[0] is %" PRId64 ", expected 0", first);
  }
  for (int64_t i = 0; i < n && c.ok(); ++i) {
    const int64_t next = query_start_loc != nullptr ? index_at(query_start_loc, i + 1) : first + tokens / n;
    const int64_t keys = index_at(seq_lens, i);
    if (!c.require(next >= first && next <= tokens,
                   "query_start_loc[%" PRId64 "] is %" PRId64 ", expected between %" PRId64
                   " (the entry before) and %" PRId64 " (tokens)",
                   i + 1, next, first, tokens)) {
      return;  // next - first, below, may overflow
    }
    c.require(keys >= 0 && keys <= kMaxTokens,
              "seq_lens[%" PRId64 "] is %" PRId64 ", expected between 0 and %" PRId64, i, keys, kMaxTokens);
    c.require(keys == 0 || keys >= next - first,
              "seq_lens[%" PRId64 "] is %" PRId64 ", expected 0 or at least the request's %" PRId64 " new tokens", i,
              keys, next - first);
    requests[i] = {first, next - first, keys};
    first = next;
  }
}

void check_lengths(Checker& c, const amxk_tensor* seq_lens, const amxk_tensor* query_start_loc, int64_t tokens) {
  c.index_tensor(seq_lens, "seq_lens", 1);
  if (!c.ok()) return;
  const int64_t n = seq_lens->sizes[0];
  c.require(n <= kMaxRequests, "seq_lens.size(0) is %" PRId64 ", expected at most %" PRId64 " requests", n, kMaxRequests);
  if (!c.ok()) return;
  if (query_start_loc != nullptr) {
    c.index_tensor(query_start_loc, "query_start_loc", 1);
    if (c.ok()) c.size(query_start_loc, "query_start_loc", 0, n + 1, "requests of seq_lens + 1");
  } else if (n == 0) {
    c.require(tokens == 0, "seq_lens is empty, expected a length for each of the requests of %" PRId64 " tokens", tokens);
  } else {
    c.require(tokens % n == 0,
              "%" PRId64 " query tokens for %" PRId64 " requests in seq_lens, expected the same number for each", tokens,
              n);
  }
}

void check_blocks(Checker& c, const amxk_tensor* table, const Request* requests, int64_t num_blocks,
                  int64_t block_size) {
  const int64_t columns = table->sizes[1];
  for (int64_t i = 0; i < table->sizes[0] && c.ok(); ++i) {
    if (requests[i].tokens == 0) continue;
    const int64_t live = ceil_div(requests[i].keys, block_size);
    int64_t room = 0;  // for the message
    if (live > columns && __builtin_mul_overflow(columns, block_size, &room)) room = INT64_MAX;
    if (!c.require(live <= columns,
                   "seq_lens[%" PRId64 "] is %" PRId64 ", expected at most %" PRId64
                   " (block_table columns x block size)",
                   i, requests[i].keys, room)) {
      return;
    }
    if (live == 0) continue;  // a table without columns may have no memory
    bool bad = false;
    const int64_t row = i * table->strides[0], step = table->strides[1];
    if (table->dtype == AMXK_I64) {
      const int64_t* ids = static_cast<const int64_t*>(table->data) + row;
      for (int64_t b = 0; b < live; ++b) bad |= static_cast<uint64_t>(ids[b * step]) >= static_cast<uint64_t>(num_blocks);
    } else {
      const int32_t* ids = static_cast<const int32_t*>(table->data) + row;
      const uint32_t limit = static_cast<uint32_t>(min<int64_t>(num_blocks, INT32_MAX));
      for (int64_t b = 0; b < live; ++b) bad |= static_cast<uint32_t>(ids[b * step]) >= limit;
    }
    if (!bad) continue;
    for (int64_t b = 0; b < live && c.ok(); ++b) {
      const int64_t at = row + b * step;
      const int64_t id = table->dtype == AMXK_I64 ? static_cast<const int64_t*>(table->data)[at]
                                                  : static_cast<const int32_t*>(table->data)[at];
      c.require(id >= 0 && id < num_blocks,
                "block_table[%" PRId64 ", %" PRId64 "] is %" PRId64 ", expected between 0 and %" PRId64
                " (blocks of kv_cache)",
                i, b, id, num_blocks - 1);
    }
  }
}

}  // namespace amxk
