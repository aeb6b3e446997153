// SPDX-License-Identifier: Apache-2.0
// Which tier the kernels run on. The public face is amx_kernels/isa.h; this is what the dispatchers include.
#pragma once

#include <atomic>

#include "amx_kernels/isa.h"

namespace amxk {

namespace detail {
extern std::atomic<int> tier_in_use;  // -1 until resolved
int resolve_first_use(amxk_error* error) noexcept;
}  // namespace detail

// Index for an op's table of kernels, or -1 with `error` filled. Relaxed: the tier publishes no other data.
inline int current_tier(amxk_error* error) noexcept {
  const int tier = detail::tier_in_use.load(std::memory_order_relaxed);
  return tier >= 0 ? tier : detail::resolve_first_use(error);
}

// "none" for a number that is no tier.
const char* tier_name(int tier) noexcept;

}  // namespace amxk
