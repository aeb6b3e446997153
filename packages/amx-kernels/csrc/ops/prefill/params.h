// SPDX-License-Identifier: Apache-2.0
// Decompressed prefill, checked by csrc/capi/prefill.cpp. N: nope dims of a key, E: dims of a value.
#pragma once

#include "ops/attention/params.h"

namespace amxk {

struct PrefillParams : StepParams {
  const bf16* q_nope;  // [T, H, N]
  int64_t q_nope_token, q_nope_head;
  const bf16* w_uk;  // packed [H, N, R]: k_nope = w_uk . latent
  const bf16* w_uv;  // packed [H, E, R]: v = w_uv . latent
  int32_t nope, value;
  const Request* requests;  // [num_requests]
  int64_t num_requests;
};

using PrefillFunction = amxk_code (*)(const PrefillParams&);

}  // namespace amxk
