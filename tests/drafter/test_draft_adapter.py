"""An adapter of the drafting rows: its drafts by the reference, and the text of plain decoding."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dllm.drafter.adapter import adapter_folder, read_adapter
from dllm.drafter.scheduler import AsyncDraftingScheduler
from dllm.drafter.widths.policy import FixedWidth
from dllm.models.unmasking.reference import load_model
from tests.drafter.test_draft_sources import chosen_ahead, widths_of
from tests.drafter.test_self_speculation import (
    CANVAS,
    LIMITS,
    NUM_DRAFTS,
    PROMPTS,
    SAMPLED,
    served_alike,
)
from tests.support.adapters import ADAPTER, RANK, changed, projections, rows_changed, write_adapter
from tests.support.drafter_harness import (
    RandomWidth,
    assert_close,
    greedy,
    make_policy,
    plain_engine,
    prompt,
    watch_drafts,
)
from tests.support.edited import Edit, edited
from tests.support.engine_harness import Engine, get_engine
from tests.support.family_checkpoints import MASK
from tests.support.forced_async import asynchronous_platform
from tests.support.masked_pass import logits_of
from tests.support.recorded_calls import record_calls

NOISE_END, NUM_NOISE = 300, 5  # ids of noise; drafts of the model that drafts with it


@pytest.fixture(scope="module")
def path(family: Callable[[str], Path]) -> Path:
    return family("nemotron")


@pytest.fixture(scope="module")
def folder(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapter"), projections(path))


def self_drafting(path: Path, adapter: Path | str, **more: Any) -> Engine:
    options = {"decoding": "self_speculation", "drafter": {"adapter": str(adapter)}}
    return get_engine(path, additional_config={"dllm": options}, **(LIMITS | more))


def noise_drafting(path: Path, adapter: Path | str, **more: Any) -> Engine:
    speculative = {
        "method": "uno",
        "uno_lora_path": str(adapter),
        "uno_mask_token_id": NOISE_END,
        "num_speculative_tokens": NUM_NOISE,
    }
    return get_engine(path, speculative_config=speculative, **(LIMITS | more))


def test_a_canvas_is_drafted_with_the_adapter(path: Path, folder: Path) -> None:
    model, engine = load_model(path), self_drafting(path, folder)
    with watch_drafts(engine) as seen:
        engine.generate(PROMPTS[1:4], greedy(40))
    assert len(seen) > 50
    for draft in seen[::9]:
        start = len(draft.tokens) - 1
        ids = [*draft.tokens, *[MASK] * NUM_DRAFTS]
        with changed(model, folder, rows_changed(start + CANVAS, start)):
            expected = logits_of(model, ids, start)[start + 1 :]
        expected[:, MASK] = -torch.inf
        assert_close(draft.logits, expected)


def test_noise_is_drafted_with_the_adapter_and_the_last_token_without(
    random_target: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path, projections(random_target))
    engine = noise_drafting(random_target, adapter)
    model = AutoModelForCausalLM.from_pretrained(random_target, dtype=torch.float32)
    with watch_drafts(engine) as seen:
        engine.generate([prompt(30), prompt(90, salt=5)], greedy(40))
    noise = engine.runner.speculator._noise
    assert int(noise.min()) >= 1 and int(noise.max()) < NOISE_END
    for draft in seen[::5]:
        length = len(draft.tokens)
        ids = [*draft.tokens, *noise[length : length + NUM_NOISE - 1].tolist()]
        with changed(model, adapter, rows_changed(len(ids), length)), torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0, length - 1 :]
        assert_close(draft.logits, expected)
        own = model(torch.tensor([draft.tokens])).logits[0, -1].argmax()
        assert draft.drafts[0] == int(own)


TINY = Path(__file__).parents[2] / "checkpoints"
PLAIN = {"masks": "tiny-nemotron", "noise": "tiny-ar"}


def questions(checkpoint: Path) -> list[list[int]]:
    """Prompts that a bundled model knows how to answer, and others."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    asked = [[{"role": "user", "content": f"What is {n} + 90?"}] for n in (96, 17, 48)]
    known = [tokenizer.apply_chat_template(one, add_generation_prompt=True) for one in asked]
    return [*(one if isinstance(one, list) else one["input_ids"] for one in known), *PROMPTS[3:]]


@pytest.fixture(scope="module", params=["masks", "noise"])
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Engine, Path]:
    """A model token by token, and drafting for itself with little memory for its cache."""
    base = TINY / PLAIN[request.param]
    folder = tmp_path_factory.mktemp("small")
    adapter = write_adapter(folder, projections(base), scale=0.01)
    serve = self_drafting if request.param == "masks" else noise_drafting
    return _plain(request.param), serve(base, adapter, num_gpu_blocks_override=14), base


def _plain(kind: str) -> Engine:
    base, token_by_token = TINY / PLAIN[kind], {"dllm": {"decoding": "ar"}}
    if kind == "noise":
        return plain_engine(base, **LIMITS)
    return get_engine(base, additional_config=token_by_token, **LIMITS)


@pytest.mark.parametrize("kind", ["fixed", "adaptive", "random"])
def test_the_text_is_the_one_without_drafts(pair, kind: str) -> None:
    """Greedy and seeded, with grammars, prompts in chunks."""
    plain, drafting, base = pair
    width = str(drafting.runner.speculator.num_speculative_steps) if kind == "fixed" else kind
    served_alike(plain, drafting, questions(base), width)
    assert not drafting.runner.speculator._adapter.rows.any()


@pytest.mark.parametrize("kind", PLAIN)
def test_steps_are_scheduled_ahead(kind: str, tmp_path: Path, monkeypatch) -> None:
    """Widths are chosen with the schedule: random ones, all drafts, and what promises most."""
    base, serve = TINY / PLAIN[kind], self_drafting if kind == "masks" else noise_drafting
    adapter = write_adapter(tmp_path, projections(base), scale=0.01)
    with asynchronous_platform():
        engine = serve(base, adapter, num_gpu_blocks_override=14, async_scheduling=True)
    assert type(engine.scheduler) is AsyncDraftingScheduler
    given, most = questions(base), engine.runner.speculator.num_speculative_steps
    expected = _plain(kind).generate(given, SAMPLED)
    preempted = record_calls(monkeypatch, engine.scheduler, "_preempt_request")
    adaptive = make_policy("adaptive", engine)
    adaptive.reads_confidence = False
    for policy in (RandomWidth(most, reads_confidence=False), FixedWidth(most), adaptive):
        with chosen_ahead(engine, policy) as steps:
            assert engine.generate(given, SAMPLED) == expected
        widths = widths_of(steps)
        if policy is not adaptive:
            is_fixed = isinstance(policy, FixedWidth)
            assert widths <= {0, most} if is_fixed else len(widths) > most // 2
    assert preempted, "the cache was large enough for everybody"


def part(layer: int, matrix: str, kind: str = "self_attn.o_proj") -> str:
    return f"base_model.model.encoder.layers.{layer}.{kind}.lora_{matrix}.weight"


BAD: dict[str, tuple[Edit, str]] = {
    "another rank": (
        lambda all: all.update(
            {part(1, "A"): torch.zeros(2, 128), part(1, "B"): torch.ones(64, 2)}
        ),
        "model.layers.1.self_attn.o_proj are",
    ),
    "another model": (
        lambda all: all.update({part(0, "B"): torch.ones(32, RANK)}),
        "model.layers.0.self_attn.o_proj are",
    ),
    "more layers": (
        lambda all: all.update(
            {part(3, "A"): all[part(0, "A")] + 1, part(3, "B"): all[part(0, "B")] + 1}
        ),
        "model.layers.3.self_attn.o_proj",
    ),
    "fewer layers": (
        lambda all: [all.pop(part(2, matrix)) for matrix in "AB"],
        "leaves out model.layers.2.self_attn.o_proj",
    ),
    "half a layer": (lambda all: all.pop(part(2, "B")), "lora_A or lora_B alone"),
    "no number": (lambda all: all[part(0, "A")].fill_(torch.nan), "NaN"),
}


@pytest.mark.parametrize("kind", BAD)
def test_an_adapter_that_does_not_fit_is_refused_by_name(path, folder, tmp_path, kind) -> None:
    change, message = BAD[kind]
    model, bad = self_drafting(path, folder).runner.model, tmp_path / "bad"
    edited(folder, bad, change, ADAPTER)
    with pytest.raises(ValueError, match=message):
        read_adapter(bad, model, torch.float32)


def test_an_adapter_that_a_hub_does_not_give_is_refused_by_name(monkeypatch) -> None:
    gone = Mock(side_effect=OSError("no route"))
    monkeypatch.setattr("dllm.drafter.adapter.snapshot_download", gone)
    asked = SimpleNamespace(
        additional_config={"dllm": {"drafter": {"adapter": "drafts"}}},
        model_config=SimpleNamespace(model="someone/target", revision=None),
    )
    with pytest.raises(ValueError, match="adapter = 'drafts': no route"):
        adapter_folder(asked)
