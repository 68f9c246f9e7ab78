"""``dllm watch``: answer a question, and draw every denoise step.

With ``--base-url`` a server answers (`tools.watch_server`). Else the model runs here: its forward
pass is Hugging Face's, in fp32, and the denoise step after it is the server's
(`models.gemma.step`). Tests compare the server with it. With the same seed the server goes through
the same canvases, apart from effects of rounding in its dtype.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.live import Live
from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion, DynamicCache
from transformers.utils.logging import disable_progress_bar

from dllm.engine.canvas_rows import CanvasRows
from dllm.models.gemma import rule
from dllm.models.gemma.settings import GemmaSettings
from dllm.models.gemma.step import denoise, first_canvases, next_step
from dllm.settings.command import OK, CommandError
from dllm.tools.client import add_key, connect
from dllm.tools.watch_drawing import Frame, Labels, legend, picture
from dllm.tools.watch_server import StreamedTexts, labels_of, served_frames
from dllm.tools.watch_svg import animation

BUNDLED = Path("checkpoints/tiny-dllm")  # the checkpoint of `make serve`


@dataclass(frozen=True)
class Watched:
    """A Hugging Face model in this process, and what its checkpoint says about denoising."""

    model: DiffusionGemmaForBlockDiffusion
    settings: GemmaSettings
    eos_ids: frozenset[int]
    vocab_size: int

    @classmethod
    def load(cls, path: Path) -> "Watched":
        """Load the checkpoint in the folder ``path``.

        Raises:
            CommandError: it holds no diffusion model, or its configuration is wrong.
        """
        try:
            config = json.loads((path / "config.json").read_text())
            generation = json.loads((path / "generation_config.json").read_text())
        except (OSError, ValueError) as error:
            raise CommandError(f"--model {path}: {error}; give a checkpoint's folder.") from None
        architecture = config.get("architectures", ["none"])[0]
        if architecture != DiffusionGemmaForBlockDiffusion.__name__:
            raise CommandError(
                f"--model {path} is a {architecture}; allowed: a "
                f"{DiffusionGemmaForBlockDiffusion.__name__}, whose canvases can be watched."
            )
        try:
            settings = GemmaSettings.from_mappings(config, generation)
        except ValueError as error:
            raise CommandError(f"--model {path}: {error}") from None
        disable_progress_bar()
        model = DiffusionGemmaForBlockDiffusion.from_pretrained(path, dtype=torch.float32).eval()
        eos = generation["eos_token_id"]
        eos_ids = frozenset(eos if isinstance(eos, list) else [eos])
        return cls(model, settings, eos_ids, config["text_config"]["vocab_size"])

    @torch.inference_mode()
    def logits(
        self, context: Sequence[int], canvas: torch.Tensor, previous: torch.Tensor | None
    ) -> torch.Tensor:
        """The logits of one denoise step: [C, V] fp32.

        Args:
            context: token ids of the prompt and of the blocks that were emitted.
            canvas: [1, C] token ids.
            previous: [1, C, V], logits / temperature of the step before; None in the first step.
        """
        output = self.model(
            input_ids=torch.tensor([list(context)]),
            past_key_values=DynamicCache(config=self.model.config.get_text_config(decoder=True)),
            decoder_input_ids=canvas,
            self_conditioning_logits=previous,
        )
        return output.logits[0]


def frames(
    watched: Watched, prompt_ids: Sequence[int], max_blocks: int, seed: int
) -> Iterator[Frame]:
    """Every denoise step of an answer, up to the block with an end-of-sequence token.

    Ends after ``max_blocks`` blocks if there is no such token.
    """
    emitted: list[int] = []
    for block in range(max_blocks):
        frame = None
        for frame in block_frames(watched, prompt_ids, tuple(emitted), block, seed):
            yield frame
        assert frame is not None  # a block takes at least one denoise step
        emitted += frame.argmax
        if watched.eos_ids.intersection(frame.argmax):
            return


def block_frames(
    watched: Watched, prompt_ids: Sequence[int], emitted: tuple[int, ...], block: int, seed: int
) -> Iterator[Frame]:
    """The denoise steps of block number ``block``, which follows the tokens in ``emitted``."""
    settings = watched.settings
    context = [*prompt_ids, *emitted]
    starts = torch.tensor([len(context)])
    rows = CanvasRows.whole(starts, settings.canvas_length)
    canvases = first_canvases(
        torch.tensor([seed]), starts, settings, watched.eos_ids, watched.vocab_size
    )
    previous = None
    converged = False
    while not converged:
        canvas = canvases.ids[None]  # [1, C]
        logits = watched.logits(context, canvas, previous)
        step = denoise(logits, rows, canvases, settings)
        entropy = step.stats.entropy[None]
        accept = rule.accept_mask(entropy, rows.widths, settings.entropy_bound)
        converged = bool(step.converged)
        yield Frame(
            block=block,
            step=int(step.steps_done),
            temperature=float(step.temperature[0]),
            emitted=emitted,
            canvas=tuple(canvas[0].tolist()),
            argmax=tuple(step.stats.argmax.tolist()),
            entropy=tuple(entropy[0].tolist()),
            accepted=tuple(accept[0].tolist()),
            next_canvas=tuple(step.canvas[0].tolist()),
            is_final=converged,
        )
        canvases = next_step(canvases, step)
        previous = logits[None] / step.temperature[:, None]  # [1, C, V]


def main(argv: Sequence[str]) -> int:
    """Run ``dllm watch``: draw in the terminal and, with ``--svg``, into a file."""
    given = parse(argv)
    drawn, labels = of_server(given) if given.base_url else of_this_process(given)
    seen = show(drawn, labels, given.question, given.delay)
    if given.svg:
        given.svg.write_text(animation(seen, labels, given.question))
        Console(stderr=True).print(f"Wrote {given.svg}", style="dim", highlight=False)
    return OK


def of_server(given: argparse.Namespace) -> tuple[Iterator[Frame], Labels]:
    """The denoise steps of the server that the command line names."""
    texts = StreamedTexts()
    connection = connect(given.base_url, given.model, given.api_key)
    drawn = served_frames(connection, texts, given.question, given.max_blocks, given.seed)
    return drawn, labels_of(texts)


def of_this_process(given: argparse.Namespace) -> tuple[Iterator[Frame], Labels]:
    """The denoise steps of a checkpoint that is loaded here."""
    watched = Watched.load(given.model)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    labels = Labels(tokenizer, watched.eos_ids)
    prompt_ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": given.question}],
        add_generation_prompt=True,
        return_dict=False,
    )
    return frames(watched, prompt_ids, given.max_blocks, given.seed), labels


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line; exits with status 2 if it is wrong."""
    parser = argparse.ArgumentParser(prog="dllm watch", description=__doc__)
    parser.add_argument("question")
    parser.add_argument("--base-url", metavar="URL", help="of a server; without it none is needed")
    parser.add_argument(
        "--model",
        metavar="NAME",
        help=f"with --base-url a served model's, else a checkpoint's folder ({BUNDLED})",
    )
    add_key(parser)
    parser.add_argument("--seed", type=int, default=0, help="of the noise (0)")
    parser.add_argument("--max-blocks", type=int, default=4, help="end after so many blocks (4)")
    parser.add_argument("--delay", type=float, default=0.4, help="seconds a denoise step (0.4)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also write an animated SVG file")
    given = parser.parse_args(argv)
    if not given.base_url:
        given.model = Path(given.model or BUNDLED)
    if given.max_blocks < 1:
        parser.error(f"--max-blocks {given.max_blocks}; allowed: an integer of at least 1.")
    if not 0 <= given.delay < float("inf"):
        parser.error(f"--delay {given.delay}; allowed: a number of seconds of at least 0.")
    if given.svg and not given.svg.absolute().parent.is_dir():
        parser.error(f"--svg {given.svg}: there is no folder {given.svg.parent}.")
    return given


def show(drawn: Iterator[Frame], labels: Labels, question: str, delay: float) -> list[Frame]:
    """Draw each frame as it comes, and return them all.

    A terminal shows one frame in the place of the other, ``delay`` seconds each. Anything else, for
    example a file, gets them one below the other.
    """
    console = Console()
    console.print(f"> {question}", style="bold", markup=False, highlight=False)
    console.print(legend())
    seen = []
    if not console.is_terminal:
        for frame in drawn:
            console.print(picture(frame, labels, console.width))
            seen.append(frame)
        return seen
    with Live(console=console, auto_refresh=False) as live:
        for frame in drawn:
            live.update(picture(frame, labels, console.width), refresh=True)
            seen.append(frame)
            time.sleep(delay)
    return seen
