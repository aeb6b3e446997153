# SPDX-License-Identifier: Apache-2.0
"""Broken installations: vLLM starts as if this package were not there, one line says why, and doctor names it.

Each case is a folder like site-packages (entry points, modules) in front of the real ones, and a fresh process that
does what vLLM does at start: choose a platform, load general plugins, check a configuration.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import amx_kernels
import amx_mla_backend

fault = pytest.mark.fault

KERNELS, BACKEND = (Path(package.__file__).parent for package in (amx_kernels, amx_mla_backend))

#: What vLLM does at start, as far as plugins take part in it. Prints one JSON object as its last line.
START = """
import json, logging, sys, types
records = []
class Keep(logging.Handler):
    def emit(self, record):
        raised = f": {record.exc_info[1]!r}" if record.exc_info else ""
        records.append(record.getMessage() + raised)
from vllm.logger import init_logger
init_logger("vllm.seams")
logging.getLogger("vllm").addHandler(Keep())
logging.getLogger("vllm").setLevel(logging.INFO)  # as the command line does
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.platforms.cpu import CpuPlatform
import vllm.config
vllm.config.VllmConfig()
serves = reason = None
if hasattr(current_platform, "get_attn_backend_cls") and "amx_mla_backend.kernels" in sys.modules:
    from amx_mla_backend import kernels
    reason = kernels.unavailable_reason()
print(json.dumps({
    "platform": type(current_platform).__name__,
    "is_cpu": isinstance(current_platform, CpuPlatform),
    "ours": type(current_platform).__module__.startswith("amx_mla_backend"),
    "amx_mla": AttentionBackendEnum.AMX_MLA.get_path(),
    "unavailable": reason,
    "lines": [r for r in records if "amx" in r.lower() or "rival" in r.lower()],
}))
"""


@dataclass
class Site:
    """A folder that stands before the real packages on the path."""

    root: Path

    def entry_points(self, distribution: str, platform: str, general: str | None = None) -> None:
        info = self.root / f"{distribution}-0.1.0.dist-info"
        info.mkdir(parents=True)
        name = distribution.replace("_mla_backend", "_mla")
        text = f"[vllm.platform_plugins]\n{name} = {platform}\n"
        if general:
            text += f"\n[vllm.general_plugins]\n{name} = {general}\n"
        (info / "entry_points.txt").write_text(text)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.1.0\n")

    def plugin(self) -> Site:
        """Our two entry points, as pip would have installed them."""
        self.entry_points(
            "amx_mla_backend",
            "amx_mla_backend.register:platform_plugin",
            "amx_mla_backend.register:general_plugin",
        )
        return self

    def package(self, source: Path) -> Path:
        """A copy of a package that may be damaged."""
        return Path(shutil.copytree(source, self.root / source.name, ignore=shutil.ignore_patterns("__pycache__")))

    def environment(self, **extra: str) -> dict[str, str]:
        path = os.pathsep.join([str(self.root), *(p for p in sys.path if p)])
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "AMX_KERNELS_"))}
        return {**keep, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "INFO", **extra}

    def start(self, prelude: str = "", **extra: str) -> dict[str, Any]:
        child = subprocess.run(
            [sys.executable, "-c", prelude + START], capture_output=True, text=True, timeout=300, check=False,
            env=self.environment(**extra),
        )  # fmt: skip
        assert child.returncode == 0, child.stderr[-3000:]
        return {**json.loads(child.stdout.splitlines()[-1]), "log": child.stdout + child.stderr}

    def doctor(self, **extra: str) -> tuple[int, dict[str, Any]]:
        child = subprocess.run(
            [sys.executable, "-m", "amx_kernels", "doctor", "--json"], capture_output=True, text=True, timeout=300,
            check=False, env=self.environment(**extra),
        )  # fmt: skip
        return child.returncode, json.loads(child.stdout)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def complaints(findings: dict[str, Any]) -> str:
    return "; ".join(findings["problems"] + findings["warnings"])


def stands_back(result: dict[str, Any], because: str) -> None:
    """vLLM is stock, and exactly one line of ours gives the reason."""
    assert result["is_cpu"]
    assert not result["ours"]
    assert "amx_mla_backend" not in result["amx_mla"]
    said = [line for line in result["lines"] if "stands back" in line]
    assert len(said) == 1, result["lines"]
    assert because in said[0]


def test_a_whole_installation_is_active(site: Site) -> None:
    """The control: without damage the platform is ours and the backend is registered."""
    result = site.plugin().start()
    assert result["ours"], result["log"][-3000:]
    assert result["is_cpu"]
    assert result["amx_mla"] == "amx_mla_backend.backend.AMXMLABackend"


@fault(87, "https://github.com/vllm-project/vllm/pull/51703")
@pytest.mark.parametrize("error", ["OSError('no such disk')", "RuntimeError('half installed')", "SystemError('x')"])
def test_a_plugin_that_raises_at_import_leaves_vllm_stock(site: Site, error: str) -> None:
    site.plugin()
    damaged = site.package(BACKEND)
    (damaged / "register.py").write_text(f"raise {error}\n")
    result = site.start()
    assert result["is_cpu"]
    assert not result["ours"]
    assert "amx_mla_backend" not in result["amx_mla"]
    assert any("Failed to load plugin amx_mla" in line and error in line for line in result["lines"]), result["lines"]
    _, findings = site.doctor()
    assert error.split("(")[0] in complaints(findings), findings["platform"]


@fault(87, "https://github.com/vllm-project/vllm/pull/51703")
@pytest.mark.parametrize("module", ["selection.py", "platform.py", "envs.py"])
def test_an_error_in_any_module_of_ours_is_one_line(site: Site, module: str) -> None:
    site.plugin()
    damaged = site.package(BACKEND)
    (damaged / module).write_text("raise RuntimeError('half installed')\n")
    stands_back(site.start(), "RuntimeError: half installed")


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        ("missing", "is missing"),
        ("truncated", "cannot be loaded"),
        ("no-shim", "built without torch"),
        ("bad-shim", "torch"),
    ],
)
def test_kernels_that_cannot_be_loaded(site: Site, damage: str, part: str) -> None:
    """The platform stays a CPU platform; no model is taken; kernels and doctor give the same reason."""
    site.plugin()
    kernels = site.package(KERNELS)
    if damage == "missing":
        (kernels / "libamx_kernels.so").unlink()
    elif damage == "truncated":
        (kernels / "libamx_kernels.so").write_bytes(b"\x7fELF")
    elif damage == "no-shim":
        (kernels / "_torch.so").unlink()
    else:
        (kernels / "_torch.so").write_bytes(b"\x7fELF not a library")
    result = site.start("import amx_mla_backend.kernels\n")
    assert result["is_cpu"]
    assert result["unavailable"] is not None
    assert part in result["unavailable"]
    assert "\n" not in result["unavailable"]
    code, findings = site.doctor()
    assert part in complaints(findings)
    assert code == (1 if damage in ("missing", "truncated", "bad-shim") else code)


def test_kernels_of_another_version(site: Site) -> None:
    """An amx-kernels that lacks what this backend uses is a reason, not a crash."""
    site.plugin()
    kernels = site.package(KERNELS)
    package = kernels / "__init__.py"
    package.write_text(package.read_text().replace('"prefill_decompressed"', '"something_else"'))
    result = site.start("import amx_mla_backend.kernels\n")
    assert result["is_cpu"]
    assert "prefill_decompressed" in result["unavailable"]


def test_another_torch_is_named_with_its_version(site: Site) -> None:
    """The shim's library loads, but torch is not one it was made for."""
    site.plugin()
    prelude = """
import torch
def refuse(path):
    raise OSError("undefined symbol: aoti_torch_from_the_future")
torch.ops.load_library = refuse
import amx_mla_backend.kernels
"""
    result = site.start(prelude)
    assert result["is_cpu"]
    assert "needs torch 2.10 or newer, found 2." in result["unavailable"]


def test_read_only_site_packages(site: Site) -> None:
    """Any write below the packages raises, as on a read-only file system; everything still starts."""
    site.plugin()
    folders = [str(site.package(KERNELS)), str(site.package(BACKEND))]
    prelude = f"""
import os, sys
def watch(event, args):
    folders = {folders!r}
    path = str(args[0]) if args else ""
    if event == "open" and path.startswith(tuple(folders)):
        writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT
        if set(args[1] or "") & set("wax+") or (args[2] or 0) & writes:
            raise PermissionError(30, "Read-only file system", path)
    if event in ("os.mkdir", "os.remove", "os.rename") and path.startswith(tuple(folders)):
        raise PermissionError(30, "Read-only file system", path)
sys.addaudithook(watch)
"""
    result = site.start(prelude)
    assert result["ours"], result["log"][-3000:]
    for folder in folders:
        assert not list(Path(folder).rglob("*.tmp"))


def test_two_platform_plugins(site: Site) -> None:
    """vLLM refuses two active ones; ours steps aside for the other and says for whom."""
    site.plugin()
    (site.root / "rival_platform.py").write_text("def plugin():\n    return 'vllm.platforms.cpu.CpuPlatform'\n")
    site.entry_points("rival_platform", "rival_platform:plugin")
    result = site.start()
    stands_back(result, "'rival_platform'")
    assert result["platform"] == "CpuPlatform"


def test_vllm_target_device_cpu(site: Site) -> None:
    """vLLM skips platform plugins then; the general plugin says so."""
    stands_back(site.plugin().start(VLLM_TARGET_DEVICE="cpu"), "VLLM_TARGET_DEVICE=cpu")


def test_switched_off(site: Site) -> None:
    stands_back(site.plugin().start(VLLM_AMX_MLA_BACKEND="off"), "VLLM_AMX_MLA_BACKEND")
