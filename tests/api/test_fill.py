"""Fill in the middle: which widths are tried, which answer is taken, and what the client gets."""

import asyncio
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from dllm.api.fill import Fill, fill_of, filled
from tests.support.letters import Letters

END = 1
CANVAS = 12


def hole(suffix: str = "yz", extra: dict[str, Any] | None = None) -> Fill:
    return fill_of(suffix, extra or {}, Letters(), END, CANVAS, 128)


def decode(ids: list[int]) -> str:
    return "".join(map(chr, ids))


# --- what is tried --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "min_tokens", "max_tokens", "room", "expected"),
    [
        ({}, 0, 5, 100, range(1, 6)),
        ({}, 0, 50, 100, range(1, 10)),  # 12 of the canvas, without two of the suffix and the end
        ({}, 0, 50, 9, range(1, 6)),
        ({}, 3, 5, 100, range(3, 6)),
        ({"diffusion_fill_widths": [0, 3]}, 0, 50, 100, range(4)),
        ({"diffusion_fill_widths": [4, 4]}, 0, 50, 100, range(4, 5)),
        ({"diffusion_canvas_length": 6}, 0, 50, 100, range(1, 4)),
    ],
)
def test_the_widths_that_fit(extra, min_tokens, max_tokens, room, expected):
    assert hole(extra=extra).width_range(min_tokens, max_tokens, room) == expected


@pytest.mark.parametrize(
    ("suffix", "extra", "min_tokens", "max_tokens", "parameter"),
    [
        ("y" * 11, {}, 0, 50, "suffix"),
        ("yz", {"diffusion_fill_widths": [10, 20]}, 0, 50, "suffix"),
        ("yz", {"diffusion_fill_widths": [6, 8]}, 0, 5, "suffix"),
        ("yz", {}, 6, 5, "suffix"),
        ("yz", {"diffusion_fill_widths": [0, 64]}, 0, 1000, "diffusion_fill_widths"),
    ],
)
def test_a_hole_that_does_not_fit_and_too_many_widths_are_refused(
    suffix, extra, min_tokens, max_tokens, parameter
):
    canvas = 256 if max_tokens == 1000 else CANVAS
    described = fill_of(suffix, extra, Letters(), END, canvas, 128)
    with pytest.raises(VLLMValidationError) as refusal:
        described.width_range(min_tokens, max_tokens, 1000)
    assert refusal.value.parameter == parameter


NO_WIDTHS = ([], 0, [1], [1, 2, 3], [3, 2], [-1, 2], ["a", "b"], "ab", [1.5, 2])
NO_HOLES = [
    *(("diffusion_fill_widths", value) for value in NO_WIDTHS),
    *(("diffusion_fill_end", value) for value in ("x", 128, -1)),
    *((key, [1]) for key in ("diffusion_stream", "diffusion_pin_at", "diffusion_seed_canvas")),
]


@pytest.mark.parametrize(("key", "value"), NO_HOLES)
def test_what_describes_no_hole_is_refused(key, value):
    with pytest.raises(VLLMValidationError) as refusal:
        hole(extra={key: value})
    assert refusal.value.parameter == key


def test_a_candidate_holds_suffix_and_end_behind_its_hole():
    params = SamplingParams(
        n=3,
        seed=7,
        min_tokens=20,
        max_tokens=50,
        stop=["\n"],
        extra_args={"diffusion_max_steps": 9},
    )
    assert hole(extra={"diffusion_fill_end": 0}).end == 0
    tried = hole(extra={"diffusion_fill_end": 6}).candidate(params, width=4, sample=2)
    assert tried.extra_args == {
        "diffusion_max_steps": 9,
        "diffusion_pin_at": [4, 5, 6],
        "diffusion_pin_ids": [121, 122, 6],
        "diffusion_pin_mode": "hold",
    }
    assert (tried.n, tried.seed, tried.max_tokens, tried.logprobs) == (1, 9, 7, 0)
    assert tried.min_tokens == 0  # vLLM's engine dies of more than max_tokens
    assert not tried.stop and params.stop == ["\n"] and params.n == 3


def test_with_blocks_all_are_in_the_block_of_the_prompts_end():
    """The hole is read as a prompt; suffix and end on masks behind it, in one step."""
    in_block = replace(hole(), canvas_width=9, one_step={"diffusion_max_steps": 1})
    assert in_block.width_range(0, 50, 100) == range(1, 7)
    with pytest.raises(VLLMValidationError, match="the rest of the block in which the prompt"):
        in_block.width_range(7, 50, 100)
    prompt = {"prompt_token_ids": [50, 51], "prompt": "23"}
    read, params = in_block.reading(prompt, [97, 97, 121, 122, END], width=2)
    assert read == {"prompt_token_ids": [50, 51, 97, 97]}
    assert (params.max_tokens, params.logprob_token_ids) == (3, [END, 121, 122])
    assert (params.temperature, params.ignore_eos) == (0, True)
    assert params.extra_args == {"diffusion_max_steps": 1}


# --- what is taken --------------------------------------------------------------------------------


class Model:
    """Writes ``a`` into holes. Canvases like width 3, 5 and 6 in that order, reading likes 5."""

    canvas = {3: -1.0, 5: -2.0, 6: -3.0}
    reading = {2: -1.0, 3: -9.0, 5: -2.0, 6: -4.0}

    def __init__(self) -> None:
        self.asked: list[tuple[str, SamplingParams]] = []

    async def generate(self, prompt: Any, params: SamplingParams, name: str, **_: Any) -> Any:
        self.asked.append((name, params))
        ids = prompt["prompt_token_ids"]
        if params.prompt_logprobs is not None:
            width = len(ids) - 2 - 3
            logprobs = [None, *({token: SimpleNamespace(logprob=0.0)} for token in ids[1:])]
            logprobs[-1] = {ids[-1]: SimpleNamespace(logprob=self.reading.get(width, -99.0))}
            read = SimpleNamespace(finish_reason="length")
            yield SimpleNamespace(prompt_logprobs=logprobs, outputs=[read])
            return
        if params.logprob_token_ids is not None:
            score = self.reading.get(len(ids) - 2, -99.0) / 3
            logprobs = [{token: SimpleNamespace(logprob=score)} for token in (121, 122, END)]
            answer = SimpleNamespace(logprobs=logprobs, finish_reason="length")
            yield SimpleNamespace(prompt_logprobs=None, outputs=[answer])
            return
        tokens = [97] * params.max_tokens
        at, held = (params.extra_args[f"diffusion_pin_{name}"] for name in ("at", "ids"))
        tokens[at[0] :] = held
        width = at[0]
        scores = [self.canvas.get(width, -50.0 - width) / len(tokens)] * len(tokens)
        yield SimpleNamespace(
            request_id=name,
            outputs=[
                SimpleNamespace(
                    index=0,
                    finish_reason="length",
                    text="".join(map(chr, tokens[:-1])),
                    token_ids=tokens,
                    logprobs=[
                        {token: SimpleNamespace(logprob=score)}
                        for token, score in zip(tokens, scores, strict=True)
                    ],
                )
            ],
        )


def fill(
    params: SamplingParams, widths: range = range(1, 8), asked: Fill | None = None
) -> tuple[Any, Model]:
    async def run() -> Any:
        model = Model()
        prompt = {"prompt_token_ids": [50, 51], "prompt": "23"}
        given = asked or hole()
        outputs = filled(model.generate, given, widths, decode, prompt, params, "name")
        return [output async for output in outputs], model

    (output,), model = asyncio.run(run())
    return output, model


def test_the_likeliest_to_read_of_the_likeliest_canvases_is_taken():
    output, model = fill(SamplingParams(max_tokens=50))
    (answer,) = output.outputs
    assert (answer.text, answer.token_ids, answer.logprobs) == ("aaaaa", [97] * 5, None)
    assert (answer.finish_reason, answer.stop_reason, answer.index) == ("stop", None, 0)
    assert output.request_id == "name"
    # All widths once; four are read. Width 2 reads best of all, and is none of them.
    assert len(model.asked) == 7 + 4
    assert len({name for name, _ in model.asked}) == 11


def test_with_blocks_the_readings_decide_too():
    in_block = replace(hole(), canvas_width=11, one_step={"diffusion_max_steps": 1})
    output, model = fill(SamplingParams(max_tokens=50), asked=in_block)
    assert output.outputs[0].token_ids == [97] * 5 and len(model.asked) == 7 + 4


def test_each_sample_is_searched_for_itself():
    output, model = fill(SamplingParams(max_tokens=50, n=2, seed=3, logprobs=0))
    assert [answer.index for answer in output.outputs] == [0, 1]
    assert all(len(answer.logprobs) == len(answer.token_ids) == 5 for answer in output.outputs)
    seeds = {params.seed for _, params in model.asked if params.prompt_logprobs is None}
    assert seeds == {3, 4}


def test_if_a_candidate_fails_the_others_end_first():
    class Failing(Model):
        """Fails at width 3, behind a turn of the loop; every other candidate waits for ever."""

        ended = 0

        async def generate(self, prompt: Any, params: SamplingParams, name: str, **_: Any) -> Any:
            if params.max_tokens == 3 + 3:
                await asyncio.sleep(0)
                raise VLLMValidationError("no", parameter="width 3")
            try:
                await asyncio.Event().wait()
            finally:
                self.ended += 1
            yield

    async def run() -> None:
        model = Failing()
        prompt = {"prompt_token_ids": [50, 51]}
        params = SamplingParams(max_tokens=50, n=2)
        with pytest.raises(VLLMValidationError) as failure:
            await anext(filled(model.generate, hole(), range(1, 8), decode, prompt, params, "name"))
        assert failure.value.parameter == "width 3"
        assert model.ended > 0 and len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_a_hole_may_begin_inside_of_a_character(monkeypatch):
    """The prompt "2" and the first half of one, which the hole's first token ends."""
    text = {(50, 51): "2\N{REPLACEMENT CHARACTER}", (50, 51, *[97] * 5): "2\N{SNOWMAN}aaaa"}
    monkeypatch.setattr(sys.modules[__name__], "decode", lambda ids: text[(*ids,)])
    output, _ = fill(SamplingParams(max_tokens=50))
    assert output.outputs[0].text == "\N{SNOWMAN}aaaa"


def test_a_stop_string_ends_the_hole():
    for stop, is_shown, expected in (
        (["aaa", "yz"], False, ("", "aaa")),
        (["z"], False, ("aaaaa", None)),  # the suffix has it, the hole not
        (["aaa"], True, ("aaa", "aaa")),
    ):
        params = SamplingParams(max_tokens=50, stop=stop, include_stop_str_in_output=is_shown)
        (answer,) = fill(params)[0].outputs
        assert (answer.text, answer.stop_reason) == expected and answer.finish_reason == "stop"
