# SPDX-License-Identifier: Apache-2.0
"""Carries out one row of ``capi.CALLS`` in a process of its own, which may die. Prints a line before each call."""

from __future__ import annotations

import sys

import capi


def verdict(case: capi.Case, replaced: dict, expected: int) -> str:
    error = capi.Error()
    arguments = {"error": error} if "error" in case.arguments and replaced.get("error", 0) is not None else {}
    code = case.call(**arguments, **replaced)
    message = error.message.decode(errors="replace")
    if code != expected:
        return f"returned {code}, expected {expected}: {message}"
    if expected != capi.OK and (error.code != code or len(message) < 10):
        return f"returned {code} without a message: {error.code} {message!r}"
    return ""


def main(row: str) -> int:
    case = capi.CALLS[row]()
    if case.call() not in (capi.OK, None) and case.function.endswith(("plan_attention", "attention", "bmm")):
        print("the right call fails")
        return 1
    failures = total = 0
    for kind, expected in ((capi.mutations, capi.INVALID), (capi.tolerated, capi.OK)):
        for what, replaced in kind(case):
            print(f"{row}: {what}", flush=True)
            total += 1
            if reason := verdict(case, replaced, expected):
                failures += 1
                print(f"FAILED {row}: {what}: {reason}", flush=True)
    for replaced in capi.HARMLESS.get(case.function, ()):
        print(f"{row}: {replaced}", flush=True)
        total += 1
        case.call(**replaced)
    print(f"{total} calls, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
