"""bench/roofline.py counts what is published of the released model."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench import roofline
from bench.context import read_csv
from bench.kernels import CANVAS, FULL, SLIDING, SYMMETRIC, Layer
from bench.roofline import CANVAS_LENGTH, H200, Pass, Work, released_config
from bench.roofline_attention import Expected, expected
from dllm.attention.tuning import tile_config

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
    assert SLIDING.window == TEXT["sliding_window"]
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
    total = sum(max(work.times_ms(H200)) for work in roofline.components(TEXT, ONE))
    assert float(row["floor_ms"]) == pytest.approx(total, abs=0.01)
    assert float(row["tokens_per_s"]) == pytest.approx(1e3 * 256 / (16 * total), rel=1e-3)


def attention(layer: Layer, batch: int, context: int, parts_of: int | None = None) -> Expected:
    tiles = tile_config(layer.head_size, 2)
    if parts_of is not None:
        tiles = replace(tiles, min_keys_per_split=parts_of, min_keys_in_window=parts_of)
    return expected(layer, batch, context, CANVAS, (H200.copy, H200.bf16), tiles)


def test_programs_of_attention_are_those_of_its_plan() -> None:
    """A tile has 128 pairs of a row and a head; two programs share the columns of heads of 512."""
    assert attention(SYMMETRIC, 1, 1024)[:3] == (2, 4 * 8 * 2, 1)
    assert attention(FULL, 1, 1024)[:3] == (1, 16 * 2 * 2, 1)
    assert attention(FULL, 1, 8192)[:3] == (4, 16 * 2 * 2 * 4, 2)
    assert attention(FULL, 32, 1024)[:3] == (1, 32 * 64, 16)


def test_floors_of_attention_are_those_of_the_pass() -> None:
    layers = TEXT["layer_types"].count
    for name, layer, count in (
        ("sliding: attention", SYMMETRIC, layers("sliding_attention")),
        ("full: attention", FULL, layers("full_attention")),
    ):
        floor = max(by_name(ONE)[name].times_ms(H200)) / count
        assert attention(layer, 1, 1024).floor_us == pytest.approx(1e3 * floor, rel=0.01)


def test_finer_parts_help_one_canvas_and_cost_many() -> None:
    for layer, parts_of in ((SYMMETRIC, 320), (FULL, 640)):
        planned, finer = (
            [attention(layer, batch, 1024, size).us for batch in (1, 32)]
            for size in (None, parts_of)
        )
        assert finer[0] < 0.7 * planned[0] and finer[1] > 1.1 * planned[1]
    # Three parts are two rounds on 132 multiprocessors, two parts one.
    assert attention(FULL, 1, 1024, 512).us > attention(FULL, 1, 1024, 640).us
