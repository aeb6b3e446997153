// SPDX-License-Identifier: Apache-2.0
#define AMXK_TIER avx512
#include "tile/avx512.h"

#include "ops/prefill/prefill-inl.h"

namespace amxk {
extern const PrefillFunction kPrefill_avx512;
const PrefillFunction kPrefill_avx512 = avx512::prefill;
}  // namespace amxk
