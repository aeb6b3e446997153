// SPDX-License-Identifier: Apache-2.0
// What every layer shares. Nothing here may become a weak symbol: tier objects are compiled with flags that not every
// CPU can run, and the linker keeps whichever copy of an inline function it meets first. Hence always_inline, or
// internal linkage, and no standard library containers or algorithms in any file a tier object includes.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define AMXK_INLINE_MEMBER inline __attribute__((always_inline))
#define AMXK_INLINE static AMXK_INLINE_MEMBER

namespace amxk {

using bf16 = uint16_t;  // the bits of a bfloat16

template <class T>
AMXK_INLINE constexpr T min(T a, T b) {
  return b < a ? b : a;
}

template <class T>
AMXK_INLINE constexpr T max(T a, T b) {
  return a < b ? b : a;
}

// Fetches a line into L2, where the next key block is wanted.
AMXK_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

AMXK_INLINE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
AMXK_INLINE constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

AMXK_INLINE float bf16_to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

// Round to nearest even; a NaN stays a NaN (the increment alone could carry its mantissa away).
AMXK_INLINE bf16 float_to_bf16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16>((bits >> 16) | 0x40);
  return static_cast<bf16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Copies n elements in order. Rows here are short (64 to 576 elements): calling the C library for each would cost as much
// again, and glibc copies some of them backwards, which no hardware prefetcher expects of rows that follow each other.
AMXK_INLINE void copy_elements(bf16* to, const bf16* from, int64_t n) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) memcpy(to + i, from + i, 16 * sizeof(bf16));
  for (; i < n; ++i) to[i] = from[i];
}

// Sixteen rows of bf16 at a constant stride in elements: what one AMX A tile holds, on every tier.
struct RowGroup {
  const bf16* row;
  int64_t stride;
};

constexpr int kGroup = 16;  // rows in a group, columns in a panel, fp32 lanes of a vector
constexpr int kStepK = 32;  // the inner dimension is processed in steps of 32 bf16: one AMX tile row

// Panels of 16 columns, their rows in pairs. Distances in elements: from panel to panel, from 32 rows to the next 32, and
// from pair to pair.
struct Panels {
  const bf16* at;
  int64_t panel, step, pair = 2 * kGroup;

  AMXK_INLINE_MEMBER Panels from(int64_t n) const { return {at + n * panel, panel, step, pair}; }
  AMXK_INLINE_MEMBER Panels from_step(int64_t k) const { return {at + k * step, panel, step, pair}; }
};

constexpr float kLog2e = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

}  // namespace amxk
