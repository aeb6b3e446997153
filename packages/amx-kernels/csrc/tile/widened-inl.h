// SPDX-License-Identifier: Apache-2.0
// Operands of the tiers that multiply in fp32: a group of A rows is widened once and then broadcast from
// memory; B pairs are split into even and odd rows in registers (a bf16 in the upper half of a word is that fp32). A's
// pairs are split in the same way, a shift and a mask and no shuffle: the even elements of a row, then the odd ones.
// The including tier supplies widen_row.
#pragma once

namespace amxk {
namespace AMXK_TIER {
namespace {

// k goes in chunks of 256: the widened rows, 17 KB, and the chunk of a B panel, 8 KB, then stay in L1 together. An odd
// number of cache lines from row to row, so that 16 rows do not fall into the same sets; a constant one, so that rows are
// offsets of one pointer.
constexpr int kChunkSteps = 8;
constexpr int64_t kOdd = kChunkSteps * kStepK / 2;
constexpr int64_t kWidenedStride = kChunkSteps * kStepK + 16;

AMXK_INLINE void widen_row(const bf16* row, int k, float* even, float* odd);

struct APrepared {
  alignas(64) float rows[kGroup * kWidenedStride];
};

AMXK_INLINE void prepare(RowGroup group, int rows, int k, APrepared& a) {
  for (int i = 0; i < rows; ++i) {
    float* row = a.rows + i * kWidenedStride;
    widen_row(group.row + i * group.stride, k, row, row + kOdd);
  }
}

// Rows of A as a register block reads them, pair by pair.
template <int MR>
struct ARows {
  const float* row;

  AMXK_INLINE_MEMBER void start(const APrepared& a, int first) { row = a.rows + first * kWidenedStride; }
  AMXK_INLINE_MEMBER void next() { ++row; }
};

}  // namespace
}  // namespace AMXK_TIER
}  // namespace amxk
