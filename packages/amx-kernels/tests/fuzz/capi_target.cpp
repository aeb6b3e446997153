// SPDX-License-Identifier: Apache-2.0
// Fuzz target: bytes become a call of the C API. Every tensor that could be real is backed by exactly the memory it
// describes, so that the address sanitizer sees the first byte read or written outside; a tensor that cannot be real
// must be refused. Descriptors between the two, which lie about memory in a way nobody can notice, are not tried.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "amx_kernels/amx_kernels.h"

namespace {

constexpr int64_t kBytes[] = {2, 4, 4, 8, 1};
constexpr __int128 kReal = 1 << 20;                     // bytes a tensor may take here
constexpr __int128 kImpossible = static_cast<__int128>(1) << 61;

struct Input {
  const uint8_t* data;
  size_t size;
  uint8_t byte() {
    if (size == 0) return 0;
    --size;
    return *data++;
  }
  bool rare() { return byte() > 240; }
  int64_t number() {
    switch (byte() % 8) {
      case 0: return INT64_MIN;
      case 1: return INT64_MAX;
      case 2: return -1;
      case 3: return int64_t{1} << (byte() % 63);
      case 4: return -(int64_t{1} << (byte() % 63));
      case 5: return 0;
      default: return static_cast<int8_t>(byte());
    }
  }
};

void die(const char* what, const amxk_error& error) {
  fprintf(stderr, "%s: code %d, message '%s'\n", what, error.code, error.message);
  abort();
}

// A tensor and the memory behind it.
struct Tensor {
  amxk_tensor t = {};
  char* memory = nullptr;
  bool impossible = false;  // must be refused
  bool unknowable = false;  // must not be tried
  bool missing = false;

  ~Tensor() { free(memory); }
  const amxk_tensor* get() const { return missing ? nullptr : &t; }

  void make(Input& in, int dtype, int ndim, const int64_t* sizes) {
    t.dtype = dtype;
    t.ndim = ndim;
    int64_t stride = 1;
    for (int d = ndim - 1; d >= 0; --d) {
      t.sizes[d] = sizes[d];
      t.strides[d] = stride;
      stride *= sizes[d] > 0 ? sizes[d] : 1;
      if (in.byte() > 200) stride += in.byte() % 9;  // a gap
    }
    if (ndim > 1 && in.byte() > 230) t.strides[0] = 0;
    if (in.rare()) t.dtype = static_cast<int32_t>(in.number());
    if (in.rare()) t.ndim = static_cast<int32_t>(in.number());
    if (in.rare()) t.sizes[in.byte() % 4] = in.number();
    if (in.rare()) t.strides[in.byte() % 4] = in.number();
    missing = in.rare();
    back(in.rare(), in.rare());
  }

  void back(bool null, bool misaligned) {
    if (t.dtype < 0 || t.dtype > 4 || t.ndim < 0 || t.ndim > AMXK_MAX_DIMS) return;  // refused before memory matters
    const int64_t bytes = kBytes[t.dtype];
    __int128 low = 0, high = 0;
    bool is_empty = false;
    for (int d = 0; d < t.ndim; ++d) {
      if (t.sizes[d] < 0) {
        impossible = true;
        return;
      }
      if (t.sizes[d] == 0) is_empty = true;
      if (t.sizes[d] > 1) {
        const __int128 reach = static_cast<__int128>(t.sizes[d] - 1) * t.strides[d];
        // Further than that, and its bytes need not fit 128 bits.
        const __int128 bounded = reach > kImpossible ? kImpossible : reach < -kImpossible ? -kImpossible : reach;
        (bounded < 0 ? low : high) += bounded * bytes;
        if (static_cast<__int128>(t.sizes[d]) * bytes > kImpossible) impossible = true;
      }
    }
    high += bytes;
    if (is_empty) {
      impossible = false;
      return;
    }
    if (high - low > kImpossible) {
      impossible = true;
    } else if (high - low > kReal) {
      unknowable = true;
    }
    if (impossible || unknowable) {
      t.data = reinterpret_cast<void*>(uintptr_t{0x1000});
      return;
    }
    memory = static_cast<char*>(malloc(static_cast<size_t>(high - low) + (misaligned ? 1 : 0)));
    memset(memory, 0x3d, static_cast<size_t>(high - low));  // 0.046 as bf16
    t.data = null ? nullptr : memory + static_cast<int64_t>(-low) + (misaligned ? 1 : 0);
  }

  // Fills an index tensor, where it is one and is backed.
  template <class F>
  void fill(F value) {
    if (memory == nullptr || t.data == nullptr || (t.dtype != AMXK_I32 && t.dtype != AMXK_I64)) return;
    if (reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(kBytes[t.dtype]) != 0) return;
    if (t.ndim < 1 || t.ndim > 2) return;
    const int64_t columns = t.ndim == 2 ? t.sizes[1] : 1;
    for (int64_t i = 0; i < t.sizes[0]; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        const int64_t at = i * t.strides[0] + (t.ndim == 2 ? j * t.strides[1] : 0), v = value(i, j);
        if (t.dtype == AMXK_I64) {
          static_cast<int64_t*>(t.data)[at] = v;
        } else {
          static_cast<int32_t*>(t.data)[at] = static_cast<int32_t>(v);
        }
      }
    }
  }
};

void serial(void*, int n, void (*task)(void*, int), void* arg) {
  for (int i = 0; i < n; ++i) task(arg, i);
}

int64_t small(Input& in) {
  static const int64_t sizes[] = {0, 1, 2, 3, 5, 15, 16, 17, 31, 32, 33, 48, 1, 2, 16, 64};
  return sizes[in.byte() % 16];
}

int index_type(Input& in) { return in.byte() % 2 ? AMXK_I64 : AMXK_I32; }

template <int N>
bool known(const Tensor* const (&tensors)[N]) {
  for (const Tensor* t : tensors) {
    if (!t->missing && t->unknowable) return false;
  }
  return true;
}

template <int N>
void judge(const Tensor* const (&tensors)[N], amxk_code code, const amxk_error& error) {
  if (code < AMXK_OK || code > AMXK_INTERNAL) die("no such code", error);
  if (code == AMXK_OK) {
    for (const Tensor* t : tensors) {
      if (!t->missing && t->impossible) die("an impossible tensor was accepted", error);
    }
  } else if (code != AMXK_INTERNAL && (error.code != code || error.message[0] == '\0' || strlen(error.message) > 511)) {
    die("refused without a message", error);
  }
}

// What attention and prefill share: a step of up to three requests over a paged cache.
struct Step {
  int64_t heads, rank, rope, tokens;
  Tensor lse, pe, kv, table, seq, start;

  Step(Input& in, int64_t rank, bool decode) : heads(small(in) % 20), rank(rank), rope(small(in) % 33) {
    const int64_t requests = in.byte() % 4, block = small(in), blocks = in.byte() % 8 + 1, columns = in.byte() % 8;
    int64_t lens[4] = {}, starts[5] = {};
    for (int64_t i = 0; i < requests; ++i) {
      lens[i] = in.rare() ? in.number() : block * columns > 0 ? in.byte() % (block * columns + 1) : 0;
      const int64_t most = lens[i] < 0 ? 0 : lens[i] < 6 ? lens[i] : 6;
      starts[i + 1] = starts[i] + (most > 0 ? in.byte() % (most + 1) : 0);
    }
    tokens = decode ? requests * (in.byte() % 3) : starts[requests] + in.byte() % 3;
    const int64_t pe3[] = {tokens, heads, rope}, lse2[] = {tokens, heads};
    const int64_t kv3[] = {blocks, block, rank + rope}, table2[] = {requests, columns}, n1[] = {requests}, n2[] = {requests + 1};
    lse.make(in, AMXK_F32, 2, lse2);
    pe.make(in, AMXK_BF16, 3, pe3);
    kv.make(in, AMXK_BF16, 3, kv3);
    table.make(in, index_type(in), 2, table2);
    seq.make(in, index_type(in), 1, n1);
    start.make(in, index_type(in), 1, n2);
    start.missing = start.missing || decode;
    lse.missing = lse.missing || in.byte() % 3 == 0;
    table.fill([&](int64_t, int64_t) { return in.rare() ? in.number() : in.byte() % blocks; });
    seq.fill([&](int64_t i, int64_t) { return i < 4 ? lens[i] : 0; });
    start.fill([&](int64_t i, int64_t) { return i < 5 ? starts[i] : 0; });
  }
};

double softmax_scale(Input& in) {
  const double scales[] = {0.1, 1.0, 0.0, -1.0, 1e300, 5e-324};
  return in.rare() ? scales[in.byte() % 6] : 0.125;
}

void attention(Input& in, const amxk_parallel& pool, amxk_error& error) {
  const int64_t rank = small(in);
  const bool planned = in.byte() % 3 == 0;
  Step s(in, rank, in.byte() % 4 == 0);
  const int64_t q3[] = {s.tokens, s.heads, rank};
  Tensor out, q, plan;
  out.make(in, AMXK_BF16, 3, q3);
  q.make(in, AMXK_BF16, 3, q3);
  plan.missing = true;
  const Tensor* const lengths[] = {&s.seq, &s.start};
  if (planned && known(lengths)) {
    int64_t size = 0;
    amxk_code code = amxk_plan_attention(nullptr, &size, s.seq.get(), s.start.get(), s.tokens, s.heads, pool.num_threads, &error);
    judge(lengths, code, error);
    if (code == AMXK_OK && size > 0 && size < 100000) {
      const int64_t p1[] = {size};
      plan.missing = false;
      plan.make(in, AMXK_I64, 1, p1);
      const Tensor* const both[] = {&s.seq, &s.start, &plan};
      if (known(both)) {
        error = {};
        code = amxk_plan_attention(plan.get(), &size, s.seq.get(), s.start.get(), s.tokens, s.heads, pool.num_threads, &error);
        judge(both, code, error);
        if (code == AMXK_OK && !plan.missing && in.rare()) {
          static_cast<int64_t*>(plan.t.data)[in.byte() % size] ^= int64_t{1} << (in.byte() % 64);
        }
      }
    }
  }
  const Tensor* const all[] = {&out, &s.lse, &q, &s.pe, &s.kv, &s.table, &s.seq, &s.start, &plan};
  if (!known(all)) return;
  error = {};
  const amxk_code code = amxk_attention(out.get(), s.lse.get(), q.get(), s.pe.get(), s.kv.get(), s.table.get(), s.seq.get(),
                                        s.start.get(), softmax_scale(in), plan.get(), &pool, &error);
  judge(all, code, error);
}

void prefill(Input& in, const amxk_parallel& pool, amxk_error& error) {
  const int64_t rank = in.rare() ? small(in) : 32 * (in.byte() % 3), nope = small(in), value = small(in);
  Step s(in, rank, false);
  const auto packed = [&](int64_t rows, int64_t(&sizes)[4]) {
    sizes[0] = s.heads, sizes[1] = (rows + 15) / 16, sizes[2] = (rank + 31) / 32 * 16, sizes[3] = 32;
  };
  const int64_t o3[] = {s.tokens, s.heads, value}, q3[] = {s.tokens, s.heads, nope};
  int64_t uk4[4], uv4[4];
  packed(nope, uk4);
  packed(value, uv4);
  Tensor out, q, w_uk, w_uv;
  out.make(in, AMXK_BF16, 3, o3);
  q.make(in, AMXK_BF16, 3, q3);
  w_uk.make(in, AMXK_BF16, 4, uk4);
  w_uv.make(in, AMXK_BF16, 4, uv4);
  const Tensor* const all[] = {&out, &s.lse, &q, &s.pe, &s.kv, &s.table, &s.seq, &s.start, &w_uk, &w_uv};
  if (!known(all)) return;
  const amxk_code code = amxk_prefill_attention(out.get(), s.lse.get(), q.get(), s.pe.get(), s.kv.get(), s.table.get(),
                                                s.seq.get(), s.start.get(), w_uk.get(), w_uv.get(), softmax_scale(in), &pool,
                                                &error);
  judge(all, code, error);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in = {data, size};
  amxk_error error = {};
  static const char* const tiers[] = {"portable", "avx2", "avx512", "avx512bf16", "amxbf16"};
  const uint8_t tier = in.byte();
  // A tier this machine lacks is refused, and the one before stays.
  if (tier % 16 < 5) amxk_set_tier(tiers[tier % 16], 0, nullptr);
  const int32_t threads[] = {1, 2, 3, 7, 64, 0, -1, INT32_MAX};
  const amxk_parallel pool = {threads[in.byte() % 8], nullptr, in.rare() ? nullptr : serial};
  switch (in.byte() % 8) {
    case 0: {
      const int64_t batch = in.byte() % 4, columns = small(in), depth = small(in);
      const int64_t w[] = {batch, columns, depth};
      int64_t sizes[4] = {batch, (columns + 15) / 16, (depth + 31) / 32 * 16, 32};
      Tensor weight, packed;
      weight.make(in, AMXK_BF16, 3, w);
      packed.make(in, AMXK_BF16, 4, sizes);
      const Tensor* const both[] = {&weight, &packed};
      if (!known(both)) return 0;
      judge(both, amxk_convert_weight_packed(packed.get(), weight.get(), &pool, &error), error);
      break;
    }
    case 1: {
      const int64_t batch = in.byte() % 4, rows = small(in), columns = small(in), depth = small(in);
      const bool packed = in.byte() % 2;
      const int64_t o[] = {batch, rows, columns}, a[] = {batch, rows, depth}, b[] = {batch, columns, depth};
      const int64_t p[] = {batch, (columns + 15) / 16, (depth + 31) / 32 * 16, 32};
      const int64_t s[] = {in.byte() % 2 ? batch : 1};
      Tensor out, mat1, mat2, scale;
      out.make(in, AMXK_BF16, 3, o);
      mat1.make(in, AMXK_BF16, 3, a);
      mat2.make(in, AMXK_BF16, packed ? 4 : 3, packed ? p : b);
      scale.make(in, AMXK_F32, in.byte() % 2, s);
      scale.missing = scale.missing || in.byte() % 2;
      const Tensor* const all[] = {&out, &mat1, &mat2, &scale};
      if (!known(all)) return 0;
      judge(all, amxk_bmm(out.get(), mat1.get(), mat2.get(), packed, scale.get(), &pool, &error), error);
      break;
    }
    case 2: {
      const int64_t tokens = small(in), rank = small(in), rope = small(in), blocks = in.byte() % 6, block = small(in);
      const int64_t c[] = {tokens, rank}, p[] = {tokens, rope}, kv[] = {blocks, block, rank + rope};
      const int64_t n[] = {tokens > 0 ? tokens - in.byte() % 2 : 0};
      Tensor kv_c, k_pe, cache, slots;
      kv_c.make(in, AMXK_BF16, 2, c);
      k_pe.make(in, AMXK_BF16, 2, p);
      cache.make(in, AMXK_BF16, 3, kv);
      slots.make(in, index_type(in), 1, n);
      slots.fill([&](int64_t, int64_t) {
        return in.rare() ? in.number() : blocks * block > 0 ? in.byte() % (blocks * block) - in.byte() % 2 : -1;
      });
      const Tensor* const all[] = {&kv_c, &k_pe, &cache, &slots};
      if (!known(all)) return 0;
      judge(all, amxk_concat_and_cache_mla(kv_c.get(), k_pe.get(), cache.get(), slots.get(), &pool, &error), error);
      break;
    }
    case 3: {
      int decompressed = -1;
      const amxk_code code = amxk_prefill_decompressed(in.number(), in.number(), in.rare() ? nullptr : &decompressed, &error);
      if (code == AMXK_OK && decompressed != 0 && decompressed != 1) die("no answer", error);
      break;
    }
    case 4:
    case 5:
      prefill(in, pool, error);
      break;
    default:
      attention(in, pool, error);
  }
  return 0;
}
