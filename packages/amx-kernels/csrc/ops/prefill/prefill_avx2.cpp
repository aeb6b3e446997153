// SPDX-License-Identifier: Apache-2.0
#define AMXK_TIER avx2
#include "tile/avx2.h"

#include "ops/prefill/prefill-inl.h"

namespace amxk {
extern const PrefillFunction kPrefill_avx2;
const PrefillFunction kPrefill_avx2 = avx2::prefill;
}  // namespace amxk
