"""The line that a server prints about a quantized checkpoint: what computes with its weights."""

from dataclasses import dataclass

from dllm.quant.formats import Numbers
from dllm.quant.schemes import Scheme

WORDS: dict[Numbers, str] = {"fp8": "8-bit float", "int8": "8-bit integer", "nvfp4": "4-bit float"}
# Parts of the names of kernels that take 16-bit inputs, even if the checkpoint quantizes inputs.
WEIGHT_ONLY_KERNELS = ("marlin", "a16")
# GPUs below this compute capability (x 10) have no 4-bit arithmetic: whatever kernel runs with FP4
# weights, its inputs are 16-bit.
FIRST_CAPABILITY_WITH_FP4 = 100


@dataclass(frozen=True)
class Choice:
    """What vLLM, or our emulation, chose for one kind of layer.

    Attributes:
        layers: "linear layers" or "experts".
        scheme: how the checkpoint quantizes them.
        kernel: the name of vLLM's class that computes; None: emulated (``quant.cpu_config``).
        capability: compute capability of the GPU, 90 for Hopper's 9.0; None: a CPU.
    """

    layers: str
    scheme: Scheme
    kernel: str | None
    capability: int | None

    def is_weight_only(self) -> bool:
        """Whether inputs stay 16-bit, whatever the checkpoint says about them."""
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
        """How these layers are computed, as "8-bit float weights and inputs, by TritonExperts"."""
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
    """One line about a quantized checkpoint; kinds of layers that are computed alike are joined."""
    names = sorted({choice.scheme.name for choice in choices})
    layers: dict[str, list[str]] = {}
    for choice in choices:
        layers.setdefault(choice.how(), []).append(choice.layers)
    clauses = (f"{' and '.join(kinds)}: {how}" for how, kinds in layers.items())
    return f"{' and '.join(names)} checkpoint; {'; '.join(clauses)}"
