"""Draft blocks in an engine: as long as was chosen, as their trials say, and in several passes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dllm.drafter.block import DraftBlock, reveal_surest
from dllm.drafter.sources import SteeredBlocks
from dllm.drafter.widths.pilot import Pilot, PilotConfig, PilotLengths
from dllm.train.export import Drafter
from dllm.train.pilot_trials import TimedWidths, in_milliseconds, record, recorded
from dllm.train.responses import Prompt
from dllm.train.settings import PilotTraining
from dllm.train.target import Target, target_facts
from dllm.train.target import read_config as read_target
from tests.support import drafter_harness
from tests.support.drafter_harness import (
    AllDrafts,
    assert_close,
    drafting_engine,
    greedy,
    make_policy,
    policy_of,
    prompt,
    take_counts,
    watch_drafts,
)
from tests.support.drafter_pairs import (
    random_drafter,
    repeating_config,
    repeating_drafter,
    write_drafter,
)
from tests.support.drafter_reference import ReferenceDrafter
from tests.support.engine_harness import Engine
from tests.support.watched_device import DeviceWatch, off_device, on_device

NUM_DRAFTS, TRAINED, STEPS = 6, 4, 4


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Often right, and its masks see each other."""
    weights = repeating_drafter()
    weights["layers.0.self_attn.q_norm.weight"].fill_(0.3)
    for name, noise in random_drafter(seed=5, layers=1).items():
        weights[name] += 0.2 * noise
    config = repeating_config() | {"block_size": TRAINED + 1}
    return write_drafter(tmp_path_factory.mktemp("drafter"), config, weights)


@pytest.fixture(scope="module")
def in_passes(target: Path, drafter: Path) -> Engine:
    options = {"denoise_steps": STEPS, "noise_schedule": "linear"}
    return drafting_engine(target, drafter, NUM_DRAFTS, options, skip_tokenizer_init=True)


@pytest.fixture
def engine(in_passes: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The same engine, which drafts in one pass."""
    monkeypatch.setattr(in_passes.runner.speculator, "reveal_counts", [NUM_DRAFTS])
    return in_passes


def reference(target: Path, drafter: Path, engine: Engine) -> ReferenceDrafter:
    weights = Drafter.load(drafter, target_facts(read_target(target))).weights
    return drafter_harness.reference(target, engine, weights)


class AnyLengths(PilotLengths):
    """Blocks of another length in every row and step, 0 and N among them."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def read_prompts(self, slots: np.ndarray, logits: torch.Tensor) -> None:
        pass

    def of(self, slots: np.ndarray) -> np.ndarray:
        lengths: np.ndarray = (slots + len(self.asked) + 1) % (NUM_DRAFTS + 1)
        self.asked.append(lengths.tolist())
        return lengths


def test_a_shortened_blocks_drafts_are_those_of_a_block_that_ends_there(target, drafter, engine):
    """Beside long ones in the same pass; behind a prompt that is shorter than the block."""
    engine.reset_prefix_cache()
    with policy_of(engine, AnyLengths()) as lengths, watch_drafts(engine) as seen:
        engine.generate([prompt(2, 3, 14), prompt(10, 4, 14), prompt(20, 5, 14)], greedy(60))
    widths = [width for step in lengths.asked if any(step) for width in step]
    assert len(widths) == len(seen) and set(widths) == set(range(NUM_DRAFTS + 1))
    expected = reference(target, drafter, engine)
    is_different = False
    with torch.inference_mode():
        for draft, width in zip(seen, widths, strict=True):
            mask = expected.config.mask_token_id
            behind, block = draft.tokens[:-1], [draft.tokens[-1]] + [mask] * NUM_DRAFTS
            logits = expected.logits(behind, block[: width + 1])[1:]
            assert_close(draft.logits[:width], logits)
            whole = expected.logits(behind, block)[1 : width + 1]
            is_different |= not torch.allclose(whole, logits, rtol=1e-4, atol=1e-3)
    assert is_different, "its masks do not see each other"


def test_a_pilot_chooses_once_for_each_prompt(engine):
    """The logits that it reads are those of the first token; drafts and choices are counted."""
    engine.reset_prefix_cache()
    take_counts(engine)
    policy = make_policy("pilot", engine)
    read: list[torch.Tensor] = []
    choose = policy.pilot.choose
    policy.pilot.choose = lambda logits: (read.append(logits), choose(logits))[1]
    prompts = [prompt(length, length, 14) for length in (3, 90, 20, 7)]
    with policy_of(engine, policy):
        outputs = engine.generate(prompts, greedy(12))
    firsts = torch.cat(read).argmax(-1).tolist()
    assert sorted(firsts) == sorted(output[0] for output in outputs)
    counts = take_counts(engine)
    assert counts["pilot_choices", ""] == len(prompts)
    assert counts["pilot_seconds", ""] > 0
    widths = {int(label) for name, label in counts if name == "draft_widths"}
    assert len(widths) > 1 and widths <= set(policy.pilot.config.widths)
    passes, drafted = counts["draft_passes", ""], counts["drafted_tokens", ""]
    assert 0 < drafted < passes * len(prompts) * NUM_DRAFTS


class OneLength(AnyLengths):
    def __init__(self, length: int) -> None:
        self.length = length

    def of(self, slots: np.ndarray) -> np.ndarray:
        return np.full(len(slots), self.length)


def test_trials_are_what_a_server_does(target, drafter, engine, tmp_path):
    """As many steps for each answer and width; the logits are those behind the prompt."""
    asked = [prompt(length, 2 * length, 14) for length in (3, 5, 7, 9, 11, 14)]
    settings = PilotTraining(
        radius=2, temperatures=(0.0,), max_tokens=40, generate_batch=4, responses=6
    )
    loaded = Drafter.load(drafter, target_facts(read_target(target)))
    model = Target(target, "cpu")
    model.eos = set()
    model.model.generation_config.eos_token_id = None
    prompts = [Prompt(tuple(given), "all", at == 1) for at, given in enumerate(asked)]
    assert list(record(tmp_path, prompts, model, loaded, settings)) == [4, 2]
    trials = recorded(tmp_path)
    assert trials.widths == (2, 3, 4, 5, 6)
    assert trials.tokens.tolist() == [39] * 6
    assert trials.is_heldout.tolist() == [False, True, False, False, False, False]
    for at, given in enumerate(asked):
        for place, width in enumerate(trials.widths):
            served = policy_of(engine, AllDrafts(NUM_DRAFTS))
            with policy_of(engine, OneLength(width)), served as policy:
                (output,) = engine.generate([given], greedy(40))
            behind = sum(int((~step.in_prompt).sum()) for step in policy.steps)
            assert behind == trials.steps[at, place]
        assert output[0] == trials.logits[at].argmax()
    assert len(trials.steps.unique()) > 4, "all widths are alike"


def test_costs_are_learned_from_an_engine(engine):
    times = iter(range(10**6))
    policy = TimedWidths(NUM_DRAFTS, clock=lambda: 0.01 * next(times))
    with policy_of(engine, policy):
        engine.generate([prompt(9, 1, 14)], greedy(60))
    plain, draft_pass, each = in_milliseconds(policy.costs)
    assert plain + draft_pass + each * NUM_DRAFTS / 2 == pytest.approx(10, rel=0.2)


@pytest.mark.parametrize(
    ("overrides", "widths", "vocab_size", "message"),
    [
        ({}, (5, 7), 16, "up to 7 drafts"),
        ({}, (5, 6), 17, "logits of 17 tokens"),
        ({"is_causal": True}, (5, 6), 16, "layer 0"),
    ],
)
def test_a_pilot_that_does_not_fit_is_refused_at_start(
    target: Path,
    tmp_path: Path,
    overrides: dict[str, Any],
    widths: tuple[int, ...],
    vocab_size: int,
    message: str,
) -> None:
    file = tmp_path / "pilot.safetensors"
    Pilot(PilotConfig(widths, vocab_size, hidden_size=2)).save(file)
    drafter = write_drafter(tmp_path / "drafter", repeating_config() | overrides)
    options = {"policy": "pilot", "pilot": str(file)}
    with pytest.raises(ValueError, match=message):
        drafting_engine(target, drafter, NUM_DRAFTS, options, skip_tokenizer_init=True)


# --- several passes -------------------------------------------------------------------------------


def test_passes_are_those_of_the_definition(target, drafter, in_passes):
    """Each decides the positions that are surest, and the next one sees them."""
    in_passes.reset_prefix_cache()
    with watch_drafts(in_passes) as seen:
        in_passes.generate([prompt(20, 3, 14), prompt(50, 5, 14)], greedy(60))
    assert in_passes.runner.speculator.reveal_counts == [2, 2, 1, 1]
    expected = reference(target, drafter, in_passes)
    mask = expected.config.mask_token_id
    in_one = 0
    with torch.inference_mode():
        for draft in seen:
            block = [draft.tokens[-1]] + [mask] * NUM_DRAFTS
            first = expected.logits(draft.tokens[:-1], block)[1:].argmax(-1).tolist()
            for count in [2, 2, 1, 1]:
                logits = expected.logits(draft.tokens[:-1], block)[1:]
                sure, best = logits.softmax(-1).max(-1)
                sure[[token != mask for token in block[1:]]] = -1
                for place in sure.topk(count).indices.tolist():
                    block[1 + place] = int(best[place])
            assert draft.drafts == block[1:]
            assert_close(draft.logits, logits)
            in_one += first == block[1:]
    assert len(seen) > 10 and in_one < len(seen), "one pass would have done"


def test_rows_of_padding_do_not_overwrite_the_first_requests_last_token(in_passes, monkeypatch):
    """As in a CUDA graph for more requests than there are: sample places of padding are 0."""
    speculator, prompts = in_passes.runner.speculator, [prompt(30, 1, 14), prompt(41, 5, 14)]
    generate = speculator._generate_draft
    padded_passes = []

    def pad(hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(hidden, (0, 0, 0, 64))

    def padded(num_reqs: int, num_tokens: int, *others: Any, **options: Any) -> None:
        limit, run = speculator.max_num_reqs, speculator._run_model
        assert num_reqs < limit
        assert (speculator.sample_indices[num_reqs * NUM_DRAFTS :] == 0).all()
        anchor = int(speculator.input_buffers.input_ids[0])
        with monkeypatch.context() as patch:
            patch.setattr(
                speculator, "_run_model", lambda _, *a, **k: pad(run(num_tokens, *a, **k))
            )
            generate(limit, num_tokens, *others, **options)
        assert int(speculator.input_buffers.input_ids[0]) == anchor
        padded_passes.append(num_reqs)

    drafts = []
    for patched in (generate, padded):
        in_passes.reset_prefix_cache()
        monkeypatch.setattr(speculator, "_generate_draft", patched)
        with watch_drafts(in_passes) as seen:
            outputs = in_passes.generate(prompts, greedy(30))
        drafts.append((outputs, [draft.drafts for draft in seen]))
    assert drafts[0] == drafts[1]
    assert len(padded_passes) > 3


def test_the_surest_positions_are_revealed_with_what_was_drawn():
    logits = torch.tensor(
        [
            [[0.6, 0.4, 0.0], [0.1, 0.0, 0.9], [0.2, 0.8, 0.0]],
            [[1.0, 0, 0], [0, 1.0, 0], [0.5, 0.5, 0]],
        ]
    ).log()
    drafts, confidence = torch.full((2, 3), -1), torch.zeros(2, 3)
    is_masked = torch.tensor([[True, True, True], [False, True, True]])
    tokens = torch.tensor([0, 2, 0, 0, 1, 1])  # not always the likeliest
    reveal_surest(drafts, confidence, is_masked, logits.view(6, 3), tokens, count=2)
    assert drafts.tolist() == [[-1, 2, 0], [-1, 1, 1]]
    assert is_masked.tolist() == [[True, False, False], [False, False, False]]
    torch.testing.assert_close(confidence, torch.tensor([[0, 0.9, 0.8], [0, 1.0, 0.5]]))


def test_lengths_of_blocks_go_to_the_device_without_a_wait(monkeypatch):
    monkeypatch.setattr(
        SteeredBlocks, "_build_uniform_attn_metadata", lambda self, **given: None, raising=False
    )
    block = object.__new__(DraftBlock)
    block.num_query_per_req, block.max_model_len = 4, 100
    block._block_lengths = np.array([1, 3])
    with DeviceWatch() as watch:
        positions, lengths = on_device((torch.arange(8), torch.zeros(2, dtype=torch.int32)))
        block.input_buffers = SimpleNamespace(positions=positions, seq_lens=lengths)
        block._build_uniform_attn_metadata(num_reqs=2)
    assert not watch.findings and off_device(lengths).tolist() == [2, 8]
