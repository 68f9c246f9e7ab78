"""Requests whose logit edits the worker could not hold, or that would leave it no token to emit.

vLLM's states raise in the worker when a list is too long, which ends the server, and nobody checks
that something may still be emitted. Both are refused at admission.
"""

from typing import TYPE_CHECKING

from vllm import envs
from vllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from vllm import SamplingParams


def refuse_impossible_edits(params: "SamplingParams", vocab_size: int) -> None:
    """Refuse what cannot be honoured to the letter.

    Args:
        params: with its stop tokens and bad words resolved to ids, as the worker will get them.
        vocab_size: of the model.

    Raises:
        VLLMValidationError: HTTP 400 to the client.
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
    # A token that ends no bad word may follow everything: one such token is enough.
    forbidden = {word[-1] for word in words} | stops
    num_left = len(set(allowed) - forbidden) if allowed else vocab_size - len(forbidden)
    if num_left < 1:
        parameter = "allowed_token_ids" if allowed else "bad_words"
        raise VLLMValidationError(
            f"{parameter} leaves no token that may always be emitted; allowed: at least one that "
            "ends no bad word and, with min_tokens, is no stop token. Remove a restriction.",
            parameter=parameter,
        )


def _check_size(parameter: str, size: int, at_most: int, where: str = "") -> None:
    if size > at_most:
        raise VLLMValidationError(
            f"{parameter} comes to {size} tokens{where}; allowed: at most {at_most}. Send fewer.",
            parameter=parameter,
        )
