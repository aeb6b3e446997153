/* SPDX-License-Identifier: Apache-2.0 */
/* What every checked entry point of the C API returns, and where its message goes. */
#ifndef AMX_KERNELS_STATUS_H
#define AMX_KERNELS_STATUS_H

#if defined(_WIN32)
#define AMXK_API __declspec(dllexport)
#else
#define AMXK_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum amxk_code {
  AMXK_OK = 0,
  AMXK_INVALID_ARGUMENT = 1, /* the caller's mistake: the message names argument, value and expectation */
  AMXK_UNSUPPORTED = 2,      /* a right request that this build, CPU or operating system cannot serve */
  AMXK_INTERNAL = 3          /* a defect of the library */
} amxk_code;

/* Filled only when a function fails. Every function that takes one accepts NULL: the code alone is then returned. */
typedef struct amxk_error {
  int code; /* an amxk_code */
  char message[512];
} amxk_error;

#ifdef __cplusplus
}
#endif

#endif /* AMX_KERNELS_STATUS_H */
