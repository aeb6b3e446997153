/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Kernels for Multi-head Latent Attention on x86 CPUs: the C API. No torch, no Python, no C++ library.
 *
 * Terms: T tokens, H query heads, R = kv_lora_rank, P = qk_rope_head_dim, D = R + P (one latent row of the cache).
 * Tensors are described by amxk_tensor; strides are in elements, any stride is honoured except that the last dimension
 * must be contiguous. Every function checks its arguments completely before it touches tensor data, and reports the
 * argument, its value and what was expected. Outputs are written in place; nothing is allocated but grow-only scratch,
 * private to the calling and the working threads.
 *
 * Results of a request depend on its own query length, sequence length and data alone, not on batch mates, its place
 * in the batch or the number of threads.
 */
#ifndef AMX_KERNELS_H
#define AMX_KERNELS_H

#include <stdint.h>

#include "amx_kernels/isa.h"
#include "amx_kernels/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum amxk_dtype {
  AMXK_BF16 = 0,
  AMXK_F32 = 1,
  AMXK_I32 = 2,
  AMXK_I64 = 3,
  AMXK_OTHER = 4 /* any type no function takes; named in messages by amxk_tensor.dtype_name */
} amxk_dtype;

#define AMXK_MAX_DIMS 8

typedef struct amxk_tensor {
  void* data;
  int32_t dtype; /* an amxk_dtype */
  int32_t ndim;
  int64_t sizes[AMXK_MAX_DIMS];
  int64_t strides[AMXK_MAX_DIMS];
  const char* dtype_name; /* for messages; NULL: named by dtype */
} amxk_tensor;

/*
 * The caller's threads. run() must execute task(arg, 0) .. task(arg, n - 1), in any order and on any threads, and return
 * when all have ended; run == NULL means serial. num_threads is the parallelism work is divided for.
 */
typedef struct amxk_parallel {
  int32_t num_threads;
  void* context;
  void (*run)(void* context, int n, void (*task)(void* arg, int index), void* arg);
} amxk_parallel;

/* A pool of threads inside the library, for callers without one; sized by amxk_set_num_threads. */
AMXK_API amxk_code amxk_set_num_threads(int num_threads, amxk_error* error);
AMXK_API int amxk_get_num_threads(void);
AMXK_API amxk_parallel amxk_default_parallel(void);

/*
 * Packed weights. weight: [N, OUT, IN] bf16. packed: [N, ceil(OUT/16), ceil(IN/32)*16, 32] bf16, contiguous; padding is
 * zero. The order inside is opaque and the same on every tier. amxk_packed_sizes fills the four sizes.
 */
AMXK_API amxk_code amxk_packed_sizes(const amxk_tensor* weight, int64_t sizes[4], amxk_error* error);
AMXK_API amxk_code amxk_convert_weight_packed(const amxk_tensor* packed, const amxk_tensor* weight,
                                              const amxk_parallel* parallel, amxk_error* error);

/*
 * out[n] = scale[n] * mat1[n] @ mat2[n]^T with fp32 accumulation. out: [N, M, OUT] bf16; mat1: [N, M, IN] bf16; mat2:
 * [N, OUT, IN] bf16, or its packed form if is_packed; scale: NULL, or fp32 of 1 or N elements.
 */
AMXK_API amxk_code amxk_bmm(const amxk_tensor* out, const amxk_tensor* mat1, const amxk_tensor* mat2, int is_packed,
                            const amxk_tensor* scale, const amxk_parallel* parallel, amxk_error* error);

/*
 * kv_cache[slot] = kv_c[t] ++ k_pe[t] for slot = slot_mapping[t] >= 0. kv_c: [T', R] bf16; k_pe: [T', P] or [T', 1, P]
 * bf16; kv_cache: [num_blocks, block_size, D] bf16; slot_mapping: [T] int32/int64 with T <= T'; rows past T are ignored.
 */
AMXK_API amxk_code amxk_concat_and_cache_mla(const amxk_tensor* kv_c, const amxk_tensor* k_pe,
                                             const amxk_tensor* kv_cache, const amxk_tensor* slot_mapping,
                                             const amxk_parallel* parallel, amxk_error* error);

/*
 * The step's plan, reusable by every layer: seq_lens [num_reqs] and query_start_loc [num_reqs + 1] int32/int64
 * (query_start_loc NULL: decode, num_tokens / num_reqs tokens a request). Two calls: with plan == NULL, *plan_size is
 * set to the number of int64 it needs; then with plan [plan_size] int64.
 */
AMXK_API amxk_code amxk_plan_attention(const amxk_tensor* plan, int64_t* plan_size, const amxk_tensor* seq_lens,
                                       const amxk_tensor* query_start_loc, int64_t num_tokens, int64_t num_heads,
                                       int num_threads, amxk_error* error);

/*
 * Latent (absorbed) attention over a paged cache, causal among the new tokens:
 *   s = scale * (q_latent . kv_c + q_pe . k_pe);  out = softmax(s) . kv_c;  lse = ln sum exp s
 * out: [T, H, R] bf16; lse: NULL or [T, H] fp32; q_latent: [T, H, R] bf16; q_pe: [T, H, P] bf16; kv_cache: [num_blocks,
 * block_size, D] bf16; block_table: [num_reqs, max_blocks] int32/int64; seq_lens: [num_reqs] int32/int64, including the
 * new tokens; query_start_loc: [num_reqs + 1], or NULL for decode: T / num_reqs tokens a request, the last of its
 * sequence. A row with nothing to attend is zero with lse -inf. Rows past query_start_loc[num_reqs] are not written.
 * plan: NULL, or from amxk_plan_attention with the same lengths and H; a plan made for other lengths is refused.
 */
AMXK_API amxk_code amxk_attention(const amxk_tensor* out, const amxk_tensor* lse, const amxk_tensor* q_latent,
                                  const amxk_tensor* q_pe, const amxk_tensor* kv_cache, const amxk_tensor* block_table,
                                  const amxk_tensor* seq_lens, const amxk_tensor* query_start_loc, double scale,
                                  const amxk_tensor* plan, const amxk_parallel* parallel, amxk_error* error);

/*
 * The same attention in its decompressed form, for prefill: keys and values of every head are expanded from the latent
 * rows block by block, k = (w_uk . c, k_pe), v = w_uv . c. N: nope dims, E: value dims.
 * out: [T, H, E] bf16; lse: NULL or [T, H] fp32; q_nope: [T, H, N], q_pe: [T, H, P] bf16; w_uk: packed [H, N, R]; w_uv:
 * packed [H, E, R], R a multiple of 32; the rest as in amxk_attention. query_start_loc is required.
 */
AMXK_API amxk_code amxk_prefill_attention(const amxk_tensor* out, const amxk_tensor* lse, const amxk_tensor* q_nope,
                                          const amxk_tensor* q_pe, const amxk_tensor* kv_cache,
                                          const amxk_tensor* block_table, const amxk_tensor* seq_lens,
                                          const amxk_tensor* query_start_loc, const amxk_tensor* w_uk,
                                          const amxk_tensor* w_uv, double scale, const amxk_parallel* parallel,
                                          amxk_error* error);

/*
 * Which form serves a request of `query` new tokens and `keys` keys (including them) sooner: 1 decompressed, 0 absorbed.
 * A function of the two lengths and the tier alone (and of AMX_KERNELS_PREFILL=absorbed|decompressed|auto), so that it
 * never changes with batch mates. Errors: a negative length, an unknown value of the variable, no tier that can run.
 */
AMXK_API amxk_code amxk_prefill_decompressed(int64_t query, int64_t keys, int* decompressed, amxk_error* error);

#ifdef __cplusplus
}
#endif

#endif /* AMX_KERNELS_H */
