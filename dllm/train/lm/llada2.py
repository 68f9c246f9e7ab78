"""LLaDA2: masked blocks on a mixture of experts, trained in Hugging Face's Glm4Moe.

LLaDA2.0 and 2.1 (T. Bie et al., 2025, https://arxiv.org/abs/2512.15745) have the layers of Ling-2,
of which transformers has no class. Glm4Moe computes the same: RMS norms of queries and keys, rotary
embedding of half of each head, sigmoid router with a bias for the choice of experts, groups of
experts, a shared expert, a dense first layer. Weights are written under the released names.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from transformers import Glm4MoeForCausalLM, PreTrainedModel

from dllm.models.llada2.reference import glm4_config, load_reference, to_released
from dllm.models.unmasking.reference import load_model
from dllm.train.lm.mask_diffusion import MASK, MaskDiffusion
from dllm.train.lm.objective import architecture_of, common_config
from dllm.train.lm.upcycle import upcycle
from dllm.train.run_files import WEIGHTS, write_weights

ARCHITECTURE = "LLaDA2MoeModelLM"


class LLaDA2(MaskDiffusion):
    """The objective of masked blocks with editing, on a mixture of experts."""

    description = (
        "a block-diffusion language model in LLaDA2's format (masked blocks with editing, mixture "
        "of experts)"
    )
    starts_from = (ARCHITECTURE, "SDARForCausalLM", "Qwen3ForCausalLM")
    threshold = 0.7  # diffusers' default
    editing_threshold = 0.9

    def config(self) -> dict[str, object]:
        """config.json: groups of two experts, three quarters of them open to a token."""
        shape = self.settings.model
        num_groups = shape.num_experts // 2
        return common_config(shape, self.tokenizer) | {
            "architectures": [ARCHITECTURE],
            "model_type": "llada2_moe",
            "block_size": shape.canvas_length,
            "mask_token_id": MASK,
            "rope_theta": 100.0,
            "rope_scaling": None,
            "partial_rotary_factor": 0.5,
            "rotary_dim": 16,
            "embedding_dropout": 0.0,
            "use_rmsnorm": True,
            "use_bias": False,
            "use_qkv_bias": False,
            "use_qk_norm": True,
            "first_k_dense_replace": 1,
            "num_experts": shape.num_experts,
            "num_experts_per_tok": num_groups,
            "num_shared_experts": 1,
            "moe_intermediate_size": shape.moe_intermediate_size,
            "n_group": num_groups,
            "topk_group": -(-3 * num_groups // 4),
            "norm_topk_prob": True,
            "score_function": "sigmoid",
            "router_dtype": "fp32",
            "moe_router_enable_expert_bias": True,
            "routed_scaling_factor": 2.5,
            "norm_head": False,
        }

    def build_model(self) -> Glm4MoeForCausalLM:
        """A new model in fp32; all of it is trained but the biases of the router, which stay 0."""
        model = self.new(Glm4MoeForCausalLM, glm4_config(self.config()))
        model.set_experts_implementation("grouped_mm")
        return model

    def load_start(self, path: Path) -> Mapping[str, Tensor]:
        """Weights of a LLaDA2, or of a dense SDAR or Qwen3, which are dealt out to experts."""
        if architecture_of(path) == ARCHITECTURE:
            return load_reference(path).state_dict()
        fresh = self.build_model()
        return upcycle(load_model(path).state_dict(), fresh.state_dict(), fresh.config)

    def save_weights(self, average: PreTrainedModel, path: Path) -> None:
        """Write them under the released names, the biases of the router in fp32."""
        tensors = to_released(average.state_dict(), self.config())
        biases = [name for name in tensors if "expert_bias" in name]
        write_weights(path / WEIGHTS, tensors, kept=biases)
