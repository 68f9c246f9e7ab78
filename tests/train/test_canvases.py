"""Canvases of the diffusion model in training: what is noised, seen and weighed."""

import pytest
import torch
from transformers import DynamicCache

from dllm.tasks.suite import question
from dllm.train.lm.diffusion import Diffusion, canvas_loss
from dllm.train.lm.objective import EOS, Encoded, pad_right
from dllm.train.lm.settings import ModelShape, TrainSettings

TINY = {"hidden_size": 32, "num_layers": 2, "intermediate_size": 32, "moe_intermediate_size": 16}


def test_some_canvases_are_noise_where_a_decision_reads():
    families = ("choice", "wide")
    shape = ModelShape(**TINY)
    settings = TrainSettings("diffusion", families=families, read_shaped=1.0, model=shape)
    objective = Diffusion(settings)
    asked = [question(name, "train", index) for name in families for index in range(40)]
    encoded = Encoded.of(objective.tokenizer, asked)
    random = torch.Generator().manual_seed(0)
    canvases = objective._draw_canvases(encoded, random)
    for row, owner in enumerate(canvases.sequence.tolist()):
        num_label = len(encoded.answers[owner]) - 1
        changed = (canvases.noised[row] != canvases.clean[row]).nonzero().flatten().tolist()
        assert all(place < num_label + 2 for place in changed)
    # Noise is a token of its own by chance once in 832 draws.
    is_changed = canvases.noised[:, 0] != canvases.clean[:, 0]
    assert is_changed.float().mean() > 0.9


def test_canvas_sees_what_the_reference_shows_it():
    """Training's masks give the logits of the model's own masks, behind a context of any length."""
    settings = TrainSettings("diffusion", model=ModelShape(**TINY, sliding_window=16))
    objective = Diffusion(settings)
    model = objective.build_model().eval()
    contexts = [list(range(10, 10 + length)) for length in (3, 15, 16, 40)]
    canvas = torch.randint(512, (len(contexts), 32), generator=torch.Generator().manual_seed(0))
    cache = DynamicCache()
    with torch.no_grad():
        model.model.encoder(input_ids=pad_right(contexts), past_key_values=cache)
        start = torch.tensor([len(context) for context in contexts])
        ours = objective._decode(model, cache, start, canvas)
        for row, context in enumerate(contexts):
            theirs = model(
                input_ids=torch.tensor([context]),
                past_key_values=DynamicCache(config=model.config.get_text_config(decoder=True)),
                decoder_input_ids=canvas[row : row + 1],
            ).logits[0]
            # fp32, other shapes of the same sums
            torch.testing.assert_close(ours[row], theirs, rtol=1e-4, atol=1e-4)


def test_canvases_are_blocks_of_the_answer():
    """Every block occurs, starts where the server's would, and is filled with end-of-sequence."""
    settings = TrainSettings("diffusion", canvases=40)
    objective = Diffusion(settings)
    encoded = Encoded.of(objective.tokenizer, [question("report", "train", 1)])
    drawn = objective._draw_canvases(encoded, torch.Generator().manual_seed(0))
    prompt_len, answer = len(encoded.prompts[0]), encoded.answers[0]
    blocks = sorted(set(((drawn.start - prompt_len) // 32).tolist()))
    assert blocks == list(range(-(-len(answer) // 32))) and len(blocks) > 1
    for start, clean in zip(drawn.start.tolist(), drawn.clean.tolist(), strict=True):
        tokens = answer[start - prompt_len :][:32]
        assert clean == tokens + [EOS] * (32 - len(tokens))
    is_changed = (drawn.noised != drawn.clean).float().mean(dim=1)
    assert is_changed.max() > 0.9 and is_changed.min() < 0.5


def test_blocks_count_the_same_however_short_the_answer():
    """An unknown token costs its share of its own answer, and behind the end a tenth of that."""
    logits = torch.zeros(2, 32, 512)
    clean = torch.full((2, 32), EOS)
    clean[0, 0], clean[1] = 100, 100
    logits.scatter_(2, clean[..., None], 50.0)  # certain, and right
    assert canvas_loss(logits, clean).item() == pytest.approx(0, abs=1e-6)
    short, long, tail = (logits.clone() for _ in range(3))
    short[0, 0], long[1, :16], tail[0, 2] = 0, 0, 0  # no idea: ln 512 nats
    nothing = torch.log(torch.tensor(512.0)).item()
    assert canvas_loss(short, clean).item() == pytest.approx(nothing / (2 + 30 * 0.1) / 2)
    assert canvas_loss(long, clean).item() == pytest.approx(nothing * 16 / 32 / 2)
    assert canvas_loss(tail, clean).item() == pytest.approx(nothing * 0.1 / (2 + 30 * 0.1) / 2)
