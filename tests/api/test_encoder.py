"""A text that cannot fit is refused before it is tokenized."""

from types import SimpleNamespace

import pytest
from vllm.exceptions import VLLMValidationError

from dllm.api.encoder import Encoder
from dllm.api.fill import fill_of
from dllm.api.pins import as_extra_args
from dllm.settings.pins import PINNED_CANVASES

CANVAS = 12
LONGEST_SUFFIX, LONGEST_PINS = 3 * CANVAS, 3 * CANVAS * PINNED_CANVASES


class Tokenizer:
    """One token for each character, and one of three characters; counts the texts."""

    max_chars_per_token = 3

    def __init__(self) -> None:
        self.num_texts = 0

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        self.num_texts += 1
        return [ord(letter) for letter in text]


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer()


def test_a_suffix_as_long_as_a_canvas_can_hold_is_tokenized(tokenizer):
    fill = fill_of("x" * LONGEST_SUFFIX, {}, Encoder.of(tokenizer), 1, CANVAS, 128)
    assert len(fill.suffix_ids) == LONGEST_SUFFIX and tokenizer.num_texts == 1


def test_a_longer_suffix_is_refused_before_that(tokenizer):
    with pytest.raises(VLLMValidationError) as refusal:
        fill_of("x" * (LONGEST_SUFFIX + 1), {}, Encoder.of(tokenizer), 1, CANVAS, 128)
    assert refusal.value.parameter == "suffix" and tokenizer.num_texts == 0


def test_pins_as_long_as_their_canvases_can_hold_are_tokenized(tokenizer):
    given = [{"at": 0, "text": "x" * (LONGEST_PINS - 1)}, {"at": 1, "text": "x"}]
    as_extra_args(given, Encoder.of(tokenizer), CANVAS)
    assert tokenizer.num_texts == 2


@pytest.mark.parametrize(
    "given",
    [
        [{"at": 0, "text": "x" * (LONGEST_PINS + 1)}],
        [{"at": 0, "text": "x"}] * (LONGEST_PINS + 1),
        [{"at": 0, "text": "x", "ids": [1]}, {"at": 0, "ids": [1]}, 5] * (LONGEST_PINS + 1),
    ],
    ids=["one", "many", "others among them"],
)
def test_longer_pins_are_refused_before_that(given, tokenizer):
    with pytest.raises(VLLMValidationError) as refusal:
        as_extra_args(given, Encoder.of(tokenizer), CANVAS)
    assert refusal.value.parameter == "diffusion_pins" and tokenizer.num_texts == 0


def test_vllms_tokenizers_say_how_long_a_token_is():
    from vllm.tokenizers import TokenizerLike

    assert isinstance(TokenizerLike.max_chars_per_token, property)


def test_no_special_tokens_are_added():
    plain = SimpleNamespace(encode=lambda text, add_special_tokens: (add_special_tokens,))
    plain.max_chars_per_token = 1
    assert Encoder.of(plain).encode("x") == [False]
