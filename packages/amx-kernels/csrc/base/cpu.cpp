// SPDX-License-Identifier: Apache-2.0
#include "base/cpu.h"

#include <cerrno>
#include <cstring>
#include <mutex>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace amxk {
namespace {

struct FeatureRow {
  const char* name;  // as in /proc/cpuinfo
  std::uint32_t leaf, subleaf;
  int reg;  // 0..3: eax, ebx, ecx, edx
  int position;
};

// Intel SDM vol. 2A, CPUID. Indexed by Feature.
constexpr FeatureRow kFeatures[] = {
    {"avx", 1, 0, 2, 28},
    {"f16c", 1, 0, 2, 29},
    {"fma", 1, 0, 2, 12},
    {"avx2", 7, 0, 1, 5},
    {"avx512f", 7, 0, 1, 16},
    {"avx512dq", 7, 0, 1, 17},
    {"avx512bw", 7, 0, 1, 30},
    {"avx512vl", 7, 0, 1, 31},
    {"avx512_bf16", 7, 1, 0, 5},
    {"amx_tile", 7, 0, 3, 24},
    {"amx_bf16", 7, 0, 3, 22},
};
static_assert(sizeof kFeatures / sizeof kFeatures[0] == kNumFeatures, "one row per Feature");

constexpr std::uint32_t kExtended = 0x80000000u;

// CPUID that answers zeros for leaves and subleaves the CPU does not have (it would repeat its highest basic leaf).
class Cpuid {
 public:
  explicit Cpuid(const amxk_probes& probes) : probes_(probes) {
    std::uint32_t regs[4] = {};
    probes.cpuid(probes.context, 0, 0, regs);
    max_basic_ = regs[0];
    probes.cpuid(probes.context, kExtended, 0, regs);
    max_extended_ = regs[0];
    if (max_basic_ >= 7) {
      probes.cpuid(probes.context, 7, 0, regs);
      max_subleaf7_ = regs[0];
    }
  }

  void operator()(std::uint32_t leaf, std::uint32_t subleaf, std::uint32_t (&regs)[4]) const {
    std::memset(regs, 0, sizeof regs);
    if (leaf > (leaf >= kExtended ? max_extended_ : max_basic_)) return;
    if (leaf == 7 && subleaf > max_subleaf7_) return;
    probes_.cpuid(probes_.context, leaf, subleaf, regs);
  }

 private:
  const amxk_probes& probes_;
  std::uint32_t max_basic_ = 0, max_extended_ = 0, max_subleaf7_ = 0;
};

void identify(const Cpuid& cpuid, amxk_cpu_report& report) {
  std::uint32_t regs[4];
  cpuid(0, 0, regs);
  std::memcpy(report.vendor + 0, &regs[1], 4);
  std::memcpy(report.vendor + 4, &regs[3], 4);
  std::memcpy(report.vendor + 8, &regs[2], 4);

  cpuid(1, 0, regs);
  const std::uint32_t signature = regs[0];
  const int family = (signature >> 8) & 0xf;
  report.stepping = signature & 0xf;
  report.family = family + (family == 0xf ? (signature >> 20) & 0xff : 0);
  report.model = (signature >> 4) & 0xf;
  if (family == 6 || family == 0xf) report.model += ((signature >> 16) & 0xf) << 4;
  report.osxsave = (regs[2] >> 27) & 1;

  char brand[49] = {};
  for (std::uint32_t i = 0; i < 3; ++i) {
    cpuid(kExtended + 2 + i, 0, regs);
    std::memcpy(brand + 16 * i, regs, 16);
  }
  const char* first = brand + std::strspn(brand, " ");
  std::strncpy(report.brand, first, sizeof report.brand - 1);
}

void measure_amx(const Cpuid& cpuid, const amxk_probes& probes, amxk_cpu_report& report) {
  std::uint32_t regs[4];
  cpuid(0x1d, 0, regs);
  report.amx_max_palette = regs[0];
  if (report.amx_max_palette >= 1) {
    cpuid(0x1d, 1, regs);
    report.amx_total_bytes = regs[0] & 0xffff;
    report.amx_tile_bytes = regs[0] >> 16;
    report.amx_row_bytes = regs[1] & 0xffff;
    report.amx_tiles = regs[1] >> 16;
    report.amx_rows = regs[2] & 0xffff;
  }
  cpuid(0x1e, 0, regs);
  report.amx_tmul_max_k = regs[1] & 0xff;
  report.amx_tmul_max_n = (regs[1] >> 8) & 0xffff;

  report.xcomp_supported_errno = probes.xcomp_supported(probes.context, &report.xcomp_supported);
  report.xcomp_permitted_errno = probes.xcomp_permitted(probes.context, &report.xcomp_permitted);
}

void native_cpuid(void*, std::uint32_t leaf, std::uint32_t subleaf, std::uint32_t regs[4]) {
#if defined(__x86_64__)
  __cpuid_count(leaf, subleaf, regs[0], regs[1], regs[2], regs[3]);
#else
  (void)leaf, (void)subleaf, (void)regs;
#endif
}

std::uint64_t native_xgetbv(void*, std::uint32_t index) {
#if defined(__x86_64__)
  std::uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(index));
  return std::uint64_t{high} << 32 | low;
#else
  (void)index;
  return 0;
#endif
}

// Linux uapi asm/prctl.h, kernel 5.16 and later; written out because distributions ship older headers.
constexpr int kArchGetXcompSupp = 0x1021;
constexpr int kArchGetXcompPerm = 0x1022;
constexpr int kArchReqXcompPerm = 0x1023;

// 0 or errno; the caller's own errno is left alone.
int arch_prctl(int operation, unsigned long argument) {
#if defined(__linux__) && defined(SYS_arch_prctl)
  const int saved = errno;
  const int result = syscall(SYS_arch_prctl, operation, argument) == 0 ? 0 : errno;
  errno = saved;
  return result;
#else
  (void)operation, (void)argument;
  return ENOSYS;
#endif
}

int get_mask(int operation, std::uint64_t* mask) {
  *mask = 0;
  return arch_prctl(operation, reinterpret_cast<unsigned long>(mask));
}

int native_xcomp_supported(void*, std::uint64_t* mask) { return get_mask(kArchGetXcompSupp, mask); }
int native_xcomp_permitted(void*, std::uint64_t* mask) { return get_mask(kArchGetXcompPerm, mask); }

// The permission belongs to the process: threads that already run have it from then on, a forked child inherits it.
struct RequestOnce {
  std::mutex mutex;
  int request = AMXK_REQUEST_NOT_MADE;
  int number = 0;
} request_once;

int native_xcomp_request(void*, std::uint32_t feature) {
  const std::lock_guard<std::mutex> lock(request_once.mutex);
  if (request_once.request == AMXK_REQUEST_NOT_MADE) {
    request_once.number = arch_prctl(kArchReqXcompPerm, feature);
    request_once.request = request_once.number == 0 ? AMXK_REQUEST_GRANTED : AMXK_REQUEST_REFUSED;
  }
  return request_once.number;
}

}  // namespace

const amxk_probes& native_probes() noexcept {
  static constexpr amxk_probes probes = {
      nullptr,
#if defined(__x86_64__)
      1,
#else
      0,
#endif
      native_cpuid, native_xgetbv, native_xcomp_supported, native_xcomp_permitted, native_xcomp_request,
  };
  return probes;
}

void native_request_outcome(amxk_cpu_report& report) noexcept {
  const std::lock_guard<std::mutex> lock(request_once.mutex);
  report.request = request_once.request;
  report.request_errno = request_once.number;
}

void detect(const amxk_probes& probes, amxk_cpu_report& report) noexcept {
  report = amxk_cpu_report{};
  report.is_x86 = probes.is_x86 != 0;
  if (!report.is_x86) return;

  const Cpuid cpuid(probes);
  identify(cpuid, report);
  for (int i = 0; i < kNumFeatures; ++i) {
    std::uint32_t regs[4];
    cpuid(kFeatures[i].leaf, kFeatures[i].subleaf, regs);
    if (regs[kFeatures[i].reg] >> kFeatures[i].position & 1) report.features |= bit(i);
  }
  if (report.osxsave) report.xcr0 = probes.xgetbv(probes.context, 0);
  if (report.features & bit(kAmxTile)) measure_amx(cpuid, probes, report);
}

const char* errno_name(int number) noexcept {
  switch (number) {
    case 0: return "";
    case EPERM: return "EPERM";
    case EINVAL: return "EINVAL";
    case ENOSYS: return "ENOSYS";
    case ENOSPC: return "ENOSPC";
    case EACCES: return "EACCES";
    case EOPNOTSUPP: return "EOPNOTSUPP";
    case EBUSY: return "EBUSY";
    default: return "errno";
  }
}

}  // namespace amxk

extern "C" {

size_t amxk_cpu_report_size(void) { return sizeof(amxk_cpu_report); }

const char* amxk_cpu_feature_name(int i) {
  return i >= 0 && i < amxk::kNumFeatures ? amxk::kFeatures[i].name : nullptr;
}

}  // extern "C"
