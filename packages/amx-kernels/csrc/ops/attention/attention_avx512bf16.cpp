// SPDX-License-Identifier: Apache-2.0
#define AMXK_TIER avx512bf16
#include "tile/avx512bf16.h"

#include "ops/attention/attention-inl.h"

namespace amxk {
extern const AttentionFunction kAttention_avx512bf16;
const AttentionFunction kAttention_avx512bf16 = avx512bf16::attention;
}  // namespace amxk
