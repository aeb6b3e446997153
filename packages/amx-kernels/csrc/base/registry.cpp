// SPDX-License-Identifier: Apache-2.0
#include "base/registry.h"

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "base/cpu.h"
#include "base/status.h"

namespace amxk {
namespace {

// The build defines AMXK_HAVE_<TIER> for this file, one per tier it compiled.
#if defined(AMXK_HAVE_AVX2)
constexpr bool kHaveAvx2 = true;
#else
constexpr bool kHaveAvx2 = false;
#endif
#if defined(AMXK_HAVE_AVX512)
constexpr bool kHaveAvx512 = true;
#else
constexpr bool kHaveAvx512 = false;
#endif
#if defined(AMXK_HAVE_AVX512BF16)
constexpr bool kHaveAvx512Bf16 = true;
#else
constexpr bool kHaveAvx512Bf16 = false;
#endif
#if defined(AMXK_HAVE_AMXBF16)
constexpr bool kHaveAmxBf16 = true;
#else
constexpr bool kHaveAmxBf16 = false;
#endif

struct TierRow {
  const char* name;
  const char* description;
  std::uint64_t features;
  std::uint64_t xcr0;
  const char* os_check;
  bool compiled;
};

constexpr std::uint64_t kAvx2Features = bit(kAvx) | bit(kF16c) | bit(kFma) | bit(kAvx2);
constexpr std::uint64_t kAvx512Features =
    kAvx2Features | bit(kAvx512f) | bit(kAvx512dq) | bit(kAvx512bw) | bit(kAvx512vl);
constexpr std::uint64_t kAvx512Bf16Features = kAvx512Features | bit(kAvx512Bf16);
constexpr std::uint64_t kAmxFeatures = bit(kAmxTile) | bit(kAmxBf16);

// The one description of every tier, indexed by amxk_tier. tests/test_hygiene.py holds each tier's objects to the
// features named here.
constexpr TierRow kTiers[] = {
    {"portable", "plain C++ for any CPU", 0, 0, "", true},
    {"avx2", "bfloat16 widened to fp32, 256-bit FMA", kAvx2Features, kXcr0Avx, "AVX state (XCR0 bits 1-2)", kHaveAvx2},
    {"avx512", "bfloat16 widened to fp32, 512-bit FMA", kAvx512Features, kXcr0Avx | kXcr0Avx512,
     "AVX-512 state (XCR0 bits 1-2, 5-7)", kHaveAvx512},
    {"avx512bf16", "512-bit bfloat16 dot products (VDPBF16PS)", kAvx512Bf16Features, kXcr0Avx | kXcr0Avx512,
     "AVX-512 state (XCR0 bits 1-2, 5-7)", kHaveAvx512Bf16},
    {"amxbf16", "bfloat16 tile products (TDPBF16PS), AVX-512 for the rest", kAvx512Bf16Features | kAmxFeatures,
     kXcr0Avx | kXcr0Avx512 | kXcr0Amx, "AVX-512 and AMX state (XCR0 bits 1-2, 5-7, 17-18), tile data permission",
     kHaveAmxBf16},
};
static_assert(sizeof kTiers / sizeof kTiers[0] == AMXK_NUM_TIERS, "one row per tier");

// VDPBF16PS, multiply-accumulates per cycle and core against 32 for two fp32 FMA ports: Intel since Golden Cove 16, AMD
// Zen 4 32, Zen 5 64. Widening costs one shift or mask per 16 values and rounds nothing, so it is the default for
// everyone not in this table; AMX_KERNELS_ISA=avx512bf16 overrides it.
struct DotProductFirst {
  const char* vendor;
  int first_family;
};
constexpr DotProductFirst kDotProductFirst[] = {
    {"AuthenticAMD", 0x19},  // Zen 4 (Zen 3, of the same family, lacks the feature) and later
};

// What the AMX kernels are written for: palette 1 with 8 tiles of 16 rows of 64 bytes.
constexpr std::uint32_t kTiles = 8, kRows = 16, kRowBytes = 64, kTmulK = 16, kTmulN = 64;

// printf into a fixed buffer, piece by piece; counts on past the end as snprintf does.
class Text {
 public:
  Text(char* buffer, size_t size) : buffer_(buffer), size_(buffer != nullptr ? size : 0) {
    if (size_ > 0) buffer_[0] = '\0';
  }

#if defined(__GNUC__)
  __attribute__((format(printf, 2, 3)))
#endif
  Text& add(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const size_t used = length_ < size_ ? length_ : size_;
    const int written = std::vsnprintf(buffer_ == nullptr ? nullptr : buffer_ + used, size_ - used, format, arguments);
    va_end(arguments);
    if (written > 0) length_ += static_cast<size_t>(written);
    return *this;
  }

  size_t length() const { return length_; }

 private:
  char* buffer_;
  size_t size_;
  size_t length_ = 0;
};

void add_features(Text& text, std::uint64_t features) {
  const char* separator = "";
  for (int i = 0; i < kNumFeatures; ++i) {
    if (!(features & bit(i))) continue;
    text.add("%s%s", separator, amxk_cpu_feature_name(i));
    separator = " ";
  }
}

bool permitted(const amxk_cpu_report& report) {
  return report.request == AMXK_REQUEST_GRANTED || (report.xcomp_permitted >> kXfeatureTileData & 1) != 0;
}

const char* refusal_hint(int number) {
  switch (number) {
    case EINVAL: return "the kernel does not know this permission, it came with Linux 5.16";
    case ENOSYS: return "there is no such system call here: a sandbox or an emulated kernel";
    case EPERM:
    case EACCES: return "a sandbox (seccomp) or the host's policy refuses it";
    case ENOSPC: return "a thread's alternate signal stack is too small for tile data";
    case EOPNOTSUPP: return "the kernel was built or booted without AMX";
    default: return "see errno(3)";
  }
}

// CPU side of a tier. Writes the sentence why not.
bool cpu_has(const amxk_cpu_report& report, const TierRow& row, std::uint64_t needed, Text& why) {
  if (needed == 0) return true;
  if (!report.is_x86) {
    why.add("not an x86-64 processor");
    return false;
  }
  const std::uint64_t missing = needed & ~report.features;
  if (missing != 0) {
    why.add("the CPU lacks ");
    add_features(why, missing);
    return false;
  }
  if (!(needed & bit(kAmxTile))) return true;
  if (report.amx_max_palette < 1) {
    why.add("the CPU names amx_tile but no tile palette (CPUID 1Dh: maximum palette 0), as some hypervisors do");
    return false;
  }
  if (report.amx_tiles < kTiles || report.amx_rows < kRows || report.amx_row_bytes < kRowBytes ||
      report.amx_tmul_max_k < kTmulK || report.amx_tmul_max_n < kTmulN) {
    why.add("tiles are too small (CPUID 1Dh, 1Eh): %u tiles of %u rows of %u bytes, products of %u x %u bytes; "
            "%s needs %u, %u, %u, %u x %u",
            report.amx_tiles, report.amx_rows, report.amx_row_bytes, report.amx_tmul_max_k, report.amx_tmul_max_n,
            row.name, kTiles, kRows, kRowBytes, kTmulK, kTmulN);
    return false;
  }
  return true;
}

// Operating-system side. Writes the sentence why not, or how sure it is.
bool os_allows(const amxk_cpu_report& report, std::uint64_t needed, Text& why) {
  if (needed == 0) return true;
  if (!report.is_x86) {
    why.add("not an x86-64 processor");
    return false;
  }
  if (!report.osxsave || (needed & ~report.xcr0) != 0) {
    why.add("the operating system or hypervisor does not enable %s state (XCR0 = 0x%llx, needs 0x%llx)",
            needed & ~report.xcr0 & kXcr0Avx      ? "AVX"
            : needed & ~report.xcr0 & kXcr0Avx512 ? "AVX-512"
                                                  : "AMX",
            static_cast<unsigned long long>(report.xcr0), static_cast<unsigned long long>(needed));
    return false;
  }
  if (!(needed & kXcr0Amx)) return true;
  if (report.request == AMXK_REQUEST_REFUSED) {
    why.add("permission to use AMX tile data was refused: arch_prctl(ARCH_REQ_XCOMP_PERM) gave %s (%d); %s",
            errno_name(report.request_errno), report.request_errno, refusal_hint(report.request_errno));
    return false;
  }
  if (permitted(report)) {
    why.add("permission to use AMX tile data is granted");
    return true;
  }
  if (report.xcomp_supported_errno != 0) {
    why.add("the kernel cannot permit AMX tile data: arch_prctl(ARCH_GET_XCOMP_SUPP) gave %s (%d); %s",
            errno_name(report.xcomp_supported_errno), report.xcomp_supported_errno,
            refusal_hint(report.xcomp_supported_errno));
    return false;
  }
  if (!(report.xcomp_supported >> kXfeatureTileData & 1)) {
    why.add("the kernel does not support AMX tile data (ARCH_GET_XCOMP_SUPP = 0x%llx)",
            static_cast<unsigned long long>(report.xcomp_supported));
    return false;
  }
  why.add("the kernel supports AMX tile data; the permission is requested when the tier is selected");
  return true;
}

// `emulated` lifts what concerns AMX from amxbf16 and nothing else: the emulator executes no AVX-512.
void evaluate(const amxk_cpu_report& report, int tier, bool emulated, amxk_tier_status& status) {
  const TierRow& row = kTiers[tier];
  status = amxk_tier_status{};
  status.name = row.name;
  status.description = row.description;
  status.compiled = row.compiled;
  Text required(status.required, sizeof status.required);
  add_features(required, row.features);
  std::snprintf(status.os_check, sizeof status.os_check, "%s", row.os_check);

  // cpu and os stay facts about the machine, emulated or not.
  char cpu_why[256], os_why[256];
  Text cpu_text(cpu_why, sizeof cpu_why), os_text(os_why, sizeof os_why);
  status.cpu = cpu_has(report, row, row.features, cpu_text);
  status.os = os_allows(report, row.xcr0, os_text);

  bool cpu = status.cpu, os = status.os;
  emulated = emulated && (row.features & kAmxFeatures) != 0;
  if (emulated) {
    cpu_text = Text(cpu_why, sizeof cpu_why);
    os_text = Text(os_why, sizeof os_why);
    cpu = cpu_has(report, row, row.features & ~kAmxFeatures, cpu_text);
    os = os_allows(report, row.xcr0 & ~kXcr0Amx, os_text);
  }
  status.usable = row.compiled && cpu && os;

  Text reason(status.reason, sizeof status.reason);
  if (!row.compiled) {
    reason.add("not compiled into this build");
  } else if (!cpu) {
    reason.add("%s", cpu_why);
  } else if (!os) {
    reason.add("%s", os_why);
  } else if (emulated) {
    reason.add("AMX instructions are emulated; used only when forced");
  } else if (row.features == 0) {
    reason.add("needs nothing");
  } else {
    reason.add("CPU and operating system support it%s%s", os_why[0] ? "; " : "", os_why);
  }
}

bool usable(const amxk_cpu_report& report, int tier, bool emulated) {
  amxk_tier_status status;
  evaluate(report, tier, emulated, status);
  return status.usable != 0;
}

// Tiers in the order in which they are tried.
void preference(const amxk_cpu_report& report, int (&order)[AMXK_NUM_TIERS]) {
  bool dot_product_first = false;
  for (const DotProductFirst& row : kDotProductFirst) {
    dot_product_first |= std::strcmp(report.vendor, row.vendor) == 0 && report.family >= row.first_family;
  }
  const int chosen[] = {AMXK_TIER_AMXBF16, dot_product_first ? AMXK_TIER_AVX512BF16 : AMXK_TIER_AVX512,
                        dot_product_first ? AMXK_TIER_AVX512 : AMXK_TIER_AVX512BF16, AMXK_TIER_AVX2,
                        AMXK_TIER_PORTABLE};
  std::memcpy(order, chosen, sizeof order);
}

void add_usable(Text& text, const amxk_cpu_report& report, bool emulated) {
  const char* separator = "";
  for (int tier = 0; tier < AMXK_NUM_TIERS; ++tier) {
    if (!usable(report, tier, emulated)) continue;
    text.add("%s%s", separator, kTiers[tier].name);
    separator = ", ";
  }
}

const char* environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && value[0] != '\0' ? value : nullptr;
}

amxk_code emulated_by_environment(bool& emulated, amxk_error* error) {
  const char* value = environment("AMX_KERNELS_EMULATED");
  emulated = value != nullptr && std::strcmp(value, "1") == 0;
  if (value == nullptr || emulated || std::strcmp(value, "0") == 0) return AMXK_OK;
  return fail(error, AMXK_INVALID_ARGUMENT, "AMX_KERNELS_EMULATED is \"%.32s\"; expected 1, 0 or nothing", value);
}

bool is_native(const amxk_probes& probes) { return &probes == &native_probes(); }

void detect_with_outcome(const amxk_probes& probes, amxk_cpu_report& report) {
  detect(probes, report);
  if (is_native(probes)) native_request_outcome(report);
}

// Makes sure of the permission; `report` tells the outcome.
bool ask_for_tile_data(const amxk_probes& probes, amxk_cpu_report& report) {
  if (!permitted(report)) {
    report.request_errno = probes.xcomp_request(probes.context, kXfeatureTileData);
    report.request = report.request_errno == 0 ? AMXK_REQUEST_GRANTED : AMXK_REQUEST_REFUSED;
  }
  return permitted(report);
}

struct Choice {
  int tier = -1;
  bool emulated = false;
  const char* source = "";
};

amxk_code resolve_named(const amxk_probes& probes, amxk_cpu_report& report, const char* name, const char* origin,
                        Choice& choice, amxk_error* error) {
  char list[128];
  const auto list_usable = [&] {  // as the report is by then: a refusal changes it
    Text possible(list, sizeof list);
    add_usable(possible, report, choice.emulated);
  };

  int tier = 0;
  while (tier < AMXK_NUM_TIERS && std::strcmp(kTiers[tier].name, name) != 0) ++tier;
  if (tier == AMXK_NUM_TIERS) {
    list_usable();
    return fail(error, AMXK_INVALID_ARGUMENT,
                "%s is \"%.64s\", which is no tier; expected one of portable, avx2, avx512, avx512bf16, amxbf16 "
                "(usable here: %s)",
                origin, name, list);
  }

  amxk_tier_status status;
  evaluate(report, tier, choice.emulated, status);
  if (status.usable && tier == AMXK_TIER_AMXBF16 && !choice.emulated && !ask_for_tile_data(probes, report)) {
    evaluate(report, tier, choice.emulated, status);
  }
  if (!status.usable) {
    list_usable();
    return fail(error, AMXK_UNSUPPORTED, "%s is \"%s\", which cannot be used: %.256s (usable here: %s)", origin, name,
                status.reason, list);
  }
  choice.tier = tier;
  choice.emulated = choice.emulated && tier == AMXK_TIER_AMXBF16;
  return AMXK_OK;
}

void resolve_best(const amxk_probes& probes, amxk_cpu_report& report, Choice& choice) {
  int order[AMXK_NUM_TIERS];
  preference(report, order);
  for (const int tier : order) {
    if (tier == AMXK_TIER_AMXBF16 && choice.emulated) continue;
    if (!usable(report, tier, false)) continue;
    if (tier == AMXK_TIER_AMXBF16 && !ask_for_tile_data(probes, report)) continue;
    choice.tier = tier;
    choice.emulated = false;
    return;
  }
}

amxk_code resolve(const amxk_probes& probes, const char* argument, bool emulated, Choice& choice, amxk_error* error) {
  bool environment_emulated = false;
  if (const amxk_code code = emulated_by_environment(environment_emulated, error)) return code;
  amxk_cpu_report report;
  detect_with_outcome(probes, report);

  Choice result;
  result.emulated = emulated || environment_emulated;
  const char* forced = environment("AMX_KERNELS_ISA");
  amxk_code code = AMXK_OK;
  if (argument != nullptr && argument[0] != '\0') {
    result.source = "argument";
    code = resolve_named(probes, report, argument, "tier", result, error);
  } else if (forced != nullptr) {
    result.source = "environment";
    code = resolve_named(probes, report, forced, "AMX_KERNELS_ISA", result, error);
  } else {
    result.source = "best permitted";
    resolve_best(probes, report, result);
  }
  if (code == AMXK_OK) choice = result;
  return code;
}

// The choice in use; detail::tier_in_use is its copy for the fast path.
std::mutex choice_mutex;
Choice choice_in_use;

void adopt(const Choice& choice) {
  choice_in_use = choice;
  detail::tier_in_use.store(choice.tier, std::memory_order_relaxed);
}

Choice current_choice() {
  const std::lock_guard<std::mutex> lock(choice_mutex);
  return choice_in_use;
}

const amxk_probes& or_native(const amxk_probes* probes) { return probes != nullptr ? *probes : native_probes(); }

// The report to judge by, and whether its amxbf16 counts as emulated: only this very process can be told so.
struct Subject {
  amxk_cpu_report report;
  bool emulated = false;

  explicit Subject(const amxk_cpu_report* given) {
    if (given != nullptr) {
      report = *given;
      return;
    }
    detect_with_outcome(native_probes(), report);
    emulated_by_environment(emulated, nullptr);
    emulated = emulated || current_choice().emulated;
  }
};

void explain_machine(Text& text, const amxk_cpu_report& report) {
  if (!report.is_x86) {
    text.add("CPU: not an x86-64 processor\n");
    return;
  }
  text.add("CPU: %s (%s, family 0x%x, model 0x%x, stepping %d)\n", report.brand[0] ? report.brand : "unnamed",
           report.vendor, static_cast<unsigned>(report.family), static_cast<unsigned>(report.model), report.stepping);
  text.add("CPU features: ");
  add_features(text, report.features);
  text.add("%s\n", report.features ? "" : "none of those the tiers need");
  if (report.osxsave) {
    text.add("XCR0: 0x%llx: AVX %s, AVX-512 %s, AMX %s\n", static_cast<unsigned long long>(report.xcr0),
             (report.xcr0 & kXcr0Avx) == kXcr0Avx ? "enabled" : "not enabled",
             (report.xcr0 & kXcr0Avx512) == kXcr0Avx512 ? "enabled" : "not enabled",
             (report.xcr0 & kXcr0Amx) == kXcr0Amx ? "enabled" : "not enabled");
  } else {
    text.add("XCR0: not readable, the operating system does not use XSAVE\n");
  }
  if (!(report.features & bit(kAmxTile))) return;
  text.add("AMX tiles: maximum palette %u, %u tiles of %u rows of %u bytes, products of %u x %u bytes\n",
           report.amx_max_palette, report.amx_tiles, report.amx_rows, report.amx_row_bytes, report.amx_tmul_max_k,
           report.amx_tmul_max_n);
  text.add("AMX permission: ");
  if (report.request == AMXK_REQUEST_GRANTED) {
    text.add("requested and granted\n");
  } else if (report.request == AMXK_REQUEST_REFUSED) {
    text.add("requested and refused, %s (%d)\n", errno_name(report.request_errno), report.request_errno);
  } else if (permitted(report)) {
    text.add("granted before this library asked\n");
  } else if (report.xcomp_supported_errno != 0) {
    text.add("not requested, the kernel does not answer: %s (%d)\n", errno_name(report.xcomp_supported_errno),
             report.xcomp_supported_errno);
  } else {
    text.add("not requested, %s by the kernel\n",
             report.xcomp_supported >> kXfeatureTileData & 1 ? "supported" : "not supported");
  }
}

void explain_choice(Text& text, const amxk_cpu_report* given, const amxk_cpu_report& report) {
  if (given != nullptr) {
    text.add("best permitted: %s\n", kTiers[amxk_best_tier(&report)].name);
    return;
  }
  const Choice choice = current_choice();
  const char* forced = environment("AMX_KERNELS_ISA");
  if (choice.tier >= 0) {
    text.add("in use: %s (%s%s)\n", kTiers[choice.tier].name, choice.source, choice.emulated ? ", emulated" : "");
  } else if (forced != nullptr) {
    text.add("in use: none yet; AMX_KERNELS_ISA says \"%.64s\"\n", forced);
  } else {
    text.add("in use: none yet; the best permitted is taken at first use\n");
  }
}

}  // namespace

namespace detail {

std::atomic<int> tier_in_use{-1};

int resolve_first_use(amxk_error* error) noexcept {
  const std::lock_guard<std::mutex> lock(choice_mutex);
  if (choice_in_use.tier < 0) {
    Choice choice;
    if (resolve(native_probes(), nullptr, false, choice, error) != AMXK_OK) return -1;
    adopt(choice);
  }
  return choice_in_use.tier;
}

}  // namespace detail

const char* tier_name(int tier) noexcept { return tier >= 0 && tier < AMXK_NUM_TIERS ? kTiers[tier].name : "none"; }

}  // namespace amxk

using namespace amxk;

extern "C" {

void amxk_detect(const amxk_probes* probes, amxk_cpu_report* report) {
  if (report != nullptr) detect_with_outcome(or_native(probes), *report);
}

amxk_code amxk_tier_info(const amxk_cpu_report* report, int tier, amxk_tier_status* status, amxk_error* error) {
  if (tier < 0 || tier >= AMXK_NUM_TIERS) {
    return fail(error, AMXK_INVALID_ARGUMENT, "tier is %d; expected 0 to %d", tier, AMXK_NUM_TIERS - 1);
  }
  if (status == nullptr) return fail(error, AMXK_INVALID_ARGUMENT, "status is missing (null)");
  const Subject subject(report);
  evaluate(subject.report, tier, subject.emulated, *status);
  return AMXK_OK;
}

int amxk_best_tier(const amxk_cpu_report* report) {
  const Subject subject(report);
  int order[AMXK_NUM_TIERS];
  preference(subject.report, order);
  for (const int tier : order) {
    if (tier == AMXK_TIER_AMXBF16 && subject.emulated) continue;
    if (usable(subject.report, tier, false)) return tier;
  }
  return AMXK_TIER_PORTABLE;
}

amxk_code amxk_resolve_tier(const amxk_probes* probes, const char* name, int emulated, int* tier, amxk_error* error) {
  if (tier == nullptr) return fail(error, AMXK_INVALID_ARGUMENT, "tier is missing (null)");
  Choice choice;
  const amxk_code code = resolve(or_native(probes), name, emulated != 0, choice, error);
  if (code == AMXK_OK) *tier = choice.tier;
  return code;
}

int amxk_current_tier(amxk_error* error) { return current_tier(error); }

amxk_code amxk_set_tier(const char* name, int emulated, amxk_error* error) {
  const std::lock_guard<std::mutex> lock(choice_mutex);
  Choice choice;
  const amxk_code code = resolve(native_probes(), name, emulated != 0, choice, error);
  if (code == AMXK_OK) adopt(choice);
  return code;
}

const char* amxk_tier_source(void) { return current_choice().source; }

int amxk_tier_is_emulated(void) { return current_choice().emulated; }

size_t amxk_explain(const amxk_cpu_report* report, char* buffer, size_t size) {
  Text text(buffer, size);
  const Subject subject(report);
  explain_machine(text, subject.report);
  for (int tier = 0; tier < AMXK_NUM_TIERS; ++tier) {
    amxk_tier_status status;
    evaluate(subject.report, tier, subject.emulated, status);
    text.add("%-10s %s: %s\n", status.name, status.usable ? "usable" : "not usable", status.reason);
  }
  explain_choice(text, report, subject.report);
  return text.length();
}

}  // extern "C"
