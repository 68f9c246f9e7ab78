"""Structured outputs: what a request may not ask for beside them, and what it ships to the worker.

A request with ``response_format``, ``structured_outputs`` or constrained tool calls is admitted
with the compiled table of its grammar (``dllm.grammar``), as bytes in ``extra_args``.
"""

from typing import TYPE_CHECKING

from dllm.settings.pins import PIN_MODE, holds
from dllm.settings.request import GRAMMAR_ARG, refuse

if TYPE_CHECKING:
    from vllm import SamplingParams

NAMES = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def has_structured_outputs(params: "SamplingParams") -> bool:
    """Whether the request asks for structured outputs."""
    asked = params.structured_outputs
    return asked is not None and not asked.all_constraints_none()


def refuse_beside_structured_outputs(params: "SamplingParams") -> None:
    """Refuse what may contradict a grammar, or has no meaning beside one.

    Raises:
        VLLMValidationError: the client gets HTTP 400; the message names both.
    """
    extra = params.extra_args or {}
    asked = params.structured_outputs
    name = next(name for name in NAMES if getattr(asked, name, None) is not None)
    for parameter, is_given, why in (
        ("ignore_eos", params.ignore_eos, "the answer ends where the text is complete"),
        ("min_tokens", params.min_tokens > 0, "the grammar says how short a text may be"),
        ("allowed_token_ids", params.allowed_token_ids, "the two may leave no text"),
        ("bad_words", params.bad_words, "the two may leave no text"),
        (
            "diffusion_read_only",
            extra.get("diffusion_read_only"),
            "a canvas that is only read has no answer",
        ),
        (
            PIN_MODE,
            holds(extra),
            "the grammar may have no text with the tokens that are held",
        ),
        (
            "diffusion_constrained",
            extra.get("diffusion_constrained"),
            "both say which tokens may be emitted",
        ),
    ):
        if is_given:
            refuse(
                parameter,
                f"{parameter} beside structured outputs ({name}): {why}. Leave one of them out.",
            )


def grammar_of(params: "SamplingParams") -> bytes | None:
    """The table that an admitted request ships; None without structured outputs."""
    return (params.extra_args or {}).get(GRAMMAR_ARG)


def with_grammar(params: "SamplingParams", shipped: bytes) -> "SamplingParams":
    """A copy of the request's parameters that ships a table."""
    params = params.clone()
    params.extra_args = (params.extra_args or {}) | {GRAMMAR_ARG: shipped}
    return params
