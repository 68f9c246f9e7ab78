"""Pins as a client writes them: ``"diffusion_pins": [{"at": 5, "text": "..."}]`` in the request.

They become the extra arguments that the engine reads (``settings.pins``): a text of several tokens
takes as many positions, from ``at`` on. Where two of a list overlap, the later one counts: a client
need not know how many tokens a text has.
"""

from typing import Any, NoReturn

from dllm.settings.pins import PIN_AT, PIN_IDS, PINNED_CANVASES
from dllm.settings.request import refuse

FIELD = "diffusion_pins"
SHAPE = (
    'a list of {"at": answer position, "text": "..."}, or with "ids": [...] in the place of text'
)


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
    if not isinstance(given, list) or not given:
        _refuse(given)
    most = PINNED_CANVASES * canvas_length
    texts = (pin.get("text") for pin in given if isinstance(pin, dict))
    num_chars = sum(len(text) for text in texts if isinstance(text, str))
    num_ids = sum(len(pin["ids"]) for pin in given if _has_list(pin))
    if max(len(given), num_ids) > most:
        refuse(
            FIELD,
            f"{FIELD} has {len(given)} pins, with {num_ids} ids; allowed: at most {most} of each. "
            "Send fewer.",
        )
    check_length(FIELD, num_chars, most, tokenizer)
    token_at: dict[int, int] = {}
    for pin in given:
        tokens = _tokens(pin, tokenizer)
        token_at |= zip(range(pin["at"], pin["at"] + len(tokens)), tokens, strict=True)
    return {PIN_AT: list(token_at), PIN_IDS: list(token_at.values())}


def _tokens(pin: Any, tokenizer: Any) -> list[int]:
    keys = set(pin) if isinstance(pin, dict) else set()
    if keys not in ({"at", "text"}, {"at", "ids"}) or type(pin["at"]) is not int or pin["at"] < 0:
        _refuse(pin)
    text = pin.get("text")
    if isinstance(text, str) and not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON may hold
            _refuse(pin)
    tokens = pin.get("ids")
    if isinstance(text, str):
        tokens = tokenizer.encode(text, add_special_tokens=False)
    if not isinstance(tokens, list) or not tokens or not all(type(one) is int for one in tokens):
        _refuse(pin)
    return tokens


def _has_list(pin: Any) -> bool:
    return isinstance(pin, dict) and isinstance(pin.get("ids"), list)


def _refuse(given: Any) -> NoReturn:
    refuse(FIELD, f"{FIELD}: {given!r:.200}; allowed: {SHAPE}. Send that, or omit it.")
