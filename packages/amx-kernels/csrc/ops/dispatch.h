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
};

// The row of the tier in use; nullptr, with the reason in error, if that tier cannot be resolved.
const OpTable* current_ops(amxk_error* error) noexcept;

}  // namespace amxk
