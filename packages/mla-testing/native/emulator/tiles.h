// SPDX-License-Identifier: Apache-2.0
// Software tiles of one thread and the execution of one instruction on them.
#pragma once

#include <signal.h>
#include <stddef.h>
#include <stdint.h>

#include "decode.h"

enum { AMX_TILES = 8, AMX_ROWS = 16, AMX_COLSB = 64 };

// The 64-byte operand of LDTILECFG.
struct amx_config {
    uint8_t palette, start_row;
    uint8_t reserved[14];
    uint16_t colsb[16];  // bytes of a row
    uint8_t rows[16];
};
_Static_assert(sizeof(struct amx_config) == 64, "the layout is the hardware's");

// Beside one counter per instruction.
#define AMX_TALLIES(X)                                                                               \
    X(bytes_loaded)  /* by TILELOADD, TILELOADDT1 */                                                 \
    X(bytes_stored)  /* by TILESTORED */                                                             \
    X(tmul_rows)     /* rows of A over all dot products: cycles of the matrix unit */                \
    X(macs)          /* multiply-accumulates over all dot products */                                \
    X(traps)         /* SIGILLs answered */                                                          \
    X(sites_patched) /* instructions rewritten into jumps */

enum amx_tally {
    AMX_TALLY_BASE = AMX_OP_COUNT - 1,
#define X(name) AMX_TALLY_##name,
    AMX_TALLIES(X)
#undef X
    AMX_COUNTERS
};

struct amx_thread {
    uint8_t tile[AMX_TILES][AMX_ROWS][AMX_COLSB] __attribute__((aligned(64)));
    struct amx_config config __attribute__((aligned(64)));
    uint64_t counter[AMX_COUNTERS];  // written by the owner alone, read by anyone
    struct amx_thread *next;
    int tid;
    uint8_t mark;       // start_row of the configuration last taken over, 0 before the first
    int fault_signal;   // of the last memory access that failed
    siginfo_t fault_info;
    unsigned handed_on; // a signal is with the handler that was here before ours
    void *alternate_stack;
};

// Of the running thread, or 0 before its first trap. Initial-exec: reading it in a signal handler or a stub must never
// allocate.
extern __thread struct amx_thread *amx_self __attribute__((tls_model("initial-exec")));

enum amx_fault { AMX_OK, AMX_FAULT_UD, AMX_FAULT_GP, AMX_FAULT_MEMORY };

// The sixteen general registers in the order of their numbers: rax rcx rdx rbx rsp rbp rsi rdi r8..r15.
struct amx_registers {
    uint64_t r[16];
};

enum amx_order { AMX_ORDER_MANUAL, AMX_ORDER_SEQUENTIAL, AMX_ORDER_VDPBF16PS, AMX_ORDERS };

// Process-wide switches, read at each instruction.
struct amx_options {
    int order;                // enum amx_order
    int permission_required;  // tile data raise #UD until the kernel was asked for them
    int permission_granted;
    int native_config;  // LDTILECFG, STTILECFG and TILERELEASE run on this host's own AMX unit
};
extern struct amx_options amx_options;

// Executes one instruction; on a fault nothing but what hardware would have written by then has changed.
// amx_execute_move (everything but dot products) touches general registers only.
enum amx_fault amx_execute_move(struct amx_thread *t, const struct amx_insn *insn, const struct amx_registers *regs,
                                uint64_t next_rip);
enum amx_fault amx_execute_dot(struct amx_thread *t, const struct amx_insn *insn);

// On a host whose AMX unit runs the configuration instructions itself, the software tiles follow the hardware's
// configuration. LDTILECFG and TILERELEASE do not trap there, yet they zero all tiles and must be noticed even when the
// shapes stay the same. So a configuration the emulator has taken over gets a mark in its start_row, a value no program
// asks for (hardware itself refuses to load from a start_row beyond the tile's last row); the next LDTILECFG or
// TILERELEASE overwrites it. The mark changes with every configuration taken over: a program that saves its
// configuration with STTILECFG and later loads it again brings back an old mark, and is seen to have loaded, unless no
// tile instruction at all ran in between.
enum { AMX_MARK = 0x80 };

// Takes over `hardware` (palette 0: not configured) unless it carries this thread's mark. Returns 1 when the caller has
// to put the marked configuration back, written to `hardware`.
int amx_follow_config(struct amx_thread *t, struct amx_config *hardware);
// The same with the unit itself, outside of signal handlers (stub_move.c).
void amx_follow_native_config(struct amx_thread *t);

// Copies bytes; returns nonzero when an access faulted (see entry.S and trap.c).
int amx_copy(void *to, const void *from, size_t bytes);
