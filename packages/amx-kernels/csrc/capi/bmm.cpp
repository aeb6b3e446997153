// SPDX-License-Identifier: Apache-2.0
#include "capi/check.h"
#include "ops/dispatch.h"

namespace amxk {
namespace {

const char* const kNoMemory = "%s: no memory for scratch";

void check_weight(Checker& c, const amxk_tensor* weight, const char* name) {
  c.tensor(weight, name, AMXK_BF16, 3);
  if (c.ok()) c.require(weight->sizes[2] >= 1, "%s.size(2) is 0, expected at least 1", name);
}

}  // namespace
}  // namespace amxk

using namespace amxk;

extern "C" amxk_code amxk_packed_sizes(const amxk_tensor* weight, int64_t sizes[4], amxk_error* error) {
  Checker c("convert_weight_packed", error);
  check_weight(c, weight, "weight");
  c.require(sizes != nullptr, "sizes is missing (null)");
  if (c.ok()) packed_sizes(weight->sizes[0], weight->sizes[1], weight->sizes[2], sizes);
  return c.code();
}

extern "C" amxk_code amxk_convert_weight_packed(const amxk_tensor* packed, const amxk_tensor* weight,
                                                const amxk_parallel* parallel, amxk_error* error) {
  Checker c("convert_weight_packed", error);
  check_weight(c, weight, "weight");
  if (!c.ok()) return c.code();
  c.packed_weight(packed, "packed", weight->sizes[0], weight->sizes[1], weight->sizes[2]);
  if (!c.ok()) return c.code();
  const OpTable* ops = current_ops(error);
  if (ops == nullptr) return AMXK_UNSUPPORTED;
  PackParams p = {};
  p.packed = static_cast<bf16*>(packed->data);
  p.weight = static_cast<const bf16*>(weight->data);
  p.weight_batch = weight->strides[0];
  p.weight_row = weight->strides[1];
  p.batch = weight->sizes[0];
  p.columns = weight->sizes[1];
  p.depth = weight->sizes[2];
  p.parallel = usable(parallel);
  const amxk_code code = ops->pack(p);
  return code == AMXK_OK ? code : fail(error, code, kNoMemory, "convert_weight_packed");
}

extern "C" amxk_code amxk_bmm(const amxk_tensor* out, const amxk_tensor* mat1, const amxk_tensor* mat2, int is_packed,
                              const amxk_tensor* scale, const amxk_parallel* parallel, amxk_error* error) {
  Checker c("bmm_cpu", error);
  c.output(out, "out", AMXK_BF16, 3);
  c.tensor(mat1, "mat1", AMXK_BF16, 3);
  if (!c.ok()) return c.code();
  const int64_t batch = mat1->sizes[0], rows = mat1->sizes[1], depth = mat1->sizes[2], columns = out->sizes[2];
  c.size(out, "out", 0, batch, "N of mat1");
  c.size(out, "out", 1, rows, "M of mat1");
  c.require(depth >= 1, "mat1.size(2) is 0, expected at least 1");
  if (is_packed) {
    if (c.ok()) c.packed_weight(mat2, "mat2", batch, columns, depth);
  } else if (c.ok()) {
    check_weight(c, mat2, "mat2");
    c.size(mat2, "mat2", 0, batch, "N of mat1");
    c.size(mat2, "mat2", 1, columns, "OUT of out");
    c.size(mat2, "mat2", 2, depth, "IN of mat1");
  }
  if (scale != nullptr && c.ok()) {
    c.require(scale->ndim == 0 || scale->ndim == 1, "scale has %d dimensions, expected 0 or 1", static_cast<int>(scale->ndim));
    if (c.ok() && c.tensor(scale, "scale", AMXK_F32, scale->ndim) && scale->ndim == 1) {
      c.require(scale->sizes[0] == 1 || scale->sizes[0] == batch,
                "scale.size(0) is %" PRId64 ", expected 1 or %" PRId64 " (N)", scale->sizes[0], batch);
    }
  }
  if (!c.ok()) return c.code();
  const OpTable* ops = current_ops(error);
  if (ops == nullptr) return AMXK_UNSUPPORTED;
  BmmParams p = {};
  p.out = static_cast<bf16*>(out->data);
  p.out_batch = out->strides[0];
  p.out_row = out->strides[1];
  p.mat1 = static_cast<const bf16*>(mat1->data);
  p.mat1_batch = mat1->strides[0];
  p.mat1_row = mat1->strides[1];
  p.mat2 = static_cast<const bf16*>(mat2->data);
  p.mat2_batch = mat2->strides[0];
  p.mat2_row = mat2->strides[1];
  p.packed = is_packed != 0;
  if (scale != nullptr) {
    p.scale = static_cast<const float*>(scale->data);
    p.scale_batch = scale->ndim == 1 && scale->sizes[0] > 1 ? scale->strides[0] : 0;
  }
  p.batch = batch;
  p.rows = rows;
  p.columns = columns;
  p.depth = depth;
  p.parallel = usable(parallel);
  const amxk_code code = ops->bmm(p);
  return code == AMXK_OK ? code : fail(error, code, kNoMemory, "bmm_cpu");
}
