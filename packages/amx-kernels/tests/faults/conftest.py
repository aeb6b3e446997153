# SPDX-License-Identifier: Apache-2.0
"""``@pytest.mark.fault(number, link)`` names the public report that a test answers.

docs/fault-classes.md is made from these marks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # capi and fault_support, in every import mode of pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fault(number, link, refused=False): answers this row of docs/fault-classes.md")


@pytest.fixture(autouse=True)
def same_threads_afterwards() -> Iterator[None]:
    """Tests here change the number of threads; none inherits it from another."""
    import amx_kernels

    before = amx_kernels.get_num_threads()
    yield
    amx_kernels.set_num_threads(before)
