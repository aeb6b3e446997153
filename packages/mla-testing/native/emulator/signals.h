// SPDX-License-Identifier: Apache-2.0
// Signal system calls that the interposed library functions (preload.c) do not see.
#pragma once

#include <signal.h>

// Handlers align their stack themselves: QEMU's user mode enters them with any alignment.
#define AMX_HANDLER __attribute__((force_align_arg_pointer)) static void

int amx_sigaction(int sig, const struct sigaction *act, struct sigaction *old);
int amx_sigmask(int how, const sigset_t *set, sigset_t *old);

// Answers sigaction(sig, act, old) for a signal the emulator has taken over; 0 when it has not.
int amx_former_action(int sig, const struct sigaction *act, struct sigaction *old);
