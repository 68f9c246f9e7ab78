"""Which masks are replaced and which tokens edited: against plain loops, and against diffusers."""

import itertools
import math

import numpy as np
import pytest
import torch

from bench import local
from dllm.engine.thoughts import Thoughts
from dllm.models.unmasking import rule
from dllm.models.unmasking.rule import WHOLE_STRATEGIES, Proposal
from dllm.ops.noise import gumbel_from_bits
from dllm.ops.schedule import SCHEDULES
from dllm.settings.thoughts import NO_MARK
from tests.support import llada2_pipeline as pipeline
from tests.support.denoise_cases import no_thoughts

BLOCK, SUB_BLOCK, MASK, STOP, VOCAB = 8, 3, 99, 7, 100


def parameters(rows: int, **given: float) -> dict[str, torch.Tensor]:
    values = {
        "max_steps": BLOCK, "threshold": 0.5, "strategy": rule.DYNAMIC, "entropy_bound": 0.4,
        "schedule": 0, "editing": 0, "editing_threshold": 0.5, "max_post_steps": 2,
        "block_length": BLOCK, "alg_temp": 0, "sub_block": SUB_BLOCK, "block_add_threshold": 0.5,
    } | given  # fmt: skip
    return {name: torch.full((rows,), value) for name, value in values.items()}


def random_step(seed: int, rows: int = 16, **given: float) -> dict:
    """Canvases with masks in some places, and what a model says about them."""
    draw = np.random.default_rng(seed)
    ids = draw.integers(10, 20, (rows, BLOCK))
    ids[draw.random((rows, BLOCK)) < draw.choice([0.1, 0.5, 1.0], (rows, 1))] = MASK
    token = draw.integers(5, 20, (rows, BLOCK))
    steps = draw.integers(0, 4, rows)
    return dict(
        ids=torch.tensor(ids),
        proposal=Proposal(
            token=torch.tensor(token),
            is_stop=torch.tensor(token == STOP),
            was_stop=torch.tensor(ids == STOP),
            confidence=torch.tensor(draw.random((rows, BLOCK)), dtype=torch.float32),
            entropy=torch.tensor(draw.random((rows, BLOCK)), dtype=torch.float32),
            margin=torch.tensor(draw.random((rows, BLOCK)), dtype=torch.float32),
            bits=torch.tensor(draw.integers(0, 2**32, (rows, BLOCK))),
            sub_block=(torch.arange(BLOCK) // SUB_BLOCK).expand(rows, -1),
        ),
        steps_done=torch.tensor(steps),
        post_steps=torch.zeros(rows, dtype=torch.int64),
        width=torch.tensor(draw.integers(1, BLOCK + 1, rows)),
        parameters=parameters(rows, **given),
        mask_token_id=MASK,
        block_size=BLOCK,
        thoughts=no_thoughts(rows),
    )


def counts_of(schedule: str, size: int, steps: int) -> list[int]:
    """How many masks each step reveals at least, by plain numbers."""
    if schedule == "linear":
        return [max(1, size // steps + (step < size % steps)) for step in range(steps)]
    masked = {
        "cosine": lambda t: 1 - math.sin(math.pi * t / 2),
        "sqrt": lambda t: math.sqrt(1 - t),
    }[schedule]
    left = [round(size * masked(step / steps)) for step in range(steps + 1)]
    return [max(1, before - after) for before, after in itertools.pairwise(left)]


def naive_transfers(step: dict, row: int) -> set[int]:
    """The masks that the references' loops replace in one canvas."""
    width = int(step["width"][row])
    own = {name: column[row].item() for name, column in step["parameters"].items()}
    confidence, entropy = step["proposal"].confidence[row], step["proposal"].entropy[row]
    masks = [at for at in range(width) if step["ids"][row, at] == MASK]
    done, total = int(step["steps_done"][row]), int(own["max_steps"])
    if done + 1 >= total:
        return set(masks)
    count = counts_of(SCHEDULES[own["schedule"]], BLOCK, total)[done]
    name = WHOLE_STRATEGIES[own["strategy"]]
    if name == "entropy_threshold":
        masks = masks_of_open_sub_blocks(masks, own["block_add_threshold"])
    bits = step["proposal"].bits[row]
    if name == "origin":
        return {at for at in masks if bits[at] < count / len(masks) * 2**32}
    score = confidence
    if name in ("sequential", "leftmost"):
        score = -torch.arange(BLOCK)
    if name in ("least_entropy", "entropy_bounded", "entropy_threshold"):
        score = -entropy
    if name == "topk_margin":
        score = step["proposal"].margin[row]
    noise = gumbel_from_bits(bits)
    if own["alg_temp"] > 0:
        score = score / own["alg_temp"] + noise
    if name == "random":
        score = noise
    ordered = sorted(masks, key=lambda at: -float(score[at]))
    if name == "low_confidence_dynamic":
        sure = {at for at in masks if confidence[at] > own["threshold"]}
        return sure if len(sure) >= count else set(ordered[:count])
    if name == "entropy_threshold":
        first = next((at for at in ordered if at // SUB_BLOCK == masks[0] // SUB_BLOCK), None)
        below = {at for at in masks if entropy[at] < own["entropy_bound"]}
        return below | set(ordered[:count]) | ({first} - {None})
    if name != "entropy_bounded":
        return set(ordered[:count])
    taken: set[int] = set()
    total_entropy = torch.zeros(())
    for at in ordered:
        total_entropy = total_entropy + entropy[at]
        if taken and total_entropy >= own["entropy_bound"]:
            break
        taken.add(at)
    return taken


def masks_of_open_sub_blocks(masks: list[int], add_threshold: float) -> list[int]:
    end = SUB_BLOCK
    while end < BLOCK:
        left = sum(end - SUB_BLOCK <= at < end for at in masks)
        if 1 - left / SUB_BLOCK < add_threshold:
            break
        end += SUB_BLOCK
    return [at for at in masks if at < end]


@pytest.mark.parametrize("max_steps", [1, 3, 4, 8, 20])
@pytest.mark.parametrize("strategy", range(len(WHOLE_STRATEGIES)), ids=WHOLE_STRATEGIES)
def test_every_strategy_replaces_what_its_reference_replaces(strategy: int, max_steps: int) -> None:
    for seed in range(12):
        step = random_step(
            seed,
            strategy=strategy,
            max_steps=max_steps,
            entropy_bound=0.7,
            schedule=seed % len(SCHEDULES),
            alg_temp=seed % 2 * 0.3,
        )
        outcome = rule.unmask_step(**step)
        for row in range(len(step["ids"])):
            decided = set(outcome.is_decided[row].nonzero().squeeze(1).tolist())
            assert decided == naive_transfers(step, row), (seed, row)
            for at in range(BLOCK):
                source = step["proposal"].token if at in decided else step["ids"]
                assert outcome.canvas[row, at] == source[row, at]


def test_a_family_without_strategies_has_the_dynamic_one() -> None:
    for seed in range(5):
        step = random_step(seed, strategy=rule.DYNAMIC)
        expected = rule.unmask_step(**step)
        del step["parameters"]["strategy"], step["parameters"]["entropy_bound"]
        step["proposal"] = step["proposal"]._replace(sub_block=None)
        assert torch.equal(rule.unmask_step(**step).canvas, expected.canvas)


def test_equal_confidences_are_taken_from_left_to_right() -> None:
    step = random_step(0, rows=1, strategy=rule.STATIC, max_steps=4)
    step["ids"][:], step["width"][:], step["steps_done"][:] = MASK, BLOCK, 0
    step["proposal"] = step["proposal"]._replace(confidence=torch.full((1, BLOCK), 0.5))
    outcome = rule.unmask_step(**step)
    assert outcome.is_decided.nonzero()[:, 1].tolist() == [0, 1]


def test_padding_is_neither_replaced_nor_edited_and_ends_nothing() -> None:
    step = random_step(1, editing=1, editing_threshold=0.0)
    step["width"][:] = 3
    step["width"][0] = 0
    outcome = rule.unmask_step(**step)
    assert not outcome.is_decided[:, 3:].any() and not outcome.is_decided[0].any()
    assert not outcome.converged[0]


def test_editing_ends_when_nothing_changes_or_after_its_steps() -> None:
    step = random_step(2, rows=3, editing=1, editing_threshold=0.5, max_post_steps=2)
    step["ids"][:] = 11
    step["width"][:] = BLOCK
    token = torch.full((3, BLOCK), 11)
    token[1, 4] = token[2, 4] = 12
    step["proposal"] = step["proposal"]._replace(
        token=token,
        is_stop=token == STOP,
        was_stop=token == STOP,
        confidence=torch.full((3, BLOCK), 0.6),
    )
    step["steps_done"] = torch.tensor([5, 5, 5])
    step["post_steps"] = torch.tensor([0, 0, 2])
    outcome = rule.unmask_step(**step)
    assert outcome.converged.tolist() == [True, False, True]
    assert outcome.post_steps.tolist() == [1, 1, 3]
    assert outcome.canvas[:, 4].tolist() == [11, 12, 12]


@pytest.mark.parametrize("editing", [0, 1])
def test_a_canvas_ends_at_a_stop_token_with_no_mask_in_front_of_it(editing: int) -> None:
    step = random_step(3, rows=2, editing=editing, editing_threshold=1.0, threshold=0.5)
    step["ids"][:] = torch.tensor([[11, 12] + [MASK] * 6, [11, MASK] + [MASK] * 6])
    step["width"][:], step["steps_done"][:] = BLOCK, 0
    token = torch.full((2, BLOCK), 13)
    token[:, 3] = STOP
    confidence = torch.full((2, BLOCK), 0.1)
    confidence[0, 2:4], confidence[1, 2:4] = 0.9, 0.9
    step["proposal"] = step["proposal"]._replace(
        token=token, is_stop=token == STOP, was_stop=step["ids"] == STOP, confidence=confidence
    )
    assert rule.unmask_step(**step).converged.tolist() == [True, False]


@pytest.mark.skipif(not local.is_installed(), reason=local.MISSING)
@pytest.mark.parametrize("editing_threshold", [None, 0.6])
@pytest.mark.parametrize("steps", [3, 8])
def test_it_is_the_step_of_diffusers(steps: int, editing_threshold: float | None) -> None:
    scheduler = pipeline.scheduler(BLOCK, steps)
    editing = {"editing": 0} if editing_threshold is None else {
        "editing": 1, "editing_threshold": editing_threshold,
    }  # fmt: skip
    for seed in range(20):
        step = random_step(seed, rows=6, max_steps=steps, threshold=0.7, **editing)
        step["width"][:] = BLOCK
        step["steps_done"].clamp_(max=steps - 2)  # its last step replaces all masks by its counts
        outcome = rule.unmask_step(**step)
        proposal = step["proposal"]
        for row in range(6):
            # Logits whose largest probability is the confidence, at the proposed token.
            top = (proposal.confidence[row] * 0.9 + 0.05)[:, None]
            probs = (
                ((1 - top) / (VOCAB - 1))
                .expand(-1, VOCAB)
                .scatter(1, proposal.token[row][:, None], top)
            )
            expected = scheduler.step(
                model_output=probs.log()[None],
                timestep=int(step["steps_done"][row]),
                sample=step["ids"][row][None],
                mask_token_id=MASK,
                threshold=0.7 * 0.9 + 0.05,
                editing_threshold=None if editing_threshold is None else 0.6 * 0.9 + 0.05,
            )
            assert outcome.canvas[row].tolist() == expected.prev_sample[0].tolist(), (seed, row)


# --- thoughts ------------------------------------------------------------------------------------

START, END = 10, 11


def full_at(tokens: list[int], begin: int, budget: int) -> list[int]:
    """Where a thought has as many tokens as its budget, read from left to right."""
    full, thinks = [], True
    for place, token in enumerate(tokens):
        if thinks and place - begin >= budget:
            full.append(place)
            token = END
        if token in (START, END):
            begin, thinks = place + 1, token == START
    return full


@pytest.mark.parametrize("editing", [0, 1])
def test_thoughts_end_where_their_budget_does_and_by_themselves_before(editing):
    """Of whole canvases: an end on them is one that the model proposed, or one that is held."""
    draw, num_held, num_own = np.random.default_rng(5), 0, 0
    for _ in range(300):
        budget, begin = int(draw.integers(0, 6)), int(draw.integers(-2, 1))
        given = (50 + begin, budget, START, END, NO_MARK, 50)
        thoughts = Thoughts(
            *(torch.tensor([number]) for number in given), is_asked=torch.tensor(True)
        )
        ids = torch.full((1, BLOCK), MASK)
        ids = torch.where(thoughts.ends_at(ids), END, ids)
        own, steps, post_steps = torch.zeros_like(ids), torch.tensor([0]), torch.tensor([0])
        for _ in range(60):
            token = torch.tensor(draw.choice([START, END, 12, 13, 14], (1, BLOCK)))
            token = torch.where(thoughts.ends_at(ids), END, token)
            outcome = rule.unmask_step(
                ids=ids,
                proposal=Proposal(
                    token=token,
                    is_stop=token == STOP,
                    was_stop=ids == STOP,
                    confidence=torch.tensor(draw.random((1, BLOCK)), dtype=torch.float32),
                    entropy=torch.tensor(draw.random((1, BLOCK)), dtype=torch.float32),
                ),
                steps_done=steps,
                post_steps=post_steps,
                width=torch.tensor([BLOCK]),
                parameters=parameters(1, editing=editing, max_steps=4),
                mask_token_id=MASK,
                block_size=BLOCK,
                thoughts=thoughts,
            )
            is_new = (outcome.canvas != ids) & (outcome.canvas != MASK)
            assert not (is_new & ~outcome.is_decided).any()
            ids, post_steps, steps = outcome.canvas, outcome.post_steps, steps + 1
            # What stands there is the model's: it proposed it where no end was held.
            is_own = (ids == token) & ~thoughts.ends_at(ids)
            own = torch.where(is_new, is_own.long(), own)
            if outcome.converged:
                break
        assert outcome.converged
        tokens = ids[0].tolist()
        full = full_at(tokens, begin, budget)
        assert all(tokens[place] == END for place in full) and MASK not in tokens
        others = [place for place, token in enumerate(tokens) if token == END and place not in full]
        if not editing:  # which may leave one that was held in vain, in the last step
            assert all(own[0, place] for place in others)
        num_held, num_own = num_held + len(full), num_own + len(others)
    assert num_held > 100 and num_own > 50
