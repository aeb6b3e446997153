// SPDX-License-Identifier: Apache-2.0
// Threads are injected: kernels only ever say "run task 0..n-1". The torch shim passes torch's pool, the Python module
// a small pool of its own, tests a serial loop. Tasks may run one after another on one thread; none may wait for another.
#pragma once

#include "amx_kernels/amx_kernels.h"

namespace amxk {

using Parallel = amxk_parallel;

// Runs task(arg, 0) .. task(arg, n - 1) and returns when all have ended.
AMXK_INLINE void parallel_run(const Parallel& pool, int n, void (*task)(void*, int), void* arg) {
  if (n <= 1 || pool.run == nullptr) {
    for (int i = 0; i < n; ++i) task(arg, i);
  } else {
    pool.run(pool.context, n, task, arg);
  }
}

}  // namespace amxk
