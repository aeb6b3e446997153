// SPDX-License-Identifier: Apache-2.0
// The one matrix product every op is made of, for the tiers without tiles:
//
//   C[m][n] (+)= sum_k A[m][k] * B[k][n]
//
// A: groups of 16 rows of bf16 (rows of the cache, of probabilities or of activations), as they lie in memory;
// B: panels of 16 columns, rows in pairs: panel[k/2][n][k%2] bf16, the order VDPBF16PS and TDPBF16PS want, at the
//    distances that Panels names;
// C: panels of 16 fp32 columns, row after row: c[panel][m][16], so a row of a panel is one cache line; or, once the last
//    step is done, rows of bf16, from registers (result-inl.h).
//
// Sums run over k in one order for every shape, so a row's result does not depend on its neighbours.
//
// The including tier supplies Acc (of kAccRows rows), BPair, APrepared, ARows and: acc_zero, acc_load, acc_store, acc_row,
// b_load, prepare, mac, how many steps of k go together (kChunkSteps), and the register blocks kRows[panels - 1] (rows per
// block when 1, 2 or 4 panels are processed together), kMaxPanels.
#pragma once

#include "tile/fetch-inl.h"
#include "tile/result-inl.h"

namespace amxk {
namespace AMXK_TIER {
namespace {

template <bool kAccumulate, int MR, int NR, class Result>
AMXK_INLINE void gemm_block(const APrepared& a, int row, int k_steps, const Panels& b, float* c, int64_t c_panel,
                            Fetch& fetch, const Result& result) {
  constexpr int MA = MR / kAccRows;
  Acc acc[MA][NR];
#pragma GCC unroll 16
  for (int m = 0; m < MA; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < NR; ++n) acc[m][n] = kAccumulate ? acc_load(c + n * c_panel + m * kAccRows * kGroup) : acc_zero();
  }
  ARows<MR> rows;
  rows.start(a, row);
  const bf16* step = b.at;
  for (int k = 0; k < k_steps; ++k, step += b.step) {
    fetch_step(fetch);
    const bf16* line = step;
    for (int j = 0; j < kStepK / 2; ++j, line += b.pair, rows.next()) {
      BPair bj[NR];
#pragma GCC unroll 4
      for (int n = 0; n < NR; ++n) bj[n] = b_load(line + n * b.panel);
#pragma GCC unroll 16
      for (int m = 0; m < MA; ++m) {
#pragma GCC unroll 4
        for (int n = 0; n < NR; ++n) acc[m][n] = mac(acc[m][n], rows, m, bj[n]);
      }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < MA; ++m) {
    if constexpr (Result::kRounds) {
#pragma GCC unroll 2
      for (int r = 0; r < kAccRows; ++r) {
        if (m * kAccRows + r >= result.rows) return;
        V panels[NR];
#pragma GCC unroll 4
        for (int n = 0; n < NR; ++n) panels[n] = acc_row(acc[m][n], r);
        result.template store<NR>(m * kAccRows + r, panels);
      }
    } else {
#pragma GCC unroll 4
      for (int n = 0; n < NR; ++n) acc_store(c + n * c_panel + m * kAccRows * kGroup, acc[m][n]);
    }
  }
}

// Rows from m on, in blocks of MR; what is left at the end goes into one block of MR, MR / 2, MR / 4 ... rows.
template <bool kAccumulate, int MR, int NR, class Result>
AMXK_INLINE void gemm_panels(const APrepared& a, int m, int rows, int k_steps, const Panels& b, float* c,
                             int64_t c_panel, Fetch& fetch, const Result& result) {
  constexpr bool kLast = MR == kAccRows;
  for (; m + (kLast ? 0 : MR / 2) < rows; m += MR) {
    gemm_block<kAccumulate, MR, NR>(a, m, k_steps, b, c + m * kGroup, c_panel, fetch, result.at(m, 0));
  }
  if constexpr (!kLast) {
    if (m < rows) {
      gemm_panels<kAccumulate, MR / 2, NR>(a, m, rows, k_steps, b, c, c_panel, fetch, result);
    }
  }
}

// Panels first: as many at a time as the tier has registers for, then the rest.
template <bool kAccumulate, int NR, class Result>
AMXK_INLINE void gemm_group(const APrepared& a, int rows, int k_steps, const Panels& b, int panels, float* c,
                            int64_t c_panel, Fetch& fetch, const Result& result) {
  int n = 0;
  for (; n + NR <= panels; n += NR) {
    gemm_panels<kAccumulate, kRows[NR - 1], NR>(a, 0, rows, k_steps, b.from(n), c + n * c_panel, c_panel,
                                                fetch, result.at(0, n * kGroup));
  }
  if constexpr (NR > 1) {
    if (n < panels) {
      gemm_group<kAccumulate, NR / 2>(a, rows, k_steps, b.from(n), panels - n, c + n * c_panel, c_panel,
                                      fetch, result.at(0, n * kGroup));
    }
  }
}

constexpr bool kFetchInProduct = true;

// Rows of a group that are read where n of them exist: blocks halve until they fit.
AMXK_INLINE constexpr int rows_read(int n) {
  int all = kAccRows;
  while (all < n) all *= 2;
  return all;
}

// Steps of a product at which rows can be fetched (panels: a multiple of kMaxPanels).
AMXK_INLINE int64_t product_steps(int64_t rows, int k_steps, int panels) {
  return ceil_div(rows, kRows[kMaxPanels - 1]) * k_steps * (panels / kMaxPanels);
}

// rows: of A and C; whatever follows them up to rows_read is read but not relied upon, and may be written. k_steps: steps of
// kStepK along k. fetch: rows to fetch meanwhile. result: what becomes of C, which holds the sums until then.
template <bool kAccumulate, class Result = Keep>
static __attribute__((noinline)) void gemm(const RowGroup* a, int rows, int k_steps, const Panels& b, int panels,
                                           float* c, int64_t c_panel, Fetch* fetch = nullptr, const Result& result = {}) {
  APrepared prepared;
  Fetch meanwhile = fetch != nullptr ? *fetch : Fetch{};  // a copy, to be kept in registers
  for (int g = 0; rows > 0; ++g, rows -= kGroup, c += kGroup * kGroup) {
    for (int k = 0; k < k_steps; k += kChunkSteps) {
      const int steps = min(kChunkSteps, k_steps - k);
      prepare({a[g].row + k * kStepK, a[g].stride}, rows_read(min(rows, kGroup)), steps * kStepK, prepared);
      const auto multiply = [&](auto to) {
        using To = decltype(to);
        const auto product = kAccumulate || k > 0 ? gemm_group<true, kMaxPanels, To> : gemm_group<false, kMaxPanels, To>;
        product(prepared, min(rows, kGroup), steps, b.from_step(k), panels, c, c_panel, meanwhile, to);
      };
      if (k + steps < k_steps) {
        multiply(Keep{});
      } else {
        multiply(result.at(g * kGroup, 0));
      }
    }
  }
  if (fetch != nullptr) *fetch = meanwhile;
}

// Nothing to set up per thread without tiles.
struct TileScope {
  TileScope() {}
};

}  // namespace
}  // namespace AMXK_TIER
}  // namespace amxk
