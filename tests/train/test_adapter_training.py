"""`[adapter]`: what is trained is what a server drafts with."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dllm.drafter.samples import Sample
from dllm.models.unmasking.reference import load_model
from dllm.settings.command import CommandError
from dllm.train.adapter import AdapterLearner
from dllm.train.run import Run
from dllm.train.settings import AdapterShape, DrafterTraining
from dllm.train.target import Target, load_batch, own_mask
from tests.support.adapters import changed, rows_changed
from tests.support.masked_pass import logits_of

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
KINDS = ("q_proj", "o_proj", "down_proj")
SHAPE = AdapterShape(rank=2, target_modules=KINDS, num_drafts=6)
SETTINGS = DrafterTraining(
    steps=4, batch_size=2, anchors=3, warmup_steps=0, evaluate_every=4, adapter=SHAPE
)
TOKENS = tuple(range(30, 62))


def learner_of(name: str, shape: AdapterShape = SHAPE) -> AdapterLearner:
    path = CHECKPOINTS / name
    samples = [Sample(TOKENS, 10, "one"), Sample(TOKENS[:20], 6, "other")]
    settings = DrafterTraining.from_mapping(SETTINGS.to_mapping() | {"adapter": vars(shape)})
    return AdapterLearner(settings, Target(path, "cpu"), own_mask(path), samples, samples)


@pytest.mark.parametrize("name", ["tiny-nemotron", "tiny-ar"])
def test_blocks_are_drafted_as_by_a_server(name: str, tmp_path: Path) -> None:
    """With the matrices that are written, in PEFT's names and scale."""
    learner, path = learner_of(name), CHECKPOINTS / name
    for matrix in learner.model.up:
        torch.nn.init.normal_(matrix, std=0.1)
    for matrix in learner.model.parameters():
        matrix.data = matrix.bfloat16().float()  # as it is written
    learner.write(learner.model, tmp_path)
    anchors = torch.tensor([[11, 17]])
    batch = load_batch(learner.samples[:1], learner.target, ())
    blocks = learner._blocks(batch, anchors, torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = learner.drafted(learner.model, batch, blocks, anchors) @ learner.target.head.T
    is_canvas = learner.mask is not None
    reference = load_model(path) if is_canvas else AutoModelForCausalLM.from_pretrained(path)
    reference.float()
    for block, start in enumerate(anchors[0].tolist()):
        ids = [*TOKENS[:start], *blocks.ids[0, block].tolist()]
        first = start + (not is_canvas)  # without masks the last token has no adapter
        with changed(reference, tmp_path, rows_changed(len(ids), first)), torch.no_grad():
            if is_canvas:
                expected = logits_of(reference, ids, start)[start + 1 :]
            else:
                expected = reference(torch.tensor([ids])).logits[0, start:-1]
        torch.testing.assert_close(logits[0, block], expected, rtol=1e-4, atol=1e-3)


def test_a_run_lowers_the_loss_and_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    before = learner_of("tiny-ar").loss(0).item()
    whole, first = (Run(learner_of("tiny-ar"), tmp_path / name) for name in ("whole", "parts"))
    for out in (tmp_path / "whole", tmp_path / "parts"):
        out.mkdir()
    list(whole.run()), list(first.run(stop_at=2))
    second = Run(learner_of("tiny-ar"), tmp_path / "parts")
    second.resume()
    list(second.run())
    for ours, theirs in zip(second.average.parameters(), whole.average.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert second.learner.loss(0).item() < before
    assert whole.rows[-1]["length"] >= 1


def test_a_step_in_which_nothing_can_be_learned_has_no_loss() -> None:
    """The first draft behind noise is the target's own."""
    loss = learner_of("tiny-ar", AdapterShape(rank=2, target_modules=KINDS, num_drafts=1)).loss(0)
    loss.backward()
    assert loss.item() == 0


def test_layers_that_the_target_does_not_have_are_refused() -> None:
    with pytest.raises(CommandError, match="w_proj: the target has no linear layers"):
        learner_of("tiny-ar", AdapterShape(target_modules=("w_proj",)))
