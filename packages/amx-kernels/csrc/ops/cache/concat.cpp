// SPDX-License-Identifier: Apache-2.0
#include "ops/cache/concat.h"

namespace amxk {
namespace {

constexpr int64_t kGrain = 64;  // tokens a thread must have to be worth waking: 74 KB

struct ConcatCall {
  const ConcatParams& p;
  int tasks;
};

void concat_task(void* argument, int task) {
  const ConcatCall& call = *static_cast<const ConcatCall*>(argument);
  const ConcatParams& p = call.p;
  const int64_t first = p.tokens * task / call.tasks, last = p.tokens * (task + 1) / call.tasks;
  // Slots mostly follow each other: only a new block costs a division.
  int64_t block_slot = 0;  // the first of the block found last
  bf16* block = p.cache;
  for (int64_t t = first; t < last; ++t) {
    const int64_t slot = p.slots_are_64bit ? static_cast<const int64_t*>(p.slots)[t * p.slot_stride]
                                           : static_cast<const int32_t*>(p.slots)[t * p.slot_stride];
    if (slot < 0) continue;
    if (slot < block_slot || slot - block_slot >= p.block_size) {
      const int64_t index = slot / p.block_size;
      block_slot = index * p.block_size;
      block = p.cache + index * p.cache_block;
    }
    bf16* row = block + (slot - block_slot) * p.cache_row;
    copy_elements(row, p.kv_c + t * p.kv_c_token, p.latent);
    if (p.rope > 0) copy_elements(row + p.latent, p.k_pe + t * p.k_pe_token, p.rope);
  }
}

}  // namespace

void concat_and_cache(const ConcatParams& p) noexcept {
  ConcatCall call = {p, static_cast<int>(min<int64_t>(p.parallel.num_threads, max<int64_t>(1, p.tokens / kGrain)))};
  parallel_run(p.parallel, call.tasks, concat_task, &call);
}

}  // namespace amxk
