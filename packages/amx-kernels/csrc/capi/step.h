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

// The tensors that both forms of attention take.
struct StepTensors {
  const amxk_tensor *out, *lse, *query;
  const char* query_name;
  const amxk_tensor *q_pe, *kv_cache, *block_table;
};

// Kinds and numbers of dimensions.
void check_tensors(Checker& c, const StepTensors& t);

// What a query [T, H, dims] and the tensors beside it agree on.
void check_queries(Checker& c, const StepTensors& t, double scale);

// The fields of p that follow from tensors already checked. latent: R.
void fill_step(StepParams& p, const StepTensors& t, int64_t latent, double scale, const amxk_parallel& pool);

// seq_lens, and query_start_loc or an equal share of `tokens` for each request.
void check_lengths(Checker& c, const amxk_tensor* seq_lens, const amxk_tensor* query_start_loc, int64_t tokens);

// The step's requests, from seq_lens and query_start_loc (or T / num_reqs tokens each), into memory for num_reqs.
void read_requests(Checker& c, const amxk_tensor* seq_lens, const amxk_tensor* query_start_loc, int64_t tokens,
                   Request* requests);

// Every block a live key lies in must exist; entries past a request's length are never looked at.
void check_blocks(Checker& c, const amxk_tensor* table, const Request* requests, int64_t num_blocks,
                  int64_t block_size);

}  // namespace amxk
