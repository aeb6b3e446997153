// SPDX-License-Identifier: Apache-2.0
// Reporting an error across the C boundary: no exception, no output, no allocation.
#pragma once

#include <cstdarg>
#include <cstdio>

#include "amx_kernels/status.h"

namespace amxk {

// Writes the message and returns the code, so a check reads `return fail(error, AMXK_INVALID_ARGUMENT, "...", ...)`.
// Internal linkage on purpose: an inline function would be a weak symbol in every object that includes this file.
#if defined(__GNUC__)
__attribute__((format(printf, 3, 4), unused))
#endif
static amxk_code
fail(amxk_error* error, amxk_code code, const char* format, ...) noexcept {
  if (error != nullptr) {
    error->code = code;
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(error->message, sizeof error->message, format, arguments);
    va_end(arguments);
  }
  return code;
}

}  // namespace amxk
