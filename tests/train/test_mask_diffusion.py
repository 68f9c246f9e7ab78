"""Training of masked blocks shows a model what generation shows it, and nothing of the answer."""

from dataclasses import replace

import pytest
import torch

from dllm.models.unmasking.reference import additive
from dllm.tasks.suite import question
from dllm.tasks.tokenizer import train_tokenizer
from dllm.train.lm.llada2 import LLaDA2
from dllm.train.lm.mask_diffusion import MASK, TAIL_WEIGHT, position_weights
from dllm.train.lm.objective import EOS, Encoded
from dllm.train.lm.sdar import SDAR
from dllm.train.lm.settings import ModelShape, TrainSettings
from dllm.train.lm.two_copies import TwoCopies
from tests.support.masked_pass import logits_of

TINY = ModelShape(hidden_size=64, num_layers=2, intermediate_size=32, moe_intermediate_size=16)
TOKENIZER = train_tokenizer()
# A prompt that ends in a block, one that fills its block, and one of a token; B = 4 for the first.
ENCODED = Encoded(
    [list(range(10, 21)), list(range(30, 38)), [50]],
    [[*range(100, 106), EOS], [*range(200, 203), EOS], [*range(300, 311), EOS]],
)
LENGTHS = torch.tensor([4, 8, 16])


def copies() -> TwoCopies:
    return TwoCopies.of(ENCODED, LENGTHS)


@pytest.mark.parametrize("kind", [SDAR, LLaDA2])
def test_a_noised_block_sees_what_a_canvas_sees(kind) -> None:
    """The logits of one pass over two copies are those of generation, block by block."""
    model = kind(TrainSettings("sdar", model=TINY)).build_model().eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "embed" in name:
                param.mul_(40)  # logits of a few nats
    views = copies()
    random = torch.Generator().manual_seed(0)
    is_masked = views.is_target & (torch.rand(views.clean.shape, generator=random) < 0.6)
    noised = torch.where(is_masked, MASK, views.clean)
    with torch.no_grad():
        both = model(
            input_ids=torch.cat((views.ids, noised), dim=1),
            attention_mask=additive(views.visible()),
            position_ids=views.positions,
        ).logits[:, views.is_noised]
    num_compared = 0
    for row, size in enumerate(LENGTHS.tolist()):
        whole = ENCODED.prompts[row] + ENCODED.answers[row]
        blocks = views.target_blocks[row]
        for block in blocks[views.is_target[row]].unique().tolist():
            canvas = noised[row, blocks == block].tolist()
            ids = whole[: block * size] + canvas
            alone = logits_of(model, ids, block * size, size)
            # fp32, other shapes of the same sums
            torch.testing.assert_close(
                both[row, blocks == block], alone[block * size :], rtol=1e-4, atol=1e-4
            )
            num_compared += 1
    assert num_compared == 3 + 1 + 1


def test_blocks_begin_with_the_prompts_tail_and_end_with_filler() -> None:
    views = copies()
    first = views.clean[0].tolist()
    assert first[:10] == [18, 19, 20, 100, 101, 102, 103, 104, 105, EOS]
    assert views.positions[0, views.is_noised][:12].tolist() == list(range(8, 20))
    expected = [False] * 3 + [True] * 9
    assert views.is_target[0].tolist() == expected + [False] * (len(first) - 12)
    # The second prompt fills its block, so its answer begins with one.
    assert views.clean[1, :8].tolist() == [200, 201, 202, EOS, EOS, EOS, EOS, EOS]
    assert views.is_target[1, :8].all() and not views.is_target[1, 8:].any()


def test_noise_is_masks_and_wrong_tokens_of_answers_alone() -> None:
    settings = TrainSettings("llada2", model=TINY, wrong_tokens=0.3)
    asked = [question("report", "train", index) for index in range(8)]
    encoded = Encoded.of(TOKENIZER, asked)
    views = TwoCopies.of(encoded, torch.full((8,), 16))
    answers = {token for answer in encoded.answers for token in answer}
    wrong, masks = LLaDA2(settings), LLaDA2(replace(settings, wrong_tokens=0.0))
    shares = []
    for seed in range(20):
        random = torch.Generator().manual_seed(seed)
        noised = wrong._noise(views, random)
        same = noised == views.clean
        assert same[~views.is_target].all()
        is_wrong = ~same & (noised != MASK)
        assert set(noised[is_wrong].tolist()) <= answers
        is_kept = views.is_target & (noised != MASK)
        shares.append(float(is_wrong.sum() / is_kept.sum()))
        random = torch.Generator().manual_seed(seed)
        plain = masks._noise(views, random)
        assert ((plain == MASK) == (noised == MASK)).all()
        assert (plain[plain != MASK] == views.clean[plain != MASK]).all()
    # 0.3, less those that are replaced by the same token; 20 draws of about 150 tokens
    assert 0.2 < sum(shares) / len(shares) < 0.31


def test_answers_and_their_blocks_have_the_same_weight() -> None:
    """And a position behind the end a tenth of another's."""
    views = copies()
    weights = position_weights(views, views.is_target)
    assert float(weights.sum()) == pytest.approx(1)
    assert weights.sum(dim=1).tolist() == pytest.approx([1 / 3] * 3)
    # Row 0: blocks of 1, 4 and 4 targets, the last with two positions behind the end.
    assert weights[0, 3].item() == pytest.approx(1 / 9)
    assert weights[0, 4:8].tolist() == pytest.approx([1 / 36] * 4)
    share = 1 / (2 + 2 * TAIL_WEIGHT) / 9
    assert weights[0, 8:12].tolist() == pytest.approx([share, share] + [share * TAIL_WEIGHT] * 2)
    assert not weights[~views.is_target].any()


@pytest.mark.parametrize("kind", ["sdar", "llada2"])
def test_the_loss_is_that_of_the_masked_positions(kind: str) -> None:
    """With editing all positions of an answer count; grouping by length changes nothing."""
    settings = TrainSettings(kind, model=TINY, wrong_tokens=0.2 if kind == "llada2" else 0.0)
    objective = (SDAR if kind == "sdar" else LLaDA2)(settings)
    model = objective.build_model().eval()
    asked = [question("compare", "train", index) for index in range(3)]
    loss = objective.loss_of(model, asked, torch.Generator().manual_seed(5))
    random = torch.Generator().manual_seed(5)
    asked = sorted(asked, key=lambda each: len(each.prompt) + len(each.answer))
    lengths = objective._draw_block_lengths(3, random)
    views = TwoCopies.of(Encoded.of(TOKENIZER, asked), lengths)
    noised = objective._noise(views, random)
    total = 0.0
    for row in range(3):
        counts = views.is_target[row]
        if kind == "sdar":
            counts = counts & (noised[row] == MASK)
        with torch.no_grad():
            logits = model(
                input_ids=torch.cat((views.ids, noised), dim=1)[row : row + 1],
                attention_mask=additive(views.visible())[row : row + 1],
                position_ids=views.positions[row : row + 1],
            ).logits[0, views.is_noised]
        entropy = -logits.log_softmax(dim=-1).gather(1, views.clean[row][:, None])[:, 0]
        by_block = []
        for block in views.target_blocks[row][counts].unique():
            here = counts & (views.target_blocks[row] == block)
            is_end = ((views.clean[row] == EOS) & views.is_target[row]).int()
            weight = torch.where(is_end.cumsum(0) > is_end, TAIL_WEIGHT, 1.0)[here]
            by_block.append(float((entropy[here] * weight).sum() / weight.sum()))
        total += sum(by_block) / len(by_block) / 3 if by_block else 0.0
    assert loss.item() == pytest.approx(total, rel=1e-4)
