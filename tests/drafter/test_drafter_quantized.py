"""Which parts of a quantized drafter are quantized: those that its config.json says, as in vLLM."""

from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)

from tests.support.drafter_harness import drafting_engine, greedy, plain_engine
from tests.support.drafter_pairs import drafter_config, random_drafter, write_drafter, write_target

METHOD = "marks"


class MarkedLinear(UnquantizedLinearMethod):
    """Stands for a quantized layer."""


class MarkedHead(UnquantizedEmbeddingMethod):
    """Stands for a quantized head."""


@register_quantization_config(METHOD)
class Marks(QuantizationConfig):
    """Marks what it is asked to quantize; leaves out modules by parts of their names."""

    def __init__(self, exclude_modules: list[str]) -> None:
        super().__init__()
        self.exclude_modules = exclude_modules

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Marks":
        return cls(list(config["exclude_modules"]))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, ParallelLMHead):
            return MarkedHead()
        if not isinstance(layer, LinearBase):
            return None
        is_excluded = any(part in prefix for part in self.exclude_modules)
        return UnquantizedLinearMethod() if is_excluded else MarkedLinear()

    @classmethod
    def get_name(cls) -> str:
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []


def test_exclusions_name_the_drafters_own_layers_and_an_own_head_is_quantized(tmp_path):
    """The KV cache numbers the drafter's layers behind the target's; its config.json does not."""
    target = write_target(tmp_path / "target")
    given = {"quant_method": METHOD, "exclude_modules": ["layers.1.", "fc"]}
    config = drafter_config(quantization_config=given, has_own_lm_head=True)
    head = torch.randn(512, 64, generator=torch.Generator().manual_seed(3))
    weights = random_drafter() | {"lm_head.weight": head}
    drafter = write_drafter(tmp_path / "drafter", config, weights)
    engine = drafting_engine(target, drafter, 3)
    model = engine.runner.speculator.model
    marked = {
        name
        for name, module in model.named_modules()
        if isinstance(getattr(module, "quant_method", None), MarkedLinear | MarkedHead)
    }
    parts = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert marked == {"lm_head", *(f"model.layers.0.{part}" for part in parts)}
    prompts = [list(range(20, 40))]
    expected = plain_engine(target).generate(prompts, greedy(8))
    assert engine.generate(prompts, greedy(8)) == expected
