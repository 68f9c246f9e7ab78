"""Everything that wants a big GPU, in four calls of under nine minutes; the 26B-A4B shape.

    python -m bench.gpu --call 1 | tee $OUT/log     # CSV files in $OUT, or build/gpu
    python -m bench.gpu --parts parity kernels      # some of the parts
    python -m bench.gpu --toy                       # all of them at toy size, on any machine

    call  part         what
    1     parity       every Triton kernel against its definition: the suites of tests/
          answers      the bundled models in CUDA graphs, not compiled: held-out questions
          kernels      attention, the sampling step
          step-fp8     the parts of a denoise step, ours and the built-in; their models, and our
                       sampler, are not compiled: compare the forward pass alone
    2     compiled     as answers, as a user would start them
          profile-fp8  as step-fp8, compiled
    3     serve-fp8    ours, the built-in, ours with the denoise loop
    4     serve-bf16   ours and the built-in

Each part is a process, which is ended when its seconds are over, with all that it started. It
prints its tables when it is done and writes its CSV as it goes (of a profile: the rows of a server
that is done). The list at the end says how each part went. Engines that are timed serve dummy
weights, which choose experts about evenly and never converge; every block takes 16 denoise steps.

Most of a call is starting. On an H200 with 16 CPU cores, where nothing was compiled before, the 26B
shape took 25 s of imports, 10 to 20 s until NCCL was ready, 5 s for dummy weights and 90 to 120 s
of torch.compile with three engines side by side; vLLM's own was ready after 185 s.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil  # type: ignore[import-untyped]
import torch

from bench.context import ROOT, command_line, write_csv
from bench.roofline import released_config
from bench.toys.tiny import tiny_config, write_checkpoint
from dllm.quantize.recipes import MADE, quantization_config

CALLS = (1, 2, 3, 4)
CALL_S = 540  # of a machine that ends a command after 10 minutes
SETTLE_S = 5.0  # between a part's budget and its processes being killed
CONTEXT = 1024  # tokens of the prompts


class Part(NamedTuple):
    """One process.

    Attributes:
        command: arguments of ``python -m``, as a shell reads them.
        toy: more arguments, which make it small.
        weights: fp8 or bf16, for a part with a model without weights.
    """

    name: str
    call: int
    budget_s: float
    command: str
    toy: str = ""
    weights: str = ""

    def arguments(self, out: Path, models: Path, *, is_toy: bool) -> list[str]:
        """The arguments of ``python -m``, with the part's own folder in ``out``."""
        results = ["--results", str(out / self.name)] if self.command.startswith("bench.") else []
        model = ["--model", str(models / self.weights)] if self.weights else []
        return [*shlex.split(f"{self.command} {self.toy if is_toy else ''}"), *results, *model]


# With images it insists on an image processor. It never runs more than 8 requests at a time, so it
# needs less room for keys and values.
BUILTIN = "'built-in --language-model-only --kv-cache-memory-bytes 4G'"
# On a GPU the loop is off unless it is asked for, and asynchronous scheduling on. A second is long
# enough for a whole block; a request that arrives is seen at once.
LOOP = "'ours --no-async-scheduling --additional-config.dllm.denoise_loop_ms 1000'"
TOY = "--enforce-eager --max-model-len 512 --kv-cache-memory-bytes 64M"
NOT_COMPILED = "--compilation-config.mode 0 --compilation-config.cudagraph_mode FULL_DECODE_ONLY"
LLM = {"load_format": "dummy", "language_model_only": True}
# A start without torch.compile, which takes most of the time. Graphs are for canvases alone.
GRAPHS_ALONE: dict[str, object] = {
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [256, 2048],
    }
}


def _answers(name: str, call: int, budget_s: float, flags: str = "") -> Part:
    """All bundled models at once: they are small, and starting takes most of the time."""
    toy = "--servers tiny-dllm --enforce-eager"
    return Part(name, call, budget_s, f"bench.answers {flags}", toy)


def _serve(weights: str, call: int, budget_s: float, contestants: str) -> Part:
    """Contestants in turn on dummy weights, 16 fixed steps."""
    # So that several engines fit on one GPU; each may take its share whatever the others took.
    share = 0.9 / len(shlex.split(contestants))
    flags = "--load-format dummy --max-model-len 2048 --kv-cache-memory-bytes 12G"
    minutes = (budget_s - 40) / 60  # for the last round to end
    return Part(
        f"serve-{weights}",
        call,
        budget_s,
        f"bench.serve --schedule fixed --minutes {minutes:.1f} "
        f"--num-requests 16 --input-len {CONTEXT} --output-len 512 --rounds 9 "
        f"--concurrency 1 2 4 8 32 --contestants {contestants} "
        f"--serve-flags '{flags} --gpu-memory-utilization {share:.2f}'",
        "--rounds 1 --input-len 64 --output-len 64 --num-requests 4 --concurrency 1 2 "
        f"--contestants {contestants.replace(BUILTIN, 'built-in')} "
        f"--serve-flags '--load-format dummy {TOY}'",
        weights,
    )


def _profile(name: str, call: int, budget_s: float, more: dict[str, object]) -> Part:
    return Part(
        name,
        call,
        budget_s,
        "bench.profile_step --server ours built-in --together --blocks 4 --rounds 5 "
        f"--concurrency 1 8 --input-len {CONTEXT} --coverage 0.5 "
        f"{_llm(kv_cache_memory_bytes=10 << 30, gpu_memory_utilization=0.4, **more)}",
        f"--rounds 1 --concurrency 1 --input-len 64 --coverage 0 {_llm(enforce_eager=True)}",
        "fp8",
    )


def _llm(**more: object) -> str:
    return f"--llm '{json.dumps(LLM | more)}'"


# In the order in which they are run: a call begins with what tells most.
PARTS = (
    Part("parity", 1, 110, "pytest --noconftest -q -p no:cacheprovider", "-k no_rows"),
    _answers("answers", 1, 110, NOT_COMPILED),
    Part("kernels", 1, 100, "bench.kernels sampler attention --rounds 3", "--smoke"),
    _profile("step-fp8", 1, 190, GRAPHS_ALONE),
    _answers("compiled", 2, 130),
    _profile("profile-fp8", 2, 390, {}),
    _serve("fp8", 3, 520, f"ours {BUILTIN} {LOOP}"),
    _serve("bf16", 4, 500, f"ours {BUILTIN}"),
)


def write_without_weights(path: Path, config: dict[str, object], *, is_fp8: bool) -> None:
    """A folder that vLLM serves with ``--load-format dummy``.

    Args:
        is_fp8: as ``dllm quantize --scheme fp8-dynamic`` would have written it.
    """
    write_checkpoint(path)  # a tiny one, for its tokenizer and generation config
    (path / "model.safetensors").unlink()
    if is_fp8:
        config |= {"quantization_config": quantization_config(MADE["fp8-dynamic"])}
    (path / "config.json").write_text(json.dumps(config, indent=2))


# --- running the parts ---------------------------------------------------------------------------


def run(arguments: Sequence[str], budget_s: float) -> str:
    """Run one part; says how it went. What it started is ended, whatever session it is in."""
    before, begin = set(psutil.Process().children(recursive=True)), time.monotonic()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    given = os.environ | {"PYTHONPATH": path}
    if importlib.util.find_spec("flashinfer") is None:  # vLLM would end without it
        given["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    # A process whose parent ends becomes a child of this one (PR_SET_CHILD_SUBREAPER).
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    process = subprocess.Popen([sys.executable, "-m", *arguments], cwd=ROOT, env=given)
    try:
        code = process.wait(timeout=budget_s)
        took = f"{time.monotonic() - begin:.0f} s"
        return f"ran, {took}" if code == 0 else f"FAILED, exit code {code}, {took}"
    except subprocess.TimeoutExpired:
        process.terminate()
        psutil.wait_procs([psutil.Process(process.pid)], timeout=SETTLE_S)
        return f"stopped after {budget_s:.0f} s; what it had measured is in its CSV"
    finally:
        while left := set(psutil.Process().children(recursive=True)) - before:
            for one in left:
                one.kill()
            psutil.wait_procs(left, timeout=5)


def run_part(part: Part, out: Path, models: Path, options: argparse.Namespace) -> str:
    has_gpu, is_toy = torch.cuda.is_available(), options.toy
    if not has_gpu and not is_toy:
        return "NOT RUN: no GPU"
    folder = models / part.weights
    if part.weights and not folder.exists():
        is_fp8 = part.weights == "fp8" and has_gpu  # vLLM has no FP8 experts on a CPU
        write_without_weights(folder, tiny_config() if is_toy else released_config(), is_fp8=is_fp8)
    arguments = part.arguments(out, models, is_toy=is_toy)
    if part.name == "parity":  # side by side if pytest can: most of the time the compiler works
        if not has_gpu:
            os.environ["TRITON_INTERPRET"] = "1"  # of the process that is started
        together = ["-n", str(os.cpu_count())] if importlib.util.find_spec("xdist") else []
        suites = sorted(ROOT.glob("tests/*/*kernel*_suite.py"))
        arguments += [*together, *(str(path.relative_to(ROOT)) for path in suites)]
    patience = 5 if is_toy else 1  # a CPU may be busy with other things
    return run(arguments, part.budget_s * patience)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__, writes=False)
    names = [part.name for part in PARTS]
    parser.add_argument("--call", nargs="+", type=int, choices=CALLS, default=list(CALLS))
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--toy", action="store_true", help="toy sizes, on any device")
    default = Path(os.environ.get("OUT") or ROOT / "build/gpu")
    parser.add_argument("--out", type=Path, default=default, help="folder of the CSV files")
    options = parser.parse_args(arguments)
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    outcomes: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory(prefix="dllm-gpu-") as models:
        for part in PARTS:
            if part.name in options.parts and part.call in options.call:
                print(f"\n=== {part.name}", flush=True)
                how = run_part(part, out, Path(models), options)
                print(how, flush=True)
                outcomes.append({"part": part.name, "outcome": how})
                write_csv(out / "gpu_parts.csv", outcomes)
    note = " (toy sizes: no figure means anything)" if options.toy else ""
    print(f"\n=== what was run{note}")
    print(*(f"{row['part']:14} {row['outcome']}" for row in outcomes), out, sep="\n")
    return int(any("FAILED" in row["outcome"] for row in outcomes))


if __name__ == "__main__":
    sys.exit(main())
