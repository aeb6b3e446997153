# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests of the ops, byte for byte, on our kernels.

The file comes from vLLM's 0.33.0 source (``tests/kernels/attention/test_amx_mla.py``), looked for under the folder that
VLLM_SOURCES names; it is not part of this repository.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path("tests/kernels/attention/test_amx_mla.py")
SHA256 = "0e7d97dd2b37475763aace975416edc4a50e5bb48818a20241fbcc7b03a6d7f6"


def vllm_test_file() -> Path:
    folder = os.environ.get("VLLM_SOURCES")
    if not folder:
        pytest.skip("VLLM_SOURCES is not set: no vLLM source to take the test file from")
    path = Path(folder) / "0.33.0" / FILE
    if not path.exists():
        pytest.skip(f"{path} does not exist")
    return path


def test_vllms_kernel_tests_pass_on_our_kernels(tmp_path: Path) -> None:
    source = vllm_test_file()
    assert hashlib.sha256(source.read_bytes()).hexdigest() == SHA256, f"{source} is not the file of the 0.33.0 release"
    shutil.copy(source, tmp_path / source.name)
    shutil.copy(Path(__file__).parent / "conformance_conftest.py", tmp_path / "conftest.py")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not impl", source.name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "8 passed" in result.stdout and "skipped" not in result.stdout
