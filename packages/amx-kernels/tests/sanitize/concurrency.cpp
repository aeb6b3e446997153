// SPDX-License-Identifier: Apache-2.0
// Several threads call the C API at once, on the library's own pool and on pools of their own, while another changes the
// number of threads. Results must be those of a quiet serial call. Built with a sanitizer and run once per tier:
//
//   concurrency TIER ROUNDS [emulated]
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "amx_kernels/amx_kernels.h"

namespace {

std::atomic<int> failures{0};

void fail(const char* what, const amxk_error& error) {
  fprintf(stderr, "FAILED %s: %s\n", what, error.message);
  ++failures;
}

amxk_tensor tensor(void* data, int dtype, std::vector<int64_t> sizes) {
  amxk_tensor t = {};
  t.data = data;
  t.dtype = dtype;
  t.ndim = static_cast<int32_t>(sizes.size());
  int64_t stride = 1;
  for (int d = t.ndim - 1; d >= 0; --d) {
    t.sizes[d] = sizes[static_cast<size_t>(d)];
    t.strides[d] = stride;
    stride *= t.sizes[d];
  }
  return t;
}

// bf16 numbers in [-2, 2).
std::vector<uint16_t> numbers(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint16_t> v(count);
  for (uint16_t& x : v) {
    const float f = static_cast<float>(random() % 4096) / 1024.0f - 2.0f;
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    x = static_cast<uint16_t>(bits >> 16);
  }
  return v;
}

// A caller's pool that starts its threads for every call.
void fresh_threads(void*, int n, void (*task)(void*, int), void* arg) {
  std::vector<std::thread> threads;
  for (int i = 1; i < n; ++i) threads.emplace_back(task, arg, i);
  task(arg, 0);
  for (std::thread& t : threads) t.join();
}

// A plain weight [batch, columns, depth], packed; `packed` describes the memory returned.
std::vector<uint16_t> pack(amxk_tensor plain, const amxk_parallel& pool, amxk_tensor* packed) {
  amxk_error error = {};
  int64_t n[4];
  if (amxk_packed_sizes(&plain, n, &error)) fail("packed sizes", error);
  std::vector<uint16_t> memory(static_cast<size_t>(n[0] * n[1] * n[2] * n[3]));
  *packed = tensor(memory.data(), AMXK_BF16, {n[0], n[1], n[2], n[3]});
  if (amxk_convert_weight_packed(packed, &plain, &pool, &error)) fail("pack", error);
  return memory;
}

// One attention step: 3 requests, extend; every buffer exactly as long as described.
struct Attention {
  int64_t heads, rank, rope, block = 16;
  std::vector<int64_t> lens, starts;
  std::vector<int32_t> table;
  int64_t columns = 0, tokens = 0;
  std::vector<uint16_t> q, pe, cache;

  Attention(int64_t heads, int64_t rank, int64_t rope, std::vector<int64_t> lens, std::vector<int64_t> news)
      : heads(heads), rank(rank), rope(rope), lens(lens), starts(1, 0) {
    for (const int64_t n : news) starts.push_back(starts.back() + n);
    tokens = starts.back();
    for (const int64_t n : lens) columns = std::max(columns, (n + block - 1) / block);
    int32_t next = 0;
    for (const int64_t n : lens) {
      for (int64_t b = 0; b < columns; ++b) table.push_back(b * block < n ? next++ : -1);
    }
    q = numbers(static_cast<size_t>(tokens * heads * rank), 1);
    pe = numbers(static_cast<size_t>(tokens * heads * rope), 2);
    cache = numbers(static_cast<size_t>(next * block * (rank + rope)), 3);
  }

  std::vector<uint16_t> run(const amxk_parallel& pool, bool planned) {
    std::vector<uint16_t> out(static_cast<size_t>(tokens * heads * rank), 0x7fc0);
    std::vector<float> lse(static_cast<size_t>(tokens * heads));
    const int64_t n = static_cast<int64_t>(lens.size());
    const amxk_tensor o = tensor(out.data(), AMXK_BF16, {tokens, heads, rank}), l = tensor(lse.data(), AMXK_F32, {tokens, heads});
    const amxk_tensor a = tensor(q.data(), AMXK_BF16, {tokens, heads, rank}), b = tensor(pe.data(), AMXK_BF16, {tokens, heads, rope});
    const amxk_tensor kv = tensor(cache.data(), AMXK_BF16, {static_cast<int64_t>(cache.size()) / (block * (rank + rope)), block, rank + rope});
    const amxk_tensor t = tensor(table.data(), AMXK_I32, {n, columns}), s = tensor(lens.data(), AMXK_I64, {n});
    const amxk_tensor st = tensor(starts.data(), AMXK_I64, {n + 1});
    amxk_error error = {};
    std::vector<int64_t> words;
    amxk_tensor p = {};
    if (planned) {
      int64_t size = 0;
      if (amxk_plan_attention(nullptr, &size, &s, &st, tokens, heads, pool.num_threads, &error)) fail("plan size", error);
      words.resize(static_cast<size_t>(size));
      p = tensor(words.data(), AMXK_I64, {size});
      if (amxk_plan_attention(&p, &size, &s, &st, tokens, heads, pool.num_threads, &error)) fail("plan", error);
    }
    if (amxk_attention(&o, &l, &a, &b, &kv, &t, &s, &st, 0.1, planned ? &p : nullptr, &pool, &error)) fail("attention", error);
    return out;
  }

  // The decompressed form of the step, with `nope` and `value` columns per head.
  std::vector<uint16_t> prefill(const amxk_parallel& pool, int64_t nope, int64_t value) {
    std::vector<uint16_t> out(static_cast<size_t>(tokens * heads * value), 0x7fc0);
    std::vector<uint16_t> q_nope = numbers(static_cast<size_t>(tokens * heads * nope), 6);
    std::vector<uint16_t> keys = numbers(static_cast<size_t>(heads * nope * rank), 7), values = numbers(static_cast<size_t>(heads * value * rank), 8);
    const int64_t n = static_cast<int64_t>(lens.size());
    const amxk_tensor o = tensor(out.data(), AMXK_BF16, {tokens, heads, value});
    const amxk_tensor a = tensor(q_nope.data(), AMXK_BF16, {tokens, heads, nope}), b = tensor(pe.data(), AMXK_BF16, {tokens, heads, rope});
    const amxk_tensor kv = tensor(cache.data(), AMXK_BF16, {static_cast<int64_t>(cache.size()) / (block * (rank + rope)), block, rank + rope});
    const amxk_tensor t = tensor(table.data(), AMXK_I32, {n, columns}), s = tensor(lens.data(), AMXK_I64, {n});
    const amxk_tensor st = tensor(starts.data(), AMXK_I64, {n + 1});
    amxk_error error = {};
    amxk_tensor w_uk, w_uv;
    const std::vector<uint16_t> uk = pack(tensor(keys.data(), AMXK_BF16, {heads, nope, rank}), pool, &w_uk);
    const std::vector<uint16_t> uv = pack(tensor(values.data(), AMXK_BF16, {heads, value, rank}), pool, &w_uv);
    if (amxk_prefill_attention(&o, nullptr, &a, &b, &kv, &t, &s, &st, &w_uk, &w_uv, 0.1, &pool, &error)) fail("prefill", error);
    return out;
  }
};

struct Product {
  int64_t batch = 3, rows, columns, depth;
  std::vector<uint16_t> mat1, mat2;

  Product(int64_t rows, int64_t columns, int64_t depth) : rows(rows), columns(columns), depth(depth) {
    mat1 = numbers(static_cast<size_t>(batch * rows * depth), 4);
    mat2 = numbers(static_cast<size_t>(batch * columns * depth), 5);
  }

  std::vector<uint16_t> run(const amxk_parallel& pool, bool packed) {
    std::vector<uint16_t> out(static_cast<size_t>(batch * rows * columns), 0x7fc0);
    const amxk_tensor o = tensor(out.data(), AMXK_BF16, {batch, rows, columns}), a = tensor(mat1.data(), AMXK_BF16, {batch, rows, depth});
    amxk_tensor b = tensor(mat2.data(), AMXK_BF16, {batch, columns, depth});
    amxk_error error = {};
    std::vector<uint16_t> memory;
    if (packed) memory = pack(b, pool, &b);
    if (amxk_bmm(&o, &a, &b, packed, nullptr, &pool, &error)) fail("bmm", error);
    return out;
  }
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  amxk_error error = {};
  if (amxk_set_tier(argv[1], argc > 3, &error) != AMXK_OK) {
    printf("skipped: %s\n", error.message);
    return 0;
  }
  const int rounds = atoi(argv[2]);
  Attention small(3, 64, 32, {300, 17, 0}, {5, 1, 2}), wide(16, 512, 64, {600}, {1}), odd(5, 33, 7, {40, 1, 16}, {40, 1, 3});
  Product even(17, 48, 64), uneven(3, 33, 30);
  const amxk_parallel serial = {1, nullptr, nullptr};
  Attention fresh(2, 64, 32, {70, 530, 0}, {70, 40, 0});
  using Call = std::function<std::vector<uint16_t>(const amxk_parallel&, bool)>;
  const std::vector<Call> ops = {
      [&](const amxk_parallel& pool, bool planned) { return small.run(pool, planned); },
      [&](const amxk_parallel& pool, bool planned) { return wide.run(pool, planned); },
      [&](const amxk_parallel& pool, bool planned) { return odd.run(pool, planned); },
      [&](const amxk_parallel& pool, bool packed) { return even.run(pool, packed); },
      [&](const amxk_parallel& pool, bool packed) { return uneven.run(pool, packed); },
      [&](const amxk_parallel& pool, bool) { return small.prefill(pool, 33, 17); },
      [&](const amxk_parallel& pool, bool) { return fresh.prefill(pool, 32, 48); },
  };
  std::vector<std::vector<uint16_t>> wanted;
  for (const Call& op : ops) wanted.push_back(op(serial, false));

  std::atomic<bool> stop{false};
  std::atomic<int> calls{0};
  std::thread changer([&] {
    for (int i = 0; !stop; ++i) {
      amxk_set_num_threads(i % 5 + 1, nullptr);
      std::this_thread::yield();
    }
  });
  std::vector<std::thread> callers;
  for (int id = 0; id < 6; ++id) {
    callers.emplace_back([&, id] {
      std::mt19937 random(static_cast<uint32_t>(id));
      for (int i = 0; i < rounds; ++i) {
        const amxk_parallel own = {static_cast<int32_t>(random() % 4 + 1), nullptr, fresh_threads};
        const amxk_parallel pool = random() % 3 == 0 ? own : random() % 4 == 0 ? serial : amxk_default_parallel();
        const size_t which = random() % ops.size();
        if (ops[which](pool, random() % 2) != wanted[which]) fail("other bits", error);
        ++calls;
      }
    });
  }
  for (std::thread& t : callers) t.join();
  stop = true;
  changer.join();
  printf("calls %d failures %d\n", calls.load(), failures.load());
  return failures ? 1 : 0;
}
