"""Nemotron: canvases of masks behind a causal Ministral 3, trained in Hugging Face's own class.

Nemotron-Labs-Diffusion is one model for two ways of decoding. Its prompts and finished canvases are
causal, and predict the next token, as in any autoregressive model; a canvas of 32 masks starts
where they end, sees itself whole, and predicts each token at its own position. The loss is the sum
of both: next-token cross-entropy on the clean copy of an answer, and that of masked blocks on the
noised one. Weights are written under the released names.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import Ministral3Config, Ministral3ForCausalLM, PreTrainedModel

from dllm.models.nemotron.shapes import released_name
from dllm.models.unmasking.reference import DecodingRule, load_model
from dllm.tasks.suite import questions
from dllm.train.lm.mask_diffusion import MASK, MaskDiffusion
from dllm.train.lm.objective import (
    MAX_POSITIONS,
    STOPS,
    Encoded,
    answer_loss,
    answer_mask,
    architecture_of,
    common_config,
)
from dllm.train.lm.settings import TrainSettings
from dllm.train.lm.two_copies import TwoCopies
from dllm.train.lm.upcycle import without_head_norms
from dllm.train.run_files import WEIGHTS, write_weights

ARCHITECTURE = "NemotronLabsDiffusionModel"
SEEDED = 0.25  # share of canvases of which the first token alone is given, as the causal pass seeds
MOVED = 0.25  # share of answers with canvases from a place inside, as behind a draft's good part


class Nemotron(MaskDiffusion):
    """The objective of masked canvases and of next tokens (see the module)."""

    description = (
        "a diffusion language model in Nemotron-Labs-Diffusion's format (canvases of masks on a "
        "causal Ministral 3), which also answers token by token"
    )
    starts_from = (ARCHITECTURE, "SDARForCausalLM", "Qwen3ForCausalLM")
    threshold = 0.9  # of the released model card

    def __init__(self, settings: TrainSettings) -> None:
        super().__init__(settings)
        length = settings.model.canvas_length
        self.rule = DecodingRule(1, MASK, STOPS, self.threshold, canvas_length=length)

    def config(self) -> dict[str, object]:
        """config.json: the released one's fields, with shorter positions."""
        shape = self.settings.model
        return common_config(shape, self.tokenizer) | {
            "architectures": [ARCHITECTURE],
            "model_type": "nemotron_labs_diffusion",
            "block_size": shape.canvas_length,
            "dlm_paradigm": "bidirectional",
            "mask_token_id": MASK,
            "rope_parameters": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 4.0,
                "llama_4_scaling_beta": 0.1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": MAX_POSITIONS // 4,
                "rope_theta": 10000.0,
                "rope_type": "yarn",
            },
            "attention_bias": False,
            "mlp_bias": False,
            "sliding_window": None,
            "tie_word_embeddings": False,
        }

    def build_model(self) -> Ministral3ForCausalLM:
        """A new model in fp32; all of it is trained."""
        config = Ministral3Config(**(self.config() | {"model_type": "ministral3"}))
        return self.new(Ministral3ForCausalLM, config)

    def load_start(self, path: Path) -> Mapping[str, Tensor]:
        """Weights of a Nemotron, or of a dense SDAR or Qwen3 with MLPs at least as wide."""
        if architecture_of(path) == ARCHITECTURE:
            return load_model(path).state_dict()
        fresh = self.build_model()
        return without_head_norms(load_model(path).state_dict(), fresh.state_dict(), fresh.config)

    def _lay_out(self, encoded: Encoded, random: torch.Generator) -> TwoCopies:
        """Canvases from the start of the answer on, or from one of its tokens on."""
        count = len(encoded.prompts)
        answer_len = torch.tensor([len(answer) for answer in encoded.answers])
        uniform = torch.rand(2, count, generator=random)
        skipped = torch.where(uniform[0] < MOVED, uniform[1] * answer_len, 0).long()
        prompt_len = torch.tensor([len(prompt) for prompt in encoded.prompts])
        lengths = self._draw_block_lengths(count, random)
        return TwoCopies.of(encoded, lengths, prompt_len + skipped, is_causal=True)

    def _noise(self, copies: TwoCopies, random: torch.Generator) -> Tensor:
        """As for every model of masks; of some canvases the first token alone is given."""
        noised = super()._noise(copies, random)
        block = copies.target_blocks
        is_seeded = torch.rand(len(block), int(block.max()) + 1, generator=random) < SEEDED
        is_masked = copies.is_target.clone()
        is_masked[:, 1:] &= block[:, 1:] == block[:, :-1]
        is_masked[:, 0] = False
        only_first = torch.where(is_masked, MASK, copies.clean)
        return torch.where(is_seeded.gather(1, block), only_first, noised)

    def _clean_loss(
        self, model: PreTrainedModel, hidden: Tensor, encoded: Encoded, copies: TwoCopies
    ) -> Tensor:
        """Next-token cross-entropy of the answers, with its weight."""
        is_answer = answer_mask(encoded, copies.ids.shape[1])
        before = hidden[:, : copies.ids.shape[1] - 1]
        logits = model.lm_head(before[is_answer[:, 1:]]).float()
        return self.settings.prefix_loss * answer_loss(logits, copies.ids, is_answer)

    def evaluate(self, average: PreTrainedModel) -> dict[str, float]:
        """As every model, with diffusion; then token by token, whose errors count as much."""
        columns = super().evaluate(average)
        right = 0.0
        for family, error in self.errors.items():
            asked = [
                question.in_style(self.settings.style)
                for question in questions(
                    [family], "validation", self.settings.validation_questions
                )
            ]
            pairs = zip(asked, self.answer_causally(average, asked), strict=True)
            share = sum(q.is_correct(text) for q, text in pairs) / len(asked)
            self.errors[family] = (error + 1 - share) / 2
            right += share
        return columns | {"autoregressive": round(right / len(self.errors), 4)}

    def save_weights(self, average: PreTrainedModel, path: Path) -> None:
        """Write them in bf16, under the released names."""
        tensors = average.state_dict().items()
        write_weights(path / WEIGHTS, {released_name(name): tensor for name, tensor in tensors})
