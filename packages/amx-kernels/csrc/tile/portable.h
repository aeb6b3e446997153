// SPDX-License-Identifier: Apache-2.0
// Matrix product, plain C++. GCC's and Clang's generic vectors of four floats exist on every target (SSE2 on x86-64,
// NEON on aarch64) and keep the accumulators in registers, which arrays of float do not reliably do.
#pragma once

#include "simd/portable.h"

namespace amxk {
namespace AMXK_TIER {
namespace {

typedef float F4 __attribute__((vector_size(16)));
typedef uint32_t U4 __attribute__((vector_size(16)));

struct Acc {
  F4 part[4];
};
struct BPair {
  U4 part[4];
};

constexpr int kMaxPanels = 1;
constexpr int kRows[] = {2};  // 8 accumulators of 4 lanes: 16 registers hold them, the operands and two broadcasts

AMXK_INLINE Acc acc_zero() { return Acc{}; }
AMXK_INLINE Acc acc_load(const float* p) {
  Acc a;
  memcpy(&a, p, sizeof a);
  return a;
}
AMXK_INLINE void acc_store(float* p, Acc a) { memcpy(p, &a, sizeof a); }
AMXK_INLINE BPair b_load(const bf16* p) {
  BPair b;
  memcpy(&b, p, sizeof b);
  return b;
}
AMXK_INLINE void widen_row(const bf16* row, int k, float* even, float* odd) {
  for (int i = 0; i < k; i += 2) {
    *even++ = bf16_to_float(row[i]);
    *odd++ = bf16_to_float(row[i + 1]);
  }
}

AMXK_INLINE Acc multiply_pair(Acc acc, float even, float odd, BPair b) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    // The pair's first element is the low half of its word: a matter of values, not of byte order.
    acc.part[i] += even * reinterpret_cast<F4>(b.part[i] << 16);
    acc.part[i] += odd * reinterpret_cast<F4>(b.part[i] & 0xffff0000u);
  }
  return acc;
}

}  // namespace
}  // namespace AMXK_TIER
}  // namespace amxk

#include "tile/widened-inl.h"

#include "tile/vector_gemm-inl.h"
