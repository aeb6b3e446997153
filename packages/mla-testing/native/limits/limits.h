/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What this machine can do at most: arithmetic peaks, read and copy bandwidth, and a fixed calibration loop.
 *
 * Every function times itself on `threads` POSIX threads, each pinned to its own CPU of those to be used,
 * released together by a barrier; the slowest thread decides. Nothing here prints, aborts or needs a special build:
 * code for an instruction set is compiled with function attributes and refused at run time where the CPU or the
 * operating system lacks it.
 */
#ifndef MLA_LIMITS_H
#define MLA_LIMITS_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Instructions whose peak can be measured. The order is part of the binding in mla_testing.limits. */
enum mla_limits_kind {
    MLA_LIMITS_SSE2 = 0,       /* MULPS + ADDPS xmm: what portable code reaches at most */
    MLA_LIMITS_FMA_AVX2 = 1,   /* VFMADD231PS ymm */
    MLA_LIMITS_FMA_AVX512 = 2, /* VFMADD231PS zmm */
    MLA_LIMITS_VDPBF16PS = 3,  /* VDPBF16PS zmm */
    MLA_LIMITS_TDPBF16PS = 4,  /* TDPBF16PS 16x16x32, 2x2 accumulators */
    MLA_LIMITS_KINDS = 5
};

/* Negative results of the functions below. */
enum mla_limits_status {
    MLA_LIMITS_ERROR_ARGUMENT = -1,    /* unknown kind, threads or bytes out of range */
    MLA_LIMITS_ERROR_CPU = -2,         /* the CPU or the operating system's saved state lacks the instruction */
    MLA_LIMITS_ERROR_PERMISSION = -3,  /* AMX tile data was not requested from, or not granted by, the kernel */
    MLA_LIMITS_ERROR_RESOURCE = -4     /* no memory or no thread */
};

/* 0 if `kind` can be measured now, else one of mla_limits_status. Never asks the kernel for anything. */
int mla_limits_usable(int kind);

/* Asks the kernel for AMX tile data. 0 if granted (or granted before), else errno. The only function that asks. */
int mla_limits_request_amx(void);

/* The CPUs that threads of the functions below are pinned to; without this call, or with fewer than threads, to none. */
void mla_limits_use_cpus(const int *cpus, int count);

/* FLOP/s of `kind` over about `seconds`, best of passes of 5 ms; negative: mla_limits_status. */
double mla_limits_compute(int kind, int threads, double seconds);

/* Bytes/s read from `bytes` (in total, split evenly between the threads) again and again for about `seconds`, best pass. */
double mla_limits_read(size_t bytes, int threads, double seconds);

/* Bytes/s copied by memcpy from one area of `bytes` (in total) to another, best pass. Counts each byte once. */
double mla_limits_memcpy(size_t bytes, int threads, double seconds);

/* Seconds that a fixed loop of multiplications takes on the slowest of `threads` threads: longer means disturbed. */
double mla_limits_calibrate(int threads);

#ifdef __cplusplus
}
#endif

#endif
