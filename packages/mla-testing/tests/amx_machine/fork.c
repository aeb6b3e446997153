// SPDX-License-Identifier: Apache-2.0
// Forks while another thread runs AMX code and sites are being patched; parent and children meet sites the other has
// not patched. Exits with 0 if all results were right.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tiles.h"

enum { SITES = 300, FORKS = 10 };
static const uint8_t code[] = {0xc4, 0xe2, 0x7b, 0x4b, 0x0c, 0x37, 0xc3};  // tileloadd (%rdi,%rsi,1), %tmm1; ret
static uint8_t *text;
static volatile int stop;

static int check(int site, int value) {
    uint8_t from[1024], to[1024];
    memset(from, value, sizeof from);
    memset(to, 0, sizeof to);
    ((void (*)(const void *, int64_t))(uintptr_t)(text + site * 16))(from, 64);
    TILE_STORE(1, to, 64);
    return memcmp(from, to, sizeof to) != 0;
}

static void *other(void *argument) {
    (void)argument;
    const struct config shape = uniform(16, 64);
    load_config(&shape);
    intptr_t wrong = 0;
    for (int i = 0; !stop || i < SITES; ++i) wrong += check(i % SITES, i & 0xff);
    release();
    return (void *)wrong;
}

int main(void) {
    text = mmap(0, SITES * 16, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (int i = 0; i < SITES; ++i) memcpy(text + i * 16, code, sizeof code);
    const struct config shape = uniform(16, 64);
    load_config(&shape);
    uint8_t mark[1024], back[1024];
    memset(mark, 0x5a, sizeof mark);
    TILE_LOAD(3, mark, 64);
    pthread_t thread;
    pthread_create(&thread, 0, other, 0);
    int wrong = 0;
    for (int f = 0; f < FORKS; ++f) {
        const pid_t child = fork();
        if (!child) {
            // The tile the parent loaded, sites from the far end, and a thread of its own.
            int bad = 0;
            TILE_STORE(3, back, 64);
            bad += memcmp(mark, back, sizeof mark) != 0;
            for (int s = SITES - 1; s >= 0; --s) bad += check(s, s & 0xff);
            stop = 1;
            pthread_t mine;
            void *its = 0;
            pthread_create(&mine, 0, other, 0);
            pthread_join(mine, &its);
            _exit(bad || its ? 1 : 0);
        }
        int status;
        waitpid(child, &status, 0);
        wrong += status != 0;
        if (status) fprintf(stderr, "child %d: status %#x\n", f, status);
    }
    stop = 1;
    void *its = 0;
    pthread_join(thread, &its);
    TILE_STORE(3, back, 64);
    wrong += memcmp(mark, back, sizeof mark) != 0;
    printf("%d wrong, thread %ld wrong\n", wrong, (long)(intptr_t)its);
    return wrong || its;
}
