# SPDX-License-Identifier: Apache-2.0
"""The kernel suite: every test that takes the fixture ``tier`` of mla-testing's pytest plugin runs on every tier."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import amx_kernels


def pytest_configure(config: pytest.Config) -> None:
    if not any(config.pluginmanager.hasplugin(name) for name in ("mla_testing", "mla_testing.pytest_plugin")):
        raise pytest.UsageError(
            "the kernel suite needs the plugin of mla-testing: install it, or pass -p mla_testing.pytest_plugin"
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs the tiers of one case after each other, so that its float64 reference is computed once."""

    def case(item: pytest.Item) -> tuple[object, ...]:
        callspec = getattr(item, "callspec", None)
        indices = {} if callspec is None else {k: v for k, v in callspec.indices.items() if k != "tier"}
        return (item.path, getattr(item, "originalname", item.name), *sorted(indices.items()))

    first: dict[tuple[object, ...], int] = {}
    for position, item in enumerate(items):
        first.setdefault(case(item), position)
    items.sort(key=lambda item: first[case(item)])


@pytest.fixture
def threads() -> Iterator[None]:
    """The number of threads of the Python module's pool may be changed; it is put back afterwards."""
    before = amx_kernels.get_num_threads()
    yield
    amx_kernels.set_num_threads(before)
