// SPDX-License-Identifier: Apache-2.0
// The dot products, once, for the floor this file is compiled for (AMX_DOT_NAME names the function).
//
// TDPBF16PS by the manual: two chains of fused multiply-adds per fp32 lane, over even and over odd elements, both from
// zero; then c + (even + odd). A 4th generation Xeon's and a 6th generation Xeon's unit do exactly that. Two other orders
// in use, the intrinsics guide's and VDPBF16PS's, can be chosen to show that nothing hangs on the order.
#include "dot.h"

#include <immintrin.h>
#include <string.h>

typedef float v16f __attribute__((vector_size(64)));
typedef uint32_t v16u __attribute__((vector_size(64)));
typedef int32_t v16i __attribute__((vector_size(64)));

// acc + a * b, rounded once.
static inline __attribute__((always_inline)) v16f fused(v16f a, v16f b, v16f acc) {
#if defined __AVX512F__
    return (v16f)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)acc);
#elif defined __FMA__
    union {
        v16f all;
        __m256 half[2];
    } x = {a}, y = {b}, z = {acc};
    z.half[0] = _mm256_fmadd_ps(x.half[0], y.half[0], z.half[0]);
    z.half[1] = _mm256_fmadd_ps(x.half[1], y.half[1], z.half[1]);
    return z.all;
#else
    // The product is exact in double, and rounding the sum first to 53 and then to 24 bits equals rounding once,
    // because 53 >= 2 * 24 + 2.
    for (int i = 0; i < 16; ++i) acc[i] = (float)((double)acc[i] + (double)a[i] * (double)b[i]);
    return acc;
#endif
}

static inline __attribute__((always_inline)) v16f splat(float x) {
    return (v16f){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
}

static inline float half_to_float(uint16_t h) {
#if defined __F16C__
    return _cvtsh_ss(h);
#else
    // Magic multiplication would meet DAZ; half denormals are normal floats and must not be flushed.
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31;
    uint32_t mantissa = h & 0x3ff, bits;
    if (exponent == 31) {
        bits = sign | 0x7f800000 | mantissa << 13;
        if (mantissa) bits |= 0x400000;
    } else if (exponent) {
        bits = sign | (exponent + 112) << 23 | mantissa << 13;
    } else if (mantissa) {
        int shift = __builtin_clz(mantissa) - 21;
        bits = sign | (uint32_t)(113 - shift) << 23 | (mantissa << shift & 0x3ff) << 13;
    } else {
        bits = sign;
    }
    float f;
    memcpy(&f, &bits, 4);
    return f;
#endif
}

static void split(const uint8_t line[AMX_COLSB], int half, v16f *even, v16f *odd) {
    v16u pairs;
    memcpy(&pairs, line, sizeof pairs);
    if (!half) {
        *even = (v16f)(pairs << 16);
        *odd = (v16f)(pairs & 0xffff0000u);
        return;
    }
    for (int i = 0; i < 16; ++i) {
        (*even)[i] = half_to_float((uint16_t)pairs[i]);
        (*odd)[i] = half_to_float((uint16_t)(pairs[i] >> 16));
    }
}

static void dot_pairs(const struct amx_dot *d, v16i columns) {
    const int half = d->op == AMX_TDPFP16PS;
    v16f b_even[AMX_ROWS], b_odd[AMX_ROWS];
    for (int k = 0; k < d->depth; ++k) split(d->b[k], half, &b_even[k], &b_odd[k]);
    for (int m = 0; m < d->rows; ++m) {
        v16f a_even, a_odd, c, even = {0}, odd = {0};
        split(d->a[m], half, &a_even, &a_odd);
        memcpy(&c, d->c[m], sizeof c);
        const v16i before = (v16i)c;
        for (int k = 0; k < d->depth; ++k) {
            const v16f e = splat(a_even[k]), o = splat(a_odd[k]);
            switch (d->order) {
            case AMX_ORDER_MANUAL:
                even = fused(e, b_even[k], even);
                odd = fused(o, b_odd[k], odd);
                break;
            case AMX_ORDER_SEQUENTIAL:
                c = fused(e, b_even[k], c);
                c = fused(o, b_odd[k], c);
                break;
            case AMX_ORDER_VDPBF16PS:
                c = fused(o, b_odd[k], c);
                c = fused(e, b_even[k], c);
                break;
            }
        }
        if (d->order == AMX_ORDER_MANUAL) c = c + (even + odd);
        const v16i after = ((v16i)c & columns) | (before & ~columns);
        memcpy(d->c[m], &after, sizeof after);
    }
}

static void dot_quads(const struct amx_dot *d, v16i columns) {
    const int a_signed = d->op == AMX_TDPBSSD || d->op == AMX_TDPBSUD;
    const int b_signed = d->op == AMX_TDPBSSD || d->op == AMX_TDPBUSD;
    for (int m = 0; m < d->rows; ++m) {
        v16u sum = {0};
        for (int k = 0; k < d->depth; ++k) {
            v16u quads;
            memcpy(&quads, d->b[k], sizeof quads);
            for (int i = 0; i < 4; ++i) {
                const uint8_t a = d->a[m][4 * k + i];
                const v16i left = (v16i){0} + (a_signed ? (int8_t)a : a);
                const v16u raised = quads << (24 - 8 * i);
                const v16i right = b_signed ? (v16i)raised >> 24 : (v16i)(raised >> 24);
                sum += (v16u)(left * right);
            }
        }
        v16u c;
        memcpy(&c, d->c[m], sizeof c);
        c += sum & (v16u)columns;
        memcpy(d->c[m], &c, sizeof c);
    }
}

void AMX_DOT_NAME(const struct amx_dot *d) {
    v16i columns;
    for (int i = 0; i < 16; ++i) columns[i] = i < d->columns ? -1 : 0;
    if (d->op == AMX_TDPBF16PS || d->op == AMX_TDPFP16PS)
        dot_pairs(d, columns);
    else
        dot_quads(d, columns);
}
