// SPDX-License-Identifier: Apache-2.0
// Accumulators and products of the tiers that multiply vectors of fp32. The including tier supplies widen_row.
#pragma once

#include "tile/widened-inl.h"

namespace amxk {
namespace AMXK_TIER {
namespace {

using Acc = V;
constexpr int kAccRows = 1;
struct BPair {
  V even, odd;
};

AMXK_INLINE Acc acc_zero() { return vset(0.0f); }
AMXK_INLINE Acc acc_load(const float* p) { return vload(p); }
AMXK_INLINE void acc_store(float* p, Acc a) { vstore(p, a); }
AMXK_INLINE V acc_row(Acc a, int) { return a; }
template <int MR>
AMXK_INLINE Acc mac(Acc acc, const ARows<MR>& a, int m, BPair b) {
  const float* row = a.row + m * kWidenedStride;
  return vfma(vset(row[kOdd]), b.odd, vfma(vset(row[0]), b.even, acc));
}

}  // namespace
}  // namespace AMXK_TIER
}  // namespace amxk
