// SPDX-License-Identifier: Apache-2.0
// Matrix product, AVX512-BF16: A pairs are broadcast straight from bf16 memory, nothing is widened.
//
//   instruction                   per cycle  latency
//   VDPBF16PS zmm, zmm, m32{1to16}    2         6     (Zen5; Zen4: 1; Golden Cove: 1/2, there the avx512 tier wins)
//
// 4 rows x 4 panels: 16 accumulators, 8 loads for 16 products; with one panel 16 rows, broadcasts embedded in the product.
#pragma once

#define AMXK_NATIVE_BF16
#include "simd/avx512.h"

namespace amxk {
namespace AMXK_TIER {
namespace {

using Acc = V;
using BPair = __m512i;
using APrepared = RowGroup;

constexpr int kMaxPanels = 4;
constexpr int kRows[] = {16, 8, 0, 4};
constexpr int kChunkSteps = 1 << 20;  // rows are read as they lie, however long

AMXK_INLINE void prepare(RowGroup group, int, APrepared& a) { a = group; }
AMXK_INLINE Acc acc_zero() { return vset(0.0f); }
AMXK_INLINE Acc acc_load(const float* p) { return vload(p); }
AMXK_INLINE void acc_store(float* p, Acc a) { vstore(p, a); }
AMXK_INLINE BPair b_load(const bf16* p) { return _mm512_loadu_si512(p); }
AMXK_INLINE Acc mac(Acc acc, const APrepared& a, int m, int j, BPair b) {
  int32_t pair;
  memcpy(&pair, a.row + m * a.stride + 2 * j, sizeof pair);
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(b), reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)));
}

}  // namespace
}  // namespace AMXK_TIER
}  // namespace amxk

#include "tile/vector_gemm-inl.h"
