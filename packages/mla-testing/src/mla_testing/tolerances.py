# SPDX-License-Identifier: Apache-2.0
"""How far a right kernel may be from float64: derived here once, from its roundings, and from the data it ran on.

Inputs are bfloat16 and exact, products of two bfloat16 are exact in float32, so there are only these errors. u = 2^-8
is the unit roundoff of bfloat16, e = 2^-24 that of float32.

1. *Output rounding.* Half a unit in the last place of the expected value (``bf16.half_ulp``); nothing for float32.
2. *Float32 sums of K terms.* The partial sums of random terms of size m walk like m sqrt(j), each addition errs by
   e / 2 of them in the root mean square, in total about K m e / (2 sqrt 2). Six of those: ``2.2 K m e``.
3. *Scores.* A score errs absolutely by what (2) gives for its partial sums, which scale |q| |k| bounds (we take 8 e of
   it: random terms walk over sqrt(K) of K), plus 2^-20 for the exponential and the folded scale. It multiplies its
   probability.
4. *Probabilities are rounded to bfloat16* before they meet the values, each by at most u, relatively. The result is
   moved by sum p d v, |d| <= u. Two bounds hold, the smaller counts:

   - always: u sqrt(sum p v^2), by Cauchy-Schwarz, whether the row sum is of rounded or unrounded probabilities
     (sum p |v| and sum p |v - out| are both below it);
   - where the probabilities differ, their errors are independent, with standard deviation u / sqrt 3 at most: six of
     them give 6 u / sqrt 3 sqrt(sum p^2 v^2). Where they are alike (a single key, no query) they may round alike and
     scale the whole row: u |out| more.

   The second is what makes a tolerance useful at 4,096 keys: the first is about as large as the result itself there.
5. *LSE* in float32: (3), plus 4 e |lse|, plus u for a kernel that sums rounded probabilities (``rounded_sum``).
6. *Decompressed or absorbed prefill* rounds q_latent, or k_nope and v, to bfloat16 as well. One operand of a score's
   nope part is rounded, so the score errs by u sqrt(sum (q k)^2) / sqrt 3 in the root mean square, as independent
   between keys as (4). The values' rounding is like one more rounding of the probabilities; the absorbed path rounds
   the latent output instead, whose error after expansion is like rounding an element as large as its row's elements
   are in the root mean square. Variances add.

Errors of one sign everywhere hide below per-element bounds when the noise is large. So the regression slope of the
whole tensor on the expected values is bounded too: a row's common error is u / sqrt 3 sqrt(sum p^2) in the root mean
square, and independent between rows, so it averages out (rows count with their squared norm, as in the slope).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mla_testing import bf16
from mla_testing.reference import Attention

__all__ = ["EXACT", "Tolerance", "attention", "gemm", "lse", "prefill"]

_U = bf16.UNIT_ROUNDOFF
_E = 2.0**-24
#: Six standard deviations of a uniform error in [-1, 1].
_SIX_SIGMA = 6.0 / math.sqrt(3.0)
#: Tile and dot-product instructions flush subnormals to zero; no sum of such terms reaches this.
_FLUSH = 2.0**-100


@dataclass(frozen=True)
class Tolerance:
    """Limits for ``compare.assert_close``. An element passes within atol + rtol |expected| (+ half a bfloat16 ulp).

    atol and rtol are numbers or arrays that broadcast to the expected values.
    """

    atol: float | NDArray[np.float64] = 0.0
    rtol: float | NDArray[np.float64] = 0.0
    #: Adds the rounding of the output to bfloat16.
    bf16_output: bool = True
    #: Smallest cosine between the whole tensors (-1: a logarithm, say, whose direction means nothing).
    min_cosine: float = 0.9999
    #: Largest |slope - 1| of the regression of the actual on the expected values; None: not judged.
    max_bias: float | None = None
    #: What the limits were made for; shown in messages.
    name: str = "tolerance"

    def limit(self, expected: NDArray[np.float64]) -> NDArray[np.float64]:
        """Largest accepted absolute error of each element."""
        limit = self.atol + self.rtol * np.abs(expected)
        if self.bf16_output:
            # What is rounded is the inexact value; it may lie beyond a power of two, where steps are twice as wide.
            limit = limit + bf16.half_ulp(np.abs(expected) + limit)
        return np.broadcast_to(limit, expected.shape)


#: Copies and other operations that may not change a bit.
EXACT = Tolerance(bf16_output=False, min_cosine=1.0 - 1e-12, name="exact")


def gemm(k: int, magnitude: float = 1.0, *, bf16_output: bool = True) -> Tolerance:
    """For products over ``k`` terms, summed in float32, rounded once (1 and 2 above).

    Args:
        k: length of the sums (IN).
        magnitude: root mean square of the products summed: rms(mat1) * rms(mat2).
        bf16_output: whether the result is rounded to bfloat16.
    """
    if k < 0:
        raise ValueError(f"k is {k}, expected a length of sums >= 0")
    # Independent output roundings average out; over few elements they do not, hence the whole u.
    return Tolerance(
        atol=2.2 * k * magnitude * _E + _FLUSH,
        bf16_output=bf16_output,
        min_cosine=1.0 - _U * _U,
        max_bias=_U if bf16_output else 64 * _E,
        name=f"gemm K={k}",
    )


def attention(expected: Attention, *, rounded_probabilities: bool = True) -> Tolerance:
    """For latent attention whose output is bfloat16 (1, 3 and 4 above).

    Args:
        expected: what ``reference.latent_attention_details`` returned.
        rounded_probabilities: False for kernels that keep probabilities in float32.
    """
    unit = _U if rounded_probabilities else 0.0
    likely = unit * (expected.alike[..., None] * np.abs(expected.out) + _SIX_SIGMA * expected.noise)
    from_scores = _score_error(expected)[..., None] * expected.value_rms
    return Tolerance(
        atol=np.minimum(unit * expected.value_rms, likely) + from_scores + _FLUSH,
        rtol=4 * _E,
        min_cosine=0.99999,
        max_bias=_bias(expected, unit),
        name="attention",
    )


def prefill(expected: Attention) -> Tolerance:
    """For whole MLA prefill with bfloat16 output, absorbed or decompressed (1, 3, 4 and 6 above).

    Args:
        expected: what ``reference.mla_prefill_details`` returned.
    """
    row_rms = np.sqrt(np.mean(np.square(expected.out), axis=-1, keepdims=True))
    variance = (2.0 + np.square(expected.score_noise[..., None])) * np.square(expected.noise) + np.square(row_rms)
    likely = _U * (2.0 * expected.alike[..., None] * np.abs(expected.out) + _SIX_SIGMA * np.sqrt(variance))
    return Tolerance(
        atol=likely + _score_error(expected)[..., None] * expected.value_rms + _FLUSH,
        rtol=4 * _E,
        min_cosine=0.9999,
        max_bias=2.0 * _bias(expected, _U),
        name="MLA prefill",
    )


def _bias(expected: Attention, unit: float) -> float:
    weights = np.square(expected.out).sum(axis=-1)
    total = float(weights.sum())
    if total == 0.0:
        return unit
    alike = float((weights * expected.alike).sum()) / total
    independent = float(np.linalg.norm(weights * expected.sum_noise * (1.0 - expected.alike))) / total
    return unit * (alike + _SIX_SIGMA * independent) + 4 * _E + 2.0**-20


def lse(expected: Attention, *, rounded_sum: bool = False, rounded_operands: bool = False) -> Tolerance:
    """For the float32 natural-log LSE of an attention (5 and 6 above).

    Args:
        expected: what a ``*_details`` function of ``reference`` returned.
        rounded_sum: the kernel sums probabilities after rounding them to bfloat16.
        rounded_operands: prefill, where q or k were rounded on the way.
    """
    atol = _score_error(expected)
    if rounded_sum:
        atol = atol + _U
    if rounded_operands:
        atol = atol + _U * expected.score_noise * _SIX_SIGMA * expected.sum_noise
    return Tolerance(atol=atol, rtol=4 * _E, bf16_output=False, min_cosine=-1.0, name="LSE")


def _score_error(expected: Attention) -> NDArray[np.float64]:
    return 8.0 * _E * expected.score_bound + 2.0**-20
