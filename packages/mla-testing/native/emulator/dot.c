// SPDX-License-Identifier: Apache-2.0
// The dot products, once, for the floor this file is compiled for (AMX_DOT_NAME names the function).
//
// TDPBF16PS by the manual: two chains of fused multiply-adds per fp32 lane, over even and over odd elements, both from
// zero; then c + (even + odd). The unit of the Xeon it was compared with (family 6, model 167) does exactly that. Two
// other orders in use, the intrinsics guide's and VDPBF16PS's, can be chosen to show that nothing hangs on the order.
#include "dot.h"

#include <immintrin.h>
#include <string.h>

typedef float v16f __attribute__((vector_size(64)));
typedef uint32_t v16u __attribute__((vector_size(64)));
typedef int32_t v16i __attribute__((vector_size(64)));

#define INLINE static inline __attribute__((always_inline))

// acc + a * b, rounded once, and x + y. Which of several NaNs comes out is part of the result: that of a, else that of
// b, else the accumulator's; that of x, else that of y. The compiler would exchange operands, hence the assembly.
#if defined __AVX512F__
enum { BLOCK = 4 };
INLINE v16f fused(v16f a, v16f b, v16f acc) {
    __asm__("vfmadd231ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
    return acc;
}
INLINE v16f sum(v16f x, v16f y) {
    v16f z;
    __asm__("vaddps %2, %1, %0" : "=v"(z) : "v"(x), "v"(y));
    return z;
}
#elif defined __FMA__
enum { BLOCK = 2 };
union halves {
    v16f all;
    __m256 half[2];
};
INLINE v16f fused(v16f a, v16f b, v16f acc) {
    union halves x = {a}, y = {b}, z = {acc};
    for (int i = 0; i < 2; ++i)
        __asm__("vfmadd231ps %2, %1, %0" : "+x"(z.half[i]) : "x"(x.half[i]), "x"(y.half[i]));
    return z.all;
}
INLINE v16f sum(v16f a, v16f b) {
    union halves x = {a}, y = {b}, z;
    for (int i = 0; i < 2; ++i) __asm__("vaddps %2, %1, %0" : "=x"(z.half[i]) : "x"(x.half[i]), "x"(y.half[i]));
    return z.all;
}
#else
enum { BLOCK = 1 };
INLINE float quiet(float x) { return x + 0.0f; }
INLINE v16f fused(v16f a, v16f b, v16f acc) {
    // The product is exact in double, and rounding the sum first to 53 and then to 24 bits equals rounding once,
    // because 53 >= 2 * 24 + 2.
    for (int i = 0; i < 16; ++i)
        acc[i] = a[i] != a[i]   ? quiet(a[i])
                 : b[i] != b[i] ? quiet(b[i])
                                : (float)((double)acc[i] + (double)a[i] * (double)b[i]);
    return acc;
}
INLINE v16f sum(v16f x, v16f y) {
    for (int i = 0; i < 16; ++i) x[i] = x[i] != x[i] ? quiet(x[i]) : y[i] != y[i] ? quiet(y[i]) : x[i] + y[i];
    return x;
}
#endif

INLINE v16f splat(float x) {
    return (v16f){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
}

INLINE float half_to_float(uint16_t h) {
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

INLINE void split(const uint8_t line[AMX_COLSB], int half, v16f *even, v16f *odd) {
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

struct operands {
    float a_even[AMX_ROWS][16], a_odd[AMX_ROWS][16];  // [m][k]
    v16f b_even[16], b_odd[16];                       // [k][n]
};

// `rows` rows from `m` on, together for the sake of the latency of the multiply-adds.
INLINE void rows_of_pairs(const struct amx_dot *d, const struct operands *in, int m, int rows, int order,
                          v16i columns) {
    v16f c[BLOCK], even[BLOCK], odd[BLOCK];
#pragma GCC unroll 4
    for (int i = 0; i < rows; ++i) {
        memcpy(&c[i], d->c[m + i], sizeof c[i]);
        even[i] = odd[i] = (v16f){0};
    }
    for (int k = 0; k < d->depth; ++k) {
#pragma GCC unroll 4
        for (int i = 0; i < rows; ++i) {
            const v16f e = splat(in->a_even[m + i][k]), o = splat(in->a_odd[m + i][k]);
            if (order == AMX_ORDER_MANUAL) {
                even[i] = fused(e, in->b_even[k], even[i]);
                odd[i] = fused(o, in->b_odd[k], odd[i]);
            } else if (order == AMX_ORDER_SEQUENTIAL) {
                c[i] = fused(o, in->b_odd[k], fused(e, in->b_even[k], c[i]));
            } else {
                c[i] = fused(e, in->b_even[k], fused(o, in->b_odd[k], c[i]));
            }
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < rows; ++i) {
        if (order == AMX_ORDER_MANUAL) c[i] = sum(c[i], sum(even[i], odd[i]));
        v16i before;
        memcpy(&before, d->c[m + i], sizeof before);
        before = ((v16i)c[i] & columns) | (before & ~columns);
        memcpy(d->c[m + i], &before, sizeof before);
    }
}

INLINE void all_rows_of_pairs(const struct amx_dot *d, const struct operands *in, int order, v16i columns) {
    int m = 0;
    for (; m + BLOCK <= d->rows; m += BLOCK) rows_of_pairs(d, in, m, BLOCK, order, columns);
    for (; m < d->rows; ++m) rows_of_pairs(d, in, m, 1, order, columns);
}

INLINE void dot_pairs(const struct amx_dot *d, int half, v16i columns) {
    struct operands in;
    for (int k = 0; k < d->depth; ++k) split(d->b[k], half, &in.b_even[k], &in.b_odd[k]);
    for (int m = 0; m < d->rows; ++m) {
        v16f even, odd;
        split(d->a[m], half, &even, &odd);
        memcpy(in.a_even[m], &even, sizeof even);
        memcpy(in.a_odd[m], &odd, sizeof odd);
    }
    if (d->order == AMX_ORDER_MANUAL)
        all_rows_of_pairs(d, &in, AMX_ORDER_MANUAL, columns);
    else if (d->order == AMX_ORDER_SEQUENTIAL)
        all_rows_of_pairs(d, &in, AMX_ORDER_SEQUENTIAL, columns);
    else
        all_rows_of_pairs(d, &in, AMX_ORDER_VDPBF16PS, columns);
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
    if (d->op == AMX_TDPBF16PS)
        dot_pairs(d, 0, columns);
    else if (d->op == AMX_TDPFP16PS)
        dot_pairs(d, 1, columns);
    else
        dot_quads(d, columns);
}
