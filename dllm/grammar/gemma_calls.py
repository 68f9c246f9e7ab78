"""Gemma 4's tool calls as a structural tag of xgrammar.

    <|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:3}<tool_call|>

Neither xgrammar nor vLLM has a tag for this syntax.
"""

import json
from collections.abc import Sequence
from typing import Any

from xgrammar import StructuralTag
from xgrammar import structural_tag as formats

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
        formats.TagFormat(
            begin=f"{BEGIN}call:{name}{{",
            # `tags` reads it.
            content=formats.ConstStringFormat(value=UNREAD + json.dumps([name, schema])),
            end=f"}}{END}",
        )
        for name, schema in tools
    ]
    if tool_choice == "auto":
        # Without a reasoning parser, thoughts are text, too.
        thought = formats.TagFormat(
            begin=THOUGHT, content=formats.AnyTextFormat(excludes=[BEGIN]), end=ANSWER
        )
        text = formats.TriggeredTagsFormat(triggers=[BEGIN], tags=tags)
        return StructuralTag(
            format=formats.SequenceFormat(elements=[formats.OptionalFormat(content=thought), text])
        )
    return StructuralTag(
        format=formats.TagsWithSeparatorFormat(
            tags=tags, separator="", at_least_one=True, stop_after_first=tool_choice == "forced"
        )
    )
