// SPDX-License-Identifier: Apache-2.0
// Matrix product, AMX-BF16: see tile/vector_gemm-inl.h for the operands. A groups are A tiles and B panels are columns
// of B tiles exactly as they lie in memory.
//
// Four accumulators hide the 52 cycles of TDPBF16PS: 2 x 2 (one tile load per product), or 4 x 1 and 1 x 4 where one
// side is a single tile (1.25 loads per product, 10.5 of 16 cycles).
#pragma once

#define AMXK_NATIVE_BF16
#include "simd/avx512.h"
#include "tile/amx_tiles.h"

namespace amxk {
namespace AMXK_TIER {
namespace {

constexpr int64_t kLine = 64;  // bytes from one row of a C or B tile to the next

AMXK_INLINE size_t gemm_scratch_bytes(int64_t) { return 0; }

template <int I>
struct Index {
  static constexpr int value = I;
};

// f(Index<0>) ... f(Index<N - 1>): tile numbers must be compile-time constants.
template <int N, int I = 0, class F>
AMXK_INLINE void for_index(F f) {
  if constexpr (I < N) {
    f(Index<I>{});
    for_index<N, I + 1>(f);
  }
}

// MT x NT tiles of C. Tiles 0-3: C. Tiles 4, 5: A. Tiles 6, 7: B. The longer side alternates between its two.
template <bool kAccumulate, int MT, int NT>
AMXK_INLINE void gemm_tiles(const RowGroup* a, int k_steps, const bf16* b, int64_t b_stride, float* c,
                            int64_t c_stride) {
  static_assert(MT * NT <= 4, "four accumulator tiles");
  const auto c_tile = [=](int t) { return c + t % NT * c_stride + t / NT * (kGroup * kGroup); };

  for_index<MT * NT>([&](auto t) {
    constexpr int T = decltype(t)::value;
    if constexpr (kAccumulate) {
      tile_load<T>(c_tile(T), kLine);
    } else {
      tile_zero<T>();
    }
  });
  for (int k = 0; k < k_steps; ++k) {
    for_index<MT * NT>([&](auto t) {
      constexpr int T = decltype(t)::value, M = T / NT, N = T % NT;
      if constexpr (N == 0) {
        tile_load<4 + M % 2>(a[M].row + k * kStepK, a[M].stride * static_cast<int64_t>(sizeof(bf16)));
      }
      if constexpr (M == 0) tile_load<6 + N % 2>(b + N * b_stride + k * (kStepK * kGroup), kLine);
      tile_dpbf16<T, 4 + M % 2, 6 + N % 2>();
    });
  }
  for_index<MT * NT>([&](auto t) {
    constexpr int T = decltype(t)::value;
    tile_store<T>(c_tile(T), kLine);
  });
}

template <bool kAccumulate>
static __attribute__((noinline)) void gemm(const RowGroup* a, int groups, int k_steps, const bf16* b,
                                           int64_t b_stride, int panels, float* c, int64_t c_stride, void*) {
  constexpr int64_t kTile = kGroup * kGroup;
  int n = 0;
  for (; n + 2 <= panels && groups > 1; n += 2) {
    const bf16* bn = b + n * b_stride;
    float* cn = c + n * c_stride;
    int m = 0;
    for (; m + 2 <= groups; m += 2) {
      gemm_tiles<kAccumulate, 2, 2>(a + m, k_steps, bn, b_stride, cn + m * kTile, c_stride);
    }
    if (m < groups) gemm_tiles<kAccumulate, 1, 2>(a + m, k_steps, bn, b_stride, cn + m * kTile, c_stride);
  }
  for (; n + 4 <= panels; n += 4) {
    gemm_tiles<kAccumulate, 1, 4>(a, k_steps, b + n * b_stride, b_stride, c + n * c_stride, c_stride);
  }
  for (; n + 2 <= panels; n += 2) {
    gemm_tiles<kAccumulate, 1, 2>(a, k_steps, b + n * b_stride, b_stride, c + n * c_stride, c_stride);
  }
  if (n < panels) {
    const bf16* bn = b + n * b_stride;
    float* cn = c + n * c_stride;
    int m = 0;
    for (; m + 4 <= groups; m += 4) {
      gemm_tiles<kAccumulate, 4, 1>(a + m, k_steps, bn, b_stride, cn + m * kTile, c_stride);
    }
    for (; m < groups; ++m) gemm_tiles<kAccumulate, 1, 1>(a + m, k_steps, bn, b_stride, cn + m * kTile, c_stride);
  }
}

}  // namespace
}  // namespace AMXK_TIER
}  // namespace amxk
