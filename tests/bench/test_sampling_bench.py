"""bench/sampling_step.py on tiny shapes: it runs, it compares, and it times nothing wrong."""

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from bench import sampling_step
from bench.sampling_step import Outcome, Shape, make_embeddings, make_logits

ROOT = Path(__file__).resolve().parents[2]
SMOKE = ["--smoke", "--eager", "--profiles", "half"]


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_smoke_compares_both_with_the_built_in(tmp_path: Path) -> None:
    assert sampling_step.main([*SMOKE, "--results", str(tmp_path)]) == 0
    lines = read(tmp_path / "sampling_step_cpu.csv")
    assert [line["implementation"] for line in lines] == ["ours, sparse", "ours, exact", "built-in"]
    for line in lines:
        assert float(line["p50_ms"]) > 0 and float(line["faster_than_builtin"]) > 0
        assert line["commit"] and line["machine"] and "torch" in line["versions"]


def test_a_wrong_result_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(shape: Shape, weight: torch.Tensor):
        right = prepare_builtin(shape, weight)
        return lambda logits: right(logits)._replace(entropy=torch.zeros(len(logits)))

    prepare_builtin = sampling_step.prepare_builtin
    monkeypatch.setattr(sampling_step, "prepare_builtin", wrong)
    assert sampling_step.main([*SMOKE, "--results", str(tmp_path)]) == 1
    assert not list(tmp_path.iterdir())


def test_disagreement_names_what_differs() -> None:
    weight = torch.eye(4)
    same = Outcome(torch.tensor([1]), torch.tensor([0.5]), weight[1:2])
    assert sampling_step.disagreement(same, same, weight) == ""
    for name, value, word in (
        ("argmax", torch.tensor([2]), "argmax"),
        ("entropy", torch.tensor([0.6]), "entropies"),
        ("entropy", torch.tensor([float("nan")]), "entropies"),
        ("soft", weight[2:3], "soft embeddings"),
    ):
        changed = same._replace(**{name: value})
        assert word in sampling_step.disagreement(changed, same, weight)


def test_an_unknown_profile_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sampling_step.parse(["--profiles", "open,closed"])
    assert "'closed'; allowed: open, half, settled" in capsys.readouterr().err


@pytest.mark.parametrize("profile", sampling_step.PROFILES)
def test_profiles_differ_in_how_sure_a_row_is(profile: str) -> None:
    logits = make_logits(Shape(2, 8, 20_000, 8, profile), "cpu")
    is_sure = torch.softmax(logits / 0.6, -1).amax(-1) > 0.999
    assert is_sure.sum() == {"open": 0, "half": 8, "settled": 16}[profile]


class Calls(TorchFunctionMode):
    """Every function of torch that is called, and the device that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, Any]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        self.made.append((function.__name__, (kwargs or {}).get("device")))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_rows", [4, 64])
def test_data_are_made_where_they_are_used(num_rows: int) -> None:
    """On a GPU, and not row by row: its seconds are for measurements."""
    with Calls() as calls:
        make_logits(Shape(2, num_rows // 2, 640, 8, "half"), "cpu")
        make_embeddings.__wrapped__(640, 8, "cpu")
    factories = ("empty", "randint", "randn")
    assert {device for name, device in calls.made if name in factories} == {"cpu"}
    assert not {name for name, _ in calls.made} & {"to", "cuda", "tensor"}
    assert len(calls.made) < 20


def test_embeddings_are_made_once(tmp_path: Path) -> None:
    make_embeddings.cache_clear()
    options = [*SMOKE[:2], "--profiles", "open,settled", "--results", str(tmp_path)]
    assert sampling_step.main(options) == 0
    assert make_embeddings.cache_info().misses == 1 and make_embeddings.cache_info().hits == 1


def test_it_needs_no_vllm() -> None:
    program = (
        "import sys; sys.modules['vllm'] = None\n"
        "from bench import sampling_step\n"
        "sys.exit(sampling_step.main(sys.argv[1:]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, *SMOKE, "--results", "/dev/null/none"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert "no built-in to compare with" in result.stderr, result.stderr[-2000:]
    assert "ours, sparse" in result.stdout and "built-in" not in result.stdout
