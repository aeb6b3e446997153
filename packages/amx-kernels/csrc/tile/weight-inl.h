// SPDX-License-Identifier: Apache-2.0
// The order of packed weights: panels go in blocks of four (the last block: what is left), block[k/2][panel][column][k%2].
// With few rows a product reads each weight once, at the speed of memory, and one run of addresses is what hardware fetches
// best: four runs at a time, a panel each, take up to half as long again from DRAM.
#pragma once

namespace amxk {
namespace AMXK_TIER {
namespace {

constexpr int kWeightPanels = 4;

AMXK_INLINE int64_t packed_size(int64_t panels, int64_t depth) { return panels * depth * kGroup; }

// Where panel n begins, and how far its pairs of rows lie apart, in elements. depth: padded to 32.
AMXK_INLINE int64_t packed_offset(int64_t n, int64_t depth) {
  const int64_t in_block = n % kWeightPanels;
  return packed_size(n - in_block, depth) + in_block * 2 * kGroup;
}
AMXK_INLINE int64_t packed_pair(int64_t n, int64_t panels) {
  return min<int64_t>(kWeightPanels, panels - (n - n % kWeightPanels)) * 2 * kGroup;
}

// A block of panels, from its first, n, on.
AMXK_INLINE Panels packed_block(const bf16* weight, int64_t n, int64_t panels, int64_t depth) {
  const int64_t pair = packed_pair(n, panels);
  return {weight + packed_offset(n, depth), 2 * kGroup, kStepK / 2 * pair, pair};
}

}  // namespace
}  // namespace AMXK_TIER
}  // namespace amxk
