"""``dllm watch --base-url``: the denoise steps of any server that streams its canvases."""

from collections.abc import Iterator, Sequence
from typing import Any

from dllm.settings.command import CommandError
from dllm.tools.client import Connection, explained
from dllm.tools.watch_drawing import Frame, Labels

CANVASES = {"vllm_xargs": {"diffusion_stream": "canvas"}, "return_token_ids": True}


class StreamedTexts:
    """The texts of the tokens that a stream has shown; a stream needs no tokenizer here.

    Attributes:
        ends: tokens that ended an answer.
    """

    def __init__(self) -> None:
        self.ends: set[int] = set()
        self._texts: dict[int, str] = {}

    def learn(self, canvas: dict[str, Any]) -> None:
        """Note what a frame of the stream shows."""
        self._texts |= zip(canvas["ids"], canvas["tokens"], strict=True)
        length = canvas["length"]
        if length < len(canvas["argmax"]):  # it ends in front of the canvas's end
            self.ends.add(canvas["argmax"][length - 1])

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of ids; a token that was never shown is an ellipsis."""
        shown = (one for one in ids if not (skip_special_tokens and one in self.ends))
        return "".join(self._texts.get(one, "…") for one in shown)


def served_frames(
    connection: Connection, texts: StreamedTexts, question: str, max_blocks: int, seed: int
) -> Iterator[Frame]:
    """Every denoise step that the server shows of an answer, up to ``max_blocks`` blocks.

    Raises:
        CommandError: the server does not stream canvases, or fails.
    """
    offsets: list[int] = []
    emitted: list[int] = []
    canvas: tuple[int, ...] | None = None
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
                    canvas = None
                if len(offsets) > max_blocks:
                    stream.close()  # ends the request
                    return
                frame = _frame(shown, len(offsets) - 1, tuple(emitted), canvas)
                canvas = frame.next_canvas
                yield frame
    if not offsets:
        raise CommandError(
            f"the server at {connection.url} answered without canvases; it has to be a server of "
            "a diffusion model with this plugin."
        )


def labels_of(texts: StreamedTexts) -> Labels:
    """What the drawing calls the tokens of a stream."""
    return Labels(texts, texts.ends)


def _frame(
    shown: dict[str, Any], block: int, emitted: tuple[int, ...], before: tuple[int, ...] | None
) -> Frame:
    ids = tuple(shown["ids"])
    return Frame(
        block=block,
        step=shown["step"],
        temperature=None,  # a stream does not say
        emitted=emitted,
        canvas=before or ids,
        argmax=tuple(shown["argmax"]),
        entropy=tuple(one / 1000 for one in shown["entropy"]),
        accepted=tuple(map(bool, shown["accepted"])),
        next_canvas=ids,
        is_final=shown["final"],
    )
