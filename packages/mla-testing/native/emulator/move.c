// SPDX-License-Identifier: Apache-2.0
// Everything but dot products. Compiled for general registers alone, so that a stub may call it with the program's
// vector registers live.
#include "tiles.h"

#include <asm/prctl.h>
#include <sys/syscall.h>

struct amx_options amx_options;

static long arch_prctl_get(int code) {
    uint64_t value = 0;
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(SYS_arch_prctl), "D"((long)code), "S"(&value)
                     : "rcx", "r11", "memory");
    return result ? 0 : value;
}

static uint64_t segment_base(unsigned segment) {
    if (segment == AMX_SEG_FS) return arch_prctl_get(ARCH_GET_FS);
    if (segment == AMX_SEG_GS) return arch_prctl_get(ARCH_GET_GS);
    return 0;
}

static void zero(void *to, unsigned bytes) {
    uint64_t *p = to;
    for (unsigned i = 0; i < bytes / 8; ++i) p[i] = 0;
}

static void copy64(void *to, const void *from) {
    uint64_t *d = to;
    const uint64_t *s = from;
    for (int i = 0; i < 8; ++i) d[i] = s[i];
}

static int valid(const struct amx_config *c) {
    if (c->palette > 1) return 0;
    if (c->palette == 0) return 1;
    for (int i = 0; i < 14; ++i)
        if (c->reserved[i]) return 0;
    for (int i = 0; i < 16; ++i) {
        if (i >= AMX_TILES && (c->rows[i] || c->colsb[i])) return 0;
        if (c->rows[i] > AMX_ROWS || c->colsb[i] > AMX_COLSB) return 0;
        if (!c->rows[i] != !c->colsb[i]) return 0;
    }
    return 1;
}

static void set_config(struct amx_thread *t, const struct amx_config *c) {
    if (c->palette)
        copy64(&t->config, c);
    else
        zero(&t->config, sizeof t->config);
    zero(t->tile, sizeof t->tile);
}

int amx_follow_config(struct amx_thread *t, struct amx_config *hardware) {
    const int marked = hardware->palette && hardware->start_row >= AMX_MARK;
    if (marked && hardware->start_row == t->mark && t->config.palette) return 0;
    set_config(t, hardware);
    if (!hardware->palette) return 0;
    // An old mark is not the program's; a thread's first may be inherited from the thread that created it.
    if (marked) t->config.start_row = 0;
    if (!marked || t->mark) t->counter[AMX_LDTILECFG]++;
    t->mark = AMX_MARK | (t->mark + 1);
    hardware->start_row = t->mark;
    return 1;
}

enum amx_fault amx_execute_move(struct amx_thread *t, const struct amx_insn *insn, const struct amx_registers *regs,
                                uint64_t next_rip) {
    struct amx_config *config = &t->config;
    const unsigned op = insn->op, tile = insn->dst;
    if (amx_is_tile_data(op)) {
        if (amx_options.permission_required && !amx_options.permission_granted) return AMX_FAULT_UD;
        if (!config->palette || !config->rows[tile]) return AMX_FAULT_UD;
    }

    const uint64_t mask = insn->address32 ? 0xffffffffu : ~0ull;
    const uint64_t stride = insn->index == AMX_NO_REG ? 0 : regs->r[insn->index] << insn->scale;
    uint64_t offset = (int64_t)insn->disp;
    if (insn->base != AMX_NO_REG) offset += regs->r[insn->base];
    if (insn->rip_relative) offset += next_rip;
    const uint64_t segment = segment_base(insn->segment);

    struct amx_config buffer;
    switch (op) {
    case AMX_LDTILECFG:
        // Here the index is an index like any other.
        if (amx_copy(&buffer, (void *)(segment + ((offset + stride) & mask)), 64)) return AMX_FAULT_MEMORY;
        if (!valid(&buffer)) return AMX_FAULT_GP;
        set_config(t, &buffer);
        break;
    case AMX_STTILECFG:
        if (amx_copy((void *)(segment + ((offset + stride) & mask)), config, 64)) return AMX_FAULT_MEMORY;
        break;
    case AMX_TILERELEASE:
        zero(&buffer, sizeof buffer);
        set_config(t, &buffer);
        break;
    case AMX_TILEZERO:
        zero(t->tile[tile], sizeof t->tile[tile]);
        config->start_row = 0;
        break;
    case AMX_TILELOADD:
    case AMX_TILELOADDT1:
    case AMX_TILESTORED: {
        const unsigned rows = config->rows[tile], bytes = config->colsb[tile];
        if (config->start_row >= rows || bytes % 4) return AMX_FAULT_UD;
        const int store = op == AMX_TILESTORED;
        const unsigned first = config->start_row;
        for (unsigned row = first; row < rows; ++row) {
            void *memory = (void *)(segment + ((offset + row * stride) & mask));
            uint8_t *line = t->tile[tile][row];
            if (store ? amx_copy(memory, line, bytes) : amx_copy(line, memory, bytes)) {
                // Where a handler that mends the fault lets the instruction go on.
                if (!store) zero(t->tile[tile][row], (AMX_ROWS - row) * AMX_COLSB);
                config->start_row = row;
                return AMX_FAULT_MEMORY;
            }
            if (!store)
                for (unsigned i = bytes; i < AMX_COLSB; ++i) line[i] = 0;
        }
        if (!store) zero(t->tile[tile][rows], (AMX_ROWS - rows) * AMX_COLSB);
        t->counter[store ? AMX_TALLY_bytes_stored : AMX_TALLY_bytes_loaded] += (rows - first) * bytes;
        config->start_row = 0;
        break;
    }
    default:
        return AMX_FAULT_UD;
    }
    t->counter[op]++;
    return AMX_OK;
}
