"""The objective of an autoregressive model, on Hugging Face's own Qwen3.

It is the baseline of the diffusion model and the target of the drafter. The loss is next-token
cross-entropy on the answers alone, because questions are never generated.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from dllm.tasks.suite import Question
from dllm.train.generate import continue_prompts
from dllm.train.lm.learner import Answers, LanguageLearner
from dllm.train.lm.objective import (
    END_IDS,
    EOS,
    MAX_TOKENS,
    Encoded,
    answer_loss,
    answer_mask,
    layer_sizes,
    pad_right,
)


class Autoregressive(LanguageLearner):
    """The next-token objective (see the module)."""

    description = "an autoregressive language model in Qwen3's format"
    starts_from = ("Qwen3ForCausalLM",)

    def config(self) -> dict[str, object]:
        """config.json: full attention in every layer, one key head for two query heads."""
        shape = self.settings.model
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "dtype": "bfloat16",
            **layer_sizes(shape, self.tokenizer),
            "max_position_embeddings": 4096,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            **END_IDS,
        }

    def build_model(self) -> Qwen3ForCausalLM:
        """A new model in fp32; all of it is trained."""
        config = Qwen3Config(**(self.config() | {"dtype": "float32"}))
        return self.new(Qwen3ForCausalLM, config)

    def load_start(self, path: Path) -> Mapping[str, Tensor]:
        """Weights of a model of this kind."""
        return Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()

    def loss_of(
        self, model: Qwen3ForCausalLM, questions: Sequence[Question], random: torch.Generator
    ) -> Tensor:
        """Cross-entropy of the answers, end-of-sequence included."""
        encoded = Encoded.of(self.tokenizer, questions)
        ids = pad_right(encoded.sequences)
        is_answer = answer_mask(encoded, ids.shape[1])
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[:, :-1][is_answer[:, 1:]]).float()
        return answer_loss(logits, ids, is_answer)

    def answer(self, model: Qwen3ForCausalLM, questions: Sequence[Question], seed: int) -> Answers:
        """Greedy answers."""
        prompt_ids = Encoded.of(self.tokenizer, questions).prompts
        rows = continue_prompts(
            model, prompt_ids, MAX_TOKENS, EOS, do_sample=False, eos_token_id=EOS
        )
        return Answers(self.texts(rows, questions), 1.0)
