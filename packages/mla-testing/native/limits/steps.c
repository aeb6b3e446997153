/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Trip counts: how often each instruction of a mapped library is executed by the calling thread, by single-stepping it
 * (the trap flag raises SIGTRAP after every instruction). Joined with a disassembly by mla_testing.bench.amx.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <ucontext.h>
#include <x86intrin.h>

#define TRAP_FLAG 0x100ull

static uintptr_t low, high;
static uint32_t *counts;
static volatile sig_atomic_t ending;
static struct sigaction former;

static void on_trap(int number, siginfo_t *info, void *context) {
    (void)number;
    (void)info;
    ucontext_t *state = context;
    const uintptr_t at = (uintptr_t)state->uc_mcontext.gregs[REG_RIP]; /* what runs next */
    if (at >= low && at < high) ++counts[at - low];
    if (ending) state->uc_mcontext.gregs[REG_EFL] &= ~(greg_t)TRAP_FLAG;
}

/* From its return on, every instruction of this thread at an address in [begin, end) adds one to
 * table[address - begin]. 0, or an errno. Not reentrant. */
int mla_steps_start(uintptr_t begin, uintptr_t end, uint32_t *table) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_trap;
    action.sa_flags = SA_SIGINFO;
    low = begin;
    high = end;
    counts = table;
    ending = 0;
    if (sigaction(SIGTRAP, &action, &former)) return errno;
    __writeeflags(__readeflags() | TRAP_FLAG);
    return 0;
}

/* Ends it. */
void mla_steps_stop(void) {
    ending = 1;
    __asm__ volatile("nop\n\tnop"); /* the handler clears the flag here */
    sigaction(SIGTRAP, &former, NULL);
}

#else

int mla_steps_start(uintptr_t begin, uintptr_t end, uint32_t *table) {
    (void)begin;
    (void)end;
    (void)table;
    return ENOSYS;
}

void mla_steps_stop(void) {}

#endif
