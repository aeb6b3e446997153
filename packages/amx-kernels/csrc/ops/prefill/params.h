// SPDX-License-Identifier: Apache-2.0
// Decompressed prefill, checked by csrc/capi/prefill.cpp. N: nope dims of a key, E: dims of a value.
#pragma once

#include "ops/attention/params.h"

namespace amxk {

struct PrefillParams {
  const bf16* q_nope;  // [T, H, N]
  int64_t q_nope_token, q_nope_head;
  const bf16* q_pe;  // [T, H, P]
  int64_t q_pe_token, q_pe_head;
  PagedCache cache;
  const bf16* w_uk;  // packed [H, N, R]: k_nope = w_uk . latent
  const bf16* w_uv;  // packed [H, E, R]: v = w_uv . latent
  bf16* out;         // [T, H, E]
  int64_t out_token, out_head;
  float* lse;  // [T, H] or nullptr
  int64_t lse_token, lse_head;
  int32_t heads, nope, value;
  float scale_log2;
  const Request* requests;  // [num_requests]
  int64_t num_requests;
  Parallel parallel;
};

using PrefillFunction = amxk_code (*)(const PrefillParams&);

}  // namespace amxk
