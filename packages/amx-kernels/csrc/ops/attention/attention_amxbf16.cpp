// SPDX-License-Identifier: Apache-2.0
#define AMXK_TIER amxbf16
#include "tile/amxbf16.h"

#include "ops/attention/attention-inl.h"

namespace amxk {
extern const AttentionFunction kAttention_amxbf16;
const AttentionFunction kAttention_amxbf16 = amxbf16::attention;
}  // namespace amxk
