"""The tape on which a CPU replays CUDA graphs: what a graph keeps, and what it must not do."""

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.support import tape
from tests.support.tape import Capture, CaptureError, TapeGraph


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def captured(run: Callable[[], object]) -> TapeGraph:
    graph = TapeGraph()
    with Capture(graph):
        run()
    return graph


def test_tape_runs_the_operations_again_on_the_same_memory():
    given, out, ran = torch.arange(4.0), torch.zeros(4), []

    def double() -> None:
        ran.append(1)
        out.copy_(given * 2 + 1)

    graph = captured(double)
    given.add_(10)
    graph.replay()
    assert out.tolist() == [21, 23, 25, 27] and len(ran) == 1


@pytest.mark.parametrize("changed", ["a number", "memory"])
def test_tape_keeps_numbers_and_memory_of_the_capture(changed):
    given, out, now = torch.ones(2), torch.zeros(2), {}
    now.update(number=1, memory=given)
    graph = captured(lambda: out.copy_(now["memory"] * now["number"]))
    now.update({"a number": {"number": 5}, "memory": {"memory": torch.full((2,), 7.0)}}[changed])
    graph.replay()
    assert out.tolist() == [1, 1]


def test_tape_tells_of_memory_that_was_freed():
    tape.FAULTS.clear()
    out, given = torch.zeros(2), [torch.ones(2)]
    graph = captured(lambda: out.copy_(given[0] + 1))
    graph.replay()
    assert not tape.FAULTS and out.tolist() == [2, 2]
    given.clear()
    graph.replay()
    (fault,) = tape.FAULTS
    assert "add" in fault and __name__.rpartition(".")[2] in fault and out.isnan().all()


def test_tape_tells_of_memory_of_the_host():
    tape.FAULTS.clear()
    out = torch.zeros(2)
    graph = captured(lambda: out.add_(torch.tensor([1.0, 2.0])))
    graph.replay()
    assert tape.FAULTS


def test_tape_takes_a_number_that_is_assigned_for_a_number():
    tape.FAULTS.clear()
    out = torch.ones(4)

    def assign() -> None:
        out[2:] = 5

    graph = captured(assign)
    out.zero_()
    graph.replay()
    assert not tape.FAULTS and out.tolist() == [0, 0, 5, 5]


@pytest.mark.parametrize(
    "wait",
    [
        lambda given: given.max().item(),
        lambda given: bool(given.any()),
        lambda given: given[given > 1],
        lambda given: given.nonzero(),
        lambda given: torch.zeros(3).repeat_interleave(given.long()),
    ],
)
def test_tape_fails_where_a_capture_waits(wait):
    given = torch.arange(3.0)
    with pytest.raises(CaptureError, match="waits"):
        captured(lambda: wait(given))


def test_tape_fills_memory_of_the_pool():
    """What nothing has written in this replay is no number."""
    out, is_written = torch.zeros(4), [True]

    def partly() -> None:
        scratch = torch.empty(4)
        if is_written[0]:
            scratch[:2].copy_(out[:2])
        out.copy_(scratch)

    graph = captured(partly)
    out.zero_()
    graph.replay()
    assert out[:2].tolist() == [0, 0] and out[2:].isnan().all()


def test_tape_of_a_graph_fills_what_later_captures_took():
    """They may lie in memory that is free for the earlier one; its own earlier memory is not."""
    kept: list[torch.Tensor] = []
    given = torch.ones(2)
    first, second = (captured(lambda: kept.append(given + 1)) for _ in range(2))
    assert all(each.isnan().all() for each in kept), "a capture computes nothing"
    first.replay()
    second.replay()
    assert [each.tolist() for each in kept] == [[2, 2], [2, 2]]
    first.replay()
    assert kept[0].tolist() == [2, 2] and kept[1].isnan().all()


def test_tape_records_a_launch_as_one_operation():
    given, out = torch.ones(2), torch.zeros(2)

    def kernel(source: torch.Tensor, target: torch.Tensor, number: int) -> None:
        target.numpy()[:] = source.numpy() * number

    launch = tape.as_launch(kernel)
    graph = captured(lambda: launch(given, out, 3))
    given.add_(1)
    graph.replay()
    assert out.tolist() == [6, 6] and len(graph.tape) == 1


def test_tape_has_no_capture_in_a_capture():
    graph = captured(lambda: None)
    for inner in (graph.replay, lambda: captured(lambda: None)):
        with pytest.raises(CaptureError):
            captured(inner)
