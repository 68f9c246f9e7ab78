"""Tool parsers of the API server: what is held of tool calls, and how calls are read.

    a tool that is strict    its name, and arguments that its schema allows
    a custom tool            its name, and a text, as the only argument ``input``
    any other                its name, and arguments in the form of the parser's calls

vLLM has this rule for ``tool_choice: required``. With ``auto`` it lets calls of tools that are not
strict name anything. Text around calls is free.

``tools_of`` makes a class of ours out of the one that ``--tool-call-parser`` names.
"""

import json
import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from openai.types.responses import CustomTool, FunctionTool
from pydantic import BaseModel
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.parser import gemma4
from vllm.parser.engine.adapters import make_adapters
from vllm.tool_parsers import structural_tag_registry as registry
from vllm.tool_parsers.abstract_tool_parser import ToolParser
from vllm.tool_parsers.gemma4_engine_tool_parser import Gemma4EngineToolParser
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser
from vllm.tool_parsers.tool_strict_level import ToolStrictLevel
from vllm.tool_parsers.utils import custom_tool_as_function_dict
from xgrammar.structural_tag import JSONSchemaFormat

from dllm.grammar.gemma_arguments import QUOTE
from dllm.grammar.gemma_calls import structural_tag
from dllm.settings.request import refuse

GEMMA_CALLS = "gemma_4_calls"  # our structural tag, in vLLM's registry
MARK = "\0"  # stands in front of an argument that was written between quotes
# Arguments of tools that are not strict. Forms that write strings without quotes can write any
# value as a string.
ANY_OBJECT = {"type": "object"}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
# What would end a name in the form of some parser's calls.
NO_NAME = re.compile(r'["\\{}<>=\s]')
ANY_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
ANY_ARGUMENTS = {"qwen_xml": ANY_TEXTS, "minimax_xml": ANY_TEXTS}


@cache
def tools_of(theirs: type[ToolParser]) -> type[ToolParser]:
    kinds: tuple[type, ...] = (HeldCalls,)
    hermes = Hermes2ProToolParser.extract_tool_calls
    if theirs is Gemma4EngineToolParser:
        kinds = HeldCalls, GemmaCalls
    elif theirs.extract_tool_calls is hermes:  # a parser that is derived from it, too
        kinds = HeldCalls, HermesCalls
    return type(theirs.__name__, (*kinds, theirs), {})


class HeldCalls(ToolParser):
    """Leaves arguments of tools that are not strict free, in a table that is not too large: vLLM's
    tags allow any JSON value there, also in parts of XML, which come to too many states.
    """

    default_tool_strict_level = ToolStrictLevel.FUNCTION

    def get_structural_tag(self, request: Any, **options: Any) -> Any:
        tools = request.tools and [*map(_function_of, request.tools)]
        asked = request.model_copy(update={"tools": tools})
        tag = super().get_structural_tag(asked, **options)
        _let_any_object(tag)
        return tag

    def adjust_request(self, request: Any) -> Any:
        tools = request.tools
        for tool in map(_function_of, tools or ()):
            _check_name(getattr(tool, "function", tool))
        request.tools = tools and [_without_arguments(one) for one in map(_function_of, tools)]
        try:
            adjusted = super().adjust_request(request)
        finally:
            request.tools = tools
        adjusted.tools = tools
        return adjusted

    def extract_tool_calls_streaming(
        self, previous_text: str, current_text: str, delta_text: str, *args: Any, **kwargs: Any
    ) -> Any:
        request = kwargs.get("request") or args[-1]
        if not request.tools or request.tool_choice == "none":
            # What looks like a call is text, which some of vLLM's parsers leave out.
            return DeltaMessage(content=delta_text) if delta_text else None
        return super().extract_tool_calls_streaming(
            previous_text, current_text, delta_text, *args, **kwargs
        )


def _without_arguments(tool: Any) -> Any:
    return tool if registry._tool_is_strict(tool) else _with_parameters(tool, ANY_OBJECT)


def _with_parameters(tool: Any, parameters: dict[str, Any]) -> Any:
    """Of a chat, whose tool holds a function, or of Responses, whose tool is one."""
    if (function := getattr(tool, "function", None)) is not None:
        held = function.model_copy(update={"parameters": parameters})
        return tool.model_copy(update={"function": held})
    return tool.model_copy(update={"parameters": parameters})


def _check_name(function: Any) -> None:
    name = getattr(function, "name", None) or ""
    if NO_NAME.search(name):
        allowed = "names without quotes, spaces and any of \\{}<>="
        refuse("tools", f"a tool is called {name[:40]!r}; allowed: {allowed}. Rename it.")


def _function_of(tool: Any) -> Any:
    """The tool; of a custom one the function that stands for it, which is strict."""
    if isinstance(tool, CustomTool):
        return FunctionTool(strict=True, **custom_tool_as_function_dict(tool))
    # Tools that are no function have no parameters.
    has_none = not getattr(getattr(tool, "function", tool), "parameters", True)
    return _with_parameters(tool, NO_ARGUMENTS) if has_none else tool


def _let_any_object(part: Any) -> None:
    if isinstance(part, JSONSchemaFormat):
        if part.json_schema is True:
            part.json_schema = ANY_ARGUMENTS.get(part.style, ANY_OBJECT)
    elif isinstance(part, BaseModel):
        for name in type(part).model_fields:
            _let_any_object(getattr(part, name))
    elif isinstance(part, list | tuple):
        for inner in part:
            _let_any_object(inner)


@registry.register_vllm_structural_tag(GEMMA_CALLS)
def _tag_of_gemma_calls(tools: Any, builtin_tools: Any, tool_choice: str, *_: Any) -> Any:
    given = [(one.function.name, registry.get_function_parameters(one.function)) for one in tools]
    try:
        return structural_tag(given, tool_choice)
    except (TypeError, ValueError, RecursionError) as error:
        refuse("tools", f"A tool's schema is no valid JSON schema ({error}). Correct it.")


class TypedGemma(gemma4.Gemma4Parser):
    """Reads arguments of Gemma 4's calls with the types that they are written with; vLLM guesses
    them from the tool's schema, of which it does not know references and constants.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._arg_converter = _typed_arguments

    def _fix_arg_types(self, args_json: str, func_name: str) -> str:
        return args_json


def _typed_arguments(raw_args: str, partial: bool) -> str:
    parts = raw_args.split(QUOTE)
    parts[1::2] = [MARK + part for part in parts[1::2]]
    arguments = json.loads(gemma4._gemma4_arg_converter(QUOTE.join(parts), partial))
    return json.dumps(_typed(arguments), ensure_ascii=False)


class GemmaCalls(make_adapters(TypedGemma)[1]):  # type: ignore[misc]
    """Holds calls in Gemma 4's syntax by a structural tag; vLLM leaves them free."""

    structural_tag_model = GEMMA_CALLS


class HermesCalls(ToolParser):
    """Lets a call in JSON end behind its arguments, and not inside of one of their strings: of
    these vLLM's parser gets ``<\\/tool_call>`` to read, the same in JSON.
    """

    tool_call_start_token: str
    tool_call_end_token: str

    def extract_tool_calls(self, model_output: str, request: Any) -> Any:
        found = super().extract_tool_calls(self._escaped(model_output), request)
        if not found.tools_called:
            found.content = model_output
        return found

    def extract_tool_calls_streaming(
        self, previous_text: str, current_text: str, *args: Any, **kwargs: Any
    ) -> Any:
        escaped = self._escaped(current_text)
        return super().extract_tool_calls_streaming(previous_text, escaped, *args, **kwargs)

    def _escaped(self, text: str) -> str:
        return without_end_in_strings(text, self.tool_call_start_token, self.tool_call_end_token)


def without_end_in_strings(text: str, start: str, end: str) -> str:
    """``text`` may be unfinished; in strings of its calls ``end`` is escaped."""
    string = r'"(?:[^"\\]|\\(?:.|\Z))*(?:"|\Z)'
    call = rf'{re.escape(start)}(?:{string}|(?!{re.escape(end)})[^"])*'
    escaped = end.replace("/", r"\/")
    return re.sub(call, lambda found: found[0].replace(end, escaped), text, flags=re.DOTALL)


def _typed(value: Any) -> Any:
    """Of arguments whose strings have a mark, and whose other values are texts."""
    if isinstance(value, Mapping):
        return {name.removeprefix(MARK): _typed(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_typed(inner) for inner in value]
    if value.startswith(MARK):
        return value[len(MARK) :]
    try:
        read = json.loads(value)
    except ValueError:
        return value
    return value if isinstance(read, float) and not math.isfinite(read) else read
