// SPDX-License-Identifier: Apache-2.0
// The one place where arguments are checked. Every check names the argument, its value and what was expected, and runs
// before any tensor data is touched.
#pragma once

#include <cinttypes>
#include <cstdio>

#include "amx_kernels/amx_kernels.h"
#include "base/common.h"
#include "base/status.h"

namespace amxk {

// Stops at the first failed check; the rest are skipped.
class Checker {
 public:
  Checker(const char* op, amxk_error* error) : op_(op), error_(error) {}

  bool ok() const { return code_ == AMXK_OK; }
  amxk_code code() const { return code_; }

  template <class... Args>
  bool require(bool condition, const char* format, Args... args) {
    if (!ok() || condition) return ok();
    char text[400];
    std::snprintf(text, sizeof text, format, args...);
    code_ = fail(error_, AMXK_INVALID_ARGUMENT, "%s: %s", op_, text);
    return false;
  }

  // A tensor of the given type and number of dimensions, sane in memory, with a contiguous last dimension.
  bool tensor(const amxk_tensor* t, const char* name, int dtype, int ndim);
  // int32 or int64.
  bool index_tensor(const amxk_tensor* t, const char* name, int ndim);
  // As tensor(), and no two elements of it share memory: it is written by several threads.
  bool output(const amxk_tensor* t, const char* name, int dtype, int ndim);
  bool size(const amxk_tensor* t, const char* name, int dim, int64_t expected, const char* meaning);
  // A packed [batch, columns, depth] weight: contiguous, because B tiles are read as they lie.
  bool packed_weight(const amxk_tensor* packed, const char* name, int64_t batch, int64_t columns, int64_t depth);

 private:
  bool layout(const amxk_tensor* t, const char* name, int ndim);

  const char* op_;
  amxk_error* error_;
  amxk_code code_ = AMXK_OK;
};

// Sizes of the packed form of a [batch, columns, depth] weight.
void packed_sizes(int64_t batch, int64_t columns, int64_t depth, int64_t sizes[4]);

// Element i of an int32 or int64 vector.
AMXK_INLINE int64_t index_at(const amxk_tensor* t, int64_t i) {
  return t->dtype == AMXK_I64 ? static_cast<const int64_t*>(t->data)[i * t->strides[0]]
                              : static_cast<const int32_t*>(t->data)[i * t->strides[0]];
}

// Where bf16 elements are. An empty tensor may have a null pointer, on which not even offsets may be computed.
AMXK_INLINE const bf16* elements(const amxk_tensor* t) {
  static const bf16 none = 0;
  return t->data != nullptr ? static_cast<const bf16*>(t->data) : &none;
}

constexpr int32_t kMaxThreads = 4096;

// The caller's threads, or serial; a thread count outside 1 .. kMaxThreads counts as the nearest of these.
AMXK_INLINE amxk_parallel usable(const amxk_parallel* parallel) {
  if (parallel == nullptr || parallel->run == nullptr) return {1, nullptr, nullptr};
  amxk_parallel p = *parallel;
  p.num_threads = min(kMaxThreads, max<int32_t>(1, p.num_threads));
  return p;
}

}  // namespace amxk
