// SPDX-License-Identifier: Apache-2.0
// amx_kernels._core: the ops for NumPy arrays and DLPack capsules' owners. Unpacks arguments, releases the GIL, nothing
// else. bf16 comes as ml_dtypes.bfloat16 or as uint16 bits; amx_kernels/ops.py turns everything into NumPy arrays.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <optional>
#include <string>

#include "amx_kernels/amx_kernels.h"

namespace py = pybind11;

namespace {

int32_t dtype_of(const py::dtype& type) {
  if (type.byteorder() != '=' && type.byteorder() != '|') return AMXK_OTHER;  // of the other byte order
  const char kind = type.kind();
  const auto size = type.itemsize();
  const auto name = py::cast<std::string>(type.attr("name"));
  if (name == "bfloat16" || (kind == 'u' && size == 2)) return AMXK_BF16;
  if (kind == 'f' && size == 4) return AMXK_F32;
  if (kind == 'i' && size == 4) return AMXK_I32;
  if (kind == 'i' && size == 8) return AMXK_I64;
  return AMXK_OTHER;
}

// Keeps the array and the name of its type alive as long as the descriptor is used.
class Array {
 public:
  Array(const py::object& object, const char* name, bool written = false) {
    if (!py::isinstance<py::array>(object)) {
      throw py::type_error(std::string(name) + " is " + py::cast<std::string>(py::str(py::type::of(object))) +
                           ", expected a NumPy array");
    }
    array_ = py::reinterpret_borrow<py::array>(object);
    if (written && !array_.writeable()) throw py::value_error(std::string(name) + " is read-only, expected writable");
    if (array_.ndim() > AMXK_MAX_DIMS) {
      throw py::value_error(std::string(name) + " has " + std::to_string(array_.ndim()) +
                            " dimensions, expected at most " + std::to_string(AMXK_MAX_DIMS));
    }
    tensor_ = {};
    tensor_.data = const_cast<void*>(array_.data());
    tensor_.dtype = dtype_of(array_.dtype());
    tensor_.ndim = static_cast<int32_t>(array_.ndim());
    const auto item = array_.itemsize();
    for (int32_t i = 0; i < tensor_.ndim; ++i) {
      tensor_.sizes[i] = array_.shape(i);
      if (array_.strides(i) % item != 0) {
        throw py::value_error(std::string(name) + " has a stride of " + std::to_string(array_.strides(i)) +
                              " bytes in dimension " + std::to_string(i) + ", expected a multiple of its " +
                              std::to_string(item) + "-byte elements");
      }
      tensor_.strides[i] = array_.strides(i) / item;
    }
    if (tensor_.dtype == AMXK_OTHER) {
      type_name_ = py::cast<std::string>(py::str(py::object(array_.dtype())));
      tensor_.dtype_name = type_name_.c_str();
    }
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  const amxk_tensor* get() const { return &tensor_; }

 private:
  py::array array_;
  amxk_tensor tensor_;
  std::string type_name_;
};

class OptionalArray {
 public:
  OptionalArray(const py::object& object, const char* name, bool written = false) {
    if (!object.is_none()) array_.emplace(object, name, written);
  }
  const amxk_tensor* get() const { return array_ ? array_->get() : nullptr; }

 private:
  std::optional<Array> array_;
};

void check(amxk_code code, const amxk_error& error) {
  if (code == AMXK_OK) return;
  if (code == AMXK_INVALID_ARGUMENT) throw py::value_error(error.message);
  throw std::runtime_error(error.message);
}

// Calls without the GIL, with the library's own threads.
template <class F>
void call(F&& f) {
  amxk_error error = {};
  amxk_code code;
  {
    py::gil_scoped_release release;
    const amxk_parallel threads = amxk_default_parallel();
    code = f(&threads, &error);
  }
  check(code, error);
}

py::tuple packed_sizes(const py::object& weight) {
  const Array w(weight, "weight");
  int64_t sizes[4];
  amxk_error error = {};
  check(amxk_packed_sizes(w.get(), sizes, &error), error);
  return py::make_tuple(sizes[0], sizes[1], sizes[2], sizes[3]);
}

void convert_weight_packed(const py::object& packed, const py::object& weight) {
  const Array p(packed, "packed", true), w(weight, "weight");
  call([&](auto* threads, auto* error) { return amxk_convert_weight_packed(p.get(), w.get(), threads, error); });
}

void bmm_cpu(const py::object& out, const py::object& mat1, const py::object& mat2, bool is_vnni,
             const py::object& scale) {
  const Array o(out, "out", true), a(mat1, "mat1"), b(mat2, "mat2");
  const OptionalArray s(scale, "scale");
  call([&](auto* threads, auto* error) {
    return amxk_bmm(o.get(), a.get(), b.get(), is_vnni, s.get(), threads, error);
  });
}

void concat_and_cache_mla_cpu(const py::object& kv_c, const py::object& k_pe, const py::object& kv_cache,
                              const py::object& slot_mapping) {
  const Array c(kv_c, "kv_c"), pe(k_pe, "k_pe"), cache(kv_cache, "kv_cache", true), slots(slot_mapping, "slot_mapping");
  call([&](auto* threads, auto* error) {
    return amxk_concat_and_cache_mla(c.get(), pe.get(), cache.get(), slots.get(), threads, error);
  });
}

py::array plan_attention(const py::object& seq_lens, const py::object& query_start_loc, int64_t num_tokens,
                         int64_t num_heads, int num_threads) {
  const Array lens(seq_lens, "seq_lens");
  const OptionalArray start(query_start_loc, "query_start_loc");
  amxk_error error = {};
  int64_t size = 0;
  check(amxk_plan_attention(nullptr, &size, lens.get(), start.get(), num_tokens, num_heads, num_threads, &error), error);
  py::array_t<int64_t> plan(size);
  const Array p(plan, "plan", true);
  check(amxk_plan_attention(p.get(), &size, lens.get(), start.get(), num_tokens, num_heads, num_threads, &error), error);
  return plan;
}

void attention(const py::object& out, const py::object& lse, const py::object& q_latent, const py::object& q_pe,
               const py::object& kv_cache, const py::object& block_table, const py::object& seq_lens,
               const py::object& query_start_loc, double scale, const py::object& plan) {
  const Array o(out, "out", true), q(q_latent, "q_latent"), pe(q_pe, "q_pe"), cache(kv_cache, "kv_cache"),
      table(block_table, "block_table"), lens(seq_lens, "seq_lens");
  const OptionalArray l(lse, "lse", true), start(query_start_loc, "query_start_loc"), p(plan, "plan");
  call([&](auto* threads, auto* error) {
    return amxk_attention(o.get(), l.get(), q.get(), pe.get(), cache.get(), table.get(), lens.get(), start.get(), scale,
                          p.get(), threads, error);
  });
}

void prefill_attention_cpu(const py::object& out, const py::object& lse, const py::object& q_nope,
                           const py::object& q_pe, const py::object& kv_cache, const py::object& block_table,
                           const py::object& seq_lens, const py::object& query_start_loc, const py::object& w_uk,
                           const py::object& w_uv, double scale) {
  const Array o(out, "out", true), q(q_nope, "q_nope"), pe(q_pe, "q_pe"), cache(kv_cache, "kv_cache"),
      table(block_table, "block_table"), lens(seq_lens, "seq_lens"), start(query_start_loc, "query_start_loc"),
      uk(w_uk, "w_uk"), uv(w_uv, "w_uv");
  const OptionalArray l(lse, "lse", true);
  call([&](auto* threads, auto* error) {
    return amxk_prefill_attention(o.get(), l.get(), q.get(), pe.get(), cache.get(), table.get(), lens.get(),
                                  start.get(), uk.get(), uv.get(), scale, threads, error);
  });
}

bool prefill_decompressed(int64_t query, int64_t keys) {
  amxk_error error = {};
  int decompressed = 0;
  check(amxk_prefill_decompressed(query, keys, &decompressed, &error), error);
  return decompressed != 0;
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.def("packed_sizes", packed_sizes);
  m.def("convert_weight_packed", convert_weight_packed);
  m.def("bmm_cpu", bmm_cpu);
  m.def("concat_and_cache_mla_cpu", concat_and_cache_mla_cpu);
  m.def("plan_attention", plan_attention);
  m.def("attention", attention);
  m.def("prefill_attention_cpu", prefill_attention_cpu);
  m.def("prefill_decompressed", prefill_decompressed);
  m.def("set_num_threads", [](int n) {
    amxk_error error = {};
    check(amxk_set_num_threads(n, &error), error);
  });
  m.def("get_num_threads", amxk_get_num_threads);
}
