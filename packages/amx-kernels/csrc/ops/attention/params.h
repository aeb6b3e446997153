// SPDX-License-Identifier: Apache-2.0
// Everything the attention kernel needs, checked by csrc/capi/attention.cpp. T tokens, H heads, R latent, P rope dims.
#pragma once

#include "base/common.h"
#include "base/parallel.h"
#include "ops/attention/plan.h"

namespace amxk {

// A paged cache of latent rows and the step's table of its blocks.
struct PagedCache {
  const bf16* data;  // [num_blocks, block_size, R + P]
  int64_t block_stride, row_stride, block_size;
  const void* table;  // [num_reqs, max_blocks], int32 or int64
  int64_t table_row, table_column;
  bool table_is_64bit;
  int32_t latent, rope;  // R, P
};

AMXK_INLINE int64_t block_id(const PagedCache& c, int64_t request, int64_t block) {
  const int64_t i = request * c.table_row + block * c.table_column;
  return c.table_is_64bit ? static_cast<const int64_t*>(c.table)[i] : static_cast<const int32_t*>(c.table)[i];
}

// What both forms of attention take.
struct StepParams {
  const bf16* q_pe;  // [T, H, P]
  int64_t q_pe_token, q_pe_head;
  PagedCache cache;
  bf16* out;  // [T, H, R], or [T, H, E] of the decompressed form
  int64_t out_token, out_head;
  float* lse;  // [T, H] or nullptr
  int64_t lse_token, lse_head;
  int32_t heads;
  float scale_log2;  // softmax scale x log2(e), so that exponentials are powers of two
  Parallel parallel;
};

struct AttentionParams : StepParams {
  const bf16* q_latent;  // [T, H, R]
  int64_t q_latent_token, q_latent_head;
  PlanView plan;
};

// Returns AMXK_OK, or AMXK_INTERNAL if scratch memory ran out.
using AttentionFunction = amxk_code (*)(const AttentionParams&);

}  // namespace amxk
