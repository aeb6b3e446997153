// SPDX-License-Identifier: Apache-2.0
#define AMXK_TIER amxbf16
#include "tile/amxbf16.h"

#include "ops/bmm/bmm-inl.h"

namespace amxk {
extern const BmmFunction kBmm_amxbf16;
extern const PackFunction kPack_amxbf16;
const BmmFunction kBmm_amxbf16 = amxbf16::bmm;
const PackFunction kPack_amxbf16 = amxbf16::pack;
}  // namespace amxk
