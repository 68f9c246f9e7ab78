"""The schemes of ``dllm quantize``, and the layers that it does not quantize, with the reasons."""

from collections.abc import Mapping
from dataclasses import dataclass

from dllm.quant.formats import NVFP4_GROUP
from dllm.quant.schemes import SCHEMES, Plan, Scheme
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


@dataclass(frozen=True)
class Recipe:
    """One way to quantize a model.

    Attributes:
        scheme: of the quantized layers.
        preset: compressed-tensors' name of the scheme.
        file_format: compressed-tensors' name of the layout of the tensors.
        needs_calibration: whether the model has to run, to find the scales of its inputs.
    """

    scheme: Scheme
    preset: str
    file_format: str
    needs_calibration: bool

    @property
    def plan(self) -> Plan:
        """Which layers of a checkpoint get the scheme."""
        return Plan(groups=((("Linear",), self.scheme),), ignore=tuple(IGNORED))

    def quantized(self, layers: list[Linear]) -> list[Linear]:
        """Those of the layers that are quantized.

        Raises:
            CommandError: the inputs of a layer cannot be divided into the groups of the format.
        """
        chosen = [layer for layer in layers if self.plan.scheme_of(layer.module) is not None]
        if self.scheme.weights == "nvfp4":
            for layer in chosen:
                if layer.shape[1] % NVFP4_GROUP:
                    raise CommandError(
                        f"{self.scheme.name} has groups of {NVFP4_GROUP} inputs, and "
                        f"{layer.module} has {layer.shape[1]}. Use --scheme fp8-dynamic, which "
                        "has no groups."
                    )
        return chosen


_SCHEMES = {scheme.name: scheme for scheme in SCHEMES.values()}
RECIPES = {
    recipe.scheme.name: recipe
    for recipe in (
        Recipe(_SCHEMES["fp8-dynamic"], "FP8_DYNAMIC", "float-quantized", False),
        Recipe(_SCHEMES["nvfp4"], "NVFP4", "nvfp4-pack-quantized", True),
    )
}


def recipe_named(name: str) -> Recipe:
    """The recipe that ``--scheme`` asks for.

    Raises:
        CommandError: there is none of this name.
    """
    if name not in RECIPES:
        raise CommandError(
            f"--scheme {name}: unknown{did_you_mean(name, list(RECIPES))}; allowed: "
            f"{', '.join(RECIPES)}."
        )
    return RECIPES[name]
