// SPDX-License-Identifier: Apache-2.0
// What the CPU has and what the operating system lets us use of it. Facts only; decisions are in registry.cpp.
#pragma once

#include <cstdint>

#include "amx_kernels/isa.h"

namespace amxk {

// Feature i of a report, in the order of the table in cpu.cpp.
enum Feature : int {
  kAvx,
  kF16c,
  kFma,
  kAvx2,
  kAvx512f,
  kAvx512dq,
  kAvx512bw,
  kAvx512vl,
  kAvx512Bf16,
  kAmxTile,
  kAmxBf16,
  kNumFeatures
};

constexpr std::uint64_t bit(int i) { return std::uint64_t{1} << i; }

// XCR0: register state the operating system saves and restores.
constexpr std::uint64_t kXcr0Avx = bit(1) | bit(2);               // XMM, upper halves of YMM
constexpr std::uint64_t kXcr0Avx512 = bit(5) | bit(6) | bit(7);   // opmasks, upper halves of ZMM0-15, ZMM16-31
constexpr std::uint64_t kXcr0Amx = bit(17) | bit(18);             // tile configuration, tile data
constexpr std::uint32_t kXfeatureTileData = 18;

// The probes of this machine. xcomp_request asks the kernel once per process and repeats that answer afterwards.
const amxk_probes& native_probes() noexcept;

// Fills everything but the outcome of a permission request.
void detect(const amxk_probes& probes, amxk_cpu_report& report) noexcept;

// The outcome of this process's own request so far.
void native_request_outcome(amxk_cpu_report& report) noexcept;

// Nothing for 0.
const char* errno_name(int number) noexcept;

}  // namespace amxk
