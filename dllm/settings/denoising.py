"""What the settings of every family have in common: the numbers that a request may set."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from dllm.settings.checks import FloatRange, IntRange

CanvasWindow = Literal["symmetric", "anchored"]
CANVAS_WINDOWS: tuple[CanvasWindow, ...] = ("symmetric", "anchored")


@dataclass(frozen=True)
class Parameter:
    """One number of a denoising rule: the server's default, and what a request may send instead.

    Attributes:
        name: of the number in ``RequestOptions.numbers``, and of its column of state.
        setting: the attribute of the settings that holds the default.
        allowed: what a request may send.
        dtype: of the column, as torch names it.
    """

    name: str
    setting: str
    allowed: FloatRange | IntRange
    dtype: Literal["int32", "float32", "float64"]

    @property
    def key(self) -> str:
        """What a request calls it, in ``vllm_xargs``."""
        return f"diffusion_{self.name}"


class DenoiseSettings(Protocol):
    """How a family denoises unless a request says otherwise.

    Attributes:
        parameters: what a request may set; each becomes one number by slot (``engine.state``).
        canvas_length: tokens of the served canvas; a request may ask for fewer.
        canvas_window: what canvas rows see on sliding layers (``attention.masks``).
    """

    parameters: ClassVar[tuple[Parameter, ...]]

    @property
    def canvas_length(self) -> int: ...

    @property
    def canvas_window(self) -> CanvasWindow: ...

    def of_request(self, asked: Mapping[str, float], temperature: float) -> dict[str, float]:
        """The numbers of a request, by name.

        Args:
            asked: a value for every parameter: the request's, else the default; each is allowed.
            temperature: of the request; 1 where it is greedy.

        Raises:
            VLLMValidationError: the numbers do not fit each other (``settings.request.refuse``).
        """
        ...
