"""Patches of the API server for tool calls: what is held of them, and how calls are read.

    a tool that is strict    its name, and arguments that its schema allows
    a custom tool            its name, and a text, as the only argument ``input``
    any other                its name, and arguments in the form of the parser's calls

vLLM has this rule for ``tool_choice: required``. With ``auto`` it lets calls of tools that are not
strict name anything. Text around calls is free.
"""

import json
import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel
from xgrammar.structural_tag import JSONSchemaFormat

from dllm.grammar.gemma_calls import QUOTE, structural_tag
from dllm.grammar.rules import Unsupported
from dllm.patches.replace import replaces
from dllm.settings.request import refuse

GEMMA_CALLS = "gemma_4_calls"  # our structural tag, in vLLM's registry
MARK = "\0"  # stands in front of an argument that was written between quotes
# Arguments of tools that are not strict. Forms that write strings without quotes can write any
# value as a string.
ANY_OBJECT = {"type": "object"}
ANY_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
ANY_ARGUMENTS = {"qwen_xml": ANY_TEXTS, "minimax_xml": ANY_TEXTS}


@cache
def hold_tool_calls() -> None:
    """Hold tool calls to names and to the schemas of strict tools.

    Called in an API server of one of our models, so that others stay as they are.
    """
    from vllm.parser import abstract_parser
    from vllm.tool_parsers.abstract_tool_parser import ToolParser
    from vllm.tool_parsers.tool_strict_level import ToolStrictLevel

    ToolParser.default_tool_strict_level = ToolStrictLevel.FUNCTION

    @replaces(abstract_parser)
    def _xgrammar_supports(theirs: Any, structured_outputs: Any) -> bool:
        return True  # a response format beside tools is refused where its grammar is compiled

    _leave_arguments_free()
    _hold_gemma_calls()
    _read_typed_gemma_calls()
    _read_whole_hermes_calls()


def _leave_arguments_free() -> None:
    """Let tools that are not strict have any object as arguments, in a table that is not too large.

    vLLM's tags allow any JSON value there, also in parts of XML, which come to too many states. For
    parsers without a tag it makes a JSON schema, with the schemas of all tools.
    """
    from vllm.tool_parsers import abstract_tool_parser
    from vllm.tool_parsers import structural_tag_registry as registry

    @replaces(registry)
    def get_model_structural_tag(
        theirs: Any, model: Any, tools: Any, *args: Any, **kwargs: Any
    ) -> Any:
        tag = theirs(model, tools and [*map(_function_of, tools)], *args, **kwargs)
        _let_any_object(tag)
        return tag

    def without_arguments(tool: Any) -> Any:
        if registry._tool_is_strict(tool):
            return tool
        if hasattr(tool, "function"):
            function = tool.function.model_copy(update={"parameters": ANY_OBJECT})
            return tool.model_copy(update={"function": function})
        return tool.model_copy(update={"parameters": ANY_OBJECT})

    @replaces(abstract_tool_parser)
    def get_json_schema_from_tools(
        theirs: Any, tool_choice: Any, tools: Any, parallel_tool_calls: bool | None = None
    ) -> Any:
        known = tools and [without_arguments(tool) for tool in map(_function_of, tools)]
        return theirs(tool_choice, known, parallel_tool_calls)


def _function_of(tool: Any) -> Any:
    """The tool; of a custom one the function that stands for it, which is strict."""
    from openai.types.responses import CustomTool, FunctionTool
    from vllm.tool_parsers.utils import custom_tool_as_function_dict

    if isinstance(tool, CustomTool):
        return FunctionTool(strict=True, **custom_tool_as_function_dict(tool))
    return tool


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


def _hold_gemma_calls() -> None:
    """Give calls in Gemma 4's syntax a structural tag; vLLM leaves them free."""
    from vllm.tool_parsers.gemma4_engine_tool_parser import Gemma4EngineToolParser
    from vllm.tool_parsers.structural_tag_registry import (
        get_function_parameters,
        register_vllm_structural_tag,
    )

    @register_vllm_structural_tag(GEMMA_CALLS)
    def tag_of_calls(tools: Any, builtin_tools: Any, tool_choice: str, *_: Any) -> Any:
        given = [(tool.function.name, get_function_parameters(tool.function)) for tool in tools]
        try:
            return structural_tag(given, tool_choice)
        except Unsupported as reason:
            refuse("tools", str(reason))
        except (TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            refuse("tools", f"A tool's schema is no valid JSON schema ({error}). Correct it.")

    Gemma4EngineToolParser.structural_tag_model = GEMMA_CALLS


def _read_typed_gemma_calls() -> None:
    """Read arguments of Gemma 4's calls with the types that they are written with.

    vLLM reads strings and bare words alike and guesses their types from the tool's schema, of which
    it does not know references and constants, and where ``"1"`` may be a string or a number.
    """
    from vllm.parser import gemma4

    @replaces(gemma4)
    def _gemma4_arg_converter(theirs: Any, raw_args: str, partial: bool) -> str:
        parts = raw_args.split(QUOTE)
        parts[1::2] = [MARK + part for part in parts[1::2]]
        arguments = json.loads(theirs(QUOTE.join(parts), partial))
        return json.dumps(_typed(arguments), ensure_ascii=False)

    @replaces(gemma4.Gemma4Parser)
    def _fix_arg_types(theirs: Any, self: Any, args_json: str, func_name: str) -> str:
        return args_json

    gemma4.gemma4_config.cache_clear()  # it holds the function


def _read_whole_hermes_calls() -> None:
    """Let a call in JSON end behind its arguments, and not inside of one of their strings.

    vLLM's parser ends it at the first ``</tool_call>``. Of strings it gets ``<\\/tool_call>`` to
    read, the same in JSON. It reads the whole text again for each piece of a stream.
    """
    from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser as Parser

    @replaces(Parser)
    def extract_tool_calls(theirs: Any, self: Any, model_output: str, request: Any) -> Any:
        marks = self.tool_call_start_token, self.tool_call_end_token
        found = theirs(self, without_end_in_strings(model_output, *marks), request)
        if not found.tools_called:
            found.content = model_output
        return found

    @replaces(Parser)
    def extract_tool_calls_streaming(
        theirs: Any, self: Any, previous_text: str, current_text: str, *args: Any, **kwargs: Any
    ) -> Any:
        marks = self.tool_call_start_token, self.tool_call_end_token
        text = without_end_in_strings(current_text, *marks)
        return theirs(self, previous_text, text, *args, **kwargs)


def without_end_in_strings(text: str, start: str, end: str) -> str:
    """A text with calls in JSON, maybe unfinished, in whose strings ``end`` is escaped."""
    string = r'"(?:[^"\\]|\\(?:.|\Z))*(?:"|\Z)'
    call = rf'{re.escape(start)}(?:{string}|(?!{re.escape(end)})[^"])*'
    escaped = end.replace("/", r"\/")
    return re.sub(call, lambda found: found[0].replace(end, escaped), text, flags=re.DOTALL)


def _typed(value: Any) -> Any:
    """Arguments whose strings have a mark, and whose other values are texts."""
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
