// SPDX-License-Identifier: Apache-2.0
// kv_cache[slot] = kv_c[t] ++ k_pe[t]; one pass at copy bandwidth, the same code on every tier.
#pragma once

#include "base/common.h"
#include "base/parallel.h"

namespace amxk {

struct ConcatParams {
  const bf16* kv_c;  // [T, R]
  int64_t kv_c_token;
  const bf16* k_pe;  // [T, P]
  int64_t k_pe_token;
  bf16* cache;  // [num_blocks, block_size, R + P]
  int64_t cache_block, cache_row, block_size;
  const void* slots;  // [T] int32 or int64; negative: skipped
  int64_t slot_stride;
  bool slots_are_64bit;
  int64_t tokens, latent, rope;
  Parallel parallel;
};

void concat_and_cache(const ConcatParams& p) noexcept;

}  // namespace amxk
