// SPDX-License-Identifier: Apache-2.0
// Rows wanted soon, fetched into L2 one by one while a product runs: memory is then read during the whole of it. In one
// burst they would fill the core's line-fill buffers, and the loads of the product would queue behind them.
#pragma once

#include "base/common.h"

namespace amxk {
namespace AMXK_TIER {
namespace {

struct Fetch {
  const RowGroup* groups;
  int rows;       // that the groups hold
  int64_t width;  // of a row, in elements
  int64_t pause;  // steps from row to row
  int row = 0;    // the next one
  int64_t step = 0;
};

// steps: how many there will be; the rows are spread over them.
AMXK_INLINE Fetch fetch_rows(const RowGroup* groups, int rows, int64_t width, int64_t steps) {
  return {groups, rows, width, max<int64_t>(1, steps / max(1, rows))};
}

AMXK_INLINE void fetch_step(Fetch& f) {
  if (f.row == f.rows || ++f.step < f.pause) return;
  const RowGroup& g = f.groups[f.row / kGroup];
  const bf16* row = g.row + f.row % kGroup * g.stride;
  for (int64_t column = 0; column < f.width; column += kStepK) prefetch(row + column);
  ++f.row;
  f.step = 0;
}

}  // namespace
}  // namespace AMXK_TIER
}  // namespace amxk
