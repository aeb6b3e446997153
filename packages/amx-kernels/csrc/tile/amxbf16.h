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
#include "tile/fetch-inl.h"
#include "tile/result-inl.h"

namespace amxk {
namespace AMXK_TIER {
namespace {

constexpr int64_t kLine = 64;  // bytes from one row of a C or B tile to the next

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
AMXK_INLINE void gemm_tiles(const RowGroup* a, int k_steps, const Panels& b, float* c, int64_t c_panel) {
  static_assert(MT * NT <= 4, "four accumulator tiles");
  const auto c_tile = [=](int t) { return c + t % NT * c_panel + t / NT * (kGroup * kGroup); };

  for_index<MT * NT>([&](auto t) {
    constexpr int T = decltype(t)::value;
    if constexpr (kAccumulate) {
      tile_load<T>(c_tile(T), kLine);
    } else {
      tile_zero<T>();
    }
  });
  const int64_t b_line = b.pair * static_cast<int64_t>(sizeof(bf16));
  for (int k = 0; k < k_steps; ++k) {
    for_index<MT * NT>([&](auto t) {
      constexpr int T = decltype(t)::value, M = T / NT, N = T % NT;
      if constexpr (N == 0) {
        tile_load<4 + M % 2>(a[M].row + k * kStepK, a[M].stride * static_cast<int64_t>(sizeof(bf16)));
      }
      if constexpr (M == 0) tile_load<6 + N % 2>(b.from(N).from_step(k).at, b_line);
      tile_dpbf16<T, 4 + M % 2, 6 + N % 2>();
    });
  }
  for_index<MT * NT>([&](auto t) {
    constexpr int T = decltype(t)::value;
    tile_store<T>(c_tile(T), kLine);
  });
}

// Tile loads leave no line-fill buffer to spare: rows are fetched between products.
constexpr bool kFetchInProduct = false;
constexpr int kMaxPanels = 4;
AMXK_INLINE constexpr int rows_read(int) { return kGroup; }  // whole tiles
AMXK_INLINE int64_t product_steps(int64_t, int, int) { return 0; }

template <bool kAccumulate, class Result = Keep>
static __attribute__((noinline)) void gemm(const RowGroup* a, int rows, int k_steps, const Panels& b, int panels,
                                           float* c, int64_t c_panel, Fetch* = nullptr, const Result& result = {}) {
  const int groups = static_cast<int>(ceil_div(rows, kGroup));
  const auto product = [=](auto mt, auto nt, int m, int n) {
    gemm_tiles<kAccumulate, decltype(mt)::value, decltype(nt)::value>(
        a + m, k_steps, b.from(n), c + n * c_panel + m * (kGroup * kGroup), c_panel);
  };
  int n = 0;
  if (groups > 1) {
    for (; n + 2 <= panels; n += 2) {
      int m = 0;
      for (; m + 2 <= groups; m += 2) product(Index<2>{}, Index<2>{}, m, n);
      if (m < groups) product(Index<1>{}, Index<2>{}, m, n);
    }
  } else {
    for (; n + 4 <= panels; n += 4) product(Index<1>{}, Index<4>{}, 0, n);
    if (n + 2 <= panels) {
      product(Index<1>{}, Index<2>{}, 0, n);
      n += 2;
    }
  }
  if (n < panels) {
    int m = 0;
    for (; m + 4 <= groups; m += 4) product(Index<4>{}, Index<1>{}, m, n);
    for (; m < groups; ++m) product(Index<1>{}, Index<1>{}, m, n);
  }
  if constexpr (Result::kRounds) {
    for (int m = 0; m < rows; ++m) {
      const float* row = c + m * kGroup;
      int n = 0;
      for (; n + 2 <= panels; n += 2, row += 2 * c_panel) {
        const V both[] = {vload(row), vload(row + c_panel)};
        result.at(0, n * kGroup).template store<2>(m, both);
      }
      if (n < panels) {
        const V last = vload(row);
        result.at(0, n * kGroup).template store<1>(m, &last);
      }
    }
  }
}

// With one group of rows of P, interleaving V costs more than it saves: V's rows serve as B tiles as they lie, and P
// stands in every other 16-bit lane, so that each product picks the even or the odd columns. Half of the multiplications
// are by zero; 1600 instead of 1088 TMUL cycles for 32 keys, and no vector work at all.
#define AMXK_VALUES_IN_PLACE
#define AMXK_SPREAD_PROBABILITIES
constexpr int kInPlaceGroups = 1;
AMXK_INLINE int64_t in_place_steps(int64_t, int, int64_t) { return 0; }

// Bytes of P in this form: an even and an odd tile for each group of 16 keys.
constexpr int64_t kSpreadGroup = 2 * kGroup * kStepK;  // elements

// p: [16 keys][16 rows] fp32. to: the even tile [16 rows][16 keys] of (p, 0), then the odd one of (0, p).
AMXK_INLINE void spread_probabilities(const float* p, bf16* to) {
  alignas(64) uint32_t rounded[kGroup * kGroup], rows[kGroup * kGroup];
  for (int k = 0; k < kGroup; ++k) store_pairs(rounded + k * kGroup, vload(p + k * kGroup), vset(0.0f));
  transpose16(rounded, kGroup, rows, kGroup);
  for (int r = 0; r < kGroup; ++r) {
    const __m512i even = _mm512_load_si512(rows + r * kGroup);
    _mm512_storeu_si512(to + r * kStepK, even);
    _mm512_storeu_si512(to + (kGroup + r) * kStepK, _mm512_slli_epi32(even, 16));
  }
}

// C[even and odd panel of 32 columns each] (+)= P V for `chunks` (1 or 2) chunks of 32 columns of the groups' rows,
// from column `first` on. next: rows to fetch meanwhile, num_next groups of them.
template <bool kAccumulate, int kChunks>
AMXK_INLINE void values_in_place(const bf16* spread, const RowGroup* v, int groups, int64_t first, const RowGroup* next,
                                 int num_next, float* c, int64_t c_panel) {
  for_index<2 * kChunks>([&](auto t) {
    constexpr int T = decltype(t)::value;
    if constexpr (kAccumulate) {
      tile_load<T>(c + T * c_panel, kLine);
    } else {
      tile_zero<T>();
    }
  });
  for (int g = 0; g < groups; ++g) {
    const int64_t stride = v[g].stride * static_cast<int64_t>(sizeof(bf16));
    tile_load<4>(spread + g * kSpreadGroup, kLine);
    tile_load<6>(v[g].row + first, stride);
    tile_dpbf16<0, 4, 6>();
    tile_load<5>(spread + g * kSpreadGroup + kSpreadGroup / 2, kLine);
    tile_dpbf16<1, 5, 6>();
    if constexpr (kChunks > 1) {
      tile_load<7>(v[g].row + first + kStepK, stride);
      tile_dpbf16<2, 4, 7>();
      tile_dpbf16<3, 5, 7>();
    }
    if (g < num_next) {
      for (int i = 0; i < kGroup; ++i) {
        const bf16* row = next[g].row + i * next[g].stride + first;
        prefetch(row);
        if constexpr (kChunks > 1) prefetch(row + kStepK);
      }
    }
  }
  for_index<2 * kChunks>([&](auto t) {
    constexpr int T = decltype(t)::value;
    tile_store<T>(c + T * c_panel, kLine);
  });
}

// p: spread. fetch: rows to fetch meanwhile, the same columns as are multiplied.
template <bool kAccumulate>
static __attribute__((noinline)) void gemm_values_in_place(RowGroup p, int, const RowGroup* v, int groups,
                                                           int64_t panels, float* c, int64_t c_panel, Fetch fetch) {
  const int num_next = static_cast<int>(ceil_div(fetch.rows, kGroup));
  int64_t n = 0;
  for (; n + 4 <= panels; n += 4) {
    values_in_place<kAccumulate, 2>(p.row, v, groups, n * kGroup, fetch.groups, num_next, c + n * c_panel, c_panel);
  }
  for (; n < panels; n += 2) {
    values_in_place<kAccumulate, 1>(p.row, v, groups, n * kGroup, fetch.groups, num_next, c + n * c_panel, c_panel);
  }
}

}  // namespace
}  // namespace AMXK_TIER
}  // namespace amxk
