// SPDX-License-Identifier: Apache-2.0
// Matrix product, plain C++. GCC's and Clang's generic vectors of four floats exist on every target (SSE2 on x86-64,
// NEON on aarch64) and keep the accumulators in registers, which arrays of float do not reliably do.
#pragma once

#include "simd/portable.h"
#include "tile/widened-inl.h"

namespace amxk {
namespace AMXK_TIER {
namespace {

typedef float F4 __attribute__((vector_size(16)));
typedef uint32_t U4 __attribute__((vector_size(16), aligned(alignof(bf16)), may_alias));

constexpr int kAccRows = 2;

struct Acc {
  F4 part[kAccRows][4];
};
using BPair = const bf16*;  // left in memory until a part of it is wanted: there are no registers for all four

constexpr int kMaxPanels = 1;
constexpr int kRows[] = {kAccRows};

AMXK_INLINE Acc acc_zero() { return Acc{}; }
AMXK_INLINE Acc acc_load(const float* p) {
  Acc a;
  memcpy(&a, p, sizeof a);
  return a;
}
AMXK_INLINE void acc_store(float* p, Acc a) { memcpy(p, &a, sizeof a); }
AMXK_INLINE V acc_row(const Acc& a, int row) {
  V r;
  memcpy(&r, a.part[row], sizeof r);
  return r;
}
AMXK_INLINE BPair b_load(const bf16* p) { return p; }

// Four pairs as fp32. Read as a word, a pair has its first element in the low half: byte order is little-endian.
AMXK_INLINE void split_pairs(const bf16* p, F4& even, F4& odd) {
  const U4 pairs = *reinterpret_cast<const U4*>(p);
  even = reinterpret_cast<F4>(pairs << 16);
  odd = reinterpret_cast<F4>(pairs & 0xffff0000u);
}
AMXK_INLINE void widen_row(const bf16* row, int k, float* even, float* odd) {
  for (int i = 0; i < k; i += 8, even += 4, odd += 4) {
    F4 e, o;
    split_pairs(row + i, e, o);
    memcpy(even, &e, sizeof e);
    memcpy(odd, &o, sizeof o);
  }
}

// Both rows part by part: 16 registers hold 8 accumulators, 4 broadcasts and a part's two halves, where row by row the
// halves of all parts would have to wait for the second row.
template <int MR>
AMXK_INLINE Acc mac(Acc acc, const ARows<MR>& a, int m, BPair b) {
  const float* row = a.row + m * kAccRows * kWidenedStride;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    F4 even, odd;
    split_pairs(b + 8 * i, even, odd);
#pragma GCC unroll 2
    for (int r = 0; r < kAccRows; ++r) {
      acc.part[r][i] += row[r * kWidenedStride] * even;
      acc.part[r][i] += row[r * kWidenedStride + kOdd] * odd;
    }
  }
  return acc;
}

}  // namespace
}  // namespace AMXK_TIER
}  // namespace amxk

#include "tile/vector_gemm-inl.h"
