// SPDX-License-Identifier: Apache-2.0
// Runs on the program's own vector registers, so this file is compiled without any.
#include "patch.h"

__thread struct amx_thread *amx_self;

void amx_follow_native_config(struct amx_thread *t) {
    struct amx_config hardware;
    __asm__ volatile(".byte 0xc4, 0xe2, 0x79, 0x49, 0x00" : "=m"(hardware) : "a"(&hardware));  // sttilecfg (%rax)
    if (amx_follow_config(t, &hardware))
        __asm__ volatile(".byte 0xc4, 0xe2, 0x78, 0x49, 0x00" : : "a"(&hardware), "m"(hardware));  // ldtilecfg (%rax)
}

int amx_stub_move(const struct amx_registers *regs, const struct amx_site *site) {
    struct amx_thread *t = amx_self;
    if (!t) return AMX_FAULT_UD;
    if (amx_options.native_config) amx_follow_native_config(t);
    return amx_execute_move(t, &site->insn, regs, (uint64_t)site->address + site->insn.length);
}
