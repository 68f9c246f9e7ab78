"""What a step costs in milliseconds, for any batch size and number of verified drafts.

A few combinations are measured; the others are interpolated or extrapolated linearly.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class CostTable:
    """Milliseconds of a step at the measured batch sizes and widths.

    Attributes:
        rows: ``[R]``, measured batch sizes, ascending.
        widths: ``[W]``, measured widths (drafts verified in every row), ascending from 0.
        drafting_ms: ``[R, W]``, of a step that verifies these drafts and then drafts again.
        plain_ms: ``[R]``, of a step that verifies nothing and does not draft.
    """

    rows: np.ndarray
    widths: np.ndarray
    drafting_ms: np.ndarray
    plain_ms: np.ndarray

    def plain(self, num_rows: int) -> float:
        """Milliseconds of a step of ``num_rows`` requests without verification and drafting."""
        return float(self._interpolate(num_rows, self._monotone[1][:, None])[0])

    def drafting(self, num_rows: int) -> np.ndarray:
        """Milliseconds of a step that drafts, ``[num_rows * N + 1]``.

        Entry k is for k verified drafts in total, over all rows.
        """
        if num_rows not in self._drafting:
            curve = self._interpolate(num_rows, self._monotone[0])  # [W]
            totals = np.arange(num_rows * int(self.widths[-1]) + 1)
            self._drafting[num_rows] = np.interp(totals / num_rows, self.widths, curve)
        return self._drafting[num_rows]

    def _interpolate(self, num_rows: int, values: np.ndarray) -> np.ndarray:
        """``values [R, ...]`` at a batch size: linear between and beyond the measured ones.

        With a single measured size, larger batches cost in proportion and smaller ones as much.
        """
        if len(self.rows) == 1:
            only: np.ndarray = values[0] * max(1.0, num_rows / self.rows[0])
            return only
        above = int(np.clip(np.searchsorted(self.rows, num_rows), 1, len(self.rows) - 1))
        low, high = self.rows[above - 1], self.rows[above]
        share = (num_rows - low) / (high - low)
        found: np.ndarray = values[above - 1] + share * (values[above] - values[above - 1])
        return found

    def __str__(self) -> str:
        lines = [
            f"{rows} rows: {plain:.2f} plain, {drafting} drafting"
            for rows, plain, drafting in zip(
                self.rows, self.plain_ms, self.drafting_ms.round(2), strict=True
            )
        ]
        return f"ms, verifying {self.widths}: {'; '.join(lines)}"

    @cached_property
    def _drafting(self) -> dict[int, np.ndarray]:
        """Earlier results of ``drafting``, which is called several times in every step."""
        return {}

    @cached_property
    def _monotone(self) -> tuple[np.ndarray, np.ndarray]:
        """(drafting_ms, plain_ms) made non-decreasing in rows and widths.

        More work never costs less; where a measurement says so it is noise.
        """
        drafting = np.maximum.accumulate(np.maximum.accumulate(self.drafting_ms, axis=0), axis=1)
        return drafting, np.maximum.accumulate(self.plain_ms)


def assumed_costs(num_drafts: int) -> CostTable:
    """A guess for workers that skip the warm-up, in units of a plain step of one request.

    A draft pass costs a third of it, and so does verifying a full block.
    """
    one = np.array([1])
    return CostTable(one, np.array([0, num_drafts]), np.array([[1.33, 1.66]]), np.array([1.0]))
