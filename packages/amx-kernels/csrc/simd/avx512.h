// SPDX-License-Identifier: Apache-2.0
// Vector vocabulary, AVX-512 F/BW/VL/DQ: see simd/portable.h for what each word means. With AMXK_NATIVE_BF16 defined by
// the tier, rounding to bf16 uses AVX512-BF16 instructions.
#pragma once

#include <immintrin.h>
#include <math.h>

#include "base/common.h"

namespace amxk {
namespace AMXK_TIER {
namespace {

using V = __m512;

AMXK_INLINE V vload(const float* p) { return _mm512_loadu_ps(p); }
AMXK_INLINE void vstore(float* p, V a) { _mm512_storeu_ps(p, a); }
AMXK_INLINE V vset(float x) { return _mm512_set1_ps(x); }
AMXK_INLINE V vadd(V a, V b) { return _mm512_add_ps(a, b); }
AMXK_INLINE V vsub(V a, V b) { return _mm512_sub_ps(a, b); }
AMXK_INLINE V vmul(V a, V b) { return _mm512_mul_ps(a, b); }
AMXK_INLINE V vfma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
AMXK_INLINE V vmax(V a, V b) { return _mm512_max_ps(a, b); }
AMXK_INLINE V vselect_gt(V a, V b, V x, V y) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), y, x);
}
AMXK_INLINE V vmask(V s, int key, const int32_t* limit) {
  const __mmask16 live = _mm512_cmpgt_epi32_mask(_mm512_loadu_si512(limit), _mm512_set1_epi32(key));
  return _mm512_mask_blend_ps(live, _mm512_set1_ps(-INFINITY), s);
}
AMXK_INLINE bool vany_gt(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }

// 2^x = 2^floor(x) * 2^f with f = x - floor(x) from VREDUCE; VSCALEF takes the floor by itself. Both know infinities:
// 2^-inf is 0. The polynomial is the minimax one on [0, 1] with p(0) = 1, 1.7e-7 off at most.
AMXK_INLINE V vexp2(V x) {
  const V f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  V p = _mm512_set1_ps(1.8671302e-3f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.0170298e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5799913e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4016444e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9315130e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, x);
}

#ifndef AMXK_NATIVE_BF16
// fp32 to the upper half of each word, rounded to nearest even, NaN kept.
AMXK_INLINE __m512i round_bf16_16(V x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  return _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), bits, _mm512_set1_epi32(0x400000));
}
#endif

AMXK_INLINE __m512i pairs_16(V a, V b) {
#ifdef AMXK_NATIVE_BF16
  // VCVTNE2PS2BF16 puts a's 16 values in the lower half and b's in the upper; one VPERMW makes pairs.
  const __m512i halves = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a));
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, halves);
#else
  return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(round_bf16_16(a), 16), round_bf16_16(b));
#endif
}
AMXK_INLINE void store_pairs(uint32_t* dst, V a, V b) { _mm512_storeu_si512(dst, pairs_16(a, b)); }

// Four rounds of pairwise exchanges: words, pairs of words within 128-bit lanes, then whole lanes twice.
AMXK_INLINE void transpose16(const uint32_t* src, int64_t src_stride, uint32_t* dst, int64_t dst_stride) {
  __m512i r[16], t[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(src + i * src_stride);
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    _mm512_storeu_si512(dst + i * dst_stride, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
    _mm512_storeu_si512(dst + (i + 8) * dst_stride, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
    _mm512_storeu_si512(dst + (i + 4) * dst_stride, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88));
    _mm512_storeu_si512(dst + (i + 12) * dst_stride, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd));
  }
}

// Pairs of the even columns of two rows of 32, and of the odd ones. Two shifts and two blends, all within their words; the
// output needs no shuffle either, because an even and an odd column are the two halves of a word.
AMXK_INLINE void pair32(const bf16* row0, const bf16* row1, __m512i& even, __m512i& odd) {
  const __m512i a = _mm512_loadu_si512(row0);
  const __m512i b = _mm512_loadu_si512(row1);
  even = _mm512_mask_blend_epi16(0xaaaaaaaa, a, _mm512_slli_epi32(b, 16));
  odd = _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(a, 16), b);
}
AMXK_INLINE void interleave32(const bf16* row0, const bf16* row1, bf16* even, bf16* odd) {
  __m512i evens, odds;
  pair32(row0, row1, evens, odds);
  _mm512_storeu_si512(even, evens);
  _mm512_storeu_si512(odd, odds);
}

AMXK_INLINE void store16(bf16* dst, V a) {
#ifdef AMXK_NATIVE_BF16
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a)));
#else
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst), _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_bf16_16(a), 16)));
#endif
}
AMXK_INLINE void store_row32(bf16* dst, V low, V high) {
#ifdef AMXK_NATIVE_BF16
  _mm512_storeu_si512(dst, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
#else
  store16(dst, low);
  store16(dst + 16, high);
#endif
}
AMXK_INLINE void store32(bf16* dst, V even, V odd) { store_pairs(reinterpret_cast<uint32_t*>(dst), even, odd); }

}  // namespace
}  // namespace AMXK_TIER
}  // namespace amxk
