// SPDX-License-Identifier: Apache-2.0
// Vector vocabulary, AVX2 + FMA: see simd/portable.h for what each word means. Sixteen lanes are two registers.
#pragma once

#include <immintrin.h>
#include <math.h>

#include "base/common.h"

namespace amxk {
namespace AMXK_TIER {
namespace {

struct V {
  __m256 lo, hi;
};

AMXK_INLINE V vload(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
AMXK_INLINE void vstore(float* p, V a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
AMXK_INLINE V vset(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
AMXK_INLINE V vadd(V a, V b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
AMXK_INLINE V vsub(V a, V b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
AMXK_INLINE V vmul(V a, V b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
AMXK_INLINE V vfma(V a, V b, V c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
AMXK_INLINE V vmax(V a, V b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
AMXK_INLINE V vselect_gt(V a, V b, V x, V y) {
  return {_mm256_blendv_ps(y.lo, x.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ)),
          _mm256_blendv_ps(y.hi, x.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ))};
}
AMXK_INLINE V vmask(V s, int key, const int32_t* limit) {
  const __m256i k = _mm256_set1_epi32(key);
  const __m256 masked = _mm256_set1_ps(-INFINITY);
  const __m256i lo = _mm256_cmpgt_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(limit)), k);
  const __m256i hi = _mm256_cmpgt_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(limit + 8)), k);
  return {_mm256_blendv_ps(masked, s.lo, _mm256_castsi256_ps(lo)),
          _mm256_blendv_ps(masked, s.hi, _mm256_castsi256_ps(hi))};
}
AMXK_INLINE bool vany_gt(V a, V b) {
  return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ),
                                         _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ))) != 0;
}

AMXK_INLINE __m256 exp2_8(__m256 x) {
  const __m256 floor = _mm256_set1_ps(-126.0f);
  const __m256 magic = _mm256_set1_ps(12582912.0f);
  const __m256 t = _mm256_max_ps(floor, x);  // the second operand when either is NaN: NaN goes through
  const __m256 n = _mm256_add_ps(t, magic);
  const __m256 f = _mm256_sub_ps(t, _mm256_sub_ps(n, magic));
  __m256 p = _mm256_set1_ps(1.5353362e-4f);
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.3398874e-3f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(9.6184373e-3f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(5.5503324e-2f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(2.4022648e-1f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(6.9314720e-1f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.0f));
  const __m256i power =
      _mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(n), 23), _mm256_set1_epi32(0x3f800000));
  const __m256 small = _mm256_cmp_ps(x, floor, _CMP_LT_OQ);
  return _mm256_andnot_ps(small, _mm256_mul_ps(p, _mm256_castsi256_ps(power)));
}
AMXK_INLINE V vexp2(V x) { return {exp2_8(x.lo), exp2_8(x.hi)}; }

// fp32 to the upper half of each word, rounded to nearest even, NaN kept.
AMXK_INLINE __m256i round_bf16_8(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, quiet, nan);
}
AMXK_INLINE __m256i pairs_8(__m256 a, __m256 b) {
  return _mm256_blend_epi16(_mm256_srli_epi32(round_bf16_8(a), 16), round_bf16_8(b), 0xaa);
}
AMXK_INLINE void store_pairs(uint32_t* dst, V a, V b) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst), pairs_8(a.lo, b.lo));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + 8), pairs_8(a.hi, b.hi));
}

AMXK_INLINE void transpose8(const uint32_t* src, int64_t src_stride, uint32_t* dst, int64_t dst_stride) {
  __m256 r[8], t[8];
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(src + i * src_stride));
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(reinterpret_cast<float*>(dst + i * dst_stride), _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(reinterpret_cast<float*>(dst + (i + 4) * dst_stride),
                     _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}
AMXK_INLINE void transpose16(const uint32_t* src, int64_t src_stride, uint32_t* dst, int64_t dst_stride) {
  for (int i = 0; i < 16; i += 8) {
    for (int j = 0; j < 16; j += 8) {
      transpose8(src + i * src_stride + j, src_stride, dst + j * dst_stride + i, dst_stride);
    }
  }
}

AMXK_INLINE void interleave32(const bf16* row0, const bf16* row1, bf16* even, bf16* odd) {
  for (int i = 0; i < 32; i += 16) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row0 + i));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row1 + i));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(even + i), _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xaa));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(odd + i), _mm256_blend_epi16(_mm256_srli_epi32(a, 16), b, 0xaa));
  }
}

AMXK_INLINE void store16(bf16* dst, V a) {
  const __m256i lo = _mm256_srli_epi32(round_bf16_8(a.lo), 16);
  const __m256i hi = _mm256_srli_epi32(round_bf16_8(a.hi), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(lo, hi), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst), packed);
}
AMXK_INLINE void store_row32(bf16* dst, V low, V high) {
  store16(dst, low);
  store16(dst + 16, high);
}
AMXK_INLINE void store32(bf16* dst, V even, V odd) { store_pairs(reinterpret_cast<uint32_t*>(dst), even, odd); }

}  // namespace
}  // namespace AMXK_TIER
}  // namespace amxk
