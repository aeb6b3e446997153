// SPDX-License-Identifier: Apache-2.0
// What the ops over a step's paged cache check and read alike.
#pragma once

#include "capi/check.h"
#include "ops/attention/params.h"

namespace amxk {

constexpr int64_t kMaxHeads = 4096;
constexpr int64_t kMaxWidth = 8192;
constexpr int64_t kMaxTokens = int64_t{1} << 40;  // of a step, and keys of a request
// No real step comes near these; below them sizes and costs cannot overflow.
constexpr int64_t kMaxRequests = int64_t{1} << 24;

// The softmax scale for powers of two.
AMXK_INLINE float log2_scale(double scale) { return static_cast<float>(scale) * kLog2e; }

// What a query [T, H, dims] and the tensors beside it agree on; `name` is the query's.
void check_queries(Checker& c, const amxk_tensor* query, const char* name, const amxk_tensor* q_pe,
                   const amxk_tensor* out, const amxk_tensor* lse, const amxk_tensor* kv_cache, double scale);

// seq_lens, and query_start_loc or an equal share of `tokens` for each request.
void check_lengths(Checker& c, const amxk_tensor* seq_lens, const amxk_tensor* query_start_loc, int64_t tokens);

// The step's requests, from seq_lens and query_start_loc (or T / num_reqs tokens each), into memory for num_reqs.
void read_requests(Checker& c, const amxk_tensor* seq_lens, const amxk_tensor* query_start_loc, int64_t tokens,
                   Request* requests);

// Every block a live key lies in must exist; entries past a request's length are never looked at.
void check_blocks(Checker& c, const amxk_tensor* table, const Request* requests, int64_t num_blocks,
                  int64_t block_size);

PagedCache paged_cache(const amxk_tensor* kv_cache, const amxk_tensor* block_table, int64_t latent, int64_t rope);

}  // namespace amxk
