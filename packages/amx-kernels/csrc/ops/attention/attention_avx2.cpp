// SPDX-License-Identifier: Apache-2.0
#define AMXK_TIER avx2
#include "tile/avx2.h"

#include "ops/attention/attention-inl.h"

namespace amxk {
extern const AttentionFunction kAttention_avx2;
const AttentionFunction kAttention_avx2 = avx2::attention;
}  // namespace amxk
