// SPDX-License-Identifier: Apache-2.0
// The step's plan: what is constant in a step is computed once and reused by every layer.
//
// A unit is a block of query tokens of one request with all its heads; it is cut along the keys into splits. Units and
// splits depend on the request's own query and sequence length and on H alone, never on batch mates or threads: that is
// the promise of invariance. An item is (unit, split); threads take contiguous ranges of items of equal cost. A unit
// whose items end up on more than one thread gets a slot of shared scratch per split, every other unit is merged as it
// goes; both merge split 0, 1, 2, ... in this order. At most num_threads - 1 units straddle, so shared scratch is
// bounded by that x kMaxSplits, whatever the batch.
#pragma once

#include "base/common.h"

namespace amxk {

constexpr int kMaxRows = 128;   // query rows (tokens x heads) a unit aims at: O of 128 x 512 fp32 is 256 KB of L2
constexpr int kMinSplit = 512;  // keys; a split's merge costs about 2 % of its work
constexpr int kMaxSplits = 64;
constexpr int64_t kPlanMagic = 0x414d584b504c4e31;  // "AMXKPLN1"

struct Unit {
  int64_t request;
  int64_t first_token;  // within the request
  int64_t tokens;
  int64_t keys;  // visible to the unit's last token
  int64_t split_keys;
  int64_t first_item;
  int64_t slot;      // of its first split in shared scratch, -1 if one thread has all splits
  int64_t straddle;  // index among straddling units, -1 if none
};

struct Request {
  int64_t first_token;  // in the batch
  int64_t tokens;
  int64_t keys;  // sequence length including the new tokens
};

struct PlanHeader {
  int64_t magic;
  int64_t size;  // of the whole plan in int64
  int64_t num_requests, num_heads, num_threads;
  int64_t num_units, num_items, num_slots, num_straddles;
  int64_t max_rows;  // rows of the largest unit
  int64_t checksum;  // of all the rest: a plan is memory a caller could have overwritten
};

struct PlanView {
  const PlanHeader* header;
  const Request* requests;  // [num_requests]
  const Unit* units;        // [num_units]
  const int64_t* bounds;    // [num_threads + 1] first item of each thread
};

AMXK_INLINE int64_t unit_splits(const Unit& u) { return u.keys > 0 ? ceil_div(u.keys, u.split_keys) : 1; }

// int64 a plan for these requests needs.
int64_t plan_size(const Request* requests, int64_t num_requests, int64_t num_heads, int num_threads) noexcept;

// Writes the plan to memory of plan_size(...) int64. item_keys: see OpTable; it moves work between threads, no result.
void plan_build(int64_t* memory, const Request* requests, int64_t num_requests, int64_t num_heads, int num_threads,
                int item_keys) noexcept;

PlanView plan_view(const int64_t* memory) noexcept;

// FNV-1a over every word but the checksum itself.
int64_t plan_checksum(const int64_t* memory) noexcept;

}  // namespace amxk
