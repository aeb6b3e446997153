# SPDX-License-Identifier: Apache-2.0
"""Tier selection for real: fresh processes, the environment, threads, and sandboxes that refuse the permission.

These run on any Linux host. Where the CPU has AMX they also show that the refusal is met in practice.
"""

from __future__ import annotations

import ast
import errno
import os
import platform
import signal
import subprocess

import isa_sandbox
import pytest

from amx_kernels import isa

# What the first call of a user may be: nothing of amx_kernels was touched before. 64 products of 1 x 1.
KERNEL = """
import numpy as np
import amx_kernels

def run_kernel():
    ones = lambda rows: np.full((1, rows, 64), 0x3F80, np.uint16)
    out = np.zeros((1, 20, 32), np.uint16)
    amx_kernels.bmm_cpu(out, ones(20), amx_kernels.convert_weight_packed(ones(32)), True)
    assert (out == 0x4280).all(), out
"""

ALL_OPERATIONS = [isa_sandbox.ARCH_GET_XCOMP_SUPP, isa_sandbox.ARCH_GET_XCOMP_PERM, isa_sandbox.ARCH_REQ_XCOMP_PERM]

on_x86_linux = pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() != "x86_64", reason="arch_prctl exists on x86-64 Linux only"
)


def run(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The script in a fresh interpreter whose environment says nothing of tiers but `variables`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AMX_", "LD_PRELOAD"))}
    return isa_sandbox.run(script, {**kept, **variables})


def succeed(script: str, **variables: str) -> str:
    done = run(script, **variables)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout.strip()


def native_amx() -> bool:
    """Whether a fresh process gets amxbf16 when nothing is refused."""
    return succeed("from amx_kernels import isa\nprint(isa.best())") == "amxbf16"


def deny(operations: list[int], number: int | None) -> str:
    return f"import isa_sandbox\nisa_sandbox.deny({operations}, {number})\n"


def test_kernel_is_the_first_thing_a_process_does() -> None:
    assert succeed(f"{KERNEL}\nrun_kernel()\nfrom amx_kernels import isa\nprint(isa.current())") in isa.TIERS


@pytest.mark.parametrize("tier", isa.TIERS)
def test_environment_forces_the_tier(tier: str) -> None:
    # Asked in a fresh process too: where this one runs AMX under the emulator, others are refused the permission. The
    # reason is there once it was requested.
    refused = ast.literal_eval(
        succeed(f"""
from amx_kernels import isa
try:
    isa.resolve("{tier}")
except RuntimeError:
    pass
print({{row.name: row.reason for row in isa.tiers(isa.detect()) if not row.usable}})
""")
    )
    done = run(
        f"{KERNEL}\nrun_kernel()\nfrom amx_kernels import isa\nprint(isa.current(), isa.source())", AMX_KERNELS_ISA=tier
    )
    if tier in refused:
        assert done.returncode == 1
        assert f'AMX_KERNELS_ISA is "{tier}", which cannot be used: {refused[tier]}' in done.stderr
        assert tier not in done.stderr[done.stderr.index("(usable here: ") :]
    else:
        assert (done.returncode, done.stdout.strip()) == (0, f"{tier} environment"), done.stderr


@pytest.mark.parametrize("name", ["fastest", "AMXBF16"])
def test_unknown_tier_in_the_environment_fails_the_call_not_the_import(name: str) -> None:
    script = f"{KERNEL}\nprint('imported', flush=True)\nrun_kernel()"
    done = run(script, AMX_KERNELS_ISA=name)
    assert (done.returncode, done.stdout.strip()) == (1, "imported"), done.stderr
    assert f'AMX_KERNELS_ISA is "{name}", which is no tier; expected one of portable' in done.stderr


def test_environment_may_be_corrected() -> None:
    """A bad variable is not remembered: setting a tier, or the variable, mends the process."""
    succeed(
        f"""{KERNEL}
import os
from amx_kernels import isa
try:
    isa.current()
    raise SystemExit("accepted")
except ValueError:
    pass
os.environ["AMX_KERNELS_ISA"] = "portable"
assert isa.current() == "portable"
run_kernel()
""",
        AMX_KERNELS_ISA="fastest",
    )


@on_x86_linux
@pytest.mark.parametrize("number", [errno.EPERM, errno.EINVAL, errno.ENOSYS], ids=errno.errorcode.get)
@pytest.mark.parametrize("operations", [ALL_OPERATIONS, ALL_OPERATIONS[2:]], ids=["all", "request"])
def test_sandbox_refuses_permission(operations: list[int], number: int) -> None:
    """The kernels run on another tier, and forcing amxbf16 is an error with the errno, not SIGILL."""
    script = f"""
{deny(operations, number)}
assert isa_sandbox.arch_prctl(0x1023, 18) == {number}, "the sandbox does not work"
{KERNEL}
run_kernel()
from amx_kernels import isa
assert isa.current() != "amxbf16"
try:
    isa.set("amxbf16")
    raise SystemExit("amxbf16 accepted")
except RuntimeError as error:
    print(error)
run_kernel()
print(isa.explain())
"""
    text = succeed(script)
    if native_amx():
        asked = "ARCH_REQ_XCOMP_PERM" if operations == ALL_OPERATIONS[2:] else "ARCH_GET_XCOMP_SUPP"
        gave = f"arch_prctl({asked}) gave {errno.errorcode[number]} ({number})"
        assert gave in text.splitlines()[0]
        assert gave in next(line for line in text.splitlines() if line.startswith("amxbf16 "))


@on_x86_linux
@pytest.mark.parametrize("by", ["argument", "environment"])
def test_emulated_process_never_requests(by: str) -> None:
    """On a CPU with AMX the request would make AMX instructions run natively and the emulator see none."""
    base = {row.name: row for row in isa.tiers(isa.detect())}["avx512bf16"]
    forced = "True" if base.usable else "False"
    kill_on_request = deny(ALL_OPERATIONS[2:], None)
    script = f"""
{kill_on_request}
from amx_kernels import isa
if {by == "environment"}:
    assert isa.current() != "amxbf16"
if {forced}:
    isa.set("amxbf16", emulated={by == "argument"})
    assert isa.current() == "amxbf16" and isa.is_emulated()
isa.tiers(), isa.explain(), isa.detect(), isa.best()
print(isa.detect().request)
"""
    variables = {"AMX_KERNELS_EMULATED": "1"} if by == "environment" else {}
    assert succeed(script, **variables) == "not made"

    control = run(f"{kill_on_request}\nisa_sandbox.arch_prctl(0x1023, 18)")
    assert control.returncode == -signal.SIGSYS, "the sandbox does not notice a request"


@on_x86_linux
def test_other_tiers_never_request() -> None:
    kill_on_request = deny(ALL_OPERATIONS[2:], None)
    succeed(f"{kill_on_request}\n{KERNEL}\nrun_kernel()", AMX_KERNELS_ISA="portable")


def test_threads_from_before_and_after_the_permission() -> None:
    """The permission holds for threads that already ran; each sets up its own tiles."""
    succeed(f"""{KERNEL}
import queue, threading
from amx_kernels import isa

work, failures = queue.Queue(), []

def serve():
    while (item := work.get()) is not None:
        try:
            run_kernel()
        except BaseException as error:
            failures.append(error)
        item.set()

def use(thread_count):
    threads = [threading.Thread(target=serve) for _ in range(thread_count)]
    for thread in threads:
        thread.start()
    return threads

before = use(3)  # started, and waiting, before the tier is chosen
isa.current()
after = use(3)
events = [threading.Event() for _ in range(60)]
for event in events:
    work.put(event)
for event in events:
    assert event.wait(60)
for _ in before + after:
    work.put(None)
for thread in before + after:
    thread.join()
assert not failures, failures
""")


def test_first_use_from_many_threads() -> None:
    """All threads see the same tier, also while they race for the first use."""
    text = succeed("""
import threading
from amx_kernels import isa
barrier, seen = threading.Barrier(16), []

def race():
    barrier.wait()
    seen.append(isa.current())

threads = [threading.Thread(target=race) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(seen), *set(seen))
""")
    count, *names = text.split()
    assert count == "16"
    assert len(names) == 1


def test_forked_child_keeps_the_choice() -> None:
    succeed(f"""{KERNEL}
import os
from amx_kernels import isa
run_kernel()
pid = os.fork()
if pid == 0:
    run_kernel()
    os._exit(0 if isa.source() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
""")


def test_isa_needs_neither_numpy_nor_the_extension_module() -> None:
    succeed("""
import sys
sys.modules.update({"numpy": None, "torch": None, "amx_kernels._core": None})
import amx_kernels
assert amx_kernels.isa.current() in amx_kernels.isa.TIERS
try:
    amx_kernels.bmm_cpu
    raise SystemExit("imported without NumPy")
except ImportError:
    pass
try:
    amx_kernels.no_such_name
    raise SystemExit("found")
except AttributeError as error:
    assert "no_such_name" in str(error)
""")
