# SPDX-License-Identifier: Apache-2.0
"""Which machine and which software a report comes from."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from mla_testing import limits

__all__ = ["machine", "steal_seconds"]

#: CPU features that decide which kernels run.
_FEATURES = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_fp16")


def _cpuinfo() -> dict[str, str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    first = text.split("\n\n", 1)[0]
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpu_quota() -> float | None:
    """CPUs granted by the control group, None without a limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def steal_seconds() -> float:
    """Seconds, summed over CPUs since boot, that a hypervisor gave to others while this machine wanted to run."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        return int(fields[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


def _huge_pages() -> str | None:
    """When the kernel grants transparent huge pages (always, madvise, never), None if it does not say."""
    try:
        return Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().split("[")[1].split("]")[0]
    except (OSError, IndexError):
        return None


def machine() -> dict[str, Any]:
    """Facts that a measurement depends on, and ``id``: a short hash of those that stay equal between runs."""
    info = _cpuinfo()
    flags = set(info.get("flags", "").split())
    stable = {
        "cpu": info.get("model name", platform.processor() or platform.machine()),
        "vendor": info.get("vendor_id", ""),
        "family": info.get("cpu family", ""),
        "model": info.get("model", ""),
        "stepping": info.get("stepping", ""),
        "features": [name for name in _FEATURES if name in flags],
        "cpus": os.cpu_count(),
        "memory_gib": round(_memory_bytes() / 2**30, 1),
        "virtual": "hypervisor" in flags,
    }
    digest = hashlib.sha256(json.dumps(stable, sort_keys=True).encode()).hexdigest()[:12]
    return {
        "id": digest,
        **stable,
        "cpus_usable": len(limits.CPUS),
        "cpu_quota": _cpu_quota(),
        "kernel": platform.release(),
        "huge_pages": _huge_pages(),
        "python": sys.version.split()[0],
        "load_average": list(os.getloadavg()),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
