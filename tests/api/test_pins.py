"""Pins as a client writes them become positions and ids."""

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.tokenizers import TokenizerLike

from dllm.api.fill import fill_of
from dllm.api.pins import as_extra_args
from dllm.settings.pins import PINNED_CANVASES, held_length, pins_of, without_noise
from tests.support.letters import Letters

CANVAS = 12
LONGEST_SUFFIX, LONGEST_PINS = 3 * CANVAS, 3 * CANVAS * PINNED_CANVASES


def test_a_text_takes_as_many_positions_as_it_has_tokens():
    given = [{"at": 5, "text": "ab"}, {"at": 40, "ids": [7]}]
    assert as_extra_args(given, Letters(), CANVAS) == {
        "diffusion_pin_at": [5, 6, 40],
        "diffusion_pin_ids": [97, 98, 7],
    }


def test_where_pins_overlap_the_later_one_counts():
    given = [{"at": 5, "ids": [1, 2, 3]}, {"at": 6, "text": "a"}, {"at": 4, "text": "bc"}]
    written = as_extra_args(given, Letters(), CANVAS)
    assert dict(zip(*written.values(), strict=True)) == {4: 98, 5: 99, 6: 97, 7: 3}


@pytest.mark.parametrize(
    "given",
    [
        "a",
        [],
        {},
        [5],
        [{"at": 5}],
        [{"text": "a"}],
        [{"at": "5", "text": "a"}],
        [{"at": True, "text": "a"}],
        [{"at": -1, "text": "a"}],
        [{"at": 5, "text": ""}],
        [{"at": 5, "text": 3}],
        [{"at": 5, "ids": [1.5]}],
        [{"at": 5, "ids": 7}],
        [{"at": 5, "text": "a", "ids": [7]}],
        [{"at": 5, "text": "a", "mode": "hold"}],
        [{"at": 0, "text": "a"}, None],
        [{"at": 0, "text": "\ud83d"}],
    ],
)
def test_what_is_no_list_of_pins_is_refused(given):
    with pytest.raises(VLLMValidationError, match=r"diffusion_pins: .*allowed: a list of"):
        as_extra_args(given, Letters(), CANVAS)


def test_pins_of_a_seed_canvas_and_others_are_one_table():
    extra = {
        "diffusion_seed_canvas": [10, -1, 12],
        "diffusion_pinned": [2, 0],
        "diffusion_pin_at": [9, 1],
        "diffusion_pin_ids": [20, 21],
    }
    assert list(pins_of(extra).items()) == [(0, 10), (1, 21), (2, 12), (9, 20)]
    assert pins_of({}) == {}


def test_how_long_an_answer_has_to_be_for_its_pins():
    assert held_length({}, {1}) == 0
    assert held_length({3: 10, 7: 11}, {1}) == 7
    assert held_length({3: 10, 5: 1, 7: 11}, {1}) == 5


def test_vllms_check_sees_no_noise():
    extra = {"diffusion_seed_canvas": [5, -1], "diffusion_max_steps": 3}
    assert without_noise(extra) == extra | {"diffusion_seed_canvas": [5, 0]}
    assert extra["diffusion_seed_canvas"] == [5, -1]
    assert without_noise({"diffusion_seed_canvas": [5]})["diffusion_seed_canvas"] == [5]


def test_what_could_fit_is_tokenized():
    tokenizer = Letters(3)
    fill_of("x" * LONGEST_SUFFIX, {}, tokenizer, 1, CANVAS, 128)
    given = [{"at": 0, "text": "x" * (LONGEST_PINS - 1)}, {"at": 1, "text": "x"}]
    as_extra_args(given, tokenizer, CANVAS)
    assert tokenizer.lengths == [LONGEST_SUFFIX, LONGEST_PINS - 1, 1]


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("suffix", "x" * (LONGEST_SUFFIX + 1)),
        ("diffusion_pins", [{"at": 0, "text": "x" * (LONGEST_PINS + 1)}]),
        ("diffusion_pins", [{"at": 0, "text": "x"}] * (LONGEST_PINS + 1)),
        (
            "diffusion_pins",
            [{"at": 0, "text": "x", "ids": [1]}, {"at": 0, "ids": [1]}, 5] * (LONGEST_PINS + 1),
        ),
    ],
    ids=["suffix", "one pin", "many pins", "others among them"],
)
def test_longer_texts_are_refused_before_they_are_tokenized(field, given):
    tokenizer = Letters(3)
    with pytest.raises(VLLMValidationError) as refusal:
        if field == "suffix":
            fill_of(given, {}, tokenizer, 1, CANVAS, 128)
        else:
            as_extra_args(given, tokenizer, CANVAS)
    assert refusal.value.parameter == field and tokenizer.lengths == []


def test_vllms_tokenizers_say_how_long_a_token_is():
    assert isinstance(TokenizerLike.max_chars_per_token, property)
