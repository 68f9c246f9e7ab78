"""How Dream fills in masks: values of the checkpoint and of the command line, checked."""

from collections.abc import Mapping
from dataclasses import field
from typing import Any, ClassVar, Literal

from pydantic.dataclasses import dataclass

from dllm.models.llada.settings import LLaDASettings
from dllm.settings.options import CHECKED


@dataclass(frozen=True, config=CHECKED)
class DreamSettings(LLaDASettings):
    """The answer is one block, unless a shorter ``block_length`` is asked for.

    Source: ``diffusion_generate`` of the checkpoints' remote code. Its ``alg`` "entropy" is
    ``least_entropy`` here, "maskgit_plus" is ``low_confidence_static``, others are called alike.
    """

    is_shifted: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, Any]] = {
        **LLaDASettings.defaults,
        "remasking_strategy": "least_entropy",
        "noise_schedule": "reverse",
        "block_length": 256,
    }

    noise_schedule: Literal["linear", "cosine", "sqrt", "reverse"] = field(  # type: ignore[assignment]
        default="reverse", kw_only=True
    )
