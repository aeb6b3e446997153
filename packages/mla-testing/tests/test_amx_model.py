# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from mla_testing.amx_model import modelled

COUNTS = {"tmul_rows": 1600, "TILELOADD": 100, "TILELOADDT1": 20, "TILESTORED": 8}


def test_the_longest_part_counts_and_drains_are_added():
    m = modelled(COUNTS)
    assert (m.matrix, m.loads, m.stores, m.drains) == (1600, pytest.approx(1008), pytest.approx(128.8), 104)
    assert m.cycles == 1704
    assert m.bound == "matrix"
    assert m.seconds(2e9) == pytest.approx(852e-9)
    assert str(m) == "modelled: 1,704 cycles, bound by matrix"


@pytest.mark.parametrize(
    ("counts", "bound", "cycles"),
    [({"TILELOADD": 1000}, "loads", 8.4 * 1020 + 104), ({"TILESTORED": 1000}, "stores", 16100 + 13000)],
)
def test_other_bounds(counts, bound, cycles):
    m = modelled(COUNTS | counts)
    assert m.bound == bound
    assert m.cycles == pytest.approx(cycles)


def test_drains_can_be_given():
    assert modelled(COUNTS, drains=0).cycles == 1600


def test_errors():
    with pytest.raises(ValueError, match="TILELOADD = -1"):
        modelled(COUNTS | {"TILELOADD": -1})
    with pytest.raises(KeyError, match="tmul_rows"):
        modelled({"TILELOADD": 1})
    with pytest.raises(ValueError, match="hertz"):
        modelled(COUNTS).seconds(0)
