// SPDX-License-Identifier: Apache-2.0
#define AMXK_TIER avx2
#include "tile/avx2.h"

#include "ops/bmm/bmm-inl.h"

namespace amxk {
extern const BmmFunction kBmm_avx2;
extern const PackFunction kPack_avx2;
const BmmFunction kBmm_avx2 = avx2::bmm;
const PackFunction kPack_avx2 = avx2::pack;
}  // namespace amxk
