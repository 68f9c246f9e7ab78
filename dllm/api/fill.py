"""Fill in the middle: the hole between a prompt and a ``suffix``.

The prompt is context as always. Suffix and end are held on the first canvas, behind a hole whose
width nobody knows. So every width is tried, all of them in one batch. The few answers (hole, suffix
and end) to which their canvases give the highest summed logprob are read once more, as prompts: the
one that is the likeliest from left to right is taken. On a canvas each token is judged beside those
behind it, too, and too short a hole often looks right.

With blocks no token of a prompt has a logprob. There, the hole is read as the end of a prompt, and
suffix and end have the logprobs of a canvas of masks behind it, in one step.
"""

from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from dllm.api.engine_requests import at_once, finished, read_params
from dllm.api.pins import check_length
from dllm.settings.pins import PIN_ARGS, PIN_AT, PIN_IDS, PIN_MODE
from dllm.settings.request import STREAM, refuse

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput, RequestOutput

WIDTHS, END = "diffusion_fill_widths", "diffusion_fill_end"
DEFAULT_WIDTHS = (1, 32)
MAX_CANDIDATES = 64
FINALISTS = 4  # widths whose answers are read once more
# The hole is decoded together with so many of the prompt's last tokens, because the text of a token
# may depend on those before it, for instance a space at its beginning.
CONTEXT = 8

Generate = Callable[..., "AsyncGenerator[RequestOutput, None]"]
Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class Fill:
    """A hole to fill."""

    suffix_ids: tuple[int, ...]  # of the text behind it
    end: int  # the token that ends the answer
    widths: tuple[int, int]  # of the hole, the least and the greatest to try, in tokens
    canvas_width: int  # hole, suffix and end must fit into it
    one_step: Mapping[str, int] | None = None  # with blocks, extra arguments of a one-step request

    def width_range(self, min_tokens: int, max_tokens: int, room: int) -> range:
        """Those to try; ``room``: up to the context's end. VLLMValidationError: none, too many."""
        fixed = len(self.suffix_ids) + 1
        low, high = max(self.widths[0], min_tokens), self.widths[1]
        longest = min(self.canvas_width, room - 1)  # one token is behind it when it is read
        widths = range(low, min(high, max_tokens, longest - fixed) + 1)
        if not widths:
            refuse(
                "suffix",
                f"suffix has {len(self.suffix_ids)} tokens and the hole at least {low}; allowed: a "
                f"hole of at most {min(high, max_tokens)} ({WIDTHS} and max_tokens), and hole, "
                f"suffix and an end token of at most {longest} together, {self._where} or what is "
                "left of the context. Send a shorter suffix, or other widths.",
            )
        if len(widths) > MAX_CANDIDATES:
            refuse(
                WIDTHS,
                f"{WIDTHS} = {list(self.widths)} comes to {len(widths)} widths; allowed: at most "
                f"{MAX_CANDIDATES}. Send a smaller range.",
            )
        return widths

    @property
    def _where(self) -> str:
        """The name, in a refusal, of what has to hold hole, suffix and end."""
        if self.one_step is None:
            return "the canvas"
        return "the rest of the block in which the prompt ends (with blocks all are in one)"

    def reading(
        self, prompt: Any, answer: Sequence[int], width: int
    ) -> tuple[Any, "SamplingParams"]:
        """The request whose logprobs say how likely an answer (hole, suffix, end) is to read."""
        from vllm import SamplingParams

        def behind(ids: Sequence[int]) -> Any:
            read = {**prompt, "prompt_token_ids": [*prompt["prompt_token_ids"], *ids]}
            read.pop("prompt", None)  # the text of the prompt without ``ids``
            return read

        if self.one_step is None:
            cheapest = {"diffusion_canvas_length": 1, "diffusion_max_steps": 1}
            params = SamplingParams(max_tokens=1, prompt_logprobs=0, extra_args=cheapest, seed=0)
            return behind(answer), params
        rest = answer[width:]
        return behind(answer[:width]), read_params(len(rest), rest, self.one_step)

    def candidate(self, params: "SamplingParams", width: int, sample: int) -> "SamplingParams":
        """The parameters of the request that tries a width, for sample number ``sample`` of n."""
        from vllm.sampling_params import RequestOutputKind

        tokens = [*self.suffix_ids, self.end]
        held = {PIN_AT: list(range(width, width + len(tokens))), PIN_IDS: tokens, PIN_MODE: "hold"}
        params = params.clone()
        params.n = 1
        params.seed = None if params.seed is None else params.seed + sample
        params.min_tokens = 0  # of the hole; no narrower one is tried
        params.max_tokens = width + len(tokens)
        params.logprobs = params.logprobs or 0
        params.stop = []  # they end the hole (`_cut`), and may occur in the suffix
        params.output_kind = RequestOutputKind.FINAL_ONLY
        extra = {k: v for k, v in (params.extra_args or {}).items() if k not in (WIDTHS, END)}
        params.extra_args = extra | held
        return params


def fill_of(
    suffix: str, extra: dict[str, Any], tokenizer: Any, end: int, canvas: int, vocab_size: int
) -> Fill:
    """``end``: if the request names no other. Raises VLLMValidationError: it describes no hole."""
    for key in (STREAM, *PIN_ARGS):
        if extra.get(key) is not None:
            refuse_beside_suffix(key)
    widths = DEFAULT_WIDTHS if extra.get(WIDTHS) is None else extra[WIDTHS]
    end = end if extra.get(END) is None else extra[END]
    is_pair = isinstance(widths, list | tuple) and len(widths) == 2
    if (
        not is_pair
        or not all(type(one) is int for one in widths)
        or not 0 <= widths[0] <= widths[1]
    ):
        refuse(
            WIDTHS,
            f"{WIDTHS} = {widths!r:.200}; allowed: [least, greatest] tokens of the hole. Omit it "
            f"for {list(DEFAULT_WIDTHS)}.",
        )
    if type(end) is not int or not 0 <= end < vocab_size:
        refuse(
            END,
            f"{END} = {end!r:.200}; allowed: the id of a token, from 0 to {vocab_size - 1}. Omit "
            "it for the model's.",
        )
    check_length("suffix", len(suffix), canvas, tokenizer)
    width = extra.get("diffusion_canvas_length")
    return Fill(
        suffix_ids=tuple(tokenizer.encode(suffix, add_special_tokens=False)),
        end=end,
        widths=(widths[0], widths[1]),
        canvas_width=width if type(width) is int and width <= canvas else canvas,
    )


def refuse_beside_suffix(field: str) -> NoReturn:
    """Refuse a field of the body that cannot be served together with ``suffix``, with HTTP 400."""
    refuse(field, f"{field} beside suffix; allowed: one of them. Leave one out.")


async def filled(
    generate: Generate,
    fill: Fill,
    widths: Sequence[int],
    decode: Decode,
    prompt: Any,
    params: "SamplingParams",
    request_id: str,
    **options: Any,
) -> "AsyncGenerator[RequestOutput, None]":
    """What ``generate`` would yield for a model that writes the hole: one output, at the end.

    ``generate`` is vLLM's, with its arguments from ``prompt`` on. Raises the first exception of a
    candidate; all others have ended when it is raised.
    """

    def tried_with(width: int, sample: int) -> Coroutine[Any, Any, "RequestOutput"]:
        candidate = fill.candidate(params, width, sample)
        return finished(generate(prompt, candidate, f"{request_id}-{sample}-{width}", **options))

    async def best_answer(sample: int) -> tuple["RequestOutput", int]:
        outputs = await at_once(tried_with(width, sample) for width in widths)
        tried = [*zip(outputs, widths, strict=True)]
        finalists = sorted(tried, key=lambda one: _canvas_score(one[0]))[-FINALISTS:]
        scores = await at_once(
            _reading_score(generate, fill, prompt, *one, options) for one in finalists
        )
        return finalists[scores.index(max(scores))]

    best = await at_once(best_answer(sample) for sample in range(params.n))
    holes = [_hole(output.outputs[0], width, params) for output, width in best]
    context = prompt["prompt_token_ids"][-CONTEXT:]
    before = decode(context)
    for sample, hole in enumerate(holes):
        hole.index = sample
        whole = decode([*context, *hole.token_ids])
        is_split = not whole.startswith(before)  # the hole begins inside of a character
        shown = before.rstrip("\N{REPLACEMENT CHARACTER}") if is_split else before
        hole.text = whole.removeprefix(shown)
        _stop(hole, params)
    result = best[0][0]
    result.request_id = request_id
    result.outputs = holes
    yield result


def _canvas_score(output: "RequestOutput") -> float:
    """The summed logprob of an answer on its canvas, suffix and end included."""
    (answer,) = output.outputs
    return _summed(answer.token_ids, answer.logprobs)


def _summed(tokens: Sequence[int], logprobs: Any) -> float:
    return sum(of[token].logprob for token, of in zip(tokens, logprobs, strict=True))


async def _reading_score(
    generate: Generate,
    fill: Fill,
    prompt: Any,
    tried: "RequestOutput",
    width: int,
    options: dict[str, Any],
) -> float:
    """The summed logprob of an answer as it is read: each token after those before it."""
    answer, of_canvas = list(tried.outputs[0].token_ids), tried.outputs[0].logprobs
    read, params = fill.reading(prompt, answer, width)
    output = await finished(generate(read, params, f"{tried.request_id}-read", **options))
    of_prompt = output.prompt_logprobs
    if of_prompt is not None:
        return _summed(answer, of_prompt[-len(answer) :])
    assert of_canvas is not None
    of_hole = _summed(answer[:width], of_canvas[:width])
    return of_hole + _summed(answer[width:], output.outputs[0].logprobs)


def _hole(answer: "CompletionOutput", width: int, params: "SamplingParams") -> "CompletionOutput":
    """The hole's tokens alone; the text is still that of the whole answer."""
    answer.token_ids = list(answer.token_ids[:width])
    answer.logprobs = None if params.logprobs is None else answer.logprobs[:width]  # type: ignore[index]
    answer.finish_reason, answer.stop_reason = "stop", None
    return answer


def _stop(hole: "CompletionOutput", params: "SamplingParams") -> None:
    """End the text of a hole where its first stop string is."""
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
    found = [(hole.text.find(stop), stop) for stop in stops if stop in hole.text]
    if found:
        place, stop = min(found)
        hole.stop_reason = stop
        hole.text = hole.text[: place + len(stop) * params.include_stop_str_in_output]
