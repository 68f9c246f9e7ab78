"""What a step costs, by batch size and drafts verified: between and beyond what was measured."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class CostTable:
    """Milliseconds of a step at the measured batch sizes and widths.

    Attributes:
        rows: ``[R]``, batch sizes, ascending.
        widths: ``[W]``, drafts verified in every row, ascending from 0.
        drafting_ms: ``[R, W]``, of a step that verifies so many and drafts again.
        plain_ms: ``[R]``, of one that verifies nothing and does not draft.
    """

    rows: np.ndarray
    widths: np.ndarray
    drafting_ms: np.ndarray
    plain_ms: np.ndarray

    def plain(self, num_rows: int) -> float:
        """Of a plain step."""
        return float(self._at(num_rows, self._monotone[1][:, None])[0])

    def drafting(self, num_rows: int) -> np.ndarray:
        """``[num_rows * N + 1]``: of a step that verifies 0, 1, 2, ... drafts in all."""
        if num_rows not in self._drafting:
            curve = self._at(num_rows, self._monotone[0])
            totals = np.arange(num_rows * int(self.widths[-1]) + 1)
            self._drafting[num_rows] = np.interp(totals / num_rows, self.widths, curve)
        return self._drafting[num_rows]

    def _at(self, num_rows: int, values: np.ndarray) -> np.ndarray:
        """A line of ``values [R, ...]``, between or beyond the measured batch sizes."""
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
        """What ``drafting`` has answered: it is asked several times a step, of few batch sizes."""
        return {}

    @cached_property
    def _monotone(self) -> tuple[np.ndarray, np.ndarray]:
        """Drafting and plain, where more work never costs less: what remains of the noise."""
        drafting = np.maximum.accumulate(np.maximum.accumulate(self.drafting_ms, axis=0), axis=1)
        return drafting, np.maximum.accumulate(self.plain_ms)


def assumed_costs(num_drafts: int) -> CostTable:
    """For a worker that skips its warm-up: a draft pass costs a third of a step, a row nothing."""
    one = np.array([1])
    return CostTable(one, np.array([0, num_drafts]), np.array([[1.33, 1.66]]), np.array([1.0]))
