"""Pins as a client writes them: ``"diffusion_pins": [{"at": 5, "text": "..."}]`` in the request.

They become the extra arguments that the engine reads (``settings.pins``): a text of several tokens
takes as many positions, from ``at`` on. Where two of a list overlap, the later one counts: a client
need not know how many tokens a text has.
"""

from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, model_validator

from dllm.settings.options import CHECKED, Natural
from dllm.settings.pins import PIN_AT, PIN_IDS, PINNED_CANVASES
from dllm.settings.request import refuse

FIELD = "diffusion_pins"
SHAPE = (
    'a list of {"at": answer position, "text": "..."}, or with "ids": [...] in the place of text'
)


class Pin(BaseModel):
    # With a bound pydantic refuses texts with half of a surrogate pair.
    model_config = CHECKED | {"str_max_length": 10 << 20}

    at: Natural
    text: Annotated[str, Field(min_length=1)] | None = None
    ids: Annotated[list[int], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _has_tokens_once(self) -> "Pin":
        if (self.text is None) == (self.ids is None):
            raise ValueError
        return self


PINS = TypeAdapter(Annotated[list[Pin], Field(min_length=1, fail_fast=True)])


def check_length(field: str, num_chars: int, num_tokens: int, tokenizer: Any) -> None:
    """Refuse more characters of text than ``num_tokens`` tokens can stand for; tokenizes nothing.

    For texts that do not go the way of prompts. The API server serves nobody else while it
    tokenizes them.
    """
    longest = num_tokens * tokenizer.max_chars_per_token
    if num_chars > longest:
        refuse(
            field,
            f"{field} has {num_chars} characters of text; allowed: at most {longest}, more do "
            f"not fit {num_tokens} tokens. Send a shorter text.",
        )


def as_extra_args(given: Any, tokenizer: Any, canvas_length: int) -> dict[str, list[int]]:
    """Raises VLLMValidationError: ``given`` is no list of pins, or its texts are too long."""
    try:
        pins = PINS.validate_python(given)
    except ValidationError:
        refuse(FIELD, f"{FIELD}: {given!r:.200}; allowed: {SHAPE}. Send that, or omit it.")
    most = PINNED_CANVASES * canvas_length
    num_ids = sum(len(pin.ids or ()) for pin in pins)
    if max(len(pins), num_ids) > most:
        refuse(
            FIELD,
            f"{FIELD} has {len(pins)} pins, with {num_ids} ids; allowed: at most {most} of each. "
            "Send fewer.",
        )
    check_length(FIELD, sum(len(pin.text or "") for pin in pins), most, tokenizer)
    token_at: dict[int, int] = {}
    for pin in pins:
        tokens = pin.ids or tokenizer.encode(pin.text, add_special_tokens=False)
        token_at |= zip(range(pin.at, pin.at + len(tokens)), tokens, strict=True)
    return {PIN_AT: list(token_at), PIN_IDS: list(token_at.values())}
