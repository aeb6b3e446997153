// SPDX-License-Identifier: Apache-2.0
// What becomes of a product: it stays in panels of fp32 (Keep), or is scaled, rounded and written to rows of bf16 (Round).
#pragma once

#include "base/common.h"

namespace amxk {
namespace AMXK_TIER {
namespace {

struct Keep {
  static constexpr bool kRounds = false;

  AMXK_INLINE_MEMBER Keep at(int64_t, int64_t) const { return {}; }
};

struct Round {
  static constexpr bool kRounds = true;

  bf16* out;  // row 0, column 0
  int64_t stride;
  int64_t rows, columns;  // that exist; others are left out
  V factor;

  // The same, seen from row m, column n on.
  AMXK_INLINE_MEMBER Round at(int64_t m, int64_t n) const {
    return {out + m * stride + n, stride, rows - m, columns - n, factor};
  }

  // NR panels of row m.
  template <int NR>
  AMXK_INLINE_MEMBER void store(int m, const V* panels) const {
    bf16* row = out + m * stride;
    const int64_t whole = min<int64_t>(NR, columns / kGroup);
    if (whole == NR) {
#pragma GCC unroll 4
      for (int n = 0; n + 2 <= NR; n += 2) {
        store_row32(row + n * kGroup, vmul(panels[n], factor), vmul(panels[n + 1], factor));
      }
      if constexpr (NR % 2 != 0) store16(row + (NR - 1) * kGroup, vmul(panels[NR - 1], factor));
      return;
    }
    for (int64_t n = 0; n < NR && n * kGroup < columns; ++n) {
      bf16 tail[kGroup];
      store16(tail, vmul(panels[n], factor));
      memcpy(row + n * kGroup, tail, static_cast<size_t>(min<int64_t>(kGroup, columns - n * kGroup)) * sizeof(bf16));
    }
  }
};

}  // namespace
}  // namespace AMXK_TIER
}  // namespace amxk
