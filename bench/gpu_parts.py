"""The parts of ``bench.gpu``: what each runs, for how long, and what it needs."""

from __future__ import annotations

import importlib.util
import json
import shlex
from dataclasses import dataclass
from pathlib import Path

CALLS = (1, 2, 3)
CALL_S = 540  # of a machine that ends a command after 10 minutes
SETTLE_S = 5.0  # between a part's budget and its processes being killed


@dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        call: of the three, the one that it belongs to.
        budget_s: until it is ended.
        command: arguments of ``python -m``, without --results and --model.
        toy: more of them, which make it small.
        files: CSV files that it writes on a GPU.
        needs: modules without which it cannot run.
        weights: of the model without weights that it serves: fp8, bf16, or nothing.
    """

    name: str
    call: int
    budget_s: float
    command: tuple[str, ...]
    toy: tuple[str, ...]
    files: tuple[str, ...]
    needs: tuple[str, ...] = ()
    needs_gpu: bool = True
    weights: str = ""

    def arguments(self, out: Path, models: Path, *, is_toy: bool) -> list[str]:
        """Of ``python -m``.

        Args:
            out: every part writes to a folder of its name in it.
            models: folder of the models without weights.
        """
        model = ["--model", str(models / self.weights)] if self.weights else []
        small = self.toy if is_toy else ()
        return [*self.command, *model, "--results", str(out / self.name), *small]

    def obstacle(self, *, is_toy: bool, has_gpu: bool) -> str:
        """Why it cannot be run here, or nothing."""
        if self.needs_gpu and not has_gpu and not is_toy:
            return "no GPU"
        absent = [name for name in self.needs if importlib.util.find_spec(name) is None]
        named = {"vllm": "vLLM", "triton": "Triton", "pytest": "pytest"}
        return " and ".join(f"{named[name]} is not installed" for name in absent)


# --- engines -------------------------------------------------------------------------------------

# With images it insists on an image processor. It never runs more than 8 requests at a time, so it
# needs less room for keys and values.
BUILTIN = "built-in --language-model-only --kv-cache-memory-bytes 4G"
# On a GPU the loop is off unless it is asked for, and asynchronous scheduling on. A second is long
# enough for a whole block; a request that arrives is seen at once.
LOOP = "ours --no-async-scheduling --additional-config.dllm.denoise_loop_ms 1000"
NO_GRAPHS = "--compilation-config.cudagraph_mode NONE"
TOY_LLM = {"load_format": "dummy", "language_model_only": True}
LLM = TOY_LLM | {"kv_cache_memory_bytes": 10 << 30}


def serve(name: str, call: int, budget_s: float, contestants: tuple[str, ...], more: str) -> Part:
    """Contestants in turn on dummy weights, 16 fixed steps.

    Args:
        name: ends with the weights.
        more: flags of ``bench.serve``.
    """
    # So that several engines fit on one GPU; each may take its share whatever the others took.
    share = 0.9 / len(contestants)
    flags = "--load-format dummy --max-model-len 2048 --kv-cache-memory-bytes 12G"
    flags += f" --gpu-memory-utilization {share:.2f}"
    minutes = (budget_s - 40) / 60  # for the last round to end
    command = f"bench.serve --schedule fixed --minutes {minutes:.1f} --num-requests 16"
    command += f" --input-len 1024 --output-len 512 {more}"
    small = "--eager --rounds 1 --input-len 64 --output-len 64 --num-requests 4 --concurrency 1 2"
    small_flags = "--load-format dummy --max-model-len 512 --kv-cache-memory-bytes 64M"
    on_cpu = [one.replace(BUILTIN, "built-in") for one in contestants]
    return Part(
        name,
        call,
        budget_s,
        (*command.split(), "--contestants", *contestants, "--serve-flags", flags),
        (*small.split(), "--contestants", *on_cpu, "--serve-flags", small_flags),
        ("serve_compiled.csv",),
        needs=("vllm",),
        weights=name.partition("-")[2],
    )


def profile(name: str, call: int, budget_s: float) -> Part:
    """A denoise step of ours and of the built-in on dummy weights; ``name`` ends with them."""
    command = "bench.profile_step --kernels --mode compiled --server ours built-in --rounds 1"
    command += " --concurrency 1 8 --input-len 1024 --blocks 2 --coverage 0.5"
    small = "--mode eager --concurrency 1 --input-len 64 --coverage 0"
    return Part(
        name,
        call,
        budget_s,
        (*command.split(), "--llm", json.dumps(LLM)),
        (*small.split(), "--llm", json.dumps(TOY_LLM)),
        ("profile_cuda.csv", "kernels_cuda.csv"),
        needs=("vllm",),
        weights=name.partition("-")[2],
    )


# --- all -----------------------------------------------------------------------------------------


def plain(
    name: str, call: int, budget_s: float, command: str, toy: str, file: str, *needs: str
) -> Part:
    """A part that serves no model without weights."""
    options, small = tuple(shlex.split(command)), tuple(shlex.split(toy))
    return Part(name, call, budget_s, options, small, (file,), needs)


START = "bench.engine_start --stages"
SAMPLER = "bench.sampling_step --profiles open,settled --rows 256,2048 --vocab 262144 --hidden 2816"
EVERY_LOAD, FEW_LOADS = "--concurrency 1 2 4 8 32 --rounds 9", "--concurrency 1 8 --rounds 9"

# In the order in which they are run: a call begins with what tells most.
PARTS = (
    plain(
        "start", 1, 120, f"{START} kernels ours built-in", "--questions 2", "start.csv", "vllm",
    ),
    plain(
        "parity", 1, 125, "bench.kernel_parity", "--smoke", "parity.csv",
        "triton", "pytest", "vllm",
    ),
    serve("serve-fp8", 1, 275, ("ours", BUILTIN, LOOP), EVERY_LOAD),
    profile("profile-fp8", 2, 230),
    plain(
        "attention", 2, 145, "bench.attention --stop-after-s 125", "--smoke", "attention_gpu.csv",
        "triton",
    ),
    plain(
        "start-compiled", 2, 80, f"{START} ours-compiled built-in-compiled",
        "--stages ours --questions 1", "start.csv", "vllm",
    ),
    plain("sampler", 2, 35, SAMPLER, "--smoke --eager", "sampling_step_cuda.csv"),
    plain("context", 2, 20, "bench.context_kernel", "--smoke", "context_kernel.csv", "triton"),
    serve("serve-bf16", 3, 180, ("ours", BUILTIN), EVERY_LOAD),
    serve("graphs-fp8", 3, 180, ("ours", f"ours {NO_GRAPHS}", f"{BUILTIN} {NO_GRAPHS}"), FEW_LOADS),
    plain(
        "moe", 3, 140, "bench.moe_tuning --seconds 55", "--smoke --seconds 1", "moe.csv",
        "vllm", "triton",
    ),
    Part("roofline", 3, 10, ("bench.roofline",), (), ("roofline.csv",), needs_gpu=False),
)  # fmt: skip
