// SPDX-License-Identifier: Apache-2.0
// Two threads run into the same fresh sites at the same time, again and again, with different tile shapes and values.
// Every result is checked; prints the number of sites and exits with 0 if all were right.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "tiles.h"

enum { SITES = 400, ROUNDS = 20 };

// tileloadd, tileloadd, tdpbf16ps, ret; registers: rdi A, rsi B, rdx stride.
static const uint8_t code[] = {
    0xc4, 0xe2, 0x7b, 0x4b, 0x0c, 0x17,  // tileloadd (%rdi,%rdx,1), %tmm1
    0xc4, 0xe2, 0x7b, 0x4b, 0x14, 0x16,  // tileloadd (%rsi,%rdx,1), %tmm2
    0xc4, 0xe2, 0x6a, 0x5c, 0xc1,        // tdpbf16ps %tmm2, %tmm1, %tmm0
    0xc3,
};
enum { STRIDE = 61 };  // sites fall across cache lines and pages

static uint8_t *text;
static pthread_barrier_t barrier;
static int failures;

static void *work(void *argument) {
    const int me = (int)(intptr_t)argument, rows = me ? 16 : 7, pairs = me ? 9 : 16, columns = me ? 5 : 16;
    uint16_t a[16][32], b[16][32];
    float c[16][16];
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 32; ++j) a[i][j] = to_bf16((float)(i + 1 + me)), b[i][j] = to_bf16((float)(j / 2 + 1));
    struct config shape = uniform(rows, 64);
    for (int t = 0; t < 8; ++t) {
        shape.rows[t] = (uint8_t)(t == 2 ? pairs : rows);
        shape.colsb[t] = (uint16_t)(t == 1 ? 4 * pairs : 4 * columns);
    }
    load_config(&shape);
    for (int round = 0; round < ROUNDS; ++round)
        for (int site = 0; site < SITES; ++site) {
            TILE_ZERO(0);
            if (round == 0) pthread_barrier_wait(&barrier);
            ((void (*)(const void *, const void *, int64_t))(uintptr_t)(text + site * STRIDE))(a, b, 64);
            TILE_STORE(0, c, 64);
            for (int i = 0; i < rows; ++i)
                for (int j = 0; j < columns; ++j)
                    if (c[i][j] != (float)(2 * pairs * (i + 1 + me) * (j + 1))) __atomic_fetch_add(&failures, 1, 0);
        }
    release();
    return 0;
}

int main(void) {
    text = mmap(0, SITES * STRIDE + 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (int i = 0; i < SITES; ++i) memcpy(text + i * STRIDE, code, sizeof code);
    pthread_barrier_init(&barrier, 0, 2);
    pthread_t threads[2];
    for (intptr_t i = 0; i < 2; ++i) pthread_create(&threads[i], 0, work, (void *)i);
    for (int i = 0; i < 2; ++i) pthread_join(threads[i], 0);
    printf("%d sites, %d wrong values\n", SITES * 3, failures);
    return failures != 0;
}
