"""How LLaDA and Dream fill in masks: values of checkpoint and command line, checked."""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field
from pydantic.dataclasses import dataclass

from dllm.models.sdar.settings import SDARSettings
from dllm.models.unmasking.rule import OfWholeSequences
from dllm.settings.checks import refuse_value
from dllm.settings.denoising import WHOLE_SEQUENCE, Parameter
from dllm.settings.options import CHECKED, Count32, Share

# What config.json may say of a backbone that is no Llama; the values of the released models.
LLAMA = {
    "activation_type": "silu",
    "alibi": False,
    "attention_layer_norm": False,
    "block_type": "llama",
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "rope": True,
    "scale_logits": False,
}


@dataclass(frozen=True, config=CHECKED)
class LLaDASettings(SDARSettings):
    """One block of the answer after the other, in front of the masks of the rest.

    Source: ``generate`` of ML-GSAI/LLaDA with the arguments of its ``main``: 128 steps for 128
    tokens in blocks of 32 are 32 steps for each block.
    """

    parameters: ClassVar[tuple[Parameter, ...]] = (
        *SDARSettings.parameters,
        Parameter("block_length", "block_length", "int32"),
        Parameter("alg_temp", "alg_temp", "float32"),
        Parameter("sub_block", "small_block_size", "int32"),
        Parameter("block_add_threshold", "block_add_threshold", "float32"),
    )
    defaults: ClassVar[Mapping[str, Any]] = {
        **SDARSettings.defaults,
        "remasking_strategy": "low_confidence_static",
        "block_length": 32,
        "alg_temp": 0.0,
        "small_block_size": 32,
        "block_add_threshold": 0.1,
    }

    remasking_strategy: OfWholeSequences  # type: ignore[assignment]
    # Of the draw of which masks are decided: by chance, the surest ones more likely. 0: those.
    alg_temp: Annotated[float, Field(ge=0, le=1e6)]
    # Tokens of the answer that are decided, and emitted, before those behind them.
    block_length: Count32
    # For ``entropy_threshold``: tokens of a sub-block, and the share of one that is decided before
    # masks of the next one are.
    small_block_size: Count32
    block_add_threshold: Share

    @property
    def block_size(self) -> int:
        return WHOLE_SEQUENCE

    @classmethod
    def from_vllm(cls, vllm_config: Any) -> Self:
        config = vllm_config.model_config.hf_config
        for name, value in LLAMA.items():
            if (given := getattr(config, name, value)) != value:
                refuse_value(f"config.json: {name}", given, repr(value))
        return super().from_vllm(vllm_config)


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
