// SPDX-License-Identifier: Apache-2.0
// The online softmax of one panel: 16 rows in lanes, a block of keys running down.
#pragma once

#include <math.h>

#include "base/common.h"

namespace amxk {
namespace AMXK_TIER {
namespace {

constexpr int kKeys = 256;       // keys per block
constexpr float kGrowth = 8.0f;  // log2 of how far a score may exceed the reference maximum

// Softmax of one panel of 16 rows over `padded` keys (a multiple of 32): scores to probabilities [16, kKeys], updating
// m and l. spread: in the form for values in place. limit: visible keys of this block per row; masked: some limit is below `padded`. Returns whether O must be
// multiplied by alpha first.
bool softmax_panel(float* scores, int padded, const int32_t* limit, bool masked, float scale, float* m, float* l,
                   float* alpha, bf16* p, [[maybe_unused]] bool spread) {
  const V c = vset(scale);
  V top = vset(-INFINITY);
  if (masked) {
    for (int k = 0; k < padded; ++k) {
      const V x = vmask(vload(scores + k * kGroup), k, limit);
      vstore(scores + k * kGroup, x);
      top = vmax(top, x);
    }
  } else {
    V top1 = top, top2 = top, top3 = top;
    for (int k = 0; k < padded; k += 4) {
      top = vmax(top, vload(scores + k * kGroup));
      top1 = vmax(top1, vload(scores + (k + 1) * kGroup));
      top2 = vmax(top2, vload(scores + (k + 2) * kGroup));
      top3 = vmax(top3, vload(scores + (k + 3) * kGroup));
    }
    top = vmax(vmax(top, top1), vmax(top2, top3));
  }
  top = vmul(top, c);
  const V old = vload(m);
  const V bar = vadd(old, vset(kGrowth));
  const bool grows = vany_gt(top, bar);
  V reference = old;
  if (grows) {
    reference = vselect_gt(top, bar, top, old);
    vstore(m, reference);
    // 2^(-inf - x) is 0; a row that has seen nothing keeps -inf, and 0 stands in for it below.
    vstore(alpha, vexp2(vsub(old, vselect_gt(reference, vset(-INFINITY), reference, vset(0.0f)))));
  }
  const V shift = vselect_gt(reference, vset(-INFINITY), vsub(vset(0.0f), reference), vset(0.0f));
  V sum = vset(0.0f), sum1 = sum;
  alignas(64) uint32_t pairs[16 * 16];
  for (int k = 0; k < padded; k += 2 * kGroup) {
#ifdef AMXK_VALUES_IN_PLACE
    if (spread) {
      float* block = scores + k * kGroup;
      for (int i = 0; i < 2 * kGroup; i += 2) {
        const V a = vexp2(vfma(vload(block + i * kGroup), c, shift));
        const V b = vexp2(vfma(vload(block + (i + 1) * kGroup), c, shift));
        sum = vadd(sum, a);
        sum1 = vadd(sum1, b);
        vstore(block + i * kGroup, a);
        vstore(block + (i + 1) * kGroup, b);
      }
      spread_probabilities(block, p + k / kGroup * kSpreadGroup);
      spread_probabilities(block + kGroup * kGroup, p + (k / kGroup + 1) * kSpreadGroup);
      continue;
    }
#endif
    for (int i = 0; i < 2 * kGroup; i += 2) {
      const V a = vexp2(vfma(vload(scores + (k + i) * kGroup), c, shift));
      const V b = vexp2(vfma(vload(scores + (k + i + 1) * kGroup), c, shift));
      sum = vadd(sum, a);
      sum1 = vadd(sum1, b);
      store_pairs(pairs + i / 2 * kGroup, a, b);
    }
    transpose16(pairs, kGroup, reinterpret_cast<uint32_t*>(p + k), kKeys / 2);
  }
  sum = vadd(sum, sum1);
  vstore(l, grows ? vfma(vload(l), vload(alpha), sum) : vadd(vload(l), sum));
  return grows;
}

void scale_rows(float* o, int64_t panels, int64_t o_panel, const float* factor) {
  for (int64_t n = 0; n < panels; ++n) {
    for (int r = 0; r < kGroup; ++r) {
      float* row = o + n * o_panel + r * kGroup;
      vstore(row, vmul(vload(row), vset(factor[r])));
    }
  }
}

}  // namespace
}  // namespace AMXK_TIER
}  // namespace amxk
