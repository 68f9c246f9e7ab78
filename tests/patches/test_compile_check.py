"""What serves when compiled code is wrong. Whose wrong code a start sees: tests/graphs."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import CompilationMode, CUDAGraphMode

from dllm.engine import compilation
from dllm.patches import compile_check, graph_check

FULL = SimpleNamespace(cg_mode=CUDAGraphMode.FULL)
IN_PIECES = SimpleNamespace(cg_mode=CUDAGraphMode.PIECEWISE)
ONES = torch.ones(2, 4, 8)


class Compiled(TorchCompileWithNoGuardsWrapper, nn.Module):
    """A part of a model that vLLM compiles."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.do_not_compile = False


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch):
    """Runs the check on a server whose compiled model or step is wrong; what is left."""

    def run(wrong=(), by=1.0, ranks=bool, mode=CompilationMode.VLLM_COMPILE, **options):
        part = Compiled()
        model = nn.Sequential(nn.Linear(2, 2), part)
        graphs = SimpleNamespace(
            _candidates={32: [FULL, IN_PIECES]},
            _capture_descs={CUDAGraphMode.FULL: [FULL], CUDAGraphMode.PIECEWISE: [IN_PIECES]},
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        )
        runner = SimpleNamespace(
            model=model,
            kv_caches=[torch.ones(3)],
            execute_model=None,
            cudagraph_manager=graphs,
            vllm_config=SimpleNamespace(
                additional_config={"dllm": options},
                compilation_config=SimpleNamespace(mode=mode),
            ),
        )

        def serve(given, execute_model, num_reqs, params, adapter):
            assert num_reqs == 2 and not runner.kv_caches[0].any()
            is_wrong = ("model" in wrong and not part.do_not_compile) or (
                "step" in wrong and not compilation._runs_plain
            )
            return [ONES, ONES + by * is_wrong]

        monkeypatch.setattr(compile_check, "serve_made_up", serve)
        monkeypatch.setattr(
            compile_check, "made_up_adapters", lambda runner: nullcontext([None, 1])
        )
        monkeypatch.setattr(graph_check, "all_engines_say_yes", ranks)
        try:
            compile_check.drop_wrong_code(runner)
            is_step_plain = compilation._runs_plain
        finally:
            compilation.run_as_written(False)
        assert graphs.cudagraph_mode == (
            CUDAGraphMode.FULL_DECODE_ONLY
            if part.do_not_compile
            else CUDAGraphMode.FULL_AND_PIECEWISE
        )
        kept = [FULL] if part.do_not_compile else [FULL, IN_PIECES]
        assert graphs._candidates == {32: kept}
        return {"model": not part.do_not_compile, "step": not is_step_plain}

    return run


@pytest.mark.parametrize("wrong", [(), ("model",), ("step",), ("model", "step")])
def test_code_that_differs_serves_without_the_compiler(check, wrong):
    assert check(wrong) == {name: name not in wrong for name in ("model", "step")}


def test_code_that_is_wrong_elsewhere_serves_nowhere(check):
    """On another rank, or in another data-parallel engine: all are asked about both."""
    answers = iter([False, True])
    assert check(ranks=lambda answer: next(answers)) == {"model": False, "step": True}


@pytest.mark.parametrize(
    "options",
    [{"self_test": False}, {"mode": CompilationMode.NONE}, {"by": 0.9 * compile_check.MOST}],
    ids=["not compared", "not compiled", "rounding"],
)
def test_what_is_not_wrong_stays(check, options):
    assert check(("model", "step"), **options) == {"model": True, "step": True}


def test_functions_run_as_they_are_written(monkeypatch):
    config = SimpleNamespace(compilation_config=SimpleNamespace(mode=CompilationMode.VLLM_COMPILE))
    monkeypatch.setattr(torch, "compile", lambda function, **options: lambda rows: "compiled")
    call = compilation.maybe_compile(lambda rows: "written", config)
    two = torch.ones(2)
    assert call(two) == "compiled" and call(two[:1]) == "written"
    compilation.run_as_written(True)
    try:
        assert call(two) == "written"
    finally:
        compilation.run_as_written(False)
