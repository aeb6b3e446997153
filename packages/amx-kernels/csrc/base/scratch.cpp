// SPDX-License-Identifier: Apache-2.0
#include "base/scratch.h"

#include <cstdint>
#include <cstdlib>

namespace amxk {
namespace {

constexpr size_t kAlign = 4096;  // page-aligned, so that offsets within a buffer decide the cache sets

struct Buffer {
  void* data = nullptr;
  size_t size = 0;
  ~Buffer() { std::free(data); }
};

thread_local Buffer buffers[3];

}  // namespace

void* scratch(Scratch purpose, size_t bytes) noexcept {
  Buffer& buffer = buffers[static_cast<int>(purpose)];
  if (buffer.size < bytes) {
    // Grow by an eighth beyond the need, so that lengths growing by one token per step do not reallocate every step.
    const size_t size = (bytes + bytes / 8 + kAlign - 1) / kAlign * kAlign;
    void* data = std::aligned_alloc(kAlign, size);
    if (data == nullptr) return nullptr;
    std::free(buffer.data);
    buffer.data = data;
    buffer.size = size;
  }
  return buffer.data;
}

}  // namespace amxk
