// SPDX-License-Identifier: Apache-2.0
#include "ops/cache/concat.h"

namespace amxk {
namespace {

constexpr int64_t kGrain = 64;  // tokens a thread must have to be worth waking: 74 KB
// Rows fetched ahead. A store to a line that is not in L1 waits for it, and a core can have few such stores under way.
constexpr int64_t kAhead = 4;

struct ConcatCall {
  const ConcatParams& p;
  int tasks;
};

// The row of the cache that token t goes to; nullptr for a token that is not kept.
bf16* row_of(const ConcatParams& p, int64_t t) {
  const int64_t slot = p.slots_are_64bit ? static_cast<const int64_t*>(p.slots)[t * p.slot_stride]
                                         : static_cast<const int32_t*>(p.slots)[t * p.slot_stride];
  return slot < 0 ? nullptr : p.cache + slot / p.block_size * p.cache_block + slot % p.block_size * p.cache_row;
}

void concat_task(void* argument, int task) {
  const ConcatCall& call = *static_cast<const ConcatCall*>(argument);
  const ConcatParams& p = call.p;
  const int64_t last = p.tokens * (task + 1) / call.tasks, width = p.latent + p.rope;
  for (int64_t t = p.tokens * task / call.tasks; t < last; ++t) {
    if (const bf16* next = t + kAhead < last ? row_of(p, t + kAhead) : nullptr) {
      for (int64_t i = 0; i < width; i += kStepK) __builtin_prefetch(next + i, 1, 3);
    }
    bf16* row = row_of(p, t);
    if (row == nullptr) continue;
    memcpy(row, p.kv_c + t * p.kv_c_token, static_cast<size_t>(p.latent) * sizeof(bf16));
    if (p.rope > 0) memcpy(row + p.latent, p.k_pe + t * p.k_pe_token, static_cast<size_t>(p.rope) * sizeof(bf16));
  }
}

}  // namespace

void concat_and_cache(const ConcatParams& p) noexcept {
  ConcatCall call = {p, static_cast<int>(min<int64_t>(p.parallel.num_threads, max<int64_t>(1, p.tokens / kGrain)))};
  parallel_run(p.parallel, call.tasks, concat_task, &call);
}

}  // namespace amxk
