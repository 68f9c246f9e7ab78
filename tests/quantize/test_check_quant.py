"""``dllm check-quant``: silent about good checkpoints, and about each damage one clear sentence."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dllm.cli import main as dllm
from dllm.quant.checks import implausible_scale, scale_problem
from dllm.quantize.checkpoint import Checkpoint
from dllm.quantize.verify import Report, verify
from tests.support.edited import Edit
from tests.support.process import run_python
from tests.support.quant_checkpoints import ENCODER_ONLY, OURS, REDHAT, Layout, write_quantized

SCHEMES = ("fp8-dynamic", "int8-dynamic", "nvfp4", "nvfp4a16")
LAYER = "model.decoder.layers.0."
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def source(checkpoint: Callable[..., Path]) -> Path:
    """One layer, whose scalar is the same for both halves: layouts with one copy have one."""
    return checkpoint(
        layer_types=["full_attention"], encoder_scalars=[0.75], decoder_scalars=[0.75]
    )


@pytest.fixture
def check(source: Path, tmp_path: Path) -> Callable[..., Report]:
    """Quantizes the source by hand, damages it, and checks it against the source."""

    def run(scheme: str, edit: Edit | None = None, layout: Layout = OURS) -> Report:
        path = write_quantized(source, tmp_path / "quantized", scheme, layout, edit=edit)
        return verify(Checkpoint(path), Checkpoint(source), lambda: None)

    return run


@pytest.mark.parametrize("layout", [OURS, REDHAT, ENCODER_ONLY])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_good_checkpoint_has_no_problem_in_any_layout(
    check: Callable[..., Report], scheme: str, layout: Layout
) -> None:
    report = check(scheme, layout=layout)
    assert report.problems == []
    assert report.schemes == {scheme: 3 + 3 + 4 * 3}  # no v_proj; mlp; four experts
    assert set(report.outliers) == set()
    low, high = {"fp8": (0.02, 0.03), "int": (0.003, 0.01), "nvf": (0.08, 0.11)}[scheme[:3]]
    assert low < min(report.errors.values()) <= max(report.errors.values()) < high
    assert report.original_bytes is not None
    assert 0 < report.num_bytes < report.original_bytes


def put(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    """An edit that replaces one tensor of layer 0."""
    return lambda tensors: tensors.update(
        {LAYER + name: change(tensors[LAYER + name]).contiguous()}
    )


def first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """The tensor with another first element."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.float().reshape(-1)
        changed[0] = value
        return changed.reshape(tensor.shape).to(tensor.dtype)

    return change


FP8, INT8, NVFP4 = "fp8-dynamic", "int8-dynamic", "nvfp4"
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("scheme", "name", "change", "message"),
    [
        (FP8, "mlp.up_proj.weight_scale", first(NAN), "1 of 128 scales are NaN"),
        (FP8, "mlp.up_proj.weight_scale", first(INF), "1 of 128 scales are infinite"),
        (INT8, "mlp.up_proj.weight_scale", first(0.0), "1 of 128 scales are zero"),
        (FP8, "mlp.up_proj.weight_scale", first(-0.1), "1 of 128 scales are negative"),
        (FP8, "mlp.up_proj.weight_scale", first(1e12), "plausible: 1e-09 to 1e+09"),
        (NVFP4, "mlp.up_proj.weight_scale", first(NAN), "1 of 1024 scales are NaN"),
        (NVFP4, "mlp.up_proj.weight_scale", torch.zeros_like, "1024 of 1024 scales are zero"),
        (NVFP4, "mlp.down_proj.weight_global_scale", first(1.0), "calibration has never seen"),
        (NVFP4, "mlp.down_proj.input_global_scale", first(1.0), "calibration has never seen"),
        (NVFP4, "mlp.down_proj.input_global_scale", first(INF), "1 of 1 scales are infinite"),
        (NVFP4, "mlp.up_proj.input_global_scale", first(7.0), "vLLM takes one for all"),
        (NVFP4, "self_attn.k_proj.weight_global_scale", lambda t: t / 1.5, "takes one for all"),
        (FP8, "mlp.up_proj.weight_scale", lambda t: t[:64], "has shape [64, 1]; expected [128, 1]"),
        (NVFP4, "mlp.up_proj.weight_scale", lambda t: t[:, ::2], "[128, 4]; expected [128, 8]"),
        (NVFP4, "mlp.up_proj.weight_packed", lambda t: t[:, :8], "expected [128, 1]"),
        (FP8, "mlp.up_proj.weight", lambda t: t[:64], "has shape [128, 1]; expected [64, 1]"),
        (FP8, "experts.1.up_proj.weight_scale", lambda t: 2 * t, "away from the original"),
        (NVFP4, "experts.1.up_proj.weight_packed", lambda t: t >> 4 | t << 4, "away from"),
        (FP8, "router.proj.weight", first(3.0), "and not what the original has"),
        (FP8, "input_layernorm.weight", lambda t: t[:64], "has shape [64]; expected [128]"),
    ],
)  # fmt: skip
def test_a_damaged_tensor_is_named_with_what_is_wrong(
    check: Callable[..., Report],
    scheme: str,
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    message: str,
) -> None:
    problems = check(scheme, put(name, change)).problems
    said = [problem for problem in problems if message in problem]
    assert said and LAYER + name.rpartition(".")[0] in said[0], problems


@pytest.mark.parametrize(
    ("scheme", "missing", "message"),
    [
        (NVFP4, "mlp.up_proj.input_global_scale", "up_proj is nvfp4 and misses input_global_scale"),
        (NVFP4, "experts.3.up_proj.weight_packed", "3.up_proj is nvfp4 and misses weight_packed"),
        (FP8, "self_attn.o_proj.weight_scale", "o_proj is fp8-dynamic and misses weight_scale"),
        (FP8, "router.scale", "layers.0.router.scale is missing"),
        (FP8, "post_feedforward_layernorm_1.weight", "layernorm_1.weight is missing"),
    ],
)
def test_a_missing_tensor_is_named(
    check: Callable[..., Report], scheme: str, missing: str, message: str
) -> None:
    problems = check(scheme, lambda tensors: tensors.pop(LAYER + missing)).problems
    assert any(message in problem for problem in problems), problems


def test_a_second_copy_is_a_problem_even_if_it_agrees(check: Callable[..., Report]) -> None:
    def copy(tensors: Tensors) -> None:
        twin = "model.encoder.language_model.layers.0.mlp.up_proj.weight_packed"
        tensors[twin] = tensors[f"{LAYER}mlp.up_proj.weight_packed"].clone()

    problems = check("nvfp4", copy).problems
    assert len(problems) == 1 and "two copies of one weight" in problems[0]
    assert "model.encoder.language_model.layers.0.mlp.up_proj.weight_packed" in problems[0]


def test_a_layout_with_one_layer_scalar_loses_one_of_two(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    two = checkpoint(layer_types=["full_attention"], encoder_scalars=[0.75], decoder_scalars=[0.8])
    path = write_quantized(two, tmp_path / "quantized", "fp8-dynamic", ENCODER_ONLY)
    problems = verify(Checkpoint(path), Checkpoint(two), lambda: None).problems
    assert len(problems) == 1 and "_scalars (layers.*.layer_scalar) are not" in problems[0]


def test_an_error_larger_than_rounding_is_an_outlier(check: Callable[..., Report]) -> None:
    """A scale that is 5% off: twice FP8's own error, and no proof of other weights."""
    report = check("fp8-dynamic", put("mlp.up_proj.weight_scale", lambda t: 1.05 * t))
    assert report.problems == []
    assert list(report.outliers) == [f"{LAYER}mlp.up_proj"]


def test_what_nothing_asks_for_is_noted(check: Callable[..., Report]) -> None:
    zero_point = {f"{LAYER}mlp.up_proj.weight_zero_point": torch.zeros(128, 1)}
    report = check("fp8-dynamic", lambda tensors: tensors.update(zero_point))
    assert report.problems == []
    assert report.notes == [f"1 unknown tensors: {LAYER}mlp.up_proj.weight_zero_point"]


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    status = dllm(["check-quant", *map(str, argv)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_command_says_it_in_words_in_json_and_by_its_status(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write_quantized(source, tmp_path / "good", "nvfp4")
    status, out, _ = run(capsys, good, "--against", source, "--json", tmp_path / "found.json")
    assert status == 0 and out.endswith("no problem found\n")
    assert "18 layers nvfp4" in out and "relative error of weights: median 9." in out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ok"] and len(found["errors"]) == 18 and found["problems"] == []

    scale = put("mlp.up_proj.weight_scale", first(float("nan")))
    bad = write_quantized(source, tmp_path / "bad", "fp8-dynamic", edit=scale)
    status, out, _ = run(capsys, bad)
    assert status == 1 and out.endswith("not fit to be served\n")
    assert f"PROBLEM: {LAYER}mlp.up_proj.weight_scale: 1 of 128 scales are NaN" in out
    status, out, _ = run(capsys, bad, "--json", "-")
    assert status == 1 and not json.loads(out)["ok"] and json.loads(out)["original_bytes"] is None


def test_neither_checking_nor_quantizing_imports_vllm() -> None:
    code = (
        "import sys, dllm.quantize.check_command, dllm.quantize.command, dllm.quantize.make; "
        "assert not {'vllm', 'transformers'} & set(sys.modules), 'imported'"
    )
    run_python("-c", code)


def test_what_is_no_quantized_checkpoint_is_refused_in_one_line(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantized = write_quantized(source, tmp_path / "quantized", "fp8-dynamic")
    config = json.loads((quantized / "config.json").read_text())
    for number, (edit, message) in enumerate(
        {
            "no quantization_config": (lambda c: c.pop("quantization_config"), "is not quantized"),
            "another method": (
                lambda c: c["quantization_config"].update(quant_method="gptq"),
                "quant_method = 'gptq'",
            ),
            "another group size": (
                lambda c: c["quantization_config"]["config_groups"]["group_0"]["weights"].update(
                    strategy="group", group_size=32
                ),
                "supported: fp8-dynamic",
            ),
        }.values()
    ):
        path = shutil.copytree(quantized, tmp_path / str(number))
        changed = json.loads(json.dumps(config))
        edit(changed)
        (path / "config.json").write_text(json.dumps(changed))
        status, out, err = run(capsys, path)
        assert (status, out) == (1, "") and message in err, err
        assert err.count("\n") == 1
    status, _, err = run(capsys, quantized, "--against", quantized)
    assert status == 1 and "is quantized already" in err


def test_a_companion_that_the_original_has_may_not_be_missing(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_quantized(source, tmp_path / "quantized", "fp8-dynamic")
    (path / "chat_template.jinja").unlink()
    status, out, _ = run(capsys, path, "--against", source)
    assert status == 1 and "chat_template.jinja is missing; the original has it" in out


def test_a_tensor_that_the_original_has_may_not_be_missing(source: Path, tmp_path: Path) -> None:
    """Of the vision tower, too: the text model alone would not miss it."""
    name = "model.encoder.embed_vision.embedding_projection.weight"
    path = write_quantized(
        source, tmp_path / "quantized", "fp8-dynamic", edit=lambda tensors: tensors.pop(name)
    )
    report = verify(Checkpoint(path), Checkpoint(source), lambda: None)
    assert report.problems == [f"the original has {name}, and this has not"]
    assert verify(Checkpoint(path), None, lambda: None).problems == []


@pytest.mark.parametrize(
    ("scales", "problem"),
    [
        ([0.0, 1.0], None),  # a group of tiny weights
        ([0.0, 0.0], "2 of 2 scales are zero"),
        ([0.0, float("nan")], "1 of 2 scales are NaN"),
    ],
)
def test_a_group_scale_may_be_zero_unless_all_are(scales: list[float], problem: str | None) -> None:
    found = scale_problem("x.weight_scale", torch.tensor(scales).to(torch.float8_e4m3fn))
    assert found == (problem and f"x.weight_scale: {problem}")


@given(scale=st.floats(min_value=2**-9, max_value=448))
def test_every_positive_group_scale_is_plausible(scale: float) -> None:
    value = torch.tensor([scale]).to(torch.float8_e4m3fn)
    assert scale_problem("x.weight_scale", value) is None
    assert implausible_scale("x.weight_scale", value) is None
