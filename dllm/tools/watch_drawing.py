"""Draws denoise steps: the canvas as cells, and the cells in a terminal.

Every canvas position is a cell with the token that it holds after the step. Its colour shows the
entropy of the model's distribution there; its status is what the step did:

    accepted  the model's sampled token stays              filled
    renoised  a random token was put in its place          outlined (in the terminal: dim)
    final     the block has converged and is emitted       filled, framed (in the terminal: bold)
    unused    after the end of a converged answer          empty
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dllm.tools.visible import visible

Status = Literal["accepted", "renoised", "final", "unused"]
LEGEND: tuple[Status, ...] = ("accepted", "renoised", "final")

# (Largest entropy in nats, colour). The bundled model's vocabulary of 832 tokens has at most 6.7.
ENTROPY_COLORS = (
    (0.01, "#78c679"),
    (0.1, "#c2e699"),
    (0.5, "#fee391"),
    (1.5, "#fdae6b"),
    (float("inf"), "#f4836b"),
)
CELL_CHARACTERS = 9


@dataclass(frozen=True)
class Frame:
    """One denoise step of one block. Tuples have one entry for each canvas position.

    Attributes:
        block: counted from 0.
        step: counted from 1 in each block.
        emitted: the tokens of all blocks before (of any length).
        argmax: the most likely tokens.
        entropy: of the model's distributions, nats.
        accepted: whether the sampled token stays.
        next_canvas: what the next step sees: the sampled token where accepted, else a random one.
        is_final: the block has converged; its argmax is emitted.
    """

    block: int
    step: int
    emitted: tuple[int, ...]
    argmax: tuple[int, ...]
    entropy: tuple[float, ...]
    accepted: tuple[bool, ...]
    next_canvas: tuple[int, ...]
    is_final: bool

    @property
    def title(self) -> str:
        """One line that says which step it is, and what it did."""
        mean = sum(self.entropy) / len(self.entropy)
        return (
            f"block {self.block + 1}, step {self.step}: "
            f"{sum(self.accepted)}/{len(self.accepted)} accepted, mean entropy {mean:.3f}"
            + (", converged" if self.is_final else "")
        )


@dataclass(frozen=True)
class Cell:
    """What is drawn at one canvas position."""

    text: str  # of the token
    status: Status
    level: int  # index into ENTROPY_COLORS

    @property
    def color(self) -> str:
        return ENTROPY_COLORS[self.level][1]


@dataclass
class Texts:
    """The texts of the tokens that a stream has shown; a stream needs no tokenizer here.

    Attributes:
        by_id: of each token.
        ends: tokens that ended an answer.
    """

    by_id: dict[int, str] = field(default_factory=dict)
    ends: set[int] = field(default_factory=set)

    def learn(self, canvas: dict[str, Any]) -> None:
        """Note what a frame of the stream shows."""
        self.by_id |= zip(canvas["ids"], canvas["tokens"], strict=True)
        length = canvas["length"]
        if length < len(canvas["argmax"]):  # it ends in front of the canvas's end
            self.ends.add(canvas["argmax"][length - 1])

    def of(self, token_id: int) -> str:
        """A token that was never shown is an ellipsis."""
        return self.by_id.get(token_id, "…")

    def cell(self, token_id: int) -> str:
        """One token, short and on one line, with visible spaces."""
        text = visible(self.of(token_id).replace(" ", "·").replace("\n", "⏎"))
        return text if len(text) <= CELL_CHARACTERS else text[: CELL_CHARACTERS - 1] + "…"

    def answer(self, frame: Frame) -> str:
        """The text of the answer if the block's argmax were emitted now."""
        ids = [*frame.emitted, *frame.argmax]
        return "".join(self.of(one) for one in ids[: self.length(ids)] if one not in self.ends)

    def length(self, ids: Sequence[int]) -> int:
        """Number of tokens up to and including the first that ends an answer; all if none."""
        ends = (i + 1 for i, token_id in enumerate(ids) if token_id in self.ends)
        return next(ends, len(ids))


def entropy_level(nats: float) -> int:
    """The index in ENTROPY_COLORS of an entropy's colour."""
    return next(i for i, (limit, _) in enumerate(ENTROPY_COLORS) if nats <= limit)


def entropy_ranges() -> list[str]:
    """The entropies that each colour stands for, as text for the legend."""
    limits = [limit for limit, _ in ENTROPY_COLORS[:-1]]
    return [*(f"≤ {limit:g}" for limit in limits), f"> {limits[-1]:g}"]


def cells(frame: Frame, texts: Texts) -> list[Cell]:
    """The canvas after a step, one cell for each position."""
    statuses: list[Status]
    if frame.is_final:
        length = texts.length(frame.argmax)
        held = [texts.cell(token_id) for token_id in frame.argmax[:length]]
        held += [""] * (len(frame.argmax) - length)
        statuses = ["final" if place < length else "unused" for place in range(len(held))]
    else:
        held = [texts.cell(token_id) for token_id in frame.next_canvas]
        statuses = ["accepted" if accepted else "renoised" for accepted in frame.accepted]
    levels = [entropy_level(nats) for nats in frame.entropy]
    return [Cell(*parts) for parts in zip(held, statuses, levels, strict=True)]


def picture(frame: Frame, texts: Texts, width: int) -> RenderableType:
    """A step for a terminal of ``width`` characters: title, canvas and the answer so far."""
    columns = max(1, min(16, width // (CELL_CHARACTERS + 1)))
    grid = Table.grid(padding=(0, 1))
    for _ in range(columns):
        grid.add_column(width=CELL_CHARACTERS, no_wrap=True)
    drawn = [_styled(cell) for cell in cells(frame, texts)]
    for start in range(0, len(drawn), columns):
        grid.add_row(*drawn[start : start + columns])
    shown = visible(texts.answer(frame), kept="\n\t")
    answer = Text(shown, style="bold" if frame.is_final else "")
    return Group(Text(frame.title, style="dim"), grid, answer, Text())


def legend() -> Text:
    """Explains the colours and styles, for a terminal."""
    parts = [Text("entropy (nats): ", style="dim")]
    for level, shown in enumerate(entropy_ranges()):
        parts += [_styled(Cell(shown, "accepted", level)), Text(" ")]
    samples = [_styled(Cell(status, status, 0)) for status in LEGEND]
    return Text.assemble(*parts, "  ", Text(" ").join(samples))


def _styled(cell: Cell) -> Text:
    style = {
        "accepted": f"black on {cell.color}",
        "renoised": f"dim italic {cell.color}",
        "final": f"bold underline black on {cell.color}",
        "unused": "",
    }[cell.status]
    return Text(cell.text, style=style)
