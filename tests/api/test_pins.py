"""Pins as a client writes them become positions and ids."""

import pytest
from vllm.exceptions import VLLMValidationError

from dllm.api.encoder import Encoder
from dllm.api.pins import as_extra_args
from dllm.settings.pins import held_length, pins_of, without_noise

CANVAS = 12
ENCODER = Encoder(lambda text: [ord(letter) for letter in text], 1)


def test_a_text_takes_as_many_positions_as_it_has_tokens():
    given = [{"at": 5, "text": "ab"}, {"at": 40, "ids": [7]}]
    assert as_extra_args(given, ENCODER, CANVAS) == {
        "diffusion_pin_at": [5, 6, 40],
        "diffusion_pin_ids": [97, 98, 7],
    }


def test_where_pins_overlap_the_later_one_counts():
    given = [{"at": 5, "ids": [1, 2, 3]}, {"at": 6, "text": "a"}, {"at": 4, "text": "bc"}]
    written = as_extra_args(given, ENCODER, CANVAS)
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
        as_extra_args(given, ENCODER, CANVAS)


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
