// SPDX-License-Identifier: Apache-2.0
// arch_prctl(ARCH_REQ_XCOMP_PERM) and ARCH_GET_XCOMP_PERM, kept from the kernel.
#define _GNU_SOURCE
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include "emulator.h"
#include "signals.h"
#include "tiles.h"

enum { GET_XCOMP_PERM = 0x1022, REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };

enum { CODE_SECCOMP = 1 };  // si_code of a SIGSYS from a filter; the library's headers do not name it

static struct sigaction former;

static long answer(long code, unsigned long argument) {
    if (code == REQ_XCOMP_PERM) {
        if (argument != XTILEDATA) return -EOPNOTSUPP;
        amx_options.permission_granted = 1;
        return 0;
    }
    // x87, SSE, AVX, AVX-512, PKRU, XTILECFG, and XTILEDATA once asked for.
    const uint64_t mask = 0x202e7 | (uint64_t)amx_options.permission_granted << XTILEDATA;
    return amx_copy((void *)argument, &mask, sizeof mask) ? -EFAULT : 0;
}

AMX_HANDLER on_sigsys(int sig, siginfo_t *info, void *context) {
    greg_t *regs = ((ucontext_t *)context)->uc_mcontext.gregs;
    if (info->si_code == CODE_SECCOMP && info->si_syscall == SYS_arch_prctl &&
        (regs[REG_RDI] == GET_XCOMP_PERM || regs[REG_RDI] == REQ_XCOMP_PERM)) {
        regs[REG_RAX] = answer(regs[REG_RDI], (unsigned long)regs[REG_RSI]);
    } else if (former.sa_flags & SA_SIGINFO) {
        former.sa_sigaction(sig, info, context);
    } else if (former.sa_handler != SIG_DFL && former.sa_handler != SIG_IGN) {
        former.sa_handler(sig);
    } else {
        amx_sigaction(sig, &former, 0);
        raise(sig);
    }
}

int mla_amx_intercept_permission(int error) {
    const uint32_t request = error ? SECCOMP_RET_ERRNO | ((uint32_t)error & SECCOMP_RET_DATA) : SECCOMP_RET_TRAP;
    // What a refusing kernel answers to GET is the truth: leave it alone then.
    const uint32_t query = error ? SECCOMP_RET_ALLOW : SECCOMP_RET_TRAP;
    struct sock_filter program[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_X86_64, 0, 7),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_arch_prctl, 0, 5),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[0])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, REQ_XCOMP_PERM, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, GET_XCOMP_PERM, 1, 2),
        BPF_STMT(BPF_RET | BPF_K, request),
        BPF_STMT(BPF_RET | BPF_K, query),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {sizeof program / sizeof *program, program};
    if (!error) {
        struct sigaction ours = {.sa_flags = SA_SIGINFO | SA_ONSTACK};
        ours.sa_sigaction = on_sigsys;
        if (amx_sigaction(SIGSYS, &ours, &former)) return -errno;
    }
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return -errno;
    const long result = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &filter);
    return result < 0 ? -errno : result > 0 ? -ESRCH : 0;
}
