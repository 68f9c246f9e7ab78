"""The denoise steps of an answer, computed in this process: what a server has to stream.

The forward pass is Hugging Face's, in fp32, and the denoise step is the server's.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion, DynamicCache

from dllm.engine.canvas_rows import CanvasRows
from dllm.models.gemma import rule
from dllm.models.gemma.settings import GemmaSettings
from dllm.models.gemma.step import denoise, first_canvases, next_step
from dllm.tools.watch_drawing import Frame


class Watched:
    """A checkpoint of a DiffusionGemma."""

    def __init__(self, path: Path) -> None:
        config, generation = (
            json.loads((path / name).read_text())
            for name in ("config.json", "generation_config.json")
        )
        self.model = DiffusionGemmaForBlockDiffusion.from_pretrained(path, dtype=torch.float32)
        self.model.eval()
        self.settings = GemmaSettings.from_mappings(config, generation)
        self.eos_ids = frozenset(generation["eos_token_id"])
        self.vocab_size = config["text_config"]["vocab_size"]
        self.tokenizer = AutoTokenizer.from_pretrained(path)

    def frames(self, question: str, max_blocks: int, seed: int) -> Iterator[Frame]:
        """Every step, up to the block with an end-of-sequence token or number ``max_blocks``."""
        chat = [{"role": "user", "content": question}]
        context = self.tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False
        )
        emitted: list[int] = []
        for block in range(max_blocks):
            for frame in self._block(context, tuple(emitted), block, seed):
                yield frame
            emitted += frame.argmax
            if self.eos_ids.intersection(frame.argmax):
                return

    @torch.inference_mode()
    def _block(
        self, prompt: list[int], emitted: tuple[int, ...], block: int, seed: int
    ) -> Iterator[Frame]:
        context = [*prompt, *emitted]
        starts = torch.tensor([len(context)])
        rows = CanvasRows.whole(starts, self.settings.canvas_length)
        canvases = first_canvases(
            torch.tensor([seed]), starts, self.settings, self.eos_ids, self.vocab_size
        )
        previous, converged = None, False
        while not converged:
            config = self.model.config.get_text_config(decoder=True)
            logits = self.model(
                input_ids=torch.tensor([context]),
                past_key_values=DynamicCache(config=config),
                decoder_input_ids=canvases.ids[None],
                self_conditioning_logits=previous,
            ).logits[0]
            step = denoise(logits, rows, canvases, self.settings)
            entropy = step.stats.entropy[None]
            accept = rule.accept_mask(entropy, rows.widths, self.settings.entropy_bound)
            converged = bool(step.converged)
            yield Frame(
                block=block,
                step=int(step.steps_done),
                emitted=emitted,
                argmax=tuple(step.stats.argmax.tolist()),
                entropy=tuple(entropy[0].tolist()),
                accepted=tuple(accept[0].tolist()),
                next_canvas=tuple(step.canvas[0].tolist()),
                is_final=converged,
            )
            canvases = next_step(canvases, step)
            previous = logits[None] / step.temperature[:, None]  # [1, C, V]
