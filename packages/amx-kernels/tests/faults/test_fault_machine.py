# SPDX-License-Identifier: Apache-2.0
"""Odd machines and installations: what tests/test_isa*.py does not already answer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import capi
import pytest

from amx_kernels import isa

fault = pytest.mark.fault


def in_child(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = ":".join([os.path.dirname(__file__), *(p for p in sys.path if p)])
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False,
        env={**capi.child_environment(), "PYTHONPATH": path, **environment},
    )  # fmt: skip


@fault(72, "https://github.com/ollama/ollama/issues/17006")
@fault(74, "https://github.com/sgl-project/sglang/issues/11044")
def test_with_amx_switched_off_the_next_best_vectors_are_used() -> None:
    """AMX_KERNELS_ISA names any usable tier, and the ops then run on it, without ever asking for AMX."""
    script = """
from fault_support import attended
from mla_testing.cases import AttentionCase
attended(AttentionCase(16, (70, 300)))
from amx_kernels import isa
print(isa.current(), isa.detect().request)
"""
    for tier in isa.tiers():
        if not tier.usable or tier.name == "amxbf16":
            continue
        child = in_child(script, AMX_KERNELS_ISA=tier.name)
        assert child.stdout.split() == [tier.name, "not", "made"], child.stderr


@fault(67, "https://github.com/kvcache-ai/ktransformers/issues/320")
@fault(77, "https://github.com/pytorch/pytorch/issues/99509")
def test_a_kernel_as_the_very_first_thing_a_process_does_twice() -> None:
    """Permission is asked for where it is needed: two products and an attention in a fresh process, then in threads."""
    script = """
import threading
from fault_support import attended
from mla_testing.cases import AttentionCase, BmmCase
import amx_kernels
def work():
    for _ in range(2):
        data = BmmCase(2, 17, 48, 64).build()
        amx_kernels.bmm_cpu(data.out, data.mat1, data.mat2, False)
        data.check()
    attended(AttentionCase(16, (70, 300)))
work()
threads = [threading.Thread(target=work) for _ in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
print("done")
"""
    child = in_child(script)
    assert child.stdout.strip() == "done", f"{child.returncode}: {child.stderr[-2000:]}"


#: Sockets raise, as in a container without network; loopback and name lookup included.
_NO_NETWORK = """
import socket
def refuse(*a, **k):
    raise AssertionError("network was used")
class Blocked(socket.socket):
    connect = connect_ex = bind = sendto = refuse
socket.socket, socket.create_connection, socket.getaddrinfo = Blocked, refuse, refuse
import urllib.request, http.client
http.client.HTTPConnection.connect = refuse
"""


def test_no_network_at_import_or_run_time() -> None:
    script = (
        _NO_NETWORK
        + """
import amx_kernels, amx_kernels.doctor
from fault_support import attended
from mla_testing.cases import AttentionCase
attended(AttentionCase(4, (30,)))
try:
    import amx_kernels.torch
except ImportError as error:
    assert "torch" in str(error)
print("done")
"""
    )
    child = in_child(script)
    assert child.stdout.strip() == "done", child.stderr[-2000:]


def test_sources_name_no_host_and_open_no_connection() -> None:
    source = Path(isa.__file__).parent
    for path in source.rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"\b(urllib|requests|http\.client|socket)\b", text), path


#: What a wheel may hold, by distribution; everything else is a surprise.
ALLOWED = {
    "amx_kernels": r"amx_kernels/(\w+\.py|py\.typed|(libamx_kernels|_torch|_core\.[\w-]+)\.so"
    r"|include/amx_kernels/\w+\.h)",
    "amx_mla_backend": r"amx_mla_backend/(\w+\.py|py\.typed)",
    "mla_testing": r"mla_testing/(\w+/)*(\w+\.py|py\.typed|\w+\.so|[\w.-]+\.(txt|json|md))",
    "vllm_mla_patches": r"vllm_mla_patches/(\w+\.py|py\.typed|patches/(ledger\.toml|[\d.]+/(series|[\w-]+\.patch)))",
}
METADATA = r"\w+-[\d.]+\.dist-info/(METADATA|WHEEL|RECORD|entry_points\.txt|top_level\.txt|licenses/[\w.]+)"


def unexpected(wheel: Path) -> list[str]:
    """Files of the wheel that its distribution should not ship."""
    allowed = ALLOWED[wheel.name.split("-")[0]]
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    return [n for n in names if not n.endswith("/") and not re.fullmatch(f"{allowed}|{METADATA}", n)]


@pytest.mark.skipif(not os.environ.get("WHEEL_DIR"), reason="WHEEL_DIR names no folder of built wheels (nox sets it)")
def test_wheels_hold_only_what_they_should() -> None:
    wheels = sorted(Path(os.environ["WHEEL_DIR"]).glob("*.whl"))
    assert wheels, f"no wheel in {os.environ['WHEEL_DIR']}"
    surprises = {w.name: unexpected(w) for w in wheels if w.name.split("-")[0] in ALLOWED}
    assert not any(surprises.values()), surprises
    kernels = [w for w in wheels if w.name.startswith("amx_kernels-")]
    for wheel in kernels:
        with zipfile.ZipFile(wheel) as archive:
            assert any(n.endswith("libamx_kernels.so") for n in archive.namelist())
            metadata = next(n for n in archive.namelist() if n.endswith("METADATA"))
            needs = re.findall(r"^Requires-Dist: (.*)$", archive.read(metadata).decode(), re.MULTILINE)
            assert not [n for n in needs if n.startswith("torch") and "extra ==" not in n], "kernels work without torch"


@pytest.mark.parametrize(
    "surprise", ["amx_kernels/build.log", "tests/test_x.py", "amx_kernels/csrc/x.cpp", "amx_kernels/.env", "setup.py"]
)
def test_a_surprise_in_a_wheel_is_noticed(tmp_path: Path, surprise: str) -> None:
    wheel = tmp_path / "amx_kernels-0.1.0-cp311-cp311-linux_x86_64.whl"
    fine = ("amx_kernels/isa.py", "amx_kernels/libamx_kernels.so", "amx_kernels-0.1.0.dist-info/METADATA")
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (*fine, surprise):
            archive.writestr(name, "")
    assert unexpected(wheel) == [surprise]
