// SPDX-License-Identifier: Apache-2.0
#define AMXK_TIER amxbf16
#include "tile/amxbf16.h"

#include "ops/prefill/prefill-inl.h"

namespace amxk {
extern const PrefillFunction kPrefill_amxbf16;
const PrefillFunction kPrefill_amxbf16 = amxbf16::prefill;
}  // namespace amxk
