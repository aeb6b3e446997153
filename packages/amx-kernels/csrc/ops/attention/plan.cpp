// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/plan.h"

namespace amxk {
namespace {

constexpr int64_t kWords = sizeof(int64_t);
constexpr int64_t kHeaderWords = sizeof(PlanHeader) / kWords;
constexpr int64_t kUnitWords = sizeof(Unit) / kWords;
constexpr int64_t kRequestWords = sizeof(Request) / kWords;

int64_t tokens_per_unit(int64_t heads) { return max<int64_t>(1, kMaxRows / heads); }

int64_t units_of(const Request& r, int64_t heads) { return ceil_div(r.tokens, tokens_per_unit(heads)); }

// Keys per split of a unit that sees `keys`. Many units of one request keep threads busy by themselves and need no
// splits: the length grows with their number. Splits of one unit are equal to within 64 keys.
int64_t split_length(const Request& r, int64_t keys, int64_t heads) {
  const int64_t wanted = kMinSplit * min<int64_t>(units_of(r, heads), kMaxSplits);
  const int64_t splits = min<int64_t>(kMaxSplits, max<int64_t>(1, ceil_div(keys, wanted)));
  return max<int64_t>(64, round_up(ceil_div(keys, splits), 64));
}

// In units of one row x one key; reading a key costs as much as 24 rows of work on it.
int64_t item_cost(const Unit& u, int64_t split, int64_t heads, int item_keys) {
  const int64_t keys = max<int64_t>(0, min(u.split_keys, u.keys - split * u.split_keys));
  return (keys + item_keys) * (round_up(u.tokens * heads, kGroup) + 24);
}

}  // namespace

int64_t plan_size(const Request* requests, int64_t num_requests, int64_t num_heads, int num_threads) noexcept {
  int64_t units = 0;
  for (int64_t i = 0; i < num_requests; ++i) units += units_of(requests[i], num_heads);
  return kHeaderWords + num_requests * kRequestWords + units * kUnitWords + num_threads + 1;
}

void plan_build(int64_t* memory, const Request* requests, int64_t num_requests, int64_t num_heads, int num_threads,
                int item_keys) noexcept {
  PlanHeader& h = *reinterpret_cast<PlanHeader*>(memory);
  h = {};
  h.magic = kPlanMagic;
  h.size = plan_size(requests, num_requests, num_heads, num_threads);
  h.num_requests = num_requests;
  h.num_heads = num_heads;
  h.num_threads = num_threads;

  Request* request = reinterpret_cast<Request*>(memory + kHeaderWords);
  Unit* unit = reinterpret_cast<Unit*>(memory + kHeaderWords + num_requests * kRequestWords);
  double total_cost = 0;
  const int64_t step = tokens_per_unit(num_heads);
  for (int64_t i = 0; i < num_requests; ++i) {
    const Request& r = request[i] = requests[i];
    for (int64_t first = 0; first < r.tokens; first += step) {
      Unit& u = unit[h.num_units++];
      u.request = i;
      u.first_token = first;
      u.tokens = min(step, r.tokens - first);
      u.keys = max<int64_t>(0, r.keys - r.tokens + first + u.tokens);
      u.split_keys = split_length(r, u.keys, num_heads);
      u.first_item = h.num_items;
      u.slot = u.straddle = -1;
      h.num_items += unit_splits(u);
      h.max_rows = max(h.max_rows, u.tokens * num_heads);
      for (int64_t s = 0; s < unit_splits(u); ++s) total_cost += static_cast<double>(item_cost(u, s, num_heads, item_keys));
    }
  }

  // An item goes to the thread in whose share of the total cost its middle lies.
  int64_t* bounds = reinterpret_cast<int64_t*>(unit + h.num_units);
  double cost = 0;
  int thread = 0;
  bounds[0] = 0;
  for (int64_t i = 0; i < h.num_units; ++i) {
    Unit& u = unit[i];
    int first_thread = 0;
    for (int64_t s = 0; s < unit_splits(u); ++s) {
      const double c = static_cast<double>(item_cost(u, s, num_heads, item_keys));
      const double middle = (cost + 0.5 * c) / total_cost;
      const int owner = min(num_threads - 1, static_cast<int>(middle * num_threads));
      while (thread < owner) bounds[++thread] = u.first_item + s;
      if (s == 0) first_thread = thread;
      cost += c;
    }
    if (thread != first_thread) {
      u.straddle = h.num_straddles++;
      u.slot = h.num_slots;
      h.num_slots += unit_splits(u);
    }
  }
  while (thread < num_threads) bounds[++thread] = h.num_items;
  h.checksum = plan_checksum(memory);
}

PlanView plan_view(const int64_t* memory) noexcept {
  const PlanHeader* h = reinterpret_cast<const PlanHeader*>(memory);
  const int64_t* requests = memory + kHeaderWords;
  const int64_t* units = requests + h->num_requests * kRequestWords;
  return {h, reinterpret_cast<const Request*>(requests), reinterpret_cast<const Unit*>(units),
          units + h->num_units * kUnitWords};
}

int64_t plan_checksum(const int64_t* memory) noexcept {
  const PlanHeader* h = reinterpret_cast<const PlanHeader*>(memory);
  uint64_t hash = 0xcbf29ce484222325u;
  for (int64_t i = 0; i < h->size; ++i) {
    if (memory + i == &h->checksum) continue;
    hash = (hash ^ static_cast<uint64_t>(memory[i])) * 0x100000001b3u;
  }
  return static_cast<int64_t>(hash);
}

}  // namespace amxk
