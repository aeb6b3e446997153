// SPDX-License-Identifier: Apache-2.0
// The C interface of libmla_amx_emulator.so, what src/mla_testing/amx_emulator loads through ctypes.
#pragma once

#include <stdint.h>

#define AMX_API __attribute__((visibility("default")))

// What tile instructions do in this process as it stands; never asks the kernel for anything.
enum mla_amx_mode {
    MLA_AMX_NATIVE = 0,           // the AMX unit runs them
    MLA_AMX_EMULATED = 1,         // no AMX unit, or one the OS has not enabled: all of them trap
    MLA_AMX_EMULATED_ON_AMX = 2,  // permission was never granted: tile data trap, the configuration runs natively
};
AMX_API int mla_amx_mode(void);

// Takes over SIGILL, SIGSEGV and SIGBUS, unless the mode is native. Returns the mode, or -errno. Calling it again is
// harmless and takes SIGILL back from whoever has replaced the handler since.
AMX_API int mla_amx_install(void);
// Restores code and, where still ours, handlers.
AMX_API void mla_amx_uninstall(void);
// 1: installed and the handler in place; 0: not installed; -1: someone replaced the handler.
AMX_API int mla_amx_installed(void);

AMX_API int mla_amx_counter_count(void);
AMX_API const char *mla_amx_counter_name(int index);
// Sums over all threads since the process began.
AMX_API void mla_amx_counters(uint64_t *out);

AMX_API int mla_amx_set_order(int order);  // enum amx_order; returns the former
// 0: rewrite nothing; 1: rewrite; 2: rewrite without /proc/self/mem. Returns the former.
AMX_API int mla_amx_set_patching(int on);
// 1: tile data raise #UD until the program asks the kernel for permission. Returns the former.
AMX_API int mla_amx_set_permission_required(int on);
// From now on, for this process and its children and for good, requests for AMX permission never reach the kernel
// (a seccomp filter, so an inline system call is caught as well). error > 0: they fail with it. error 0: they are
// answered as a kernel that grants would, and set_permission_required takes note. Returns 0 or -errno.
AMX_API int mla_amx_intercept_permission(int error);

// Executes one TDP* of `op` (index among counters) on plain tiles, for tests. floor: 0 SSE2, 1 AVX2, 2 AVX-512.
// Returns 0, or -1 when this CPU lacks the floor.
AMX_API int mla_amx_dot(int floor, int op, int order, int rows, int depth, int columns, void *c, const void *a,
                        const void *b);
// Decodes; returns the length or 0. fields: op, dst, src_a, src_b, base, index, scale, segment, address32,
// rip_relative, disp.
AMX_API int mla_amx_decode(const void *code, int32_t fields[11]);
// Executes the instruction in `code` on the calling thread's software tiles as if it stood there, with nothing trapping
// and no hardware involved. Wants an installed emulator (memory faults). result: 0, or the signal, its si_code and its
// address. Returns the length, or 0 when `code` is no AMX instruction.
AMX_API int mla_amx_step(const void *code, const uint64_t registers[16], uint64_t result[3]);
