// SPDX-License-Identifier: Apache-2.0
#include "capi/check.h"
#include "ops/cache/concat.h"

using namespace amxk;

extern "C" amxk_code amxk_concat_and_cache_mla(const amxk_tensor* kv_c, const amxk_tensor* k_pe,
                                               const amxk_tensor* kv_cache, const amxk_tensor* slot_mapping,
                                               const amxk_parallel* parallel, amxk_error* error) {
  Checker c("concat_and_cache_mla_cpu", error);
  c.tensor(kv_c, "kv_c", AMXK_BF16, 2);
  c.require(k_pe != nullptr, "k_pe is missing (null)");
  // vLLM passes [T, 1, P]: the one key head.
  const int pe_dims = c.ok() && k_pe->ndim == 3 ? 3 : 2;
  if (c.ok()) c.tensor(k_pe, "k_pe", AMXK_BF16, pe_dims);
  if (c.ok() && pe_dims == 3) c.size(k_pe, "k_pe", 1, 1, "one key head");
  if (c.ok()) c.output(kv_cache, "kv_cache", AMXK_BF16, 3);
  if (c.ok()) c.index_tensor(slot_mapping, "slot_mapping", 1);
  if (!c.ok()) return c.code();
  const int64_t tokens = slot_mapping->sizes[0], latent = kv_c->sizes[1], rope = k_pe->sizes[pe_dims - 1];
  c.size(kv_cache, "kv_cache", 2, latent + rope, "R of kv_c + P of k_pe");
  c.size(k_pe, "k_pe", 0, kv_c->sizes[0], "tokens of kv_c");
  c.require(latent >= 1, "kv_c.size(1) is 0, expected at least 1");
  c.require(kv_cache->sizes[1] >= 1, "kv_cache.size(1) is 0, expected a block size of at least 1");
  c.require(tokens <= kv_c->sizes[0],
            "slot_mapping has %" PRId64 " entries, expected at most %" PRId64 " (tokens of kv_c)", tokens,
            kv_c->sizes[0]);
  if (!c.ok()) return c.code();
  const int64_t slots = kv_cache->sizes[0] * kv_cache->sizes[1];
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t slot = index_at(slot_mapping, t);
    if (!c.require(slot < slots,
                   "slot_mapping[%" PRId64 "] is %" PRId64 ", expected below %" PRId64 " (num_blocks x block_size)", t,
                   slot, slots)) {
      return c.code();
    }
  }
  ConcatParams p = {};
  p.kv_c = static_cast<const bf16*>(kv_c->data);
  p.kv_c_token = kv_c->strides[0];
  p.k_pe = static_cast<const bf16*>(k_pe->data);
  p.k_pe_token = k_pe->strides[0];
  p.cache = static_cast<bf16*>(kv_cache->data);
  p.cache_block = kv_cache->strides[0];
  p.cache_row = kv_cache->strides[1];
  p.block_size = kv_cache->sizes[1];
  p.slots = slot_mapping->data;
  p.slot_stride = slot_mapping->strides[0];
  p.slots_are_64bit = slot_mapping->dtype == AMXK_I64;
  p.tokens = tokens;
  p.latent = latent;
  p.rope = rope;
  p.parallel = usable(parallel);
  concat_and_cache(p);
  return AMXK_OK;
}
