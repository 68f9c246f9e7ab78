"""A text that cannot fit is refused before it is tokenized."""

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.tokenizers import TokenizerLike

from dllm.api.encoder import Encoder
from dllm.api.fill import fill_of
from dllm.api.pins import as_extra_args
from dllm.settings.pins import PINNED_CANVASES

CANVAS = 12
LONGEST_SUFFIX, LONGEST_PINS = 3 * CANVAS, 3 * CANVAS * PINNED_CANVASES


class Tokenizer:
    """One token for each character, and one of three characters; notes lengths of texts."""

    max_chars_per_token = 3

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        self.lengths.append(len(text))
        return [ord(letter) for letter in text]


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer()


def test_what_could_fit_is_tokenized(tokenizer):
    fill_of("x" * LONGEST_SUFFIX, {}, Encoder.of(tokenizer), 1, CANVAS, 128)
    given = [{"at": 0, "text": "x" * (LONGEST_PINS - 1)}, {"at": 1, "text": "x"}]
    as_extra_args(given, Encoder.of(tokenizer), CANVAS)
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
def test_longer_texts_are_refused_before_that(field, given, tokenizer):
    with pytest.raises(VLLMValidationError) as refusal:
        if field == "suffix":
            fill_of(given, {}, Encoder.of(tokenizer), 1, CANVAS, 128)
        else:
            as_extra_args(given, Encoder.of(tokenizer), CANVAS)
    assert refusal.value.parameter == field and tokenizer.lengths == []


def test_vllms_tokenizers_say_how_long_a_token_is():
    assert isinstance(TokenizerLike.max_chars_per_token, property)
