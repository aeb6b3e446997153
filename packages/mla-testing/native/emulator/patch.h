// SPDX-License-Identifier: Apache-2.0
// Instructions rewritten into jumps to stubs.
#pragma once

#include "tiles.h"

struct amx_site {
    uint8_t *address;
    struct amx_insn insn;
    uint8_t original[AMX_MIN_LENGTH];
    uint8_t patched;
    uint8_t refused;  // cannot be patched, keeps trapping
    uint8_t *stub;
};

// Nonzero: write code through mprotect alone, which is otherwise the way where /proc/self/mem cannot be written.
extern int amx_patch_by_mprotect;

// All of these want the lock.
void amx_lock(void);
void amx_unlock(void);

// The site at `address` whose bytes in memory are ours, or 0.
struct amx_site *amx_find_site(const uint8_t *address);

// Rewrites the decoded instruction at `address`. Returns 1, or 0 when the site has to keep trapping (its memory cannot
// be written, no memory within reach of a jump, table full).
int amx_patch(uint8_t *address, const struct amx_insn *insn);

// The site whose stub raised the UD2 at `rip`, or 0.
struct amx_site *amx_faulting_site(const uint8_t *rip);

// Puts all original bytes back. Stubs stay, threads may be in them.
void amx_unpatch_all(void);

// In the child of a fork.
void amx_patch_forked(void);
