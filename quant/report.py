"""What computes with quantized weights, in words: pure functions of what was chosen."""

from dataclasses import dataclass

from quant.formats import Numbers
from quant.schemes import Scheme

WORDS: dict[Numbers, str] = {"fp8": "8-bit float", "int8": "8-bit integer", "nvfp4": "4-bit float"}
# Kernels that read quantized weights and 16-bit inputs, whatever the checkpoint says of its inputs.
WEIGHT_ONLY_KERNELS = ("marlin", "a16")
# Below, a GPU has no 4-bit arithmetic: whatever kernel runs, it runs on 16-bit inputs.
FIRST_CAPABILITY_WITH_FP4 = 100


@dataclass(frozen=True)
class Choice:
    """What was chosen for one kind of layer.

    Attributes:
        layers: "linear layers" or "experts".
        scheme: how the checkpoint quantizes them.
        kernel: the name of the class that computes; None: emulated by ``quant``.
        capability: of the GPU, 90 for Hopper; None: a CPU.
    """

    layers: str
    scheme: Scheme
    kernel: str | None
    capability: int | None

    def is_weight_only(self) -> bool:
        """Whether inputs stay as they are, whatever the checkpoint says."""
        if self.scheme.inputs is None:
            return True
        if self.kernel is None:
            return False
        return any(name in self.kernel.lower() for name in WEIGHT_ONLY_KERNELS) or (
            self.scheme.inputs == "nvfp4"
            and self.capability is not None
            and self.capability < FIRST_CAPABILITY_WITH_FP4
        )

    def how(self) -> str:
        """One clause, such as "8-bit float weights and inputs, by TritonExperts"."""
        weights = f"{WORDS[self.scheme.weights]} weights"
        if self.kernel is None:
            inputs = "inputs as they are"
            if self.scheme.inputs is not None:
                inputs = "inputs rounded as the format says"
            return (
                f"{weights}, emulated: dequantized when they were loaded, {inputs}; right, but "
                "neither fast nor small"
            )
        if not self.is_weight_only():
            return f"{weights} and inputs, by {self.kernel}"
        if self.scheme.inputs is None:
            return f"{weights}, 16-bit inputs, by {self.kernel}"
        return (
            f"{weights} only, by {self.kernel}; inputs stay 16-bit on this GPU, although the "
            "checkpoint would quantize them"
        )


def in_words(choices: list[Choice]) -> str:
    """One line on a quantized checkpoint."""
    names = sorted({choice.scheme.name for choice in choices})
    layers: dict[str, list[str]] = {}
    for choice in choices:
        layers.setdefault(choice.how(), []).append(choice.layers)
    clauses = (f"{' and '.join(kinds)}: {how}" for how, kinds in layers.items())
    return f"{' and '.join(names)} checkpoint; {'; '.join(clauses)}"
