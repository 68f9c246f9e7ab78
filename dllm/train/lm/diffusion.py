"""The objective of a block-diffusion model, on Hugging Face's own DiffusionGemma.

A question and its answer are encoded once, causally. A block of the answer becomes a canvas: each
of its tokens is replaced by a uniform random one with probability t. The decoder sees the canvas
behind everything that precedes the block. The loss is the cross-entropy of the clean block; every
block has the same weight, even if little of it is answer.

Training shows the model what generation will show it:
- many canvases are all random (t = 1), as at the start of generation;
- some, if the settings say so, are random where the answer is and end behind it, as a typed
  decision reads them;
- some get self-conditioning: the temperature-scaled logits of an earlier denoise step;
- some of these have also been changed by a sampler step.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache
from transformers.models.diffusion_gemma import (
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
)

from dllm.engine.canvas_rows import CanvasRows
from dllm.models.gemma.settings import GemmaSettings
from dllm.models.gemma.step import denoise, first_canvases, next_step
from dllm.models.gemma.tiny import generation_config, tiny_config
from dllm.tasks.suite import Question
from dllm.train.lm.learner import Answers, LanguageLearner
from dllm.train.lm.objective import (
    EOS,
    PURE_NOISE,
    Encoded,
    answer_loss,
    answer_mask,
    pad_right,
    padded_vocab_size,
    tail_weights,
)
from dllm.train.lm.settings import ModelShape, TrainSettings

SELF_CONDITIONED = 0.5  # share of canvases with an earlier denoise step
RESAMPLED = 0.5  # of these, the share whose canvas is the outcome of a sampler step
TEMPERATURES = (0.2, 0.5)  # range of the temperature of the earlier step
READ_POSITIONS = 4  # at most two behind the answer; none for a half
SAMPLER = {"_cls_name": "EntropyBoundSamplerConfig"}
# Settings of generation in validation, chosen on the validation split. Temperatures are lower than
# in training: with those of training, a question that has many right answers takes 40 steps until
# the canvas is stable. The confidence threshold is low because it applies to the mean entropy over
# the canvas: at 0.05 nats over 32 positions, two tokens can still be undecided.
GENERATION: dict[str, object] = {
    "max_denoising_steps": 48,
    "t_min": 0.1,
    "t_max": 0.3,
    "confidence_threshold": 0.01,
    "sampler_config": SAMPLER | {"entropy_bound": 0.3},  # nats
}
# The checkpoint is served with these values instead: the trained model then needs a third of the
# steps on questions with many right answers, is right as often, and varies nearly as much.
SERVED: dict[str, object] = {"t_max": 0.2, "sampler_config": SAMPLER | {"entropy_bound": 1.0}}
MAX_BLOCKS = 4  # of an answer, in validation


class Canvases(NamedTuple):
    """Noised blocks of a batch of encoded sequences: N canvases of C tokens.

    Attributes:
        sequence: ``[N]`` int64, the sequence that a canvas belongs to.
        start: ``[N]`` int64, position of its first token.
        clean, noised: ``[N, C]`` int64.
    """

    sequence: Tensor
    start: Tensor
    clean: Tensor
    noised: Tensor


class Diffusion(LanguageLearner):
    """The block-diffusion objective (see the module)."""

    description = (
        "a block-diffusion language model in DiffusionGemma's format (sliding and full layers, "
        "mixture of experts, self-conditioning, tied embeddings)"
    )
    starts_from = ("DiffusionGemmaForBlockDiffusion",)

    def __init__(self, settings: TrainSettings) -> None:
        super().__init__(settings)
        self.vocab_size = padded_vocab_size(self.tokenizer)
        self.canvas_length = settings.model.canvas_length
        self.sampling = GemmaSettings.from_mappings(self.config(), generation_config() | GENERATION)

    def config(self) -> dict[str, object]:
        """config.json: every third layer and the last one are full, the others are sliding."""
        shape = self.settings.model
        is_full = [(index + 1) % 3 == 0 for index in range(shape.num_layers)]
        is_full[-1] = True
        return tiny_config(
            vocab_size=self.vocab_size,
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.hidden_size // 32,
            num_key_value_heads=max(1, shape.hidden_size // 64),
            layer_types=["full_attention" if full else "sliding_attention" for full in is_full],
            intermediate_size=shape.intermediate_size,
            num_experts=shape.num_experts,
            moe_intermediate_size=shape.moe_intermediate_size,
            sliding_window=shape.sliding_window,
            canvas_length=shape.canvas_length,
        )

    def generation_config(self) -> dict[str, object]:
        """generation_config.json."""
        return generation_config() | GENERATION | SERVED

    def build_model(self) -> DiffusionGemmaForBlockDiffusion:
        """A new model in fp32; its vision tower is never used here and is not trained."""
        config = DiffusionGemmaConfig(**(self.config() | {"dtype": "float32"}))
        model = self.new(DiffusionGemmaForBlockDiffusion, config)
        model.set_experts_implementation("grouped_mm")
        model.model.encoder.vision_tower.requires_grad_(False)
        model.model.encoder.embed_vision.requires_grad_(False)
        return model

    def loss_of(
        self,
        model: DiffusionGemmaForBlockDiffusion,
        questions: Sequence[Question],
        random: torch.Generator,
    ) -> Tensor:
        """Loss of the canvases, plus ``prefix_loss`` times the next-token loss of the answers."""
        encoded = Encoded.of(self.tokenizer, questions)
        canvases = self._draw_canvases(encoded, random)
        ids = pad_right(encoded.sequences)
        cache = DynamicCache()  # one built from the config would crop sliding layers
        hidden = model.model.encoder(input_ids=ids, past_key_values=cache).last_hidden_state
        cache.batch_select_indices(canvases.sequence)
        canvas, prev_logits, is_conditioned = self._look_back(model, cache, canvases, random)
        logits = self._decode(model, cache, canvases.start, canvas, prev_logits, is_conditioned)
        is_answer = answer_mask(encoded, ids.shape[1])
        prefix_logits = soft_capped(model, hidden[:, :-1][is_answer[:, 1:]])
        prefix_loss = answer_loss(prefix_logits, ids, is_answer)
        return canvas_loss(logits, canvases.clean) + self.settings.prefix_loss * prefix_loss

    def _draw_canvases(self, encoded: Encoded, random: torch.Generator) -> Canvases:
        """Draw ``canvases`` blocks of every answer, each with its own share of noise."""
        length, per_question = self.canvas_length, self.settings.canvases
        num_canvases = len(encoded.answers) * per_question
        sequence = torch.arange(num_canvases) // per_question
        num_blocks = torch.tensor([-(-len(answer) // length) for answer in encoded.answers])
        uniform = torch.rand(3, num_canvases, generator=random)
        block = (uniform[0] * num_blocks[sequence]).long()
        clean = torch.full((num_canvases, length), EOS)
        for row, (owner, index) in enumerate(zip(sequence.tolist(), block.tolist(), strict=True)):
            tokens = encoded.answers[owner][index * length : (index + 1) * length]
            clean[row, : len(tokens)] = torch.tensor(tokens)
        level = torch.where(uniform[1] < PURE_NOISE, 1.0, uniform[2])
        is_noise = torch.rand(clean.shape, generator=random) < level[:, None]
        if self.settings.read_shaped:
            is_noise = self._read_some(clean, is_noise, random)
        prompt_len = torch.tensor([len(prompt) for prompt in encoded.prompts])
        return Canvases(
            sequence,
            prompt_len[sequence] + block * length,
            clean,
            torch.where(
                is_noise, torch.randint(self.vocab_size, clean.shape, generator=random), clean
            ),
        )

    def _read_some(self, clean: Tensor, is_noise: Tensor, random: torch.Generator) -> Tensor:
        """Make a share of the canvases as a typed decision reads them: ``[N, C]`` bool."""
        num_canvases, length = clean.shape
        # A text is read with its end, and with the positions of the longest option. A label is not.
        more = torch.randint(READ_POSITIONS, (num_canvases, 1), generator=random)
        num_read = (clean != EOS).sum(1, keepdim=True).clamp(min=1) + (more - 1).clamp(min=0)
        is_read = torch.rand(num_canvases, 1, generator=random) < self.settings.read_shaped
        return torch.where(is_read, torch.arange(length) < num_read, is_noise)

    @torch.no_grad()
    def _look_back(
        self,
        model: DiffusionGemmaForBlockDiffusion,
        cache: DynamicCache,
        canvases: Canvases,
        random: torch.Generator,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run an earlier denoise step on some canvases, to train on its outcome.

        The share of these canvases is fixed, so that every training step costs the same.

        Returns:
            canvas ``[N, C]``, after a sampler step for some of them; prev_logits ``[N, C, V]``,
            the temperature-scaled logits of the earlier step; is_conditioned ``[N]`` bool, which
            canvases had one.
        """
        num_canvases = len(canvases.start)
        order = torch.randperm(num_canvases, generator=random)
        chosen = order[: round(num_canvases * SELF_CONDITIONED)]
        is_conditioned = torch.zeros(num_canvases, dtype=torch.bool)
        is_conditioned[chosen] = True
        prev_logits = torch.zeros(*canvases.clean.shape, self.vocab_size)
        if not len(chosen):
            return canvases.noised, prev_logits, is_conditioned
        earlier = _detached_rows(cache, chosen)
        logits = self._decode(model, earlier, canvases.start[chosen], canvases.noised[chosen])
        low, high = TEMPERATURES
        temperature = low + (high - low) * torch.rand(len(chosen), generator=random)
        logits = logits / temperature[:, None, None]
        prev_logits[chosen] = logits
        canvas = canvases.noised.clone()
        resampled = chosen[: round(len(chosen) * RESAMPLED)]
        canvas[resampled] = _sampler_step(logits[: len(resampled)], self.sampling, random)
        return canvas, prev_logits, is_conditioned

    def _decode(
        self,
        model: DiffusionGemmaForBlockDiffusion,
        cache: DynamicCache,
        start: Tensor,
        canvas: Tensor,
        prev_logits: Tensor | None = None,
        is_conditioned: Tensor | None = None,
    ) -> Tensor:
        """Logits of canvases behind the first ``start`` tokens of their sequences.

        Args:
            cache: the encoder's, one row for each canvas; positions from ``start`` on are masked.
            start: ``[N]``; canvas: ``[N, C]``.
            prev_logits, is_conditioned: as ``_look_back`` returns them.

        Returns:
            ``[N, C, V]`` fp32, soft-capped.
        """
        hidden = model.model.decoder(
            decoder_input_ids=canvas,
            past_key_values=cache,
            self_conditioning_logits=prev_logits,
            self_conditioning_mask=is_conditioned,
            decoder_attention_mask=canvas_masks(start, cache.get_seq_length(), self.settings.model),
            decoder_position_ids=start[:, None] + torch.arange(self.canvas_length),
        ).last_hidden_state
        return soft_capped(model, hidden)

    @torch.no_grad()
    def answer(
        self, model: DiffusionGemmaForBlockDiffusion, questions: Sequence[Question], seed: int
    ) -> Answers:
        """Generate like a server: block after block, until every answer has ended."""
        prompt_ids = Encoded.of(self.tokenizer, questions).prompts
        outputs: list[list[int]] = [[] for _ in questions]
        steps: list[int] = []
        for _ in range(MAX_BLOCKS):
            open_rows = [row for row, output in enumerate(outputs) if EOS not in output]
            if not open_rows:
                break
            context = [prompt_ids[row] + outputs[row] for row in open_rows]
            blocks, block_steps = self._generate_block(model, context, seed)
            steps += block_steps.tolist()
            for row, block in zip(open_rows, blocks.tolist(), strict=True):
                outputs[row] += block
        return Answers(self.texts(outputs, questions), sum(steps) / len(steps))

    def _generate_block(
        self, model: DiffusionGemmaForBlockDiffusion, context: list[list[int]], seed: int
    ) -> tuple[Tensor, Tensor]:
        """The next block of every context: tokens ``[B, C]`` and denoise steps ``[B]``."""
        num_rows, length = len(context), self.canvas_length
        cache = DynamicCache()
        model.model.encoder(input_ids=pad_right(context), past_key_values=cache)
        start = torch.tensor([len(ids) for ids in context])
        seeds = torch.full((num_rows,), seed) + torch.arange(num_rows)
        rows = CanvasRows.whole(start, length)
        canvases = first_canvases(seeds, start, self.sampling, [EOS], self.vocab_size)
        prev_logits = None
        while bool((rows.widths > 0).any()):
            canvas = canvases.ids.view(num_rows, length)
            logits = self._decode(model, cache, start, canvas, prev_logits)
            step = denoise(logits.flatten(0, 1), rows, canvases, self.sampling)
            widths = torch.where(step.converged, 0, rows.widths)
            # A row keeps its start when it has no canvas any more.
            rows = rows._replace(widths=widths, seq_lens=start + widths)
            canvases = next_step(canvases, step)
            prev_logits = logits / step.temperature.view(num_rows, length, 1)
        return canvases.argmax_canvas, canvases.steps_done


def canvas_loss(logits: Tensor, clean: Tensor) -> Tensor:
    """Cross-entropy in nats: the weighted mean over each canvas, then the mean over canvases.

    Args:
        logits: ``[N, C, V]``; clean: ``[N, C]``.
    """
    weight = tail_weights(clean)
    losses = F.cross_entropy(logits.flatten(0, 1), clean.flatten(), reduction="none")
    return ((losses.view_as(weight) * weight).sum(dim=1) / weight.sum(dim=1)).mean()


def canvas_masks(start: Tensor, num_keys: int, shape: ModelShape) -> dict[str, Tensor]:
    """Attention masks of canvases, ``[N, 1, C, num_keys + C]`` by layer type, added to the scores.

    A canvas sees itself and the cached positions before ``start``; on sliding layers only the last
    window - 1 of these (the anchored window of ``attention.masks``, as in Hugging Face's model).
    """
    key = torch.arange(num_keys)
    before = key < start[:, None]
    near = before & (key > start[:, None] - shape.sliding_window)
    canvas = torch.ones(len(start), shape.canvas_length, dtype=torch.bool)

    def rows(cached: Tensor) -> Tensor:
        keys = torch.cat((cached, canvas), dim=1)
        hidden = torch.where(keys, 0.0, torch.finfo(torch.float32).min)
        return hidden[:, None, None].expand(-1, 1, shape.canvas_length, -1)

    return {"full_attention": rows(before), "sliding_attention": rows(near)}


def soft_capped(model: DiffusionGemmaForBlockDiffusion, hidden: Tensor) -> Tensor:
    """Logits ``[..., V]`` in fp32, as in the ``forward`` of Hugging Face's model."""
    cap = model.final_logit_softcapping
    return torch.tanh(model.lm_head(hidden).float() / cap) * cap


def _sampler_step(logits: Tensor, settings: GemmaSettings, random: torch.Generator) -> Tensor:
    """A canvas after a denoise step at temperature 1: ``[N, C, V]`` logits to ``[N, C]``."""
    num_rows, vocab_size = len(logits), logits.shape[-1]
    starts = torch.zeros(num_rows, dtype=torch.int64)
    seeds = torch.randint(2**62, (num_rows,), generator=random)
    unscaled = replace(settings, t_min=1.0, t_max=1.0)
    canvases = first_canvases(seeds, starts, unscaled, (), vocab_size)
    rows = CanvasRows.whole(starts, settings.canvas_length)
    return denoise(logits.flatten(0, 1), rows, canvases, unscaled).canvas


def _detached_rows(cache: DynamicCache, rows: Tensor) -> DynamicCache:
    """Some rows of a cache, detached from the graph."""
    copy = DynamicCache()
    for index, layer in enumerate(cache.layers):
        copy.update(layer.keys[rows].detach(), layer.values[rows].detach(), index)
    return copy
