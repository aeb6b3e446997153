// SPDX-License-Identifier: Apache-2.0
// Accumulators and products of the tiers that multiply vectors of fp32 (see tile/widened-inl.h).
#pragma once

namespace amxk {
namespace AMXK_TIER {
namespace {

using Acc = V;
struct BPair {
  V even, odd;
};

AMXK_INLINE Acc acc_zero() { return vset(0.0f); }
AMXK_INLINE Acc acc_load(const float* p) { return vload(p); }
AMXK_INLINE void acc_store(float* p, Acc a) { vstore(p, a); }
AMXK_INLINE Acc multiply_pair(Acc acc, float even, float odd, BPair b) {
  return vfma(vset(odd), b.odd, vfma(vset(even), b.even, acc));
}

}  // namespace
}  // namespace AMXK_TIER
}  // namespace amxk
