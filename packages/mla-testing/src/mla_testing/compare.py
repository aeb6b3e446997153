# SPDX-License-Identifier: Apache-2.0
"""Comparing a tensor with the float64 reference: strict about NaN and infinity, clear about where it went wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mla_testing import bf16
from mla_testing.tolerances import Tolerance

__all__ = ["ErrorReport", "assert_close", "max_error", "to_numpy"]


@dataclass(frozen=True)
class ErrorReport:
    """Errors of a whole tensor. Positions are indices; ``worst_ratio`` is error / limit and fails above 1."""

    max_abs: float
    max_rel: float
    worst_ratio: float
    worst_position: tuple[int, ...]
    cosine: float
    slope: float
    elements: int

    def __str__(self) -> str:
        return (
            f"max |error| {self.max_abs:.3e}, max relative {self.max_rel:.3e}, "
            f"{self.worst_ratio:.2f} of the limit at {list(self.worst_position)}, "
            f"cosine {self.cosine:.7f}, slope {self.slope:.5f}, {self.elements} elements"
        )


def to_numpy(values: Any) -> NDArray[np.float64]:
    """float64 values of a NumPy array (``uint16``: bfloat16 bits) or of a torch tensor of any float dtype."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().double().numpy()
    return bf16.to_float64(values)


def assert_close(actual: Any, expected: Any, *, tol: Tolerance, what: str = "result") -> ErrorReport:
    """Fail unless ``actual`` is as near to ``expected`` as ``tol`` demands.

    Checked in this order: shape; NaN in the same places; infinities in the same places with the same signs; each
    element; the cosine; the regression slope (a bias common to all elements).

    Args:
        actual: array or tensor; ``uint16`` holds bfloat16 bits.
        expected: the reference, float64.
        tol: limits (``tolerances``).
        what: name of the thing compared, opens the message.

    Returns:
        The errors, for reports.

    Raises:
        AssertionError: naming the worst position with both values.
    """
    actual, expected = to_numpy(actual), to_numpy(expected)
    if actual.shape != expected.shape:
        raise AssertionError(f"{what}: shape {actual.shape}, expected {expected.shape}")
    _same_mask(np.isnan(actual), np.isnan(expected), "NaN", actual, expected, what)
    _same_mask(actual == np.inf, expected == np.inf, "+inf", actual, expected, what)
    _same_mask(actual == -np.inf, expected == -np.inf, "-inf", actual, expected, what)
    report = max_error(actual, expected, tol=tol)
    if report.worst_ratio > 1.0:
        limit = tol.limit(expected)
        error = np.where(np.isfinite(expected), np.abs(actual - expected), 0.0)
        wrong = int((error > limit).sum())
        at = report.worst_position
        raise AssertionError(
            f"{what}: {wrong} of {actual.size} elements beyond the {tol.name} limit; worst at {list(at)}: "
            f"actual {actual[at]:.9g}, expected {expected[at]:.9g}, error {error[at]:.3e}, limit {limit[at]:.3e} "
            f"({report})"
        )
    if report.cosine < tol.min_cosine:
        raise AssertionError(f"{what}: cosine {report.cosine:.7f} below {tol.min_cosine:.7f} ({report})")
    if tol.max_bias is not None:
        # The independent roundings of n elements move the slope by less than 2 u / sqrt(n).
        allowed = tol.max_bias + (2.0 * bf16.UNIT_ROUNDOFF / np.sqrt(report.elements) if report.elements else 0.0)
        if abs(report.slope - 1.0) > allowed:
            raise AssertionError(
                f"{what}: biased: actual values are {report.slope:.5f} times the expected ones as a whole, "
                f"at most {allowed:.2e} off 1 is right ({report})"
            )
    return report


def max_error(actual: Any, expected: Any, *, tol: Tolerance | None = None) -> ErrorReport:
    """Errors over the places where both are finite; without ``tol``, the worst place is that of the largest error."""
    actual, expected = to_numpy(actual), to_numpy(expected)
    finite = np.isfinite(actual) & np.isfinite(expected)
    if not finite.any():
        return ErrorReport(0.0, 0.0, 0.0, (0,) * actual.ndim, 1.0, 1.0, 0)
    a, e = np.where(finite, actual, 0.0), np.where(finite, expected, 0.0)
    error = np.abs(a - e)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(e != 0.0, error / np.abs(e), 0.0)
        ratio = error if tol is None else np.where(error == 0.0, 0.0, error / tol.limit(e))
    worst = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    actual_norm, expected_norm, dot = np.linalg.norm(a), np.linalg.norm(e), float(np.vdot(a, e))
    if expected_norm == 0.0 or actual_norm == 0.0:
        cosine = slope = 1.0 if expected_norm == actual_norm else 0.0
    else:
        cosine, slope = dot / (actual_norm * expected_norm), dot / expected_norm**2
    return ErrorReport(
        max_abs=float(error.max()),
        max_rel=float(relative.max()),
        worst_ratio=float(ratio[worst]) if tol is not None else 0.0,
        worst_position=tuple(int(i) for i in worst),
        cosine=float(cosine),
        slope=float(slope),
        elements=int(finite.sum()),
    )


def _same_mask(actual_mask: NDArray, expected_mask: NDArray, kind: str, actual: NDArray, expected: NDArray, what: str):
    different = actual_mask != expected_mask
    if different.any():
        at = tuple(int(i) for i in np.argwhere(different)[0])
        raise AssertionError(
            f"{what}: {int(different.sum())} places where only one side is {kind}; first at {list(at)}: "
            f"actual {actual[at]:.9g}, expected {expected[at]:.9g}"
        )
