# SPDX-License-Identifier: Apache-2.0
"""``@pytest.mark.fault(number, link)`` names the public report that a test answers.

docs/fault-classes.md is made from these marks.
"""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fault(number, link, refused=False): answers this row of docs/fault-classes.md")
