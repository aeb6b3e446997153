// SPDX-License-Identifier: Apache-2.0
// The kernels' own matrix product on tiles, over every block shape it chooses, against a scalar one. Inputs are small
// integers, so the result is exact. Exits with 0 if all is right; the test builds it against mutated copies of the
// kernels' headers too.
#include <stdio.h>
#include <stdlib.h>

#define AMXK_TIER amxbf16
#include "tile/amxbf16.h"

using namespace amxk;
using namespace amxk::amxbf16;

enum { kGroups = 5, kPanels = 6, kSteps = 3, kInner = kSteps * kStepK, kStride = kInner + 32 };

static bf16 a[kGroups * kGroup][kStride];                   // rows with a gap between them
static bf16 b[kPanels][kSteps * kStepK / 2][kGroup][2];     // panels, rows in pairs
static float c[kPanels][kGroups * kGroup][kGroup];

constexpr int64_t kPanel = sizeof b[0] / sizeof(bf16), kOut = sizeof c[0] / sizeof(float);

int main() {
  srand(1);
  for (auto& row : a)
    for (bf16& x : row) x = float_to_bf16(static_cast<float>(rand() % 9 - 4));
  for (auto& panel : b)
    for (auto& pair : panel)
      for (auto& column : pair)
        for (bf16& x : column) x = float_to_bf16(static_cast<float>(rand() % 9 - 4));

  int wrong = 0, compared = 0;
  for (int groups = 1; groups <= kGroups; ++groups)
    for (int panels = 1; panels <= kPanels; ++panels) {
      RowGroup rows[kGroups];
      for (int g = 0; g < groups; ++g) rows[g] = {a[g * kGroup], kStride};
      memset(c, 0xee, sizeof c);
      {
        TileScope tiles;
        gemm<false>(rows, groups * kGroup, kSteps, {b[0][0][0], kPanel, kStepK * kGroup}, panels, c[0][0], kOut);
        gemm<true>(rows, groups * kGroup, kSteps, {b[0][0][0], kPanel, kStepK * kGroup}, panels, c[0][0], kOut);
      }
      for (int p = 0; p < panels; ++p)
        for (int m = 0; m < groups * kGroup; ++m)
          for (int n = 0; n < kGroup; ++n) {
            float sum = 0;
            for (int k = 0; k < kInner; ++k) sum += bf16_to_float(a[m][k]) * bf16_to_float(b[p][k / 2][n][k % 2]);
            wrong += c[p][m][n] != 2 * sum;
            ++compared;
          }
    }
  printf("%d of %d values wrong\n", wrong, compared);
  return wrong != 0;
}
