"""How Fast-dLLM v2 fills in masks: values of the checkpoint and of the command line, checked."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic.dataclasses import dataclass

from dllm.models.sdar.settings import SDARSettings
from dllm.settings.denoising import Parameter
from dllm.settings.options import CHECKED, Count32


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
