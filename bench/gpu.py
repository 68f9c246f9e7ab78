"""Everything that wants a big GPU, in three calls of under nine minutes; the 26B-A4B shape.

    python -m bench.gpu --call 1 | tee $OUT/log     # CSV files in $OUT, or bench/results/gpu
    python -m bench.gpu --parts sampler attention   # some of the parts
    python -m bench.gpu --toy                       # all of them at toy size on a CPU
    python -m bench.gpu_report DIR                  # the tables at the end, from CSV files

    call  part            what                                                          seconds
    1     start           kernels load, engines start, answers as on a CPU                  120
          parity          every Triton kernel against its definition                        125
          serve-fp8       ours, the built-in, ours with the denoise loop                   275
    2     profile-fp8     parts and kernels of a denoise step, ours and the built-in        230
          attention       our kernel, vLLM's, SDPA, 1k to 128k                              145
          start-compiled  as start, with torch.compile and CUDA graphs                       80
          sampler         the sampling step                                                  35
          context         the drafter's context kernel                                       20
    3     serve-bf16      ours and the built-in                                             180
          graphs-fp8      without CUDA graphs, beside ours with them                        180
          moe             tiles of the fused experts, as a table that vLLM reads            140
          roofline        least time of a pass, by component                                 10

Each part is a process of its own, which is ended when its seconds are over (--budget scales them
all), with every server that it started. It writes its CSV as it goes, so what it had measured by
then stays. A part that cannot run says why; the table at the end says so again, and where each
millisecond above the floor goes.

The engines serve dummy weights: 1, 2, 4, 8 and 32 requests at a time, 1,024 random tokens each, two
blocks, 16 denoise steps for every block. The built-in runs with its asynchronous scheduler, serves
8 at a time and lets others wait, as it does unless it is told otherwise (its source: more run out
of memory on one H200). Contestants of a part run alternately.

--toy forces the engines into asynchronous scheduling, which is what they have on a GPU.

Dummy weights choose experts about evenly and never converge; nothing here says anything about
answers, except start, which serves checkpoints/tiny-dllm.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.context import RESULTS, ROOT, write_csv
from bench.descendants import ending_descendants
from bench.dummy_models import write_without_weights
from bench.forced_async import write_plugin
from bench.gpu_parts import CALLS, PARTS, SETTLE_S
from bench.gpu_report import report
from bench.roofline import released_config
from dllm.models.gemma.tiny import tiny_config

TOY_PATIENCE = 5  # a CPU may be busy with other things


def run(arguments: Sequence[str], budget_s: float, folders: Sequence[Path]) -> str:
    """Run one part with all that it starts; how it went.

    Args:
        arguments: of ``python -m``.
        folders: the first of its PYTHONPATH.
    """
    begin = time.monotonic()
    path = os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH")]))
    with ending_descendants():  # its servers are in sessions of their own
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=budget_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=SETTLE_S)
            return f"stopped after {budget_s:.0f} s; what it had measured is in its CSV"
    took = f"{time.monotonic() - begin:.0f} s"
    return f"ran, {took}" if code == 0 else f"FAILED, exit code {code}, {took}"


def run_all(options: argparse.Namespace, out: Path, models: Path) -> list[dict[str, str]]:
    """Every chosen part; gpu_parts.csv has the outcomes so far after each of them."""
    has_gpu = _has_gpu()
    folders = [ROOT]  # this copy of the plugin
    if options.toy:
        folders.append(models / "plugins")
        write_plugin(folders[-1])
    outcomes: list[dict[str, str]] = []
    for part in PARTS:
        if part.name not in options.parts or part.call not in options.call:
            continue
        print(f"\n=== {part.name}", flush=True)
        how = part.obstacle(is_toy=options.toy, has_gpu=has_gpu)
        if how:
            how = f"NOT RUN: {how}"
        else:
            folder = models / part.weights
            if part.weights and not folder.exists():
                config = tiny_config() if options.toy else released_config()
                is_fp8 = part.weights == "fp8" and has_gpu  # vLLM has no FP8 experts on a CPU
                write_without_weights(folder, config, is_fp8=is_fp8)
            scale = options.budget * (TOY_PATIENCE if options.toy else 1)
            arguments = part.arguments(out, models, is_toy=options.toy)
            how = run(arguments, part.budget_s * scale, folders)
        print(how, flush=True)
        outcomes.append({"part": part.name, "outcome": how})
        write_csv(out / "gpu_parts.csv", outcomes)
    return outcomes


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what can be run, and say what was not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument("--call", nargs="+", type=int, choices=CALLS, default=list(CALLS))
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--toy", action="store_true", help="toy sizes, on any device")
    parser.add_argument("--budget", type=float, default=1.0, help="scales every part's seconds")
    parser.add_argument("--out", type=Path, help="folder of the CSV files; default: see above")
    options = parser.parse_args(arguments)
    out = options.out or Path(os.environ.get("OUT") or RESULTS / "gpu")
    if options.toy and options.out is None:
        out = Path(tempfile.mkdtemp(prefix="dllm-toy-"))  # toy figures are nobody's results
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="dllm-gpu-") as models:
        outcomes = run_all(options, out, Path(models))
    print(f"\n{report(out, is_toy=options.toy)}\n{out}")
    return int(any("FAILED" in row["outcome"] for row in outcomes))


if __name__ == "__main__":
    sys.exit(main())
