"""The body of ``POST /v1/decisions``, as OpenAI's SDK 3.52 sends it, and fields of vLLM and ours.

A body of 1 MB may hold 60,000 options, or as many values of JSON. So options are dataclasses, which
take a fifth of a model's time, and JSON is checked where it is written, off the event loop.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    Discriminator,
    Field,
    StrictBool,
    StrictStr,
    Tag,
    field_validator,
    model_validator,
)
from pydantic.dataclasses import dataclass

from dllm.api.http_request import BODY
from dllm.settings.decisions import MAX_SAMPLES
from dllm.settings.request import refuse

MAX_QUESTIONS, MAX_OPTIONS = 400, 255
# OpenAI's bounds of an `input_json` part.
MAX_JSON_DEPTH, MAX_JSON_VALUES, MAX_JSON_BYTES = 32, 10_000, 256 * 1024
PARTS_OF_ROLE = {
    "user": ("input_text", "input_image", "input_json"),
    "developer": ("input_text",),
    "system": ("input_text",),
    "assistant": ("output_text", "refusal"),
}


class Body(BaseModel):
    """An object of the body; what it does not know is refused."""

    model_config = BODY


class Cached(Body):
    """A part that may end a prefix; vLLM finds equal prefixes by itself."""

    prompt_cache_breakpoint: dict[str, Any] | None = None


class Text(Cached):
    """Text of a client (``input_text``) or of a model (``output_text``)."""

    type: Literal["input_text", "output_text"]
    text: str


class Refusal(Body):
    """A model's refusal."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class Image(Cached):
    """An image, as an HTTP or data URL."""

    type: Literal["input_image"]
    image_url: str
    detail: Literal["low", "high", "auto", "original"] | None = None


class Json(Cached):
    """Any JSON value."""

    type: Literal["input_json"]
    data: Any


Part = Annotated[Text | Refusal | Image | Json, Field(discriminator="type")]


class Message(Body):
    """A turn."""

    type: Literal["message"] = "message"
    role: Literal["user", "developer", "system", "assistant"]
    content: str | list[Part]
    phase: Literal["commentary", "final_answer"] | None = None

    @model_validator(mode="after")
    def _parts_fit(self) -> "Message":
        allowed = PARTS_OF_ROLE[self.role]
        wrong = {p.type for p in self.content if not isinstance(p, str)} - set(allowed)
        if wrong:
            raise ValueError(f"{min(wrong)} in a message of {self.role}; allowed: {allowed}")
        return self


class Call(Body):
    """A call of a tool."""

    type: Literal["function_call", "custom_tool_call"]
    call_id: str
    name: str
    arguments: str = ""
    input: str = ""
    id: str | None = None
    namespace: str | None = None
    status: str | None = None


class CallOutput(Body):
    """What a tool answered."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | list[Annotated[Text | Image, Field(discriminator="type")]]
    id: str | None = None
    status: str | None = None


def _kind(item: Any) -> str:
    """The type of an item, so that errors are about that type; ``message`` may be left out."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    if kind in ("function_call", "custom_tool_call"):
        return "call"
    return "output" if str(kind).endswith("_call_output") else "message"


Item = Annotated[
    Annotated[Message, Tag("message")]
    | Annotated[Call, Tag("call")]
    | Annotated[CallOutput, Tag("output")],
    Discriminator(_kind),
]


class Predicate(Body):
    """How likely is it that a statement is true?"""

    type: Literal["predicate"]
    instructions: str | list[Part]
    name: str | None = None


@dataclass(config=BODY, slots=True)
class ChoiceOption:
    """A value; true and "true" are two."""

    value: Annotated[StrictStr | StrictBool, Field(union_mode="left_to_right")]
    description: str | None = None


class Choice(Body):
    """Which of these is right?"""

    type: Literal["choice"]
    instructions: str | list[Part]
    choices: list[ChoiceOption] = Field(min_length=2, max_length=MAX_OPTIONS)
    name: str | None = None

    @field_validator("choices")
    @classmethod
    def _distinct(cls, choices: list[ChoiceOption]) -> list[ChoiceOption]:
        if len({(type(one.value), one.value) for one in choices}) < len(choices):
            raise ValueError("a value is there twice")
        return choices


@dataclass(config=BODY, slots=True)
class Level:
    """A level of a scale."""

    label: str
    description: str | None = None


class Score(Body):
    """Where on an ordered scale?"""

    type: Literal["score"]
    instructions: str | list[Part]
    levels: list[Level] = Field(min_length=2, max_length=MAX_OPTIONS)
    name: str | None = None


AskedQuestion = Annotated[Predicate | Choice | Score, Field(discriminator="type")]


class DecisionRequest(Body):
    """The body.

    Attributes:
        samples: canvases for each question; default: the server's.
        priority, cache_salt: as in vLLM's other routes. OpenAI's ``prompt_cache_key`` does what
            ``cache_salt`` does: requests share cached prompts only with those of the same key.
        joint: vLLM's, to ask several questions on one canvas; only false is served.
    """

    model: str
    input: str | list[Item]
    questions: list[AskedQuestion] = Field(min_length=1, max_length=MAX_QUESTIONS)
    prompt_cache_key: str | None = Field(default=None, max_length=4096)
    cache_salt: str | None = Field(default=None, max_length=128)
    prompt_cache_options: dict[str, Any] | None = None
    joint: StrictBool = False
    safety_identifier: str | None = None
    samples: int | None = Field(default=None, ge=1, le=MAX_SAMPLES, strict=True)
    priority: int = Field(default=0, ge=-(2**63), le=2**63 - 1)

    @model_validator(mode="after")
    def _outputs_have_calls(self) -> "DecisionRequest":
        items = [] if isinstance(self.input, str) else self.input
        calls: set[str] = set()
        for item in items:
            if isinstance(item, Call):
                calls.add(item.call_id)
            elif isinstance(item, CallOutput) and item.call_id not in calls:
                raise ValueError(f"an output of call {item.call_id[:80]!r}, which is not before it")
        return self

    def transcript(self) -> tuple[str, list[str]]:
        """One text, and the URLs of its images. Raises VLLMValidationError: JSON out of bounds."""
        if isinstance(self.input, str):
            return self.input, []
        images: list[str] = []
        alone = len(self.input) == 1
        lines = []
        for item in self.input:
            if isinstance(item, Message):
                text = _written(item.content, images, "input")
                lines.append(text if alone else f"{item.role}: {text}")
            elif isinstance(item, Call):
                lines.append(f"call {item.name}: {item.arguments or item.input}")
            else:
                lines.append(f"result: {_written(item.output, images, 'input')}")
        return "\n".join(lines), images


def instructions_of(place: int, question: Predicate | Choice | Score) -> str:
    """Raises VLLMValidationError: an image, which only the input may hold; JSON out of bounds."""
    images: list[str] = []
    text = _written(question.instructions, images, "questions")
    if images:
        refuse(
            "questions", f"questions[{place}].instructions hold an image; allowed: in the input."
        )
    return text


def _written(content: Any, images: list[str], parameter: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if isinstance(part, Image):
            images.append(part.image_url)
            texts.append(f"[image {len(images)}]")
        elif isinstance(part, Json):
            texts.append(_json(part.data, parameter))
        else:
            texts.append(part.text)
    return "\n".join(texts)


def _json(data: Any, parameter: str) -> str:
    level, values = [data], 0
    for _ in range(MAX_JSON_DEPTH):
        values += len(level)
        if values > MAX_JSON_VALUES:
            refuse(parameter, f"input_json has more than {MAX_JSON_VALUES} values. Send fewer.")
        objects = [one.values() for one in level if isinstance(one, dict)]
        lists = [one for one in level if isinstance(one, list)]
        level = [part for container in (*objects, *lists) for part in container]
    if level:
        refuse(parameter, f"input_json is nested deeper than {MAX_JSON_DEPTH} levels. Flatten it.")
    text = json.dumps(data, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        refuse(parameter, "input_json holds half of a surrogate pair. Send whole characters.")
    if len(text) > MAX_JSON_BYTES:
        refuse(parameter, f"input_json is longer than {MAX_JSON_BYTES} characters. Send less.")
    return text
