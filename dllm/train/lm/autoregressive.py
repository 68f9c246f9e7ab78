"""The objective of an autoregressive model, on Hugging Face's own Qwen3.

It is the baseline of the diffusion model and the target of the drafter. The loss is next-token
cross-entropy on the answers alone, because questions are never generated.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from dllm.tasks.suite import Question
from dllm.train.lm.learner import Answers, LanguageLearner
from dllm.train.lm.objective import Encoded, answer_loss, answer_mask, common_config, pad_right


class Autoregressive(LanguageLearner):
    """The next-token objective (see the module)."""

    description = "an autoregressive language model in Qwen3's format"
    starts_from = ("Qwen3ForCausalLM",)

    def config(self) -> dict[str, object]:
        """config.json: full attention in every layer."""
        own = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_theta": 10000.0}
        return common_config(self.settings.model, self.tokenizer) | own

    def build_model(self) -> Qwen3ForCausalLM:
        """A new model in fp32; all of it is trained."""
        config = Qwen3Config(**(self.config() | {"dtype": "float32"}))
        return self.new(Qwen3ForCausalLM, config)

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
        return Answers(self.answer_causally(model, questions), 1.0)
