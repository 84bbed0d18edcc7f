"""How far numbers may part because they were added in another order.

A gradient of a step is a sum over the samples of the batch and the positions in them. N processes add it in another
order than one does. Adding n numbers that are rounded at each addition errs by about u * sqrt(n) of the size of the
sum, where u is the unit roundoff of the dtype (Higham and Mary, "A New Approach to Probabilistic Rounding Error
Analysis", 2019); the backward pass adds as many more numbers as a layer has inputs. SAFETY allows for terms that cancel
and for the layers. Numbers kept in fewer bits between the layers (autocast) are rounded once each, by their own u.

Weights that differ by rounding make the next step's gradients differ: each step may double the distance, up to MOST.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SAFETY = 16.0
GROWTH = 2.0
MOST = 1e-2  # beyond it a difference is no rounding, however many steps there were


@dataclass(frozen=True)
class Tolerance:
    """dtype: of the parameters; additions: n above; low: the dtype between the layers, where it is another."""

    dtype: str
    additions: int
    low: str | None = None

    @property
    def first(self) -> float:
        """Of a gradient in the first step, relative."""
        summing = SAFETY * ROUNDOFF.get(self.dtype, ROUNDOFF["float32"]) * math.sqrt(max(1, self.additions))
        return summing + (SAFETY / 2 * ROUNDOFF[self.low] if self.low in ROUNDOFF and self.low != self.dtype else 0.0)

    def gradient(self, step: int) -> float:
        return min(self.first * GROWTH ** (step - 1), max(MOST, self.first))

    def loss(self, step: int) -> float:
        return self.gradient(step)

    def parameter(self, step: int, size: float, moved: float) -> float:
        """Of a parameter after a step, absolute. size: its norm; moved: the norm of what training has changed."""
        rounding = SAFETY * ROUNDOFF.get(self.dtype, ROUNDOFF["float32"]) * math.sqrt(step) * size
        return rounding + SAFETY * self.gradient(step) * moved

    def describe(self) -> str:
        low = f" + {SAFETY / 2:g} x {ROUNDOFF[self.low]:.2g} ({self.low})" if self.low in ROUNDOFF else ""
        return (
            f"{self.first:.1e} in the first step = {SAFETY:g} x {ROUNDOFF.get(self.dtype, ROUNDOFF['float32']):.2g} "
            f"({self.dtype}) x sqrt({self.additions} additions){low}; each further step may double it, up to {MOST:g}"
        )
