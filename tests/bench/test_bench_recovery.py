"""The recovery benchmark, with stub servers in the place of vLLM's, and its arithmetic."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench import recovery
from bench.context import read_csv
from bench.recovery import recovery_interval, steps_per_block, table
from dllm.tasks.suite import questions
from tests.support.chat_stub import Stub, serve

FAMILIES = "add,sort"
ANSWERS = {
    question.prompt: question.answer
    for family in FAMILIES.split(",")
    for seed in (0, 1)
    for question in questions([family], "heldout", 10, seed)
}


class StubServer:
    """Stands for ``bench.servers.Server``: the NVFP4 one gets every second answer wrong."""

    def __init__(self, name: str, model: str, log: Path, flags: tuple[str, ...]) -> None:
        self.model, self.log, self.exits = model, log, ExitStack()

    def __enter__(self) -> "StubServer":
        self.log.write_text("INFO dllm: nvfp4 checkpoint; linear layers: by Such\n")
        is_nvfp4 = "nvfp4" in self.model
        count: Iterator[int] = iter(range(1000))

        def reply(messages: list[dict[str, str]]) -> str:
            return "no" if is_nvfp4 and next(count) % 2 else ANSWERS[messages[-1]["content"]]

        stub = Stub(reply, num_tokens=30, passes=6 if is_nvfp4 else 5)
        self.url = self.exits.enter_context(serve(stub)).url
        return self

    def wait_until_ready(self) -> None:
        """It is."""

    def __exit__(self, *exception: object) -> None:
        self.exits.close()


def test_one_command_writes_the_csv_and_prints_the_tables(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recovery, "Server", StubServer)
    for name in ("bf16", "fp8-dynamic", "nvfp4"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(1000 * len(name)))
    arguments = ["--model", str(tmp_path / "bf16"), "--quantized", str(tmp_path), "--num", "10"]
    recovery.main(
        [*arguments, "--seeds", "0", "1", "--tasks", FAMILIES, "--results", str(tmp_path)]
    )
    bf16, fp8_keys, fp8, nvfp4 = read_csv(tmp_path / "recovery.csv")
    such = "linear layers: by Such"
    assert bf16["computed_by"] == such
    assert fp8_keys["computed_by"] == f"{such}; keys and values in fp8"
    assert [row["num_correct"] for row in (bf16, fp8, nvfp4)] == ["40", "40", "20"]
    assert steps_per_block(bf16) == 5 and steps_per_block(nvfp4) == 6
    out = capsys.readouterr().out
    assert "| nvfp4 | bf16 | 20 / 40 | 50.0 %" in out and "6.00 (+20.0 %)" in out
    assert "| bf16 | fp8 | 40 / 40 |" in out
    assert "* nvfp4: linear layers: by Such." in out


def interval(num_correct: int, num_both: int) -> tuple[float, float]:
    """Of 1000 questions, of which the baseline knows 900."""
    return recovery_interval(1000, num_correct, 900, num_both)


def test_the_interval_is_paired():
    """Answers that change together say more than answers that change apart."""
    low, high = interval(890, 885)
    assert low < 98.9 < high
    low_apart, high_apart = interval(890, 800)
    assert high - low < 0.5 * (high_apart - low_apart)
    # By hand: of the log ratio, the variance is (alone + baseline alone) / 900**2, nearly.
    expected = 2 * 1.96 * 100 * (5 + 15) ** 0.5 / 900
    assert high - low == pytest.approx(expected, rel=0.1)


def test_recovery_is_of_what_the_baseline_knows():
    bf16 = {"weights": "bf16", "kv_cache": "bf16", "num_questions": "1000", "num_correct": "900"}
    bf16 |= {"num_baseline": "900", "num_both": "900", "steps": "0", "blocks": "0"}
    bf16["weight_bytes"] = "1"
    bf16["computed_by"] = "vLLM"
    text = table([bf16, bf16 | {"num_correct": "891", "num_both": "885"}])
    assert "| 100 % |" in text and "| 99.0 % [" in text
