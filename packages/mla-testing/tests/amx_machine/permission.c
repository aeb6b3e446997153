// SPDX-License-Identifier: Apache-2.0
// permission <no|library|inline>: asks the kernel for AMX in that way, then loads a tile.
#define _GNU_SOURCE
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tiles.h"

enum { GET = 0x1022, REQUEST = 0x1023, XTILEDATA = 18 };

static long inlined(long code, unsigned long argument) {
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"((long)SYS_arch_prctl), "D"(code), "S"(argument)
                     : "rcx", "r11", "memory");
    return result;
}

int main(int argc, char **argv) {
    const char *how = argc > 1 ? argv[1] : "no";
    unsigned long before = 0, after = 0;
    syscall(SYS_arch_prctl, GET, &before);
    long result = 0;
    if (!strcmp(how, "library")) result = syscall(SYS_arch_prctl, REQUEST, XTILEDATA);
    if (!strcmp(how, "inline")) result = inlined(REQUEST, XTILEDATA);
    inlined(GET, (unsigned long)&after);
    printf("%s: %ld, granted before %lu after %lu\n", how, result, before >> XTILEDATA & 1, after >> XTILEDATA & 1);
    fflush(stdout);
    const struct config shape = uniform(16, 64);
    uint8_t from[1024], to[1024];
    memset(from, 7, sizeof from);
    load_config(&shape);
    TILE_LOAD(0, from, 64);
    TILE_STORE(0, to, 64);
    return memcmp(from, to, sizeof to) != 0;
}
