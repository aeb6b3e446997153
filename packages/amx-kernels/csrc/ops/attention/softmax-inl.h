// SPDX-License-Identifier: Apache-2.0
// The online softmax of 16 rows over a block of keys: with the rows in lanes, or with the keys in lanes.
#pragma once

#include <math.h>

#include "base/common.h"

namespace amxk {
namespace AMXK_TIER {
namespace {

constexpr int kKeys = 256;       // keys per block
constexpr float kGrowth = 8.0f;  // log2 of how far a score may exceed the reference maximum

// What 16 rows do at a new block of keys, whose largest scores are top.
struct Step {
  V shift;     // minus the reference maximum: probabilities are 2^(c S + shift)
  bool grows;  // O must be multiplied by alpha first
};

AMXK_INLINE Step next_maximum(V top, float* m, float* alpha) {
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
  return {vselect_gt(reference, vset(-INFINITY), vsub(vset(0.0f), reference), vset(0.0f)), grows};
}

AMXK_INLINE void add_sums(V sum, bool grows, const float* alpha, float* l) {
  vstore(l, grows ? vfma(vload(l), vload(alpha), sum) : vadd(vload(l), sum));
}

// Softmax of 16 rows that sit in lanes, over `padded` keys (a multiple of 32) running down: scores [padded][16] to
// probabilities [16, kKeys], updating m and l. spread: in the form for values in place. limit: visible keys of this block
// per row; masked: some limit is below `padded`. Returns whether O must be multiplied by alpha first.
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
  const Step step = next_maximum(vmul(top, c), m, alpha);
  V sum = vset(0.0f), sum1 = sum;
  alignas(64) uint32_t pairs[16 * 16];
  for (int k = 0; k < padded; k += 2 * kGroup) {
#ifdef AMXK_SPREAD_PROBABILITIES
    if (spread) {
      float* block = scores + k * kGroup;
      for (int i = 0; i < 2 * kGroup; i += 2) {
        const V a = vexp2(vfma(vload(block + i * kGroup), c, step.shift));
        const V b = vexp2(vfma(vload(block + (i + 1) * kGroup), c, step.shift));
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
      const V a = vexp2(vfma(vload(scores + (k + i) * kGroup), c, step.shift));
      const V b = vexp2(vfma(vload(scores + (k + i + 1) * kGroup), c, step.shift));
      sum = vadd(sum, a);
      sum1 = vadd(sum1, b);
      store_pairs(pairs + i / 2 * kGroup, a, b);
    }
    transpose16(pairs, kGroup, reinterpret_cast<uint32_t*>(p + k), kKeys / 2);
  }
  add_sums(vadd(sum, sum1), step.grows, alpha, l);
  return step.grows;
}

// The vector whose lane r is the largest, or the sum, of the 16 elements at x + 16 r.
template <bool kSum>
AMXK_INLINE V reduce_rows(const float* x) {
  alignas(64) uint32_t lanes[kGroup * kGroup];
  transpose16(reinterpret_cast<const uint32_t*>(x), kGroup, lanes, kGroup);
  const auto row = [&](int i) { return vload(reinterpret_cast<const float*>(lanes) + i * kGroup); };
  V r = row(0);
  for (int i = 1; i < kGroup; ++i) r = kSum ? vadd(r, row(i)) : vmax(r, row(i));
  return r;
}

// Softmax of 16 rows whose keys sit in lanes: scores [panel of 16 keys][row][16], c_panel floats from panel to panel. No
// shuffle is needed for the probabilities [16, kKeys], only two reductions per row. The rest as in softmax_panel.
bool softmax_rows(float* scores, int64_t c_panel, int padded, const int32_t* limit, bool masked, float scale, float* m,
                  float* l, float* alpha, bf16* p) {
  alignas(64) static constexpr int32_t kLanes[] = {0, -1, -2, -3, -4, -5, -6, -7, -8, -9, -10, -11, -12, -13, -14, -15};
  const V c = vset(scale);
  const int panels = padded / kGroup;
  alignas(64) float partial[kGroup * kGroup], shift[kGroup];
  for (int r = 0; r < kGroup; ++r) {
    float* row = scores + r * kGroup;
    V top = vset(-INFINITY), top1 = top;
    for (int n = 0; n < panels; n += 2) {
      V a = vload(row + n * c_panel), b = vload(row + (n + 1) * c_panel);
      if (masked) {  // a lane is visible if -lane > first key - limit
        a = vmask(a, n * kGroup - limit[r], kLanes);
        b = vmask(b, (n + 1) * kGroup - limit[r], kLanes);
        vstore(row + n * c_panel, a);
        vstore(row + (n + 1) * c_panel, b);
      }
      top = vmax(top, a);
      top1 = vmax(top1, b);
    }
    vstore(partial + r * kGroup, vmax(top, top1));
  }
  const Step step = next_maximum(vmul(reduce_rows<false>(partial), c), m, alpha);
  vstore(shift, step.shift);
  for (int r = 0; r < kGroup; ++r) {
    const float* row = scores + r * kGroup;
    const V s = vset(shift[r]);
    V sum = vset(0.0f), sum1 = sum;
    for (int n = 0; n < panels; n += 2) {
      const V a = vexp2(vfma(vload(row + n * c_panel), c, s));
      const V b = vexp2(vfma(vload(row + (n + 1) * c_panel), c, s));
      sum = vadd(sum, a);
      sum1 = vadd(sum1, b);
      store_row32(p + r * kKeys + n * kGroup, a, b);
    }
    vstore(partial + r * kGroup, vadd(sum, sum1));
  }
  add_sums(reduce_rows<true>(partial), step.grows, alpha, l);
  return step.grows;
}

void scale_rows(float* o, int64_t rows, int64_t panels, int64_t o_panel, const float* factor) {
  for (int64_t n = 0; n < panels; ++n) {
    for (int64_t r = 0; r < rows; ++r) {
      float* row = o + n * o_panel + r * kGroup;
      vstore(row, vmul(vload(row), vset(factor[r])));
    }
  }
}

}  // namespace
}  // namespace AMXK_TIER
}  // namespace amxk
