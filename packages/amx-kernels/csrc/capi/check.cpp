// SPDX-License-Identifier: Apache-2.0
#include "capi/check.h"

#include <cstdlib>

namespace amxk {
namespace {

constexpr int64_t kElementBytes[] = {2, 4, 4, 8, 1};
constexpr const char* kDtypeNames[] = {"bfloat16", "float32", "int32", "int64", "another type"};
constexpr int64_t kMaxExtent = int64_t{1} << 60;  // bytes; no address space is larger

const char* dtype_name(const amxk_tensor* t) {
  if (t->dtype_name != nullptr) return t->dtype_name;
  return t->dtype >= AMXK_BF16 && t->dtype <= AMXK_OTHER ? kDtypeNames[t->dtype] : "an unknown dtype";
}

}  // namespace

bool Checker::layout(const amxk_tensor* t, const char* name, int ndim) {
  if (!require(t->ndim == ndim, "%s has %d dimensions, expected %d", name, static_cast<int>(t->ndim), ndim)) return false;
  const int64_t bytes = kElementBytes[t->dtype];
  int64_t extent = 1, elements = 1;
  for (int d = 0; d < ndim; ++d) {
    const int64_t size = t->sizes[d], stride = t->strides[d];
    require(size >= 0, "%s.size(%d) is %" PRId64 ", expected at least 0", name, d, size);
    if (!ok()) return false;
    elements = size == 0 || elements == 0 ? 0 : 1;
    int64_t reach = 0;
    // A stride of 0 makes any size fit; sizes are bounded by themselves, so that they can be multiplied later.
    const bool overflow = size > kMaxExtent / bytes ||
                          (size > 1 && (stride == INT64_MIN ||
                                        __builtin_mul_overflow(size - 1, stride < 0 ? -stride : stride, &reach) ||
                                        __builtin_add_overflow(extent, reach, &extent) || extent > kMaxExtent / bytes));
    require(!overflow, "%s does not fit an address space: size(%d) is %" PRId64 ", stride(%d) is %" PRId64, name, d, size,
            d, stride);
  }
  if (!ok() || elements == 0) return ok();
  require(t->data != nullptr, "%s has no data (null pointer), expected %s", name, dtype_name(t));
  require(reinterpret_cast<uintptr_t>(t->data) % static_cast<uintptr_t>(bytes) == 0,
          "%s starts at address %p, expected a multiple of %" PRId64, name, t->data, bytes);
  return ok();
}

bool Checker::tensor(const amxk_tensor* t, const char* name, int dtype, int ndim) {
  if (!require(t != nullptr, "%s is missing (null)", name)) return false;
  require(t->dtype == dtype, "%s is %s, expected %s", name, dtype_name(t), kDtypeNames[dtype]);
  if (!ok() || !layout(t, name, ndim)) return false;
  for (int d = 0; d < ndim; ++d) {
    if (t->sizes[d] == 0) return true;  // NumPy gives an empty array any strides
  }
  return require(ndim == 0 || t->sizes[ndim - 1] == 1 || t->strides[ndim - 1] == 1,
                 "%s.stride(%d) is %" PRId64 ", expected a contiguous last dimension (1)", name, ndim - 1,
                 t->strides[max(ndim, 1) - 1]);
}

bool Checker::index_tensor(const amxk_tensor* t, const char* name, int ndim) {
  if (!require(t != nullptr, "%s is missing (null)", name)) return false;
  require(t->dtype == AMXK_I32 || t->dtype == AMXK_I64, "%s is %s, expected int32 or int64", name, dtype_name(t));
  return ok() && layout(t, name, ndim);
}

bool Checker::output(const amxk_tensor* t, const char* name, int dtype, int ndim) {
  if (!tensor(t, name, dtype, ndim)) return false;
  // Dimensions sorted by stride must nest: each stride at least the span of the smaller ones.
  int order[AMXK_MAX_DIMS] = {}, n = 0;
  for (int d = 0; d < ndim; ++d) {
    if (t->sizes[d] == 0) return true;
    if (t->sizes[d] == 1) continue;
    int at = n++;
    for (; at > 0 && llabs(t->strides[order[at - 1]]) > llabs(t->strides[d]); --at) order[at] = order[at - 1];
    order[at] = d;
  }
  int64_t span = 1;
  for (int i = 0; i < n; ++i) {
    const int d = order[i];
    const int64_t stride = llabs(t->strides[d]);
    require(stride >= span, "%s overlaps itself: stride(%d) is %" PRId64 ", expected at least %" PRId64, name, d,
            t->strides[d], span);
    span = stride * t->sizes[d];
  }
  return ok();
}

bool Checker::size(const amxk_tensor* t, const char* name, int dim, int64_t expected, const char* meaning) {
  return ok() && require(t->sizes[dim] == expected, "%s.size(%d) is %" PRId64 ", expected %" PRId64 " (%s)", name, dim,
                         t->sizes[dim], expected, meaning);
}

void packed_sizes(int64_t batch, int64_t columns, int64_t depth, int64_t sizes[4]) {
  sizes[0] = batch;
  sizes[1] = ceil_div(columns, kGroup);
  sizes[2] = round_up(depth, kStepK) / 2;
  sizes[3] = 2 * kGroup;
}

bool Checker::packed_weight(const amxk_tensor* packed, const char* name, int64_t batch, int64_t columns, int64_t depth) {
  if (!tensor(packed, name, AMXK_BF16, 4)) return false;
  int64_t sizes[4];
  packed_sizes(batch, columns, depth, sizes);
  static const char* const meaning[] = {"N", "ceil(OUT / 16)", "ceil(IN / 32) * 16", "16 columns of pairs"};
  for (int d = 0; d < 4 && ok(); ++d) size(packed, name, d, sizes[d], meaning[d]);
  if (sizes[0] * sizes[1] == 0) return ok();
  int64_t stride = 1;
  for (int d = 3; d >= 0 && ok(); stride *= sizes[d--]) {
    require(packed->strides[d] == stride || sizes[d] <= 1,
              "%s.stride(%d) is %" PRId64 ", expected %" PRId64 ": packed weights are contiguous", name, d,
              packed->strides[d], stride);
  }
  return ok();
}

}  // namespace amxk
