"""Tables of docs/planning.md: what a document on speculative decoding printed, and the planner.

The document describes speculative decoding on separate pools of GPUs with NVIDIA Dynamo. Its tables
are quoted here as they were printed.
"""

from pathlib import Path

import numpy as np

from bench.tables import markdown
from dllm.remote.plan import Drafts, Grid, Row, Targets, constant, expected_tokens, plan

TOKENS_BY_ACCEPTANCE = {  # of a request and step, by K
    0.5: {3: 1.88, 5: 1.97, 7: 1.99, 10: 2.00},
    0.7: {3: 2.76, 5: 3.16, 7: 3.29, 10: 3.33},
    0.8: {3: 3.36, 5: 4.12, 7: 4.50, 10: 4.76},
    0.9: {3: 3.81, 5: 5.10, 7: 6.10, 10: 7.18},
    0.95: {3: 3.95, 5: 5.42, 7: 6.78, 10: 8.58},
}
SPEEDUPS = {  # by K; 2 ms a draft, 15 ms a verification, 0.5 ms of network
    0.6: {3: 1.52, 5: 1.48, 7: 1.38, 10: 1.22, 15: 1.02},
    0.7: {3: 1.82, 5: 1.86, 7: 1.79, 10: 1.64, 15: 1.40},
    0.8: {3: 2.15, 5: 2.36, 7: 2.39, 10: 2.32, 15: 2.10},
    0.9: {3: 2.44, 5: 2.91, 7: 3.15, 10: 3.30, 15: 3.30},
}
MOST = 20  # the widest that is looked at for the best one


def _rows(acceptance: float) -> list[Row]:
    """All widths, with the document's times."""

    def flat(ms: float) -> Grid:
        return Grid((1.0,), (0.0, float(MOST)), np.full((1, 2), ms))

    drafts = Drafts(1, flat(2.0), constant(acceptance, MOST))
    return plan(Targets(1, 1, flat(15.0)), drafts, 0.5)


def _cell(printed: float, ours: float) -> str:
    """Both numbers; one where they agree in print."""
    return f"{ours:.2f}" if abs(printed - ours) < 0.0051 else f"~~{printed:.2f}~~ {ours:.2f}"


def tokens(_results: Path) -> str:
    """Tokens of a request and step."""
    widths = list(TOKENS_BY_ACCEPTANCE[0.5])
    lines = [
        [f"{alpha:g}"] + [_cell(row[k], expected_tokens(constant(alpha, k), k)) for k in widths]
        for alpha, row in TOKENS_BY_ACCEPTANCE.items()
    ]
    return markdown((["acceptance", *(f"K = {k}" for k in widths)], lines))


def speedups(_results: Path) -> str:
    """Speed over plain decoding, and the best width."""
    widths = list(SPEEDUPS[0.6])
    lines = []
    for alpha, printed in SPEEDUPS.items():
        rows = _rows(alpha)
        best = max(rows, key=lambda row: row.speedup)
        cells = [_cell(printed[k], rows[k].speedup) for k in widths]
        lines.append([f"{alpha:g}", *cells, f"{best.width} ({best.speedup:.2f})"])
    return markdown((["acceptance", *(f"K = {k}" for k in widths), "best K"], lines))
