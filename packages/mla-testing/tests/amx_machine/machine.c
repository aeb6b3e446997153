// SPDX-License-Identifier: Apache-2.0
// Runs one instruction with every register chosen, and tells every register, signal and byte of the red zone after it.
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

struct state {
    uint64_t gpr[16];  // rax rcx rdx rbx rsp rbp rsi rdi r8..r15
    uint64_t rflags;   // 128
    uint32_t mxcsr;    // 136
    uint32_t level;    // 140: 0 SSE, 1 AVX, 2 AVX-512
    uint64_t k[8];     // 144
    uint8_t zmm[32][64];  // 208
    uint8_t red[128];
};
_Static_assert(__builtin_offsetof(struct state, zmm) == 208, "entered from assembly");

struct event {
    uint64_t signal, code, address, rip;
};

void machine_enter(struct state *, const void *code);
extern char machine_back[];

__asm__(
    ".text\n"
    ".globl machine_enter, machine_back\n"
    ".hidden machine_enter, machine_back\n"
    "machine_enter:\n"
    "push %rbx\n push %rbp\n push %r12\n push %r13\n push %r14\n push %r15\n"
    "mov %rsp, host_rsp(%rip)\n mov %rsi, target(%rip)\n mov %rdi, current(%rip)\n"
    "cmpl $1, 140(%rdi)\n jb 1f\n je 2f\n"
    ".irp n, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31\n"
    "vmovdqu64 208+\\n*64(%rdi), %zmm\\n\n"
    ".endr\n"
    ".irp n, 0,1,2,3,4,5,6,7\n"
    "kmovq 144+\\n*8(%rdi), %k\\n\n"
    ".endr\n"
    "jmp 3f\n"
    "1:\n"
    ".irp n, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15\n"
    "movdqu 208+\\n*64(%rdi), %xmm\\n\n"
    ".endr\n"
    "jmp 3f\n"
    "2:\n"
    ".irp n, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15\n"
    "vmovdqu 208+\\n*64(%rdi), %ymm\\n\n"
    ".endr\n"
    "3: ldmxcsr 136(%rdi)\n"
    "pushq 128(%rdi)\n popfq\n"
    "mov 0(%rdi), %rax\n mov 8(%rdi), %rcx\n mov 16(%rdi), %rdx\n mov 24(%rdi), %rbx\n mov 32(%rdi), %rsp\n"
    "mov 40(%rdi), %rbp\n mov 48(%rdi), %rsi\n mov 64(%rdi), %r8\n mov 72(%rdi), %r9\n mov 80(%rdi), %r10\n"
    "mov 88(%rdi), %r11\n mov 96(%rdi), %r12\n mov 104(%rdi), %r13\n mov 112(%rdi), %r14\n mov 120(%rdi), %r15\n"
    "mov 56(%rdi), %rdi\n"
    "jmp *target(%rip)\n"
    "machine_back:\n"
    "mov %rdi, keep(%rip)\n mov current(%rip), %rdi\n"
    "mov %rax, 0(%rdi)\n mov %rcx, 8(%rdi)\n mov %rdx, 16(%rdi)\n mov %rbx, 24(%rdi)\n mov %rsp, 32(%rdi)\n"
    "mov %rbp, 40(%rdi)\n mov %rsi, 48(%rdi)\n mov %r8, 64(%rdi)\n mov %r9, 72(%rdi)\n mov %r10, 80(%rdi)\n"
    "mov %r11, 88(%rdi)\n mov %r12, 96(%rdi)\n mov %r13, 104(%rdi)\n mov %r14, 112(%rdi)\n mov %r15, 120(%rdi)\n"
    "mov keep(%rip), %rax\n mov %rax, 56(%rdi)\n"
    "mov host_rsp(%rip), %rsp\n pushfq\n popq 128(%rdi)\n cld\n stmxcsr 136(%rdi)\n"
    "movl $0x1f80, keep(%rip)\n ldmxcsr keep(%rip)\n"
    "cmpl $1, 140(%rdi)\n jb 1f\n je 2f\n"
    ".irp n, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31\n"
    "vmovdqu64 %zmm\\n, 208+\\n*64(%rdi)\n"
    ".endr\n"
    ".irp n, 0,1,2,3,4,5,6,7\n"
    "kmovq %k\\n, 144+\\n*8(%rdi)\n"
    ".endr\n"
    "vzeroupper\n jmp 3f\n"
    "1:\n"
    ".irp n, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15\n"
    "movdqu %xmm\\n, 208+\\n*64(%rdi)\n"
    ".endr\n"
    "jmp 3f\n"
    "2:\n"
    ".irp n, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15\n"
    "vmovdqu %ymm\\n, 208+\\n*64(%rdi)\n"
    ".endr\n"
    "vzeroupper\n"
    "3: pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbp\n pop %rbx\n ret\n"
    ".local host_rsp, target, current, keep\n"
    ".comm host_rsp, 8\n .comm target, 8\n .comm current, 8\n .comm keep, 8\n");

static struct event seen;

static void handler(int sig, siginfo_t *info, void *context) {
    ucontext_t *uc = context;
    seen.signal = (uint64_t)sig;
    seen.code = (uint64_t)info->si_code;
    seen.address = (uint64_t)info->si_addr;
    seen.rip = (uint64_t)uc->uc_mcontext.gregs[REG_RIP];
    uc->uc_mcontext.gregs[REG_RIP] = (greg_t)machine_back;  // every other register arrives there as it was
}


// Handlers that must be there before the emulator.
void machine_handlers(void) {
    static uint8_t stack[1 << 16];
    stack_t alternate = {.ss_sp = stack, .ss_size = sizeof stack};
    sigaltstack(&alternate, 0);
    struct sigaction action = {.sa_flags = SA_SIGINFO | SA_ONSTACK};
    action.sa_sigaction = handler;
    sigaction(SIGILL, &action, 0);
    sigaction(SIGSEGV, &action, 0);
    sigaction(SIGBUS, &action, 0);
}

long machine_request_permission(void) { return syscall(SYS_arch_prctl, 0x1023, 18L); }

// Which vector registers the machine sets and compares.
int machine_level(void) {
    return __builtin_cpu_supports("avx512bw") ? 2 : __builtin_cpu_supports("avx2") ? 1 : 0;
}

// Memory for code that is writable and executable.
void *machine_code(uint64_t bytes) {
    void *got = mmap(0, bytes, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return got == MAP_FAILED ? 0 : got;
}

// Writes the instruction and the way back behind it.
void machine_emit(uint8_t *to, const uint8_t *code, int length) {
    void *back = machine_back;
    memcpy(to, code, (uint64_t)length);
    memcpy(to + length, "\xff\x25\x00\x00\x00\x00", 6);
    memcpy(to + length + 6, &back, 8);
}

struct event machine_run(struct state *s, const void *code) {
    uint8_t *red = (uint8_t *)s->gpr[4] - sizeof s->red;
    memcpy(red, s->red, sizeof s->red);
    memset(&seen, 0, sizeof seen);
    machine_enter(s, code);
    memcpy(s->red, red, sizeof s->red);
    return seen;
}
