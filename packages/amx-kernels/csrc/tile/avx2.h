// SPDX-License-Identifier: Apache-2.0
// Matrix product, AVX2 + FMA, fp32 on widened bf16.
//
//   instruction          per cycle  latency   (Skylake to Golden Cove, Zen3 to Zen5)
//   VFMADD231PS ymm           2        4
//   VBROADCASTSS ymm, m       2-3      -      (a load, no shuffle)
//
// 4 rows x 2 registers = 8 accumulators hide the latency of FMA; 16 FMAs need 8 broadcasts, 2 loads and 4 splits.
#pragma once

#include "simd/avx2.h"
#include "tile/fma-inl.h"

namespace amxk {
namespace AMXK_TIER {
namespace {

constexpr int kMaxPanels = 1;
constexpr int kRows[] = {4};

AMXK_INLINE BPair b_load(const bf16* p) {
  const __m256i lo = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i hi = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {{_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))},
          {_mm256_castsi256_ps(_mm256_and_si256(lo, upper)), _mm256_castsi256_ps(_mm256_and_si256(hi, upper))}};
}
AMXK_INLINE void widen_row(const bf16* row, int k, float* even, float* odd) {
  for (int i = 0; i < k; i += 32, even += 16, odd += 16) {
    const BPair pairs = b_load(row + i);
    vstore(even, pairs.even);
    vstore(odd, pairs.odd);
  }
}

}  // namespace
}  // namespace AMXK_TIER
}  // namespace amxk

#include "tile/vector_gemm-inl.h"
