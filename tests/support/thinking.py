"""Checkpoints whose tokenizer has tokens that begin and end thoughts, and what budgets ask for."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.support.engine_models import Model

# Tokens that no random model needs, under the names of vLLM's reasoning parser PARSER.
PARSER = "deepseek_r1"
START, END = 7, 8
NAMES = {'"<|image>"': '"<think>"', '"<|image|>"': '"</think>"'}


def with_thoughts(model: Model, folder: Path) -> Model:
    """The model with such a tokenizer, in a folder of its own."""
    path = folder / model.name
    shutil.copytree(model.path, path)
    text = (path / "tokenizer.json").read_text()
    for name, new in NAMES.items():
        assert name in text
        text = text.replace(name, new)
    (path / "tokenizer.json").write_text(text)
    return replace(model, path=path)


def full_thoughts(prompt: Sequence[int], answer: Sequence[int], budget: int) -> list[int]:
    """Where a thought of the answer has as many tokens as its budget, read from left to right.

    Raises:
        AssertionError: a thought goes on there.
    """
    begin, full = None, []
    for place, token in enumerate([*prompt, *answer]):
        if place >= len(prompt) and begin is not None and place - begin >= budget:
            assert token == END, (place - len(prompt), budget, answer)
            full.append(place - len(prompt))
        if token == START:
            begin = place + 1
        elif token == END:
            begin = None
    return full


def ends_of(answer: Sequence[int]) -> list[int]:
    return [place for place, token in enumerate(answer) if token == END]
