"""What a CPU server needs of its machine, checked before an engine starts and fails over it.

An engine that fails prints hundreds of lines. These checks run in the API server,
and say one thing.
"""

import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

COMPILER = "CXX", "g++"  # the variable that names PyTorch's C++ compiler, and its default
HEADER = Path(sysconfig.get_path("include"), "Python.h")
SLOWER = "serve without compiling, which is slower: --enforce-eager"
ANY_KERNEL = "init_cpu_memory_env"  # of those in vLLM's compiled library


def refuse_missing_parts(vllm_config: Any) -> None:
    """Raises ValueError, with what to install."""
    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if not hasattr(torch.ops._C, ANY_KERNEL):
        raise ValueError(
            "vLLM's CPU kernels do not load: the line 'Failed to import from vllm._C' in the log "
            "says why. If it names libnuma: apt-get install libnuma1."
        )
    if not _is_compiled(vllm_config):
        return
    variable, default = COMPILER
    compiler = os.environ.get(variable, default)
    if shutil.which(compiler) is None:
        raise ValueError(
            f"There is no C++ compiler {compiler}, with which PyTorch compiles the model. Install "
            f"one (apt-get install g++), name another in {variable}, or {SLOWER}."
        )
    if not HEADER.exists():
        raise ValueError(
            f"There is no {HEADER}, which PyTorch needs to compile the model. Install it (apt-get "
            f"install python3-dev), or {SLOWER}."
        )


def _is_compiled(vllm_config: Any) -> bool:
    # vLLM decides it from these, later.
    from vllm.config.compilation import CompilationMode
    from vllm.config.vllm import OptimizationLevel

    switches = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
    if vllm_config.model_config.enforce_eager or any(os.environ.get(s) == "1" for s in switches):
        return False
    mode = vllm_config.compilation_config.mode
    if mode is None:
        return bool(vllm_config.optimization_level > OptimizationLevel.O0)
    return bool(mode != CompilationMode.NONE)
