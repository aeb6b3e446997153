# SPDX-License-Identifier: Apache-2.0
"""A process in which the kernel refuses, or kills for, chosen arch_prctl operations: what sandboxes do to AMX."""

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ARCH_GET_XCOMP_SUPP, ARCH_GET_XCOMP_PERM, ARCH_REQ_XCOMP_PERM = 0x1021, 0x1022, 0x1023

_SYS_ARCH_PRCTL = 158  # x86-64
_AUDIT_ARCH_X86_64 = 0xC000003E
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_RET_KILL_PROCESS, _RET_ERRNO, _RET_ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # classic BPF on struct seccomp_data
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARGUMENT0 = 0, 4, 16


def deny(operations: Iterable[int], number: int | None) -> None:
    """From now on these arch_prctl operations fail with errno `number` in this process, or kill it if None."""
    wanted = list(operations)
    action = _RET_KILL_PROCESS if number is None else _RET_ERRNO | number
    allow_at = 5 + len(wanted)
    program = [
        (_LOAD, 0, 0, _OFFSET_ARCH),
        (_JUMP_IF_EQUAL, 0, allow_at - 2, _AUDIT_ARCH_X86_64),
        (_LOAD, 0, 0, _OFFSET_NUMBER),
        (_JUMP_IF_EQUAL, 0, allow_at - 4, _SYS_ARCH_PRCTL),
        (_LOAD, 0, 0, _OFFSET_ARGUMENT0),
        *((_JUMP_IF_EQUAL, len(wanted) - i, 0, operation) for i, operation in enumerate(wanted)),
        (_RETURN, 0, 0, _RET_ALLOW),
        (_RETURN, 0, 0, action),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    filter_ = Program(len(program), ctypes.cast(code, ctypes.c_void_p))
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, None, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS")
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(filter_), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_SECCOMP")


def arch_prctl(operation: int, argument: int) -> int:
    """0 or errno."""
    libc = ctypes.CDLL(None, use_errno=True)
    return 0 if libc.syscall(_SYS_ARCH_PRCTL, operation, ctypes.c_ulong(argument)) == 0 else ctypes.get_errno()


def run(script: str, environment: dict[str, str], timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Runs a script in a fresh interpreter that can import this module, with exactly this environment."""
    path = [str(Path(__file__).parent), *(entry for entry in sys.path if entry)]
    program = f"import sys\nsys.path[:] = {path!r}\n{script}"
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
