"""The plugin's own options of a server: the ``dllm`` object of ``--additional-config``.

A wrong value stops the server at start; the error says the key, the value and what is allowed. How
canvases are denoised is not set here, but by the checkpoint and by vLLM's flags: see the settings
of each family, for example ``models.gemma.settings``.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from dllm.settings.decisions import DecisionOptions
from dllm.settings.drafting import DrafterOptions
from dllm.settings.options import CHECKED, Count, Natural, read_options
from dllm.settings.remote import RemoteOptions

WHERE = '--additional-config: "dllm"'  # how messages name the place of these options

Made = TypeVar("Made")
SoftEmbedding = Literal["auto", "sparse", "exact"]
ContextCache = Literal["none", "block"]
Decoding = Literal["diffusion", "self_speculation", "ar"]


@dataclass(frozen=True, config=CHECKED)
class PluginOptions:
    """The ``dllm`` object of ``--additional-config``."""

    decoding: Decoding = "diffusion"
    """Of a model that is an autoregressive one, too (``models.Served``). ``diffusion``: canvases.
    ``ar``: token by token. ``self_speculation``: the same tokens, which a pass over a canvas drafts
    and a causal pass verifies (``drafter.self_drafter``)."""

    separate_passes: bool = False
    """Set where canvases begin causally: the last chunk of a prompt, and an emitted block, have a
    forward pass of their own, and not that of the first denoise step behind them."""

    context_cache: ContextCache = "none"
    """Of a model whose tokens all see each other. ``none``: each pass computes the whole sequence.
    ``block``: what is in front of a block is computed in the block's first pass alone, and the
    others read the keys and values of that pass, as of "prefix cache" in arXiv 2505.22618. Other
    tokens than without, and fewer computed ones."""

    denoise_loop_ms: Annotated[float, Field(ge=0, le=60_000)] | Literal["auto"] = "auto"
    """For how many milliseconds the worker may repeat a batch of canvases before it answers the
    scheduler (``engine.loop``). A request that arrives meanwhile waits no longer than that; than
    one pass, where the worker is in the engine core's process. 0: one pass each time. ``auto`` is
    50 on a CPU and 0 on a GPU, where the loop has not been measured. More than 0 turns asynchronous
    scheduling off."""

    soft_embedding: SoftEmbedding = "auto"
    """``exact`` multiplies the probabilities of all tokens by their embeddings. ``sparse`` (and
    ``auto``) leaves out unlikely tokens if the vocabulary is large; the error is no larger than
    that of rounding the probabilities (``ops.soft_embedding``)."""

    logits_workspace_mib: Count | Literal["auto"] = "auto"
    """MiB of fp32 logits that may exist at once. If a step has more, it is computed in tiles of
    whole canvases (``engine.logit_rows``). ``auto``: 1,024, and on a GPU a 32nd of its memory if
    that is more."""

    self_test: bool = True
    """On a GPU, compare at start every kernel with its definition, and steps in CUDA graphs with
    steps without (``patches.self_test``)."""

    canvas_watchers: Natural = 16
    """How many requests of an API server may stream their unfinished canvases at once; more get
    HTTP 429. 0: none."""

    canvas_frames_per_s: Count = 30
    """How many frames a second each of them gets on average. As many may come at once; what is
    beyond is left out."""

    decisions: DecisionOptions = field(default_factory=DecisionOptions)
    """How typed questions are read (``/v1/decisions``)."""

    drafter: DrafterOptions = field(default_factory=DrafterOptions)
    """Options of a server with a DFlash drafter, which uses none of the others."""

    remote: RemoteOptions | None = None
    """Options of a target whose drafts come from draft workers, which uses none of the others.
    None: there are no draft workers."""

    draft_worker: bool = False
    """Set by `dllm draft-worker`: this engine drafts for targets."""

    @classmethod
    def from_additional_config(cls, additional_config: object) -> "PluginOptions":
        """Raises ValueError: an unknown key (names the nearest one) or a value out of range."""
        is_given = isinstance(additional_config, Mapping)
        given = additional_config.get("dllm") if is_given else None  # type: ignore[attr-defined]
        return cls() if given is None else read_options(cls, given, WHERE)


class _Same(NamedTuple):
    """Equal if it holds the same object: vLLM's configuration has no hash."""

    one: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.one is other.one

    def __hash__(self) -> int:
        return id(self.one)


def once_for_each(make: Callable[[Any], Made]) -> Callable[[Any], Made]:
    """Keep what ``make`` says of a vLLM configuration as long as it has the same options.

    Not as an attribute of it: vLLM's ``replace`` takes its fields alone.
    """

    @functools.lru_cache(maxsize=8)  # a process has one or two
    def kept(vllm_config: _Same, options: _Same) -> Made:
        return make(vllm_config.one)

    return lambda config: kept(_Same(config), _Same(config.additional_config))


@once_for_each
def options_of(vllm_config: Any) -> PluginOptions:
    """Parsed when first asked for. Raises as ``PluginOptions.from_additional_config``."""
    return PluginOptions.from_additional_config(vllm_config.additional_config)
