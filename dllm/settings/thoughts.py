"""Thinking budgets: what a request may send, and which tokens begin and end a model's thoughts."""

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from dllm.settings.pins import PIN_MODE, holds
from dllm.settings.request import BUDGET, has_structured_outputs, refuse

if TYPE_CHECKING:
    from vllm import SamplingParams

NO_MARK = -2  # no token, and none of the placeholders for one


class Marks(NamedTuple):
    """The tokens that begin and end a thought."""

    start: int
    end: int
    call: int = NO_MARK  # begins a tool call, and ends a thought; NO_MARK: a thought may have it


def marks_of(vllm_config: Any) -> Marks | None:
    """None without a reasoning parser, or if they are no tokens that the model has a row for."""
    config = vllm_config.reasoning_config
    if config is None or not config.enabled:
        return None
    ends = config.reasoning_end_token_ids, config.natural_reasoning_end_token_ids
    marks = config.reasoning_start_token_ids, *ends
    if ends[0] != ends[1] or any(len(one) != 1 for one in marks):
        return None
    if max(map(max, marks)) >= vllm_config.model_config.get_vocab_size():
        return None
    return Marks(marks[0][0], marks[1][0], _call_of(vllm_config))


def _call_of(vllm_config: Any) -> int:
    """The token of a tool call that the reasoning parser takes for the end of a thought."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tokenizers import cached_tokenizer_from_config

    if not (name := vllm_config.reasoning_config.reasoning_parser):
        return NO_MARK
    tokenizer = cached_tokenizer_from_config(vllm_config.model_config)
    reasoner = ReasoningParserManager.get_reasoning_parser(name)(tokenizer)
    others = set(getattr(reasoner, "reasoning_end_token_ids", ()))
    others.difference_update(vllm_config.reasoning_config.natural_reasoning_end_token_ids)
    return max(others, default=NO_MARK)  # of no parser of vLLM are they more


def admit_budget(params: "SamplingParams", vllm_config: Any) -> None:
    """Raises VLLMValidationError for a thinking budget that cannot be kept."""
    extra = params.extra_args or {}
    sent, in_extra = params.thinking_token_budget, extra.get(BUDGET)
    if sent is None and in_extra in (None, -1):
        return
    if sent is not None and in_extra is not None:
        _refuse(f"= {sent} beside {BUDGET} in vllm_xargs; allowed: one of them. Leave one out.")
    marks = marks_of(vllm_config)
    if marks is None:
        _refuse_without_marks(vllm_config.reasoning_config)
    if has_structured_outputs(params) and vllm_config.structured_outputs_config.enable_in_reasoning:
        _refuse(
            "beside structured outputs, on a server whose grammars hold for thoughts, too "
            "(enable_in_reasoning): a text of the grammar may have no end of thoughts. Leave one "
            "of them out."
        )
    if params.min_tokens and marks.end in (params.stop_token_ids or ()):
        _refuse(
            f"beside min_tokens = {params.min_tokens}, where the token that ends thoughts is in "
            "stop_token_ids: it would end the answer where the budget ends. Leave one of them out."
        )
    if holds(extra):
        _refuse(
            f"beside {PIN_MODE} = 'hold', or a suffix: both may ask for a token at one place. "
            "Leave one of them out."
        )


def _refuse_without_marks(config: Any) -> NoReturn:
    if config is None:
        _refuse(
            "is not served: this server has no --reasoning-parser, so it knows no thoughts. Leave "
            "it out."
        )
    if not config.enabled:
        _refuse("is not served: this server's reasoning parser names no marks. Leave it out.")
    _refuse(
        "is not served: it needs thoughts that begin and end with one token each, which the model "
        "has in its vocabulary. Here they begin "
        f"with {len(config.reasoning_start_token_ids)}, end with "
        f"{len(config.natural_reasoning_end_token_ids)}, and are ended with "
        f"{len(config.reasoning_end_token_ids)} (--reasoning-config). Leave it out."
    )


def _refuse(why: str) -> NoReturn:
    refuse(BUDGET, f"{BUDGET} {why}")
