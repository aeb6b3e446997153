// SPDX-License-Identifier: Apache-2.0
// One table of entry points per tier; the C API picks a row by the tier in use.
#pragma once

#include "ops/attention/params.h"
#include "ops/bmm/params.h"
#include "ops/prefill/params.h"

namespace amxk {

struct OpTable {
  AttentionFunction attention;
  BmmFunction bmm;
  PackFunction pack;
  PrefillFunction prefill;
  // Measured costs. item_keys: what an item of the plan costs beside its keys (queries to pack, results to merge and to
  // write, memory still cold), in keys. expand: what a multiply-accumulate of decompressed prefill's expansion costs
  // beside one of its attention.
  int item_keys;
  double expand;
};

// The row of the tier in use; nullptr, with the reason in error, if that tier cannot be resolved.
const OpTable* current_ops(amxk_error* error) noexcept;

}  // namespace amxk
