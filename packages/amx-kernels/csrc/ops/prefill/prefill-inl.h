// SPDX-License-Identifier: Apache-2.0
// Decompressed prefill over a paged latent cache, one text for every tier:
//
//   k = (W_UK c, k_pe),  v = W_UV c          keys and values of one head, from the latent rows c
//   S^T = K Q^T,  P = 2^(scale S - m),  O = P V
//
// 320 multiply-accumulates per (query, key, head) where the absorbed form costs 1088, for 131,072 per (key, head) once
// (at R = 512, N = E = 128, P = 64). An item is (request, head, range of queries). Keys are expanded kExpand at a time
// into scratch that L2 keeps (328 KB) and that every query block of the item uses; nothing is materialised for the whole
// context. Queries are packed and O accumulated for the item's whole range, which is capped: scratch per thread is bounded
// by kMaxQueries x (2 x (N + P) + 4 x E) bytes + 1 MB.
//
// A row's result depends on its own keys only, which are visited in one order: ranges may follow the number of threads.
#pragma once

#include "base/scratch.h"
#include "ops/attention/keys-inl.h"
#include "ops/attention/softmax-inl.h"
#include "ops/prefill/params.h"
#include "tile/pack-inl.h"

namespace amxk {
namespace AMXK_TIER {
namespace {

constexpr int kExpand = 512;         // keys expanded together
constexpr int kQueryBlock = 64;      // queries that share a pass over expanded keys
constexpr int64_t kMaxQueries = 4096;
constexpr int kExpandRows = 64;      // latent rows per product while expanding: 32 KB of fp32 for 128 columns

struct PrefillShape {
  int64_t width;       // of a latent row, padded to 32
  int64_t latent;      // R, a multiple of 32
  int64_t key_width;   // N + P, padded to 32
  int64_t nope_panels, value_panels;

  explicit PrefillShape(const PrefillParams& p)
      : width(round_up(p.cache.latent + p.cache.rope, kStepK)),
        latent(p.cache.latent),
        key_width(round_up(p.nope + p.cache.rope, kStepK)),
        nope_panels(ceil_div(p.nope, kGroup)),
        value_panels(ceil_div(p.value, kGroup)) {}

  int64_t q_panel() const { return key_width * kGroup; }
  int64_t o_block() const { return value_panels * kQueryBlock * kGroup; }
};

struct PrefillWorker {
  bf16* gather;    // [kExpand][width]
  float* product;  // [max panels][kExpandRows][16]
  bf16* keys;      // [kExpand][key_width]
  bf16* values;    // [kExpand/32][value_panels][16][16][2]
  bf16* q;         // [queries/16] panels
  float* scores;   // [kQueryBlock/16][kKeys][16]
  bf16* p;         // [kQueryBlock][kKeys]
  float* o;        // [queries/64][value_panels][64][16]
  float* m;        // [queries]
  float* l;        // [queries]
  void* gemm;

  size_t place(char* base, const PrefillShape& s, int64_t queries) {
    size_t at = 0;
    const auto take = [&](int64_t bytes) {
      // In integers: base is null when only the size is asked for.
      char* p = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(base) + at);
      at += static_cast<size_t>(round_up(bytes, 64)) + 64;
      return p;
    };
    const int64_t padded = round_up(queries, kQueryBlock);
    gather = reinterpret_cast<bf16*>(take(2 * kExpand * max(s.width, s.key_width)));
    product = reinterpret_cast<float*>(take(4 * max(s.nope_panels, s.value_panels) * kExpandRows * kGroup));
    keys = reinterpret_cast<bf16*>(take(2 * kExpand * s.key_width));
    values = reinterpret_cast<bf16*>(take(2 * kExpand * s.value_panels * kGroup));
    q = reinterpret_cast<bf16*>(take(2 * padded * s.key_width));
    scores = reinterpret_cast<float*>(take(4 * kQueryBlock * kKeys));
    p = reinterpret_cast<bf16*>(take(2 * kQueryBlock * kKeys));
    o = reinterpret_cast<float*>(take(4 * padded * s.value_panels * kGroup));
    m = reinterpret_cast<float*>(take(4 * padded));
    l = reinterpret_cast<float*>(take(4 * padded));
    gemm = take(static_cast<int64_t>(
        gemm_scratch_bytes(max<int64_t>(max(s.latent, s.key_width), static_cast<int64_t>(kKeys)) / kStepK)));
    return at;
  }
};

// One head of the keys [first, first + n): rows of K, and V in panels of row pairs. Rows up to the next multiple of 32
// are zero.
void expand(const PrefillParams& p, const PrefillShape& s, int64_t request, int64_t head, int64_t first, int n,
            PrefillWorker& w) {
  RowGroup groups[kExpand / kGroup + 1];
  locate_keys(p.cache, request, first, n, s.width, w.gather, groups);
  const int num_groups = static_cast<int>(ceil_div(n, kGroup));
  const int padded = static_cast<int>(round_up(n, kStepK));
  const int steps = static_cast<int>(s.latent / kStepK);
  const int64_t weight_panel = s.latent * kGroup, product_panel = kExpandRows * kGroup;
  const bf16* w_uk = p.w_uk + head * s.nope_panels * weight_panel;
  const bf16* w_uv = p.w_uv + head * s.value_panels * weight_panel;
  for (int g = 0; g < num_groups; g += kExpandRows / kGroup) {
    const int chunk = min(num_groups - g, kExpandRows / kGroup);
    gemm<false>(groups + g, chunk, steps, w_uk, weight_panel, kStepK * kGroup, static_cast<int>(s.nope_panels),
                w.product, product_panel, w.gemm);
    for (int r = 0; r < chunk * kGroup; ++r) {
      bf16* key = w.keys + (g * kGroup + r) * s.key_width;
      for (int64_t i = 0; i < s.nope_panels; ++i) {
        const V x = vload(w.product + i * product_panel + r * kGroup);
        if ((i + 1) * kGroup <= p.nope) {
          store16(key + i * kGroup, x);
        } else {
          bf16 tail[kGroup];
          store16(tail, x);
          copy_elements(key + i * kGroup, tail, p.nope - i * kGroup);
        }
      }
      const RowGroup& from = groups[g + r / kGroup];
      copy_elements(key + p.nope, from.row + r % kGroup * from.stride + p.cache.latent, p.cache.rope);
      for (int64_t i = p.nope + p.cache.rope; i < s.key_width; ++i) key[i] = 0;
    }
    gemm<false>(groups + g, chunk, steps, w_uv, weight_panel, kStepK * kGroup, static_cast<int>(s.value_panels),
                w.product, product_panel, w.gemm);
    for (int r = 0; r < chunk * kGroup; r += 2) {
      const int key = g * kGroup + r;
      bf16* line = w.values + key / kStepK * (s.value_panels * kStepK * kGroup) + key % kStepK * kGroup;
      for (int64_t i = 0; i < s.value_panels; ++i, line += kStepK * kGroup) {
        const float* row = w.product + i * product_panel + r * kGroup;
        store_pairs(reinterpret_cast<uint32_t*>(line), vload(row), vload(row + kGroup));
      }
    }
  }
  for (int key = num_groups * kGroup; key < padded; key += 2) {
    bf16* line = w.values + key / kStepK * (s.value_panels * kStepK * kGroup) + key % kStepK * kGroup;
    for (int64_t i = 0; i < s.value_panels; ++i, line += kStepK * kGroup) memset(line, 0, 2 * kGroup * sizeof(bf16));
  }
}

// Queries [first, first + n) of one head, packed in panels of 16.
void pack_head(const PrefillParams& p, const PrefillShape& s, int64_t token, int64_t head, int64_t n, bf16* staging,
               bf16* q) {
  for (int64_t first = 0; first < round_up(n, kQueryBlock); first += kGroup) {
    memset(staging, 0, static_cast<size_t>(kGroup * s.key_width) * sizeof(bf16));
    for (int64_t i = first; i < min<int64_t>(first + kGroup, n); ++i) {
      bf16* row = staging + (i - first) * s.key_width;
      copy_elements(row, p.q_nope + (token + i) * p.q_nope_token + head * p.q_nope_head, p.nope);
      copy_elements(row + p.nope, p.q_pe + (token + i) * p.q_pe_token + head * p.q_pe_head, p.cache.rope);
    }
    pack_panel(staging, s.key_width, s.key_width / kStepK, q + first / kGroup * s.q_panel());
  }
}

// A block of kQueryBlock queries against the expanded keys [first, first + n). limit: keys visible to the block's first
// query, counted from key 0; each further query sees one more. live: queries of the block that exist.
void attend_block(const PrefillParams& p, const PrefillShape& s, int64_t block, int64_t limit, int live, int64_t first,
                  int n, PrefillWorker& w) {
  const int panels = static_cast<int>(ceil_div(live, kGroup));
  float* o = w.o + block * s.o_block();
  const int64_t row0 = block * kQueryBlock;
  for (int k = 0; k < n; k += kKeys) {
    const int keys = static_cast<int>(min<int64_t>(min(kKeys, n - k), limit + live - 1 - first - k));
    if (keys <= 0) break;
    const int groups = static_cast<int>(ceil_div(keys, kGroup)), padded = static_cast<int>(round_up(keys, kStepK));
    RowGroup rows[kKeys / kGroup], probabilities[kQueryBlock / kGroup];
    for (int g = 0; g < groups; ++g) rows[g] = {w.keys + (k + g * kGroup) * s.key_width, s.key_width};
    gemm<false>(rows, groups, static_cast<int>(s.key_width / kStepK), w.q + row0 / kGroup * s.q_panel(), s.q_panel(),
                kStepK * kGroup, panels, w.scores, kKeys * kGroup, w.gemm);
    for (int g = 0; g < panels; ++g) {
      alignas(64) int32_t visible[kGroup];
      for (int i = 0; i < kGroup; ++i) {
        visible[i] = static_cast<int32_t>(
            max<int64_t>(0, min<int64_t>(keys, limit + g * kGroup + i - first - k)));
      }
      alignas(64) float alpha[kGroup];
      const int64_t row = row0 + g * kGroup;
      const bool masked = visible[0] < padded;
      const bool grows = softmax_panel(w.scores + g * kKeys * kGroup, padded, visible, masked, p.scale_log2, w.m + row,
                                       w.l + row, alpha, w.p + g * kGroup * kKeys, false);
      if (grows && first + k > 0) scale_rows(o + g * kGroup * kGroup, s.value_panels, kQueryBlock * kGroup, alpha);
      probabilities[g] = {w.p + g * kGroup * kKeys, kKeys};
    }
    const bf16* v = w.values + k / kStepK * (s.value_panels * kStepK * kGroup);
    const auto product = first + k == 0 ? gemm<false> : gemm<true>;
    product(probabilities, panels, padded / kStepK, v, kStepK * kGroup, s.value_panels * kStepK * kGroup,
            static_cast<int>(s.value_panels), o, kQueryBlock * kGroup, w.gemm);
  }
}

void finish_block(const PrefillParams& p, const PrefillShape& s, int64_t block, int64_t token, int64_t head, int live,
                  const PrefillWorker& w) {
  const float* o = w.o + block * s.o_block();
  for (int i = 0; i < live; ++i) {
    const int64_t t = token + i;
    const float l = w.l[block * kQueryBlock + i];
    bf16* out = p.out + t * p.out_token + head * p.out_head;
    const V inverse = vset(1.0f / l);
    for (int64_t n = 0; n < s.value_panels; ++n) {
      const V x = l == 0.0f ? vset(0.0f) : vmul(vload(o + n * kQueryBlock * kGroup + i * kGroup), inverse);
      if ((n + 1) * kGroup <= p.value) {
        store16(out + n * kGroup, x);
      } else {
        bf16 tail[kGroup];
        store16(tail, x);
        copy_elements(out + n * kGroup, tail, p.value - n * kGroup);
      }
    }
    if (p.lse != nullptr) {
      p.lse[t * p.lse_token + head * p.lse_head] =
          l == 0.0f ? -INFINITY : w.m[block * kQueryBlock + i] * kLn2 + logf(l);
    }
  }
}

struct PrefillCall {
  const PrefillParams& p;
  PrefillShape shape;
  int64_t range;      // queries of an item, a multiple of kQueryBlock
  int64_t num_items;  // over all requests
  int64_t next;       // items are taken in order; later queries of a request cost more and come first
  int failed;
};

void prefill_thread(void* argument, int) {
  PrefillCall& call = *static_cast<PrefillCall*>(argument);
  const PrefillParams& p = call.p;
  const PrefillShape& s = call.shape;
  PrefillWorker w;
  char* memory = static_cast<char*>(scratch(Scratch::kWorker, w.place(nullptr, s, call.range)));
  if (memory == nullptr) {
    __atomic_store_n(&call.failed, 1, __ATOMIC_RELAXED);
    return;
  }
  w.place(memory, s, call.range);
  const TileScope tiles;
  for (;;) {
    int64_t item = __atomic_fetch_add(&call.next, 1, __ATOMIC_RELAXED);
    if (item >= call.num_items) return;
    int64_t request = 0, ranges = 0;
    for (;; ++request) {
      ranges = ceil_div(p.requests[request].tokens, call.range);
      if (item < ranges * p.heads) break;
      item -= ranges * p.heads;
    }
    const Request& r = p.requests[request];
    const int64_t head = item % p.heads, q0 = (ranges - 1 - item / p.heads) * call.range;
    const int64_t n = min(call.range, r.tokens - q0), token = r.first_token + q0;
    const int64_t context = r.keys - r.tokens + q0 + 1;  // keys visible to the first query
    const int64_t visible = max<int64_t>(0, context + n - 1);
    pack_head(p, s, token, head, n, w.gather, w.q);
    for (int64_t i = 0; i < round_up(n, kQueryBlock); ++i) {
      w.m[i] = -INFINITY;
      w.l[i] = 0.0f;
    }
    for (int64_t first = 0; first < visible; first += kExpand) {
      const int keys = static_cast<int>(min<int64_t>(kExpand, visible - first));
      expand(p, s, request, head, first, keys, w);
      for (int64_t block = 0; block * kQueryBlock < n; ++block) {
        const int64_t limit = context + block * kQueryBlock;
        const int live = static_cast<int>(min<int64_t>(kQueryBlock, n - block * kQueryBlock));
        if (limit + live - 1 > first) attend_block(p, s, block, limit, live, first, keys, w);
      }
    }
    for (int64_t block = 0; block * kQueryBlock < n; ++block) {
      const int live = static_cast<int>(min<int64_t>(kQueryBlock, n - block * kQueryBlock));
      finish_block(p, s, block, token + block * kQueryBlock, head, live, w);
    }
  }
}

amxk_code prefill(const PrefillParams& p) {
  // Ranges as long as possible, since each expands its keys anew, but enough items for every thread to have several.
  int64_t longest = 0, tokens = 0;
  for (int64_t i = 0; i < p.num_requests; ++i) {
    longest = max(longest, p.requests[i].tokens);
    tokens += p.requests[i].tokens;
  }
  if (tokens == 0) return AMXK_OK;
  const int64_t wanted = ceil_div(4 * static_cast<int64_t>(p.parallel.num_threads), p.heads);  // ranges of all requests
  const int64_t share = round_up(ceil_div(tokens, wanted), kQueryBlock);
  PrefillCall call = {p, PrefillShape(p), min(kMaxQueries, min(round_up(longest, kQueryBlock), max<int64_t>(share, 256))),
                      0, 0, 0};
  for (int64_t i = 0; i < p.num_requests; ++i) call.num_items += ceil_div(p.requests[i].tokens, call.range) * p.heads;
  parallel_run(p.parallel, p.parallel.num_threads, prefill_thread, &call);
  return call.failed ? AMXK_INTERNAL : AMXK_OK;
}

}  // namespace
}  // namespace AMXK_TIER
}  // namespace amxk
