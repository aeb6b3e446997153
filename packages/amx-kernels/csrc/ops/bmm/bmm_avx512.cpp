// SPDX-License-Identifier: Apache-2.0
#define AMXK_TIER avx512
#include "tile/avx512.h"

#include "ops/bmm/bmm-inl.h"

namespace amxk {
extern const BmmFunction kBmm_avx512;
extern const PackFunction kPack_avx512;
const BmmFunction kBmm_avx512 = avx512::bmm;
const PackFunction kPack_avx512 = avx512::pack;
}  // namespace amxk
