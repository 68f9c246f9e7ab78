"""The attention benchmark as an SVG, without a plotting library: one row a shape, one dot each.

The axis is time relative to ours, logarithmic; a dot to the right of the line is slower than ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b")
LEFT, WIDTH, ROW, TOP = 300, 560, 18, 60


def write_plot(path: Path, results: Sequence[Mapping[str, Any]], ours: str) -> None:
    """Draw the results with status ok; ratios outside 1/4 .. 16 sit on the edge."""
    timed = [r for r in results if r["status"] == "ok"]
    shapes = list(dict.fromkeys(r["shape"] for r in timed))
    names = [
        ours,
        *dict.fromkeys(r["implementation"] for r in timed if r["implementation"] != ours),
    ]
    height = TOP + ROW * len(shapes) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 40}" height="{height}" '
        'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
    ]
    for index, name in enumerate(names):
        left = 10 + index * 150
        parts.append(f'<circle cx="{left}" cy="16" r="5" fill="{COLORS[index % len(COLORS)]}"/>')
        parts.append(f'<text x="{left + 10}" y="20">{escape(name)}</text>')
    for ratio in (0.25, 0.5, 1, 2, 4, 8, 16):
        x = _position(ratio)
        color = "#000" if ratio == 1 else "#ddd"
        parts.append(
            f'<line x1="{x}" x2="{x}" y1="{TOP - 8}" y2="{height - 25}" stroke="{color}"/>'
        )
        parts.append(f'<text x="{x}" y="{TOP - 14}" text-anchor="middle">{ratio:g}x</text>')
    for row, shape in enumerate(shapes):
        y = TOP + ROW * row + 8
        parts.append(f'<text x="{LEFT - 10}" y="{y + 4}" text-anchor="end">{escape(shape)}</text>')
        for result in timed:
            if result["shape"] == shape:
                color = COLORS[names.index(result["implementation"]) % len(COLORS)]
                x = _position(result["ours_is_faster_by"])
                title = f"{result['implementation']}: {result['p50_ms']:.3f} ms"
                parts.append(
                    f'<circle cx="{x}" cy="{y}" r="4" fill="{color}">'
                    f"<title>{escape(title)}</title></circle>"
                )
    parts.append(
        f'<text x="{LEFT + WIDTH / 2}" y="{height - 8}" text-anchor="middle">'
        "time relative to ours, p50</text></svg>"
    )
    path.write_text("\n".join(parts))


def _position(ratio: float) -> float:
    share = (math.log2(min(max(ratio, 0.25), 16)) + 2) / 6
    return round(LEFT + share * WIDTH, 1)
