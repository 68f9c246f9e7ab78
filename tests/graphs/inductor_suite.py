"""What Inductor makes of our functions for a GPU, in Triton's interpreter, beside the functions.

``test_inductor.py`` runs it in a process of its own.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config

from bench.toys.tiny import tiny_config, write_checkpoint
from dllm.engine.algorithm import DenoisingAlgorithm
from dllm.engine.compilation import maybe_compile, of_fixed_size
from dllm.engine.records import Records
from dllm.engine.state import CanvasState
from dllm.engine.step_rows import begin_rows, condition_rows, denoise_rows, store_rows
from dllm.engine.thoughts import Thought
from dllm.models.gemma.self_conditioning import SelfConditioning
from dllm.models.sdar.settings import SDARSettings
from dllm.models.unmasking.step import Unmasking
from dllm.ops import noise
from dllm.ops.filters import RowFilters
from dllm.settings.admission import admit
from dllm.settings.denoising import NO_TOKEN
from dllm.settings.thoughts import Marks
from tests.support import family_checkpoints, inductor_interpreter
from tests.support.denoise_cases import CONFIG, family, whole_canvases
from tests.support.engine_harness import RUN_TOLERANCE, get_engine, relative_error

WIDTH, VOCAB = 4, 64
REQUESTS, SLOTS, HIDDEN, PROMPT = 3, 5, 24, 7
# Two sums of VOCAB positive numbers of fp32 in other orders differ by as much at most (Higham,
# Accuracy and Stability of Numerical Algorithms, 4.2); all else of a step rounds less.
ROUNDING = 2 * VOCAB * 2.0**-24
COMPILED: Any = SimpleNamespace(
    compilation_config=SimpleNamespace(mode=CompilationMode.VLLM_COMPILE)
)
SAMPLED = {"temperature": 0.8}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": SAMPLED,
    "filtered": SAMPLED | {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "thoughts": SAMPLED | {"thinking_token_budget": 3},
}


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> None:
    inductor_interpreter.install()


def test_noise_is_the_same_to_the_bit():
    """Seeds and positions of any size: of step noise, and of first canvases."""
    seeds = torch.tensor([5, -7, 2**62 + 12345, 3])
    starts, steps = torch.tensor([0, 64, 4096, 77]), torch.tensor([0, 3, 47, 1])

    def drawn(seeds: torch.Tensor, starts: torch.Tensor, steps: torch.Tensor) -> list[torch.Tensor]:
        of_step = noise.step_noise(seeds, starts, steps, WIDTH, VOCAB)
        first = noise.initial_canvas(seeds, starts, WIDTH, VOCAB)
        return [of_step.keys, of_step.renoise_tokens, first]

    compiled = torch.compile(drawn, dynamic=True)
    for found, expected in zip(
        compiled(seeds, starts, steps), drawn(seeds, starts, steps), strict=True
    ):
        assert torch.equal(found, expected)


def entropy_bound() -> DenoisingAlgorithm:
    """DiffusionGemma's."""
    made = family(replace(CONFIG, canvas_length=WIDTH), VOCAB, HIDDEN)
    as_compiled = CompilationConfig(custom_ops=["none"])
    with set_current_vllm_config(VllmConfig(compilation_config=as_compiled)):
        made.self_conditioning = SelfConditioning(HIDDEN, 2 * HIDDEN, 1e-6)
    return made


def unmasking() -> DenoisingAlgorithm:
    """SDAR's."""
    return Unmasking(SDARSettings(VOCAB, WIDTH, VOCAB - 1, WIDTH, 0.5, "low_confidence_dynamic", 1))


class Steps:
    """The functions of a denoise step, compiled or not, and the state of their canvases."""

    def __init__(self, algorithm: DenoisingAlgorithm, is_compiled: bool) -> None:
        def of(function: Any) -> Any:
            return maybe_compile(function, COMPILED) if is_compiled else function

        self.algorithm = algorithm
        state = CanvasState.allocate(algorithm, SLOTS, VOCAB, torch.float32, torch.device("cpu"))
        self.state, self.records = state, Records(state)
        self.begin, self.condition = of(begin_rows), of(condition_rows)
        self.denoise, self.store = of(denoise_rows), of(store_rows)

    def taken(self, asked: dict[str, Any], cap: float | None, num_steps: int = 2) -> Iterator[Any]:
        """All that canvases behind a prompt, and steps of them, compute and store."""
        state, algorithm = self.state, self.algorithm
        random = torch.Generator().manual_seed(4)
        options = admit(SamplingParams(**asked), algorithm.settings, VOCAB)
        budget = asked.get("thinking_token_budget")
        thought = None if budget is None else Thought(budget, Marks(7, 8), PROMPT)
        for slot in range(REQUESTS):
            self.records.reset(slot, options, seed=slot, prompt_len=PROMPT, thought=thought)
        self.records.send()
        rows = whole_canvases(torch.full((REQUESTS,), PROMPT), WIDTH)
        state.looks_for_ends(rows.slots.numpy())
        self.begin(rows.slots, rows.starts, state, algorithm)
        yield state.canvas.clone()
        num_rows = len(rows.place)
        which = torch.arange(num_rows)
        filters = None
        if "top_k" in asked:
            numbers = RowFilters(
                *(torch.full((num_rows,), asked[one]) for one in RowFilters._fields)
            )
            filters = numbers._replace(top_k=numbers.top_k.int())
        nothing = torch.full((num_rows,), NO_TOKEN)
        for _ in range(num_steps):
            embeds = torch.randn(num_rows + 4, HIDDEN, generator=random)
            is_canvas_row = torch.zeros(num_rows + 4, dtype=torch.bool)
            at = rows.slots[rows.request_of], rows.place
            self.condition(which, *at, embeds, is_canvas_row, state, algorithm)
            yield embeds, is_canvas_row
            logits = torch.randn(num_rows, VOCAB, generator=random) * 3
            logits[:, VOCAB - 1] = -torch.inf  # a mask is never an answer
            ids = state.canvas[at]
            denoised = self.denoise(
                of_fixed_size(logits, 1), ids, nothing, rows, state, algorithm, filters, cap
            )
            yield denoised
            emitted = denoised.converged * rows.widths
            lengths = rows.seq_lens.clone()
            yield self.store(emitted, denoised, rows, state, algorithm, lengths, True, False)
            if state.soft_embeds.shape[-1]:
                state.soft_embeds[at] = torch.randn(num_rows, HIDDEN, generator=random)
            columns = state.canvas, state.argmax_canvas, state.steps_done, *state.thought.values()
            yield [column.clone() for column in columns]


@pytest.fixture(scope="module", params=[entropy_bound, unmasking])
def pair(request: pytest.FixtureRequest) -> list[Steps]:
    """Compiled and not; what is compiled serves all ways."""
    torch.manual_seed(0)
    algorithm = request.param()
    return [Steps(algorithm, is_compiled) for is_compiled in (True, False)]


@pytest.mark.parametrize("way", WAYS)
@torch.inference_mode()
def test_steps_are_the_same(way, pair):
    """Tokens and decisions are equal; other numbers, up to rounding.

    DiffusionGemma's logits are capped in the step, unless something else is done to them before.
    """
    cap = None if way == "thoughts" else 2.0
    compiled, plain = (steps.taken(WAYS[way], cap) for steps in pair)
    for found, expected in zip(compiled, plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=ROUNDING, atol=ROUNDING)


def gemma(path: Path) -> Path:
    layers = ["sliding_attention", "full_attention"]
    write_checkpoint(path, tiny_config(dtype="float32", canvas_length=12, layer_types=layers), 3)
    return path


def sdar(path: Path) -> Path:
    return family_checkpoints.write(path, family_checkpoints.FAMILIES["sdar"])


@pytest.mark.parametrize("write", [gemma, sdar])
def test_backbones_are_the_same(write, tmp_path, monkeypatch):
    """Each pass of a server, prompts among them, once more with compiled code.

    As vLLM compiles them: with functions of PyTorch alone in the place of its kernels.
    Attention is one operation, the same in both.
    """
    engine = get_engine(
        write(tmp_path / "model"),
        max_model_len=64,
        compilation_config={"custom_ops": ["none"]},
    )
    backbone = engine.runner.model.model
    forward, errors = backbone.forward, []
    compiled = torch.compile(forward, dynamic=True, fullgraph=True)

    def both(*args: Any, **given: Any) -> torch.Tensor:
        expected: torch.Tensor = forward(*args, **given)
        errors.append(relative_error(compiled(*args, **given), expected))
        return expected

    monkeypatch.setattr(backbone, "forward", both)
    engine.generate([[5, 6, 7], [8] * 9], [SamplingParams(max_tokens=24, seed=1)] * 2)
    assert len(errors) > 2 and max(errors) < RUN_TOLERANCE
