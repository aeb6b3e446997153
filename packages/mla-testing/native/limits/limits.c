/* SPDX-License-Identifier: Apache-2.0 */
/* See limits.h. Loops are inline assembly, so that the compiler can neither shorten nor spill them. */
#define _GNU_SOURCE
#include "limits.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#define MLA_X86 1
#endif

#define MAX_THREADS 1024
#define LINE 64
#define HUGE_PAGE (2u << 20)
#define PASS_SECONDS 5e-3 /* short enough to fit between two other tasks on a busy machine: the best pass counts */
#define CALIBRATION_OPERATIONS 8000000L /* 1 to 2 ms */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- what the CPU and the operating system allow ------------------------------------------------------------- */

#ifdef MLA_X86

#define ARCH_GET_XCOMP_PERM 0x1022
#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

static uint64_t saved_state(void) { /* XCR0, or 0 where the operating system does not use XSAVE */
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & (1u << 27))) return 0;
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return ((uint64_t)high << 32) | low;
}

static int cpu_has(int kind) {
    const uint64_t ymm = 0x6, zmm = 0xe6, tile = 0x60000;
    unsigned a, b, c1 = 0, d, b7 = 0, d7 = 0, a71 = 0;
    const uint64_t state = saved_state();
    __get_cpuid(1, &a, &b, &c1, &d);
    unsigned c7;
    if (__get_cpuid_count(7, 0, &a, &b7, &c7, &d7) && a >= 1) {
        unsigned b71, c71, d71;
        __get_cpuid_count(7, 1, &a71, &b71, &c71, &d71);
    }
    switch (kind) {
    case MLA_LIMITS_SSE2:
        return 1;
    case MLA_LIMITS_FMA_AVX2:
        return (c1 >> 12 & 1) && (b7 >> 5 & 1) && (state & ymm) == ymm;
    case MLA_LIMITS_FMA_AVX512:
        return (b7 >> 16 & 1) && (state & zmm) == zmm;
    case MLA_LIMITS_VDPBF16PS:
        return (b7 >> 16 & 1) && (a71 >> 5 & 1) && (state & zmm) == zmm;
    case MLA_LIMITS_TDPBF16PS:
        return (d7 >> 22 & 1) && (d7 >> 24 & 1) && (state & tile) == tile;
    }
    return 0;
}

static int amx_permitted(void) {
    unsigned long mask = 0;
    return syscall(SYS_arch_prctl, ARCH_GET_XCOMP_PERM, &mask) == 0 && (mask >> XFEATURE_XTILEDATA & 1);
}

int mla_limits_request_amx(void) {
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 ? 0 : errno;
}

#else

static int cpu_has(int kind) { (void)kind; return 0; }
static int amx_permitted(void) { return 0; }
int mla_limits_request_amx(void) { return ENOSYS; }

#endif

int mla_limits_usable(int kind) {
    if (kind < 0 || kind >= MLA_LIMITS_KINDS) return MLA_LIMITS_ERROR_ARGUMENT;
    if (!cpu_has(kind)) return MLA_LIMITS_ERROR_CPU;
    if (kind == MLA_LIMITS_TDPBF16PS && !amx_permitted()) return MLA_LIMITS_ERROR_PERMISSION;
    return 0;
}

/* ---- arithmetic ---------------------------------------------------------------------------------------------- */

#ifdef MLA_X86

/* Enough independent accumulators to hide any latency x throughput product known: 12 of 16, 24 of 32 registers. */
#define EACH12(OP) OP(0) OP(1) OP(2) OP(3) OP(4) OP(5) OP(6) OP(7) OP(8) OP(9) OP(10) OP(11)
#define EACH24(OP) EACH12(OP) OP(12) OP(13) OP(14) OP(15) OP(16) OP(17) OP(18) OP(19) OP(20) OP(21) OP(22) OP(23)
#define INNER 64 /* passes over all accumulators per call of the loops below */

static double run_sse2(void) {
    const float tiny = 1e-3f;
    __asm__ volatile("movss %0, %%xmm15\n\tshufps $0, %%xmm15, %%xmm15" ::"m"(tiny) : "xmm15");
    for (int i = 0; i < INNER; ++i) {
        /* multiplies on even, adds on odd registers; 1e-3 keeps both finite without denormals for the pass */
#define OP(n) "addps %%xmm15, %%xmm" #n "\n\t"
#define MUL(n) "movaps %%xmm15, %%xmm" #n "\n\tmulps %%xmm15, %%xmm" #n "\n\t"
        __asm__ volatile(OP(0) MUL(6) OP(1) MUL(7) OP(2) MUL(8) OP(3) MUL(9) OP(4) MUL(10) OP(5) MUL(11)
                         :: : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",
                              "xmm11");
#undef OP
#undef MUL
    }
    return INNER * 12.0 * 4;
}

__attribute__((target("avx2,fma"))) static double run_fma_avx2(void) {
    const float tiny = 1e-3f;
    __asm__ volatile("vbroadcastss %0, %%ymm15" ::"m"(tiny) : "xmm15");
    for (int i = 0; i < INNER; ++i) {
#define OP(n) "vfmadd231ps %%ymm15, %%ymm15, %%ymm" #n "\n\t"
        __asm__ volatile(EACH12(OP) :: : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8",
                                         "xmm9", "xmm10", "xmm11");
#undef OP
    }
    __asm__ volatile("vzeroupper");
    return INNER * 12.0 * 16;
}

#define CLOBBER24 "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", \
    "xmm12", "xmm13", "xmm14", "xmm15", "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23"

__attribute__((target("avx512f"))) static double run_fma_avx512(void) {
    const float tiny = 1e-3f;
    __asm__ volatile("vbroadcastss %0, %%zmm31" ::"m"(tiny) : "xmm31");
    for (int i = 0; i < INNER; ++i) {
#define OP(n) "vfmadd231ps %%zmm31, %%zmm31, %%zmm" #n "\n\t"
        __asm__ volatile(EACH24(OP) :: : CLOBBER24);
#undef OP
    }
    __asm__ volatile("vzeroupper");
    return INNER * 24.0 * 32;
}

__attribute__((target("avx512f,avx512bf16"))) static double run_vdpbf16ps(void) {
    const float tiny = 1e-3f; /* as two bf16 halves: about 2e-3 and 1e-3, still finite after any pass */
    __asm__ volatile("vbroadcastss %0, %%zmm31" ::"m"(tiny) : "xmm31");
    for (int i = 0; i < INNER; ++i) {
#define OP(n) "vdpbf16ps %%zmm31, %%zmm31, %%zmm" #n "\n\t"
        __asm__ volatile(EACH24(OP) :: : CLOBBER24);
#undef OP
    }
    __asm__ volatile("vzeroupper");
    return INNER * 24.0 * 64;
}

/* Palette 1, eight tiles of 16 rows x 64 bytes. `operands`: 1 KiB of bf16, loaded into tiles 4-7 once per call. */
__attribute__((target("amx-tile,amx-bf16"))) static double run_tdpbf16ps(void) {
    static const struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config __attribute__((aligned(LINE))) = {
        1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    uint16_t operands[512] __attribute__((aligned(LINE)));
    for (int i = 0; i < 512; ++i) operands[i] = 0x3a83; /* bf16 of 1e-3 */
    const long stride = 64;
    __asm__ volatile("ldtilecfg %0\n\t"
                     "tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3\n\t"
                     "tileloadd (%1,%2,1), %%tmm4\n\ttileloadd (%1,%2,1), %%tmm5\n\t"
                     "tileloadd (%1,%2,1), %%tmm6\n\ttileloadd (%1,%2,1), %%tmm7\n\t"
                     :: "m"(config), "r"(operands), "r"(stride) : "memory");
    for (int i = 0; i < INNER; ++i) {
        __asm__ volatile("tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n\ttdpbf16ps %%tmm7, %%tmm4, %%tmm1\n\t"
                         "tdpbf16ps %%tmm6, %%tmm5, %%tmm2\n\ttdpbf16ps %%tmm7, %%tmm5, %%tmm3\n\t" ::);
    }
    __asm__ volatile("tilerelease" ::);
    return INNER * 4.0 * 2 * 16 * 16 * 32;
}

static double (*const runners[MLA_LIMITS_KINDS])(void) = {run_sse2, run_fma_avx2, run_fma_avx512, run_vdpbf16ps,
                                                          run_tdpbf16ps};
#else
static double (*const runners[MLA_LIMITS_KINDS])(void) = {0};
#endif
static const double flop_per_operation[MLA_LIMITS_KINDS] = {4, 16, 32, 64, 16384}; /* of an instruction */

/* ---- memory -------------------------------------------------------------------------------------------------- */

/* Reads [p, p + bytes), bytes a multiple of 512, with the widest loads there are. */
#ifdef MLA_X86
__attribute__((target("avx512f"))) static void read_avx512(const char *p, size_t bytes) {
    for (const char *end = p + bytes; p < end; p += 512)
        __asm__ volatile("vmovups (%0), %%zmm0\n\tvmovups 64(%0), %%zmm1\n\tvmovups 128(%0), %%zmm2\n\t"
                         "vmovups 192(%0), %%zmm3\n\tvmovups 256(%0), %%zmm4\n\tvmovups 320(%0), %%zmm5\n\t"
                         "vmovups 384(%0), %%zmm6\n\tvmovups 448(%0), %%zmm7"
                         :: "r"(p) : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "memory");
    __asm__ volatile("vzeroupper");
}

__attribute__((target("avx2"))) static void read_avx2(const char *p, size_t bytes) {
    for (const char *end = p + bytes; p < end; p += 256)
        __asm__ volatile("vmovups (%0), %%ymm0\n\tvmovups 32(%0), %%ymm1\n\tvmovups 64(%0), %%ymm2\n\t"
                         "vmovups 96(%0), %%ymm3\n\tvmovups 128(%0), %%ymm4\n\tvmovups 160(%0), %%ymm5\n\t"
                         "vmovups 192(%0), %%ymm6\n\tvmovups 224(%0), %%ymm7"
                         :: "r"(p) : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "memory");
    __asm__ volatile("vzeroupper");
}
#endif

static void read_portable(const char *p, size_t bytes) {
    const volatile uint64_t *q = (const volatile uint64_t *)p;
    for (size_t i = 0; i < bytes / sizeof *q; ++i) (void)q[i];
}

typedef void reader(const char *, size_t);

static reader *widest_reader(void) { /* asked once per job: CPUID is slow in a virtual machine */
#ifdef MLA_X86
    if (cpu_has(MLA_LIMITS_FMA_AVX512)) return read_avx512;
    if (cpu_has(MLA_LIMITS_FMA_AVX2)) return read_avx2;
#endif
    return read_portable;
}

/* ---- threads ------------------------------------------------------------------------------------------------- */

enum work { COMPUTE, READ, COPY, CALIBRATE };

struct job {
    enum work work;
    int kind, threads;
    double seconds;
    size_t bytes; /* per thread */
    reader *read;
    atomic_int arrived, abandoned; /* a start line: pthread barriers cannot be given up when a thread fails to start */
};

struct worker {
    struct job *job;
    pthread_t thread;
    int cpu, failed;
    char *area;
    double rate, elapsed; /* amount per second of the best pass; seconds of a calibration */
};

/* Keeps the multipliers as busy as kernels do: a chain of dependent operations would be as fast as ever while another
 * thread has half of the core. */
static void calibration_loop(int kind) {
    if (kind >= 0) {
        for (double done = 0; done < CALIBRATION_OPERATIONS * flop_per_operation[kind];) done += runners[kind]();
        return;
    }
    uint64_t x[6] = {1, 2, 3, 4, 5, 6};
    for (long i = 0; i < CALIBRATION_OPERATIONS / 6; ++i) {
        for (int n = 0; n < 6; ++n) {
            x[n] = x[n] * 6364136223846793005u + 1442695040888963407u;
            __asm__ volatile("" : "+r"(x[n]));
        }
    }
}

static double one_pass(const struct job *job, const struct worker *w, double target, double *amount) {
    const int repeats = job->bytes < (1u << 20) ? 16 : 1; /* so that reading the clock stays negligible */
    const double begin = now();
    double done = 0;
    do {
        switch (job->work) {
        case COMPUTE:
            for (int i = 0; i < 16; ++i) done += runners[job->kind]();
            break;
        case READ:
            for (int i = 0; i < repeats; ++i) job->read(w->area, job->bytes);
            done += (double)repeats * (double)job->bytes;
            break;
        case COPY:
            for (int i = 0; i < repeats; ++i) {
                memcpy(w->area + job->bytes, w->area, job->bytes);
                __asm__ volatile("" ::"r"(w->area) : "memory");
            }
            done += (double)repeats * (double)job->bytes;
            break;
        case CALIBRATE:
            calibration_loop(job->kind);
            done += 1;
            break;
        }
    } while (now() - begin < target);
    *amount = done;
    return now() - begin;
}

static void *work_loop(void *argument) {
    struct worker *w = argument;
    struct job *job = w->job;
    if (w->cpu >= 0) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(w->cpu, &set);
        pthread_setaffinity_np(pthread_self(), sizeof set, &set); /* unpinned is still a measurement */
    }
    const size_t area = job->bytes * (job->work == COPY ? 2 : 1);
    if (area) {
        if (posix_memalign((void **)&w->area, area < HUGE_PAGE ? 4096 : HUGE_PAGE, area)) {
            w->area = NULL;
            w->failed = 1;
        } else {
#ifdef MADV_HUGEPAGE
            if (area >= HUGE_PAGE) madvise(w->area, area, MADV_HUGEPAGE); /* a limit is a limit of memory, not of walking page tables */
#endif
            memset(w->area, 1, area); /* first touch on the CPU that reads */
        }
    }
    atomic_fetch_add(&job->arrived, 1);
    while (atomic_load(&job->arrived) < job->threads && !atomic_load(&job->abandoned)) sched_yield();
    if (!w->failed && !atomic_load(&job->abandoned)) {
        double amount;
        if (job->work == CALIBRATE) {
            w->elapsed = one_pass(job, w, 0, &amount);
        } else {
            const double end = now() + job->seconds;
            do {
                const double elapsed = one_pass(job, w, PASS_SECONDS, &amount);
                if (amount / elapsed > w->rate) w->rate = amount / elapsed;
            } while (now() < end);
        }
    }
    free(w->area);
    return NULL;
}

static cpu_set_t job_cpus; /* empty: threads are not pinned */

void mla_limits_use_cpus(const int *cpus, int count) {
    CPU_ZERO(&job_cpus);
    for (int i = 0; i < count; ++i) CPU_SET(cpus[i], &job_cpus); /* those past the set's size are left out */
}

/* Runs the job; result: the sum of the threads' rates, or for a calibration the longest time. */
static double run(struct job *job) {
    if (job->threads < 1 || job->threads > MAX_THREADS) return MLA_LIMITS_ERROR_ARGUMENT;
    struct worker *workers = calloc((size_t)job->threads, sizeof *workers);
    if (!workers) return MLA_LIMITS_ERROR_RESOURCE;
    int cpu = -1;
    const int pin = CPU_COUNT(&job_cpus) >= job->threads;
    int started = 0;
    for (; started < job->threads; ++started) {
        struct worker *w = &workers[started];
        w->job = job;
        w->cpu = -1;
        if (pin) {
            do ++cpu;
            while (!CPU_ISSET(cpu, &job_cpus));
            w->cpu = cpu;
        }
        if (pthread_create(&w->thread, NULL, work_loop, w)) break;
    }
    if (started < job->threads) atomic_store(&job->abandoned, 1);
    double result = started < job->threads ? MLA_LIMITS_ERROR_RESOURCE : 0;
    for (int i = 0; i < started; ++i) {
        pthread_join(workers[i].thread, NULL);
        if (workers[i].failed) result = MLA_LIMITS_ERROR_RESOURCE;
        if (result < 0) continue;
        if (job->work == CALIBRATE) {
            if (workers[i].elapsed > result) result = workers[i].elapsed;
        } else {
            result += workers[i].rate;
        }
    }
    free(workers);
    return result;
}

/* ---- entries ------------------------------------------------------------------------------------------------- */

double mla_limits_compute(int kind, int threads, double seconds) {
    const int status = mla_limits_usable(kind);
    if (status) return status;
    struct job job = {.work = COMPUTE, .kind = kind, .threads = threads, .seconds = seconds};
    return run(&job);
}

static size_t per_thread(size_t bytes, int threads) {
    return threads < 1 ? 0 : bytes / (size_t)threads / 512 * 512;
}

double mla_limits_read(size_t bytes, int threads, double seconds) {
    struct job job = {.work = READ, .threads = threads, .seconds = seconds, .bytes = per_thread(bytes, threads),
                      .read = widest_reader()};
    return job.bytes ? run(&job) : MLA_LIMITS_ERROR_ARGUMENT;
}

double mla_limits_memcpy(size_t bytes, int threads, double seconds) {
    struct job job = {.work = COPY, .threads = threads, .seconds = seconds, .bytes = per_thread(bytes, threads)};
    return job.bytes ? run(&job) : MLA_LIMITS_ERROR_ARGUMENT;
}

double mla_limits_calibrate(int threads) {
    struct job job = {.work = CALIBRATE, .threads = threads, .kind = MLA_LIMITS_FMA_AVX512};
    while (job.kind >= 0 && !cpu_has(job.kind)) --job.kind;
    return run(&job);
}
