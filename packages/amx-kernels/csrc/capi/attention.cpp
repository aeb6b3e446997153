// SPDX-License-Identifier: Apache-2.0
#include "base/scratch.h"
#include "capi/step.h"
#include "ops/dispatch.h"

namespace amxk {
namespace {

// A caller's plan is used only if it is intact and made for exactly these lengths.
void check_plan(Checker& c, const amxk_tensor* plan, const Request* requests, int64_t num_requests, int64_t heads) {
  c.tensor(plan, "plan", AMXK_I64, 1);
  if (!c.ok()) return;
  const int64_t* memory = static_cast<const int64_t*>(plan->data);
  const PlanHeader* h = reinterpret_cast<const PlanHeader*>(memory);
  c.require(plan->sizes[0] * static_cast<int64_t>(sizeof(int64_t)) >= static_cast<int64_t>(sizeof(PlanHeader)) &&
                h->magic == kPlanMagic && h->size == plan->sizes[0] && plan_checksum(memory) == h->checksum,
            "plan is not an intact result of plan_attention (%" PRId64 " elements)", plan->sizes[0]);
  if (!c.ok()) return;
  c.require(h->num_heads == heads, "plan was made for %" PRId64 " heads, expected %" PRId64, h->num_heads, heads);
  c.require(h->num_requests == num_requests, "plan was made for %" PRId64 " requests, expected %" PRId64, h->num_requests,
            num_requests);
  const Request* planned = plan_view(memory).requests;
  for (int64_t i = 0; i < num_requests && c.ok(); ++i) {
    c.require(planned[i].first_token == requests[i].first_token && planned[i].tokens == requests[i].tokens &&
                  planned[i].keys == requests[i].keys,
              "plan was made for %" PRId64 " new tokens and %" PRId64 " keys of request %" PRId64 ", expected %" PRId64
              " and %" PRId64 ": plan each step anew",
              planned[i].tokens, planned[i].keys, i, requests[i].tokens, requests[i].keys);
  }
}

}  // namespace
}  // namespace amxk

using namespace amxk;

extern "C" amxk_code amxk_plan_attention(const amxk_tensor* plan, int64_t* plan_elements, const amxk_tensor* seq_lens,
                                         const amxk_tensor* query_start_loc, int64_t num_tokens, int64_t num_heads,
                                         int num_threads, amxk_error* error) {
  Checker c("plan_attention", error);
  c.require(plan_elements != nullptr, "plan_size is missing (null)");
  c.require(num_tokens >= 0 && num_tokens <= kMaxTokens, "num_tokens is %" PRId64 ", expected between 0 and %" PRId64,
            num_tokens, kMaxTokens);
  c.require(num_heads >= 1 && num_heads <= kMaxHeads, "num_heads is %" PRId64 ", expected between 1 and %" PRId64,
            num_heads, kMaxHeads);
  c.require(num_threads >= 1 && num_threads <= kMaxThreads, "num_threads is %d, expected between 1 and %d", num_threads,
            kMaxThreads);
  if (c.ok()) check_lengths(c, seq_lens, query_start_loc, num_tokens);
  if (!c.ok()) return c.code();
  const int64_t n = seq_lens->sizes[0];
  Request* requests = static_cast<Request*>(scratch(Scratch::kPlan, static_cast<size_t>(n + 1) * sizeof(Request)));
  if (requests == nullptr) return fail(error, AMXK_INTERNAL, "plan_attention: no memory for scratch");
  read_requests(c, seq_lens, query_start_loc, num_tokens, requests);
  if (!c.ok()) return c.code();
  const OpTable* ops = current_ops(error);
  if (ops == nullptr) return AMXK_UNSUPPORTED;
  const int64_t size = plan_size(requests, n, num_heads, num_threads);
  if (plan != nullptr) {
    c.output(plan, "plan", AMXK_I64, 1);
    if (c.ok()) c.size(plan, "plan", 0, size, "what these lengths need");
    if (!c.ok()) return c.code();
    plan_build(static_cast<int64_t*>(plan->data), requests, n, num_heads, num_threads, ops->item_keys);
  }
  *plan_elements = size;
  return AMXK_OK;
}

extern "C" amxk_code amxk_attention(const amxk_tensor* out, const amxk_tensor* lse, const amxk_tensor* q_latent,
                                    const amxk_tensor* q_pe, const amxk_tensor* kv_cache,
                                    const amxk_tensor* block_table, const amxk_tensor* seq_lens,
                                    const amxk_tensor* query_start_loc, double scale, const amxk_tensor* plan,
                                    const amxk_parallel* parallel, amxk_error* error) {
  const char* op = query_start_loc != nullptr ? "extend_attention_cpu" : "decode_attention_cpu";
  Checker c(op, error);
  const StepTensors step = {out, lse, q_latent, "q_latent", q_pe, kv_cache, block_table};
  check_tensors(c, step);
  if (!c.ok()) return c.code();

  const int64_t tokens = q_latent->sizes[0], heads = q_latent->sizes[1], latent = q_latent->sizes[2];
  const int64_t rope = q_pe->sizes[2], block_size = kv_cache->sizes[1];
  check_queries(c, step, scale);
  c.size(out, "out", 2, latent, "R of q_latent");
  c.size(kv_cache, "kv_cache", 2, latent + rope, "R of q_latent + P of q_pe");
  if (c.ok()) check_lengths(c, seq_lens, query_start_loc, tokens);
  if (c.ok()) c.size(block_table, "block_table", 0, seq_lens->sizes[0], "requests of seq_lens");
  if (!c.ok()) return c.code();

  const int64_t n = seq_lens->sizes[0];
  const amxk_parallel pool = usable(parallel);
  Request* requests = static_cast<Request*>(scratch(Scratch::kPlan, static_cast<size_t>(n + 1) * sizeof(Request)));
  if (requests == nullptr) return fail(error, AMXK_INTERNAL, "%s: no memory for scratch", op);
  read_requests(c, seq_lens, query_start_loc, tokens, requests);
  if (c.ok()) check_blocks(c, block_table, requests, kv_cache->sizes[0], block_size);
  if (c.ok() && plan != nullptr) check_plan(c, plan, requests, n, heads);
  if (!c.ok()) return c.code();

  const OpTable* ops = current_ops(error);
  if (ops == nullptr) return AMXK_UNSUPPORTED;
  const int64_t* planned = plan != nullptr ? static_cast<const int64_t*>(plan->data) : nullptr;
  if (planned == nullptr || plan_view(planned).header->num_threads != pool.num_threads) {
    // No plan, or the number of threads has changed since: plan here, behind the requests in the same scratch.
    const int64_t size = plan_size(requests, n, heads, pool.num_threads);
    const size_t request_bytes = static_cast<size_t>(n + 1) * sizeof(Request);
    char* memory = static_cast<char*>(
        scratch(Scratch::kPlan, request_bytes + static_cast<size_t>(size) * sizeof(int64_t)));
    if (memory == nullptr) return fail(error, AMXK_INTERNAL, "%s: no memory for scratch", op);
    requests = reinterpret_cast<Request*>(memory);
    read_requests(c, seq_lens, query_start_loc, tokens, requests);  // growing may have moved the buffer
    int64_t* own = reinterpret_cast<int64_t*>(memory + request_bytes);
    plan_build(own, requests, n, heads, pool.num_threads, ops->item_keys);
    planned = own;
  }

  AttentionParams p = {};
  fill_step(p, step, latent, scale, pool);
  p.q_latent = static_cast<const bf16*>(q_latent->data);
  p.q_latent_token = q_latent->strides[0];
  p.q_latent_head = q_latent->strides[1];
  p.plan = plan_view(planned);
  if (p.plan.header->num_items == 0) return AMXK_OK;
  const amxk_code code = ops->attention(p);
  return code == AMXK_OK ? code : fail(error, code, "%s: no memory for scratch", op);
}
