"""Training of Nemotron shows a model what it sees in either way of decoding, and no more."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from dllm.models.unmasking.reference import load_model
from dllm.tasks.suite import FAMILIES, Question, questions
from dllm.train.lm.autoregressive import Autoregressive
from dllm.train.lm.learner import LanguageLearner
from dllm.train.lm.mask_diffusion import MASK, TAIL_WEIGHT
from dllm.train.lm.nemotron import Nemotron
from dllm.train.lm.objective import EOS, Encoded
from dllm.train.lm.settings import ModelShape, TrainSettings
from tests.support.masked_pass import logits_of

SHAPE = ModelShape(hidden_size=64, num_layers=2, intermediate_size=32, canvas_length=8)
SETTINGS = TrainSettings("nemotron", model=SHAPE, block_lengths=(8,), prefix_loss=0.5)


def asked(count: int, families: Sequence[str] = tuple(FAMILIES)) -> list[Question]:
    """Questions of several families, the shortest first."""
    found = [q for family in families for q in questions([family], "train", count)]
    return sorted(found, key=lambda each: len(each.prompt) + len(each.answer))


def model_of(objective: LanguageLearner):
    """A model whose logits depend on all that a token sees."""
    model = objective.build_model().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn(param.shape, generator=generator)
            if param.ndim == 2:
                param.copy_(2 * noise * param.shape[1] ** -0.5)
            else:
                param.add_(0.3 * noise)
    return model


def test_the_loss_is_that_of_canvases_and_of_next_tokens() -> None:
    """Sequence by sequence, canvas by canvas, from the definition."""
    objective = Nemotron(SETTINGS)
    model = model_of(objective)
    batch = asked(1)[-6:]
    loss = objective._group_loss(model, batch, torch.Generator().manual_seed(3))

    random = torch.Generator().manual_seed(3)
    encoded = Encoded.of(objective.tokenizer, batch)
    copies = objective._lay_out(encoded, random)
    noised = objective._noise(copies, random)
    expected, num_canvases = 0.0, 0
    for row, (prompt, answer) in enumerate(zip(*encoded, strict=True)):
        whole = prompt + answer
        entropy = -logits_of(model, whole, len(whole)).log_softmax(dim=-1)
        by_token = [float(entropy[at - 1, whole[at]]) for at in range(len(prompt), len(whole))]
        expected += 0.5 * sum(by_token) / len(by_token)
        by_canvas = []
        first = int(copies.origins[row])
        for start in range(first, len(whole), 8):
            canvas = noised[row, start - first :][:8].tolist()
            right = (whole[start:] + [EOS] * 8)[:8]
            assert len(canvas) == 8 and all(
                token in (MASK, own) for token, own in zip(canvas, right, strict=True)
            )
            entropy = -logits_of(model, whole[:start] + canvas, start).log_softmax(dim=-1)
            weights = [
                TAIL_WEIGHT if start + at >= len(whole) else 1.0
                for at in range(8)
                if canvas[at] == MASK
            ]
            own = [float(entropy[start + at, right[at]]) for at in range(8) if canvas[at] == MASK]
            if own:
                products = (loss * weight for loss, weight in zip(own, weights, strict=True))
                by_canvas.append(sum(products) / sum(weights))
        num_canvases += len(by_canvas)
        expected += sum(by_canvas) / max(1, len(by_canvas))
    assert num_canvases > len(batch)
    assert loss.item() == pytest.approx(expected / len(batch), rel=1e-4)


def test_start_as_an_autoregressive_model(tmp_path: Path) -> None:
    """Queries and keys keep their size on average, and MLPs their strongest neurons."""
    wide = ModelShape(hidden_size=64, num_layers=2, intermediate_size=64, canvas_length=8)
    dense = Autoregressive(TrainSettings("ar", model=wide))
    dense.write(model_of(dense), tmp_path)
    same = Nemotron(TrainSettings("nemotron", model=wide)).begin(tmp_path).model.eval()
    narrow = Nemotron(SETTINGS).begin(tmp_path).model
    ids = torch.randint(10, 800, (8, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = load_model(tmp_path)(ids).logits, same(ids).logits
    off = (found - expected).norm() / expected.norm()
    # Queries of tokens differ in size. With half or twice the right size it is 0.5 and 0.6.
    assert off < 0.35, off
    mlp, kept = same.model.layers[0].mlp, narrow.model.layers[0].mlp
    strength = mlp.up_proj.weight.norm(dim=1) * mlp.down_proj.weight.norm(dim=0)
    chosen = strength.topk(32).indices
    assert torch.equal(kept.gate_proj.weight, mlp.gate_proj.weight[chosen])
    assert torch.equal(kept.down_proj.weight, mlp.down_proj.weight[:, chosen])


def test_written_weights_have_the_released_names(tmp_path: Path) -> None:
    objective = Nemotron(SETTINGS)
    model = objective.build_model()
    objective.write(model, tmp_path)
    again = load_model(tmp_path).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(again[name], tensor.bfloat16().float()), name
