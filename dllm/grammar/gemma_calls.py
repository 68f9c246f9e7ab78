"""Gemma 4's tool calls as a structural tag of xgrammar.

    <|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:3}<tool_call|>

Neither xgrammar nor vLLM has a tag for this syntax.
"""

import json
from collections.abc import Sequence
from typing import Any

from xgrammar import StructuralTag
from xgrammar.structural_tag import (
    AnyTextFormat,
    ConstStringFormat,
    OptionalFormat,
    SequenceFormat,
    TagFormat,
    TagsWithSeparatorFormat,
    TriggeredTagsFormat,
)

from dllm.grammar.gemma_arguments import UNREAD

BEGIN, END = "<|tool_call>", "<tool_call|>"
THOUGHT, ANSWER = "<|channel>", "<channel|>"  # around a thought


def structural_tag(tools: Sequence[tuple[str, Any]], tool_choice: str) -> StructuralTag:
    """The tag of answers with calls.

    Args:
        tools: names, and JSON schemas of their arguments; True for a tool that is not strict, whose
            calls have any arguments.
        tool_choice: ``auto``: text with or without calls; ``required``: calls alone; ``forced``:
            one call.
    """
    tags = [
        TagFormat(
            begin=f"{BEGIN}call:{name}{{",
            content=ConstStringFormat(value=UNREAD + json.dumps([name, schema])),  # see `tags`
            end=f"}}{END}",
        )
        for name, schema in tools
    ]
    if tool_choice == "auto":
        # Without a reasoning parser, thoughts are text, too.
        thought = TagFormat(begin=THOUGHT, content=AnyTextFormat(excludes=[BEGIN]), end=ANSWER)
        text = TriggeredTagsFormat(triggers=[BEGIN], tags=tags)
        return StructuralTag(
            format=SequenceFormat(elements=[OptionalFormat(content=thought), text])
        )
    return StructuralTag(
        format=TagsWithSeparatorFormat(
            tags=tags, separator="", at_least_one=True, stop_after_first=tool_choice == "forced"
        )
    )
