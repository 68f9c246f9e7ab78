"""Labels of typed decisions as tokens, and where the route is served."""

import asyncio
import contextlib
import string
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastapi import APIRouter, FastAPI

from dllm.api.decisions import protocol, route
from dllm.api.decisions.labels import Labels
from dllm.grammar.viterbi import UNLIMITED, Canvas
from dllm.models import FAMILIES
from dllm.patches import endpoints
from dllm.patches.endpoints import OurRoutes
from dllm.patches.served import Server
from dllm.settings.vllm_names import strategies
from tests.support.grammars import STOP, WORDS
from tests.support.grammars import table as grammar_table

END = 999


def of_characters(text: str) -> list[int]:
    """A tokenizer without words."""
    return [ord(character) for character in text]


def of_words(*words: str):
    """A tokenizer that knows these words, and characters."""

    def encode(text: str) -> list[int]:
        return [1000 + words.index(text)] if text in words else of_characters(text)

    return encode


@pytest.mark.parametrize(
    ("known", "texts"),
    [
        (("yes", "no", "Yes", "No"), ("yes", "no")),
        (("yes", "Yes", "No"), ("Yes", "No")),  # "no" would be two tokens
        (("true", "false"), ("true", "false")),
        ((), ("Y", "N")),
    ],
)
def test_yes_and_no_are_the_first_pair_of_single_tokens(known, texts):
    labels = Labels(of_words(*known), END).yes_no()
    assert labels.texts == texts and labels.num_rows == 1


def test_yes_and_no_are_spelled_where_no_pair_is_known():
    labels = Labels(lambda text: [ord(one) // 64 for one in text], END).yes_no()
    assert labels.texts == ("yes", "no") and {one[-1] for one in labels.tokens} == {END}


def test_levels_are_digits_while_these_last():
    labels = Labels(of_characters, END)
    assert labels.levels(["low", "high"]).texts == ("0", "1")
    assert labels.levels([f"level {i}" for i in range(11)]).texts == tuple("ABCDEFGHIJK")


def test_options_are_letters_then_codes_then_their_own_texts():
    names = [f"option {i}" for i in range(60)]
    spelled = Labels(of_characters, END)
    assert spelled.choices(names[:26]).texts == tuple(string.ascii_uppercase)
    labels = spelled.choices(names)
    assert not labels.is_code and labels.texts == tuple(names)
    assert labels.tokens[0] == (*of_characters("option 0"), END)
    codes = Labels(of_words(*(f"A{one}" for one in string.ascii_uppercase)), END).choices(
        names[:50]
    )
    assert codes.is_code and codes.num_rows == 1 and codes.texts[26] == "AA"


def test_with_blocks_every_label_is_one_token():
    words = [chr(200 + n) for n in range(100)]
    few = Labels(lambda text: of_characters(text) if text in words else [1, 2, 3], END, words)
    assert few.yes_no().texts == tuple(words[:2]) and few.yes_no().num_rows == 1
    labels = Labels(of_characters, END, words)
    options = labels.choices([f"option {i}" for i in range(126)])
    assert options.is_code and options.texts == (*string.ascii_uppercase, *words)
    assert options.num_rows == 1
    with pytest.raises(ValueError, match=r"127 options; .* 126 labels"):
        labels.choices([f"option {i}" for i in range(127)])


def test_options_that_share_a_beginning_differ_by_their_end():
    tokens = Labels(of_characters, END).choices(["a" * n for n in range(1, 41)]).tokens
    assert not any(one != other and other[: len(one)] == one for one in tokens for other in tokens)


def test_options_of_the_same_tokens_are_refused():
    with pytest.raises(ValueError, match="same tokens"):
        Labels(lambda text: [7] * min(3, len(text)), END).choices([f"abc{i}" for i in range(60)])


@pytest.mark.parametrize("seed", range(10))
def test_the_best_spelled_option_is_the_best_path_of_a_grammar(seed):
    texts = ["".join(letters) for letters in product("cdef", repeat=3)]  # one token a letter
    labels = Labels(lambda text: [WORDS.index(one.encode()) for one in text], STOP)
    tokens = labels.choices(texts).tokens
    scores = np.random.default_rng(seed).normal(size=(4, len(WORDS))).astype(np.float32)
    sums = [sum(scores[place, token] for place, token in enumerate(one)) for one in tokens]
    found, _ = grammar_table("regex", "|".join(texts))
    path = Canvas(found, [STOP]).best_path(scores, 0, UNLIMITED)
    assert tuple(path.tokens) == tokens[int(np.argmax(sums))]


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        (["a", True], ["a", "true"]),
        (["a", True, "true"], ['"a"', "true", '"true"']),
        ([False, "false", '"false"'], ["false", '"false"', r'"\"false\""']),
    ],
)
def test_a_boolean_has_another_text_than_its_name(values, texts):
    choices = [protocol.ChoiceOption(value) for value in values]
    asked = protocol.Choice(type="choice", instructions="a", choices=choices)
    assert [one.name for one in route.vllm_question(0, asked).options] == texts


def context(**changes: Any) -> Any:
    """What vLLM makes a strategy from."""
    tokenizer = SimpleNamespace(
        apply_chat_template=lambda *_, **__: [5, 6],
        get_added_vocab=lambda: {"<start>": 5},
        decode=lambda ids: "" if not ids else "m",
        encode=lambda text, **_: of_characters(text),
        eos_token_id=END,
    )
    vars(tokenizer).update(changes)
    config = SimpleNamespace(
        additional_config={},
        diffusion_config=SimpleNamespace(canvas_length=32),
        model_config=SimpleNamespace(max_model_len=64, is_multimodal_model=False, hf_config=None),
    )
    return SimpleNamespace(
        engine_client=SimpleNamespace(vllm_config=config),
        online_renderer=SimpleNamespace(renderer=SimpleNamespace(get_tokenizer=lambda: tokenizer)),
        chat_template=None,
        default_chat_template_kwargs={},
    )


def no_template(*_: Any, **__: Any) -> None:
    raise ValueError("no template")


@pytest.mark.parametrize(
    ("changes", "mode", "causal", "why"),
    [
        ({"apply_chat_template": no_template}, "raw_logprobs", False, "no template"),
        ({"eos_token_id": None}, "raw_logprobs", False, "None"),
        ({}, "raw_logits", False, "--logprobs-mode"),
        ({}, "raw_logprobs", True, "first_token = 'mask'"),
    ],
)
def test_a_checkpoint_that_cannot_be_asked_says_why(monkeypatch, changes, mode, causal, why):
    settings = SimpleNamespace(begins_causally=causal, block_size=1, never_emitted=(3,))
    monkeypatch.setattr(endpoints, "settings_of", lambda config: settings)
    monkeypatch.setattr(strategies, "READ_STRATEGIES", dict(strategies.READ_STRATEGIES))
    architecture, app = next(iter(FAMILIES)), FastAPI()
    OurRoutes().attach_router(app)
    with contextlib.suppress(ValueError):
        strategies.READ_STRATEGIES[architecture](context(**changes))
    model = SimpleNamespace(architecture=architecture, logprobs_mode=mode)
    app.state.engine_client = SimpleNamespace(model_config=model)
    assert why in route.why_not(app.state)


@pytest.mark.parametrize("is_ours", [False, True])
@pytest.mark.parametrize("has_theirs", [False, True], ids=["vLLM 0.32", "vLLM 0.33"])
def test_the_route_is_ours_for_our_families_alone(is_ours, has_theirs, monkeypatch):
    plugin, app = OurRoutes(), FastAPI()
    router = APIRouter()
    router.post(route.PATH)(no_template)
    if has_theirs:
        app.include_router(router)
    config = SimpleNamespace(served=Server.CANVASES if is_ours else None)
    engine = SimpleNamespace(vllm_config=config)
    plugin.attach_router(app)
    monkeypatch.setattr(endpoints, "settings_of", lambda config: None)  # of scores
    app.state.engine_client, app.state.vllm_config = engine, config
    monkeypatch.setattr(route, "why_not", lambda state: "no template")
    monkeypatch.setattr(endpoints, "serve_canvases", lambda state: None)
    said: list[str] = []
    monkeypatch.setattr(endpoints.logger, "warning", lambda *parts: said.append(str(parts)))
    asyncio.run(plugin.init_state(engine, app.state, None))
    served = [one.endpoint.__module__ for one in app.routes if one.path == route.PATH]
    theirs = [__name__] * has_theirs
    assert served == ([route.__name__] if is_ours else theirs)
    # Nothing has made the handler that answers: the log says so.
    assert any("501" in text for text in said) == is_ours
