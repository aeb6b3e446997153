// SPDX-License-Identifier: Apache-2.0
#include "capi/step.h"

#include <cmath>

namespace amxk {

void check_queries(Checker& c, const amxk_tensor* query, const char* name, const amxk_tensor* q_pe,
                   const amxk_tensor* out, const amxk_tensor* lse, const amxk_tensor* kv_cache, double scale) {
  const int64_t tokens = query->sizes[0], heads = query->sizes[1], width = query->sizes[2];
  char tokens_of[64], heads_of[64];
  std::snprintf(tokens_of, sizeof tokens_of, "tokens of %s", name);
  std::snprintf(heads_of, sizeof heads_of, "heads of %s", name);
  c.require(heads >= 1 && heads <= kMaxHeads, "%s.size(1) is %" PRId64 ", expected between 1 and %" PRId64 " heads", name,
            heads, kMaxHeads);
  c.require(width >= 1 && width <= kMaxWidth, "%s.size(2) is %" PRId64 ", expected between 1 and %" PRId64, name, width,
            kMaxWidth);
  c.require(q_pe->sizes[2] <= kMaxWidth, "q_pe.size(2) is %" PRId64 ", expected at most %" PRId64, q_pe->sizes[2],
            kMaxWidth);
  c.size(q_pe, "q_pe", 0, tokens, tokens_of);
  c.size(q_pe, "q_pe", 1, heads, heads_of);
  c.size(out, "out", 0, tokens, tokens_of);
  c.size(out, "out", 1, heads, heads_of);
  if (lse != nullptr) {
    c.size(lse, "lse", 0, tokens, tokens_of);
    c.size(lse, "lse", 1, heads, heads_of);
  }
  c.require(kv_cache->sizes[1] >= 1, "kv_cache.size(1) is 0, expected a block size of at least 1");
  c.require(std::isfinite(log2_scale(scale)) && log2_scale(scale) > 0,
            "scale is %g, expected a finite float32 above 0", scale);
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

PagedCache paged_cache(const amxk_tensor* kv_cache, const amxk_tensor* block_table, int64_t latent, int64_t rope) {
  PagedCache c = {};
  c.data = static_cast<const bf16*>(kv_cache->data);
  c.block_stride = kv_cache->strides[0];
  c.row_stride = kv_cache->strides[1];
  c.block_size = kv_cache->sizes[1];
  c.table = block_table->data;
  c.table_row = block_table->strides[0];
  c.table_column = block_table->strides[1];
  c.table_is_64bit = block_table->dtype == AMXK_I64;
  c.latent = static_cast<int32_t>(latent);
  c.rope = static_cast<int32_t>(rope);
  return c;
}

}  // namespace amxk
