// SPDX-License-Identifier: Apache-2.0
// Products with at most eight columns, AVX512-BF16: a panel of sixteen would multiply as many zeros. Two pairs of k sit side
// by side in a vector instead, half[k/4][8][4], two pairs of a row of A are broadcast together, and neighbouring lanes are
// added at the end.
#pragma once

namespace amxk {
namespace AMXK_TIER {
namespace {

#define AMXK_HALF_PANEL
constexpr int kHalf = kGroup / 2;

// Eight rows of steps x 32 elements as columns.
AMXK_INLINE void pack_half_panel(const bf16* rows, int64_t stride, int64_t steps, bf16* panel) {
  for (int64_t k = 0; k < steps * kStepK; k += 4) {
    for (int n = 0; n < kHalf; ++n, panel += 4) memcpy(panel, rows + n * stride + k, 4 * sizeof(bf16));
  }
}

// C of one panel, [16 per group][16], from groups of rows of A; columns past the eighth are zero.
static __attribute__((noinline)) void gemm_half_panel(const RowGroup* a, int groups, int k_steps, const bf16* b, float* c) {
  const __m512i even_lanes = _mm512_set_epi32(14, 12, 10, 8, 6, 4, 2, 0, 14, 12, 10, 8, 6, 4, 2, 0);
  for (int g = 0; g < groups; ++g, c += kGroup * kGroup) {
    Acc acc[kGroup];
#pragma GCC unroll 16
    for (int m = 0; m < kGroup; ++m) acc[m] = acc_zero();
    ARows<kGroup> rows;
    rows.start(a[g], 0);
    const bf16* line = b;
    for (int k = 0; k < k_steps * kStepK; k += 4, line += 2 * kGroup, rows.next(2)) {
      const BPair column = b_load(line);
#pragma GCC unroll 16
      for (int m = 0; m < kGroup; ++m) {
        int64_t pairs;
        memcpy(&pairs, rows.at(m), sizeof pairs);
        acc[m] = _mm512_dpbf16_ps(acc[m], reinterpret_cast<__m512bh>(column),
                                  reinterpret_cast<__m512bh>(_mm512_set1_epi64(pairs)));
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < kGroup; ++m) {
      const Acc both = vadd(acc[m], _mm512_permute_ps(acc[m], 0xb1));
      acc_store(c + m * kGroup, _mm512_maskz_permutexvar_ps(0x00ff, even_lanes, both));
    }
  }
}

}  // namespace
}  // namespace AMXK_TIER
}  // namespace amxk
