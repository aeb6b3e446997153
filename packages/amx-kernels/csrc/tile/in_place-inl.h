// SPDX-License-Identifier: Apache-2.0
// P V with V's rows as they lie in the cache, for the tiers without tiles: two rows become pairs in registers, for a panel
// of even columns and one of odd columns (the tier's pair_rows), so V is never written anywhere in another order.
#pragma once

namespace amxk {
namespace AMXK_TIER {
namespace {

#define AMXK_VALUES_IN_PLACE
constexpr int kInPlaceGroups = INT32_MAX;  // always: the compiler leaves the other way out

constexpr int kInPlaceRows = kRows[1];  // of a register block, by two panels

// Steps of a product at which rows can be fetched.
AMXK_INLINE int64_t in_place_steps(int64_t rows, int groups, int64_t panels) {
  return ceil_div(rows, kInPlaceRows) * groups * (panels / 2);
}

// Columns [first, first + 32) of all groups for one register block of rows.
template <bool kAccumulate, int MR>
AMXK_INLINE void in_place_block(const APrepared& p, int row, const RowGroup* v, int groups, int64_t first, float* c,
                                int64_t c_panel, Fetch& fetch) {
  Acc acc[MR][2];
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 2
    for (int n = 0; n < 2; ++n) acc[m][n] = kAccumulate ? acc_load(c + n * c_panel + m * kGroup) : acc_zero();
  }
  ARows<MR> rows;
  rows.start(p, row);
  for (int g = 0; g < groups; ++g) {
    fetch_step(fetch);
    const bf16* key = v[g].row + first;
    const int64_t stride = v[g].stride;
    for (int j = 0; j < kGroup / 2; ++j, key += 2 * stride, rows.next()) {
      BPair pairs[2];
      pair_rows(key, key + stride, pairs);
#pragma GCC unroll 16
      for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 2
        for (int n = 0; n < 2; ++n) acc[m][n] = mac(acc[m][n], rows, m, pairs[n]);
      }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 2
    for (int n = 0; n < 2; ++n) acc_store(c + n * c_panel + m * kGroup, acc[m][n]);
  }
}

// Rows from m on, in blocks as in gemm_panels.
template <bool kAccumulate, int MR>
AMXK_INLINE void in_place_rows(const APrepared& p, int m, int rows, const RowGroup* v, int groups, int64_t first, float* c,
                               int64_t c_panel, Fetch& fetch) {
  for (; m + MR / 2 < rows; m += MR) {
    in_place_block<kAccumulate, MR>(p, m, v, groups, first, c + m * kGroup, c_panel, fetch);
  }
  if constexpr (MR > 1) {
    if (m < rows) in_place_rows<kAccumulate, MR / 2>(p, m, rows, v, groups, first, c, c_panel, fetch);
  }
}

// p: the first group of `rows` rows of probabilities, the others follow. v: groups of keys, as many as kChunkSteps of p
// hold at most. panels: of C, two for 32 columns of V, the even and the odd ones. Further arguments as for gemm.
template <bool kAccumulate>
static __attribute__((noinline)) void gemm_values_in_place(RowGroup p, int rows, const RowGroup* v, int groups,
                                                           int64_t panels, float* c, int64_t c_panel, Fetch fetch) {
  APrepared prepared;
  for (; rows > 0; rows -= kGroup, p.row += kGroup * p.stride, c += kGroup * kGroup) {
    prepare(p, rows_read(min(rows, kGroup)), static_cast<int>(round_up(groups * kGroup, kStepK)), prepared);
    for (int64_t n = 0; n < panels; n += 2) {
      in_place_rows<kAccumulate, kInPlaceRows>(prepared, 0, min(rows, kGroup), v, groups, n * kGroup, c + n * c_panel,
                                               c_panel, fetch);
    }
  }
}

}  // namespace
}  // namespace AMXK_TIER
}  // namespace amxk
