// SPDX-License-Identifier: Apache-2.0
// A small matrix product on tiles with ragged edges, and, by MUTANT, the mistakes such code is made with. Inputs are
// small integers, so the result is exact and compared with a scalar one. Exits with 0 if it is right, 1 if it is wrong;
// a mistake may also end it by a signal.
#include <stdio.h>
#include <stdlib.h>

#include "tiles.h"

#ifndef MUTANT
#define MUTANT 0
#endif
enum mutant {
    CORRECT,
    WRONG_A_STRIDE,      // bytes taken for elements
    MISSING_CONFIG,      // never loaded
    RELEASED_TOO_EARLY,  // before the last product
    STALE_ROW,           // the last, short step leaves rows of the previous one in its scratch
    STALE_ACCUMULATOR,   // not zeroed between output tiles
    SWAPPED_OPERANDS,    // B times A
    SHORT_TILE,          // one row of the accumulator not configured
    WRONG_C_STRIDE,      // rows of the output overlap
    UNPAIRED_B,          // B rows not interleaved in pairs
};

enum { M = 20, N = 40, K = 70, KP = 96, MP = 32, NP = 48 };  // P: rounded up to whole tiles

static uint16_t a[MP][KP], b[K][N];
static float c[MP][NP];

// Rows k0.. of B, columns n0.., in pairs, as the B tile wants them.
static void pack(uint16_t scratch[16][32], int k0, int n0) {
    if (MUTANT != STALE_ROW) memset(scratch, 0, 16 * sizeof *scratch);
    for (int k = 0; k < 32 && k0 + k < K; ++k)
        for (int n = 0; n < 16 && n0 + n < N; ++n) {
            if (MUTANT == UNPAIRED_B)
                scratch[k % 16][n + k / 16 * 16] = b[k0 + k][n0 + n];
            else
                scratch[k / 2][2 * n + k % 2] = b[k0 + k][n0 + n];
        }
}

int main(void) {
    srand(1);
    // What lies beyond K in A is another tensor's: finite, not zero.
    for (int m = 0; m < MP; ++m)
        for (int k = 0; k < KP; ++k) a[m][k] = to_bf16((float)(rand() % 9 - 4));
    for (int k = 0; k < K; ++k)
        for (int n = 0; n < N; ++n) b[k][n] = to_bf16((float)(rand() % 9 - 4));

    struct config shape = uniform(16, 64);
    if (MUTANT == SHORT_TILE) shape.rows[0] = 15;
    if (MUTANT != MISSING_CONFIG) load_config(&shape);
    uint16_t scratch[16][32] = {{0}};
    for (int n = 0; n < N; n += 16)
        for (int m = 0; m < M; m += 16) {
            if (MUTANT != STALE_ACCUMULATOR || (n == 0 && m == 0)) TILE_ZERO(0);
            for (int k = 0; k < K; k += 32) {
                pack(scratch, k, n);
                TILE_LOAD(1, &a[m][k], MUTANT == WRONG_A_STRIDE ? KP : KP * sizeof(uint16_t));
                TILE_LOAD(2, scratch, 64);
                if (MUTANT == RELEASED_TOO_EARLY && k + 32 >= K) release();
                if (MUTANT == SWAPPED_OPERANDS)
                    TILE_DPBF16(0, 2, 1);
                else
                    TILE_DPBF16(0, 1, 2);
            }
            TILE_STORE(0, &c[m][n], MUTANT == WRONG_C_STRIDE ? 64 : NP * sizeof(float));
        }
    release();

    int wrong = 0;
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) {
            float expected = 0;
            for (int k = 0; k < K; ++k) {
                const uint32_t x = (uint32_t)a[m][k] << 16, y = (uint32_t)b[k][n] << 16;
                float fx, fy;
                memcpy(&fx, &x, 4);
                memcpy(&fy, &y, 4);
                expected += fx * fy;
            }
            wrong += c[m][n] != expected;
        }
    printf("%d of %d values wrong\n", wrong, M * N);
    return wrong != 0;
}
