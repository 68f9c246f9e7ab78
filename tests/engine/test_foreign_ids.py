"""Ids of a checkpoint that are outside of its vocabulary: they end no request and no engine.

vLLM checks only the ids that a request itself names.
"""

import json
from collections.abc import Iterator

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from dllm.patches.admission import drop_impossible_ids
from tests.support.engine_harness import Engine, get_engine
from tests.support.family_checkpoints import EOS, SDAR, VOCAB, write

NEXT_SLOT = 7  # behind the vocabulary: a token of the next slot
CHOICE = StructuredOutputsParams(choice=["no", "yes"])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = write(tmp_path_factory.mktemp("foreign") / "model", SDAR | {"pad_token_id": 100 * VOCAB})
    ends = {"eos_token_id": [EOS, VOCAB + NEXT_SLOT, 100 * VOCAB, -1]}
    (path / "generation_config.json").write_text(json.dumps(ends))
    yield get_engine(path)


@pytest.fixture(params=["generation config", "tokenizer"], autouse=True)
def whose_end(request, engine, monkeypatch) -> None:
    if request.param == "tokenizer":
        processor = engine.llm.llm_engine.input_processor
        monkeypatch.setattr(processor, "generation_config_fields", {"eos_token_id": EOS})
        monkeypatch.setattr(processor.renderer, "get_eos_token_id", lambda: VOCAB + NEXT_SLOT)


def only(token: int, **options) -> SamplingParams:
    return SamplingParams(allowed_token_ids=[token], max_tokens=12, temperature=0.0, **options)


def test_requests_end_where_they_should_whoever_is_beside_them(engine):
    tokens = [NEXT_SLOT, NEXT_SLOT, EOS, NEXT_SLOT]
    found = engine.generate([[30, 31, 32]] * 4, [only(token) for token in tokens])
    assert found == [[NEXT_SLOT] * 12, [NEXT_SLOT] * 12, [EOS], [NEXT_SLOT] * 12]


def test_a_least_length(engine):
    params = SamplingParams(min_tokens=9, max_tokens=20, logit_bias={EOS: 100.0}, temperature=0.0)
    (tokens,) = engine.generate([[30, 31, 32]], params)
    assert tokens.index(EOS) == 9


def test_a_text_of_a_grammar_ends(engine):
    params = SamplingParams(structured_outputs=CHOICE, max_tokens=20)
    (output,) = engine.outputs([[30, 31, 32]], params)
    assert output.outputs[0].text in ("no", "yes")
    assert output.outputs[0].finish_reason == "stop"


def test_a_bad_word_that_no_output_can_hold_is_left_out():
    params = SamplingParams(bad_words=["a", "b"])
    params._bad_words_token_ids = [[3, VOCAB], [4, 5]]
    drop_impossible_ids(params, VOCAB)
    assert params.bad_words_token_ids == [[4, 5]]
