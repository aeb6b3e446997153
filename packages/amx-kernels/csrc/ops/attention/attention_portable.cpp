// SPDX-License-Identifier: Apache-2.0
#define AMXK_TIER portable
#include "tile/portable.h"

#include "ops/attention/attention-inl.h"

namespace amxk {
extern const AttentionFunction kAttention_portable;
const AttentionFunction kAttention_portable = portable::attention;
}  // namespace amxk
