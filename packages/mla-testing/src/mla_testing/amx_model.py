# SPDX-License-Identifier: Apache-2.0
"""What counted AMX instructions would at least cost a Xeon's core: a model, never a measurement.

    cycles = max(rows of A, 8.4 * tile loads, 16.1 * tile stores) + 52 * drains

The matrix unit takes one row of A per cycle. A tile load from L1 takes 8.4 cycles and a tile store 16.1, measured on a
Xeon 6962P; both overlap with the matrix unit. 52 cycles is the latency of one product, paid once whenever accumulators
are read out, because the last product has to come through.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LOAD_CYCLES = 8.4
STORE_CYCLES = 16.1
DRAIN_CYCLES = 52.0


@dataclass(frozen=True)
class Modelled:
    """Modelled cycles of one core.

    ``matrix``, ``loads`` and ``stores`` are the three parts of which the longest counts, ``drains`` is added to it.
    """

    matrix: float
    loads: float
    stores: float
    drains: float

    @property
    def cycles(self) -> float:
        return max(self.matrix, self.loads, self.stores) + self.drains

    @property
    def bound(self) -> str:
        """Which part is the longest: "matrix", "loads" or "stores"."""
        return max(("matrix", "loads", "stores"), key=lambda part: getattr(self, part))

    def seconds(self, hertz: float) -> float:
        """Modelled time at a clock rate.

        Raises:
            ValueError: ``hertz`` is not positive.
        """
        if not hertz > 0:
            raise ValueError(f"hertz: expected a positive clock rate, got {hertz}")
        return self.cycles / hertz

    def __str__(self) -> str:
        return f"modelled: {self.cycles:,.0f} cycles, bound by {self.bound}"


def modelled(counts: Mapping[str, int], *, drains: int | None = None) -> Modelled:
    """The model, from counts as :meth:`mla_testing.amx_emulator.Emulation.counters` gives them.

    Args:
        counts: instructions by name and ``tmul_rows``.
        drains: how often accumulators were read out. None: a quarter of the tile stores, as kernels with four
            accumulators store four tiles per drain.

    Raises:
        KeyError: a count is missing.
        ValueError: a negative count.
    """
    names = ("tmul_rows", "TILELOADD", "TILELOADDT1", "TILESTORED")
    if negative := [n for n in names if counts[n] < 0]:
        raise ValueError(f"counts: expected counts of at least 0, got {negative[0]} = {counts[negative[0]]}")
    stores = counts["TILESTORED"]
    return Modelled(
        matrix=float(counts["tmul_rows"]),
        loads=LOAD_CYCLES * (counts["TILELOADD"] + counts["TILELOADDT1"]),
        stores=STORE_CYCLES * stores,
        drains=DRAIN_CYCLES * (stores / 4 if drains is None else drains),
    )
