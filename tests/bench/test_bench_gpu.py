"""bench/gpu.py without a GPU: what is run, what is not and why, and what is said at the end."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from bench import gpu, profile_step, serve
from bench.context import read_csv
from bench.roofline import released_config
from dllm.models.gemma.tiny import tiny_config

ROOT = Path(__file__).parents[2]


def test_the_parts_fit_into_nine_minutes(tmp_path: Path) -> None:
    parts = gpu.parts(tmp_path, tmp_path)
    assert sum(part.budget_s + gpu.SETTLE_S for part in parts) < 9 * 60
    assert [part.name for part in parts][:1] == ["roofline"]


def test_without_a_gpu_it_says_what_was_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_has_gpu", lambda: False)
    monkeypatch.setattr(gpu, "run", lambda part, **_: f"ran {part.name}")
    assert gpu.main(["--out", str(tmp_path)]) == 0
    outcome = {row["part"]: row["outcome"] for row in read_csv(tmp_path / "gpu_parts.csv")}
    assert outcome.pop("roofline") == "ran roofline"
    assert set(outcome.values()) == {"NOT RUN: no GPU"}
    assert "No engine was measured." in capsys.readouterr().out


def test_engines_need_vllm_and_nothing_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    reasons = {
        part.name: gpu.obstacle(part, is_toy=False, has_gpu=True)
        for part in gpu.parts(tmp_path, tmp_path)
    }
    assert {name for name, why in reasons.items() if why} == {
        "serve-fp8",
        "profile-fp8",
        "serve-bf16",
    }
    assert "vLLM" in reasons["serve-fp8"]


def test_a_part_that_takes_too_long_is_ended_with_its_children() -> None:
    program = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    child = os.pidfd_open(int(process.stdout.readline()))
    gpu.end_group(process)
    assert process.returncode is not None
    assert select.select([child], [], [], 60)[0], "the child is still there"  # readable: it ended
    os.close(child)


def test_a_failure_is_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = gpu.Part("roofline", 60, ("bench.roofline", "--batch", "none"))
    monkeypatch.setattr(gpu, "parts", lambda out, models: [broken])
    assert gpu.main(["--toy", "--out", str(tmp_path)]) == 1
    (row,) = read_csv(tmp_path / "gpu_parts.csv")
    assert row["outcome"].startswith("FAILED, exit code 2")


def test_what_needs_no_vllm_imports_without_it() -> None:
    program = (
        "import sys; sys.modules['vllm'] = None\n"
        "from bench import attention, gpu, roofline, sampling_step\n"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True)
    assert result.returncode == 0, result.stderr


def test_the_summary_says_how_far_above_its_floor_a_step_is(tmp_path: Path) -> None:
    (tmp_path / "roofline.csv").write_text("weights,batch,floor_ms\nfp8,1,5.0\n")
    (tmp_path / "fp8").mkdir()
    (tmp_path / "fp8" / "serve_compiled.csv").write_text(
        "contestant,concurrency,ms_per_denoise_step,tokens_per_s,machine\n"
        "ours,1,10.0,100.0,NVIDIA H200\nbuilt-in --x,1,,,NVIDIA H200\n"
    )
    (line,) = gpu.summary(tmp_path, is_toy=False).splitlines()  # a run without speed is left out
    assert "2.00 x its floor (NVIDIA H200)" in line and "100.0 tokens/s" in line
    assert "floor" not in gpu.summary(tmp_path, is_toy=True)


def test_the_released_shape_is_written_without_weights(tmp_path: Path) -> None:
    for is_fp8 in (False, True):
        path = tmp_path / str(is_fp8)
        gpu.write_without_weights(path, released_config(), is_fp8=is_fp8)
        written = json.loads((path / "config.json").read_text())
        assert written["text_config"] == released_config()["text_config"]
        assert ("quantization_config" in written) is is_fp8
        assert not list(path.glob("*.safetensors"))
        assert (path / "generation_config.json").exists() and (path / "tokenizer.json").exists()


@pytest.mark.parametrize("name", ["serve-fp8", "serve-bf16", "profile-fp8"])
def test_the_commands_of_the_parts_are_understood(name: str, tmp_path: Path) -> None:
    """On a GPU there is no second try."""
    (part,) = (one for one in gpu.parts(tmp_path, tmp_path / "models") if one.name == name)
    weights = name.partition("-")[2]
    for config, command in (
        (released_config(), part.command),
        (tiny_config(), part.command + part.toy),
    ):
        gpu.write_without_weights(tmp_path / "models" / weights, config, is_fp8=weights == "fp8")
        module, *arguments = command
        if module == "bench.serve":
            options = serve.parse(arguments)
            assert [one.kind for one in options.contestants] == ["ours", "built-in"]
            (schedule,) = options.schedule
            assert all(load.steps_per_block for load in serve.workloads(options, schedule))
        else:
            assert profile_step.parse(arguments).llm["load_format"] == "dummy"
