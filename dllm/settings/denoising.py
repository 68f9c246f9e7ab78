"""What the settings of every family have in common, for example what a request may change."""

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, get_type_hints

# In the place of a token's id: there is none, or whoever reads it chooses one.
NO_TOKEN = -1
# ``DenoiseSettings.block_size`` where every token sees all others: more than any sequence has.
WHOLE_SEQUENCE = 1 << 30

CanvasWindow = Literal["symmetric", "anchored"]


@dataclass(frozen=True)
class Parameter:
    """A number of the denoise step that a request may set; the settings hold its default."""

    name: str  # its key in ``RequestOptions.parameters`` and ``CanvasState.parameters``
    # The attribute of the settings that holds the default, and whose type says what a request may
    # send. Of a ``Literal`` it sends a name; the number is its index.
    setting: str
    dtype: Literal["int32", "float32", "float64"]  # of the tensor that holds it for all requests

    @property
    def key(self) -> str:
        """Its name in a request's ``vllm_xargs``."""
        return f"diffusion_{self.name}"


class DenoiseSettings(Protocol):
    """How a family denoises unless a request says otherwise.

    Attributes:
        parameters: what a request may set; ``engine.state`` keeps one number for each request.
        one_step: extra arguments of a request whose canvases are emitted after one denoise step.
            The server's warm-up sends them.
        modes: values of settings that go together, by the name that a request or a server gives.
        block_size: a row of a prompt or of an emitted block sees all keys in its own group of this
            many positions. 1 means that it is causal. With more, a canvas is the rest of a group.
        canvas_length: tokens of a canvas; a request may ask for fewer.
        canvas_window: which context canvas rows see on sliding layers (``attention.masks``).
        never_emitted: tokens that are no answer whatever a request asks for: the mask, which a
            canvas begins with. Empty if it begins with noise.
        begins_causally: a causal pass in front of a canvas decides its first token.
    """

    parameters: ClassVar[tuple[Parameter, ...]]
    one_step: ClassVar[Mapping[str, int]]
    modes: ClassVar[Mapping[str, Mapping[str, Any]]]

    def __hash__(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def canvas_length(self) -> int: ...

    @property
    def canvas_window(self) -> CanvasWindow: ...

    @property
    def never_emitted(self) -> tuple[int, ...]: ...

    @property
    def begins_causally(self) -> bool: ...

    def of_request(self, asked: Mapping[str, float], temperature: float) -> dict[str, float]:
        """The numbers with which a request is denoised, by the names of the parameters.

        ``asked``: the request's value or the default of every parameter, in its range.
        ``temperature``: 1 for a greedy request. Raises VLLMValidationError if they do not fit each
        other.
        """
        ...


def unread_canvases(settings: DenoiseSettings) -> str | None:
    """Why no route reads canvases that it has written itself; None if routes may."""
    if settings.begins_causally:
        return (
            "this server begins each canvas with the token of a causal pass. Serve it with "
            "first_token = 'mask'."
        )
    if settings.block_size == WHOLE_SEQUENCE:
        return "this model has no canvas but the whole answer. Ask it for an answer."
    return None


@functools.cache
def types_of(settings: type) -> dict[str, Any]:
    """The types of the attributes of a family's settings, with their bounds."""
    return get_type_hints(settings, include_extras=True)


def refuse_unknown(
    override: Mapping[str, object],
    generation: Mapping[str, object],
    known: Collection[str],
    hint: str = "",
) -> None:
    """Raises ValueError for a name in ``--override-generation-config`` that nobody reads.

    ``generation``: of generation_config.json; transformers may read what it names.
    """
    from transformers import GenerationConfig

    if unknown := sorted(set(override) - {*known, *generation, *vars(GenerationConfig())}):
        raise ValueError(
            f"--override-generation-config: {', '.join(unknown)}: not of this model; allowed: "
            f"{', '.join(known)}.{hint}"
        )


def block_size_of(vllm_config: Any) -> int:
    """``DenoiseSettings.block_size`` of a server's model, as config.json says it; else 1."""
    return getattr(vllm_config.model_config.hf_config, "block_size", None) or 1
