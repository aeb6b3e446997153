// SPDX-License-Identifier: Apache-2.0
#include "ops/dispatch.h"

#include "base/registry.h"

namespace amxk {

// One line per op and tier file. A tier that is not compiled in leaves a row of nulls, which the registry never selects.
#define AMXK_DECLARE_TIER(tier)                            \
  extern const AttentionFunction kAttention_##tier;        \
  extern const BmmFunction kBmm_##tier;                    \
  extern const PackFunction kPack_##tier;                  \
  extern const PrefillFunction kPrefill_##tier;
#define AMXK_ROW(tier, item_keys, expand) \
  {kAttention_##tier, kBmm_##tier, kPack_##tier, kPrefill_##tier, item_keys, expand}

AMXK_DECLARE_TIER(portable)
#ifdef AMXK_HAVE_AVX2
AMXK_DECLARE_TIER(avx2)
#endif
#ifdef AMXK_HAVE_AVX512
AMXK_DECLARE_TIER(avx512)
#endif
#ifdef AMXK_HAVE_AVX512BF16
AMXK_DECLARE_TIER(avx512bf16)
#endif
#ifdef AMXK_HAVE_AMXBF16
AMXK_DECLARE_TIER(amxbf16)
#endif

const OpTable* current_ops(amxk_error* error) noexcept {
  static const OpTable tables[AMXK_NUM_TIERS] = {
      AMXK_ROW(portable, 5, 0.9),
#ifdef AMXK_HAVE_AVX2
      AMXK_ROW(avx2, 5, 0.9),
#else
      {},
#endif
#ifdef AMXK_HAVE_AVX512
      AMXK_ROW(avx512, 12, 0.9),
#else
      {},
#endif
#ifdef AMXK_HAVE_AVX512BF16
      AMXK_ROW(avx512bf16, 24, 0.9),
#else
      {},
#endif
#ifdef AMXK_HAVE_AMXBF16
      AMXK_ROW(amxbf16, 24, 0.75),
#else
      {},
#endif
  };
  const int tier = current_tier(error);
  return tier < 0 ? nullptr : &tables[tier];
}

}  // namespace amxk
