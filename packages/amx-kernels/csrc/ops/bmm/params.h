// SPDX-License-Identifier: Apache-2.0
// out[n] = scale[n] * mat1[n] @ mat2[n]^T, checked by csrc/capi/bmm.cpp.
#pragma once

#include "base/common.h"
#include "base/parallel.h"

namespace amxk {

struct BmmParams {
  bf16* out;  // [N, M, OUT]
  int64_t out_batch, out_row;
  const bf16* mat1;  // [N, M, IN]
  int64_t mat1_batch, mat1_row;
  const bf16* mat2;  // [N, OUT, IN], or packed [N, OUT/16][IN/2][16][2] with IN padded to 32 and OUT to 16
  int64_t mat2_batch, mat2_row;  // unused when packed
  bool packed;
  const float* scale;  // nullptr, [1] or [N]
  int64_t scale_batch;  // 0 or the stride
  int64_t batch, rows, columns, depth;  // N, M, OUT, IN
  Parallel parallel;
};

struct PackParams {
  bf16* packed;  // [N, OUT/16][IN/2][16][2], padded
  const bf16* weight;  // [N, OUT, IN]
  int64_t weight_batch, weight_row;
  int64_t batch, columns, depth;  // N, OUT, IN
  Parallel parallel;
};

using BmmFunction = amxk_code (*)(const BmmParams&);
using PackFunction = amxk_code (*)(const PackParams&);

}  // namespace amxk
