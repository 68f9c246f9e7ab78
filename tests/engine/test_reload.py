"""New weights in a running engine, as a trainer sends them, and what sleep leaves of a model."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from vllm import SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from dllm.patches.cpu_worker import CanvasCPUWorker
from dllm.patches.gpu_worker import LoadedTensors
from tests.engine.test_blocks import prompt
from tests.support.edited import WEIGHTS, edited
from tests.support.engine_harness import Engine, get_engine
from tests.support.family_checkpoints import FAMILIES, write
from tests.support.quant_checkpoints import write_quantized

KINDS = ["gemma", "sdar", "sdar-moe", "llada2", "nemotron", "a2d-qwen3"]
# No other test gets these engines.
OPTIONS: dict[str, Any] = dict(
    max_num_batched_tokens=250, weight_transfer_config=WeightTransferConfig(backend="file")
)
# Ids that every vocabulary has.
CONTEXTS = [[one % 500 for one in prompt(length, salt=length)] for length in (70, 21, 130)]


@dataclass
class Folder(WeightTransferUpdateInfo):
    folder: str


class FileTransfer(WeightTransferEngine[WeightTransferInitInfo, Folder]):
    """A way for weights into a running engine of a CPU, in place of NCCL: tensors of files.

    The steps are those of vLLM's NCCL engine, which loads each tensor that it received on its own.
    """

    init_info_cls, update_info_cls = WeightTransferInitInfo, Folder

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Nothing has to be connected."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, str]) -> None:
        """Without vLLM's synchronization of an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Folder) -> None:
        for path in Path(update_info.folder).glob("*.safetensors"):
            for named in load_file(path).items():
                self.model.load_weights([named])

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is open."""


WeightTransferEngineFactory.register_engine("file", FileTransfer)


def answers(engine: Engine) -> list[list[int]]:
    greedy = dict(max_tokens=40, ignore_eos=True)
    params = [SamplingParams(seed=at, temperature=float(at), **greedy) for at in range(3)]
    return engine.generate(CONTEXTS, params)


def reload(engine: Engine, folder: Path) -> None:
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})


def send_one_by_one(engine: Engine, folder: Path) -> None:
    engine.llm.start_weight_update()
    engine.llm.update_weights({"update_info": {"folder": str(folder)}})
    engine.llm.finish_weight_update()


@pytest.fixture
def two(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    """Two checkpoints of a family with other weights."""

    def make(kind: str) -> tuple[Path, Path]:
        if kind == "gemma":
            return checkpoint(seed=3), checkpoint(seed=4)
        first, second = (write(tmp_path / str(seed), FAMILIES[kind], seed) for seed in range(2))
        return first, second

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_a_fresh_engine_and_the_way_back_is_exact(
    kind: str, two: Callable[[str], tuple[Path, Path]]
) -> None:
    """An engine keeps pages of the weights before, until its prefix cache is reset."""
    first, second = two(kind)
    engine = get_engine(first, **OPTIONS)
    before, after = answers(engine), answers(get_engine(second, **OPTIONS))
    assert before != after
    reload(engine, second)
    assert answers(engine) not in (before, after), "there was no page of the weights before"
    engine.reset_prefix_cache()
    assert answers(engine) == after
    send_one_by_one(engine, first)
    engine.reset_prefix_cache()
    assert answers(engine) == before


def spoil_the_last(weights: dict[str, torch.Tensor]) -> None:
    """Of the last layers: others have been replaced before it is read."""
    weights[[*weights][-1]].fill_(torch.nan)


@pytest.mark.parametrize("kind", ["gemma", "sdar"])
def test_what_does_not_fit_is_refused_and_the_engine_goes_on(
    kind: str, two: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    first, second = two(kind)
    engine = get_engine(first, **OPTIONS)
    before = answers(engine)
    names = load_file(second / WEIGHTS)
    (part,) = (name for name in names if name.endswith("1.mlp.up_proj.weight"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(RuntimeError, match="Cannot find any model weights"):
        reload(engine, tmp_path / "empty")
    with pytest.raises(ValueError, match=part):
        reload(engine, edited(second, tmp_path / "part", lambda weights: weights.pop(part)))
    broken = edited(second, tmp_path / "broken", spoil_the_last)
    for send in (reload, send_one_by_one):
        with pytest.raises(ValueError, match="NaN"):
            send(engine, broken)
        engine.reset_prefix_cache()
        answers(engine)  # of some old and some new weights
    reload(engine, first)
    engine.reset_prefix_cache()
    assert answers(engine) == before


@pytest.mark.parametrize("scheme", ["fp8-dynamic", "nvfp4"])
def test_quantized_weights_change(
    scheme: str, two: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    first, second = (
        write_quantized(each, tmp_path / str(at), scheme) for at, each in enumerate(two("gemma"))
    )
    engine = get_engine(first, **OPTIONS)
    before, after = answers(engine), answers(get_engine(second, **OPTIONS))
    assert before != after
    for change, folder, expected in ((send_one_by_one, second, after), (reload, first, before)):
        change(engine, folder)
        engine.reset_prefix_cache()
        assert answers(engine) == expected


def test_int8_layers_of_a_cpu_take_no_new_weights(
    two: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    """They keep packed copies alone, and would answer as before, without any error."""
    engine = get_engine(write_quantized(two("gemma")[0], tmp_path / "int8", "int8-dynamic"))
    before = answers(engine)
    for send in (reload, send_one_by_one):
        with pytest.raises(ValueError, match="INT8"):
            send(engine, tmp_path)
    engine.reset_prefix_cache()
    assert answers(engine) == before


class Made(TorchDispatchMode):
    """Keeps every tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.device.type == "cpu":
            self.tensors.append(result)
        return result


@pytest.mark.parametrize("kind", ["gemma", "sdar", "nemotron"])
def test_after_deep_sleep_only_weights_have_to_be_sent_again(
    kind: str, two: Callable[[str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Level 2, in place of a GPU's allocator: what was made while the model was loaded is lost."""
    made, found = Made(), []
    load_model = CanvasCPUWorker.load_model

    def load(self: Any, **options: Any) -> None:
        with made:
            found.append(LoadedTensors(lambda: load_model(self, **options), self.device))

    monkeypatch.setattr(CanvasCPUWorker, "load_model", load)
    first, _ = two(kind)
    engine = Engine(first, max_num_batched_tokens=251)
    before, model, (loaded,) = answers(engine), engine.runner.model, found
    engine.reset_prefix_cache()
    loaded.save([*model.parameters(), *model.buffers()])
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.inference_mode():
        for memory in {tensor.untyped_storage() for tensor in made.tensors}:
            torch.empty(0, dtype=torch.uint8).set_(memory).random_(0, 256)
        for buffer, copy in buffers:  # vLLM does this
            buffer.copy_(copy)
    loaded.restore()
    reload(engine, first)
    assert answers(engine) == before
