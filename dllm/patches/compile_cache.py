"""Compiling on a CPU: on every core; and a restart loads what was compiled, if it is whole.

PyTorch loads the libraries of vLLM's cache as they are: one that was cut short ends the process
with a signal, at each start. So a server writes the checksums of its files when it is ready, and
the next one deletes what differs. PyTorch compiles a missing file again.
"""

import functools
import hashlib
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm.config import CompilationMode
from vllm.logger import init_logger

from dllm import LOGGER
from dllm.patches.replace import replaces
from dllm.settings.files import whole

logger = init_logger(LOGGER)

CHECKSUMS = "SHA256SUMS"


def prepare_compiler(vllm_config: Any) -> Callable[[], Any]:
    """Let Inductor run as many C++ compilers at once as this process may use cores (vLLM: one).

    What every kernel needs first is made in a thread, while the model is loaded: the widest vector
    instructions that compile and run, for which the result waits, and a precompiled header. Call it
    before anything is compiled: two threads that look for them at once find different ones.
    """
    import torch._inductor.config
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    are_known = threading.Event()

    def prepare() -> None:
        try:
            pick_vec_isa()
        finally:
            are_known.set()
        # The header, and no kernel: loading a damaged library would end the server.
        CppPythonBindingsCodeCache.load_pybinding_async([], "", submit_fn=lambda compile: None)

    if vllm_config.compilation_config.mode == CompilationMode.NONE:
        are_known.set()
    else:
        torch._inductor.config.compile_threads = len(os.sched_getaffinity(0))
        os.environ["TORCH_WARM_POOL"] = "0"  # no processes that compile Triton kernels
        threading.Thread(target=prepare, daemon=True).start()
    return are_known.wait


@functools.cache  # several workers in one process
def reload_compiled_backbone() -> None:
    """Let a restarted server load the compiled backbone that an earlier start saved.

    After loading it vLLM calls its ``finalize_loading``, which functions of PyTorch's own backend,
    used on a CPU, do not have, and takes the error for a broken file. Called in the worker.
    """
    import torch

    @replaces(torch.compiler)
    def load_compiled_function(theirs: Any, file: Any, **options: Any) -> Any:
        path = Path(file.name)
        delete_damaged_files(path.parent)
        if not path.exists():
            raise EOFError  # vLLM compiles again
        loaded = theirs(file, **options)
        function = loaded._artifacts.compiled_fn
        if not hasattr(function, "finalize_loading"):
            function.finalize_loading = lambda vllm_config: None
        return loaded


def write_checksums(vllm_config: Any) -> None:
    """As ``sha256sum`` does, when everything is compiled. Each rank has a list of its own."""
    cache = vllm_config.compilation_config.local_cache_dir
    if not cache:  # nothing is compiled
        return
    parallel = vllm_config.parallel_config
    folder = Path(cache, f"rank_{parallel.rank}_{parallel.data_parallel_index}")
    lines = [f"{checksum}  {name}\n" for name, checksum in _checksums(Path(cache)).items()]
    try:
        with whole(folder / CHECKSUMS) as part:
            part.write_text("".join(lines))
    except OSError as error:
        logger.warning("The checksums of the compile cache cannot be written: %s", error)


def delete_damaged_files(folder: Path) -> None:
    """Files that have changed since this rank noted their checksums."""
    try:
        lines = (folder / CHECKSUMS).read_text().splitlines()
    except (OSError, ValueError):  # no start has come this far; or damaged itself
        return
    noted = {name: checksum for checksum, _, name in (line.partition("  ") for line in lines)}
    for name, checksum in _checksums(folder.parent).items():
        if noted.get(name, checksum) != checksum:
            file = folder.parent / name
            logger.warning("Deleted a damaged file, which is compiled again: %s", file)
            file.unlink(missing_ok=True)


def _checksums(cache: Path) -> dict[str, str]:
    """The SHA-256 of every file in a cache but the lists of them, by its path in the cache."""
    found = {}
    for file in sorted(cache.rglob("*")):
        if file.is_file() and not file.name.startswith(CHECKSUMS):
            with suppress(FileNotFoundError):  # another server may use the cache
                digest = hashlib.sha256(file.read_bytes())
                found[str(file.relative_to(cache))] = digest.hexdigest()
    return found
