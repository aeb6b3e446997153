// SPDX-License-Identifier: Apache-2.0
// Latent attention over a paged cache, one text for every tier.
//
//   S^T = K Q^T        keys x rows; K is read as it lies in the cache, Q is packed once per unit
//   P = 2^(c S - m)    rows sit in lanes, so maximum and sum run vertically; m is the running reference maximum
//   O = P V            V is the first R columns of K; row pairs are interleaved in registers, or once per key block
//
// Rows are (token, head) pairs: all heads and all query tokens of a unit share one pass over the keys, so the cache is
// read from memory once. Keys go in blocks of kKeys: K (295 KB at 576 columns), S, P and O stay in L2. Where V is not read
// in place (AVX2, portable; more than a tile of rows with AMX), kValuePanels panels at a time go interleaved into 32 KB that
// L1 keeps while all rows use it. The next block's rows are fetched during P V: row by row within its products, or, with
// tiles, the same columns between them.
//
// Invariants: keys at or past a row's limit are masked by selection, never by multiplication; groups with dead rows are
// copied and their dead rows zeroed, so nothing outside live rows is ever an operand; m grows only when it must (by more
// than 2^8), which leaves O alone in most blocks and costs no precision, because P's rounding is relative.
#pragma once

#include "base/scratch.h"
#include "ops/attention/keys-inl.h"
#include "ops/attention/params.h"
#include "ops/attention/softmax-inl.h"
#include "tile/pack-inl.h"

namespace amxk {
namespace AMXK_TIER {
namespace {

constexpr int kValuePanels = 4;     // panels of V interleaved together
constexpr int kFetchedQueries = 8;  // groups of a unit's queries that are fetched with its first keys

// The running softmax of a unit: O [columns/16][rows][16], m and l [rows].
struct State {
  float* o;
  float* m;
  float* l;
};

// Sizes of one unit; rows and columns are padded to whole tiles.
struct Shape {
  int64_t rows, row_groups;   // of queries, padded to 16
  int64_t width, width_steps;  // of a latent row, padded to 32
  int64_t panels;             // of 16 latent columns, padded to two

  Shape(const AttentionParams& p, int64_t max_rows)
      : rows(round_up(max_rows, kGroup)),
        row_groups(rows / kGroup),
        width(round_up(p.cache.latent + p.cache.rope, kStepK)),
        width_steps(width / kStepK),
        panels(round_up(p.cache.latent, 32) / kGroup) {}

  int64_t q_panel() const { return width * kGroup; }
  int64_t s_panel() const { return kKeys * kGroup; }
  int64_t o_panel() const { return rows * kGroup; }
  int64_t state_floats() const { return panels * o_panel() + 2 * rows; }
};

State state_at(float* memory, const Shape& s) {
  return {memory, memory + s.panels * s.o_panel(), memory + s.panels * s.o_panel() + s.rows};
}

// Keys [first, first + keys) of a request: what a block holds, or with no keys nothing.
struct Range {
  int64_t request, first, keys;
};

// The first block of the keys [first, end).
AMXK_INLINE Range first_block(const Unit& u, int64_t first, int64_t end) {
  return {u.request, first, min<int64_t>(kKeys, end - first)};
}

struct Block {
  RowGroup groups[kKeys / kGroup + kFetchedQueries];  // of keys, then of the queries that are packed before
  int keys, num_groups;
  int fetched;  // rows of all groups, to be fetched
};

// One thread's scratch, and the block that it reads next, located ahead so that its rows can be fetched.
struct Worker {
  bf16* q;       // packed queries [row_groups][width/2][16][2]
  float* s;      // scores [row_groups][kKeys][16]
  bf16* p;       // probabilities [rows][kKeys], or spread over tiles [kKeys/16][2][16][32] for one group of rows
  bf16* v;       // interleaved values [kKeys/32][kValuePanels][16][16][2]
  bf16* gather[2];  // copies of groups that cannot be read in place [kKeys][width], of this block and the next
  bf16* staging;    // queries before they are packed [16][width]
  int64_t* limit;   // keys visible to a row [rows]
  State total, part;
  Block blocks[2];
  int current;  // which of the blocks is read now

  static size_t bytes(const Shape& s) {
    Worker w;
    return w.place(nullptr, s);
  }

  size_t place(char* base, const Shape& s) {
    size_t at = 0;
    const auto take = [&](size_t bytes) {
      // In integers: base is null when only the size is asked for.
      char* p = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(base) + at);
      at += static_cast<size_t>(round_up(static_cast<int64_t>(bytes), 64)) + 64;
      return p;
    };
    q = reinterpret_cast<bf16*>(take(sizeof(bf16) * s.row_groups * s.q_panel()));
    this->s = reinterpret_cast<float*>(take(sizeof(float) * s.row_groups * s.s_panel()));
    p = reinterpret_cast<bf16*>(take(sizeof(bf16) * max<int64_t>(s.rows * kKeys, kKeys * 4 * kGroup)));
    v = reinterpret_cast<bf16*>(take(sizeof(bf16) * kKeys * kValuePanels * kGroup));
    for (bf16*& copy : gather) copy = reinterpret_cast<bf16*>(take(sizeof(bf16) * kKeys * s.width));
    staging = reinterpret_cast<bf16*>(take(sizeof(bf16) * kGroup * s.width));
    limit = reinterpret_cast<int64_t*>(take(sizeof(int64_t) * s.rows));
    total = state_at(reinterpret_cast<float*>(take(sizeof(float) * s.state_floats())), s);
    part = state_at(reinterpret_cast<float*>(take(sizeof(float) * s.state_floats())), s);
    return at;
  }
};

// Groups of a unit's rows that are packed as panels of sixteen columns; where eight or fewer rows are left over, they are
// packed as half a panel, if the tier knows how to multiply with that.
AMXK_INLINE int whole_groups(int64_t rows) {
#ifdef AMXK_HALF_PANEL
  return static_cast<int>((rows + kHalf - 1) / kGroup);
#else
  return static_cast<int>(ceil_div(rows, kGroup));
#endif
}

// Queries of a unit, latent part and rope part side by side; rows past the last are zero. A group whose rows lie at one
// stride is packed from where it lies, others from a copy.
void pack_queries(const AttentionParams& p, const Shape& s, const Unit& u, bf16* staging, bf16* q) {
  const int64_t token = p.plan.requests[u.request].first_token + u.first_token;
  const int64_t rows = u.tokens * p.heads;
  const bool whole_steps = p.cache.latent % kStepK == 0 && p.cache.rope % kStepK == 0;
  const bool even = p.q_latent_head % 2 == 0 && p.q_pe_head % 2 == 0;
  for (int64_t first = 0; first < rows; first += kGroup) {
    bf16* panel = q + first / kGroup * s.q_panel();
    const int64_t h0 = first % p.heads;
    if (whole_steps && even && h0 + kGroup <= p.heads) {
      const int64_t t = token + first / p.heads;
      pack_panel(p.q_latent + t * p.q_latent_token + h0 * p.q_latent_head, p.q_latent_head, p.cache.latent / kStepK, panel);
      pack_panel(p.q_pe + t * p.q_pe_token + h0 * p.q_pe_head, p.q_pe_head, p.cache.rope / kStepK,
                 panel + p.cache.latent * kGroup);
      continue;
    }
    memset(staging, 0, static_cast<size_t>(kGroup * s.width) * sizeof(bf16));
    for (int64_t r = first; r < min<int64_t>(first + kGroup, rows); ++r) {
      const int64_t t = token + r / p.heads, h = r % p.heads;
      bf16* row = staging + (r - first) * s.width;
      copy_elements(row, p.q_latent + t * p.q_latent_token + h * p.q_latent_head, p.cache.latent);
      copy_elements(row + p.cache.latent, p.q_pe + t * p.q_pe_token + h * p.q_pe_head, p.cache.rope);
    }
#ifdef AMXK_HALF_PANEL
    if (first / kGroup >= whole_groups(rows)) {
      pack_half_panel(staging, s.width, s.width_steps, panel);
      continue;
    }
#endif
    pack_panel(staging, s.width, s.width_steps, panel);
  }
}

// Latent columns [32 * first, 32 * (first + pairs)) of `padded` keys (a multiple of 32), interleaved: two panels for each
// 32 columns. Rows past the last group are zero. next: the groups of the next block, whose rows are fetched meanwhile.
void interleave_values(const AttentionParams& p, const RowGroup* groups, int num_groups, int padded, int64_t first,
                       int64_t pairs, const RowGroup* next, int num_next, bf16* v) {
  for (int key = 0; key < padded; key += 2) {
    const int g = key / kGroup;
    bf16* line = v + key / kStepK * (kValuePanels * kStepK * kGroup) + key % kStepK * kGroup;
    if (g < num_next) {
      const bf16* row = next[g].row + key % kGroup * next[g].stride + 32 * first;
      for (int64_t c = 0; c < pairs; ++c) {
        prefetch(row + 32 * c);
        prefetch(row + next[g].stride + 32 * c);
      }
    }
    if (g >= num_groups) {
      for (int64_t c = 0; c < 2 * pairs; ++c) memset(line + c * kStepK * kGroup, 0, 2 * kGroup * sizeof(bf16));
      continue;
    }
    const bf16* row0 = groups[g].row + key % kGroup * groups[g].stride + 32 * first;
    const bf16* row1 = row0 + groups[g].stride;
    for (int64_t c = 0; c < pairs; ++c, line += 2 * kStepK * kGroup) {
      const int64_t columns = p.cache.latent - 32 * (first + c);
      if (columns >= 32) {
        interleave32(row0 + 32 * c, row1 + 32 * c, line, line + kStepK * kGroup);
      } else {
        bf16 tail[2][32] = {};
        memcpy(tail[0], row0 + 32 * c, static_cast<size_t>(columns) * sizeof(bf16));
        memcpy(tail[1], row1 + 32 * c, static_cast<size_t>(columns) * sizeof(bf16));
        interleave32(tail[0], tail[1], line, line + kStepK * kGroup);
      }
    }
  }
}

void locate(const AttentionParams& p, const Shape& s, const Range& range, int which, Worker& w) {
  Block& block = w.blocks[which];
  block.keys = static_cast<int>(range.keys);
  block.num_groups = static_cast<int>(ceil_div(block.keys, kGroup));
  locate_keys(p.cache, range.request, range.first, block.keys, s.width, w.gather[which], block.groups);
  block.fetched = block.keys;
}

// The first queries of a unit, whose first keys the block holds.
void locate_queries(const AttentionParams& p, const Unit& u, Block& block) {
  const int64_t token = p.plan.requests[u.request].first_token + u.first_token;
  const int groups = static_cast<int>(min<int64_t>(p.heads / kGroup, kFetchedQueries));
  for (int g = 0; g < groups; ++g) {
    const int64_t head = static_cast<int64_t>(g) * kGroup;
    block.groups[block.num_groups + g] = {p.q_latent + token * p.q_latent_token + head * p.q_latent_head,
                                          p.q_latent_head};
  }
  if (groups > 0) block.fetched = (block.num_groups + groups) * kGroup;
}

// The softmax state of a unit's rows over the keys [begin, end), whose first block has been located. after: what will be
// read then; it is located on return. following: whose keys these are if they are not the same unit's.
void attend(const AttentionParams& p, const Shape& s, const Unit& u, int64_t begin, int64_t end, const Range& after,
            const Unit* following, Worker& w, const State& state) {
  const int64_t rows = u.tokens * p.heads;
  const int groups_q = static_cast<int>(ceil_div(rows, kGroup));
  for (int64_t r = 0; r < groups_q * kGroup; ++r) {
    state.m[r] = -INFINITY;
    state.l[r] = 0.0f;
  }
  if (begin >= end) locate(p, s, after, w.current, w);
  const int steps_q = static_cast<int>(s.width_steps);
#ifdef AMXK_VALUES_IN_PLACE
  const bool in_place = groups_q <= kInPlaceGroups;
#else
  const bool in_place = false;
#endif
  for (int64_t first = begin; first < end; first += kKeys, w.current ^= 1) {
    const Block& block = w.blocks[w.current];
    const Block& next = w.blocks[w.current ^ 1];
    const int padded = static_cast<int>(round_up(block.keys, kStepK));
    const int64_t left = end - first - kKeys;
    locate(p, s, left > 0 ? first_block(u, first + kKeys, end) : after, w.current ^ 1, w);
    if (left <= 0 && following != nullptr) locate_queries(p, *following, w.blocks[w.current ^ 1]);
    // Between products, fetching every block costs more than it gains where the cache lies in DRAM.
    const int fetched = kFetchInProduct || left > 0 ? next.fetched : 0;
    const int whole = whole_groups(rows);
    if (whole > 0) {
      gemm<false>(block.groups, block.num_groups * kGroup, steps_q, {w.q, s.q_panel(), kStepK * kGroup}, whole, w.s,
                  s.s_panel());
    }
#ifdef AMXK_HALF_PANEL
    if (whole < groups_q) {
      gemm_half_panel(block.groups, block.num_groups, steps_q, w.q + whole * s.q_panel(), w.s + whole * s.s_panel());
    }
#endif

    for (int g = 0; g < groups_q; ++g) {
      alignas(64) int32_t limit[kGroup];
      bool masked = false;
      for (int i = 0; i < kGroup; ++i) {
        const int64_t visible = min<int64_t>(w.limit[g * kGroup + i] - first, block.keys);
        limit[i] = static_cast<int32_t>(max<int64_t>(visible, 0));
        masked |= limit[i] < padded;
      }
      alignas(64) float alpha[kGroup];
      const int64_t row = static_cast<int64_t>(g) * kGroup;
      const bool grows = softmax_panel(w.s + g * s.s_panel(), padded, limit, masked, p.scale_log2, state.m + row,
                                       state.l + row, alpha, w.p + row * kKeys, in_place);
      if (grows && first > begin) {
        scale_rows(state.o + row * kGroup, min<int64_t>(kGroup, rows - row), s.panels, s.o_panel(), alpha);
      }
    }

#ifdef AMXK_VALUES_IN_PLACE
    if (in_place) {
      const auto product = first == begin ? gemm_values_in_place<false> : gemm_values_in_place<true>;
      const int64_t steps = in_place_steps(rows, block.num_groups, s.panels);
      product({w.p, kKeys}, static_cast<int>(rows), block.groups, block.num_groups, s.panels, state.o, s.o_panel(),
              fetch_rows(next.groups, fetched, s.width, steps));
      continue;
    }
#endif
    const int64_t steps = s.panels / kValuePanels * product_steps(rows, padded / kStepK, kValuePanels);
    Fetch fetch = fetch_rows(next.groups, fetched, s.width, steps);
    const int between = kFetchInProduct ? 0 : static_cast<int>(ceil_div(fetched, kGroup));
    for (int64_t n = 0; n < s.panels; n += kValuePanels) {
      const int panels = static_cast<int>(min<int64_t>(kValuePanels, s.panels - n));
      interleave_values(p, block.groups, block.num_groups, padded, n / 2, panels / 2, next.groups, between, w.v);
      // Rows in chunks, because a unit of one token may have more heads than kMaxRows.
      for (int g = 0; g < groups_q; g += kMaxRows / kGroup) {
        const int chunk = min(groups_q - g, kMaxRows / kGroup);
        RowGroup probabilities[kMaxRows / kGroup];
        for (int i = 0; i < chunk; ++i) probabilities[i] = {w.p + static_cast<int64_t>(g + i) * kGroup * kKeys, kKeys};
        float* o = state.o + n * s.o_panel() + static_cast<int64_t>(g) * kGroup * kGroup;
        const auto product = first == begin ? gemm<false> : gemm<true>;
        const int live = static_cast<int>(min<int64_t>(chunk * kGroup, rows - g * kGroup));
        product(probabilities, live, padded / kStepK, {w.v, kStepK * kGroup, kValuePanels * kStepK * kGroup}, panels, o,
                s.o_panel(), kFetchInProduct ? &fetch : nullptr, Keep{});
      }
    }
  }
}

// total = total merged with part, which covers later keys.
void merge(const Shape& s, int64_t rows, const State& total, const State& part) {
  for (int64_t g = 0; g < rows; g += kGroup) {
    const V a = vload(total.m + g), b = vload(part.m + g);
    const V m = vmax(a, b);
    const V shift = vselect_gt(m, vset(-INFINITY), m, vset(0.0f));
    alignas(64) float fa[kGroup], fb[kGroup];
    vstore(fa, vexp2(vsub(a, shift)));
    vstore(fb, vexp2(vsub(b, shift)));
    vstore(total.m + g, m);
    vstore(total.l + g, vfma(vload(total.l + g), vload(fa), vmul(vload(part.l + g), vload(fb))));
    for (int64_t n = 0; n < s.panels; ++n) {
      float* x = total.o + n * s.o_panel() + g * kGroup;
      const float* y = part.o + n * s.o_panel() + g * kGroup;
      for (int64_t r = 0; r < min<int64_t>(kGroup, rows - g); ++r) {
        vstore(x + r * kGroup, vfma(vload(x + r * kGroup), vset(fa[r]), vmul(vload(y + r * kGroup), vset(fb[r]))));
      }
    }
  }
}

// Writes O / l as bf16 and the log-sum-exp in natural units. A row with nothing to attend is exactly zero, -inf.
void finish(const AttentionParams& p, const Shape& s, const Unit& u, const State& state) {
  const int64_t token = p.plan.requests[u.request].first_token + u.first_token;
  const int64_t whole = p.cache.latent / 32;
  for (int64_t r = 0; r < u.tokens * p.heads; ++r) {
    const int64_t t = token + r / p.heads, h = r % p.heads;
    bf16* out = p.out + t * p.out_token + h * p.out_head;
    const float l = state.l[r];
    if (l == 0.0f) {
      memset(out, 0, p.cache.latent * sizeof(bf16));
    } else {
      const V inverse = vset(1.0f / l);
      const float* row = state.o + r * kGroup;
      for (int64_t c = 0; c < whole; ++c) {
        store32(out + 32 * c, vmul(vload(row + 2 * c * s.o_panel()), inverse),
                vmul(vload(row + (2 * c + 1) * s.o_panel()), inverse));
      }
      if (whole * 32 < p.cache.latent) {
        bf16 tail[32];
        store32(tail, vmul(vload(row + 2 * whole * s.o_panel()), inverse),
                vmul(vload(row + (2 * whole + 1) * s.o_panel()), inverse));
        memcpy(out + 32 * whole, tail, static_cast<size_t>(p.cache.latent - 32 * whole) * sizeof(bf16));
      }
    }
    if (p.lse != nullptr) {
      p.lse[t * p.lse_token + h * p.lse_head] = l == 0.0f ? -INFINITY : state.m[r] * kLn2 + logf(l);
    }
  }
}

struct Call {
  const AttentionParams& p;
  Shape shape;
  float* slots;       // [num_slots][state_floats] states of straddling units
  int64_t* finished;  // [num_straddles] splits done; whoever finishes the last one merges
  int failed;         // a thread found no memory
};

void run_thread(void* argument, int thread) {
  Call& call = *static_cast<Call*>(argument);
  const AttentionParams& p = call.p;
  const Shape& s = call.shape;
  const int64_t first = p.plan.bounds[thread], last = p.plan.bounds[thread + 1];
  if (first == last) return;
  Worker w;
  char* memory = static_cast<char*>(scratch(Scratch::kWorker, Worker::bytes(s)));
  if (memory == nullptr) {
    __atomic_store_n(&call.failed, 1, __ATOMIC_RELAXED);
    return;
  }
  w.place(memory, s);
  const TileScope tiles;

  int64_t lo = 0, hi = p.plan.header->num_units - 1;
  while (lo < hi) {  // the last unit that starts at or before `first`
    const int64_t middle = (lo + hi + 1) / 2;
    if (p.plan.units[middle].first_item <= first) {
      lo = middle;
    } else {
      hi = middle - 1;
    }
  }
  const Unit* const end = p.plan.units + p.plan.header->num_units;
  const auto split_start = [](const Unit& u, int64_t split) {
    const int64_t begin = split * u.split_keys;
    return first_block(u, begin, min(u.keys, begin + u.split_keys));
  };
  const Unit* u = p.plan.units + lo;
  w.current = 0;
  locate(p, s, split_start(*u, first - u->first_item), 0, w);
  for (; u < end && u->first_item < last; ++u) {
    const int64_t rows = u->tokens * p.heads, splits = unit_splits(*u);
    const int64_t from = max<int64_t>(0, first - u->first_item), to = min<int64_t>(splits, last - u->first_item);
    pack_queries(p, s, *u, w.staging, w.q);
    const Request& request = p.plan.requests[u->request];
    for (int64_t r = 0; r < round_up(rows, kGroup); ++r) {
      w.limit[r] = request.keys - request.tokens + u->first_token + min(r / p.heads, u->tokens - 1) + 1;
    }
    for (int64_t i = from; i < to; ++i) {
      const State state = u->slot >= 0 ? state_at(call.slots + (u->slot + i) * s.state_floats(), s)
                                       : (i == 0 ? w.total : w.part);
      const Unit* const following = i + 1 == to && u + 1 < end && u[1].first_item < last ? u + 1 : nullptr;
      const Range after = following != nullptr ? split_start(*following, 0)
                          : i + 1 < to         ? split_start(*u, i + 1)
                                               : Range{u->request, 0, 0};
      attend(p, s, *u, i * u->split_keys, min(u->keys, (i + 1) * u->split_keys), after, following, w, state);
      if (u->slot < 0 && i > 0) merge(s, rows, w.total, w.part);
    }
    if (u->slot < 0) {
      finish(p, s, *u, w.total);
    } else if (__atomic_add_fetch(call.finished + u->straddle, to - from, __ATOMIC_ACQ_REL) == splits) {
      const State total = state_at(call.slots + u->slot * s.state_floats(), s);
      for (int64_t i = 1; i < splits; ++i) {
        merge(s, rows, total, state_at(call.slots + (u->slot + i) * s.state_floats(), s));
      }
      finish(p, s, *u, total);
    }
  }
}

amxk_code attention(const AttentionParams& p) {
  const PlanHeader& h = *p.plan.header;
  Call call = {p, Shape(p, h.max_rows), nullptr, nullptr, 0};
  if (h.num_straddles > 0) {
    const int64_t counters = round_up(h.num_straddles * static_cast<int64_t>(sizeof(int64_t)), 64);
    const int64_t slots = h.num_slots * call.shape.state_floats() * static_cast<int64_t>(sizeof(float));
    char* memory = static_cast<char*>(scratch(Scratch::kShared, static_cast<size_t>(counters + slots)));
    if (memory == nullptr) return AMXK_INTERNAL;
    memset(memory, 0, static_cast<size_t>(counters));
    call.finished = reinterpret_cast<int64_t*>(memory);
    call.slots = reinterpret_cast<float*>(memory + counters);
  }
  parallel_run(p.parallel, static_cast<int>(h.num_threads), run_thread, &call);
  return call.failed ? AMXK_INTERNAL : AMXK_OK;
}

}  // namespace
}  // namespace AMXK_TIER
}  // namespace amxk
