// SPDX-License-Identifier: Apache-2.0
// Where patched sites arrive. A stub (patch.c) has stepped over the red zone and called one of the entries below;
// quads at fixed distances behind its call hold the site. Everything the program can see survives: general registers,
// flags, vector and mask registers, MXCSR and the red zone. On a fault the entry returns to the stub's second exit,
// which restores the stack pointer and executes UD2, so that the fault is raised with the program's own registers.

#include "stub.h"

    .text

// The red zone below the program's stack pointer, and the stub's return address.
#define SKIPPED (128 + 8)

.macro save_general
    pushfq
    cld
    push %r15
    push %r14
    push %r13
    push %r12
    push %r11
    push %r10
    push %r9
    push %r8
    push %rdi
    push %rsi
    push %rbp
    push %rsp
    push %rbx
    push %rdx
    push %rcx
    push %rax
    lea 17*8+SKIPPED(%rsp), %rax
    mov %rax, 4*8(%rsp)                 // the program's rsp
    mov %rsp, %rdi                      // struct amx_registers *
    mov 17*8(%rsp), %rax                // return address into the stub
    mov STUB_SITE-STUB_RETURN(%rax), %rsi
    mov %rsp, %rbp
    and $-64, %rsp
.endm

// eax: nonzero for a fault.
.macro restore_general_and_return
    mov %rbp, %rsp
    test %eax, %eax
    jz 9f
    addq $STUB_FAULT-STUB_RETURN, 17*8(%rsp)
9:
    pop %rax
    pop %rcx
    pop %rdx
    pop %rbx
    add $8, %rsp
    pop %rbp
    pop %rsi
    pop %rdi
    pop %r8
    pop %r9
    pop %r10
    pop %r11
    pop %r12
    pop %r13
    pop %r14
    pop %r15
    popfq
    ret
.endm

    .globl amx_entry_move
    .hidden amx_entry_move
    .type amx_entry_move, @function
    .balign 16
amx_entry_move:
    save_general
    call amx_stub_move
    restore_general_and_return
    .size amx_entry_move, .-amx_entry_move

// Vector state by XSAVE: SSE, AVX, opmask, upper halves and upper registers, MXCSR with them.
#define XSAVE_MASK 0xe6
#define XSAVE_ROOM 2816

    .globl amx_entry_dot_xsave
    .hidden amx_entry_dot_xsave
    .type amx_entry_dot_xsave, @function
    .balign 16
amx_entry_dot_xsave:
    save_general
    sub $XSAVE_ROOM, %rsp
    xor %eax, %eax
    .irp at, 512, 520, 528, 536, 544, 552, 560, 568   // XRSTOR wants a clean header
    mov %rax, \at(%rsp)
    .endr
    mov $XSAVE_MASK, %eax
    xor %edx, %edx
    xsave (%rsp)
    call amx_stub_dot
    mov %eax, %ecx
    mov $XSAVE_MASK, %eax
    xor %edx, %edx
    xrstor (%rsp)
    mov %ecx, %eax
    restore_general_and_return
    .size amx_entry_dot_xsave, .-amx_entry_dot_xsave

// The same with plain stores, several times faster, where AVX-512BW is there.
    .globl amx_entry_dot_avx512
    .hidden amx_entry_dot_avx512
    .type amx_entry_dot_avx512, @function
    .balign 16
amx_entry_dot_avx512:
    save_general
    sub $32*64+64, %rsp
    .irp n, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31
    vmovdqa64 %zmm\n, \n*64(%rsp)
    .endr
    .irp n, 0,1,2,3,4,5,6,7
    kmovq %k\n, 32*64+\n*8(%rsp)
    .endr
    call amx_stub_dot
    .irp n, 0,1,2,3,4,5,6,7
    kmovq 32*64+\n*8(%rsp), %k\n
    .endr
    .irp n, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31
    vmovdqa64 \n*64(%rsp), %zmm\n
    .endr
    restore_general_and_return
    .size amx_entry_dot_avx512, .-amx_entry_dot_avx512

// void amx_call_dot(function, argument)
    .globl amx_call_dot
    .hidden amx_call_dot
    .type amx_call_dot, @function
    .balign 16
amx_call_dot:
    sub $24, %rsp
    stmxcsr 8(%rsp)
    movl $0x9fc0, 12(%rsp)              // FTZ, nearest even, all masked, DAZ
    ldmxcsr 12(%rsp)
    mov %rdi, %rax
    mov %rsi, %rdi
    call *%rax
    ldmxcsr 8(%rsp)
    add $24, %rsp
    ret
    .size amx_call_dot, .-amx_call_dot

// int amx_copy(to, from, bytes): the one place where the program's memory is touched. The SIGSEGV and SIGBUS handlers
// know its bounds and turn a fault inside into the return value 1.
    .globl amx_copy, amx_copy_end, amx_copy_fault
    .hidden amx_copy, amx_copy_end, amx_copy_fault
    .type amx_copy, @function
    .balign 16
amx_copy:
    mov %rdx, %rcx
    shr $3, %rcx
    jz 2f
1:  mov (%rsi), %rax
    mov %rax, (%rdi)
    add $8, %rsi
    add $8, %rdi
    dec %rcx
    jnz 1b
2:  and $7, %edx
    jz 4f
3:  mov (%rsi), %al
    mov %al, (%rdi)
    inc %rsi
    inc %rdi
    dec %edx
    jnz 3b
4:  xor %eax, %eax
    ret
amx_copy_end:
amx_copy_fault:
    mov $1, %eax
    ret
    .size amx_copy, .-amx_copy

// int amx_probe(void): 1 when TILEZERO runs natively, 0 when it raises SIGILL (the handler then moves on to
// amx_probe_trapped). The thread's configuration comes back, and with it the emulator's mark on it; a native process
// loses what its tiles held, which nobody keeps across calls.
    .globl amx_probe, amx_probe_site, amx_probe_trapped
    .hidden amx_probe, amx_probe_site, amx_probe_trapped
    .type amx_probe, @function
    .balign 16
amx_probe:
    lea -72(%rsp), %rcx
    .byte 0xc4, 0xe2, 0x79, 0x49, 0x01  // sttilecfg (%rcx), in the red zone
    lea probe_config(%rip), %rax
    .byte 0xc4, 0xe2, 0x78, 0x49, 0x00  // ldtilecfg (%rax)
    mov $1, %eax
amx_probe_site:
    .byte 0xc4, 0xe2, 0x7b, 0x49, 0xc0  // tilezero %tmm0
    jmp 1f
amx_probe_trapped:
    xor %eax, %eax
1:  .byte 0xc4, 0xe2, 0x78, 0x49, 0x01  // ldtilecfg (%rcx); palette 0 releases
    ret
    .size amx_probe, .-amx_probe

    .section .rodata
    .balign 64
probe_config:
    .byte 1
    .zero 15
    .short 64
    .zero 30
    .byte 16
    .zero 15

    .section .note.GNU-stack, "", @progbits
