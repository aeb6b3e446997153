// SPDX-License-Identifier: Apache-2.0
// Grow-only scratch memory, one buffer per thread and purpose, 64-byte aligned. Kernels allocate nothing else.
#pragma once

#include <stddef.h>

namespace amxk {

enum class Scratch { kWorker, kShared, kPlan };

// At least `bytes` bytes, valid until the next call of this thread with the same purpose; nullptr if memory ran out.
// Contents are whatever the last user left.
void* scratch(Scratch purpose, size_t bytes) noexcept;

}  // namespace amxk
