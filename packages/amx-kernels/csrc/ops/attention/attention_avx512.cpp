// SPDX-License-Identifier: Apache-2.0
#define AMXK_TIER avx512
#include "tile/avx512.h"

#include "ops/attention/attention-inl.h"

namespace amxk {
extern const AttentionFunction kAttention_avx512;
const AttentionFunction kAttention_avx512 = avx512::attention;
}  // namespace amxk
