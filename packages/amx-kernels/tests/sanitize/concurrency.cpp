// SPDX-License-Identifier: Apache-2.0
// Several threads call the C API at once, on the library's own pool and on pools of their own, while another changes the
// number of threads. Results must be those of a quiet serial call. Built with a sanitizer and run once per tier:
//
//   concurrency TIER ROUNDS [emulated]
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>
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
    if (packed) {
      int64_t sizes[4];
      if (amxk_packed_sizes(&b, sizes, &error)) fail("packed sizes", error);
      memory.resize(static_cast<size_t>(sizes[0] * sizes[1] * sizes[2] * sizes[3]));
      const amxk_tensor p = tensor(memory.data(), AMXK_BF16, {sizes[0], sizes[1], sizes[2], sizes[3]});
      if (amxk_convert_weight_packed(&p, &b, &pool, &error)) fail("pack", error);
      b = p;
    }
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
  Attention* const attentions[] = {&small, &wide, &odd};
  Product* const products[] = {&even, &uneven};
  std::vector<std::vector<uint16_t>> wanted;
  for (Attention* a : attentions) wanted.push_back(a->run(serial, false));
  for (Product* p : products) wanted.push_back(p->run(serial, false));

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
        const size_t which = random() % 5;
        const bool flag = random() % 2;
        const std::vector<uint16_t> got = which < 3 ? attentions[which]->run(pool, flag) : products[which - 3]->run(pool, flag);
        if (got != wanted[which]) fail("other bits", error);
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
