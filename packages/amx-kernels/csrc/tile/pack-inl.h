// SPDX-License-Identifier: Apache-2.0
// From rows to B panels: sixteen rows become sixteen columns, their elements pairs of k.
#pragma once

namespace amxk {
namespace AMXK_TIER {
namespace {

// Packs 16 rows of steps x 32 elements into panel[k/2][row][k%2]. stride: elements from row to row, even. pair: elements
// from one k/2 to the next.
AMXK_INLINE void pack_panel(const bf16* rows, int64_t stride, int64_t steps, bf16* panel, int64_t pair = 2 * kGroup) {
  for (int64_t k = 0; k < steps; ++k) {
    transpose16(reinterpret_cast<const uint32_t*>(rows + k * kStepK), stride / 2,
                reinterpret_cast<uint32_t*>(panel + k * (kStepK / 2) * pair), pair / 2);
  }
}

// Copies n rows of `width` elements to `all` rows of `padded` elements each, zero elsewhere.
AMXK_INLINE void copy_group(const bf16* rows, int64_t stride, int64_t n, int64_t width, int64_t padded, bf16* to,
                            int64_t all = kGroup) {
  for (int64_t i = 0; i < all; ++i, to += padded) {
    const int64_t filled = i < n ? width : 0;
    copy_elements(to, rows + (i < n ? i * stride : 0), filled);  // the stride of a single row may be anything
    memset(to + filled, 0, static_cast<size_t>(padded - filled) * sizeof(bf16));
  }
}

}  // namespace
}  // namespace AMXK_TIER
}  // namespace amxk
