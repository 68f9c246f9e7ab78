"""Answers questions with a checkpoint in Hugging Face transformers, in this process.

This is the reference for a server's answers. It asks one question at a time. The denoise steps of a
diffusion model are counted by a streamer, an object that ``generate`` calls after every step and
every block.
"""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DiffusionGemmaForBlockDiffusion,
    GenerationConfig,
)
from transformers.utils.logging import disable_progress_bar

from dllm.models.unmasking.reference import LOADERS
from dllm.settings.command import CommandError
from dllm.tasks.suite import Question
from dllm.tools.eval_masked import MaskedReference, cut_answer, prompt_ids
from dllm.tools.eval_report import Answer, Run

DIFFUSION = DiffusionGemmaForBlockDiffusion.__name__


class StepCounter:
    """A streamer for ``generate`` that counts denoise steps and blocks."""

    def __init__(self) -> None:
        self.denoise_steps = 0
        self.blocks = -1  # the first call of `put` is for the prompt

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt, then with every finished block."""
        self.blocks += 1

    def put_draft(self, value: torch.Tensor) -> None:
        """Called with the argmax canvas after every denoise step."""
        self.denoise_steps += 1

    def end(self) -> None:
        """Called at the end; does nothing."""


def open_reference(
    path: Path, max_tokens: int, temperature: float | None, seed: int
) -> "ReferenceModel | MaskedReference":
    """The reference of a checkpoint; the arguments are those of the classes.

    Raises:
        CommandError: there is no checkpoint, or its reference does not allow this temperature.
    """
    if not (path / "config.json").exists():
        raise CommandError(f"--reference {path}: no config.json; give a checkpoint's folder.")
    if _architecture(path) in LOADERS:
        return MaskedReference(path, max_tokens, temperature)
    return ReferenceModel(path, max_tokens, temperature, seed)


def _architecture(path: Path) -> str:
    name: str = json.loads((path / "config.json").read_text())["architectures"][0]
    return name


class ReferenceModel:
    """A checkpoint in transformers; its config.json says whether diffusion or autoregressive.

    Args:
        path: the checkpoint's folder.
        max_tokens: of an answer; a diffusion model rounds it up to whole blocks.
        temperature: multiplies a diffusion model's schedule of temperatures; 0 makes an
            autoregressive model greedy; None uses generation_config.json.
        seed: question i is answered with ``seed + i``.

    Raises:
        CommandError: the reference does not allow this temperature.
    """

    def __init__(
        self, path: Path, max_tokens: int, temperature: float | None = None, seed: int = 0
    ) -> None:
        architecture = _architecture(path)
        self.name = f"{path} in transformers"
        self.is_diffusion = architecture == DIFFUSION
        kind = DiffusionGemmaForBlockDiffusion if self.is_diffusion else AutoModelForCausalLM
        disable_progress_bar()
        self.model = kind.from_pretrained(path, dtype="auto").eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.seed = seed
        self.options: dict[str, object] = {"max_new_tokens": max_tokens}
        if temperature is not None:
            self.options |= self._temperature(temperature)
        self.eos_ids = _as_list(self.model.generation_config.eos_token_id)

    def _temperature(self, temperature: float) -> dict[str, object]:
        """The arguments of ``generate`` for a request's temperature."""
        if not self.is_diffusion:
            return {"do_sample": temperature > 0, "temperature": temperature or None}
        if temperature == 0:
            raise CommandError(
                "--temperature 0: the reference's diffusion sampler has no greedy mode; allowed: a "
                "number above 0, which multiplies its schedule of temperatures."
            )
        schedule: GenerationConfig = self.model.generation_config
        return {"t_min": schedule.t_min * temperature, "t_max": schedule.t_max * temperature}

    def answer(self, questions: Sequence[Question], on_answer: Callable[[], None]) -> Run:
        """Generate an answer to each question; ``on_answer`` is called after each."""
        start = time.monotonic()
        counter = StepCounter()
        answers, blocks = [], 0
        for index, question in enumerate(questions):
            torch.manual_seed(self.seed + index)
            counter.blocks = -1
            answers.append(self._generate(question, counter))
            blocks += counter.blocks
            on_answer()
        seconds = time.monotonic() - start
        if not self.is_diffusion:
            return Run(answers, seconds)
        return Run(answers, seconds, counter.denoise_steps, blocks)

    def _generate(self, question: Question, counter: StepCounter) -> Answer:
        ids = torch.tensor([prompt_ids(self.tokenizer, question)])
        streamer = {"streamer": counter} if self.is_diffusion else {}
        with torch.inference_mode():
            output = self.model.generate(ids, **self.options, **streamer)
        sequences = output.sequences if self.is_diffusion else output
        tokens = sequences[0, ids.shape[1] :].tolist()
        return cut_answer(self.tokenizer, question, tokens, self.eos_ids)


def _as_list(value: int | list[int] | None) -> list[int]:
    return value if isinstance(value, list) else [] if value is None else [value]
