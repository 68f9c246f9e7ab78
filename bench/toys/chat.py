"""What a question has beside its prompt: tools and a thought, or the parts of a typed decision.

The tools are fixed; a question lists some of them. Calls and thoughts are written with the marks
that vLLM's parsers for Gemma 4 and Hermes look for (checkpoints/tiny-tools/chat_template.jinja).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Style = Literal["gemma", "hermes"]
STYLES: tuple[Style, ...] = ("gemma", "hermes")

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
UNITS = ("celsius", "fahrenheit")

# Gemma's marks, as in the chat template and the answers.
QUOTE = '<|"|>'
THOUGHT, END_OF_THOUGHT = "<|channel>thought\n", "<channel|>"


# As an OpenAI client sends them. Parameters are in the order of the alphabet, in which Gemma's
# template has them: so a grammar in the order of a schema allows what the model has learned.
_LISTED = json.loads(Path(__file__).with_name("tools.json").read_text())
TOOLS: dict[str, dict] = {tool["function"]["name"]: tool for tool in _LISTED}


@dataclass(frozen=True)
class Chat:
    tools: tuple[str, ...] = ()  # names of those that it lists, in this order
    thinking: bool = False
    style: Style = "gemma"  # how tools are listed and called

    @property
    def schemas(self) -> list[dict]:
        return [TOOLS[name] for name in self.tools]

    @property
    def request(self) -> dict[str, object]:
        """Fields of a chat request that has the bare answer as its content, marks included."""
        tools = {"tools": self.schemas, "tool_choice": "none"} if self.tools else {}
        return tools | {"chat_template_kwargs": self.template_kwargs, "skip_special_tokens": False}

    @property
    def template_kwargs(self) -> dict[str, object]:
        return {"enable_thinking": self.thinking, "tool_style": self.style}


@dataclass(frozen=True)
class Decision:
    input: str
    type: Literal["predicate", "choice", "score"]
    instructions: str
    options: tuple[str, ...] = ()  # texts of the choices or levels; empty for a predicate
    odds: float | None = None  # of yes, where the right answer is a matter of chance

    @property
    def question(self) -> dict[str, Any]:
        asked: dict[str, Any] = {"type": self.type, "instructions": self.instructions}
        if self.type == "choice":
            asked["choices"] = [{"value": text} for text in self.options]
        if self.type == "score":
            asked["levels"] = [{"label": text} for text in self.options]
        return asked


@dataclass(frozen=True)
class Asked:
    """A problem in words: the prompt, all right answers, and what it is asked as."""

    prompt: str
    accepted: list[str]
    chat: Chat | None = None  # what it is asked with, of a family of ``tools``
    decision: Decision | None = None  # of a family of ``decisions``


def call_text(name: str, arguments: dict[str, str | int], style: Style) -> str:
    """A tool call as the model writes it; ``arguments`` in the order of the schema."""
    if style == "hermes":
        inner = json.dumps({"name": name, "arguments": arguments})
        return f"<tool_call>\n{inner}\n</tool_call>"
    values = ",".join(
        f"{key}:{QUOTE}{value}{QUOTE}" if isinstance(value, str) else f"{key}:{value}"
        for key, value in arguments.items()
    )
    return f"<|tool_call>call:{name}{{{values}}}<tool_call|>"


def answer_text(thought: str, answer: str, chat: Chat) -> str:
    return f"{THOUGHT}{thought}{END_OF_THOUGHT}{answer}" if chat.thinking else answer
