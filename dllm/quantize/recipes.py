"""What ``dllm quantize`` can make, and which layers it leaves alone, with the reason for each."""

from collections.abc import Mapping
from dataclasses import dataclass

from dllm.quantize.linears import Linear
from dllm.settings.checks import did_you_mean
from dllm.settings.command import CommandError
from quant.formats import NVFP4_GROUP
from quant.schemes import SCHEMES, Plan, Scheme

# Patterns as compressed-tensors reads them. Norms and the embedding are no linear layers.
IGNORED: Mapping[str, str] = {
    "lm_head": "tied to the embedding, which every soft embedding is a mix of",
    "re:.*router.*": "a rounded router logit sends a token to another expert; 0.02% of the weights",
    "re:.*self_conditioning.*": "feeds each denoise step's beliefs into the next: errors add up",
    "re:.*vision_tower.*": "text calibration never runs it",
    "re:.*embed_vision.*": "text calibration never runs it",
}


@dataclass(frozen=True)
class Recipe:
    """One way to quantize.

    Attributes:
        scheme: what its layers are.
        preset: compressed-tensors' name of it.
        file_format: compressed-tensors' name of the tensors' layout.
        needs_calibration: whether the model has to run to find scales of its inputs.
    """

    scheme: Scheme
    preset: str
    file_format: str
    needs_calibration: bool

    @property
    def plan(self) -> Plan:
        """Which layers get the scheme."""
        return Plan(groups=((("Linear",), self.scheme),), ignore=tuple(IGNORED))

    def quantized(self, layers: list[Linear]) -> list[Linear]:
        """Those of the layers that are not left alone.

        Raises:
            CommandError: the groups of the format do not fit a layer's input.
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
