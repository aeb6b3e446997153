// SPDX-License-Identifier: Apache-2.0
// SIGILL in, one or more executed AMX instructions out; and the C interface.
#define _GNU_SOURCE
#include <asm/prctl.h>
#include <cpuid.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include "dot.h"
#include "emulator.h"
#include "patch.h"
#include "signals.h"
#include "tiles.h"

extern uint8_t amx_copy_end[], amx_copy_fault[], amx_probe_site[], amx_probe_trapped[];
int amx_probe(void);

// ---- Threads ------------------------------------------------------------------------------------------------------

#define self amx_self
static struct amx_thread *_Atomic threads;

enum { ALTERNATE_STACK = 64 << 10 };

static int current_tid(void) { return (int)syscall(SYS_gettid); }

static int thread_is_gone(int tid) {
    return syscall(SYS_tgkill, getpid(), tid, 0) < 0 && errno == ESRCH;
}

// The state of this thread: of a thread that has ended (its counts go on), or new. Async-signal-safe; wants the lock.
static struct amx_thread *adopt_state(void) {
    const int tid = current_tid();
    struct amx_thread *t;
    for (t = threads; t; t = t->next)
        if (t->tid == tid || thread_is_gone(t->tid)) break;
    if (!t) {
        void *got = mmap(0, sizeof *t, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (got == MAP_FAILED) return 0;
        t = got;
        t->next = threads;
        t->tid = tid;
        threads = t;
    } else {
        t->tid = tid;
        memset(t->tile, 0, sizeof t->tile);
        memset(&t->config, 0, sizeof t->config);
        t->handed_on = 0;
        t->mark = 0;
    }
    return self = t;
}

// Traps on a thread that has no alternate signal stack need room below the program's stack pointer; from the second
// trap on they have their own. sigreturn installs what the frame says, so the frame has to say it.
static void give_alternate_stack(struct amx_thread *t, ucontext_t *uc) {
    if (!(uc->uc_stack.ss_flags & SS_DISABLE)) return;
    if (!t->alternate_stack) {
        void *got = mmap(0, ALTERNATE_STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
        if (got == MAP_FAILED) return;
        t->alternate_stack = got;
    }
    uc->uc_stack = (stack_t){.ss_sp = t->alternate_stack, .ss_size = ALTERNATE_STACK};
}

// ---- Executing ----------------------------------------------------------------------------------------------------

void (*amx_dot_best)(const struct amx_dot *) = amx_dot_sse2;

enum amx_fault amx_execute_dot(struct amx_thread *t, const struct amx_insn *insn) {
    struct amx_config *config = &t->config;
    if (amx_options.permission_required && !amx_options.permission_granted) return AMX_FAULT_UD;
    if (!config->palette) return AMX_FAULT_UD;
    const unsigned c = insn->dst, a = insn->src_a, b = insn->src_b;
    const unsigned rows = config->rows[c], columns = config->colsb[c], depth = config->colsb[a];
    if (!rows || !config->rows[a] || !config->rows[b]) return AMX_FAULT_UD;
    if (columns % 4 || depth % 4 || config->colsb[b] % 4) return AMX_FAULT_UD;
    if (config->rows[a] != rows || config->colsb[b] != columns || config->rows[b] != depth / 4) return AMX_FAULT_UD;

    const struct amx_dot dot = {
        .op = insn->op,
        .order = (uint8_t)amx_options.order,
        .rows = rows,
        .depth = depth / 4,
        .columns = columns / 4,
        .c = t->tile[c],
        .a = (const uint8_t(*)[AMX_COLSB])t->tile[a],
        .b = (const uint8_t(*)[AMX_COLSB])t->tile[b],
    };
    amx_call_dot(amx_dot_best, &dot);
    config->start_row = 0;
    t->counter[insn->op]++;
    t->counter[AMX_TALLY_tmul_rows] += rows;
    t->counter[AMX_TALLY_macs] +=
        rows * (columns / 4) * (insn->op == AMX_TDPBF16PS || insn->op == AMX_TDPFP16PS ? depth / 2 : depth);
    return AMX_OK;
}

static enum amx_fault execute(struct amx_thread *t, const struct amx_insn *insn, const struct amx_registers *regs,
                              uint64_t next_rip) {
    if (amx_is_dot(insn->op)) return amx_execute_dot(t, insn);
    const enum amx_fault fault = amx_execute_move(t, insn, regs, next_rip);
    // A non-canonical address is #GP, but #SS, and with it another signal, through the registers of the stack.
    if (fault == AMX_FAULT_MEMORY && t->fault_info.si_code == SI_KERNEL && !insn->segment &&
        (insn->base == 4 || insn->base == 5)) {
        t->fault_signal = t->fault_info.si_signo = SIGBUS;
    }
    return fault;
}

// ---- Stubs --------------------------------------------------------------------------------------------------------
//
// amx_stub_move is in stub_move.c, which knows no vector registers; this one runs behind saved ones.

int amx_stub_dot(const struct amx_registers *regs, const struct amx_site *site) {
    (void)regs;
    struct amx_thread *t = self;
    if (!t) return AMX_FAULT_UD;
    if (amx_options.native_config) amx_follow_native_config(t);
    return amx_execute_dot(t, &site->insn);
}

// ---- The configuration of an AMX host, in a signal frame ----------------------------------------------------------

static unsigned frame_config_offset;  // of XTILECFG in the standard format

enum { XFEATURES_AT = 464 + 8, FRAME_MAGIC_AT = 464, XSTATE_BV_AT = 512, FRAME_MAGIC = 0x46505853 };
#define XTILECFG_BIT (1ull << 17)

// Where the interrupted program's tile configuration lies, or 0. In the handler itself the unit is in its initial
// state.
static struct amx_config *frame_config(ucontext_t *uc, uint64_t **xstate_bv) {
    uint8_t *fp = (uint8_t *)uc->uc_mcontext.fpregs;
    uint32_t magic;
    uint64_t features;
    if (!fp) return 0;
    memcpy(&magic, fp + FRAME_MAGIC_AT, 4);
    memcpy(&features, fp + XFEATURES_AT, 8);
    if (magic != FRAME_MAGIC || !(features & XTILECFG_BIT)) return 0;
    *xstate_bv = (uint64_t *)(fp + XSTATE_BV_AT);
    return (struct amx_config *)(fp + frame_config_offset);
}

static void follow_frame_config(struct amx_thread *t, ucontext_t *uc) {
    uint64_t *bv;
    struct amx_config *in_frame = frame_config(uc, &bv), none = {0};
    if (in_frame && *bv & XTILECFG_BIT)
        amx_follow_config(t, in_frame);  // marked in place, sigreturn loads it
    else
        amx_follow_config(t, &none);
}

// ---- Signals ------------------------------------------------------------------------------------------------------

enum { SIGNALS = 3 };
static const int our_signals[SIGNALS] = {SIGILL, SIGSEGV, SIGBUS};
static struct sigaction former[SIGNALS];
static int installed, patching = 1;

static int slot_of_signal(int sig) { return sig == SIGILL ? 0 : sig == SIGSEGV ? 1 : 2; }

// Hands a signal that is not ours to whoever had it before us, as the kernel would have.
static void chain(int sig, siginfo_t *info, ucontext_t *uc) {
    const struct sigaction *f = &former[slot_of_signal(sig)];
    const int from_kernel = info->si_code > 0;
    const int is_default = !(f->sa_flags & SA_SIGINFO) && f->sa_handler == SIG_DFL;
    const int is_ignored = !(f->sa_flags & SA_SIGINFO) && f->sa_handler == SIG_IGN;
    // A handler that raises its signal again after handing the action back to us (faulthandler does) must not go round:
    // it wants what comes after it. Each round would also nest in an alternate stack that is made for one or two.
    const int raised_again = self && self->handed_on && !from_kernel;
    if (is_ignored && !from_kernel) return;
    if (is_default || is_ignored || raised_again) {
        struct sigaction die = {.sa_handler = SIG_DFL};
        amx_sigaction(sig, &die, 0);
        sigdelset(&uc->uc_sigmask, sig);
        if (!from_kernel) syscall(SYS_tgkill, getpid(), current_tid(), sig);
        return;  // the instruction faults again, and now for good
    }
    sigset_t mask = uc->uc_sigmask;
    for (int s = 1; s < _NSIG; ++s)
        if (sigismember(&f->sa_mask, s) == 1) sigaddset(&mask, s);
    if (f->sa_flags & SA_NODEFER)
        sigdelset(&mask, sig);
    else
        sigaddset(&mask, sig);
    amx_sigmask(SIG_SETMASK, &mask, 0);
    struct amx_thread *t = self;
    const int before = t && t->handed_on;
    if (t) t->handed_on = 1;
    if (f->sa_flags & SA_SIGINFO)
        f->sa_sigaction(sig, info, uc);
    else
        f->sa_handler(sig);
    if (t) t->handed_on = before;
}

// Raises a signal at the site itself: blocked until our handler has returned there, so that whatever is installed for
// it sees the program's registers.
static void raise_at(ucontext_t *uc, uint64_t rip, int sig, siginfo_t *info) {
    sigset_t one;
    sigemptyset(&one);
    sigaddset(&one, sig);
    amx_sigmask(SIG_BLOCK, &one, 0);
    sigdelset(&uc->uc_sigmask, sig);
    uc->uc_mcontext.gregs[REG_RIP] = (greg_t)rip;
    syscall(SYS_rt_tgsigqueueinfo, getpid(), current_tid(), sig, info);
}

static const int greg_of[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

// How many instructions in a row one trap may execute; bounds the time with signals blocked.
enum { RUN = 4096 };

AMX_HANDLER on_sigill(int sig, siginfo_t *info, void *context) {
    const int saved_errno = errno;
    ucontext_t *uc = context;
    uint64_t rip = (uint64_t)uc->uc_mcontext.gregs[REG_RIP];
    if (info->si_code <= 0) {
        chain(sig, info, uc);
        errno = saved_errno;
        return;
    }
    if (rip == (uint64_t)amx_probe_site) {
        uc->uc_mcontext.gregs[REG_RIP] = (greg_t)amx_probe_trapped;
        return;
    }

    struct amx_insn insn;
    amx_lock();
    const struct amx_site *site = amx_faulting_site((uint8_t *)rip);
    if (site) {
        rip = (uint64_t)site->address;
        uc->uc_mcontext.gregs[REG_RIP] = (greg_t)rip;
    } else {
        site = amx_find_site((uint8_t *)rip);
    }
    int known = 1;
    if (site)
        insn = site->insn;
    else
        known = amx_decode((uint8_t *)rip, &insn);
    struct amx_thread *t = self;
    if (known && !t) t = adopt_state();
    amx_unlock();
    if (!known || !t) {
        chain(sig, info, uc);
        errno = saved_errno;
        return;
    }

    give_alternate_stack(t, uc);
    t->counter[AMX_TALLY_traps]++;
    if (amx_options.native_config) follow_frame_config(t, uc);
    struct amx_registers regs;
    for (int i = 0; i < 16; ++i) regs.r[i] = (uint64_t)uc->uc_mcontext.gregs[greg_of[i]];

    for (int i = 0; i < RUN; ++i) {
        if (!site && patching) {
            amx_lock();
            if (!amx_find_site((uint8_t *)rip) && amx_patch((uint8_t *)rip, &insn))
                t->counter[AMX_TALLY_sites_patched]++;
            amx_unlock();
        }
        const uint64_t next = rip + insn.length;
        switch (execute(t, &insn, &regs, next)) {
        case AMX_OK:
            break;
        case AMX_FAULT_UD:
            uc->uc_mcontext.gregs[REG_RIP] = (greg_t)rip;
            info->si_addr = (void *)rip;
            info->si_code = ILL_ILLOPN;
            chain(sig, info, uc);
            errno = saved_errno;
            return;
        case AMX_FAULT_GP: {
            siginfo_t gp = {.si_signo = SIGSEGV, .si_code = SI_KERNEL};
            raise_at(uc, rip, SIGSEGV, &gp);
            errno = saved_errno;
            return;
        }
        case AMX_FAULT_MEMORY:
            raise_at(uc, rip, t->fault_signal, &t->fault_info);
            errno = saved_errno;
            return;
        }
        rip = next;
        uc->uc_mcontext.gregs[REG_RIP] = (greg_t)rip;
        // The following instruction, unless it would not have trapped: another kind, patched, or configuration on a
        // host that runs it.
        site = 0;
        if (uc->uc_mcontext.gregs[REG_EFL] & 0x100) break;  // single-stepped
        amx_lock();  // or another thread might be rewriting what is decoded here
        const int more = amx_decode((uint8_t *)rip, &insn);
        amx_unlock();
        if (!more) break;
        if (amx_options.native_config && !amx_is_tile_data(insn.op)) break;
    }
    errno = saved_errno;
}

AMX_HANDLER on_memory_fault(int sig, siginfo_t *info, void *context) {
    const int saved_errno = errno;
    ucontext_t *uc = context;
    const uint64_t rip = (uint64_t)uc->uc_mcontext.gregs[REG_RIP];
    if (self && info->si_code > 0 && rip >= (uint64_t)amx_copy && rip < (uint64_t)amx_copy_end) {
        self->fault_signal = sig;
        self->fault_info = *info;
        uc->uc_mcontext.gregs[REG_RIP] = (greg_t)amx_copy_fault;
    } else {
        chain(sig, info, uc);
    }
    errno = saved_errno;
}

static void take_signal(int index) {
    const int sig = our_signals[index];
    struct sigaction ours = {.sa_flags = SA_SIGINFO | SA_ONSTACK}, now;
    ours.sa_sigaction = sig == SIGILL ? on_sigill : on_memory_fault;
    // While SIGILL is handled the memory signals must stay open: that is how a faulting operand is noticed.
    if (sig == SIGILL) {
        sigfillset(&ours.sa_mask);
        sigdelset(&ours.sa_mask, SIGSEGV);
        sigdelset(&ours.sa_mask, SIGBUS);
    } else {
        sigemptyset(&ours.sa_mask);
    }
    amx_sigaction(sig, 0, &now);
    if (now.sa_flags & SA_SIGINFO && now.sa_sigaction == ours.sa_sigaction) return;
    former[index] = now;
    amx_sigaction(sig, &ours, 0);
}

static void release_signal(int index) {
    const int sig = our_signals[index];
    struct sigaction now;
    amx_sigaction(sig, 0, &now);
    if (now.sa_flags & SA_SIGINFO && (now.sa_sigaction == on_sigill || now.sa_sigaction == on_memory_fault))
        amx_sigaction(sig, &former[index], 0);
}

// A preloaded program's own sigaction calls end here.
int amx_former_action(int sig, const struct sigaction *act, struct sigaction *old) {
    if (!installed || (sig != SIGILL && sig != SIGSEGV && sig != SIGBUS)) return 0;
    struct sigaction *f = &former[slot_of_signal(sig)];
    if (old) *old = *f;
    if (act) *f = *act;
    return 1;
}

// ---- Forks --------------------------------------------------------------------------------------------------------

static void before_fork(void) { amx_lock(); }

static void after_fork_in_parent(void) { amx_unlock(); }

static void after_fork_in_child(void) {
    amx_patch_forked();  // releases the lock
    // The other threads are not here; their tids may be, in time.
    for (struct amx_thread *t = threads; t; t = t->next) t->tid = t == self ? current_tid() : -1;
}

// ---- Interface ----------------------------------------------------------------------------------------------------

static uint64_t xcr0(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low | (uint64_t)high << 32;
}

static int amx_unit_enabled(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & (1u << 24))) return 0;  // AMX-TILE
    return (xcr0() >> 17 & 3) == 3;
}

static pthread_mutex_t interface = PTHREAD_MUTEX_INITIALIZER;

static int handler_in_place(void) {
    struct sigaction now;
    amx_sigaction(SIGILL, 0, &now);
    return now.sa_flags & SA_SIGINFO && now.sa_sigaction == on_sigill;
}

static struct sigaction around_probe;

AMX_HANDLER on_probe(int sig, siginfo_t *info, void *context) {
    ucontext_t *uc = context;
    if (uc->uc_mcontext.gregs[REG_RIP] == (greg_t)amx_probe_site)
        uc->uc_mcontext.gregs[REG_RIP] = (greg_t)amx_probe_trapped;
    else if (around_probe.sa_flags & SA_SIGINFO)
        around_probe.sa_sigaction(sig, info, context);
    else
        amx_sigaction(SIGILL, &around_probe, 0);  // the instruction traps again, into that
}

static int mode_now(void) {
    if (!amx_unit_enabled()) return MLA_AMX_EMULATED;
    // The instruction itself tells, whatever kernel or sandbox is underneath.
    if (handler_in_place()) return amx_probe() ? MLA_AMX_NATIVE : MLA_AMX_EMULATED_ON_AMX;
    struct sigaction probe = {.sa_flags = SA_SIGINFO | SA_ONSTACK};
    probe.sa_sigaction = on_probe;
    sigfillset(&probe.sa_mask);
    amx_sigaction(SIGILL, &probe, &around_probe);
    const int native = amx_probe();
    amx_sigaction(SIGILL, &around_probe, 0);
    return native ? MLA_AMX_NATIVE : MLA_AMX_EMULATED_ON_AMX;
}

int mla_amx_mode(void) {
    pthread_mutex_lock(&interface);
    const int mode = mode_now();
    pthread_mutex_unlock(&interface);
    return mode;
}

int mla_amx_install(void) {
    pthread_mutex_lock(&interface);
    const int mode = mode_now();
    if (mode == MLA_AMX_NATIVE) {
        pthread_mutex_unlock(&interface);
        return mode;
    }
    amx_options.native_config = mode == MLA_AMX_EMULATED_ON_AMX;
    if (amx_options.native_config) {
        unsigned a, b, c, d;
        __cpuid_count(0xd, 17, a, b, c, d);
        frame_config_offset = b;
    }
    if (__builtin_cpu_supports("avx512bw"))
        amx_dot_best = amx_dot_avx512;
    else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        amx_dot_best = amx_dot_avx2;
    static int fork_handlers;
    if (!fork_handlers) fork_handlers = !pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    for (int i = 0; i < SIGNALS; ++i) take_signal(i);
    installed = 1;
    pthread_mutex_unlock(&interface);
    return mode;
}

void mla_amx_uninstall(void) {
    pthread_mutex_lock(&interface);
    if (installed) {
        amx_lock();
        amx_unpatch_all();
        amx_unlock();
        for (int i = 0; i < SIGNALS; ++i) release_signal(i);
        installed = 0;
    }
    pthread_mutex_unlock(&interface);
}

int mla_amx_installed(void) {
    if (!installed) return 0;
    return handler_in_place() ? 1 : -1;
}

static const char *const names[AMX_COUNTERS] = {
#define X(name) #name,
    AMX_OPS(X) AMX_TALLIES(X)
#undef X
};

int mla_amx_counter_count(void) { return AMX_COUNTERS; }

const char *mla_amx_counter_name(int index) { return index >= 0 && index < AMX_COUNTERS ? names[index] : 0; }

void mla_amx_counters(uint64_t *out) {
    memset(out, 0, AMX_COUNTERS * sizeof *out);
    for (struct amx_thread *t = threads; t; t = t->next)
        for (int i = 0; i < AMX_COUNTERS; ++i) out[i] += __atomic_load_n(&t->counter[i], __ATOMIC_RELAXED);
}

int mla_amx_set_order(int order) {
    const int before = amx_options.order;
    if (order < 0 || order >= AMX_ORDERS) return -EINVAL;
    amx_options.order = order;
    return before;
}

int mla_amx_set_patching(int on) {
    const int before = amx_patch_by_mprotect ? 2 : patching;
    patching = on != 0;
    amx_patch_by_mprotect = on == 2;
    return before;
}

int mla_amx_set_permission_required(int on) {
    const int before = amx_options.permission_required;
    amx_options.permission_required = on;
    return before;
}

int mla_amx_dot(int floor, int op, int order, int rows, int depth, int columns, void *c, const void *a,
                const void *b) {
    if (floor == 2 && !__builtin_cpu_supports("avx512bw")) return -1;
    if (floor == 1 && !(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) return -1;
    const struct amx_dot dot = {(uint8_t)op, (uint8_t)order, (uint8_t)rows, (uint8_t)depth, (uint8_t)columns, c, a, b};
    amx_call_dot(floor == 2 ? amx_dot_avx512 : floor == 1 ? amx_dot_avx2 : amx_dot_sse2, &dot);
    return 0;
}

int mla_amx_decode(const void *code, int32_t fields[11]) {
    struct amx_insn i;
    if (!amx_decode(code, &i)) return 0;
    const int32_t all[11] = {i.op,      i.dst,       i.src_a,        i.src_b, i.base == AMX_NO_REG ? -1 : i.base,
                             i.index == AMX_NO_REG ? -1 : i.index, i.scale, i.segment, i.address32, i.rip_relative,
                             i.disp};
    memcpy(fields, all, sizeof all);
    return i.length;
}

int mla_amx_step(const void *code, const uint64_t registers[16], uint64_t result[3]) {
    struct amx_insn insn;
    struct amx_registers regs;
    memset(result, 0, 3 * sizeof *result);
    if (!amx_decode(code, &insn)) return 0;
    memcpy(&regs, registers, sizeof regs);
    if (!self) {
        amx_lock();
        adopt_state();
        amx_unlock();
    }
    switch (execute(self, &insn, &regs, (uint64_t)code + insn.length)) {
    case AMX_OK:
        break;
    case AMX_FAULT_UD:
        result[0] = SIGILL, result[1] = ILL_ILLOPN, result[2] = (uint64_t)code;
        break;
    case AMX_FAULT_GP:
        result[0] = SIGSEGV, result[1] = SI_KERNEL;
        break;
    case AMX_FAULT_MEMORY:
        result[0] = (uint64_t)self->fault_signal, result[1] = (uint64_t)self->fault_info.si_code;
        result[2] = (uint64_t)self->fault_info.si_addr;
        break;
    }
    return insn.length;
}
