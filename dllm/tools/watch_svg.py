"""Draws denoise steps as one animated SVG file, without scripts, fonts or other files.

Each frame is a group of the SVG; CSS shows one after the other. Where CSS animation does not run,
or the reader prefers reduced motion, the last frame is shown.
"""

import textwrap
from collections.abc import Sequence
from xml.sax.saxutils import escape

from dllm.tools.visible import visible
from dllm.tools.watch_drawing import (
    ENTROPY_COLORS,
    LEGEND,
    Cell,
    Frame,
    Labels,
    Status,
    cells,
    entropy_ranges,
)

STEP_S, LAST_S = 0.8, 3.0  # how long a frame is shown, and the last one of a block
COLUMNS = 8  # cells in a row
CELL_W, CELL_H, GAP, MARGIN = 96, 28, 4, 16  # pixels
LINE_H = 22
WIDTH = 2 * MARGIN + COLUMNS * (CELL_W + GAP) - GAP
LINE_CHARACTERS = 95  # of the answer that fit WIDTH

STYLE = """
text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:#1f2328}
.c text{text-anchor:middle}
.t{fill:#59636e;font-size:13px}
.q{font-weight:bold}
.renoised rect{fill:#fff;stroke-width:1.5;stroke-dasharray:4 3}
.renoised text{fill:#8c959f}
.unused rect{fill:#fff;stroke:#eaeef2}
.final rect{stroke:#1f2328;stroke-width:2}
.final text{font-weight:bold}
.f{visibility:hidden}
.f:last-of-type{visibility:visible}
"""


def animation(frames: Sequence[Frame], labels: Labels, question: str) -> str:
    """The text of the SVG file. The animation starts again after the last frame.

    Raises:
        ValueError: there is no frame.
    """
    if not frames:
        raise ValueError("an animation needs at least one frame.")
    rows = -(-len(frames[0].argmax) // COLUMNS)
    num_lines = max(len(_lines(labels.answer(frame))) for frame in frames)
    grid_top = MARGIN + 4 * LINE_H
    answer_top = grid_top + rows * (CELL_H + GAP) + LINE_H
    height = answer_top + num_lines * LINE_H + MARGIN - GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img">'
    )
    parts = [
        head,
        f"<title>{escape(visible(question))}</title>",
        f"<style>{STYLE}{_colors()}{_timing(frames)}</style>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#fff" stroke="#d1d9e0"/>',
        _text(MARGIN, MARGIN + LINE_H - 6, f"> {question}", "q"),
        _legend(MARGIN + LINE_H),
    ]
    for index, frame in enumerate(frames):
        answer = _lines(labels.answer(frame))
        lines = [_text(MARGIN, answer_top + i * LINE_H, line) for i, line in enumerate(answer)]
        drawn = [
            _cell(
                cell,
                MARGIN + i % COLUMNS * (CELL_W + GAP),
                grid_top + i // COLUMNS * (CELL_H + GAP),
            )
            for i, cell in enumerate(cells(frame, labels))
        ]
        title = _text(MARGIN, grid_top - 10, frame.title, "t")
        parts.append(f'<g class="f" id="f{index}">{title}{"".join(drawn)}{"".join(lines)}</g>')
    return "\n".join([*parts, "</svg>", ""])


def _timing(frames: Sequence[Frame]) -> str:
    """CSS that shows the frames in turn: one keyframe rule each, in percent of the cycle."""
    lengths = [LAST_S if frame.is_final else STEP_S for frame in frames]
    cycle = sum(lengths)
    rules, start = [], 0.0
    for index, length in enumerate(lengths):
        begin, end = 100 * start / cycle, 100 * (start + length) / cycle
        before = "0%{visibility:hidden}" if index else ""
        after = f"{end:.3f}%{{visibility:hidden}}" if index < len(lengths) - 1 else ""
        rules.append(f"@keyframes k{index}{{{before}{begin:.3f}%{{visibility:visible}}{after}}}")
        rules.append(f"#f{index}{{animation:k{index} {cycle:.2f}s step-end infinite}}")
        start += length
    still = "@media (prefers-reduced-motion:reduce){.f{animation:none!important}}"
    return "\n".join([*rules, still])


def _colors() -> str:
    """CSS that fills the cells of each entropy level."""
    return "".join(
        f".e{level} rect{{fill:{color};stroke:{color}}}\n"
        for level, (_, color) in enumerate(ENTROPY_COLORS)
    )


def _legend(top: int) -> str:
    """A line that shows the entropy colours, then the statuses of cells."""
    y = top + LINE_H - 6
    parts = [_text(MARGIN, y, "entropy, nats:", "t")]
    x = MARGIN + 120
    shown: list[tuple[str, Status, int]] = [
        (text, "accepted", level) for level, text in enumerate(entropy_ranges())
    ]
    shown += [(status, status, 0) for status in LEGEND]
    for text, status, level in shown:
        width = 9 * len(text) + 14
        if x + width > WIDTH - MARGIN:
            raise AssertionError(f"the legend is wider than {WIDTH} pixels")
        parts.append(_cell(Cell(text, status, level), x, y - 15, width, LINE_H))
        x += width + GAP + (12 if text == entropy_ranges()[-1] else 0)
    return "".join(parts)


def _cell(cell: Cell, x: int, y: int, width: int = CELL_W, height: int = CELL_H) -> str:
    return (
        f'<g class="c e{cell.level} {cell.status}">'
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4"/>'
        f"{_text(x + width // 2, y + height // 2 + 5, cell.text)}</g>"
    )


def _text(x: int, y: int, text: str, kind: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text x="{x}" y="{y}"{name}>{escape(visible(text))}</text>'


def _lines(answer: str) -> list[str]:
    return textwrap.wrap(answer, LINE_CHARACTERS) or [""]
