"""Which layers of a checkpoint of NVIDIA Model Optimizer are quantized: NVFP4, and no other format.

Its configuration lists the modules that are not quantized, as patterns with wildcards or as parts
of names. vLLM reads it, puts its own names of modules in place of the checkpoint's, and matches
them as ``ModelOptQuantConfigBase.is_layer_excluded`` says (vLLM 0.32); the rules here are the same.
"""

import fnmatch
import re
from collections.abc import Sequence

from dllm.quant.formats import NVFP4_GROUP
from dllm.quant.schemes import MODEL_OPTIMIZER, Plan, Scheme, shared_name

# By the quant_algo that vLLM serves a checkpoint with.
SCHEMES = {
    "NVFP4": Scheme("nvfp4", "nvfp4", "nvfp4", MODEL_OPTIMIZER),
    "W4A16_NVFP4": Scheme("nvfp4a16", "nvfp4", None, MODEL_OPTIMIZER),
}
# What no server has in NVFP4, whatever the configuration says.
NEVER_QUANTIZED = ("vision_tower", "embed_vision", "self_conditioning")


def plan_of(quant_algo: str, group_size: int, excluded: Sequence[str]) -> Plan:
    """The plan of an NVFP4 checkpoint.

    Args:
        quant_algo: a key of ``SCHEMES``.
        group_size: weights that share a scale.
        excluded: modules that are not quantized.

    Raises:
        ValueError: the groups are not those of NVFP4.
    """
    if group_size != NVFP4_GROUP:
        raise ValueError(
            f"quantization_config: group_size = {group_size}; NVFP4 has a scale for every "
            f"{NVFP4_GROUP} weights. Quantize or download the checkpoint again."
        )
    return Plan(
        groups=((("Linear",), SCHEMES[quant_algo]),),
        ignore=tuple(_pattern(shared_name(module)) for module in (*excluded, *NEVER_QUANTIZED)),
    )


def _pattern(excluded: str) -> str:
    """A target as compressed-tensors writes it, for a wildcard or a part of a name."""
    if any(sign in excluded for sign in "*?["):
        return f"re:(?:.*\\.)?{fnmatch.translate(excluded)}"
    return f"re:.*{re.escape(excluded)}"
