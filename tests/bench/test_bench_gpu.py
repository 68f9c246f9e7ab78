"""bench/gpu without a GPU: what a call starts and waits for, its weights, what it brings home."""

import json
import subprocess
import sys
from pathlib import Path
from threading import Barrier
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch
from torch import nn
from vllm import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from bench.context import Row, read_csv
from bench.gpu import __main__ as calls
from bench.gpu import answers
from bench.gpu.__main__ import DRAFTER, EAGER, FULL_ALONE, Answers, Engine, Lease, report
from bench.gpu.engine import PASSES, SHARE, STD, State, fill, turn, write_model
from dllm.settings.vllm_names import cli_args
from tests.support.patience import HANG_S
from tests.support.process import printed_json, run_python


@pytest.fixture
def lease(tmp_path: Path) -> Lease:
    (tmp_path / "out").mkdir()
    return Lease(tmp_path, tmp_path / "out", is_toy=True)


# --- weights --------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))
        self.eighth = nn.Parameter(torch.zeros(64, 64).to(torch.float8_e4m3fn), False)
        self.weight_scale = nn.Parameter(torch.zeros(64, 1), False)
        self.post_attention_layernorm = nn.LayerNorm(64, bias=False)
        self.register_buffer("layer_scalar", torch.zeros(1))
        self.register_buffer("positions", torch.arange(4))
        self.register_buffer("rope", torch.zeros(4, 4), persistent=False)


def test_matrices_are_normal_and_norms_and_scalars_are_one() -> None:
    model = nn.Sequential(Layer(), Layer())
    fill(model)
    first, second = model
    assert abs(float(first.weight.float().std()) / STD - 1) < 0.1
    assert not torch.equal(first.weight, second.weight)
    assert abs(float(first.eighth.float().std()) - 1) < 0.1 and (first.weight_scale == STD).all()
    assert (first.post_attention_layernorm.weight == SHARE).all() and first.layer_scalar == 1
    assert first.positions.tolist() == [0, 1, 2, 3] and not first.rope.any()


@pytest.mark.parametrize("name", ["ours", "built-in"])
def test_with_these_weights_rows_choose_many_experts(name: str) -> None:
    """With vLLM's own dummy weights all rows of the last layer choose the same four."""
    found = printed_json(run_python("-m", "tests.support.experts_probe", name))
    assert found["vllm"] == 4 and found["fill"] > 16


# --- calls ----------------------------------------------------------------------------------------

# An engine of the toy kind that is there at once: NAME.json, and a process that runs or has ended.
STAND_IN = """
import json, pathlib, sys, time
name, folder = sys.argv[1], pathlib.Path(sys.argv[2])
stage = "FAILED in: starting" if name == "broken" else "warm"
state = {"stage": stage, "seconds": {}, "ms": {}, "kernels": {}}
print("INFO dllm: starts", flush=True)
print("INFO more", flush=True)
path = folder / f"{name}.json"
path.with_suffix(".tmp").write_text(json.dumps(state))
path.with_suffix(".tmp").rename(path)
while stage == "warm" and not (folder / "go").exists():
    time.sleep(0.01)
path.with_suffix(".tmp").write_text(json.dumps(state | {"stage": stage.replace("warm", "done")}))
path.with_suffix(".tmp").rename(path)
"""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Processes that stand in for engines; the commands that were started."""
    started: list[list[str]] = []
    start = subprocess.Popen

    def popen(command: list[str], **options: Any) -> Any:
        started.append(command)
        return start([sys.executable, "-c", STAND_IN, *command[3:5]], **options)

    monkeypatch.setattr(calls.subprocess, "Popen", popen)
    return started


def test_an_engine_outlives_a_call_and_is_measured_once(
    lease: Lease, stand_in: list[list[str]], tmp_path: Path
) -> None:
    one, broken = Engine("ours"), Engine("broken")
    lease.start(one, broken)
    lease.wait(HANG_S, calls.READY, one, broken)
    process = psutil.Process(int((tmp_path / "ours.pid").read_text()))
    assert process.is_running() and not (tmp_path / "go").exists()
    again = Lease(tmp_path, lease.out, is_toy=True)  # of the next call
    again.start(one)
    assert len(stand_in) == 2, "it runs"
    again.measure(HANG_S, one)
    again.start(one)
    assert len(stand_in) == 2, "it is done"
    again.finish()
    said = read(lease.out)
    assert again.is_wrong and "== ours: done" in said and "dllm: starts" in said
    assert "INFO more" not in said
    assert (lease.out / "failed.log").read_text().startswith("== broken")


def read(out: Path) -> str:
    return (out / "report.txt").read_text()


def test_what_is_not_there_in_time_is_named(
    lease: Lease, stand_in: list[list[str]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    one = Engine("ours")
    lease.start(one)
    lease.wait(HANG_S, calls.READY, one)
    lease.wait(0.0, calls.DONE, one)
    assert "not done: ours" in "".join(capsys.readouterr())
    lease.measure(HANG_S, one)


def test_an_engine_that_a_signal_ended_has_failed(
    lease: Lease, stand_in: list[list[str]], tmp_path: Path
) -> None:
    one = Engine("ours")
    lease.start(one)
    lease.wait(HANG_S, calls.READY, one)
    process = psutil.Process(int((tmp_path / "ours.pid").read_text()))
    process.kill()
    lease.wait(HANG_S, calls.DONE, one)
    lease.finish()
    assert lease.is_wrong and "== ours: warm" in read(lease.out)
    assert (lease.out / "failed.log").read_text().startswith("== ours")


@pytest.mark.parametrize(
    ("wrong", "asked"),
    [
        ([], ["compiled", "drafting"]),
        (["drafting"], ["compiled", "drafting"]),
        (["compiled"], ["compiled", "drafting", "full-graphs"]),
        (["compiled", "full-graphs"], ["compiled", "drafting", "full-graphs", "eager"]),
    ],
)
def test_wrong_answers_of_canvases_are_asked_again_with_fewer_graphs(
    lease: Lease, monkeypatch: pytest.MonkeyPatch, wrong: list[str], asked: list[str]
) -> None:
    found: list[str] = []

    def answered(self: Lease, seconds: float, *given: Answers) -> list[bool]:
        found.extend(one.name for one in given)
        return [one.name not in wrong for one in given]

    for name in ("start", "wait", "measure"):
        monkeypatch.setattr(Lease, name, lambda *given: None)
    monkeypatch.setattr(Lease, "ask", answered)
    calls.first_call(lease)
    assert found == asked and lease.is_wrong is bool(wrong)


def test_answers_start_at_once_and_are_written(
    lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = Barrier(2)

    def found(servers: list[str], flags: list[str], within: float, _: object) -> list[Row]:
        together.wait(HANG_S)
        assert (flags, within) == ([EAGER], 5 * 200)
        return [
            {"server": servers[0], "right": 9, "asked": 10, "log": "a" * ("dllm" in servers[0])}
        ]

    monkeypatch.setattr(answers, "answers", found)
    both = Answers("one", DRAFTER, calls.DRAFTING), Answers("other", "", calls.MODELS)
    assert lease.ask(200, *both) == [True, False]
    (row,) = read_csv(lease.out / "other.csv")
    assert (row["server"], row["log"]) == (calls.MODELS[0], "a")


def test_what_has_vllms_own_attention_does_not_get_flash_attention() -> None:
    """vLLM would take it without its libraries, and end in the first pass."""
    own = {name for name, flags in answers.SERVERS.items() if flags[1:]}
    assert own == set(calls.DRAFTING) and not own & {*calls.MODELS}


def test_without_a_gpu_it_has_to_be_a_toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        calls.main(["--out", str(tmp_path)])
    assert ended.value.code == 2


@pytest.mark.parametrize("flags", ["", DRAFTER, FULL_ALONE, EAGER])
def test_flags_of_answers_are_those_of_a_server(flags: str) -> None:
    """On a GPU there is no second try."""
    arguments = [*flags.split(), "--within", "195", "--servers", *calls.MODELS, *calls.DRAFTING]
    options, more = answers.parse(arguments)
    parser = cli_args.make_arg_parser(FlexibleArgumentParser())
    given = parser.parse_args([*answers.FLAGS, *more])
    assert given.gpu_memory_utilization * len(options.servers) < 1
    assert (given.compilation_config.mode == 0) is (flags == FULL_ALONE)


def test_arguments_of_engines_are_vllms(monkeypatch: pytest.MonkeyPatch, lease: Lease) -> None:
    engines: list[Engine] = []
    monkeypatch.setattr(Lease, "start", lambda self, *given: engines.extend(given))
    for name in ("wait", "measure"):
        monkeypatch.setattr(Lease, name, lambda *given: None)
    monkeypatch.setattr(Lease, "ask", lambda self, seconds, *given: [True for _ in given])
    for call in (calls.first_call, calls.second_call, calls.third_call):
        call(lease)
    assert len({one.name for one in engines}) == len(engines) == 4
    fields = EngineArgs.__dataclass_fields__
    assert all(name in fields for one in engines for name in one.llm)


# --- what is measured -----------------------------------------------------------------------------


def test_a_model_without_weights_takes_fixed_steps(tmp_path: Path) -> None:
    canvas_length = write_model(tmp_path / "model", is_toy=False)
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert canvas_length == config["canvas_length"] == 256
    generation = json.loads((tmp_path / "model/generation_config.json").read_text())
    assert (generation["max_denoising_steps"], generation["confidence_threshold"]) == (16, 0.0)
    assert not list((tmp_path / "model").glob("*.safetensors"))


def test_a_turn_ends_with_the_process_that_has_it(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from bench.gpu.engine import turn\n"
        "with turn(Path(sys.argv[1])):\n    print('in', flush=True); time.sleep(600)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        other.kill()
        with turn(tmp_path):
            assert other.wait() != 0


def test_the_report_has_ms_a_pass_and_kernels(tmp_path: Path) -> None:
    state = State("ours", tmp_path)
    state.values["ms"] = {"1": [170.0, 171.0, 999.0]}
    state.values["kernels"] = {"1": [[PASSES * 0.5, 17, "_tile_kernel_0d1d"]]}
    state.reach("done")
    text = report({"ours": json.loads((tmp_path / "ours.json").read_text()) | {"log": []}})
    assert "1 at once:  10.059 ms a pass" in text and "0.500 _tile_kernel_0d1d" in text
