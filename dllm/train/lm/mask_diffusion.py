"""The objective of models of masked blocks: the answer appears in place of MASK.

A question and its answer are cut into blocks. Every block with answer tokens is noised: each of
them becomes MASK with probability t, which is drawn for the block. The model sees it behind the
clean blocks before it (``two_copies``). The loss is the cross-entropy of the clean block, averaged
over its positions that count, over the blocks of an answer, and over answers.

Many blocks are all MASK (t = 1), as at the start of generation. For a model that edits, some of the
tokens that were kept are wrong, and all positions count; otherwise only the masked ones do.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from dllm.models.unmasking.reference import DecodingRule, additive, generate_blocks
from dllm.tasks.suite import Question
from dllm.tasks.tokenizer import TOKEN_ID
from dllm.train.lm.learner import Answers, LanguageLearner
from dllm.train.lm.objective import (
    MAX_TOKENS,
    PURE_NOISE,
    STOPS,
    TAIL_WEIGHT,
    Encoded,
    tail_weights,
)
from dllm.train.lm.settings import TrainSettings
from dllm.train.lm.two_copies import TwoCopies

MASK = TOKEN_ID["<mask>"]
GROUP = 8  # questions of about the same length that go through the model together


class MaskDiffusion(LanguageLearner):
    """The objective of masked blocks (see the module); a subclass adds the model's format.

    Attributes:
        threshold, editing_threshold: of validation and of the finished model.
    """

    threshold: float
    editing_threshold: float | None = None

    def __init__(self, settings: TrainSettings) -> None:
        super().__init__(settings)
        self.rule = DecodingRule(
            settings.model.canvas_length, MASK, STOPS, self.threshold, self.editing_threshold
        )

    def generation_config(self) -> dict[str, object]:
        """That of every objective, and the thresholds."""
        own: dict[str, object] = {"threshold": self.threshold}
        if self.editing_threshold is not None:
            own |= {"editing": 1, "editing_threshold": self.editing_threshold}
        return super().generation_config() | own

    def loss_of(
        self, model: PreTrainedModel, questions: Sequence[Question], random: torch.Generator
    ) -> Tensor:
        """The mean cross-entropy of the noised blocks, in nats."""
        by_length = sorted(questions, key=lambda each: len(each.prompt) + len(each.answer))
        groups = [by_length[start : start + GROUP] for start in range(0, len(by_length), GROUP)]
        losses = [self._group_loss(model, group, random) * len(group) for group in groups]
        return torch.stack(losses).sum() / len(questions)

    def _group_loss(
        self, model: PreTrainedModel, questions: Sequence[Question], random: torch.Generator
    ) -> Tensor:
        """The same of questions that go through the model together."""
        encoded = Encoded.of(self.tokenizer, questions)
        copies = self._lay_out(encoded, random)
        noised = self._noise(copies, random)
        hidden = model.model(
            input_ids=torch.cat((copies.ids, noised), dim=1),
            attention_mask=additive(copies.visible()),
            position_ids=copies.positions,
            use_cache=False,
        ).last_hidden_state
        counts = copies.is_target
        if not self.settings.wrong_tokens:
            counts = counts & (noised == MASK)
        weights = position_weights(copies, counts)
        logits = model.lm_head(hidden[:, copies.is_noised][counts]).float()
        losses = F.cross_entropy(logits, copies.clean[counts], reduction="none")
        return (losses * weights[counts]).sum() + self._clean_loss(model, hidden, encoded, copies)

    def _lay_out(self, encoded: Encoded, random: torch.Generator) -> TwoCopies:
        """The two copies of a batch, with block lengths that are drawn."""
        return TwoCopies.of(encoded, self._draw_block_lengths(len(encoded.prompts), random))

    def _clean_loss(
        self, model: PreTrainedModel, hidden: Tensor, encoded: Encoded, copies: TwoCopies
    ) -> Tensor | float:
        """The loss of the clean copy, which only a model that reads causally has.

        Args:
            hidden: ``[N, S, H]``, of both copies.
        """
        return 0.0

    def _draw_block_lengths(self, count: int, random: torch.Generator) -> Tensor:
        allowed = torch.tensor(self.settings.block_lengths)
        return allowed[torch.randint(len(allowed), (count,), generator=random)]

    def _noise(self, copies: TwoCopies, random: torch.Generator) -> Tensor:
        """The noised copy ``[N, M]``: MASK, and wrong tokens that come from other answers."""
        block = copies.target_blocks - copies.target_blocks[:, :1]
        shape = (len(block), int(block.max()) + 1)
        uniform = torch.rand(2, *shape, generator=random)
        level = torch.where(uniform[0] < PURE_NOISE, 1.0, uniform[1]).gather(1, block)
        uniform = torch.rand(2, *block.shape, generator=random)
        is_masked = copies.is_target & (uniform[0] < level)
        is_wrong = copies.is_target & (uniform[1] < self.settings.wrong_tokens)
        answers = copies.clean[copies.is_target]
        drawn = answers[torch.randint(len(answers), block.shape, generator=random)]
        noised = torch.where(is_wrong, drawn, copies.clean)
        return torch.where(is_masked, MASK, noised)

    @torch.no_grad()
    def answer(self, model: PreTrainedModel, questions: Sequence[Question], seed: int) -> Answers:
        """Generate like a server, with the block length of the config."""
        prompts_ids = Encoded.of(self.tokenizer, questions).prompts
        answers, steps, blocks = generate_blocks(model, prompts_ids, self.rule, MAX_TOKENS)
        return Answers(self.texts(answers, questions), steps / blocks)


def position_weights(copies: TwoCopies, counts: Tensor) -> Tensor:
    """Weights ``[N, M]`` fp32 of the positions in the loss; they add up to 1.

    Every answer has the same weight, and so has every block of it in which a position counts.

    Args:
        counts: ``[N, M]`` bool, which positions count.
    """
    weight = tail_weights(copies.clean, copies.is_target) * counts
    block = copies.target_blocks - copies.target_blocks[:, :1]
    totals = torch.zeros(len(block), int(block.max()) + 1).scatter_add(1, block, weight)
    num_blocks = (totals > 0).sum(dim=1).clamp(min=1)
    weight = weight / totals.gather(1, block).clamp(min=TAIL_WEIGHT) / num_blocks[:, None]
    return weight / len(block)
