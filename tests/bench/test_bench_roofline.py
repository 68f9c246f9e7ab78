"""bench/roofline.py counts what is published of the released model."""

from pathlib import Path

import pytest

from bench import roofline
from bench.context import read_csv
from bench.kernels import CANVAS, FULL, SLIDING
from bench.roofline import CANVAS_LENGTH, Pass, Work, released_config

TEXT = released_config()["text_config"]
ONE = Pass("fp8", batch=1, context=1024, canvas=256)


def by_name(one: Pass) -> dict[str, Work]:
    return {work.component: work for work in roofline.components(TEXT, one)}


def num_parameters(text: dict, *, active: bool = False) -> int:
    """Parameters of the text model without norms; ``active``: those that one token uses.

    They are the weights that a bf16 pass reads, so counted from what `roofline.components` counts.
    """
    one = Pass("bf16", 1, 0, 1)
    experts = 3 * text["hidden_size"] * text["moe_intermediate_size"] * len(text["layer_types"])
    used = text["top_k_experts"] if active else text["num_experts"]
    total = used * experts + text["vocab_size"] * text["hidden_size"]
    for work in roofline.components(text, one):
        is_weights = work.component in ("self-conditioning", "dense MLP", "router")
        if is_weights or work.component.endswith("projections"):
            total += int(work.flops / 2)  # a product of one row does two operations a weight
    return total


def test_parameters_are_those_that_are_published() -> None:
    assert num_parameters(TEXT) / 1e9 == pytest.approx(25.2, abs=0.1)
    assert num_parameters(TEXT, active=True) / 1e9 == pytest.approx(3.8, abs=0.1)


def test_the_attention_bench_has_the_same_layers() -> None:
    assert (SLIDING.num_heads, SLIDING.num_kv_heads, SLIDING.head_size) == (16, 8, 256)
    assert (FULL.num_heads, FULL.num_kv_heads, FULL.head_size) == (16, 2, 512)
    assert TEXT["num_global_key_value_heads"] == FULL.num_kv_heads
    assert (TEXT["head_dim"], TEXT["global_head_dim"]) == (SLIDING.head_size, FULL.head_size)
    assert SLIDING.mask.window == TEXT["sliding_window"]
    assert CANVAS == CANVAS_LENGTH


def test_the_head_of_a_canvas_is_378_gflop() -> None:
    assert by_name(ONE)["head"].flops == pytest.approx(378e9, rel=0.01)


def test_the_floor_of_a_pass_is_the_sum_of_its_components(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--weights", "fp8", "--batch", "1", "--results", str(tmp_path)]
    assert roofline.main(arguments) == 0
    assert "experts" in capsys.readouterr().out
    (row,) = read_csv(tmp_path / "roofline.csv")
    total = sum(max(work.times_ms()) for work in roofline.components(TEXT, ONE))
    assert float(row["floor_ms"]) == pytest.approx(total, abs=0.01)
    assert float(row["tokens_per_s"]) == pytest.approx(1e3 * 256 / (16 * total), rel=1e-3)
