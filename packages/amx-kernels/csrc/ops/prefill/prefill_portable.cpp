// SPDX-License-Identifier: Apache-2.0
#define AMXK_TIER portable
#include "tile/portable.h"

#include "ops/prefill/prefill-inl.h"

namespace amxk {
extern const PrefillFunction kPrefill_portable;
const PrefillFunction kPrefill_portable = portable::prefill;
}  // namespace amxk
