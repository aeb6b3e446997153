// SPDX-License-Identifier: Apache-2.0
// AMX for the test programs: inline assembly that says what it reads and writes.
#pragma once

#include <stdint.h>
#include <string.h>

struct config {
    uint8_t palette, start_row, reserved[14];
    uint16_t colsb[16];
    uint8_t rows[16];
};

// All tiles of one shape.
static inline struct config uniform(int rows, int colsb) {
    struct config c;
    memset(&c, 0, sizeof c);
    c.palette = 1;
    for (int i = 0; i < 8; ++i) c.rows[i] = (uint8_t)rows, c.colsb[i] = (uint16_t)colsb;
    return c;
}

static inline void load_config(const struct config *c) { __asm__ volatile("ldtilecfg %0" : : "m"(*c) : "memory"); }
static inline void release(void) { __asm__ volatile("tilerelease" : : : "memory"); }

#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t : : : "memory")
#define TILE_LOAD(t, p, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t : : "r"(p), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(t, p, stride) \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" : : "r"(p), "r"((int64_t)(stride)) : "memory")
#define TILE_DPBF16(c, a, b) \
    __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c : : : "memory")

static inline uint16_t to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return (uint16_t)(bits >> 16);
}
