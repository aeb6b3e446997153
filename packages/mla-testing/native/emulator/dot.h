// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdint.h>

#include "tiles.h"

// c[m][n] += sum over k of a[m][k] * b[k][n], where element k is a pair of 16-bit floats or a quad of bytes.
// m < rows, k < depth, n < columns; columns and rows beyond those stay as they are.
struct amx_dot {
    uint8_t op, order;
    uint8_t rows, depth, columns;
    uint8_t (*c)[AMX_COLSB];
    const uint8_t (*a)[AMX_COLSB];
    const uint8_t (*b)[AMX_COLSB];
};

// One algorithm text, dot.c, compiled for three floors.
void amx_dot_sse2(const struct amx_dot *);
void amx_dot_avx2(const struct amx_dot *);
void amx_dot_avx512(const struct amx_dot *);
extern void (*amx_dot_best)(const struct amx_dot *);

// Calls `function` with MXCSR as the manual demands of dot products: round to nearest even, DAZ and FTZ, no exceptions;
// the caller's MXCSR, status bits included, comes back (entry.S).
void amx_call_dot(void (*function)(const struct amx_dot *), const struct amx_dot *);
