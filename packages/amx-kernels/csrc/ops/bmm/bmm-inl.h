// SPDX-License-Identifier: Apache-2.0
// Batched matrix product with packed or plain weights, one text for every tier: absorb (q W_UK) and de-absorb (o W_UV).
//
// A block of 64 rows x 4 panels of 16 columns is computed into 16 KB of fp32, which L1 keeps, then rounded to bf16 and
// written to its place. Blocks of the same rows follow each other; with plain weights, blocks of the same weights, which
// are packed once for all rows. What the next block reads anew, packed weights or rows, is fetched meanwhile: rows of all
// heads lie side by side, so those of one head are a line here and a line there, which no hardware prefetcher follows.
#pragma once

#include "base/scratch.h"
#include "ops/bmm/params.h"
#include "tile/pack-inl.h"
#include "tile/weight-inl.h"

namespace amxk {
namespace AMXK_TIER {
namespace {

constexpr int kBlockGroups = 4;
// Rows this far apart fall into one or two sets of L1, which cannot hold the 16 of a group: they are copied.
constexpr int64_t kConflict = 1024;  // elements
constexpr int kBlockPanels = kWeightPanels;
constexpr int64_t kFetchedRows = kBlockGroups * kGroup;

struct BmmCall {
  const BmmParams& p;
  int64_t depth, steps;           // padded to 32
  int64_t row_blocks, panel_blocks;
  int failed;
};

struct BmmItem {
  int64_t n, row_block, panel_block;
  int64_t row0, rows, panel0, panels;

  BmmItem(const BmmCall& call, int64_t item) {
    const BmmParams& p = call.p;
    const int64_t within = item % (call.row_blocks * call.panel_blocks);
    n = item / (call.row_blocks * call.panel_blocks);
    row_block = p.packed ? within / call.panel_blocks : within % call.row_blocks;
    panel_block = p.packed ? within % call.panel_blocks : within / call.row_blocks;
    row0 = row_block * kBlockGroups * kGroup;
    rows = min<int64_t>(kBlockGroups * kGroup, p.rows - row0);
    panel0 = panel_block * kBlockPanels;
    panels = min<int64_t>(kBlockPanels, ceil_div(p.columns, kGroup) - panel0);
  }
};

AMXK_INLINE Panels packed_block(const BmmCall& call, const BmmItem& item) {
  const int64_t panels = ceil_div(call.p.columns, kGroup);
  return packed_block(call.p.mat2 + item.n * packed_size(panels, call.depth), item.panel0, panels, call.depth);
}

// What the item after `item` reads and this one does not, if there is one, to be fetched within `steps` steps.
AMXK_INLINE Fetch fetch_item(const BmmCall& call, const BmmItem& item, const BmmItem& next, int64_t steps,
                             RowGroup* groups) {
  const BmmParams& p = call.p;
  if (p.packed && p.rows <= kBlockGroups * kGroup) {  // each block of weights is read once
    // With few rows a whole block at once is read so fast that the hardware does better by itself; panel by panel, it
    // would see every fourth line only.
    if (p.rows < kGroup && kMaxPanels == kWeightPanels) return Fetch{};
    const int64_t size = packed_size(next.panels, call.depth);
    const int64_t rows = min(steps, kFetchedRows), width = round_up(ceil_div(size, rows), kStepK);
    const bf16* from = packed_block(call, next).at;
    for (int64_t r = 0; r < rows; r += kGroup) groups[r / kGroup] = {from + r * width, width};
    return fetch_rows(groups, static_cast<int>(rows), width, steps);
  }
  if (next.n == item.n && next.row_block == item.row_block) return Fetch{};
  const bf16* from = p.mat1 + next.n * p.mat1_batch + next.row0 * p.mat1_row;
  for (int64_t r = 0; r < next.rows; r += kGroup) groups[r / kGroup] = {from + r * p.mat1_row, p.mat1_row};
  return fetch_rows(groups, static_cast<int>(next.rows), p.depth, steps);
}

// Panel n of a plain weight matrix. pair: as for pack_panel.
AMXK_INLINE void pack_weight_panel(const bf16* weight, int64_t stride, int64_t columns, int64_t depth, int64_t padded,
                                   int64_t n, bf16* staging, bf16* panel, int64_t pair) {
  const int64_t live = min<int64_t>(kGroup, columns - n * kGroup);
  const bf16* rows = weight + n * kGroup * stride;
  if (live < kGroup || depth != padded || stride % 2 != 0) {
    copy_group(rows, stride, live, depth, padded, staging);
    pack_panel(staging, padded, padded / kStepK, panel, pair);
  } else {
    pack_panel(rows, stride, padded / kStepK, panel, pair);
  }
}

void bmm_thread(void* argument, int thread) {
  BmmCall& call = *static_cast<BmmCall*>(argument);
  const BmmParams& p = call.p;
  const int64_t items = p.batch * call.panel_blocks * call.row_blocks;
  const int64_t first = items * thread / p.parallel.num_threads;
  const int64_t last = items * (thread + 1) / p.parallel.num_threads;
  if (first == last) return;

  const int64_t block_size = packed_size(kBlockPanels, call.depth);  // of plain weights, packed
  const size_t c_bytes = sizeof(float) * kBlockPanels * kBlockGroups * kGroup * kGroup;
  const int64_t a_stride = call.depth + kStepK;  // a line more: depths are often powers of two
  const size_t a_bytes = sizeof(bf16) * kBlockGroups * kGroup * static_cast<size_t>(a_stride);
  const size_t b_bytes = p.packed ? 0 : sizeof(bf16) * static_cast<size_t>(block_size + packed_size(1, call.depth));
  char* memory = static_cast<char*>(scratch(Scratch::kWorker, c_bytes + a_bytes + b_bytes));
  if (memory == nullptr) {
    __atomic_store_n(&call.failed, 1, __ATOMIC_RELAXED);
    return;
  }
  float* c = reinterpret_cast<float*>(memory);
  bf16* copies = reinterpret_cast<bf16*>(memory + c_bytes);
  bf16* plain = reinterpret_cast<bf16*>(memory + c_bytes + a_bytes);
  constexpr int64_t c_panel = kBlockGroups * kGroup * kGroup;
  const TileScope tiles;

  int64_t weights_at = -1, rows_at = -1;  // what plain and a hold
  Panels b = {};
  RowGroup a[kBlockGroups];
  for (int64_t i = first; i < last; ++i) {
    const BmmItem item(call, i);
    const auto [n, row_block, panel_block, row0, rows, panel0, panels] = item;
    const int groups = static_cast<int>(ceil_div(rows, kGroup));

    if (p.packed) {
      b = packed_block(call, item);
    } else if (weights_at != n * call.panel_blocks + panel_block) {
      weights_at = n * call.panel_blocks + panel_block;
      b = packed_block(plain, 0, panels, call.depth);
      for (int64_t i = 0; i < panels; ++i) {
        pack_weight_panel(p.mat2 + n * p.mat2_batch, p.mat2_row, p.columns, p.depth, call.depth, panel0 + i,
                          plain + block_size, plain + packed_offset(i, call.depth), b.pair);
      }
    }

    if (rows_at != n * call.row_blocks + row_block) {
      rows_at = n * call.row_blocks + row_block;
      for (int g = 0; g < groups; ++g) {
        const bf16* row = p.mat1 + n * p.mat1_batch + (row0 + g * kGroup) * p.mat1_row;
        const int64_t live = min<int64_t>(kGroup, rows - g * kGroup);
        a[g] = {row, p.mat1_row};
        const int64_t read = rows_read(static_cast<int>(live));
        const bool conflict = p.mat1_row % kConflict == 0 && call.panel_blocks > 2;  // a copy must pay for itself
        if (live < read || p.depth != call.depth || conflict) {
          bf16* copy = copies + g * kGroup * a_stride;
          copy_group(row, p.mat1_row, live, p.depth, a_stride, copy, read);
          a[g] = {copy, a_stride};
        }
      }
    }
    RowGroup next[kFetchedRows / kGroup];
    Fetch fetch = {};
    if (kFetchInProduct && i + 1 < last) {
      const int64_t steps = product_steps(rows, static_cast<int>(call.steps), kBlockPanels);
      fetch = fetch_item(call, item, BmmItem(call, i + 1), steps, next);
    }
    const Round result = {p.out + n * p.out_batch + row0 * p.out_row + panel0 * kGroup, p.out_row, rows,
                          p.columns - panel0 * kGroup, vset(p.scale != nullptr ? p.scale[n * p.scale_batch] : 1.0f)};
    gemm<false>(a, static_cast<int>(rows), static_cast<int>(call.steps), b, static_cast<int>(panels), c, c_panel,
                &fetch, result);
  }
}

amxk_code bmm(const BmmParams& p) {
  const int64_t depth = round_up(p.depth, kStepK);
  BmmCall call = {p,
                  depth,
                  depth / kStepK,
                  ceil_div(p.rows, kBlockGroups * kGroup),
                  ceil_div(ceil_div(p.columns, kGroup), kBlockPanels),
                  0};
  if (p.batch * p.rows * p.columns > 0) parallel_run(p.parallel, p.parallel.num_threads, bmm_thread, &call);
  return call.failed ? AMXK_INTERNAL : AMXK_OK;
}

struct PackCall {
  const PackParams& p;
  int failed;
};

void pack_thread(void* argument, int thread) {
  PackCall& call = *static_cast<PackCall*>(argument);
  const PackParams& p = call.p;
  const int64_t depth = round_up(p.depth, kStepK), panels = ceil_div(p.columns, kGroup);
  const int64_t first = p.batch * panels * thread / p.parallel.num_threads;
  const int64_t last = p.batch * panels * (thread + 1) / p.parallel.num_threads;
  if (first == last) return;
  bf16* staging = static_cast<bf16*>(scratch(Scratch::kWorker, sizeof(bf16) * kGroup * static_cast<size_t>(depth)));
  if (staging == nullptr) {
    __atomic_store_n(&call.failed, 1, __ATOMIC_RELAXED);
    return;
  }
  for (int64_t i = first; i < last; ++i) {
    const int64_t batch = i / panels, n = i % panels;
    pack_weight_panel(p.weight + batch * p.weight_batch, p.weight_row, p.columns, p.depth, depth, n, staging,
                      p.packed + batch * packed_size(panels, depth) + packed_offset(n, depth), packed_pair(n, panels));
  }
}

amxk_code pack(const PackParams& p) {
  PackCall call = {p, 0};
  if (p.batch * p.columns * p.depth > 0) parallel_run(p.parallel, p.parallel.num_threads, pack_thread, &call);
  return call.failed ? AMXK_INTERNAL : AMXK_OK;
}

}  // namespace
}  // namespace AMXK_TIER
}  // namespace amxk
