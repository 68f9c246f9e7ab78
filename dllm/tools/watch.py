"""``dllm watch``: ask a server a question, and draw every denoise step that it streams."""

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live

from dllm.settings.command import OK, CommandError, new_file, positive
from dllm.tools.client import Connection, add_arguments, connect, explained
from dllm.tools.watch_drawing import Frame, Texts, animation, legend, picture

SHOWN_S = 0.4  # a denoise step in a terminal
CANVASES = {"vllm_xargs": {"diffusion_stream": "canvas"}, "return_token_ids": True}


def served_frames(
    connection: Connection, texts: Texts, question: str, max_blocks: int, seed: int
) -> Iterator[Frame]:
    """Up to ``max_blocks`` blocks. Raises CommandError: the server shows no canvases, or fails."""
    offsets: list[int] = []
    emitted: list[int] = []
    with explained(connection.url):
        stream = connection.client.chat.completions.create(
            model=connection.model,
            messages=[{"role": "user", "content": question}],
            seed=seed,
            stream=True,
            extra_body=CANVASES,
        )
        for chunk in stream:
            for choice in chunk.choices:
                emitted += getattr(choice, "token_ids", None) or []
                shown: dict[str, Any] | None = getattr(choice, "canvas", None)
                if shown is None:
                    continue
                texts.learn(shown)
                if shown["offset"] not in offsets:
                    offsets.append(shown["offset"])
                if len(offsets) > max_blocks:
                    stream.close()  # ends the request
                    return
                yield _frame(shown, len(offsets) - 1, tuple(emitted))
    if not offsets:
        raise CommandError(
            f"the server at {connection.url} answered without canvases; it has to be a server of "
            "a diffusion model with this plugin."
        )


def _frame(shown: dict[str, Any], block: int, emitted: tuple[int, ...]) -> Frame:
    return Frame(
        block=block,
        step=shown["step"],
        emitted=emitted,
        argmax=tuple(shown["argmax"]),
        entropy=tuple(one / 1000 for one in shown["entropy"]),
        accepted=tuple(map(bool, shown["accepted"])),
        next_canvas=tuple(shown["ids"]),
        is_final=shown["final"],
    )


def main(argv: Sequence[str]) -> int:
    """Draw in the terminal and, with ``--svg``, into a file."""
    given = parse(argv)
    texts = Texts()
    connection = connect(given.base_url, given.model, given.api_key)
    drawn = served_frames(connection, texts, given.question, given.max_blocks, given.seed)
    seen = show(drawn, texts, given.question)
    if given.svg:
        given.svg.write_text(animation(seen, texts, given.question))
        Console(stderr=True).print(f"Wrote {given.svg}", style="dim", highlight=False)
    return OK


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dllm watch", description=__doc__)
    parser.add_argument("question")
    add_arguments(parser)
    parser.add_argument("--seed", type=int, default=0, help="of the noise (0)")
    parser.add_argument(
        "--max-blocks", type=positive, default=4, help="end after so many blocks (4)"
    )
    parser.add_argument(
        "--svg", type=new_file, metavar="FILE", help="also write an animated SVG file"
    )
    return parser.parse_args(argv)


def show(drawn: Iterator[Frame], texts: Texts, question: str) -> list[Frame]:
    """A terminal shows each in the place of the last; a file, all of them."""
    console = Console()
    console.print(f"> {question}", style="bold", markup=False, highlight=False)
    console.print(legend())
    seen = []
    if not console.is_terminal:
        for frame in drawn:
            console.print(picture(frame, texts, console.width))
            seen.append(frame)
        return seen
    with Live(console=console, auto_refresh=False) as live:
        for frame in drawn:
            live.update(picture(frame, texts, console.width), refresh=True)
            seen.append(frame)
            time.sleep(SHOWN_S)
    return seen
