// SPDX-License-Identifier: Apache-2.0
// Scratch tiles and a configuration on the stack, written by plain stores and read by tile instructions only. A
// compiler that is not told of those reads may delete the stores. Built at -O2 with the kernels' own tile helpers
// (default), or with helpers that say too little (FORGETFUL), which is what GCC 12's intrinsics say.
//
// Exits with 0 if both products are right.
#include <stdint.h>
#include <stdio.h>

#ifdef FORGETFUL
namespace tiles {
struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static inline void tile_load_config(const TileConfig& c) {
  asm volatile("ldtilecfg %0" ::"m"(*reinterpret_cast<const void* const*>(&c)));
}
static inline void tile_release() { asm volatile("tilerelease"); }
template <int T>
static inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
static inline void tile_load(const void* p, int64_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(stride));
}
template <int T>
static inline void tile_store(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(p), "r"(stride) : "memory");
}
template <int C, int A, int B>
static inline void tile_dpbf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
}  // namespace tiles
using namespace tiles;
#else
#define AMXK_TIER amxbf16
#include "tile/amx_tiles.h"
using namespace amxk::amxbf16;
#endif

static uint16_t to_bf16(float f) {
  uint32_t bits;
  __builtin_memcpy(&bits, &f, 4);
  return static_cast<uint16_t>(bits >> 16);
}

static __attribute__((noinline)) void configure() {
  TileConfig config = {};
  config.palette = 1;
  for (int t = 0; t < 8; ++t) {
    config.row_bytes[t] = 64;
    config.rows[t] = 16;
  }
  tile_load_config(config);
}

// Column n of B: all n + 1.
static __attribute__((noinline)) void load_b() {
  uint16_t b[16][32];
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 32; ++j) b[i][j] = to_bf16(static_cast<float>(j / 2 + 1));
  tile_load<2>(b, 64);
}

// Adds the product with an A whose row m is all first + m; twice, through the same scratch.
static __attribute__((noinline)) void multiply(float first) {
  uint16_t a[16][32];
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 16; ++i)
      for (int j = 0; j < 32; ++j) a[i][j] = to_bf16(first + static_cast<float>(i + round));
    tile_load<1>(a, 64);
    tile_dpbf16<0, 1, 2>();
  }
}

static __attribute__((noinline)) int check(float first) {
  float c[16][16];
  tile_store<0>(c, 64);
  int wrong = 0;
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j)
      wrong += c[i][j] != 32 * (2 * (first + static_cast<float>(i)) + 1) * static_cast<float>(j + 1);
  return wrong;
}

static int products(float first) {
  configure();
  tile_zero<0>();
  load_b();
  multiply(first);
  const int wrong = check(first);
  tile_release();
  return wrong;
}

int main(int argc, char**) {
  const int wrong = products(static_cast<float>(argc));
  printf("%d wrong values\n", wrong);
  return wrong != 0;
}
