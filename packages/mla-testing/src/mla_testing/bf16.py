# SPDX-License-Identifier: Apache-2.0
"""bfloat16 in NumPy: exact conversions, without any other package.

A ``uint16`` array always stands for bfloat16 bit patterns here. Arrays of ``ml_dtypes.bfloat16`` are accepted wherever
values are read (they convert themselves), but the package is not needed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "CANARY",
    "INF",
    "NAN",
    "UNIT_ROUNDOFF",
    "from_float",
    "half_ulp",
    "round_to_bf16",
    "to_float32",
    "to_float64",
]

#: Largest relative error of one rounding to bfloat16 (8 significant bits, one of them implicit).
UNIT_ROUNDOFF = 2.0**-8

#: Bit patterns: quiet NaN, +infinity, and a NaN payload that no arithmetic produces (marks memory nobody may write).
NAN = np.uint16(0x7FC0)
INF = np.uint16(0x7F80)
CANARY = np.uint16(0x7FA5)


def from_float(values: ArrayLike) -> NDArray[np.uint16]:
    """Round to bfloat16, nearest-even, in one single rounding, and return the bits.

    Args:
        values: float array of any shape. float64 is rounded once, not by way of float32.

    Returns:
        ``uint16`` array of the same shape. NaN stays NaN (made quiet, sign and upper payload kept), overflow gives
        infinity, bfloat16 subnormals are kept.
    """
    values = np.asarray(values)
    if values.dtype.name == "bfloat16":
        return values.view(np.uint16).copy()
    exact = values.dtype != np.float64
    single = np.ascontiguousarray(values, dtype=np.float32) if exact else _round_to_odd(values)
    bits = single.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    quiet_nan = (bits >> 16) | np.uint32(0x0040)
    return np.where(np.isnan(single), quiet_nan, rounded).astype(np.uint16)


def _round_to_odd(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """float64 to float32 so that a later rounding to bfloat16 sees every tie as the float64 value would.

    Truncation with a sticky last bit: float32 has more than two bits over bfloat16, so the second rounding is exact
    (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd").
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        single = np.ascontiguousarray(values.astype(np.float32))
        too_far = np.abs(single.astype(np.float64)) > np.abs(values)
        single = np.where(too_far, np.nextafter(single, np.float32(0.0)), single)
        inexact = single.astype(np.float64) != values
    bits = single.view(np.uint32)
    return np.where(inexact & ~np.isnan(single), bits | np.uint32(1), bits).astype(np.uint32).view(np.float32)


def to_float32(values: ArrayLike) -> NDArray[np.float32]:
    """Exact values of bfloat16 bits (``uint16``), or of any float array, as float32."""
    values = np.asarray(values)
    if values.dtype == np.uint16:
        return np.left_shift(values, 16, dtype=np.uint32).view(np.float32)
    return values.astype(np.float32)


def to_float64(values: ArrayLike) -> NDArray[np.float64]:
    """Exact values of bfloat16 bits (``uint16``), or of any float array, as float64."""
    values = np.asarray(values)
    if values.dtype == np.uint16:
        return to_float32(values).astype(np.float64)
    return values.astype(np.float64)


def round_to_bf16(values: ArrayLike) -> NDArray[np.float32]:
    """The nearest bfloat16 values, as float32."""
    return to_float32(from_float(values))


def half_ulp(values: ArrayLike) -> NDArray[np.float64]:
    """Half the distance between the bfloat16 numbers around each value: the largest error of rounding it.

    Zero, infinity and NaN give the smallest subnormal's half.
    """
    values = np.abs(np.asarray(values, dtype=np.float64))
    usable = np.isfinite(values) & (values > 0)
    exponent = np.frexp(np.where(usable, values, 1.0))[1] - 1
    exponent = np.where(usable, np.maximum(exponent, -126), -126)
    return np.ldexp(1.0, exponent - 8)
