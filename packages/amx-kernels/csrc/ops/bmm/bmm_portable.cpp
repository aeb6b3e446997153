// SPDX-License-Identifier: Apache-2.0
#define AMXK_TIER portable
#include "tile/portable.h"

#include "ops/bmm/bmm-inl.h"

namespace amxk {
extern const BmmFunction kBmm_portable;
extern const PackFunction kPack_portable;
const BmmFunction kBmm_portable = portable::bmm;
const PackFunction kPack_portable = portable::pack;
}  // namespace amxk
