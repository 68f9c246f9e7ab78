"""``dllm quantize`` on the families with masks: which layers, their inputs, and serving."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from vllm import SamplingParams

from dllm.quantize.checkpoint import INDEX, Checkpoint
from dllm.quantize.linears import linears, together
from dllm.quantize.verify import verify
from dllm.settings.command import CommandError
from tests.quantize.test_quantize import COMMAND, small_job, write
from tests.support.engine_harness import get_engine
from tests.support.family_checkpoints import FAMILIES, WHOLE_SEQUENCES
from tests.support.family_checkpoints import write as write_source
from tests.support.patience import HANG_S
from tests.support.process import start_python

pytestmark = pytest.mark.slow

KINDS = FAMILIES | WHOLE_SEQUENCES

# Attention, dense MLPs, experts: three layers; LLaDA2's first is dense, the others have a shared
# expert beside eight.
COUNTS = dict.fromkeys(KINDS, 3 * 4 + 3 * 3) | {
    "llada2": 3 * 2 + 3 + 2 * 3 * 9,
    "sdar-moe": 3 * 4 + 3 * 3 * 4,
}
OUTSIDE = ("embed", "wte", "transformer.ff_out", "lm_head", "diffusion_head", "norm", "mlp.gate.")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random checkpoints whose ``generation_config.json`` is missing, as in some released ones."""
    folder = tmp_path_factory.mktemp("sources")
    return {name: write_source(folder / name, config) for name, config in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", ["fp8-dynamic", "nvfp4"])
def test_every_projection_is_quantized_and_nothing_else(
    kind: str, scheme: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    if kind in WHOLE_SEQUENCES and scheme == "nvfp4":  # which is calibrated
        with pytest.raises(CommandError, match=r"allowed: fp8-dynamic"):
            small_job(sources[kind], tmp_path / "out", scheme)
        return
    job = small_job(sources[kind], tmp_path / "out", scheme)
    hands = write(job)
    source = Checkpoint(sources[kind])
    assert len(hands.seen) == COUNTS[kind] == len(linears(source.config))
    matrices = {name for name, tensor in source.tensors.items() if tensor.ndim == 2}
    outside = {name for name in matrices if any(part in name for part in OUTSIDE)}
    assert {f"{module}.weight" for module in hands.seen} == matrices - outside
    stored: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        stored |= load_file(file)
    for name in source.tensors.keys() - {f"{module}.weight" for module in hands.seen}:
        assert torch.equal(stored[name], source.tensors[name]), name
    assert (tmp_path / "out" / INDEX).is_file()


def test_layers_that_vllm_fuses_share_a_scale(sources: dict[str, Path], tmp_path: Path) -> None:
    def fused_of(kind: str) -> set[tuple[str, ...]]:
        sets = together(small_job(sources[kind], tmp_path / kind).layers)
        return {tuple(layer.module for layer in layers) for layers in sets}

    fused = fused_of("sdar")
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    assert {f"{attention}{part}_proj" for part in "qkv"} in map(set, fused)
    assert {f"{mlp}{part}_proj" for part in ("gate", "up")} in map(set, fused)
    alone = ("model.layers.0.attention.query_key_value",)
    assert alone in fused_of("llada2")


# The dense layers of the others are SDAR's, or Qwen2's without biases.
@pytest.mark.parametrize(
    "kind", ["sdar", "sdar-moe", "a2d-qwen2", "llada2", "nemotron", *WHOLE_SEQUENCES]
)
def test_llm_compressor_s_checkpoints_are_whole_and_served(
    kind: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    """All schemes: nothing is wrong with the tensors, and an engine computes finite logits."""
    running = {
        scheme: start_python(
            *COMMAND, str(sources[kind]), "--scheme", scheme, "--out", str(tmp_path / scheme),
            *(("--samples=2", "--blocks=1") if scheme == "nvfp4" else ()),
        )
        for scheme in ("fp8-dynamic", "nvfp4")[: 1 if kind in WHOLE_SEQUENCES else 2]
    }  # fmt: skip
    for scheme, process in running.items():
        text, _ = process.communicate(timeout=HANG_S)
        assert process.returncode == 0, f"{scheme}: {text}"
    original = Checkpoint(sources[kind])
    for scheme in running:
        report = verify(Checkpoint(tmp_path / scheme), original, lambda: None)
        assert not report.problems and not report.notes
        assert report.schemes == {scheme: COUNTS[kind]}
        # The first engine of this process has experts: vLLM makes their process group only then.
        engine = get_engine(
            tmp_path / scheme, dtype="bfloat16", max_num_batched_tokens=256, max_model_len=256
        )
        (run,) = engine.runs(
            [list(range(10, 50))], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        )
        is_token = torch.arange(run.logits.shape[1]) != KINDS[kind].get("mask_token_id", 5)
        assert len(run.tokens) == 8 and bool(run.logits[:, is_token].isfinite().all())
