// SPDX-License-Identifier: Apache-2.0
#define _GNU_SOURCE
#include "signals.h"

#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SA_RESTORER_FLAG = 0x04000000 };

// What the kernel reads; the library's struct has a longer mask and another order.
struct kernel_sigaction {
    void *handler;
    unsigned long flags;
    void (*restorer)(void);
    uint64_t mask;
};

void amx_restore(void);
__asm__(
    ".text\n"
    ".hidden amx_restore\n"
    ".globl amx_restore\n"
    ".type amx_restore, @function\n"
    "amx_restore: mov $15, %eax\n"  // rt_sigreturn
    "syscall\n"
    ".size amx_restore, .-amx_restore\n");

int amx_sigaction(int sig, const struct sigaction *act, struct sigaction *old) {
    struct kernel_sigaction new_action = {0}, old_action = {0};
    if (act) {
        new_action.handler = (void *)act->sa_handler;
        new_action.flags = (unsigned)act->sa_flags | SA_RESTORER_FLAG;
        new_action.restorer = act->sa_flags & SA_RESTORER_FLAG && act->sa_restorer ? act->sa_restorer : amx_restore;
        memcpy(&new_action.mask, &act->sa_mask, sizeof new_action.mask);
    }
    const int result = (int)syscall(SYS_rt_sigaction, sig, act ? &new_action : 0, old ? &old_action : 0, 8);
    if (old && !result) {
        memset(old, 0, sizeof *old);
        old->sa_handler = (void (*)(int))old_action.handler;
        old->sa_flags = (int)old_action.flags;
        old->sa_restorer = old_action.restorer;
        memcpy(&old->sa_mask, &old_action.mask, sizeof old_action.mask);
    }
    return result;
}

int amx_sigmask(int how, const sigset_t *set, sigset_t *old) {
    return (int)syscall(SYS_rt_sigprocmask, how, set, old, 8);
}
