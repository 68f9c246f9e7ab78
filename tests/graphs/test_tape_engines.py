"""Servers in CUDA graphs, replayed from a tape: the tokens and logits of steps without."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.adapters import projections, write_adapter
from tests.support.draft_sources import write_eagle_3
from tests.support.drafter_pairs import write_target
from tests.support.engine_harness import RUN_TOLERANCE, relative_error
from tests.support.family_checkpoints import WHOLE_SEQUENCES
from tests.support.family_checkpoints import write as write_family
from tests.support.images import WITH_TOWER, needs_torchvision
from tests.support.tape_jobs import CANVAS, JOBS, run_jobs, write_with_thoughts

CASES = [
    pytest.param(group, name, id=name, marks=[needs_torchvision] if group == "images" else [])
    for group, jobs in JOBS.items()
    for name in jobs
]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def path_of(
    checkpoint: Callable[..., Path],
    family: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Path]:
    """The checkpoint, or the adapter, of a name in JOBS."""
    folder = tmp_path_factory.mktemp("tape")

    @functools.cache
    def write(name: str) -> Path:
        if Path(name).is_absolute():
            return Path(name)
        if name in ("target", "eagle3"):
            return {"target": write_target, "eagle3": write_eagle_3}[name](folder / name)
        family_name, _, kind = name.partition(", ")
        if kind == "adapter":
            return write_adapter(folder / name, projections(write(family_name)))
        if kind == "images":  # their processor knows them by the tokens' own names
            return checkpoint(canvas_length=CANVAS["gemma"], **WITH_TOWER)
        if family_name == "gemma":
            layers = ["sliding_attention", "full_attention"]
            seed = 9 if kind else 3
            plain = checkpoint(canvas_length=CANVAS["gemma"], seed=seed, layer_types=layers)
        else:
            plain = family(family_name)
        path = write_with_thoughts(plain, folder / name)
        if kind and family_name != "gemma":
            write_family(path, json.loads((path / "config.json").read_text()), seed=1)
        return path

    return write


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest,
    path_of: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """What the worker says of a group's jobs, as far as they are tested; it is one process."""
    given = [item.callspec.params for item in request.session.items if item.path == request.path]
    tested = {one["name"] for one in given if one["results"] == request.param}
    jobs = {name: job for name, job in JOBS[request.param].items() if name in tested}
    return run_jobs(jobs, path_of, tmp_path_factory.mktemp("found") / "found.pt")


def requests(result: dict[str, Any], of: str) -> list[Any]:
    return [one for batch in result[of] for one in batch]


@pytest.mark.parametrize(("results", "name"), CASES, indirect=["results"], scope="module")
def test_tape_of_a_server_gives_the_tokens_of_steps_without(results, name):
    result = results[name]
    assert not result["failed"] and not result["faults"]
    pairs = list(zip(requests(result, "taped"), requests(result, "eager"), strict=True))
    assert [taped[0] for taped, _ in pairs] == [eager[0] for _, eager in pairs]
    for (_, scores, *logits), (_, expected, *expected_logits) in pairs:
        torch.testing.assert_close(scores, expected, rtol=0, atol=RUN_TOLERANCE)
        for ours, theirs in zip(logits, expected_logits, strict=True):
            assert relative_error(ours, theirs) < RUN_TOLERANCE
    if steps := result.get("steps"):  # of canvases alone: nearly all are full graphs
        assert steps["FULL"] >= 0.9 * sum(steps.values())
    if "left" in result:  # by a start, which finds all of them right
        assert result["left"] == ({"FULL", "PIECEWISE"} if "pieces" in name else {"FULL"})
    if name == "adapter":  # the same request without has another answer
        adapted, plain, *_ = requests(result, "eager")
        assert adapted[0] != plain[0]
    used = {kind for kind, found in result["replayed"].items() if found}
    # A prompt is in each step of a whole sequence.
    unused = {
        "pieces": name != "images" and "pieces" not in name,
        "model": name.split(",")[0] in WHOLE_SEQUENCES,
    }
    assert used == {kind for kind in result["replayed"] if not unused.get(kind)}
