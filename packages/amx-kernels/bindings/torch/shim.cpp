// SPDX-License-Identifier: Apache-2.0
// torch.ops.amx_kernels.* over torch's stable ABI: unpacks arguments, passes torch's threads, nothing else. Checks and
// kernels live behind the C API; fakes are registered in Python (amx_kernels/torch.py).
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <stdexcept>
#include <vector>

#include "amx_kernels/amx_kernels.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

int32_t dtype_of(ScalarType type) {
  switch (type) {
    case ScalarType::BFloat16: return AMXK_BF16;
    case ScalarType::Float: return AMXK_F32;
    case ScalarType::Int: return AMXK_I32;
    case ScalarType::Long: return AMXK_I64;
    default: return AMXK_OTHER;
  }
}

amxk_tensor describe(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.is_cpu(), name, " is not on the CPU, expected every tensor there");
  STD_TORCH_CHECK(t.dim() <= AMXK_MAX_DIMS, name, " has ", t.dim(), " dimensions, expected at most ", AMXK_MAX_DIMS);
  amxk_tensor d = {};
  d.data = const_cast<void*>(t.const_data_ptr());
  d.dtype = dtype_of(t.scalar_type());
  d.ndim = static_cast<int32_t>(t.dim());
  const auto sizes = t.sizes(), strides = t.strides();
  for (int32_t i = 0; i < d.ndim; ++i) {
    d.sizes[i] = sizes[i];
    d.strides[i] = strides[i];
  }
  if (d.dtype == AMXK_OTHER) d.dtype_name = torch::headeronly::toString(t.scalar_type());
  return d;
}

void run(void*, int n, void (*task)(void*, int), void* arg) {
  torch::stable::parallel_for(0, n, 1, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) task(arg, static_cast<int>(i));
  });
}

amxk_parallel torch_threads() { return {static_cast<int32_t>(torch::stable::get_num_threads()), nullptr, run}; }

// Not STD_TORCH_CHECK, which puts the place in this file before the message.
void check(amxk_code code, const amxk_error& error) {
  if (code != AMXK_OK) throw std::runtime_error(error.message);
}

// A descriptor that may be absent.
struct Optional {
  std::optional<amxk_tensor> tensor;
  Optional(const std::optional<Tensor>& t, const char* name) {
    if (t.has_value()) tensor = describe(*t, name);
  }
  const amxk_tensor* get() const { return tensor ? &*tensor : nullptr; }
};

Tensor convert_weight_packed(Tensor weight) {
  const amxk_tensor w = describe(weight, "weight");
  amxk_error error = {};
  int64_t sizes[4];
  check(amxk_packed_sizes(&w, sizes, &error), error);
  Tensor packed = torch::stable::empty({sizes, 4}, weight.scalar_type(), std::nullopt, weight.device());
  const amxk_tensor p = describe(packed, "packed");
  const amxk_parallel threads = torch_threads();
  check(amxk_convert_weight_packed(&p, &w, &threads, &error), error);
  return packed;
}

void bmm_cpu(Tensor out, Tensor mat1, Tensor mat2, bool is_vnni, std::optional<Tensor> scale) {
  const amxk_tensor o = describe(out, "out"), a = describe(mat1, "mat1"), b = describe(mat2, "mat2");
  const Optional s(scale, "scale");
  const amxk_parallel threads = torch_threads();
  amxk_error error = {};
  check(amxk_bmm(&o, &a, &b, is_vnni, s.get(), &threads, &error), error);
}

void concat_and_cache_mla_cpu(Tensor kv_c, Tensor k_pe, Tensor kv_cache, Tensor slot_mapping) {
  const amxk_tensor c = describe(kv_c, "kv_c"), pe = describe(k_pe, "k_pe"), cache = describe(kv_cache, "kv_cache"),
                    slots = describe(slot_mapping, "slot_mapping");
  const amxk_parallel threads = torch_threads();
  amxk_error error = {};
  check(amxk_concat_and_cache_mla(&c, &pe, &cache, &slots, &threads, &error), error);
}

Tensor plan_attention(Tensor seq_lens, std::optional<Tensor> query_start_loc, int64_t num_tokens, int64_t num_heads,
                      int64_t num_threads) {
  const amxk_tensor lens = describe(seq_lens, "seq_lens");
  const Optional start(query_start_loc, "query_start_loc");
  const int threads = num_threads < 0 || num_threads > INT32_MAX ? -1 : static_cast<int>(num_threads);
  amxk_error error = {};
  int64_t size = 0;
  check(amxk_plan_attention(nullptr, &size, &lens, start.get(), num_tokens, num_heads, threads, &error), error);
  Tensor plan = torch::stable::empty({&size, 1}, ScalarType::Long, std::nullopt, seq_lens.device());
  const amxk_tensor p = describe(plan, "plan");
  check(amxk_plan_attention(&p, &size, &lens, start.get(), num_tokens, num_heads, threads, &error), error);
  return plan;
}

void attention(const Tensor& out, const std::optional<Tensor>& lse, const Tensor& q_latent, const Tensor& q_pe,
               const Tensor& kv_cache, const Tensor& block_table, const Tensor& seq_lens,
               const std::optional<Tensor>& query_start_loc, double scale, const std::optional<Tensor>& plan) {
  const amxk_tensor o = describe(out, "out"), q = describe(q_latent, "q_latent"), pe = describe(q_pe, "q_pe"),
                    cache = describe(kv_cache, "kv_cache"), table = describe(block_table, "block_table"),
                    lens = describe(seq_lens, "seq_lens");
  const Optional l(lse, "lse"), start(query_start_loc, "query_start_loc"), p(plan, "plan");
  const amxk_parallel threads = torch_threads();
  amxk_error error = {};
  check(amxk_attention(&o, l.get(), &q, &pe, &cache, &table, &lens, start.get(), scale, p.get(), &threads, &error),
        error);
}

void decode_attention_cpu(Tensor out, std::optional<Tensor> lse, Tensor q_latent, Tensor q_pe, Tensor kv_cache,
                          Tensor block_table, Tensor seq_lens, double scale, std::optional<Tensor> plan) {
  attention(out, lse, q_latent, q_pe, kv_cache, block_table, seq_lens, std::nullopt, scale, plan);
}

void extend_attention_cpu(Tensor out, std::optional<Tensor> lse, Tensor q_latent, Tensor q_pe, Tensor kv_cache,
                          Tensor block_table, Tensor seq_lens, Tensor query_start_loc, double scale,
                          std::optional<Tensor> plan) {
  attention(out, lse, q_latent, q_pe, kv_cache, block_table, seq_lens, query_start_loc, scale, plan);
}

void prefill_attention_cpu(Tensor out, std::optional<Tensor> lse, Tensor q_nope, Tensor q_pe, Tensor kv_cache,
                           Tensor block_table, Tensor seq_lens, Tensor query_start_loc, Tensor w_uk, Tensor w_uv,
                           double scale) {
  const amxk_tensor o = describe(out, "out"), q = describe(q_nope, "q_nope"), pe = describe(q_pe, "q_pe"),
                    cache = describe(kv_cache, "kv_cache"), table = describe(block_table, "block_table"),
                    lens = describe(seq_lens, "seq_lens"), start = describe(query_start_loc, "query_start_loc"),
                    uk = describe(w_uk, "w_uk"), uv = describe(w_uv, "w_uv");
  const Optional l(lse, "lse");
  const amxk_parallel threads = torch_threads();
  amxk_error error = {};
  check(amxk_prefill_attention(&o, l.get(), &q, &pe, &cache, &table, &lens, &start, &uk, &uv, scale, &threads, &error),
        error);
}

}  // namespace

STABLE_TORCH_LIBRARY(amx_kernels, m) {
  m.def("convert_weight_packed(Tensor weight) -> Tensor");
  m.def("bmm_cpu(Tensor(a!) out, Tensor mat1, Tensor mat2, bool is_vnni, Tensor? scale=None) -> ()");
  m.def("concat_and_cache_mla_cpu(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping) -> ()");
  m.def(
      "plan_attention(Tensor seq_lens, Tensor? query_start_loc, int num_tokens, int num_heads, int num_threads) -> "
      "Tensor");
  m.def(
      "decode_attention_cpu(Tensor(a!) out, Tensor(b!)? lse, Tensor q_latent, Tensor q_pe, Tensor kv_cache, Tensor "
      "block_table, Tensor seq_lens, float scale, Tensor? plan=None) -> ()");
  m.def(
      "extend_attention_cpu(Tensor(a!) out, Tensor(b!)? lse, Tensor q_latent, Tensor q_pe, Tensor kv_cache, Tensor "
      "block_table, Tensor seq_lens, Tensor query_start_loc, float scale, Tensor? plan=None) -> ()");
  m.def(
      "prefill_attention_cpu(Tensor(a!) out, Tensor(b!)? lse, Tensor q_nope, Tensor q_pe, Tensor kv_cache, Tensor "
      "block_table, Tensor seq_lens, Tensor query_start_loc, Tensor w_uk, Tensor w_uv, float scale) -> ()");
}

// Registered for every backend, so that a tensor on another device reaches the message above and not the dispatcher's.
STABLE_TORCH_LIBRARY_IMPL(amx_kernels, CompositeExplicitAutograd, m) {
  m.impl("convert_weight_packed", TORCH_BOX(&convert_weight_packed));
  m.impl("bmm_cpu", TORCH_BOX(&bmm_cpu));
  m.impl("concat_and_cache_mla_cpu", TORCH_BOX(&concat_and_cache_mla_cpu));
  m.impl("plan_attention", TORCH_BOX(&plan_attention));
  m.impl("decode_attention_cpu", TORCH_BOX(&decode_attention_cpu));
  m.impl("extend_attention_cpu", TORCH_BOX(&extend_attention_cpu));
  m.impl("prefill_attention_cpu", TORCH_BOX(&prefill_attention_cpu));
}
