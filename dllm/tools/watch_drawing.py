"""Draws denoise steps: the canvas as cells, in a terminal or in an animated SVG file.

Every canvas position is a cell with the token that it holds after the step. Its colour shows the
entropy of the model's distribution there; its status is what the step did:

    accepted  the model's sampled token stays              filled
    renoised  a random token was put in its place          dim
    final     the block has converged and is emitted       filled, bold

Behind the end of a converged answer cells are empty. The SVG file has no scripts and no fonts, and
needs no other files. Each of its frames is what the terminal shows, drawn by rich as a group of the
SVG; CSS shows one after the other. Where CSS animation does not run, or the reader prefers reduced
motion, the last is shown.
"""

import io
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.sax.saxutils import escape

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

# (Largest entropy in nats, colour). The bundled model's vocabulary of 832 tokens has at most 6.7.
ENTROPY_COLORS = (
    (0.01, "#78c679"),
    (0.1, "#c2e699"),
    (0.5, "#fee391"),
    (1.5, "#fdae6b"),
    (float("inf"), "#f4836b"),
)
STYLES = {
    "accepted": "black on {}",
    "renoised": "dim italic {}",
    "final": "bold underline black on {}",
}
CELL_CHARACTERS = 9
# What a terminal or a picture does not show as it is: control characters, which may do anything to
# a terminal and mostly are no XML, halves of surrogate pairs, what Unicode does not define, breaks
# of lines.
HIDDEN = ("Cc", "Cs", "Cn", "Zl", "Zp")


@dataclass(frozen=True)
class Frame:
    """One denoise step of one block. Tuples have one entry for each canvas position."""

    block: int  # counted from 0
    step: int  # counted from 1 in each block
    emitted: tuple[int, ...]  # the tokens of all blocks before (of any length)
    argmax: tuple[int, ...]
    entropy: tuple[float, ...]  # of the model's distributions, nats
    accepted: tuple[bool, ...]
    next_canvas: tuple[int, ...]  # the sampled token where accepted, else a random one
    is_final: bool  # the block has converged; its argmax is emitted

    @property
    def title(self) -> str:
        mean = sum(self.entropy) / len(self.entropy)
        return (
            f"block {self.block + 1}, step {self.step}: "
            f"{sum(self.accepted)}/{len(self.accepted)} accepted, mean entropy {mean:.3f}"
            + (", converged" if self.is_final else "")
        )


@dataclass
class Texts:
    """The texts of the tokens that a stream has shown; a stream needs no tokenizer here."""

    by_id: dict[int, str] = field(default_factory=dict)
    ends: set[int] = field(default_factory=set)  # tokens that ended an answer

    def learn(self, canvas: dict[str, Any]) -> None:
        self.by_id |= zip(canvas["ids"], canvas["tokens"], strict=True)
        length = canvas["length"]
        if length < len(canvas["argmax"]):  # it ends in front of the canvas's end
            self.ends.add(canvas["argmax"][length - 1])

    def of(self, token_id: int) -> str:
        """A token that was never shown is an ellipsis."""
        return self.by_id.get(token_id, "…")

    def cell(self, token_id: int) -> str:
        text = visible(self.of(token_id).replace(" ", "·").replace("\n", "⏎"))
        return text if len(text) <= CELL_CHARACTERS else text[: CELL_CHARACTERS - 1] + "…"

    def answer(self, frame: Frame) -> str:
        ids = [*frame.emitted, *frame.argmax]
        return "".join(self.of(one) for one in ids[: self.length(ids)] if one not in self.ends)

    def length(self, ids: Sequence[int]) -> int:
        """Number of tokens up to and including the first that ends an answer; all if none."""
        ends = (i + 1 for i, token_id in enumerate(ids) if token_id in self.ends)
        return next(ends, len(ids))


def visible(text: str, kept: str = "") -> str:
    """``text`` with a replacement for each hidden character that is not in ``kept``."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}"
        if unicodedata.category(char) in HIDDEN and char not in kept
        else char
        for char in text
    )


def cells(frame: Frame, texts: Texts) -> list[Text]:
    """A cell for each token of the canvas; empty ones behind the end of an emitted text."""
    if not frame.is_final:
        held = zip(frame.next_canvas, frame.accepted, frame.entropy, strict=True)
        return [
            _cell(texts.cell(token), "accepted" if accepted else "renoised", nats)
            for token, accepted, nats in held
        ]
    length = texts.length(frame.argmax)
    emitted = zip(frame.argmax[:length], frame.entropy[:length], strict=True)
    drawn = [_cell(texts.cell(token), "final", nats) for token, nats in emitted]
    return drawn + [Text()] * (len(frame.argmax) - length)


def _cell(text: str, status: str, nats: float) -> Text:
    color = next(color for limit, color in ENTROPY_COLORS if nats <= limit)
    return Text(text, style=STYLES[status].format(color))


def picture(frame: Frame, texts: Texts, width: int) -> RenderableType:
    columns = max(1, min(16, width // (CELL_CHARACTERS + 1)))
    grid = Table.grid(padding=(0, 1))
    for _ in range(columns):
        grid.add_column(width=CELL_CHARACTERS, no_wrap=True)
    drawn = cells(frame, texts)
    for start in range(0, len(drawn), columns):
        grid.add_row(*drawn[start : start + columns])
    shown = visible(texts.answer(frame), kept="\n\t")
    answer = Text(shown, style="bold" if frame.is_final else "")
    return Group(Text(frame.title, style="dim"), grid, answer, Text())


def legend() -> Text:
    limits = [limit for limit, _ in ENTROPY_COLORS[:-1]]
    ranges = [_cell(f"≤ {limit:g}", "accepted", limit) for limit in limits]
    ranges.append(_cell(f"> {limits[-1]:g}", "accepted", float("inf")))
    statuses = [_cell(status, status, 0) for status in STYLES]
    space = Text(" ")
    head = Text("entropy (nats): ", style="dim")
    return Text.assemble(head, space.join(ranges), "   ", space.join(statuses))


# --- SVG ------------------------------------------------------------------------------------------

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
    """It starts again after the last frame. Raises ValueError without any."""
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
