"""Numbers of training: the first loss, denormal numbers, the type of products, the optimizer."""

import math

import pytest
import torch

from dllm.cpu import instructions
from dllm.drafter.samples import Sample
from dllm.train import optimizer
from dllm.train.optimizer import Muon, orthogonalize, set_learning_rates
from dllm.train.run import DraftLearner, Run
from dllm.train.target import TargetEmbeddingsAndHead
from tests.support.calibrate_cases import new_drafter, small_settings
from tests.support.drafter_pairs import drafter_config

VOCAB, HIDDEN = (drafter_config()[name] for name in ("vocab_size", "hidden_size"))
LAYERS = len(drafter_config()["dflash_config"]["target_layer_ids"])


@pytest.fixture
def samples(tmp_path, monkeypatch):
    """Random texts with random hidden states."""
    draw = torch.Generator().manual_seed(0)
    monkeypatch.setattr(
        Sample, "hidden", lambda one: torch.randn(len(one.tokens), LAYERS * HIDDEN, generator=draw)
    )
    texts = torch.randint(VOCAB, (8, 24), generator=draw).tolist()
    return [Sample(tuple(text), 4, "all", tmp_path) for text in texts]


@pytest.mark.parametrize("norm", [None, 3.0], ids=["no norm", "norm of 3"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_new_drafter_is_as_unsure_as_it_should_be(samples, is_tied, norm):
    """With a tied head the mask's own logit would be about 30 and 90."""
    draw = torch.Generator().manual_seed(1)
    embedding, other = torch.randn(2, VOCAB, HIDDEN, generator=draw) * 0.5
    # Frequent tokens are alike, as in real models, and the mask is not one of them.
    embedding[: VOCAB // 2] += 1
    weight = None if norm is None else torch.full((HIDDEN,), norm)
    head = embedding if is_tied else other
    ends = TargetEmbeddingsAndHead(embedding, head, weight, torch.device("cpu"))
    learner = DraftLearner(small_settings(), new_drafter(), ends, samples, samples)
    with torch.no_grad():
        loss = learner.loss(0).item()
    # Logits with a root mean square of 1 or less cost half a nat at most, if they have nothing to
    # do with the labels.
    assert loss == pytest.approx(math.log(VOCAB) + 0.25, abs=0.25)


def test_denormal_numbers_are_zero_in_a_step_and_nowhere_else(samples):
    ends = TargetEmbeddingsAndHead(*torch.randn(2, VOCAB, HIDDEN), None, torch.device("cpu"))
    learner = DraftLearner(small_settings(steps=1), new_drafter(), ends, samples, samples)
    seen = []

    def tiny() -> float:
        return (torch.tensor(1e-39) * torch.tensor(0.5)).item()

    loss = learner.loss
    learner.loss = lambda step: seen.append(tiny()) or loss(step)
    list(Run(learner, None).run())
    assert seen == [0.0] and tiny() > 0


@pytest.mark.parametrize(
    ("facts", "dtype"),
    [
        ("flags\t\t: fpu avx2 avx512_bf16 amx_tile", torch.bfloat16),
        ("flags\t\t: fpu avx2 amx_bf16", torch.bfloat16),
        ("Features\t: fp asimd bf16", torch.bfloat16),
        ("flags\t\t: fpu avx2 avx512f\nbugs: amx_bf16", torch.float32),
        (None, torch.float32),
    ],
)
def test_products_are_in_bf16_where_the_processor_has_units_for_it(
    tmp_path, monkeypatch, facts, dtype
):
    if facts is not None:
        (tmp_path / "cpuinfo").write_text(facts)
    monkeypatch.setattr(instructions, "FACTS", tmp_path / "cpuinfo")
    instructions.flags.cache_clear()
    try:
        cpu = torch.device("cpu")
        assert optimizer.product_dtype(cpu) == dtype
        assert optimizer.product_dtype(torch.device("cuda")) == torch.bfloat16
        one = torch.eye(3)
        with optimizer.autocast(cpu):
            assert (one @ one).dtype == dtype
        # Five iterations in bf16 end at a number of 8 bits.
        found = orthogonalize(torch.full((3, 3), 0.7) + one)
        assert torch.equal(found.bfloat16().float(), found) == (dtype == torch.bfloat16)
    finally:
        instructions.flags.cache_clear()


@pytest.mark.parametrize("shape", [(8, 20), (20, 8)], ids=["wide", "tall"])
def test_orthogonalize_keeps_singular_vectors(shape):
    """The singular values come near 1 (the iteration overshoots by design)."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
    values = (u.T @ orthogonalize(matrix) @ vt.T).diagonal()
    assert values.min() > 0.6 and values.max() < 1.3


@pytest.mark.parametrize("shape", [(8, 20), (20, 8)], ids=["wide", "tall"])
def test_muon_is_torchs(monkeypatch, shape):
    """Steps with momentum; torch's products are always in bf16."""
    monkeypatch.setattr(optimizer, "product_dtype", lambda device: torch.bfloat16)
    draw = torch.Generator().manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.zeros(shape)) for _ in range(2))
    steps = Muon([ours], 0.02), torch.optim.Muon([theirs], 0.02, weight_decay=0.0)
    for _ in range(3):
        ours.grad = torch.randn(shape, generator=draw)
        theirs.grad = ours.grad.clone()
        for each in steps:
            each.step()
    # They round differently: one part in 256, in each of five iterations.
    assert (ours - theirs).norm() < 0.03 * theirs.norm()


def test_the_learning_rate_rises_stays_and_falls():
    settings = small_settings(steps=1000, warmup_steps=10, decay_from=0.5, final_lr=0.02)
    made = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    for step, factor in ((0, 0.1), (10, 1.0), (500, 1.0), (750, 0.51), (1000, 0.02)):
        set_learning_rates([made], step, settings)
        assert made.param_groups[0]["lr"] == pytest.approx(0.5 * factor)
