"""Answers questions with a checkpoint in Hugging Face transformers, in this process.

This is the reference for a server's answers. It asks one question at a time. DiffusionGemma and
autoregressive models are generated from by transformers, models of masks by the plain loop of
``dllm/models/unmasking/reference.py``, LLaDA and Dream by one that is here.
"""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DiffusionGemmaForBlockDiffusion,
    GenerationConfig,
    LlamaForCausalLM,
    Qwen2ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

from bench.toys.served import Answer, Run
from bench.toys.suite import Question
from dllm.models import FAMILIES
from dllm.models.llada.shapes import released_name
from dllm.models.unmasking.reference import DecodingRule, generate_blocks, load_model
from dllm.models.unmasking.rule import DYNAMIC, STRATEGIES
from dllm.settings.command import CommandError

DIFFUSION = DiffusionGemmaForBlockDiffusion.__name__
# Architectures whose tokens all see each other; the backbone of each.
WHOLE_SEQUENCES = {"LLaDAModelLM": LlamaForCausalLM, "DreamModel": Qwen2ForCausalLM}
LLADA_BLOCK = 32  # tokens; an answer of Dream is one block


class Generated(NamedTuple):
    """The tokens behind a prompt, and what they took; an autoregressive model has no steps."""

    tokens: list[int]
    denoise_steps: int = 0
    blocks: int = 0


class Reference(ABC):
    """A checkpoint in transformers; ``stops`` are tokens that end an answer."""

    model: Any
    stops: Collection[int]
    is_diffusion = True

    def __init__(self, path: Path) -> None:
        disable_progress_bar()
        self.name = f"{path} in transformers"
        self.tokenizer = AutoTokenizer.from_pretrained(path)

    @abstractmethod
    def generate(self, ids: list[int], index: int) -> Generated:
        """Answer the prompt ``ids`` of question number ``index``."""

    def answer(
        self, questions: Sequence[Question], on_answer: Callable[[], object] = lambda: None
    ) -> Run:
        """``on_answer`` is called after each."""
        start = time.monotonic()
        answers, steps, blocks = [], 0, 0
        for index, question in enumerate(questions):
            found = self.generate(self._prompt_ids(question), index)
            answers.append(self._cut(question, found.tokens))
            steps += found.denoise_steps
            blocks += found.blocks
            on_answer()
        seconds = time.monotonic() - start
        return Run(answers, seconds, *((steps, blocks) if self.is_diffusion else ()))

    def _prompt_ids(self, question: Question) -> list[int]:
        chat = question.chat
        options = {} if chat is None else {"tools": chat.schemas or None} | chat.template_kwargs
        ids: list[int] = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": question.prompt}],
            add_generation_prompt=True,
            return_dict=False,
            **options,
        )
        return ids

    def _cut(self, question: Question, tokens: Sequence[int]) -> Answer:
        """The text in front of the first stop token, and the number of tokens up to it, included.

        Special tokens stay in the text if the question has a chat: its answers hold marks.
        """
        end = next((i for i, token in enumerate(tokens) if token in self.stops), len(tokens))
        text = self.tokenizer.decode(tokens[:end], skip_special_tokens=question.chat is None)
        return Answer(text, min(end + 1, len(tokens)))


def open_reference(
    path: Path,
    max_tokens: int,
    temperature: float | None = None,
    seed: int = 0,
) -> Reference:
    """The reference of a checkpoint; question i is answered with ``seed + i``.

    An answer's ``max_tokens`` are rounded up to whole blocks by a diffusion model. ``temperature``
    multiplies DiffusionGemma's schedule of temperatures; 0 makes an autoregressive model greedy;
    None uses generation_config.json. Raises CommandError: there is no checkpoint, its reference
    does not allow this temperature, or a server decodes it by another rule.
    """
    if not (path / "config.json").exists():
        raise CommandError(f"--reference {path}: no config.json; give a checkpoint's folder.")
    architecture = json.loads((path / "config.json").read_text())["architectures"][0]
    if architecture in WHOLE_SEQUENCES:
        return WholeReference(path, architecture, max_tokens, temperature)
    if architecture in FAMILIES and architecture != DIFFUSION:
        return MaskedReference(path, max_tokens, temperature)
    return GenerateReference(path, architecture, max_tokens, temperature, seed)


class StepCounter:
    """A streamer, which ``generate`` calls."""

    def __init__(self) -> None:
        self.denoise_steps, self.blocks = 0, -1

    def put(self, value: torch.Tensor) -> None:
        """The prompt, then every finished block."""
        self.blocks += 1

    def put_draft(self, value: torch.Tensor) -> None:
        """The argmax canvas after every denoise step."""
        self.denoise_steps += 1

    def end(self) -> None: ...


class GenerateReference(Reference):
    """A model that transformers' ``generate`` knows; arguments as of ``open_reference``."""

    def __init__(
        self, path: Path, architecture: str, max_tokens: int, temperature: float | None, seed: int
    ) -> None:
        super().__init__(path)
        self.is_diffusion, self.seed = architecture == DIFFUSION, seed
        kind = DiffusionGemmaForBlockDiffusion if self.is_diffusion else AutoModelForCausalLM
        self.model = kind.from_pretrained(path, dtype="auto").eval()
        self.options: dict[str, object] = {"max_new_tokens": max_tokens}
        if temperature is not None:
            self.options |= self._temperature(temperature)
        eos = self.model.generation_config.eos_token_id
        self.stops = eos if isinstance(eos, list) else [eos]

    def _temperature(self, temperature: float) -> dict[str, object]:
        if not self.is_diffusion:
            return {"do_sample": temperature > 0, "temperature": temperature or None}
        if temperature == 0:
            raise CommandError(
                "--temperature 0: the reference's diffusion sampler has no greedy mode; allowed: a "
                "number above 0, which multiplies its schedule of temperatures."
            )
        schedule: GenerationConfig = self.model.generation_config
        return {"t_min": schedule.t_min * temperature, "t_max": schedule.t_max * temperature}

    @torch.inference_mode()
    def generate(self, ids: list[int], index: int) -> Generated:
        torch.manual_seed(self.seed + index)
        counter = StepCounter()
        streamer = {"streamer": counter} if self.is_diffusion else {}
        output = self.model.generate(torch.tensor([ids]), **self.options, **streamer)
        sequences = output.sequences if self.is_diffusion else output
        return Generated(sequences[0, len(ids) :].tolist(), counter.denoise_steps, counter.blocks)


class MaskedReference(Reference):
    """A checkpoint of masked blocks, in fp32; arguments and errors as of ``open_reference``."""

    def __init__(self, path: Path, max_tokens: int, temperature: float | None) -> None:
        refuse_temperature(temperature)
        super().__init__(path)
        self.model, self.max_tokens = load_model(path), max_tokens
        self.rule = DecodingRule.of_checkpoint(path)
        self.stops = self.rule.stop_ids
        refuse_other_rules(path, self.rule.canvas_length or self.rule.block_size)

    def generate(self, ids: list[int], index: int) -> Generated:
        found = generate_blocks(self.model, [ids], self.rule, self.max_tokens)
        return Generated(found.answers[0], found.num_steps, found.num_blocks)


class WholeReference(Reference):
    """A LLaDA or a Dream, in fp32; arguments and errors as of ``open_reference``.

    Each pass computes prompt and masks. Sources: ``generate`` of ML-GSAI/LLaDA, in which a step
    decides the surest token of a block; ``diffusion_generate`` of Dream with ``alg`` "entropy", in
    which row i is for token i + 1, and a step decides as many as are expected of it. Both with as
    many steps as masks. An answer ends with the block that has a stop token.
    """

    def __init__(
        self, path: Path, architecture: str, max_tokens: int, temperature: float | None
    ) -> None:
        refuse_temperature(temperature)
        super().__init__(path)
        fields = json.loads((path / "config.json").read_text())
        config = FAMILIES[architecture].config_class()(**fields)
        self.model = WHOLE_SEQUENCES[architecture](config).float().eval()
        self.model.set_attn_implementation("eager")
        self.is_dream = architecture == "DreamModel"
        own = {name if self.is_dream else released_name(name): name
               for name in self.model.state_dict()}  # fmt: skip
        weights = load_file(path / "model.safetensors")
        self.model.load_state_dict({own[name]: each for name, each in weights.items()}, False)
        self.mask, self.length = config.mask_token_id, min(max_tokens, config.gen_length)
        self.block = self.length if self.is_dream else min(LLADA_BLOCK, self.length)
        stops = GenerationConfig.from_pretrained(path).eos_token_id
        self.stops = stops if isinstance(stops, list) else [stops]

    @torch.inference_mode()
    def generate(self, ids: list[int], index: int) -> Generated:
        canvas = torch.tensor([*ids, *[self.mask] * self.length])
        stops, blocks = torch.tensor(self.stops), 0
        for start in range(len(ids), len(canvas), self.block):
            block = canvas[start : start + self.block]
            for step in range(len(block)):
                self._decide(canvas, block, start, step)
            blocks += 1
            if torch.isin(block, stops).any():
                break
        answer = canvas[len(ids) : start + self.block].tolist()
        return Generated(answer, blocks * self.block, blocks)

    def _decide(self, canvas: torch.Tensor, block: torch.Tensor, start: int, step: int) -> None:
        """One step, which writes into ``block``, the part of ``canvas`` from ``start`` on."""
        places = (block == self.mask).nonzero()[:, 0]
        seen = torch.zeros(1, 1, len(canvas), len(canvas))
        logits = self.model(canvas[None], attention_mask=seen, use_cache=False).logits[0]
        logits = logits[start + places - int(self.is_dream)]
        logits[:, self.mask] = -torch.inf
        p = logits.softmax(dim=-1)
        count, sure = 1, p.amax(dim=-1)
        if self.is_dream:
            sure = -torch.special.entr(p).sum(dim=-1)
            times = torch.linspace(1, 1e-3, len(block) + 1)
            share = 1 - times[step + 1] / times[step]
            count = len(places) if step == len(block) - 1 else int(len(places) * share)
        taken = sure.topk(count).indices
        block[places[taken]] = p.argmax(dim=-1)[taken]


def refuse_temperature(temperature: float | None) -> None:
    """Raises CommandError."""
    if temperature:
        raise CommandError(
            f"--temperature {temperature}: the reference of this model takes the most probable "
            "tokens; allowed: 0, or leave it out."
        )


def refuse_other_rules(path: Path, block_size: int) -> None:
    """Raises CommandError for a field that a server obeys and the plain loop does not."""
    file = path / "generation_config.json"
    given = json.loads(file.read_text()) if file.exists() else {}
    dynamic = STRATEGIES[DYNAMIC]
    if (given.get("remasking_strategy") or dynamic) != dynamic:
        name, allowed = "remasking_strategy", dynamic
    elif (given.get("max_denoising_steps") or block_size) < block_size:
        name, allowed = "max_denoising_steps", f"at least {block_size}, the size of a block"
    else:
        return
    raise CommandError(
        f"--reference {path}: generation_config.json has {name} = {given[name]!r}, which the "
        f"reference of this model does not know; allowed: {allowed}."
    )
