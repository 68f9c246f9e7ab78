"""Calibration against the engine: the same hidden states, the same drafts, and recorded traffic.

That vLLM's own drafter drafts the same from an exported checkpoint: ``test_drafter_stock.py``.
"""

from pathlib import Path

import pytest
import torch

from dllm.drafter.checkpoint import DrafterConfig
from dllm.drafter.samples import read_shards
from dllm.settings.drafting import DrafterOptions
from dllm.train.export import read_checkpoint, write_checkpoint
from dllm.train.network import DraftNetwork, draft_inputs
from dllm.train.target import Target
from tests.drafter import test_drafter_stock as stock
from tests.support.drafter_harness import drafting_engine, greedy, watch_drafts
from tests.support.drafter_pairs import MASK, drafter_config, random_drafter, write_target

NUM_DRAFTS = stock.NUM_DRAFTS
# fp32 sums in another order; 4e-6 was measured.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A random target, and a drafter of one layer as a calibration exports it."""
    path = tmp_path_factory.mktemp("pair")
    target = write_target(path / "target")
    config = drafter_config(num_hidden_layers=1)
    write_checkpoint(path / "drafter", config, random_drafter(layers=1))
    return target, path / "drafter"


def drafts_of_the_network(pair: tuple[Path, Path], tokens: list[int]) -> list[int]:
    """What the training network drafts behind ``tokens``."""
    config, weights = read_checkpoint(pair[1])
    read = DrafterConfig.from_config(config, DrafterOptions())
    network = DraftNetwork(read)
    network.load_state_dict(weights)
    target = Target(pair[0], "cpu")
    ids = torch.tensor([tokens])
    anchors = torch.tensor([[len(tokens) - 1]])
    block = draft_inputs(ids, anchors, NUM_DRAFTS + 1, MASK)
    with torch.no_grad():
        features = target.hidden_states(ids, read.target_layer_ids)
        hidden = network(features, target.embedding[block], anchors)
        return (hidden[0, 0, 1:] @ target.head.T).argmax(-1).tolist()


def test_hidden_states_and_drafts_are_the_engines_and_traffic_is_recorded(pair, tmp_path):
    buffer = tmp_path / "buffer"
    engine = drafting_engine(*pair, NUM_DRAFTS, {"record": str(buffer), "record_mb": 5})
    prompts = [stock.PROMPT, stock.PROMPT[5:25], list(range(40, 52))]
    with watch_drafts(engine) as seen:
        outputs = engine.generate(prompts, greedy(stock.NUM_TOKENS))
    for draft in seen[:2] + seen[-2:]:
        assert draft.drafts == drafts_of_the_network(pair, draft.tokens)
    engine.runner.speculator.steering._recorder.close()

    found = sorted(read_shards(buffer), key=lambda sample: len(sample.tokens))
    written = sorted((p + o for p, o in zip(prompts, outputs, strict=True)), key=len)
    target = Target(pair[0], "cpu")
    for sample, tokens in zip(found, written, strict=True):
        # The engine may verify a few tokens beyond the last one that it returns.
        assert list(sample.tokens[: len(tokens)]) == tokens
        assert sample.tokens[sample.response_start] == tokens[len(tokens) - stock.NUM_TOKENS]
        expected = target.hidden_states(torch.tensor([sample.tokens[:-1]]), (1, 3))[0]
        error = (sample.hidden()[:-1] - expected).abs().max() / expected.abs().max()
        assert error < TOLERANCE
