"""Which layers of a checkpoint are quantized, and how: the ``quantization_config``, parsed.

compressed-tensors writes it into config.json. It has groups, and a list of modules to leave alone.
Each group names the layers it is for (a class name, a full module name, or ``re:`` and a pattern)
and describes the number formats of their weights and inputs.
"""

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dllm.quant.formats import NVFP4_GROUP, QuantDtype

# The names of all linear layers that may be quantized end so; those of norms and routers do not.
LINEAR_ENDINGS = ("_proj", ".query_key_value", ".attention.dense", ".attn_out", ".ff_out")

# The encoder and the decoder share their weights, and a checkpoint may keep the one copy under any
# of these names. Longest first, because the last is the start of the others.
MODEL_PREFIXES = ("model.encoder.language_model.", "model.decoder.", "model.")


class Nvfp4Names(NamedTuple):
    """The last parts of the names of an NVFP4 layer's tensors, beside its ``weight_scale``.

    The scale of the whole weight, and that of its inputs, is a divisor for compressed-tensors and a
    factor for Model Optimizer.
    """

    codes: str
    weight_scale: str
    input_scale: str


COMPRESSED_TENSORS = Nvfp4Names("weight_packed", "weight_global_scale", "input_global_scale")
MODEL_OPTIMIZER = Nvfp4Names("weight", "weight_scale_2", "input_scale")


@dataclass(frozen=True)
class Scheme:
    name: str  # in options and messages
    weights: QuantDtype  # FP8 and INT8 have a scale for each output channel
    inputs: QuantDtype | None  # with a scale for each token; None: not quantized
    nvfp4_names: Nvfp4Names = COMPRESSED_TENSORS  # of the tensors, if the weight is NVFP4

    @property
    def preset(self) -> str:
        return self.name.upper().replace("-", "_")

    @property
    def file_format(self) -> str:
        """compressed-tensors' name of the layout of the tensors, of FP8 and NVFP4."""
        return "nvfp4-pack-quantized" if self.weights == "nvfp4" else "float-quantized"

    @property
    def needs_calibration(self) -> bool:
        """Whether inputs have a static scale, so that the model has to run to find it."""
        return self.inputs == "nvfp4"

    @property
    def weight_suffix(self) -> str:
        return self.nvfp4_names.codes if self.weights == "nvfp4" else "weight"

    @property
    def suffixes(self) -> tuple[str, ...]:
        if self.weights != "nvfp4":
            return ("weight", "weight_scale")
        names = self.nvfp4_names
        static_inputs = (names.input_scale,) if self.needs_calibration else ()
        return (names.codes, "weight_scale", names.weight_scale, *static_inputs)

    def shapes(self, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        """By the last part of each tensor's name."""
        if self.weights != "nvfp4":
            return {"weight": (out_features, in_features), "weight_scale": (out_features, 1)}
        shapes: dict[str, tuple[int, ...]] = {suffix: (1,) for suffix in self.suffixes}
        shapes[self.weight_suffix] = (out_features, in_features // 2)
        shapes["weight_scale"] = (out_features, in_features // NVFP4_GROUP)
        return shapes


# How a config describes a number format: (type, bits, strategy, group size, dynamic). The strategy
# says what has a scale of its own; dynamic scales are computed while the model runs.
_Description = tuple[object, ...]
_FP8_WEIGHTS: _Description = ("float", 8, "channel", None, False)
_FP8_TOKENS: _Description = ("float", 8, "token", None, True)
_INT8_WEIGHTS: _Description = ("int", 8, "channel", None, False)
_INT8_TOKENS: _Description = ("int", 8, "token", None, True)
_NVFP4_WEIGHTS: _Description = ("float", 4, "tensor_group", NVFP4_GROUP, False)
_NVFP4_TOKENS: _Description = ("float", 4, "tensor_group", NVFP4_GROUP, "local")

SCHEMES: dict[tuple[_Description, _Description | None], Scheme] = {
    (_FP8_WEIGHTS, _FP8_TOKENS): Scheme("fp8-dynamic", "fp8", "fp8"),
    (_INT8_WEIGHTS, _INT8_TOKENS): Scheme("int8-dynamic", "int8", "int8"),
    (_NVFP4_WEIGHTS, _NVFP4_TOKENS): Scheme("nvfp4", "nvfp4", "nvfp4"),
    (_NVFP4_WEIGHTS, None): Scheme("nvfp4a16", "nvfp4", None),
}
# The schemes of NVIDIA Model Optimizer, by the quant_algo that vLLM serves a checkpoint with.
MODEL_OPTIMIZER_SCHEMES = {
    "NVFP4": Scheme("nvfp4", "nvfp4", "nvfp4", MODEL_OPTIMIZER),
    "W4A16_NVFP4": Scheme("nvfp4a16", "nvfp4", None, MODEL_OPTIMIZER),
}
# Modules that no server runs in Model Optimizer's NVFP4, whatever the configuration says.
NEVER_QUANTIZED = ("vision_tower", "embed_vision", "self_conditioning")


@dataclass(frozen=True)
class Plan:
    # (targets, scheme) in the config's order; the first that matches a layer counts.
    groups: tuple[tuple[tuple[str, ...], Scheme], ...]
    ignore: tuple[str, ...]  # modules that are not quantized, written as targets are

    def scheme_of(self, module: str) -> Scheme | None:
        """The scheme of a linear layer, given its name in the checkpoint; None: not quantized.

        Each projection of an expert is a linear layer too: ``...experts.3.up_proj``.
        """
        if not module.endswith(LINEAR_ENDINGS):
            return None
        if any(is_named(target, module) for target in self.ignore):
            return None
        for targets, scheme in self.groups:
            if any(target == "Linear" or is_named(target, module) for target in targets):
                return scheme
        return None


def parse_plan(quantization_config: Mapping[str, object]) -> Plan:
    """Raises ValueError: compressed-tensors did not write it, or a scheme is not in ``SCHEMES``."""
    method = quantization_config.get("quant_method")
    if method != "compressed-tensors":
        raise ValueError(
            f"quantization_config: quant_method = {method!r}; supported: compressed-tensors, as "
            "LLM Compressor writes it."
        )
    groups = quantization_config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError(
            f"quantization_config: config_groups = {groups!r}; it has to name at least one group "
            "of layers. Quantize the model again."
        )
    return Plan(
        groups=tuple(
            (tuple(group["targets"]), _scheme_of_group(name, group))
            for name, group in groups.items()
        ),
        ignore=tuple(quantization_config.get("ignore") or ()),  # type: ignore[arg-type]
    )


def parse_model_optimizer(quant_algo: str, group_size: int, excluded: Sequence[str]) -> Plan:
    """The plan of an NVFP4 checkpoint of NVIDIA Model Optimizer.

    Its configuration lists the modules that are not quantized, as patterns with wildcards or as
    parts of names. vLLM reads it, puts its own names of modules in place of the checkpoint's, and
    matches them as ``ModelOptQuantConfigBase.is_layer_excluded`` says (vLLM 0.32); the rules here
    are the same. Raises ValueError: the groups are not those of NVFP4.
    """
    if group_size != NVFP4_GROUP:
        raise ValueError(
            f"quantization_config: group_size = {group_size}; NVFP4 has a scale for every "
            f"{NVFP4_GROUP} weights. Quantize or download the checkpoint again."
        )
    return Plan(
        groups=((("Linear",), MODEL_OPTIMIZER_SCHEMES[quant_algo]),),
        ignore=tuple(_target(shared_name(module)) for module in (*excluded, *NEVER_QUANTIZED)),
    )


def _target(excluded: str) -> str:
    if any(sign in excluded for sign in "*?["):
        return f"re:(?:.*\\.)?{fnmatch.translate(excluded)}"
    return f"re:.*{re.escape(excluded)}"


def shared_name(module: str) -> str:
    """``layers.3.mlp.up_proj``: the same for the encoder's and the decoder's name of a module."""
    for prefix in MODEL_PREFIXES:
        if module.startswith(prefix):
            return module.removeprefix(prefix)
    return module


def is_named(target: str, module: str) -> bool:
    """Whether a name or pattern, as compressed-tensors writes it, is of this module."""
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return shared_name(target) == shared_name(module)


def _scheme_of_group(name: str, group: Mapping[str, object]) -> Scheme:
    weights, inputs = _describe(group.get("weights")), _describe(group.get("input_activations"))
    scheme = SCHEMES.get((weights, inputs)) if weights is not None else None
    if scheme is None:
        raise ValueError(
            f"quantization_config: {name} has weights {_in_words(weights)} and inputs "
            f"{_in_words(inputs)}; supported: "
            + "; ".join(
                f"{known.name} (weights {_in_words(key[0])}, inputs {_in_words(key[1])})"
                for key, known in SCHEMES.items()
            )
            + "."
        )
    return scheme


def _describe(numbers: object) -> _Description | None:
    """A number format of a config; None where there is none, that is, nothing is quantized."""
    if not isinstance(numbers, Mapping):
        return None
    if not numbers.get("symmetric", True):
        return ("asymmetric",)
    dynamic = numbers.get("dynamic") or False
    keys = ("type", "num_bits", "strategy", "group_size")
    return (*(numbers.get(key) for key in keys), dynamic)


def _in_words(description: _Description | None) -> str:
    if description is None:
        return "as they are"
    if len(description) == 1:
        return str(description[0])
    kind, bits, strategy, group, dynamic = description
    size = f" of {group}" if group else ""
    return f"{kind}{bits}, a scale per {strategy}{size}, {'dynamic' if dynamic else 'static'}"
