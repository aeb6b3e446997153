// SPDX-License-Identifier: Apache-2.0
// Executes calls of the C API that run.py wrote to a file, and writes what the calls left in the outputs' memory:
// the way to run the library's tests on a machine that has no Python. Usage: runner CALLS RESULTS
//
// CALLS, little-endian, repeated to the end: int64 op; double scale; the op's tensors, each
//   int64 present; if 1: int64 is_output, dtype, ndim, sizes[ndim], strides[ndim] (elements), offset (bytes), size (bytes);
//   memory of that size, in which the tensor begins at offset.
// RESULTS: int64 tier in use; per call: int64 code, int64 length, message; memory of each output tensor.
#include <amx_kernels/amx_kernels.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

enum Op : int64_t { kBmm, kBmmPacked, kAttention, kAttentionPlanned, kConcat };

FILE* calls;
FILE* results;

[[noreturn]] void die(const char* what) {
  std::fprintf(stderr, "runner: %s\n", what);
  std::exit(2);
}

// False at the end of the file, if that is allowed here.
bool read_bytes(void* target, size_t size, bool may_end = false) {
  const size_t got = std::fread(target, 1, size, calls);
  if (got == size) return true;
  if (got == 0 && may_end) return false;
  die("the file of calls is cut short");
}

int64_t read_int() {
  int64_t value;
  read_bytes(&value, sizeof value);
  return value;
}

void write_bytes(const void* source, size_t size) {
  if (size != 0 && std::fwrite(source, 1, size, results) != size) die("cannot write the results");
}

void write_int(int64_t value) { write_bytes(&value, sizeof value); }

struct Tensor {
  bool present = false, is_output = false;
  std::vector<unsigned char> memory;
  amxk_tensor view = {};

  void read() {
    present = read_int() != 0;
    if (!present) return;
    is_output = read_int() != 0;
    view.dtype = static_cast<int32_t>(read_int());
    view.ndim = static_cast<int32_t>(read_int());
    if (view.ndim < 0 || view.ndim > AMXK_MAX_DIMS) die("a tensor has too many dimensions");
    for (int i = 0; i < view.ndim; ++i) view.sizes[i] = read_int();
    for (int i = 0; i < view.ndim; ++i) view.strides[i] = read_int();
    const int64_t offset = read_int();
    memory.resize(static_cast<size_t>(read_int()));
    read_bytes(memory.data(), memory.size());
    view.data = memory.data() + offset;
  }

  const amxk_tensor* get() const { return present ? &view : nullptr; }
};

// Three workers' worth of tasks on the one thread there is, last first: any order must do.
void run_backwards(void*, int n, void (*task)(void* arg, int index), void* arg) {
  while (n-- > 0) task(arg, n);
}

const amxk_parallel kParallel = {3, nullptr, run_backwards};

amxk_tensor contiguous(void* data, int32_t dtype, int ndim, const int64_t* sizes) {
  amxk_tensor tensor = {};
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.ndim = ndim;
  int64_t stride = 1;
  for (int i = ndim; i-- > 0; stride *= sizes[i]) {
    tensor.sizes[i] = sizes[i];
    tensor.strides[i] = stride;
  }
  return tensor;
}

amxk_code bmm(const Tensor* t, bool packed, amxk_error* error) {  // out, mat1, mat2
  if (!packed) return amxk_bmm(t[0].get(), t[1].get(), t[2].get(), 0, nullptr, &kParallel, error);
  int64_t sizes[4];
  if (const amxk_code code = amxk_packed_sizes(t[2].get(), sizes, error)) return code;
  std::vector<uint16_t> memory(static_cast<size_t>(sizes[0] * sizes[1] * sizes[2] * sizes[3]));
  const amxk_tensor weight = contiguous(memory.data(), AMXK_BF16, 4, sizes);
  if (const amxk_code code = amxk_convert_weight_packed(&weight, t[2].get(), &kParallel, error)) return code;
  return amxk_bmm(t[0].get(), t[1].get(), &weight, 1, nullptr, &kParallel, error);
}

// out, lse, q_latent, q_pe, kv_cache, block_table, seq_lens, query_start_loc
amxk_code attention(const Tensor* t, double scale, bool planned, amxk_error* error) {
  std::vector<int64_t> memory;
  amxk_tensor plan = {};
  if (planned) {
    int64_t size = 0;
    const amxk_tensor& out = t[0].view;
    const auto make = [&](const amxk_tensor* target) {
      return amxk_plan_attention(target, &size, t[6].get(), t[7].get(), out.sizes[0], out.sizes[1],
                                 kParallel.num_threads, error);
    };
    if (const amxk_code code = make(nullptr)) return code;
    memory.resize(static_cast<size_t>(size));
    plan = contiguous(memory.data(), AMXK_I64, 1, &size);
    if (const amxk_code code = make(&plan)) return code;
  }
  return amxk_attention(t[0].get(), t[1].get(), t[2].get(), t[3].get(), t[4].get(), t[5].get(), t[6].get(), t[7].get(),
                        scale, planned ? &plan : nullptr, &kParallel, error);
}

amxk_code call(int64_t op, double scale, const Tensor* t, amxk_error* error) {
  switch (op) {
    case kBmm: return bmm(t, false, error);
    case kBmmPacked: return bmm(t, true, error);
    case kAttention: return attention(t, scale, false, error);
    case kAttentionPlanned: return attention(t, scale, true, error);
    default:  // kv_c, k_pe, kv_cache, slot_mapping
      return amxk_concat_and_cache_mla(t[0].get(), t[1].get(), t[2].get(), t[3].get(), &kParallel, error);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) die("usage: runner CALLS RESULTS");
  calls = std::fopen(argv[1], "rb");
  results = std::fopen(argv[2], "wb");
  if (calls == nullptr || results == nullptr) die("cannot open the files");

  amxk_error error = {};
  const int tier = amxk_current_tier(&error);
  if (tier < 0) die(error.message);
  write_int(tier);

  int64_t op;
  while (read_bytes(&op, sizeof op, true)) {
    double scale;
    read_bytes(&scale, sizeof scale);
    if (op < kBmm || op > kConcat) die("no such op");
    const int count = op <= kBmmPacked ? 3 : op == kConcat ? 4 : 8;
    Tensor tensors[8];
    for (int i = 0; i < count; ++i) tensors[i].read();

    error = {};
    const amxk_code code = call(op, scale, tensors, &error);
    const int64_t length = code == AMXK_OK ? 0 : static_cast<int64_t>(std::strlen(error.message));
    write_int(code);
    write_int(length);
    write_bytes(error.message, static_cast<size_t>(length));
    for (const Tensor& tensor : tensors) {
      if (tensor.is_output) write_bytes(tensor.memory.data(), tensor.memory.size());
    }
  }
  return std::fclose(results) == 0 ? 0 : 2;
}
