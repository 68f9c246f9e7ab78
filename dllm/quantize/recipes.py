"""The schemes of ``dllm quantize``, and the layers that it does not quantize, with the reasons."""

from collections.abc import Mapping

from dllm.quant.formats import NVFP4_GROUP
from dllm.quant.schemes import SCHEMES, Plan, Scheme
from dllm.quantize import arguments
from dllm.quantize.linears import Linear
from dllm.settings.checks import did_you_mean
from dllm.settings.command import CommandError

# Names and patterns as compressed-tensors reads them -> why. Norms and the embedding need no entry:
# they are not linear layers.
IGNORED: Mapping[str, str] = {
    "lm_head": "tied to the embedding, which every soft embedding is a mix of",
    "re:.*router.*": "a rounded router logit sends a token to another expert; 0.02% of the weights",
    "re:.*mlp\\.gate$": "the router of SDAR-MoE and LLaDA2: as above",
    "re:.*self_conditioning.*": "feeds each denoise step's beliefs into the next: errors add up",
    "re:.*vision_tower.*": "text calibration never runs it",
    "re:.*embed_vision.*": "text calibration never runs it",
}
_BY_NAME = {scheme.name: scheme for scheme in SCHEMES.values()}
MADE = {name: _BY_NAME[name] for name in arguments.MADE}


def scheme_named(name: str) -> Scheme:
    """Raises CommandError if there is no scheme of this name."""
    if name not in MADE:
        raise CommandError(
            f"--scheme {name}: unknown{did_you_mean(name, list(MADE))}; allowed: {', '.join(MADE)}."
        )
    return MADE[name]


def quantized_layers(layers: list[Linear], scheme: Scheme) -> list[Linear]:
    """The layers that get the scheme.

    Raises:
        CommandError: the inputs of a layer cannot be divided into the groups of the format.
    """
    plan = Plan(groups=((("Linear",), scheme),), ignore=tuple(IGNORED))
    chosen = [layer for layer in layers if plan.scheme_of(layer.module) is not None]
    for layer in chosen:
        if scheme.weights == "nvfp4" and layer.shape[1] % NVFP4_GROUP:
            raise CommandError(
                f"{scheme.name} has groups of {NVFP4_GROUP} inputs, and {layer.module} has "
                f"{layer.shape[1]}. Use --scheme fp8-dynamic, which has no groups."
            )
    return chosen


def quantization_config(scheme: Scheme) -> dict[str, object]:
    """The ``quantization_config`` of a checkpoint's config.json, in compressed-tensors' format."""
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    preset = preset_name_to_scheme(scheme.preset, ["Linear"])
    preset.format = scheme.file_format
    config = QuantizationConfig(
        config_groups={"group_0": preset},
        ignore=list(IGNORED),
        quantization_status="compressed",
        format=scheme.file_format,
    )
    written: dict[str, object] = config.model_dump(mode="json")
    return written
