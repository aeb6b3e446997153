// SPDX-License-Identifier: Apache-2.0
// AMX tile vocabulary: inline assembly, because the intrinsics of GCC 12 take only literal tile numbers and do not say
// which memory they read, so that at -O2 stores to a configuration or to a scratch tile are deleted. Here the
// configuration is a full 64-byte memory operand and every tile load or store is a compiler barrier.
//
//   instruction (Xeon 6962P)   cycles
//   TDPBF16PS                    16    (one per row of A; latency 52)
//   TILELOADD from L1             8.4
//   TILESTORED                   16.1
//   TILEZERO                      0.5
//   LDTILECFG                   182-204
#pragma once

#include "base/common.h"

namespace amxk {
namespace AMXK_TIER {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette;
  uint8_t start_row;
  uint8_t reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64, "LDTILECFG reads 64 bytes");

constexpr int kTileRows = 16;
constexpr int kTileRowBytes = 64;
static_assert(kTileRows == kGroup && kTileRowBytes == kStepK * sizeof(bf16), "a tile is a group by a step");

AMXK_INLINE void tile_load_config(const TileConfig& config) {
  asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
}
AMXK_INLINE void tile_store_config(TileConfig& config) { asm volatile("sttilecfg %0" : "=m"(config)); }
AMXK_INLINE void tile_release() { asm volatile("tilerelease" ::: "memory"); }

template <int T>
AMXK_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
// A sanitizer cannot see what an instruction in assembly reads or writes, so it is shown both ends of every row.
AMXK_INLINE void show_rows(const void* base, int64_t stride_bytes) {
#if defined(__SANITIZE_ADDRESS__) || defined(AMXK_SHOW_ROWS)
  for (int r = 0; r < kTileRows; ++r) {
    const volatile char* row = static_cast<const volatile char*>(base) + r * stride_bytes;
    (void)row[0];
    (void)row[kTileRowBytes - 1];
  }
#else
  (void)base;
  (void)stride_bytes;
#endif
}
template <int T>
AMXK_INLINE void tile_load(const void* base, int64_t stride_bytes) {
  show_rows(base, stride_bytes);
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(base), "r"(stride_bytes) : "memory");
}
template <int T>
AMXK_INLINE void tile_store(void* base, int64_t stride_bytes) {
  show_rows(base, stride_bytes);
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(base), "r"(stride_bytes) : "memory");
}
// C += A * B: C [16, 16] fp32, A [16, 32] bf16, B [16 pairs, 16 columns, 2] bf16.
template <int C, int A, int B>
AMXK_INLINE void tile_dpbf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// All eight tiles at full size, for the length of a scope. A configuration found on entry is put back, so code of other
// libraries on this thread that set up its tiles earlier still finds the shapes (tile contents never survive a call).
class TileScope {
 public:
  TileScope() {
    tile_store_config(found_);
    TileConfig config = {};
    config.palette = 1;
    for (int t = 0; t < 8; ++t) {
      config.row_bytes[t] = kTileRowBytes;
      config.rows[t] = kTileRows;
    }
    tile_load_config(config);
  }
  ~TileScope() {
    if (found_.palette != 0) {
      tile_load_config(found_);
    } else {
      tile_release();
    }
  }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;

 private:
  TileConfig found_;
};

}  // namespace
}  // namespace AMXK_TIER
}  // namespace amxk
