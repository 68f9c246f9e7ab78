"""Denoise steps as one animated SVG file, without scripts, fonts or other files.

Each frame is what the terminal shows, drawn by rich as a group of the SVG; CSS shows one after the
other. Where CSS animation does not run, or the reader prefers reduced motion, the last is shown.
"""

import io
from collections.abc import Sequence
from xml.sax.saxutils import escape

from rich.console import Console, Group
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from dllm.tools.visible import visible
from dllm.tools.watch_drawing import CELL_CHARACTERS, Frame, Texts, legend, picture

STEP_S, LAST_S = 0.8, 3.0  # how long a frame is shown, and the last one of a block
COLUMNS = 8  # cells in a row
WIDTH = COLUMNS * (CELL_CHARACTERS + 1)  # characters
MARGIN = 16  # pixels
BACKGROUND = SVG_EXPORT_THEME.background_color.hex
# What rich fills in for a frame.
FRAME = """{char_width} {line_height}
<g class="f" id="{unique_id}"><style>{styles}</style>
<defs>{lines}</defs>{backgrounds}{matrix}</g>"""
STYLE = """
text{font:20px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
.f{visibility:hidden}
.f:last-of-type{visibility:visible}
@media (prefers-reduced-motion:reduce){.f{animation:none!important}}
"""


def animation(frames: Sequence[Frame], texts: Texts, question: str) -> str:
    """The text of the SVG file. The animation starts again after the last frame.

    Raises:
        ValueError: there is no frame.
    """
    if not frames:
        raise ValueError("an animation needs at least one frame.")
    head = Text(f"> {visible(question)}\n", style="bold")
    groups, num_lines = [], 0
    for index, frame in enumerate(frames):
        console = Console(file=io.StringIO(), width=WIDTH, record=True, color_system="truecolor")
        console.print(Group(head, legend(), picture(frame, texts, WIDTH)))
        num_lines = max(num_lines, console.file.getvalue().count("\n"))  # type: ignore[attr-defined]
        drawn = console.export_svg(theme=SVG_EXPORT_THEME, code_format=FRAME, unique_id=f"f{index}")
        size, _, group = drawn.partition("\n")
        groups.append(group)
    char_width, line_height = map(float, size.split())
    width = round(WIDTH * char_width) + 2 * MARGIN
    height = round(num_lines * line_height) + 2 * MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">',
            f"<title>{escape(visible(question))}</title>",
            f"<style>{STYLE}{_timing(frames)}</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="{BACKGROUND}"/>',
            f'<g transform="translate({MARGIN} {MARGIN})">',
            *groups,
            "</g></svg>",
            "",
        ]
    )


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
    return "\n".join(rules)
