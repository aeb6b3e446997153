// SPDX-License-Identifier: Apache-2.0
// The form for programs: LD_PRELOAD=libmla_amx_emulator.so with, in the environment,
//
//   MLA_AMX_EMULATOR=emulate   run AMX instructions in software
//   MLA_AMX_EMULATOR=strict    the same, but raise SIGILL until the program has asked the kernel for permission, as a
//                              kernel would; the request is answered here and never reaches the kernel
//   MLA_AMX_EMULATOR=denied    emulate, and refuse requests with EPERM: libraries that choose their code by the answer
//                              stay off AMX, and what is forced onto it stays emulated on a host with AMX
//   MLA_AMX_EMULATOR_ORDER     manual, sequential or vdpbf16ps
//   MLA_AMX_EMULATOR_PATCH=0   trap at every instruction, rewrite none
//   MLA_AMX_EMULATOR_PATCH=mprotect  rewrite without /proc/self/mem
//   MLA_AMX_EMULATOR_REPORT    file that gets the counters as JSON when the program exits ("stderr" too)
//
// Loaded by other means and without these variables the library does nothing by itself.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "emulator.h"
#include "signals.h"

static const char *mode_name = 0;

__attribute__((constructor)) static void preload(void) {
    const char *wish = getenv("MLA_AMX_EMULATOR");
    if (!wish || !*wish) return;
    const int strict = !strcmp(wish, "strict"), denied = !strcmp(wish, "denied");
    if (!strict && !denied && strcmp(wish, "emulate")) {
        fprintf(stderr, "MLA_AMX_EMULATOR: expected emulate, strict or denied, got %s\n", wish);
        _exit(2);
    }
    const char *order = getenv("MLA_AMX_EMULATOR_ORDER");
    static const char *const orders[] = {"manual", "sequential", "vdpbf16ps"};
    for (int i = 0; order && *order && i < 3; ++i)
        if (!strcmp(order, orders[i])) mla_amx_set_order(i);
    const char *patch = getenv("MLA_AMX_EMULATOR_PATCH");
    if (patch && !strcmp(patch, "0")) mla_amx_set_patching(0);
    if (patch && !strcmp(patch, "mprotect")) mla_amx_set_patching(2);
    if (strict || denied) {
        mla_amx_set_permission_required(strict);
        const int failed = mla_amx_intercept_permission(denied ? EPERM : 0);
        if (failed) {
            fprintf(stderr, "MLA_AMX_EMULATOR=%s needs seccomp filters: %s\n", wish, strerror(-failed));
            _exit(2);
        }
    }
    static const char *const modes[] = {"native", "emulated", "emulated-on-amx"};
    const int mode = mla_amx_install();
    mode_name = modes[mode];
    if (mode == MLA_AMX_NATIVE) fputs("mla-testing: AMX runs natively here, nothing is emulated or counted\n", stderr);
}

__attribute__((destructor)) static void report(void) {
    const char *path = getenv("MLA_AMX_EMULATOR_REPORT");
    if (!mode_name || !path || !*path) return;
    FILE *to = strcmp(path, "stderr") ? fopen(path, "w") : stderr;
    if (!to) return;
    uint64_t counts[64];
    const int n = mla_amx_counter_count();
    mla_amx_counters(counts);
    fprintf(to, "{\"mode\": \"%s\"", mode_name);
    for (int i = 0; i < n; ++i) fprintf(to, ", \"%s\": %llu", mla_amx_counter_name(i), (unsigned long long)counts[i]);
    fprintf(to, "}\n");
    if (to != stderr) fclose(to);
}

// ---- Interposed: a program's own handlers become the ones the emulator hands foreign signals to, and the signals it
// lives by cannot be blocked. Only effective when preloaded.

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

AMX_API int sigaction(int sig, const struct sigaction *act, struct sigaction *old) {
    return amx_former_action(sig, act, old) ? 0 : REAL(sigaction)(sig, act, old);
}

AMX_API __sighandler_t signal(int sig, __sighandler_t handler) {
    struct sigaction act = {.sa_handler = handler, .sa_flags = SA_RESTART}, old;
    sigemptyset(&act.sa_mask);
    return amx_former_action(sig, &act, &old) ? old.sa_handler : REAL(signal)(sig, handler);
}

static const sigset_t *open_set(int how, const sigset_t *set, sigset_t *room) {
    if (!set || how == SIG_UNBLOCK || mla_amx_installed() == 0) return set;
    *room = *set;
    sigdelset(room, SIGILL);
    sigdelset(room, SIGSEGV);
    sigdelset(room, SIGBUS);
    return room;
}

AMX_API int pthread_sigmask(int how, const sigset_t *set, sigset_t *old) {
    sigset_t room;
    return REAL(pthread_sigmask)(how, open_set(how, set, &room), old);
}

AMX_API int sigprocmask(int how, const sigset_t *set, sigset_t *old) {
    sigset_t room;
    return REAL(sigprocmask)(how, open_set(how, set, &room), old);
}
