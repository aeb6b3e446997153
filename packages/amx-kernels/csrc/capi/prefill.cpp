// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <cstring>

#include "base/scratch.h"
#include "capi/step.h"
#include "ops/dispatch.h"

using namespace amxk;

extern "C" amxk_code amxk_prefill_attention(const amxk_tensor* out, const amxk_tensor* lse, const amxk_tensor* q_nope,
                                            const amxk_tensor* q_pe, const amxk_tensor* kv_cache,
                                            const amxk_tensor* block_table, const amxk_tensor* seq_lens,
                                            const amxk_tensor* query_start_loc, const amxk_tensor* w_uk,
                                            const amxk_tensor* w_uv, double scale, const amxk_parallel* parallel,
                                            amxk_error* error) {
  Checker c("prefill_attention_cpu", error);
  const StepTensors step = {out, lse, q_nope, "q_nope", q_pe, kv_cache, block_table};
  check_tensors(c, step);
  c.require(query_start_loc != nullptr, "query_start_loc is missing (null)");
  if (!c.ok()) return c.code();

  const int64_t tokens = q_nope->sizes[0], heads = q_nope->sizes[1], nope = q_nope->sizes[2], rope = q_pe->sizes[2];
  const int64_t value = out->sizes[2], latent = kv_cache->sizes[2] - rope, block_size = kv_cache->sizes[1];
  check_queries(c, step, scale);
  c.require(value >= 1 && value <= kMaxWidth, "out.size(2) is %" PRId64 ", expected between 1 and %" PRId64, value,
            kMaxWidth);
  // R is not given but follows from D and P, and packed weights know it to the next multiple of 32 only: were others
  // allowed, a wrong P could pass for another R.
  c.require(latent >= 1 && latent <= kMaxWidth && latent % kStepK == 0,
            "kv_cache.size(2) is %" PRId64 ", expected P of q_pe (%" PRId64 ") and a multiple of 32 latent columns up to %"
            PRId64,
            kv_cache->sizes[2], rope, kMaxWidth);
  if (c.ok()) c.packed_weight(w_uk, "w_uk", heads, nope, latent);
  if (c.ok()) c.packed_weight(w_uv, "w_uv", heads, value, latent);
  if (c.ok()) check_lengths(c, seq_lens, query_start_loc, tokens);
  if (c.ok()) c.size(block_table, "block_table", 0, seq_lens->sizes[0], "requests of seq_lens");
  if (!c.ok()) return c.code();

  const int64_t n = seq_lens->sizes[0];
  Request* requests = static_cast<Request*>(scratch(Scratch::kPlan, static_cast<size_t>(n + 1) * sizeof(Request)));
  if (requests == nullptr) return fail(error, AMXK_INTERNAL, "prefill_attention_cpu: no memory for scratch");
  read_requests(c, seq_lens, query_start_loc, tokens, requests);
  if (c.ok()) check_blocks(c, block_table, requests, kv_cache->sizes[0], block_size);
  if (!c.ok()) return c.code();

  const OpTable* ops = current_ops(error);
  if (ops == nullptr) return AMXK_UNSUPPORTED;
  PrefillParams p = {};
  fill_step(p, step, latent, scale, usable(parallel));
  p.q_nope = static_cast<const bf16*>(q_nope->data);
  p.q_nope_token = q_nope->strides[0];
  p.q_nope_head = q_nope->strides[1];
  p.w_uk = static_cast<const bf16*>(w_uk->data);
  p.w_uv = static_cast<const bf16*>(w_uv->data);
  p.nope = static_cast<int32_t>(nope);
  p.value = static_cast<int32_t>(value);
  p.requests = requests;
  p.num_requests = n;
  const amxk_code code = ops->prefill(p);
  return code == AMXK_OK ? code : fail(error, code, "prefill_attention_cpu: no memory for scratch");
}

extern "C" amxk_code amxk_prefill_decompressed(int64_t query, int64_t keys, int* decompressed, amxk_error* error) {
  Checker c("prefill_decompressed", error);
  c.require(query >= 0, "query is %" PRId64 ", expected at least 0", query);
  c.require(keys >= query, "keys is %" PRId64 ", expected at least the %" PRId64 " new tokens", keys, query);
  c.require(decompressed != nullptr, "decompressed is missing (null)");
  if (!c.ok()) return c.code();
  const char* wanted = std::getenv("AMX_KERNELS_PREFILL");
  if (wanted != nullptr && wanted[0] != '\0' && std::strcmp(wanted, "auto") != 0) {
    const bool yes = std::strcmp(wanted, "decompressed") == 0;
    c.require(yes || std::strcmp(wanted, "absorbed") == 0,
              "AMX_KERNELS_PREFILL is \"%s\", expected absorbed, decompressed or auto", wanted);
    *decompressed = yes;
    return c.code();
  }
  // Multiply-accumulates per head at R = 512, N = E = 128, P = 64; pairs: (query, key) pairs of the causal triangle.
  // The absorbed side also pays W_UK and W_UV for each query.
  constexpr double kAbsorbed = 1088, kDecompressed = 320, kPerToken = 131072;
  const OpTable* ops = current_ops(error);
  if (ops == nullptr) return AMXK_UNSUPPORTED;
  const double q = static_cast<double>(query), l = static_cast<double>(keys);
  const double pairs = q * (l - 0.5 * (q - 1));
  *decompressed = kDecompressed * pairs + ops->expand * kPerToken * l < kAbsorbed * pairs + kPerToken * q;
  return AMXK_OK;
}
