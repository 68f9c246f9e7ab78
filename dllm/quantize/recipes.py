"""The schemes of ``dllm quantize``, and the layers that it does not quantize, with the reasons."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from dllm.quant.formats import NVFP4_GROUP
from dllm.quant.schemes import SCHEMES, Plan, Scheme, is_named, shared_name
from dllm.quantize import arguments
from dllm.quantize.linears import Linear
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


def quantized_layers(
    layers: list[Linear], scheme: Scheme, ignored: Iterable[str] = ()
) -> list[Linear]:
    """``ignored``: names and patterns of layers that do not get the scheme, beside ``IGNORED``.

    Raises CommandError: one of ``ignored`` matches no layer, or a part of what vLLM computes as
    one; no layer is left; or the inputs of a layer cannot be divided into the groups of the format.
    """
    usual = _chosen(layers, scheme, IGNORED)
    for one in ignored:
        try:
            found = len(_chosen(usual, scheme, [one])) < len(usual)
            served = [is_named(one, shared_name(layer.module)) for layer in usual]
        except re.error as error:
            raise CommandError(f"--ignore {one}: no pattern ({error}).") from None
        if served != [is_named(one, layer.module) for layer in usual]:
            raise CommandError(
                f"--ignore {one}: a pattern has to begin with re:.* and may not name what stands "
                "in front of `layers.`, because a server's names of layers begin otherwise than a "
                "checkpoint's."
            )
        if not found:
            raise CommandError(
                f"--ignore {one}: no layer that would be quantized is called so. They are called "
                f"like {usual[0].module}; a pattern is written like 're:.*layers\\.0\\..*'."
            )
    chosen = _chosen(usual, scheme, ignored)
    _refuse_parts(usual, {layer.module for layer in chosen})
    if not chosen:
        raise CommandError("--ignore leaves no layer to quantize.")
    for layer in chosen:
        if scheme.weights == "nvfp4" and layer.shape[1] % NVFP4_GROUP:
            raise CommandError(
                f"{scheme.name} has groups of {NVFP4_GROUP} inputs, and {layer.module} has "
                f"{layer.shape[1]}. Use --scheme fp8-dynamic, which has no groups."
            )
    return chosen


def _chosen(layers: list[Linear], scheme: Scheme, ignored: Iterable[str]) -> list[Linear]:
    plan = Plan(groups=((("Linear",), scheme),), ignore=tuple(ignored))
    return [layer for layer in layers if plan.scheme_of(layer.module) is not None]


def _refuse_parts(layers: list[Linear], chosen: set[str]) -> None:
    """Raises CommandError if a part of what vLLM computes as one layer is chosen."""
    together: dict[str, list[str]] = defaultdict(list)
    for layer in layers:
        together[layer.fused.split(".experts.")[0]].append(layer.module)
    for modules in together.values():
        out = [module for module in modules if module not in chosen]
        if out and len(out) < len(modules):
            left = next(module for module in modules if module in chosen)
            raise CommandError(
                f"--ignore leaves out {out[0]}, but not {left}: vLLM computes them as one layer. "
                "Name both, or none."
            )


def quantization_config(scheme: Scheme, ignored: Iterable[str] = ()) -> dict[str, object]:
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    preset = preset_name_to_scheme(scheme.preset, ["Linear"])
    preset.format = scheme.file_format
    config = QuantizationConfig(
        config_groups={"group_0": preset},
        ignore=[*IGNORED, *ignored],
        quantization_status="compressed",
        format=scheme.file_format,
    )
    written: dict[str, object] = config.model_dump(mode="json")
    return written
