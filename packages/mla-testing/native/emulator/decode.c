// SPDX-License-Identifier: Apache-2.0
#include "decode.h"

#include <string.h>

// VEX.pp
enum { PP_NONE, PP_66, PP_F3, PP_F2 };

enum form { FORM_NONE, FORM_CONFIG, FORM_RELEASE, FORM_ZERO, FORM_TILE_MEMORY, FORM_DOT };

struct entry {
    uint8_t opcode, pp, register_form, op, form;
};

// Map 0F38, W0, L0 of all of them.
static const struct entry table[] = {
    {0x49, PP_NONE, 0, AMX_LDTILECFG, FORM_CONFIG},     {0x49, PP_66, 0, AMX_STTILECFG, FORM_CONFIG},
    {0x49, PP_NONE, 1, AMX_TILERELEASE, FORM_RELEASE},  {0x49, PP_F2, 1, AMX_TILEZERO, FORM_ZERO},
    {0x4b, PP_F2, 0, AMX_TILELOADD, FORM_TILE_MEMORY},  {0x4b, PP_66, 0, AMX_TILELOADDT1, FORM_TILE_MEMORY},
    {0x4b, PP_F3, 0, AMX_TILESTORED, FORM_TILE_MEMORY}, {0x5e, PP_F2, 1, AMX_TDPBSSD, FORM_DOT},
    {0x5e, PP_F3, 1, AMX_TDPBSUD, FORM_DOT},            {0x5e, PP_66, 1, AMX_TDPBUSD, FORM_DOT},
    {0x5e, PP_NONE, 1, AMX_TDPBUUD, FORM_DOT},          {0x5c, PP_F3, 1, AMX_TDPBF16PS, FORM_DOT},
    {0x5c, PP_F2, 1, AMX_TDPFP16PS, FORM_DOT},
};

int amx_decode(const uint8_t *code, struct amx_insn *out) {
    memset(out, 0, sizeof *out);
    out->base = out->index = AMX_NO_REG;

    // Only segment overrides and the address size may stand before VEX; 66, F2, F3, F0 and REX there raise #UD.
    // ES, CS, SS and DS overrides mean nothing in 64-bit mode.
    const uint8_t *p = code;
    for (;; ++p) {
        if (p - code > AMX_MAX_LENGTH - AMX_MIN_LENGTH) return 0;
        if (*p == 0x64)
            out->segment = AMX_SEG_FS;
        else if (*p == 0x65)
            out->segment = AMX_SEG_GS;
        else if (*p == 0x67)
            out->address32 = 1;
        else if (*p != 0x26 && *p != 0x2e && *p != 0x36 && *p != 0x3e)
            break;
    }

    if (p[0] != 0xc4) return 0;
    const uint8_t vex1 = p[1];
    if ((vex1 & 0x1f) != 2) return 0;  // map 0F38
    const unsigned r = (~vex1 >> 7) & 1, x = (~vex1 >> 6) & 1, b = (~vex1 >> 5) & 1;
    const uint8_t vex2 = p[2];
    if (vex2 & 0x84) return 0;  // W, L
    const unsigned vvvv = (~vex2 >> 3) & 15, pp = vex2 & 3;
    const uint8_t opcode = p[3];
    if (opcode != 0x49 && opcode != 0x4b && opcode != 0x5c && opcode != 0x5e) return 0;
    const uint8_t modrm = p[4];
    const unsigned mod = modrm >> 6, reg = (modrm >> 3) & 7, rm = modrm & 7;
    p += 5;

    const struct entry *found = 0;
    for (unsigned i = 0; i < sizeof table / sizeof *table; ++i)
        if (table[i].opcode == opcode && table[i].pp == pp && table[i].register_form == (mod == 3)) found = &table[i];
    if (!found) return 0;
    out->op = found->op;
    out->dst = reg;

    // There are eight tiles: the extension bits that would name a ninth raise #UD, those that name nothing are ignored.
    switch (found->form) {
    case FORM_CONFIG:
        if (reg || vvvv) return 0;
        break;
    case FORM_RELEASE:
        if (reg || rm || vvvv) return 0;
        break;
    case FORM_ZERO:
        if (r || rm || vvvv) return 0;
        break;
    case FORM_TILE_MEMORY:
        if (r || vvvv || rm != 4) return 0;  // SIB obligatory: the index is the stride
        break;
    case FORM_DOT:
        if (r || b || vvvv > 7) return 0;
        out->src_a = rm;
        out->src_b = vvvv;
        if (reg == rm || reg == vvvv || rm == vvvv) return 0;
        break;
    }

    if (mod != 3) {
        unsigned disp_bytes = mod == 1 ? 1 : mod == 2 ? 4 : 0;
        if (rm == 4) {
            const uint8_t sib = *p++;
            const unsigned index = ((sib >> 3) & 7) | x << 3, base = (sib & 7) | b << 3;
            out->scale = sib >> 6;
            if (index != 4) out->index = index;
            if (mod == 0 && (sib & 7) == 5)
                disp_bytes = 4;
            else
                out->base = base;
        } else if (mod == 0 && rm == 5) {
            out->rip_relative = 1;
            disp_bytes = 4;
        } else {
            out->base = rm | b << 3;
        }
        if (disp_bytes == 1) out->disp = (int8_t)*p;
        if (disp_bytes == 4) out->disp = (int32_t)(p[0] | p[1] << 8 | p[2] << 16 | (uint32_t)p[3] << 24);
        p += disp_bytes;
    }
    if (p - code > AMX_MAX_LENGTH) return 0;
    out->length = p - code;
    return 1;
}
