// SPDX-License-Identifier: Apache-2.0
// Vector vocabulary, plain C++. A vector is 16 fp32 lanes on every tier, so each algorithm is written once; loops over
// the lanes are left to the compiler. Include with AMXK_TIER defined as the tier's namespace.
#pragma once

#include <math.h>

#include "base/common.h"

namespace amxk {
namespace AMXK_TIER {
namespace {

struct V {
  float lane[16];
};

#define AMXK_LANES(expression)                       \
  V r;                                               \
  for (int i = 0; i < 16; ++i) r.lane[i] = (expression); \
  return r

AMXK_INLINE V vload(const float* p) { AMXK_LANES(p[i]); }
AMXK_INLINE void vstore(float* p, V a) { memcpy(p, a.lane, sizeof a.lane); }
AMXK_INLINE V vset(float x) { AMXK_LANES(x); }
AMXK_INLINE V vadd(V a, V b) { AMXK_LANES(a.lane[i] + b.lane[i]); }
AMXK_INLINE V vsub(V a, V b) { AMXK_LANES(a.lane[i] - b.lane[i]); }
AMXK_INLINE V vmul(V a, V b) { AMXK_LANES(a.lane[i] * b.lane[i]); }
AMXK_INLINE V vfma(V a, V b, V c) { AMXK_LANES(a.lane[i] * b.lane[i] + c.lane[i]); }
AMXK_INLINE V vmax(V a, V b) { AMXK_LANES(a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]); }
// a > b ? x : y, lane by lane; a comparison with NaN is false.
AMXK_INLINE V vselect_gt(V a, V b, V x, V y) { AMXK_LANES(a.lane[i] > b.lane[i] ? x.lane[i] : y.lane[i]); }
// Lanes whose limit is at most `key` become -inf: selected, never multiplied, since 0 x NaN is NaN.
AMXK_INLINE V vmask(V s, int key, const int32_t* limit) { AMXK_LANES(key < limit[i] ? s.lane[i] : -INFINITY); }

AMXK_INLINE bool vany_gt(V a, V b) {
  bool any = false;
  for (int i = 0; i < 16; ++i) any |= a.lane[i] > b.lane[i];
  return any;
}

// 2^x for x <= 127. x = n + f with n the nearest integer, found by adding 1.5 x 2^23; 2^f by a polynomial of degree 6
// (relative error 1e-7 on [-1/2, 1/2]). Below -126 the result is 0, which flushes what would be subnormal.
AMXK_INLINE V vexp2(V x) {
  constexpr float kMagic = 12582912.0f;
  V r;
  for (int i = 0; i < 16; ++i) {
    const float t = x.lane[i] < -126.0f ? -126.0f : x.lane[i];
    const float n = t + kMagic;
    const float f = t - (n - kMagic);
    float p = 1.5353362e-4f;
    p = p * f + 1.3398874e-3f;
    p = p * f + 9.6184373e-3f;
    p = p * f + 5.5503324e-2f;
    p = p * f + 2.4022648e-1f;
    p = p * f + 6.9314720e-1f;
    p = p * f + 1.0f;
    uint32_t bits;
    memcpy(&bits, &n, sizeof bits);
    bits = (bits << 23) + 0x3f800000u;
    float power;
    memcpy(&power, &bits, sizeof power);
    r.lane[i] = x.lane[i] < -126.0f ? 0.0f : p * power;
  }
  return r;
}

// Lane i of dst: the bf16 pair (a[i], b[i]).
AMXK_INLINE void store_pairs(uint32_t* dst, V a, V b) {
  for (int i = 0; i < 16; ++i) {
    dst[i] = float_to_bf16(a.lane[i]) | static_cast<uint32_t>(float_to_bf16(b.lane[i])) << 16;
  }
}

// dst[j][i] = src[i][j] for a 16 x 16 block of 32-bit words (bf16 pairs); strides in words.
AMXK_INLINE void transpose16(const uint32_t* src, int64_t src_stride, uint32_t* dst, int64_t dst_stride) {
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 16; ++j) {
      uint32_t word;
      memcpy(&word, src + i * src_stride + j, sizeof word);
      dst[j * dst_stride + i] = word;
    }
  }
}

// Thirty-two columns of two rows become one line of row pairs in each of two panels: the even columns in the first, the
// odd ones in the second. store32 puts such panels back in order. By words of two columns, which compilers vectorise.
AMXK_INLINE void interleave32(const bf16* row0, const bf16* row1, bf16* even, bf16* odd) {
  uint32_t a[16], b[16];
  memcpy(a, row0, sizeof a);
  memcpy(b, row1, sizeof b);
  for (int i = 0; i < 16; ++i) {
    const uint32_t first = (a[i] & 0xffffu) | b[i] << 16, second = a[i] >> 16 | (b[i] & 0xffff0000u);
    a[i] = first;
    b[i] = second;
  }
  memcpy(even, a, sizeof a);
  memcpy(odd, b, sizeof b);
}

AMXK_INLINE void store32(bf16* dst, V even, V odd) {
  for (int i = 0; i < 16; ++i) {
    dst[2 * i] = float_to_bf16(even.lane[i]);
    dst[2 * i + 1] = float_to_bf16(odd.lane[i]);
  }
}

// Sixteen columns in natural order.
AMXK_INLINE void store16(bf16* dst, V a) {
  for (int i = 0; i < 16; ++i) dst[i] = float_to_bf16(a.lane[i]);
}

// Thirty-two: where the hardware can, in one store, which a load of the same size can be served from at once.
AMXK_INLINE void store_row32(bf16* dst, V low, V high) {
  store16(dst, low);
  store16(dst + 16, high);
}

#undef AMXK_LANES

}  // namespace
}  // namespace AMXK_TIER
}  // namespace amxk
