"""The commands of the serving benchmark, end to end on one eager server, with small numbers.

``vllm serve``, ``vllm bench serve`` and ``generate`` are real; only the starting of servers is
taken away from the commands, so that they share one. Nothing here looks at a speed.
"""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import compare, race, serve
from bench.context import ROOT, read_csv
from bench.gpu import answers
from bench.serve import BUILTIN, OURS, REFERENCE
from bench.servers import Server
from tests.support.forced_async import write_plugin
from tests.support.process import python_path

MODEL = ROOT / "checkpoints/tiny-dllm"
FLAGS = ("--enforce-eager", "--kv-cache-memory-bytes", "64M", "--max-model-len", "512")
SMALL = ("--model", str(MODEL), "--rounds", "1", "--num-requests", "2", "--concurrency", "1")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Ours, eager."""
    log = tmp_path_factory.mktemp("bench") / "log"
    with Server(OURS, str(MODEL), log, FLAGS, {"TORCHDYNAMO_DISABLE": "1"}) as running:
        running.wait_until_ready()
        yield running


@pytest.fixture
def shared(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The commands use that server; returns what they would have started."""
    asked: list[tuple[Any, ...]] = []

    def take(*given: Any) -> Server:
        asked.append(given)
        return server

    def admit_all(racing: list[race.Contestant], admit: Callable[..., None], _: Any) -> None:
        for one in racing:
            if one.server:
                admit(one)

    monkeypatch.setattr(serve, "Server", take)
    monkeypatch.setattr(serve, "start_all", admit_all)
    return asked


def test_serve(
    shared: list[tuple[Any, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*SMALL, "--rates", "50", "--schedule", "adaptive"]
    options += ["--contestants", OURS, REFERENCE, "--output-len", "32"]
    assert serve.main([*options, "--results", str(tmp_path)]) == 0
    rows = read_csv(tmp_path / "serve_compiled.csv")
    assert [(r["concurrency"], r["rate"], r["contestant"]) for r in rows] == [
        ("1", "", OURS),
        ("1", "", REFERENCE),
        ("", "50", OURS),
    ]
    for row in rows:
        assert not row["problem"]
        assert all(float(row[name]) > 0 for name in ("tokens_per_s", "latency_p99_ms"))
        assert float(row["passes_per_block"]) == float(row["steps_per_block"]) >= 1  # one block
    assert "ours / this: tokens/s" in capsys.readouterr().out


def test_answers(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(answers, "Server", lambda *given: nullcontext(server))
    options = ["--servers", "tiny-dllm", "--results", str(tmp_path)]
    assert answers.main(options) == 0
    (row,) = read_csv(tmp_path / "answers.csv")
    assert int(row["right"]) > 0.9 * int(row["asked"]) > 0 and not row["log"]
    assert f"{row['right']} of {row['asked']} right" in capsys.readouterr().out
    monkeypatch.setattr(answers, "LEAST", 1.1)
    assert answers.main(options) == 1
    monkeypatch.undo()
    assert "did not answer" in answers.ask(server, time.monotonic() + 1e-3)["log"]


def test_answers_of_a_server_that_does_not_start(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The others' are known, and what a log says of CUDA graphs is printed."""
    log = tmp_path / "log"
    log.write_text("INFO dllm: CUDA graphs were compared with steps without\n")
    monkeypatch.setattr(server, "log", log)
    broken = Server("tiny-sdar", "no model", tmp_path / "broken")
    monkeypatch.setattr(Server, "command", property(lambda self: [sys.executable, "-c", "1 / 0"]))
    made = {"tiny-dllm": nullcontext(server), "tiny-sdar": broken}
    monkeypatch.setattr(answers, "Server", lambda name, *given: made[name])
    options = ["--servers", *made, "--results", str(tmp_path), "--within", "60"]
    assert answers.main(options) == 1
    right, none = read_csv(tmp_path / "answers.csv")
    assert int(right["right"]) > 0 and not right["log"] and "ZeroDivisionError" in none["log"]
    said = capsys.readouterr()
    assert "ZeroDivisionError" in said.out and "ours: INFO dllm: CUDA graphs" in said.err


def test_asynchronous_scheduling_takes_the_same_steps_and_more_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of its own. Its counts travel from the scheduler to /metrics and into the table."""
    write_plugin(tmp_path / "plugins")
    monkeypatch.setenv("PYTHONPATH", python_path(ROOT, tmp_path / "plugins"))
    options = [*SMALL, "--schedule", "fixed", "--contestants", OURS]
    options += ["--serve-flags", shlex.join(FLAGS), "--results", str(tmp_path)]
    assert serve.main(options) == 0
    (row,) = read_csv(tmp_path / "serve_compiled.csv")
    assert not row["problem"] and float(row["ms_per_denoise_step"]) > 0
    assert (float(row["steps_per_block"]), float(row["passes_per_block"])) == (16, 17)


def test_engines_without_http_answer_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ours and the built-in on the same checkpoint, each an ``LLM`` in a process of its own."""
    options = ["--model", str(MODEL), "--rounds", "1", "--num-requests", "3", "--concurrency", "2"]
    options += ["--no-http", "--contestants", OURS, BUILTIN, "--output-len", "32"]
    flags = shlex.join(FLAGS)
    assert serve.main([*options, "--serve-flags", flags, "--results", str(tmp_path)]) == 0
    rows = read_csv(tmp_path / serve.ENGINE)
    assert [(row["contestant"], row["num_requests"]) for row in rows] == [
        (OURS, "4"),
        (BUILTIN, "4"),
    ]
    assert all(float(row["tokens_per_s"]) > 0 and int(row["num_correct"]) > 0 for row in rows)
    assert "| load |  | tokens/s | latency p50, ms | p99, ms | correct |" in capsys.readouterr().out


# --- two commits ---------------------------------------------------------------------------------


def run_git(repository: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", str(repository), *identity, *arguments], check=True)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commits, tagged ``old`` and ``new``, of a package called dllm; what is compared."""
    folder = tmp_path / "repository"
    (folder / "dllm").mkdir(parents=True)
    run_git(folder, "init", "--quiet")
    for tag in ("old", "new"):
        (folder / "dllm/__init__.py").write_text(f'"""{tag}"""\n')
        run_git(folder, "add", ".")
        run_git(folder, "commit", "--quiet", "-m", tag)
        run_git(folder, "tag", tag)
    monkeypatch.setattr(compare, "ROOT", folder)
    return folder


def test_compare(
    shared: list[tuple[Any, ...]],
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    started: list[str] = []

    class Started(nullcontext[None]):
        process = SimpleNamespace(pid=os.getpid())

        def __init__(self, name: str, model: str, log: Path, environment: Any) -> None:
            super().__init__()
            started.append(name)

        def wait_until_ready(self) -> None: ...

    monkeypatch.setattr(compare, "Server", Started)
    options = ["--schedule", "adaptive", "--starts", "2"]
    assert compare.main(["old", *SMALL, *options]) == 0
    head, base = shared
    assert head[0].startswith("head ") and base[0].startswith("base ")
    sources = [Path(one[-1]["PYTHONPATH"]) for one in shared]
    assert [source.name for source in sources] == ["head", "base"]
    assert not any(source.exists() for source in sources)
    listed = compare.git("worktree", "list")
    assert len(listed.splitlines()) == 1  # the repository itself
    out = capsys.readouterr().out
    assert f"{head[0]} / this: tokens/s" in out and base[0] in out
    assert started == [head[0], base[0]] * 3
    assert "| start, s | " in out and "| idle memory, MiB | " in out


def test_worktrees_are_removed_when_something_fails(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("the head server ended")

    monkeypatch.setattr(serve, "start_all", fail)
    assert compare.main(["old", *SMALL]) == 2
    assert "the head server ended" in capsys.readouterr().err
    assert len(compare.git("worktree", "list").splitlines()) == 1


def test_the_plugin_of_a_worktree_is_the_one_imported(repository: Path, tmp_path: Path) -> None:
    head = compare.git("rev-parse", "new")
    with compare.worktree(head, tmp_path / "head"):
        assert (tmp_path / "head/dllm/__init__.py").exists()
    run_git(repository, "rm", "--quiet", "-r", "dllm")
    run_git(repository, "commit", "--quiet", "-m", "nothing to import")
    nothing = compare.git("rev-parse", "HEAD")
    imported = pytest.raises(RuntimeError, match="the plugin comes from")
    with imported, compare.worktree(nothing, tmp_path / "none"):
        pass
