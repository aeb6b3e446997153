// SPDX-License-Identifier: Apache-2.0
// A small coverage-guided fuzzer for compilers without libFuzzer: mutates inputs that reached new edges. The target is
// compiled with -fsanitize-coverage=trace-pc, which calls the function below at every edge.
//
//   driver SECONDS SEED
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <chrono>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

constexpr size_t kEdges = 1 << 16;
uint8_t hit[kEdges];   // by this input
uint8_t seen[kEdges];  // by any

}  // namespace

extern "C" __attribute__((no_sanitize("address", "undefined"))) void __sanitizer_cov_trace_pc() {
  hit[(reinterpret_cast<uintptr_t>(__builtin_return_address(0)) >> 1) % kEdges] = 1;
}

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? atof(argv[1]) : 10;
  std::mt19937_64 random(argc > 2 ? strtoull(argv[2], nullptr, 10) : 1);
  std::vector<std::vector<uint8_t>> corpus(1, std::vector<uint8_t>(64));
  const auto start = std::chrono::steady_clock::now();
  uint64_t runs = 0, edges = 0;
  const auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  while (elapsed() < seconds) {
    for (int i = 0; i < 200; ++i) {
      std::vector<uint8_t> input = corpus[random() % corpus.size()];
      for (uint64_t n = random() % 8 + 1; n > 0; --n) {
        const size_t at = random() % input.size();
        switch (random() % 4) {
          case 0: input[at] = static_cast<uint8_t>(random()); break;
          case 1: input[at] ^= static_cast<uint8_t>(1u << random() % 8); break;
          case 2: input.insert(input.begin() + static_cast<long>(at), static_cast<uint8_t>(random())); break;
          default: if (input.size() > 2) input.erase(input.begin() + static_cast<long>(at));
        }
      }
      if (input.size() > 4096) input.resize(4096);
      for (uint8_t& h : hit) h = 0;
      LLVMFuzzerTestOneInput(input.data(), input.size());
      ++runs;
      bool is_new = false;
      for (size_t e = 0; e < kEdges; ++e) {
        if (hit[e] && !seen[e]) {
          seen[e] = 1;
          ++edges;
          is_new = true;
        }
      }
      if (is_new) corpus.push_back(input);
    }
  }
  printf("runs %llu edges %llu corpus %zu\n", static_cast<unsigned long long>(runs),
         static_cast<unsigned long long>(edges), corpus.size());
}
