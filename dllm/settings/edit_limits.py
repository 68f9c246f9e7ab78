"""Refuses requests with too many logit edits, with edits that forbid every token, or pins too far.

If a list is too long for vLLM's tables, vLLM raises in the worker, which ends the server. And vLLM
does not check that a request leaves at least one token to emit. Both are refused in the API server.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

from vllm import envs
from vllm.exceptions import VLLMValidationError

from dllm.settings.pins import PIN_MODE, held_length, holds, pins_of

if TYPE_CHECKING:
    from vllm import SamplingParams


def refuse_impossible_edits(
    params: "SamplingParams", vocab_size: int, never_emitted: Collection[int] = ()
) -> None:
    """Refuse a request whose logit edits cannot be applied exactly.

    Args:
        params: with stop tokens and bad words as ids, as the worker will get them.
        vocab_size: of the model.
        never_emitted: ``DenoiseSettings.never_emitted``.

    Raises:
        VLLMValidationError: the client gets HTTP 400.
    """
    from vllm.v1.worker.gpu.sample.logit_bias import (
        MAX_NUM_ALLOWED_TOKEN_IDS,
        MAX_NUM_LOGIT_BIAS_TOKENS,
        MAX_NUM_STOP_TOKEN_IDS,
    )

    allowed = params.allowed_token_ids or []
    stops = params.all_stop_token_ids if params.min_tokens > 0 else set()
    words = params.bad_words_token_ids or []
    _check_size("allowed_token_ids", len(allowed), MAX_NUM_ALLOWED_TOKEN_IDS)
    _check_size("logit_bias", len(params.logit_bias or {}), MAX_NUM_LOGIT_BIAS_TOKENS)
    _check_size("stop_token_ids", len(stops), MAX_NUM_STOP_TOKEN_IDS, " beside min_tokens")
    _check_size("bad_words", sum(map(len, words)), envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS)
    # Some token must be possible at every position. A token that ends no bad word always is, unless
    # it is a stop token that `min_tokens` forbids. One such token is enough.
    forbidden = {word[-1] for word in words} | stops | set(never_emitted)
    num_left = len(set(allowed) - forbidden) if allowed else vocab_size - len(forbidden)
    if num_left < 1:
        parameter = "allowed_token_ids" if allowed else "bad_words"
        raise VLLMValidationError(
            f"{parameter} leaves no token that may always be emitted; allowed: at least one that "
            "ends no bad word, is no mask and, with min_tokens, no stop token. Remove a "
            "restriction.",
            parameter=parameter,
        )


def refuse_pins_behind_the_end(params: "SamplingParams") -> None:
    """Refuse a request whose held pins do not fit into its answer.

    Args:
        params: with stop tokens as ids.

    Raises:
        VLLMValidationError: the client gets HTTP 400.
    """
    extra = params.extra_args or {}
    pins = pins_of(extra) if holds(extra) else {}
    length = held_length(pins, params.all_stop_token_ids)
    if pins and params.max_tokens is not None and length >= params.max_tokens:
        raise VLLMValidationError(
            f"{PIN_MODE} = 'hold' with a pin at {length} and max_tokens = {params.max_tokens}; "
            f"allowed: max_tokens of at least {length + 1}. Raise it, or leave the pin out.",
            parameter=PIN_MODE,
        )
    if pins.get(length) in params.all_stop_token_ids and length < params.min_tokens:
        raise VLLMValidationError(
            f"{PIN_MODE} = 'hold' with a pin at {length} that ends the answer, and min_tokens = "
            f"{params.min_tokens}; allowed: min_tokens of at most {length}. Lower it, or leave the "
            "pin out.",
            parameter=PIN_MODE,
        )


def _check_size(parameter: str, size: int, at_most: int, where: str = "") -> None:
    if size > at_most:
        raise VLLMValidationError(
            f"{parameter} comes to {size} tokens{where}; allowed: at most {at_most}. Send fewer.",
            parameter=parameter,
        )
