// SPDX-License-Identifier: Apache-2.0
#define AMXK_TIER avx512bf16
#include "tile/avx512bf16.h"

#include "ops/bmm/bmm-inl.h"

namespace amxk {
extern const BmmFunction kBmm_avx512bf16;
extern const PackFunction kPack_avx512bf16;
const BmmFunction kBmm_avx512bf16 = avx512bf16::bmm;
const PackFunction kPack_avx512bf16 = avx512bf16::pack;
}  // namespace amxk
