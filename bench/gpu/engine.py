"""One engine of the shape of google/diffusiongemma-26B-A4B-it, measured in turns with others.

    python -m bench.gpu.engine NAME FOLDER [--toy] [--llm JSON]

``FOLDER/NAME.json`` is written anew at each stage: "stage"; "seconds" of each; "ms", of blocks, by
load; "kernels", by load: ms a block, calls and name of each. Rounds begin when ``FOLDER/go``
exists, and no two engines of a folder compute at the same time.

ms of a block: wall time of five blocks less that of one, over four, with prompts in the prefix
cache. A block takes 16 denoise steps, and a commit: PASSES, in the synchronous loop, too.
"""

import argparse
import fcntl
import json
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.profile import SHAPES, generate_ms
from dllm.settings.files import whole

STEPS = 16
PASSES = STEPS + 1
LOADS, ROUNDS, BLOCKS = (1, 8), 3, 5
MOST_KERNELS = 60
ONES = re.compile(r"(layer_scalar|head_scalars|canvas_scalars|per_expert_scale|scale)$")
# Attention adds little to a row, or the mean of all keys would make all rows the same.
SMALL, SHARE = "post_attention_layernorm", 0.1
STD = 0.02
STRIDE = 7_654_321  # so that no two tensors begin with the same numbers


class State:
    def __init__(self, name: str, folder: Path) -> None:
        self._path, self._start = folder / f"{name}.json", time.monotonic()
        self.values: dict[str, Any] = {"seconds": {}, "ms": {}, "kernels": {}}
        self.reach("imports")

    def reach(self, stage: str) -> None:
        self.values["stage"] = stage
        self.values["seconds"][stage] = self.seconds()
        self.write()

    def seconds(self) -> float:
        return round(time.monotonic() - self._start, 1)

    def write(self) -> None:
        with whole(self._path) as part:
            part.write_text(json.dumps(self.values))


def measure(state: State, name: str, folder: Path, options: argparse.Namespace) -> None:
    from vllm import LLM

    compute_with_dummy_weights()
    model, length = folder / f"model-{name}", 64 if options.toy else 1024
    canvas_length = write_model(model, is_toy=options.toy)
    state.reach("starting")
    on_gpu = torch.cuda.is_available()
    given = {
        "load_format": "dummy",
        "max_num_seqs": max(LOADS),
        "max_model_len": length + (BLOCKS + 3) * canvas_length,
        "kv_cache_memory_bytes": 64 << 20 if options.toy else 10 << 30,
        "language_model_only": True,
        **({"gpu_memory_utilization": 0.4} if on_gpu else {"enforce_eager": True}),
    }
    llm = LLM(str(model), **given | options.llm)
    is_async = bool(llm.llm_engine.vllm_config.scheduler_config.async_scheduling)
    device = torch.cuda.get_device_name() if on_gpu else "CPU"
    state.values["what"] = f"{device}, asynchronous: {is_async}, {options.llm}"
    state.reach("ready")
    words = min(200_000, llm.llm_engine.model_config.get_vocab_size() - 20)

    def run(load: int, blocks: int) -> float:
        return generate_ms(llm, load, length, blocks * canvas_length, words)

    for load in LOADS:  # compiles what is left, and fills the prefix cache
        run(load, 1)
    state.reach("warm")
    while not (folder / "go").exists():
        time.sleep(0.2)
    for number in range(1 if options.toy else ROUNDS):
        with turn(folder):
            for load in LOADS:
                one, more = run(load, 1), run(load, BLOCKS)
                blocks = state.values["ms"].setdefault(str(load), [])
                blocks.append(round((more - one) / (BLOCKS - 1), 3))
        state.reach(f"round {number}")
    if on_gpu:
        with turn(folder):
            state.values["kernels"] = {str(load): kernels(run, load) for load in LOADS}
    state.reach("done")


def write_model(path: Path, *, is_toy: bool) -> int:
    """Write a folder that vLLM serves without weights; returns its canvas length.

    On a GPU as ``dllm quantize --scheme fp8-dynamic`` would have written it; on a CPU vLLM has no
    FP8 experts.
    """
    from bench.toys.tiny import tiny_config, write_checkpoint
    from dllm.quantize.recipes import MADE, quantization_config

    config = tiny_config() if is_toy else tiny_config(canvas_length=256, **SHAPES["released"])
    if torch.cuda.is_available() and not is_toy:
        config["quantization_config"] = quantization_config(MADE["fp8-dynamic"])
    if not path.exists():
        write_checkpoint(path)  # a tiny one, for its tokenizer and generation config
        (path / "model.safetensors").unlink()
    (path / "config.json").write_text(json.dumps(config, indent=2))
    generation = path / "generation_config.json"
    fixed = {"max_denoising_steps": STEPS, "confidence_threshold": 0.0}
    generation.write_text(json.dumps(json.loads(generation.read_text()) | fixed))
    return int(str(config["canvas_length"]))


def kernels(run: Callable[[int, int], float], load: int) -> list[tuple[float, int, str]]:
    """Time of one block by kernel, the largest first: ms, calls, name."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run(load, 1)
    rows = [
        (round(each.self_device_time_total / 1e3, 4), each.count, each.key[:160])
        for each in found.key_averages()
    ]
    return sorted(rows, reverse=True)[:MOST_KERNELS]


# vLLM's dummy weights are at most 0.001, also those of norms and scalars of layers. With them
# hidden states of a Gemma 4 are zero behind a few layers, and all rows choose the same experts,
# whose weights are then all that is read. Here matrices are normal, and norms and scalars 1.


def compute_with_dummy_weights() -> None:
    """Let vLLM's dummy loader, of this process, fill models with ``fill``."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    DummyModelLoader.load_weights = lambda self, model, model_config: fill(model)  # type: ignore[method-assign]


def fill(model: nn.Module) -> None:
    """Fill the parameters and buffers of a model in place; the same each time."""
    draws: dict[torch.device, Draws] = {}
    for layer in model.modules():
        for name, tensor in (*layer._parameters.items(), *layer._buffers.items()):
            if tensor is None or not torch.is_floating_point(tensor):
                continue
            if name in layer._non_persistent_buffers_set:  # computed, not loaded
                continue
            if name.endswith("weight_scale"):  # of an FP8 weight
                tensor.data.fill_(STD)
            elif tensor.dim() < 2 or ONES.search(name):
                tensor.data.fill_(1.0)
            else:
                if tensor.device not in draws:
                    draws[tensor.device] = Draws(tensor.device)
                draws[tensor.device].fill(tensor.data)
    for name, parameter in model.named_parameters():
        if SMALL in name:
            parameter.data.fill_(SHARE)


class Draws:
    """Normal numbers of a device, drawn once: 26B of them would take a minute."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator(device=device).manual_seed(7)
        size = 1 << (26 if device.type == "cuda" else 20)
        self._numbers = torch.randn(size, generator=generator, device=device)
        self._of_type: dict[torch.dtype, Tensor] = {}
        self._start = 0

    def fill(self, tensor: Tensor) -> None:
        """Fill a contiguous tensor; one of FP8 has its scale beside it."""
        if tensor.dtype not in self._of_type:
            unit = 1.0 if tensor.dtype.itemsize == 1 else STD
            self._of_type[tensor.dtype] = (self._numbers * unit).to(tensor.dtype)
        numbers, flat, at = self._of_type[tensor.dtype], tensor.view(-1), 0
        while at < len(flat):
            self._start = (self._start + STRIDE) % (len(numbers) // 2)
            count = min(len(numbers) - self._start, len(flat) - at)
            flat[at : at + count].copy_(numbers[self._start : self._start + count])
            at += count


@contextmanager
def turn(folder: Path) -> Iterator[None]:
    """While no other engine of the folder computes; ends with the process, too."""
    with (folder / "turn").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    time.sleep(0.1)  # another one takes its turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--llm", type=json.loads, default={}, help="more arguments of LLM")
    options = parser.parse_args()
    state = State(options.name, options.folder)
    try:
        measure(state, options.name, options.folder, options)
    except BaseException:
        traceback.print_exc()
        state.reach(f"FAILED in: {state.values['stage']}")
        os._exit(1)
    os._exit(0)  # an engine that shuts down would take half a minute


if __name__ == "__main__":
    main()
