"""Thinking budgets and embeddings as prompts, which vLLM applies in kernels of its own."""

import pytest
import torch
from vllm import SamplingParams
from vllm.config.reasoning import ReasoningConfig

from tests.engine.test_sessions import answers, ask
from tests.support.engine_harness import Engine, get_engine
from tests.support.process import ROOT

CHECKPOINTS = ROOT / "checkpoints"
BEGIN, END = "<|turn>", "<turn|>"
SERVERS = {
    "drafter": (
        "tiny-ar",
        {
            "speculative_config": {
                "method": "dflash",
                "model": str(CHECKPOINTS / "tiny-drafter"),
            }
        },
    ),
    "itself": ("tiny-nemotron", {"additional_config": {"dllm": {"decoding": "self_speculation"}}}),
    "none": ("tiny-nemotron", {"additional_config": {"dllm": {"decoding": "ar"}}}),
}


@pytest.fixture(params=SERVERS)
def engine(request: pytest.FixtureRequest) -> Engine:
    name, options = SERVERS[request.param]
    thoughts = ReasoningConfig(reasoning_start_str=BEGIN, reasoning_end_str=END)
    return get_engine(
        CHECKPOINTS / name, enable_prompt_embeds=True, reasoning_config=thoughts, **options
    )


def test_a_thinking_budget_is_held(engine: Engine) -> None:
    tokenizer = engine.llm.get_tokenizer()
    prompt = tokenizer.encode(f"<bos>{BEGIN}user\nWhat is 96 + 90?", add_special_tokens=False)
    end = tokenizer.convert_tokens_to_ids(END)
    thought = len(prompt) - prompt.index(tokenizer.convert_tokens_to_ids(BEGIN)) - 1
    more = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logit_bias={end: -100.0})
    params = []
    for budget in (2, thought, thought + 7):
        params.append(more.clone())
        params[-1].thinking_token_budget = budget
    free, *held = engine.generate([prompt] * 4, [more, *params])
    assert end not in free
    assert [tokens.index(end) for tokens in held] == [0, 0, 7]
    assert held[-1][:7] == free[:7]


def test_embeddings_of_a_prompt_are_answered_as_its_tokens(engine: Engine) -> None:
    """A long and a short one, beside one of tokens."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[2, *range(20, 20 + length)] for length in (70, 9, 30)]
    expected = engine.generate(prompts, params)
    core = engine.llm.llm_engine
    for number, prompt in enumerate(prompts[:2]):
        with torch.inference_mode():
            embeds = engine.runner.model.embed_input_ids(torch.tensor(prompt))
        core.add_request(f"embeds-{number}", {"prompt_embeds": embeds.clone()}, params)
    tokens = engine.add(prompts[2], params)
    finished = engine.run()
    given = [finished[name].outputs[0].token_ids for name in ("embeds-0", "embeds-1", tokens)]
    assert [list(one) for one in given] == expected


def test_a_session_goes_on_behind_a_stop_among_kept_drafts(engine: Engine) -> None:
    """With pieces of one token, and drafts of which most are kept."""
    chat = engine.llm.get_tokenizer().apply_chat_template(
        [{"role": "user", "content": "What is 96 + 90?"}], add_generation_prompt=True
    )
    text: list[int] = []
    for piece in (list(chat["input_ids"]), [20], [21], [22]):
        text = text[:-1] + piece
        free = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        (answer,) = engine.generate([text], free)
        stop = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[answer[2]])
        (expected,) = engine.generate([text], stop)
        ask(engine, "a", piece, stop)
        assert answers(engine, ["a"])["a"] == expected
        text += expected
    engine.llm.llm_engine.engine_core.abort_requests(["a"])
