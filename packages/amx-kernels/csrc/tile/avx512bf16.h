// SPDX-License-Identifier: Apache-2.0
// Matrix product, AVX512-BF16: A pairs are broadcast straight from bf16 memory, nothing is widened.
//
//   instruction                   per cycle  latency
//   VDPBF16PS zmm, zmm, m32{1to16}    2         6     (Zen5; Zen4: 1; Golden Cove: 1/2, there the avx512 tier wins)
//
// 4 rows x 4 panels: 16 accumulators, 8 loads for 16 products; with one panel 16 rows, 17 loads; values in place 8 rows x 2
// panels, 10 loads, two shifts and two blends.
#pragma once

#define AMXK_NATIVE_BF16
#include "simd/avx512.h"

namespace amxk {
namespace AMXK_TIER {
namespace {

using Acc = V;
constexpr int kAccRows = 1;
using BPair = __m512i;
using APrepared = RowGroup;

constexpr int kMaxPanels = 4;
constexpr int kRows[] = {16, 8, 0, 4};
constexpr int kChunkSteps = 1 << 20;  // rows are read as they lie, however long

AMXK_INLINE void prepare(RowGroup group, int, int, APrepared& a) { a = group; }
AMXK_INLINE Acc acc_zero() { return vset(0.0f); }
AMXK_INLINE Acc acc_load(const float* p) { return vload(p); }
AMXK_INLINE void acc_store(float* p, Acc a) { vstore(p, a); }
AMXK_INLINE V acc_row(Acc a, int) { return a; }
AMXK_INLINE BPair b_load(const bf16* p) { return _mm512_loadu_si512(p); }

// Columns 2c and 2c + 1 of two rows, c = 0 ... 15: pairs for the panel of even columns and for that of odd ones.
AMXK_INLINE void pair_rows(const bf16* row0, const bf16* row1, BPair* pairs) {
  pair32(row0, row1, pairs[0], pairs[1]);
}

// Rows of A as a register block reads them, pair by pair. A pointer for every four rows, and 0 to 3 strides from it: for
// 16 offsets there are not enough registers, and GCC would keep them in vector registers, a move for every row.
template <int MR>
struct ARows {
  const bf16* four[ceil_div(MR, 4)];
  int64_t stride;

  AMXK_INLINE_MEMBER void start(const APrepared& a, int first) {
    stride = a.stride;
    for (int i = 0; i < ceil_div(MR, 4); ++i) four[i] = a.row + (first + 4 * i) * stride;
  }
  AMXK_INLINE_MEMBER void next(int pairs = 1) {
    for (const bf16*& row : four) row += 2 * pairs;
  }
  AMXK_INLINE_MEMBER const bf16* at(int m) const { return four[m / 4] + m % 4 * stride; }
};

template <int MR>
AMXK_INLINE Acc mac(Acc acc, const ARows<MR>& a, int m, BPair b) {
  int32_t pair;
  memcpy(&pair, a.at(m), sizeof pair);
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(b), reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)));
}

}  // namespace
}  // namespace AMXK_TIER
}  // namespace amxk

#include "tile/vector_gemm-inl.h"

#include "tile/half_panel-inl.h"
#include "tile/in_place-inl.h"
