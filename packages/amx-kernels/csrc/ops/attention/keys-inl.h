// SPDX-License-Identifier: Apache-2.0
// From sequence positions to rows of the paged cache.
#pragma once

#include "ops/attention/params.h"

namespace amxk {
namespace AMXK_TIER {
namespace {

// Where the keys [first, first + n) of a request lie, as groups of 16 rows. A group inside one block is used in place; one
// that straddles blocks, ends at the sequence's end or has a row width that is not a whole tile step is copied. padded: the
// width of a copied row, a multiple of kStepK.
void locate_keys(const PagedCache& cache, int64_t request, int64_t first, int n, int64_t padded, bf16* gather,
                 RowGroup* groups) {
  const int64_t width = cache.latent + cache.rope;
  for (int g = 0; g < n; g += kGroup) {
    const int64_t key = first + g;
    const int64_t offset = key % cache.block_size;
    if (g + kGroup <= n && offset + kGroup <= cache.block_size && width == padded) {
      const int64_t block = block_id(cache, request, key / cache.block_size);
      groups[g / kGroup] = {cache.data + block * cache.block_stride + offset * cache.row_stride, cache.row_stride};
      continue;
    }
    bf16* copy = gather + g * padded;
    for (int i = 0; i < kGroup; ++i, copy += padded) {
      int64_t filled = 0;
      if (g + i < n) {
        const int64_t block = block_id(cache, request, (key + i) / cache.block_size);
        const bf16* row = cache.data + block * cache.block_stride + (key + i) % cache.block_size * cache.row_stride;
        copy_elements(copy, row, width);
        filled = width;
      }
      memset(copy + filled, 0, static_cast<size_t>(padded - filled) * sizeof(bf16));
    }
    groups[g / kGroup] = {gather + g * padded, padded};
  }
}

}  // namespace
}  // namespace AMXK_TIER
}  // namespace amxk
