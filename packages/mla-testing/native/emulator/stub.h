// SPDX-License-Identifier: Apache-2.0
// Layout of a stub, shared by patch.c, which writes it, and entry.S, which is called from it.
//
//   0  lea -128(%rsp), %rsp       step over the red zone; LEA leaves the flags alone
//   8  call *STUB_ENTRY(%rip)
//  14  lea 128(%rsp), %rsp        done: back behind the site
//  22  jmp site + length
//  27  lea 128(%rsp), %rsp        fault: the program's registers are back, let the SIGILL handler see them
//  35  ud2
//  40  struct amx_site *
//  48  entry
#pragma once

#define STUB_RETURN 14
#define STUB_FAULT 27
#define STUB_UD2 35
#define STUB_SITE 40
#define STUB_ENTRY 48
#define STUB_SIZE 64
