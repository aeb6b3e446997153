/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Instruction-set tiers: which exist, which this process may use and why not, and which one the kernels run on.
 *
 * A tier is one way every kernel is compiled. The one in use is decided once, at first use:
 *   1. the name given to amxk_set_tier(), 2. the environment variable AMX_KERNELS_ISA, 3. the best permitted tier.
 * A name that is unknown or impossible here is an error, never a silent fallback; only rule 3 falls back.
 *
 * AMX tile data needs the operating system's permission, which Linux grants per process on request. The request is
 * made at most once, when amxbf16 is about to be selected and not earlier: listing and explaining only look.
 * AMX_KERNELS_EMULATED=1 (or `emulated`) says that AMX instructions are carried out by an emulator: a forced amxbf16
 * then passes the checks that concern AMX, the permission is never requested (on a CPU with AMX the instructions would
 * stop trapping), and amxbf16 is never selected unless forced.
 *
 * Functions that take `report` or `probes` accept NULL for this very machine; nothing here prints, aborts or throws.
 */
#ifndef AMX_KERNELS_ISA_H
#define AMX_KERNELS_ISA_H

#include <stddef.h>
#include <stdint.h>

#include "amx_kernels/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Lowest first; a higher number is not always faster, see amxk_best_tier(). */
typedef enum amxk_tier {
  AMXK_TIER_PORTABLE = 0,
  AMXK_TIER_AVX2 = 1,
  AMXK_TIER_AVX512 = 2,
  AMXK_TIER_AVX512BF16 = 3,
  AMXK_TIER_AMXBF16 = 4,
  AMXK_NUM_TIERS = 5
} amxk_tier;

/* How the machine is asked. Every pointer must be set; `context` is passed through. */
typedef struct amxk_probes {
  void* context;
  int is_x86; /* 0: there is no CPUID instruction and the other probes are not called */
  /* CPUID: regs = eax, ebx, ecx, edx. */
  void (*cpuid)(void* context, uint32_t leaf, uint32_t subleaf, uint32_t regs[4]);
  /* XGETBV; called only when CPUID says that the operating system uses XSAVE. */
  uint64_t (*xgetbv)(void* context, uint32_t index);
  /* arch_prctl(ARCH_GET_XCOMP_SUPP / ARCH_GET_XCOMP_PERM): 0 and the mask, or errno. */
  int (*xcomp_supported)(void* context, uint64_t* mask);
  int (*xcomp_permitted)(void* context, uint64_t* mask);
  /* arch_prctl(ARCH_REQ_XCOMP_PERM, feature): 0 or errno. */
  int (*xcomp_request)(void* context, uint32_t feature);
} amxk_probes;

typedef enum amxk_request {
  AMXK_REQUEST_NOT_MADE = 0,
  AMXK_REQUEST_GRANTED = 1,
  AMXK_REQUEST_REFUSED = 2 /* request_errno says why */
} amxk_request;

/* Everything the decision rests on, each fact separately. */
typedef struct amxk_cpu_report {
  int32_t is_x86;
  char vendor[16]; /* "GenuineIntel", "AuthenticAMD", ...; empty if not x86 */
  char brand[64];  /* empty if the CPU does not say */
  int32_t family;  /* with the extended family added */
  int32_t model;   /* with the extended model added */
  int32_t stepping;
  int32_t osxsave;   /* the operating system uses XSAVE, so xcr0 is meaningful */
  uint64_t features; /* bit i: amxk_cpu_feature_name(i) */
  uint64_t xcr0;
  /* CPUID 1Dh and 1Eh; zeros without AMX. */
  uint32_t amx_max_palette;
  uint32_t amx_total_bytes;
  uint32_t amx_tile_bytes;
  uint32_t amx_row_bytes;
  uint32_t amx_tiles;
  uint32_t amx_rows;
  uint32_t amx_tmul_max_k;
  uint32_t amx_tmul_max_n;
  /* Permission: masks as the kernel gave them, or the errno with which it did not answer. Looked up only with AMX. */
  uint64_t xcomp_supported;
  uint64_t xcomp_permitted;
  int32_t xcomp_supported_errno;
  int32_t xcomp_permitted_errno;
  int32_t request; /* an amxk_request */
  int32_t request_errno;
} amxk_cpu_report;

typedef struct amxk_tier_status {
  const char* name;        /* static */
  const char* description; /* static */
  char required[256];      /* CPU features, separated by blanks */
  char os_check[128];      /* what the operating system must provide; empty for none */
  int32_t compiled;        /* this build contains the tier */
  int32_t cpu;             /* the CPU has every required feature */
  int32_t os;              /* the operating system provides the register state (and, for AMX, may or did permit it) */
  int32_t usable;          /* all three */
  char reason[512];        /* why it is usable or not, one sentence */
} amxk_tier_status;

/* sizeof(amxk_cpu_report): lets a foreign-function binding refuse a library of another version. */
AMXK_API size_t amxk_cpu_report_size(void);

/* Name of CPU feature i as in /proc/cpuinfo ("avx512_bf16"), NULL past the last. */
AMXK_API const char* amxk_cpu_feature_name(int i);

/* Fills `report`. Never requests a permission; with probes == NULL, what an earlier request returned is included. */
AMXK_API void amxk_detect(const amxk_probes* probes, amxk_cpu_report* report);

/* Status of `tier` on the machine of `report`. AMXK_INVALID_ARGUMENT if there is no such tier. */
AMXK_API amxk_code amxk_tier_info(const amxk_cpu_report* report, int tier, amxk_tier_status* status, amxk_error* error);

/* The tier rule 3 would pick on the machine of `report`. */
AMXK_API int amxk_best_tier(const amxk_cpu_report* report);

/*
 * Applies the three rules with `name` as the argument (NULL or "": none given) and writes the tier to `tier`.
 * With `probes` this is a dry run on an imagined machine, except that `probes` may be asked for the permission.
 * Errors: AMXK_INVALID_ARGUMENT (unknown name, malformed environment), AMXK_UNSUPPORTED (known but impossible).
 */
AMXK_API amxk_code amxk_resolve_tier(const amxk_probes* probes, const char* name, int emulated, int* tier,
                                     amxk_error* error);

/* The tier in use, resolved at first use; afterwards one relaxed load. -1 on error. Safe from any thread. */
AMXK_API int amxk_current_tier(amxk_error* error);

/* Selects a tier for the whole process; NULL or "" goes back to rules 2 and 3. On error nothing changes. */
AMXK_API amxk_code amxk_set_tier(const char* name, int emulated, amxk_error* error);

/* How the tier in use was chosen: "argument", "environment", "best permitted", or "" when not yet resolved. */
AMXK_API const char* amxk_tier_source(void);

/* 1 if the tier in use was selected as emulated. */
AMXK_API int amxk_tier_is_emulated(void);

/*
 * Writes the explanation (lines of text: CPU, operating system, one line per tier, the choice) to buffer, always
 * NUL-terminated if size > 0, and returns the length it needs without the NUL, as snprintf does.
 */
AMXK_API size_t amxk_explain(const amxk_cpu_report* report, char* buffer, size_t size);

#ifdef __cplusplus
}
#endif

#endif /* AMX_KERNELS_ISA_H */
