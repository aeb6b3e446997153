// SPDX-License-Identifier: Apache-2.0
// Operands of the tiers that multiply in fp32: a group of A rows is widened once into scratch and then broadcast from
// there; B pairs are split into even and odd rows in registers (a bf16 in the upper half of a word is that fp32).
// The including tier supplies Acc, BPair, multiply_pair and widen_row.
#pragma once

namespace amxk {
namespace AMXK_TIER {
namespace {

struct APrepared {
  const float* rows;  // [16, stride] fp32
  int64_t stride;
};

// An odd number of cache lines, so that 16 rows do not fall into the same cache sets.
AMXK_INLINE int64_t widened_stride(int64_t k) { return k + 16; }

AMXK_INLINE size_t gemm_scratch_bytes(int64_t k_steps) {
  return static_cast<size_t>(kGroup * widened_stride(k_steps * kStepK)) * sizeof(float);
}

AMXK_INLINE APrepared prepare(RowGroup group, int k, void* scratch) {
  float* rows = static_cast<float*>(scratch);
  const int64_t stride = widened_stride(k);
  for (int i = 0; i < kGroup; ++i) widen_row(group.row + i * group.stride, k, rows + i * stride);
  return {rows, stride};
}

AMXK_INLINE Acc mac(Acc acc, APrepared a, int m, int j, BPair b) {
  return multiply_pair(acc, a.rows + m * a.stride + 2 * j, b);
}

}  // namespace
}  // namespace AMXK_TIER
}  // namespace amxk
