"""The kernel of the drafter's context in vLLM's engine, in Triton's interpreter."""

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.support.drafter_harness import assert_drafts
from tests.support.drafter_pairs import write_drafter, write_target
from tests.support.process import QUIET_ENGINE, run_python

pytestmark = pytest.mark.slow


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_server_on_cuda_kernels_writes_its_context_by_this_one(tmp_path: Path) -> None:
    """In the interpreter: vLLM's engine, real layers, an FP8 target. The drafts are the
    definition's, in fp32 with sums in another order."""
    target, drafter = write_target(tmp_path / "target"), write_drafter(tmp_path / "drafter")
    output = tmp_path / "result.pt"
    worker = ("-m", "tests.support.drafter_context_worker")
    run_python(*worker, str(target), str(drafter), str(output), environment=QUIET_ENGINE)
    found = torch.load(output, weights_only=False)
    assert set(found["taken"]) == {"kernel"}
    assert found["dtypes"] == 4 * [torch.uint8] + 2 * [torch.float32]
    assert len(found["drafts"]) >= 2
    assert_drafts(target, found["config"], found["drafts"], found["states"], tolerance=1e-4)
