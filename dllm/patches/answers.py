"""Patches of the API server: an answer is read in one way, whole or in parts of any width.

    a part of the answer -> tokens -> reasoning parser -> what is no thought -> tool parser

vLLM's parsers expect a part for each token, and a canvas may hold thoughts, text and calls at
once. So they get one token at a time. The reasoning parser reads to the end, however many thoughts
there are; vLLM leaves it behind the first. What they read of a part is one message to chats, and to
Responses one for each item of the answer.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import groupby
from types import SimpleNamespace
from typing import Any

from pydantic import PrivateAttr
from vllm.entrypoints.generate.base.protocol import DeltaMessage, FunctionCall
from vllm.parser.abstract_parser import DelegatingParser

from dllm.patches.replace import replaces
from dllm.patches.tool_calls import tools_of

Parse = Callable[..., Any]  # vLLM's ``DelegatingParser.parse_delta``


class Ordered(DeltaMessage):
    """What a part of a stream adds to an answer, and in which order."""

    _messages: list[DeltaMessage] = PrivateAttr(default_factory=list)

    def in_order(self) -> Iterator[DeltaMessage]:
        """Messages that each add to one item of the answer: a thought, a text or a call."""
        kept = {call.index for call in self.tool_calls}  # of calls, vLLM may show the first alone
        for kind, group in groupby(self._messages, _kind):
            if (joined := _joined([*group])) and (isinstance(kind, str) or kind in kept):
                yield joined


def _kind(delta: DeltaMessage) -> str | int | None:
    """The number of a call, or the name of a field."""
    if delta.tool_calls:
        return delta.tool_calls[0].index
    return "reasoning" if delta.reasoning else "content"


@cache
def parser_of(theirs: type[DelegatingParser]) -> type[DelegatingParser]:
    """``theirs`` is what vLLM makes of a server's flags."""
    tools = theirs.tool_parser_cls
    own = {"tool_parser_cls": tools and tools_of(tools)}
    return type("CanvasParser", (OneTokenAtATime, theirs), own)


class OneTokenAtATime(DelegatingParser):
    _reader: "_Reader | None" = None
    _prompt: Sequence[int] = ()

    def set_prompt_token_ids(self, prompt_token_ids: Sequence[int]) -> None:
        super().set_prompt_token_ids(prompt_token_ids)
        self._prompt = prompt_token_ids

    def parse(
        self,
        model_output: str,
        request: Any,
        enable_auto_tools: bool = False,
        model_output_token_ids: Sequence[int] = (),
    ) -> tuple[str | None, str | None, list[FunctionCall] | None]:
        """A call that is cut has the arguments that were written, as in a stream."""
        tokens = list(model_output_token_ids) or self.model_tokenizer.encode(
            model_output, add_special_tokens=False
        )
        read = self.parse_delta(model_output, tokens, request, list(self._prompt), finished=True)
        if read is None:
            return None, "", None
        calls = [
            FunctionCall(
                id=call.id, name=call.function.name or "", arguments=call.function.arguments or ""
            )
            for call in read.tool_calls
        ]
        return read.reasoning, read.content, calls or None

    def parse_delta(
        self,
        delta_text: str,
        delta_token_ids: list[int],
        request: Any,
        prompt_token_ids: list[int] | None = None,
        *,
        finished: bool,
    ) -> Any:
        if self._reader is None:
            self._reader = _Reader(self, request, prompt_token_ids or [])
        parts = list(self._reader.parts(delta_text, delta_token_ids, finished))
        asked = request, prompt_token_ids
        parse = super().parse_delta
        read = [
            _read(parse, self, part, asked, finished and number == len(parts))
            for number, part in enumerate(parts, 1)
        ]
        return _ordered(read)


@cache
def show_in_order() -> None:
    """Let Responses show what a canvas adds in the order of the answer.

    Called in an API server of one of our models, so that others stay as they are.
    """
    from vllm.entrypoints.openai.responses import serving

    @replaces(serving)
    def split_delta(theirs: Any, delta: Any) -> list[Any]:
        return [*delta.in_order()] if isinstance(delta, Ordered) else theirs(delta)


class _Reader:
    """Cuts what arrives of one answer into tokens with their texts.

    A text may come later than its token: vLLM holds back what could begin a stop string.
    """

    def __init__(self, parser: Any, request: Any, prompt: Sequence[int]) -> None:
        from vllm import SamplingParams
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        if request.tool_choice == "required" and parser.tool_parser.supports_required_and_named:
            # Its calls are a JSON array, of which vLLM needs all that has come.
            parser._stream_state.engine_based = False
        params = SamplingParams(
            skip_special_tokens=request.skip_special_tokens,
            # Responses have no such field.
            spaces_between_special_tokens=getattr(request, "spaces_between_special_tokens", True),
        )
        asked: Any = SimpleNamespace(
            sampling_params=params, prompt_token_ids=list(prompt), prompt_embeds=None, request_id=""
        )
        self._detokenizer = IncrementalDetokenizer.from_new_request(parser.model_tokenizer, asked)
        self._waiting: deque[tuple[int, int]] = deque()  # tokens, and lengths of their texts
        self._text = ""  # of them, as far as it has arrived

    def parts(
        self, text: str, tokens: Sequence[int], is_last: bool
    ) -> Iterator[tuple[str, list[int]]]:
        self._text += text
        for token in tokens:
            self._detokenizer.update([token], False)
            spelled = self._detokenizer.get_next_output_text(False, True)
            self._waiting.append((token, len(spelled)))
        while self._waiting and self._waiting[0][1] <= len(self._text):
            token, length = self._waiting.popleft()
            yield self._text[:length], [token]
            self._text = self._text[length:]
        if is_last or (self._text and not self._waiting):
            yield self._text, [token for token, _ in self._waiting]
            self._text = ""


def _read(
    parse: Parse, parser: Any, part: tuple[str, list[int]], asked: tuple[Any, Any], is_last: bool
) -> Any:
    """None: nothing that can be shown by now. ``asked``: the request, and its prompt's tokens."""
    from vllm.parser.engine.adapters import ParserEngineReasoningAdapter, ParserEngineToolAdapter

    (text, tokens), (request, prompt) = part, asked
    reasoner, state = parser.reasoning_parser, parser._stream_state
    if isinstance(reasoner, ParserEngineReasoningAdapter):
        if not state.reasoning_ended:
            state.reasoning_ended = state.prompt_reasoning_checked = True
            _begin_behind(reasoner, prompt or [])
        thought = _thought(reasoner, text, tokens, request, is_last)
        behind = thought.content or "" if thought is not None else ""
        if thought is not None:
            thought.content = None
            thought = thought if request.include_reasoning else None
        if not behind and not is_last:
            return thought
        is_read = behind != text
    else:
        thought, behind, is_read = None, text, False
    # A whole answer's calls are read from its text alone.
    if is_read or isinstance(parser.tool_parser, ParserEngineToolAdapter):
        tokens = []
    rest = parse(behind, tokens, request, prompt, finished=is_last)
    return _joined([thought, rest])


def _begin_behind(reasoner: Any, prompt: Sequence[int]) -> None:
    """Let a reasoning parser begin where the prompt ends: in a thought, or behind one."""
    from vllm.parser.engine.parser_engine_config import ParserState

    if reasoner.is_reasoning_end(prompt):
        reasoner._parser_engine.initialize_streaming(initial_state=ParserState.CONTENT)
    else:
        reasoner.adjust_initial_state_from_prompt(prompt)


def _thought(reasoner: Any, text: str, tokens: list[int], request: Any, is_last: bool) -> Any:
    """Thoughts in the text, as ``reasoning``, and all else as ``content``."""
    from vllm.parser.engine.parser_engine_config import ParserState

    engine = reasoner._parser_engine
    spaces = engine._deferred_reasoning  # it drops them behind a thought, and more may come
    read = [reasoner.extract_reasoning_streaming("", "", text, [], [], tokens)]
    if read[0] is None or not read[0].reasoning:
        engine._deferred_reasoning = engine._deferred_reasoning or spaces
    if is_last:
        if engine._engine.state is ParserState.REASONING:
            answer = reasoner.get_streaming_fallback_content("", request)
            read.append(DeltaMessage(content=answer))
        read.append(engine._strip_trailing_reasoning(reasoner.finish_streaming()))
    return _joined(read)


def _ordered(read: Sequence[DeltaMessage | None]) -> Ordered | None:
    """``_joined``, and what it is made of."""
    from vllm.entrypoints.openai.responses.streaming_events import split_delta

    if (joined := _joined(read)) is None:
        return None
    ordered = Ordered(**{name: getattr(joined, name) for name in joined.model_fields_set})
    ordered._messages = [part for delta in read if delta for part in split_delta(delta)]
    return ordered


def _joined(deltas: Sequence[Any]) -> Any:
    """One message with what each of some adds; None if none adds anything."""
    from vllm.parser.engine.parser_engine import ParserEngine

    some = [delta for delta in deltas if delta is not None]
    joined: dict[str, Any] = {}
    for name in ("reasoning", "content"):
        if text := "".join(getattr(delta, name) or "" for delta in some):
            joined[name] = text
    if calls := [call.model_copy(deep=True) for delta in some for call in delta.tool_calls or ()]:
        joined["tool_calls"] = ParserEngine._coalesce_tool_call_deltas(calls)
    return DeltaMessage(**joined) if joined else None
