// SPDX-License-Identifier: Apache-2.0
// Decompressed prefill over a paged latent cache, one text for every tier:
//
//   k = (W_UK c, k_pe),  v = W_UV c          keys and values of one head, from the latent rows c
//   S = Q K^T,  P = 2^(scale S - m),  O = P V
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
#include "tile/weight-inl.h"

namespace amxk {
namespace AMXK_TIER {
namespace {

constexpr int kExpand = 512;         // keys expanded together
constexpr int kQueryBlock = 32;      // queries that share a pass over expanded keys: their scores, 32 KB, stay in L1
constexpr int64_t kMaxQueries = 4096;
// One row more than is used: else the panels of a row would lie 2 KB apart, all in two sets of L1.
constexpr int kScoreRows = kQueryBlock + 1;
constexpr int kExpandRows = 64;      // latent rows per product while expanding: 32 KB of fp32 for 128 columns
constexpr int64_t kProductPanel = kExpandRows * kGroup;

struct PrefillShape {
  int64_t width;       // of a latent row, padded to 32
  int64_t latent;      // R, a multiple of 32
  int64_t nope_width, key_width;  // of a key and of its first part: N and P, each padded to 32
  int64_t nope_panels, value_panels;

  explicit PrefillShape(const PrefillParams& p)
      : width(round_up(p.cache.latent + p.cache.rope, kStepK)),
        latent(p.cache.latent),
        nope_width(round_up(p.nope, kStepK)),
        key_width(nope_width + round_up(p.cache.rope, kStepK)),
        nope_panels(ceil_div(p.nope, kGroup)),
        value_panels(ceil_div(p.value, kGroup)) {}

  int64_t key_panel() const { return key_width * kGroup; }
  int64_t o_block() const { return value_panels * kQueryBlock * kGroup; }
};

struct PrefillWorker {
  bf16* gather;    // [kExpand][width]
  float* product;  // [max panels][kExpandRows][16]
  bf16* keys;      // [kExpand/16] packed panels of 16 keys
  bf16* values;    // [kExpand/32][value_panels][16][16][2]
  bf16* q;         // [queries][key_width]
  float* scores;   // [kKeys/16][kScoreRows][16]
  bf16* p;         // [kQueryBlock][kKeys]
  float* o;        // [queries/kQueryBlock][value_panels][kQueryBlock][16]
  float* m;        // [queries]
  float* l;        // [queries]

  size_t place(char* base, const PrefillShape& s, int64_t queries) {
    size_t at = 0;
    const auto take = [&](int64_t bytes) {
      // In integers: base is null when only the size is asked for.
      char* p = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(base) + at);
      at += static_cast<size_t>(round_up(bytes, 64)) + 64;
      return p;
    };
    const int64_t padded = round_up(queries, kQueryBlock);
    gather = reinterpret_cast<bf16*>(take(2 * kExpand * s.width));
    product = reinterpret_cast<float*>(take(4 * max(s.nope_panels, s.value_panels) * kExpandRows * kGroup));
    keys = reinterpret_cast<bf16*>(take(2 * kExpand * s.key_width));
    values = reinterpret_cast<bf16*>(take(2 * kExpand * s.value_panels * kGroup));
    q = reinterpret_cast<bf16*>(take(2 * padded * s.key_width));
    scores = reinterpret_cast<float*>(take(4 * kScoreRows * kKeys));
    p = reinterpret_cast<bf16*>(take(2 * kQueryBlock * kKeys));
    o = reinterpret_cast<float*>(take(4 * padded * s.value_panels * kGroup));
    m = reinterpret_cast<float*>(take(4 * padded));
    l = reinterpret_cast<float*>(take(4 * padded));
    return at;
  }
};

// Sixteen keys as a B panel: the nope part from the product's fp32 panels, whose padding columns are zero because the
// packed weight's are, and the rope part from the cache.
void pack_keys(const PrefillParams& p, const PrefillShape& s, const RowGroup& group, const float* product, bf16* panel) {
  alignas(64) bf16 rows[kGroup * kStepK];
  const auto pack_step = [&] {
    transpose16(reinterpret_cast<const uint32_t*>(rows), kGroup, reinterpret_cast<uint32_t*>(panel), kGroup);
    panel += kStepK * kGroup;
  };
  for (int64_t n = 0; n < s.nope_panels; n += 2) {
    for (int r = 0; r < kGroup; ++r) {
      const float* row = product + n * kProductPanel + r * kGroup;
      store_row32(rows + r * kStepK, vload(row), n + 1 < s.nope_panels ? vload(row + kProductPanel) : vset(0.0f));
    }
    pack_step();
  }
  for (int64_t c = 0; c < p.cache.rope; c += kStepK) {
    for (int r = 0; r < kGroup; ++r) {
      const bf16* from = group.row + r * group.stride + p.cache.latent + c;
      const int64_t columns = p.cache.rope - c;
      if (columns >= kStepK) {
        memcpy(rows + r * kStepK, from, kStepK * sizeof(bf16));
      } else {
        memset(rows + r * kStepK, 0, kStepK * sizeof(bf16));
        memcpy(rows + r * kStepK, from, static_cast<size_t>(columns) * sizeof(bf16));
      }
    }
    pack_step();
  }
}

// Latent rows times a packed weight, in panels of fp32.
AMXK_INLINE void project(const RowGroup* latent, int rows, int steps, const bf16* weight, int64_t panels, float* product) {
  for (int64_t n = 0; n < panels; n += kWeightPanels) {
    const int block = static_cast<int>(min<int64_t>(kWeightPanels, panels - n));
    gemm<false>(latent, rows, steps, packed_block(weight, n, panels, steps * kStepK), block, product + n * kProductPanel,
                kProductPanel);
  }
}

// One head of the keys [first, first + n): K in panels of 16 keys, V in panels of row pairs. V's rows up to the next
// multiple of 32 are zero.
void expand(const PrefillParams& p, const PrefillShape& s, int64_t request, int64_t head, int64_t first, int n,
            PrefillWorker& w) {
  RowGroup groups[kExpand / kGroup + 1];
  locate_keys(p.cache, request, first, n, s.width, w.gather, groups);
  const int num_groups = static_cast<int>(ceil_div(n, kGroup));
  const int padded = static_cast<int>(round_up(n, kStepK));
  const int steps = static_cast<int>(s.latent / kStepK);
  const bf16* w_uk = p.w_uk + head * packed_size(s.nope_panels, s.latent);
  const bf16* w_uv = p.w_uv + head * packed_size(s.value_panels, s.latent);
  for (int g = 0; g < num_groups; g += kExpandRows / kGroup) {
    const int chunk = min(num_groups - g, kExpandRows / kGroup);
    project(groups + g, chunk * kGroup, steps, w_uk, s.nope_panels, w.product);
    for (int i = 0; i < chunk; ++i) {
      pack_keys(p, s, groups[g + i], w.product + i * kGroup * kGroup, w.keys + (g + i) * s.key_panel());
    }
    project(groups + g, chunk * kGroup, steps, w_uv, s.value_panels, w.product);
    for (int r = 0; r < chunk * kGroup; r += 2) {
      const int key = g * kGroup + r;
      bf16* line = w.values + key / kStepK * (s.value_panels * kStepK * kGroup) + key % kStepK * kGroup;
      for (int64_t i = 0; i < s.value_panels; ++i, line += kStepK * kGroup) {
        const float* row = w.product + i * kProductPanel + r * kGroup;
        store_pairs(reinterpret_cast<uint32_t*>(line), vload(row), vload(row + kGroup));
      }
    }
  }
  for (int key = num_groups * kGroup; key < padded; key += 2) {
    bf16* line = w.values + key / kStepK * (s.value_panels * kStepK * kGroup) + key % kStepK * kGroup;
    for (int64_t i = 0; i < s.value_panels; ++i, line += kStepK * kGroup) memset(line, 0, 2 * kGroup * sizeof(bf16));
  }
}

// n queries of one head from `token` on, row after row; rows up to the next whole block are zero.
void copy_queries(const PrefillParams& p, const PrefillShape& s, int64_t token, int64_t head, int64_t n, bf16* q) {
  memset(q, 0, static_cast<size_t>(round_up(n, kQueryBlock) * s.key_width) * sizeof(bf16));
  for (int64_t i = 0; i < n; ++i, q += s.key_width) {
    copy_elements(q, p.q_nope + (token + i) * p.q_nope_token + head * p.q_nope_head, p.nope);
    copy_elements(q + s.nope_width, p.q_pe + (token + i) * p.q_pe_token + head * p.q_pe_head, p.cache.rope);
  }
}

// A block of kQueryBlock queries against the expanded keys [first, first + n). limit: keys visible to the block's first
// query, counted from key 0; each further query sees one more. live: queries of the block that exist.
void attend_block(const PrefillParams& p, const PrefillShape& s, int64_t block, int64_t limit, int live, int64_t first,
                  int n, PrefillWorker& w) {
  const int groups = static_cast<int>(ceil_div(live, kGroup));
  float* o = w.o + block * s.o_block();
  const int64_t row0 = block * kQueryBlock;
  for (int k = 0; k < n; k += kKeys) {
    const int keys = static_cast<int>(min<int64_t>(min(kKeys, n - k), limit + live - 1 - first - k));
    if (keys <= 0) break;
    const int panels = static_cast<int>(ceil_div(keys, kGroup)), padded = static_cast<int>(round_up(keys, kStepK));
    RowGroup rows[kQueryBlock / kGroup], probabilities[kQueryBlock / kGroup];
    for (int g = 0; g < groups; ++g) rows[g] = {w.q + (row0 + g * kGroup) * s.key_width, s.key_width};
    gemm<false>(rows, groups * kGroup, static_cast<int>(s.key_width / kStepK),
                {w.keys + k / kGroup * s.key_panel(), s.key_panel(), kStepK * kGroup}, panels, w.scores,
                kScoreRows * kGroup);
    for (int g = 0; g < groups; ++g) {
      alignas(64) int32_t visible[kGroup];
      for (int i = 0; i < kGroup; ++i) {
        visible[i] = static_cast<int32_t>(
            max<int64_t>(0, min<int64_t>(keys, limit + g * kGroup + i - first - k)));
      }
      alignas(64) float alpha[kGroup];
      const int64_t row = row0 + g * kGroup;
      const bool masked = visible[0] < padded;
      const bool grows = softmax_rows(w.scores + g * kGroup * kGroup, kScoreRows * kGroup, padded, visible, masked,
                                      p.scale_log2, w.m + row, w.l + row, alpha, w.p + g * kGroup * kKeys);
      if (grows && first + k > 0) {
        scale_rows(o + g * kGroup * kGroup, kGroup, s.value_panels, kQueryBlock * kGroup, alpha);
      }
      probabilities[g] = {w.p + g * kGroup * kKeys, kKeys};
    }
    const bf16* v = w.values + k / kStepK * (s.value_panels * kStepK * kGroup);
    const auto product = first + k == 0 ? gemm<false> : gemm<true>;
    product(probabilities, groups * kGroup, padded / kStepK, {v, kStepK * kGroup, s.value_panels * kStepK * kGroup},
            static_cast<int>(s.value_panels), o, kQueryBlock * kGroup, nullptr, Keep{});
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
    copy_queries(p, s, token, head, n, w.q);
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
  const int64_t items = p.parallel.num_threads > 1 ? 4 * static_cast<int64_t>(p.parallel.num_threads) : 1;
  const int64_t wanted = ceil_div(items, p.heads);  // ranges of all requests
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
