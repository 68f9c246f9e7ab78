"""bench/gpu.py without a GPU: what is run, what is not and why, and how a part is ended."""

import functools
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import answers, gpu, profile_step, serve
from bench.context import read_csv
from bench.gpu import CALL_S, CALLS, PARTS, SETTLE_S, Part, write_without_weights
from bench.roofline import released_config
from bench.toys.tiny import tiny_config
from dllm.engine.loop import bound_s
from dllm.settings.server import PluginOptions
from tests.support.patience import HANG_S


@pytest.mark.parametrize("call", CALLS)
def test_a_call_fits_into_its_time(call: int) -> None:
    mine = [part for part in PARTS if part.call == call]
    assert sum(part.budget_s + SETTLE_S for part in mine) < CALL_S


def test_without_a_gpu_it_says_what_was_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--out", str(tmp_path)]) == 0
    outcome = {row["part"]: row["outcome"] for row in read_csv(tmp_path / "gpu_parts.csv")}
    assert set(outcome.values()) == {"NOT RUN: no GPU"} and len(outcome) == len(PARTS)


STARTS_A_SERVER = """
import os, signal, subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

worker = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
server = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {worker!r}])"
process = subprocess.Popen(
    [sys.executable, "-c", server], start_new_session=True, stdout=subprocess.PIPE, text=True
)
ids = [process.pid, int(process.stdout.readline())]
Path(__file__).with_name("ids").write_text(" ".join(map(str, ids)))
"""
ENDS = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "hung in a thread pool": """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
with ThreadPoolExecutor() as pool:
    Path(__file__).with_name("hangs").touch()
    pool.submit(time.sleep, 600).result()
""",
    "ended": "os._exit(0)",
}


class Hung(subprocess.Popen):
    """A process whose time is over once a file says that it hangs."""

    def __init__(self, file: Path, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.file = file

    def wait(self, timeout: float | None = None) -> int:
        while timeout is not None and not self.file.exists():
            assert self.poll() is None
            time.sleep(0.01)
        return super().wait(0 if timeout is not None else None)


@pytest.mark.parametrize("end", ENDS)
def test_a_part_ends_with_its_servers(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They and their workers are in other sessions than the part."""
    monkeypatch.setattr(gpu, "SETTLE_S", 1.0)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "part.py").write_text(STARTS_A_SERVER + ENDS[end])
    mine = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    expected = {"killed": "FAILED, exit code -9", "ended": "ran, "}.get(end, "stopped after 8 s")
    if expected.startswith("stopped"):
        monkeypatch.setattr(gpu.subprocess, "Popen", functools.partial(Hung, tmp_path / "hangs"))
    how = gpu.run(["part"], 8.0 if expected.startswith("stopped") else HANG_S)
    monkeypatch.undo()
    assert how.startswith(expected)
    for process_id in (tmp_path / "ids").read_text().split():
        assert not Path("/proc", process_id).exists()
    assert mine.poll() is None  # was there before
    mine.communicate(b"\n")


def test_a_failure_is_the_exit_code_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Part("whole", 1, 60, "bench.roofline")
    broken = Part("broken", 1, 60, "bench.roofline --batch none")
    monkeypatch.setattr(gpu, "PARTS", [broken, whole])
    assert gpu.main(["--toy", "--out", str(tmp_path)]) == 1
    first, second = read_csv(tmp_path / "gpu_parts.csv")
    assert first["outcome"].startswith("FAILED, exit code 2")
    assert second["outcome"].startswith("ran,")
    assert (tmp_path / "whole" / "roofline.csv").exists()


@pytest.mark.parametrize("is_toy", [False, True], ids=["real", "toy"])
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_the_commands_of_the_parts_are_understood(part: Part, is_toy: bool, tmp_path: Path) -> None:
    """On a GPU there is no second try."""
    models = tmp_path / "models"
    if part.weights:
        config = tiny_config() if is_toy else released_config()
        write_without_weights(models / part.weights, config, is_fp8=part.weights == "fp8")
    module, *arguments = part.arguments(tmp_path, models, is_toy=is_toy)
    if module == "bench.serve":
        options = serve.parse(arguments)
        assert options.contestants[0].kind == "ours"
        if part.weights:
            assert "built-in" in [one.kind for one in options.contestants]
            loads = serve.workloads(options, *options.schedule)
            assert loads and all(load.steps_per_block == 16 for load in loads)
    elif module == "bench.profile_step":
        options = profile_step.parse(arguments)
        assert options.llm["load_format"] == "dummy" and options.server == ["ours", "built-in"]
    elif module == "bench.answers":
        options, _ = answers.parse(arguments)
    else:  # these run without a GPU, too
        assert module in ("bench.kernels", "pytest")
        return
    assert options.results == tmp_path / part.name


@pytest.mark.parametrize("part", [one for one in PARTS if one.command.startswith("bench.answers")])
def test_further_flags_of_answers_are_those_of_a_server(part: Part, tmp_path: Path) -> None:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from dllm.settings.vllm_names import cli_args

    _, flags = answers.parse(part.arguments(tmp_path, tmp_path, is_toy=False)[1:])
    given = cli_args.make_arg_parser(FlexibleArgumentParser()).parse_args([*answers.FLAGS, *flags])
    assert given.gpu_memory_utilization * len(answers.SERVERS) < 1
    assert (given.compilation_config.mode == 0) is (part.name == "answers")


@pytest.mark.parametrize("part", [one for one in PARTS if one.command.startswith("bench.serve")])
def test_the_flags_of_contestants_are_those_of_a_server(part: Part, tmp_path: Path) -> None:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from dllm.settings.vllm_names import cli_args

    if part.weights:
        write_without_weights(tmp_path / part.weights, released_config(), is_fp8=False)
    options = serve.parse(part.arguments(tmp_path, tmp_path, is_toy=False)[1:])
    racing = serve.contestants(options, *options.schedule, tmp_path)
    parser = cli_args.make_arg_parser(FlexibleArgumentParser())
    has_loop: list[bool] = []
    for one in racing:
        assert one.server is not None
        # Without the command itself, its subcommand and the model.
        given = parser.parse_args(one.server.command[3:])
        assert (given.load_format == "dummy") is bool(part.weights)
        assert given.gpu_memory_utilization * len(racing) < 1
        assert given.language_model_only is one.name.startswith("built-in")
        options = PluginOptions.from_additional_config(given.additional_config)
        has_loop.append(bound_s(options, is_on_cpu=False) > 0)
        assert (given.async_scheduling is False) is has_loop[-1]
    assert sum(has_loop) == (part.name == "serve-fp8")
