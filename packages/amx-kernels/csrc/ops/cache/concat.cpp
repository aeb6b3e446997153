// SPDX-License-Identifier: Apache-2.0
#include "ops/cache/concat.h"

namespace amxk {
namespace {

constexpr int64_t kGrain = 64;  // tokens a thread must have to be worth waking: 74 KB

struct ConcatCall {
  const ConcatParams& p;
  int tasks;
};

// Finds the rows of the cache that tokens go to. Slots mostly follow each other: only a new block costs a division.
class Rows {
 public:
  explicit Rows(const ConcatParams& p) : p_(p), block_(p.cache) {}

  // nullptr for a token that is not kept.
  bf16* of(int64_t t) {
    const int64_t slot = p_.slots_are_64bit ? static_cast<const int64_t*>(p_.slots)[t * p_.slot_stride]
                                            : static_cast<const int32_t*>(p_.slots)[t * p_.slot_stride];
    if (slot < 0) return nullptr;
    if (slot < first_ || slot - first_ >= p_.block_size) {
      const int64_t block = slot / p_.block_size;
      first_ = block * p_.block_size;
      block_ = p_.cache + block * p_.cache_block;
    }
    return block_ + (slot - first_) * p_.cache_row;
  }

 private:
  const ConcatParams& p_;
  int64_t first_ = 0;  // slot of the block found last
  bf16* block_;
};

void concat_task(void* argument, int task) {
  const ConcatCall& call = *static_cast<const ConcatCall*>(argument);
  const ConcatParams& p = call.p;
  const int64_t first = p.tokens * task / call.tasks, last = p.tokens * (task + 1) / call.tasks;
  Rows rows(p);
  for (int64_t t = first; t < last; ++t) {
    if (bf16* row = rows.of(t)) {
      copy_elements(row, p.kv_c + t * p.kv_c_token, p.latent);
      if (p.rope > 0) copy_elements(row + p.latent, p.k_pe + t * p.k_pe_token, p.rope);
    }
  }
}

}  // namespace

void concat_and_cache(const ConcatParams& p) noexcept {
  ConcatCall call = {p, static_cast<int>(min<int64_t>(p.parallel.num_threads, max<int64_t>(1, p.tokens / kGrain)))};
  parallel_run(p.parallel, call.tasks, concat_task, &call);
}

}  // namespace amxk
