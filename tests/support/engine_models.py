"""Random checkpoints of each way to denoise, with engines and requests for them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm import SamplingParams

from tests.support.async_engine import get_async_engine
from tests.support.engine_harness import Engine, get_engine

# Tokens of a canvas. Those of Nemotron start where the prompt ends, as DiffusionGemma's do.
SIZES = {"gemma": 32, "sdar": 4, "llada2": 32, "nemotron": 32}
BLOCKS = ("sdar", "llada2")


@dataclass(frozen=True)
class Model:
    """A checkpoint, and the tokens of a whole canvas."""

    path: Path
    size: int
    name: str = "sdar"

    @property
    def has_blocks(self) -> bool:
        """Whether a canvas is the rest of a block."""
        return self.name in BLOCKS

    def engine(self, is_async: bool = False, **options: Any) -> Engine:
        """An engine that serves it, started once for each set of options."""
        get = get_async_engine if is_async else get_engine
        return get(self.path, **({"max_num_batched_tokens": 256} | options))

    def params(self, blocks: float = 3, **options: Any) -> SamplingParams:
        """``blocks`` canvases of output, not ended by end-of-sequence; of masks greedy."""
        given: dict[str, Any] = {"ignore_eos": True, "seed": 1}
        if self.name != "gemma":
            extra = {"diffusion_threshold": 0.3} | options.pop("extra_args", {})
            given = {"ignore_eos": True, "temperature": 0, "extra_args": extra}
        return SamplingParams(max_tokens=int(blocks * self.size), **(given | options))


def model_of(name: str, path: Path) -> Model:
    """The model at ``path``, which ``checkpoint()`` or ``family(name)`` has written."""
    return Model(path, SIZES[name], name)
