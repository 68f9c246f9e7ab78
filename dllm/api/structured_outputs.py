"""What a request's structured outputs ask for: its grammar, and the thoughts in front of it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dllm.grammar.compile import Spec, check_length
from dllm.grammar.constraint import Thoughts
from dllm.grammar.refusals import Unsupported
from dllm.settings.request import refuse


@contextmanager
def refusing() -> Iterator[None]:
    """Raises VLLMValidationError, HTTP 400, for a grammar that cannot be compiled."""
    try:
        yield
    except (Unsupported, ChildProcessError) as reason:
        refuse("structured_outputs", f"structured_outputs: {reason}")


def spec_of(asked: Any, is_compact: bool) -> Spec:
    """As vLLM's xgrammar backend reads it. Takes no longer than to read its text.

    Raises VLLMValidationError: it is empty, too long or nested too deeply, or whitespace is a
    pattern.
    """
    from vllm.sampling_params import check_json_nesting
    from vllm.v1.structured_output.request import get_structured_output_key
    from vllm.v1.structured_output.utils import choice_as_grammar, grammar_is_likely_lark

    if asked.whitespace_pattern is not None:
        refuse(
            "structured_outputs",
            "structured_outputs: whitespace_pattern is not served; allowed: "
            "disable_any_whitespace. Leave it out.",
        )
    is_compact |= asked.disable_any_whitespace
    check_json_nesting(asked.json)
    check_json_nesting(asked.structural_tag, structural_tag=True)
    option, text = get_structured_output_key(asked)
    kind = option.name.lower()
    is_empty = asked.choice == [] or (kind not in ("regex", "json_object") and not text.strip())
    if is_empty or asked.json_object is False or "\0" in text:
        refuse(
            "structured_outputs",
            f"structured_outputs: {kind} is empty, false or has a NUL character; allowed: a text "
            "without. Give one, or leave structured_outputs out.",
        )
    with refusing():
        check_length(text)
    if kind == "json_object":
        kind, text = "json", '{"type": "object"}'
    elif kind == "choice":
        kind, text = "grammar", choice_as_grammar(asked.choice)
    elif kind == "grammar" and grammar_is_likely_lark(text):
        kind = "lark"
    return Spec(kind, text, not is_compact, (",", ":") if is_compact else None)


def thoughts_of(
    processor: Any, prompt: Any, reasoning_ended: bool | None, of_parser: Mapping[str, Any]
) -> Thoughts | None:
    """The thoughts in front of the answer; None if it starts at once."""
    from vllm.reasoning import ReasoningParserManager

    config = processor.structured_outputs_config
    if not config.reasoning_parser or config.enable_in_reasoning or reasoning_ended:
        return None
    parser = ReasoningParserManager.get_reasoning_parser(config.reasoning_parser)
    reasoner = parser(tokenizer=processor.tokenizer, **of_parser)
    if reasoning_ended is None:
        parts = prompt if isinstance(prompt, dict) else {"prompt": prompt}
        ids = parts.get("prompt_token_ids")  # vLLM has made them unless the prompt is plain text
        if ids is None:
            ids = processor.tokenizer.encode(parts.get("prompt", ""))
        if reasoner.is_reasoning_end(list(ids)):
            return None
    text = reasoner.reasoning_end_str or ""
    end = processor.tokenizer.get_vocab().get(text)
    vocab_size = processor.model_config.get_vocab_size()
    if end is None or end >= vocab_size:  # a tokenizer may have more tokens than the model
        refuse(
            "structured_outputs",
            f"structured outputs with the reasoning parser {config.reasoning_parser}: its thoughts "
            f"end with {text!r}, which is not one token of this model. Serve without a reasoning "
            "parser, or send include_reasoning: false.",
        )
    # Some parsers take the first token of a tool call as the end, too. Here every thought is ended.
    others = set(getattr(reasoner, "reasoning_end_token_ids", ())) - {end}
    others = {token for token in others if token < vocab_size}
    return Thoughts(end, tuple(sorted(others)))
