# SPDX-License-Identifier: Apache-2.0
"""The doctor prints whatever is broken, reads limits right, and its exit status says whether the kernels are usable."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from amx_kernels import doctor, isa

PACKAGE = Path(doctor.__file__).parent


# Where torch is beside the point it is not imported: that takes seconds each time.
WITHOUT_TORCH = """
import sys
from amx_kernels import doctor
doctor.DISTRIBUTIONS = tuple(name for name in doctor.DISTRIBUTIONS if name != "torch")
sys.exit(doctor.main(sys.argv[1:]))
"""


def call(
    package_parent: Path, *arguments: str, torch: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The doctor of the package at `package_parent`; with torch as `python -m amx_kernels doctor`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AMX_", "LD_PRELOAD"))}
    environment = {**kept, "PYTHONPATH": str(package_parent), **variables}
    program = ["-m", "amx_kernels", "doctor"] if torch else ["-c", WITHOUT_TORCH]
    return subprocess.run(
        [sys.executable, *program, *arguments],
        env=environment,
        cwd=package_parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package's Python files in a folder of their own, its shared objects left out."""
    target = tmp_path / "amx_kernels"
    shutil.copytree(PACKAGE, target, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return target


def object_for(architecture: str) -> bytes:
    """An ELF header that the loader of another architecture refuses."""
    machine = {"aarch64": 183, "x86_64": 62}[architecture]
    return b"\x7fELF\x02\x01\x01" + bytes(9) + (3).to_bytes(2, "little") + machine.to_bytes(2, "little") + bytes(44)


def test_on_this_machine_as_text_and_json() -> None:
    text = call(PACKAGE.parent, torch=True)
    assert text.returncode == 0, text.stdout + text.stderr
    for section in ("machine", "limits", "instruction sets", "threads", "versions", "vLLM", "environment"):
        assert f"\n{section}\n" in f"\n{text.stdout}"
    for tier in isa.TIERS:
        assert f" {tier} " in text.stdout
    assert text.stdout.rstrip().endswith("usable: yes")

    as_json = call(PACKAGE.parent, "--json", torch=True)
    findings = json.loads(as_json.stdout)
    assert (as_json.returncode, findings["usable"], findings["problems"]) == (0, True, [])
    assert [tier["name"] for tier in findings["isa"]["tiers"]] == list(isa.TIERS)
    assert findings["isa"]["current"] in isa.TIERS
    assert findings["isa"]["library"] == str(isa.LIBRARY)
    assert findings["extension"]["self_test"] == f"right on {findings['isa']['current']}"
    assert findings["limits"]["cpus_usable"] >= 1
    assert findings["machine"]["executable"] == sys.executable
    if findings["versions"]["torch"]:
        assert findings["torch"]["threads"] >= 1
        assert findings["torch"]["loaded"], "torch's OpenMP library is in /proc/self/maps"


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_library_missing(copy: Path, as_json: bool) -> None:
    done = call(copy.parent, *["--json"][: int(as_json)], torch=True)
    assert done.returncode == 1
    assert f"{copy / 'libamx_kernels.so'} is missing" in done.stdout
    if as_json:
        assert json.loads(done.stdout)["usable"] is False
    else:
        assert "CPU flags" in done.stdout
        assert done.stdout.rstrip().endswith("usable: no")


@pytest.mark.parametrize(
    ("content", "part"),
    [(object_for("aarch64"), "cannot be loaded"), (b"", "cannot be loaded"), (b"not an object", "cannot be loaded")],
    ids=["aarch64" if os.uname().machine != "aarch64" else "x86_64", "empty", "garbage"],
)
def test_library_of_another_kind(copy: Path, content: bytes, part: str) -> None:
    if os.uname().machine == "aarch64" and content.startswith(b"\x7fELF"):
        content = object_for("x86_64")
    (copy / "libamx_kernels.so").write_bytes(content)
    done = call(copy.parent)
    assert done.returncode == 1
    assert part in done.stdout


def build(source: str, target: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build a broken library with")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", target, "-xc", "-"], input=source, text=True, check=True)


def test_library_that_kills_the_process(copy: Path) -> None:
    """As one compiled for a newer CPU would; the child dies, the doctor prints."""
    build("__attribute__((constructor)) static void start(void) { __builtin_trap(); }", copy / "libamx_kernels.so")
    done = call(copy.parent)
    assert done.returncode == 1
    assert "kernels: killed by SIG" in done.stdout


def test_library_of_another_version(copy: Path) -> None:
    build("int amxk_something_else(void) { return 0; }", copy / "libamx_kernels.so")
    done = call(copy.parent)
    assert done.returncode == 1
    assert "is of another version than this package" in done.stdout


def test_extension_module_missing(copy: Path) -> None:
    shutil.copy(isa.LIBRARY, copy)
    done = call(copy.parent)
    assert done.returncode == 1
    assert "extension module: ImportError" in done.stdout
    assert "portable" in done.stdout


def test_kernels_that_compute_wrongly_are_a_problem(copy: Path) -> None:
    (copy / "ops.py").write_text("convert_weight_packed = bmm_cpu = lambda *arguments: None\n")
    (copy / "_core.py").write_text("")
    shutil.copy(isa.LIBRARY, copy)
    done = call(copy.parent)
    assert done.returncode == 1
    assert "extension module: ArithmeticError: a product of ones is wrong on tier" in done.stdout


def test_impossible_tier_is_a_problem() -> None:
    done = call(PACKAGE.parent, "--json", AMX_KERNELS_ISA="fastest")
    findings = json.loads(done.stdout)
    assert done.returncode == 1
    assert findings["isa"]["current"] is None
    assert 'AMX_KERNELS_ISA is "fastest"' in findings["problems"][0]
    assert [tier["name"] for tier in findings["isa"]["tiers"]] == list(isa.TIERS)


def test_output_that_cannot_encode() -> None:
    done = call(PACKAGE.parent, PYTHONIOENCODING="ascii", VLLM_PLUGINS="größer")
    assert done.returncode == 0, done.stderr
    assert "gr\\xf6\\xdfer" in done.stdout


def test_usage() -> None:
    command = [sys.executable, "-m", "amx_kernels"]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    for arguments, status in (([], 2), (["cure"], 2), (["--help"], 0)):
        done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == status
        assert "usage: python -m amx_kernels doctor [--json]" in done.stdout + done.stderr


def test_a_section_that_raises_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ZeroDivisionError("by intent")

    for name in ("machine", "environment", "limits", "versions", "plugins"):
        with monkeypatch.context() as patch:
            patch.setattr(doctor, name, broken)
            patch.setattr(doctor, "ask_child", lambda question: {"error": f"{question} not asked"})
            findings = doctor.collect()
            text = doctor.render(findings)
        assert f"{name}: ZeroDivisionError: by intent" in text
        assert "kernels: isa not asked" in text


# -- limits ------------------------------------------------------------------------------------------------------------


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


V2 = "sys/fs/cgroup"
V1_UNLIMITED = "9223372036854771712"

# files, what limits() must find of them
CGROUPS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "v2-own-group": (
        {
            "proc/self/cgroup": "0::/pod/box",
            f"{V2}/cgroup.controllers": "cpu cpuset memory",
            f"{V2}/pod/box/cpu.max": "150000 100000",
            f"{V2}/pod/box/memory.max": "1073741824",
            f"{V2}/pod/box/cpuset.cpus.effective": "0-2,5",
        },
        {"cgroup": 2, "cpu_quota": 1.5, "cpuset": [0, 1, 2, 5], "memory_limit_bytes": 1 << 30},
    ),
    "v2-tightest-ancestor": (
        {
            "proc/self/cgroup": "0::/pod/box",
            f"{V2}/cgroup.controllers": "cpu cpuset memory",
            f"{V2}/pod/box/cpu.max": "max 100000",
            f"{V2}/pod/box/memory.max": "max",
            f"{V2}/pod/cpu.max": "400000 100000",
            f"{V2}/pod/memory.max": "2147483648",
            f"{V2}/cpuset.cpus.effective": "0-7",
        },
        {"cgroup": 2, "cpu_quota": 4.0, "cpuset": list(range(8)), "memory_limit_bytes": 2 << 30},
    ),
    "v2-namespace": (
        {
            "proc/self/cgroup": "0::/",
            f"{V2}/cgroup.controllers": "cpu memory",
            f"{V2}/cpu.max": "50000 100000",
            f"{V2}/memory.max": "max",
        },
        {"cgroup": 2, "cpu_quota": 0.5, "cpuset": None, "memory_limit_bytes": None},
    ),
    "v2-path-outside-the-mount": (
        {
            "proc/self/cgroup": "0::/../../host/pod",
            f"{V2}/cgroup.controllers": "cpu memory",
            f"{V2}/cpu.max": "200000 100000",
        },
        {"cgroup": 2, "cpu_quota": 2.0, "cpuset": None, "memory_limit_bytes": None},
    ),
    "v1": (
        {
            "proc/self/cgroup": "5:memory:/docker/a\n4:cpu,cpuacct:/docker/a\n3:cpuset:/docker/a\n1:name=systemd:/x",
            f"{V2}/cpu,cpuacct/cpu.cfs_quota_us": "300000",
            f"{V2}/cpu,cpuacct/cpu.cfs_period_us": "100000",
            f"{V2}/memory/memory.limit_in_bytes": "161061273600",
            f"{V2}/cpuset/cpuset.cpus": "4-7",
        },
        {"cgroup": 1, "cpu_quota": 3.0, "cpuset": [4, 5, 6, 7], "memory_limit_bytes": 150 << 30},
    ),
    "v1-unlimited": (
        {
            "proc/self/cgroup": "5:memory:/a\n4:cpu:/a",
            f"{V2}/cpu/a/cpu.cfs_quota_us": "-1",
            f"{V2}/cpu/a/cpu.cfs_period_us": "100000",
            f"{V2}/memory/a/memory.limit_in_bytes": V1_UNLIMITED,
        },
        {"cgroup": 1, "cpu_quota": None, "cpuset": None, "memory_limit_bytes": None},
    ),
    "none": ({}, {"cgroup": None, "cpu_quota": None, "cpuset": None, "memory_limit_bytes": None}),
}


@pytest.mark.parametrize(("files", "expected"), CGROUPS.values(), ids=CGROUPS.keys())
def test_cgroup(files: dict[str, str], expected: dict[str, Any], tmp_path: Path) -> None:
    found = doctor.limits(tree(tmp_path, files))
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("affinity", "cpuset", "quota", "usable"),
    [
        (range(64), "0-63", "max 100000", 64),
        (range(32, 64), "0-63", "max 100000", 32),  # pinned to the second socket: CPU 0 is not ours
        (range(64), "8-11", "max 100000", 4),
        (range(64), "0-63", "250000 100000", 2),
        (range(64), "0-63", "50000 100000", 1),
        ([7], "0-63", "1600000 100000", 1),
    ],
)
def test_usable_cpus(
    affinity: range, cpuset: str, quota: str, usable: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(affinity))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    files = {
        "proc/self/cgroup": "0::/",
        f"{V2}/cgroup.controllers": "cpu cpuset",
        f"{V2}/cpu.max": quota,
        f"{V2}/cpuset.cpus.effective": cpuset,
    }
    found = doctor.limits(tree(tmp_path, files))
    assert found["cpus_usable"] == usable
    assert found["affinity"] == list(affinity)


def test_affinity_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    found = doctor.limits(tmp_path)
    assert (found["affinity"], found["cpus_usable"]) == (None, 6)


# -- threads and plugins -----------------------------------------------------------------------------------------------

MAPS = """\
7f00-7f10 r-xp 00000000 08:01 11 /opt/torch/lib/libgomp-a34b3233.so.1
7f10-7f20 rw-p 00000000 08:01 11 /opt/torch/lib/libgomp-a34b3233.so.1
7f20-7f30 rw-p 00000000 00:00 0 [heap]
7f30-7f40 r-xp 00000000 08:01 12 /opt/with blank/libiomp5.so
7f40-7f50 r-xp 00000000 08:01 13 /usr/lib/libomptarget.so
7f50-7f60 r-xp 00000000 08:01 14 /usr/lib/libtcmalloc_minimal.so.4
7f60-7f70 r-xp 00000000 08:01 15 /usr/lib/libc.so.6
"""


def test_thread_libraries_loaded() -> None:
    assert doctor.thread_libraries_loaded(MAPS) == [
        "/opt/torch/lib/libgomp-a34b3233.so.1",
        "/opt/with blank/libiomp5.so",
        "/usr/lib/libtcmalloc_minimal.so.4",
    ]


def findings_of(**changes: Any) -> dict[str, Any]:
    healthy: dict[str, Any] = {
        "machine": {},
        "environment": {},
        "limits": {"cpus_usable": 4},
        "versions": {},
        "plugins": {},
        "isa": {"current": "avx2"},
        "extension": {},
        "torch": {"threads": 4, "loaded": ["/a/libgomp.so.1"], "installed": [], "pool": "OpenMP", "shim": "x"},
        "platform": {"chosen": "built in"},
    }
    return {**healthy, **changes}


def test_diagnosis_of_a_healthy_machine() -> None:
    assert doctor.diagnose(findings_of()) == ([], [])


@pytest.mark.parametrize(
    ("changes", "problem", "warning"),
    [
        ({"isa": {"error": "no tier"}}, "kernels: no tier", ""),
        ({"extension": {"error": "gone"}}, "extension module: gone", ""),
        ({"torch": {"error": "killed by SIGILL"}}, "torch: killed by SIGILL", ""),
        ({"torch": {"threads": 1, "shim_error": "wrong version"}}, "torch ops: wrong version", ""),
        ({"torch": None, "platform": None}, "", ""),
        ({"torch": {"threads": 5}}, "", "torch has 5 threads for 4 usable CPUs"),
        (
            {"torch": {"threads": 1, "loaded": ["/a/libgomp.so.1", "/b/libiomp5.so", "/c/libtcmalloc.so.4"]}},
            "",
            "more than one OpenMP library is loaded: /a/libgomp.so.1, /b/libiomp5.so",
        ),
        ({"platform": {"errors": {"amx": "ImportError: x"}}}, "", "vLLM platform plugin amx: ImportError: x"),
        ({"limits": {"error": "unreadable"}}, "", "limits: unreadable"),
    ],
)
def test_diagnosis(changes: dict[str, Any], problem: str, warning: str) -> None:
    problems, warnings = doctor.diagnose(findings_of(**changes))
    assert [text.startswith(problem) for text in problems] == [True] * bool(problem)
    assert [text.startswith(warning) for text in warnings] == [True] * bool(warning)


def write_plugin(site: Path, name: str, group: str, body: str) -> None:
    """A distribution with one entry point in one module."""
    (site / f"{name}.py").write_text(f"def register():\n    {body}\n")
    metadata = site / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{name} = {name}:register\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where distributions are found."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(entry for entry in sys.path if "-packages" not in entry)])
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    return tmp_path


def test_platform_chosen_as_vllm_does(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = "vllm.platform_plugins"
    assert doctor._child_platform() == {"answers": {}, "errors": {}, "chosen": "built in"}
    write_plugin(site, "doctor_declines", group, "return None")
    write_plugin(site, "doctor_raises", group, "raise OSError('no library')")
    assert doctor._child_platform()["chosen"] == "built in"
    assert doctor._child_platform()["errors"] == {"doctor_raises": "OSError: no library"}

    write_plugin(site, "doctor_one", group, "return 'one.Platform'")
    assert doctor._child_platform()["chosen"] == "one.Platform"
    write_plugin(site, "doctor_two", group, "return 'two.Platform'")
    assert "refuses more than one" in doctor._child_platform()["chosen"]

    monkeypatch.setenv("VLLM_PLUGINS", "doctor_two")
    assert doctor._child_platform()["chosen"] == "two.Platform"
    allowed = {entry["name"]: entry["allowed"] for entry in doctor.plugins()[group]}
    assert allowed["doctor_two"] == "yes"
    assert allowed["doctor_one"] == "no (VLLM_PLUGINS)"


def test_child_that_prints_and_child_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_CHILD_PROGRAM", "print('noise'); print('{\"answer\": 1}')")
    assert doctor.ask_child("isa") == {"answer": 1}
    monkeypatch.setattr(doctor, "_CHILD_PROGRAM", "print('noise')")
    assert "unreadable answer" in doctor.ask_child("isa")["error"]
    monkeypatch.setattr(doctor, "_CHILD_PROGRAM", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "CHILD_TIMEOUT_S", 0.5)
    assert doctor.ask_child("isa") == {"error": "no answer within 0.5 s"}
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    assert "cannot start a child process" in doctor.ask_child("isa")["error"]


def test_cpu_lists() -> None:
    assert doctor.parse_cpu_list("0-2,5, 7-8") == [0, 1, 2, 5, 7, 8]
    assert doctor.parse_cpu_list("") == []
    assert doctor._cpu_list([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
