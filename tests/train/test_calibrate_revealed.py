"""Blocks that show some of the target's tokens, and acceptance with several passes over a block."""

from pathlib import Path

import pytest
import torch

from dllm import cli
from dllm.drafter.schedule import reveal_surest
from dllm.train.drafter.acceptance import draft_all, load_batch
from dllm.train.drafter.learner import DraftLearner, draw_revealed
from dllm.train.drafter.network import DraftNetwork
from tests.support.calibrate_cases import (
    random_samples,
    read_config,
    small_settings,
    target,
    target_path,
)
from tests.support.drafter_pairs import MASK, random_drafter

__all__ = ["target", "target_path"]  # fixtures

BLOCK = 5
CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"


def test_shown_positions_exist_and_never_are_all_of_a_block():
    lengths = torch.arange(1, 5).repeat(50)[:, None, None]  # 200 blocks of 1 to 4 tokens
    exists = (torch.arange(4) < lengths).expand(-1, 30, -1)
    shown = draw_revealed(exists, 1.0, torch.Generator().manual_seed(0))
    assert not (shown & ~exists).any()
    count, length = shown.sum(-1), exists.sum(-1)
    assert (count < length).all()
    for tokens in range(1, 5):
        assert set(count[length == tokens].tolist()) == set(range(tokens))
    assert shown[length == 4].any(0).all()  # every position is among the shown ones


def test_the_share_is_that_of_blocks():
    exists = torch.ones(100, 100, 16, dtype=torch.bool)
    shown = draw_revealed(exists, 0.25, torch.Generator().manual_seed(0))
    # 15 of 16 chosen blocks show something. The standard deviation of the share is 0.0042.
    assert shown.any(-1).float().mean() == pytest.approx(0.25 * 15 / 16, abs=0.02)


def test_training_shows_the_targets_tokens(target, monkeypatch):
    """The network gets the anchor's token; behind it masks, and tokens that really follow."""
    samples = random_samples(target, 4)
    settings = small_settings(revealed_share=1.0)
    learner = DraftLearner(settings, read_config(num_hidden_layers=1), 4, target, samples, samples)
    seen = []
    forward = DraftNetwork.forward

    def spy(self, features, embeds, anchors):
        seen.append(embeds)
        return forward(self, features, embeds, anchors)

    monkeypatch.setattr(DraftNetwork, "forward", spy)
    assert torch.isfinite(learner.loss(0))
    token_of = {tuple(row): token for token, row in enumerate(learner.embedding.tolist())}
    blocks = [[token_of[tuple(row)] for row in block] for block in seen[0].flatten(0, 1).tolist()]
    drafts = [token for block in blocks for token in block[1:]]
    assert MASK in drafts and any(token != MASK for token in drafts)
    real = [one.tokens[at : at + 4] for one in samples for at in range(len(one.tokens))]
    for block in blocks:
        assert any(
            block[0] == tokens[0]
            and all(given in (MASK, token) for given, token in zip(block, tokens, strict=False))
            for tokens in real
        )


@pytest.mark.parametrize("num_samples", [1, 3])
def test_several_passes_are_those_of_a_server(target, num_samples):
    """Against one block at a time."""
    config = read_config()
    network = DraftNetwork(config).requires_grad_(False)
    network.load_state_dict(random_drafter())
    samples, reveal = random_samples(target, num_samples, length=6), [2, 1, 1]
    batch = load_batch(samples, target, config.target_layer_ids)
    drafted = draft_all(network, target, batch, BLOCK, reveal)
    for row, sample in enumerate(samples):
        for at in range(sample.num_anchors):
            anchor = sample.response_start + at
            drafts = torch.zeros(1, BLOCK - 1, dtype=torch.long)
            confidence, is_masked = torch.zeros(1, BLOCK - 1), torch.ones(1, BLOCK - 1).bool()
            for count in reveal:
                shown = drafts.masked_fill(is_masked, MASK)
                ids = torch.cat([torch.tensor([[sample.tokens[anchor]]]), shown], 1)[:, None]
                embeds = target.embedding[ids]
                hidden = network(batch.features[row : row + 1], embeds, torch.tensor([[anchor]]))
                logits = hidden[:, 0, 1:] @ target.head.T
                reveal_surest(drafts, confidence, is_masked, logits, count)
            really = sample.tokens[anchor + 1 : anchor + BLOCK]
            pairs = list(zip(drafts[0].tolist(), really, strict=False))
            agreeing = next((i for i, (one, two) in enumerate(pairs) if one != two), len(pairs))
            assert drafted[row].agreeing[at] == agreeing


def test_the_check_compares_passes(capsys):
    pair = [str(CHECKPOINTS / "tiny-ar"), str(CHECKPOINTS / "tiny-drafter"), "--num-prompts", "4"]
    command = ["check-drafter", *pair, "--max-tokens", "24", "--device", "cpu", "--passes"]
    assert cli.main([*command, "1", "3"]) == 0
    one, three, best = capsys.readouterr().out.splitlines()
    assert one.startswith("1 passes: ") and three.startswith("3 passes: ")
    assert best.endswith("; 4 responses")
    assert cli.main([*command, "16"]) == 1
    assert "--passes 16; allowed: 1 to 15" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main([*command[:4], "0"])
    assert "at least 2" in capsys.readouterr().err
