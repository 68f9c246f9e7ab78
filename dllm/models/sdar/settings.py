"""How these models fill in masks: the values of the checkpoint and of the command line, checked.

``generation_config.json`` may hold defaults, under the names of the attributes; the released ones
hold none, and those here are of each model's reference. ``--override-generation-config`` changes
them.
"""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field
from pydantic.dataclasses import dataclass

from dllm.models.unmasking.rule import Strategy
from dllm.models.unmasking.settings import OF_ALL, UnmaskingSettings
from dllm.settings.denoising import Parameter
from dllm.settings.options import CHECKED, Count32


@dataclass(frozen=True, config=CHECKED)
class SDARSettings(UnmaskingSettings):
    """Source: ``generate.py`` of JetAstra/SDAR; ``entropy_bound`` of their JetEngine."""

    parameters: ClassVar[tuple[Parameter, ...]] = (
        *OF_ALL,
        Parameter("strategy", "remasking_strategy", "int32"),
        Parameter("entropy_bound", "entropy_bound", "float32"),
    )
    defaults: ClassVar[Mapping[str, Any]] = {
        "threshold": 0.85,
        "remasking_strategy": "low_confidence_dynamic",
        "entropy_bound": 0.35,
    }

    remasking_strategy: Strategy  # the names are the reference's
    entropy_bound: Annotated[float, Field(ge=0, le=1e6)]  # nats; for ``entropy_bounded``


class StableDiffcoderSettings(SDARSettings):
    """The defaults of ``generate_block`` in Stable-DiffCoder's remote code."""

    defaults: ClassVar[Mapping[str, Any]] = {**SDARSettings.defaults, "threshold": 0.95}


class TinyA2DSettings(SDARSettings):
    """As ``BD3LMSampler`` of ZHZisZZ/dllm: one mask in each step; none is above the threshold."""

    defaults: ClassVar[Mapping[str, Any]] = {**SDARSettings.defaults, "threshold": 1.0}

    @classmethod
    def from_vllm(cls, vllm_config: Any) -> Self:
        """Raises ValueError as ``UnmaskingSettings`` does, and for a checkpoint without blocks."""
        name = PurePath(vllm_config.model_config.model).name
        if "mdlm" in name.lower():
            raise ValueError(
                f"{name}: a Tiny-A2D whose name says mdlm was trained without blocks. Each of its "
                "tokens sees the whole sequence in every step, so no KV cache could be kept. Serve "
                "its sibling whose name says bd3lm."
            )
        return super().from_vllm(vllm_config)


@dataclass(frozen=True, config=CHECKED)
class FastDLLMSettings(SDARSettings):
    """SDAR's rule, in one sub-block after the other.

    Source: arXiv 2509.26328, section 3.3, and ``generate`` of the checkpoints' remote code with the
    arguments of the model card.
    """

    is_shifted: ClassVar[bool] = True
    parameters: ClassVar[tuple[Parameter, ...]] = (
        *SDARSettings.parameters,
        Parameter("sub_block", "small_block_size", "int32"),
    )
    defaults: ClassVar[Mapping[str, Any]] = {
        **SDARSettings.defaults,
        "threshold": 0.9,
        "small_block_size": 8,
    }

    # Tokens of a sub-block, counted from the start of the block. At least those of a block: there
    # is one.
    small_block_size: Count32
