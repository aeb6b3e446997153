// SPDX-License-Identifier: Apache-2.0
// The AMX instructions of the first generations, as their VEX bytes say them.
#pragma once

#include <stdint.h>

// The order is the order of the counters read from Python.
#define AMX_OPS(X)  \
    X(LDTILECFG)    \
    X(STTILECFG)    \
    X(TILERELEASE)  \
    X(TILEZERO)     \
    X(TILELOADD)    \
    X(TILELOADDT1)  \
    X(TILESTORED)   \
    X(TDPBSSD)      \
    X(TDPBSUD)      \
    X(TDPBUSD)      \
    X(TDPBUUD)      \
    X(TDPBF16PS)    \
    X(TDPFP16PS)

enum amx_op {
#define X(name) AMX_##name,
    AMX_OPS(X)
#undef X
    AMX_OP_COUNT
};

enum { AMX_NO_REG = 0xff };
enum amx_segment { AMX_SEG_NONE, AMX_SEG_FS, AMX_SEG_GS };

// Shortest encoding: three VEX bytes, opcode, ModRM. A near jump takes exactly as many, which is what makes patching
// possible.
enum { AMX_MIN_LENGTH = 5, AMX_MAX_LENGTH = 15 };

struct amx_insn {
    uint8_t op;      // enum amx_op
    uint8_t length;  // bytes, prefixes included
    uint8_t dst;     // ModRM.reg: the tile loaded, stored, zeroed or accumulated into
    uint8_t src_a;   // ModRM.rm: the left operand, rows of A
    uint8_t src_b;   // VEX.vvvv: the right operand, pairs or quads of rows of B
    // Memory operand: segment:[base + (index << scale) + disp]; for tiles, index << scale is the stride between rows.
    uint8_t base;   // register number or AMX_NO_REG
    uint8_t index;  // register number or AMX_NO_REG
    uint8_t scale;  // 0..3
    uint8_t segment;
    uint8_t address32;     // 0x67 prefix: addresses wrap at 2^32
    uint8_t rip_relative;  // base is the address of the next instruction
    int32_t disp;
};

static inline int amx_is_tile_data(unsigned op) { return op >= AMX_TILEZERO; }
static inline int amx_is_dot(unsigned op) { return op >= AMX_TDPBSSD; }

// Decodes the instruction at `code`, reading no byte beyond its end. Returns 1, or 0 when the bytes are no AMX
// instruction that hardware would execute (an encoding hardware answers with #UD is none).
int amx_decode(const uint8_t *code, struct amx_insn *out);
