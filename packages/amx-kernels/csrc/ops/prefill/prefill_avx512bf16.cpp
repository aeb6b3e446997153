// SPDX-License-Identifier: Apache-2.0
#define AMXK_TIER avx512bf16
#include "tile/avx512bf16.h"

#include "ops/prefill/prefill-inl.h"

namespace amxk {
extern const PrefillFunction kPrefill_avx512bf16;
const PrefillFunction kPrefill_avx512bf16 = avx512bf16::prefill;
}  // namespace amxk
