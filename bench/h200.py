"""Everything that wants a big GPU, in one command of under nine minutes; the 26B-A4B shape.

    python -m bench.h200 | tee $OUT/log        # a lent H200; CSVs in $OUT, or bench/results
    python -m bench.h200 --toy                 # the same parts at toy size on a CPU, in minutes
    python -m bench.h200 --parts sampler attention

    part         needs              what                                              seconds
    roofline     nothing            least time of a pass, by component (bench.roofline)     10
    components   GPU                products of a pass in plain PyTorch                     60
    sampler      GPU                the sampling step (bench.sampling_step)                 60
    attention    GPU                our attention kernel (bench.attention)                  70
    engine-fp8   GPU, vLLM          ms per pass, its breakdown, tokens/s                   180
    engine-bf16  GPU, vLLM          the same in bf16                                       130

Each part is a process of its own, which is ended when its seconds are over (--budget scales them
all); what it had written by then stays. The engines serve dummy weights, ours and vLLM's built-in
one at once, in the order A B, B A: 16 fixed denoise steps for every block, 1, 8 and 32 requests at
a time. tokens/s and ms per pass are without a profiler; the breakdown is from the same work under
torch.profiler, of steps that only denoise. The built-in serves 8 at a time and lets others wait, as
it does unless it is told otherwise (its source: more run out of memory on one H200). What was not
run is said, with the reason, in the table at the end.

Dummy weights choose experts about evenly and converge never; nothing here says anything about
answers.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.context import RESULTS, ROOT, read_csv, write_csv

TOY_PATIENCE = 5  # a CPU may be busy with other things
SETTLE_S = 3.0  # between a part's budget and its processes being killed


@dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        budget_s: until it is ended.
        arguments, toy_arguments: of ``python -m``.
        csv: what it writes.
    """

    name: str
    budget_s: float
    arguments: tuple[str, ...]
    toy_arguments: tuple[str, ...]
    csv: str
    needs_gpu: bool = True
    needs_vllm: bool = False


def parts(out: Path) -> list[Part]:
    """All parts, in the order in which they are run: what needs least comes first."""
    results = ("--results", str(out))
    roofline = ("bench.roofline", *results)
    components = ("bench.components", *results)
    sampler = ("bench.sampling_step", "--profiles", "open,settled", *results)
    large = ("--rows", "256,2048", "--vocab", "262144", "--hidden", "2816")
    attention = ("bench.attention", "--peers", "sdpa", "--out", str(out / "attention.csv"))
    found = [
        Part("roofline", 10, roofline, roofline, "roofline", needs_gpu=False),
        Part("components", 60, components, (*components, "--toy"), "components_{device}"),
        Part(
            "sampler",
            60,
            (*sampler, *large),
            (*sampler, "--smoke", "--eager"),
            "sampling_step_{device}",
        ),
        Part(
            "attention",
            70,
            (*attention, "--stop-after-s", "50"),
            (*attention, "--smoke"),
            "attention",
        ),
    ]
    for weights, budget_s in (("fp8", 180), ("bf16", 130)):
        engine = ("bench.h200_engine", "--weights", weights, *results)
        csv = f"h200_engine_{weights}"
        found.append(
            Part(f"engine-{weights}", budget_s, engine, (*engine, "--toy"), csv, needs_vllm=True)
        )
    return found


def obstacle(part: Part, *, is_toy: bool, has_gpu: bool) -> str:
    """Why a part cannot be run here, or nothing."""
    if part.needs_gpu and not has_gpu and not is_toy:
        return "no GPU"
    if part.needs_vllm and importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    if is_toy and part.name == "attention" and importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if is_toy and part.name == "engine-fp8" and not has_gpu:
        return "vLLM has no FP8 experts on a CPU"
    return ""


def run(part: Part, *, is_toy: bool, budget_s: float) -> str:
    """Run one part; how it went."""
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", *(part.toy_arguments if is_toy else part.arguments)],
        cwd=ROOT,
        start_new_session=True,  # it has children, which end with it
    )
    try:
        code = process.wait(timeout=budget_s)
    except subprocess.TimeoutExpired:
        end_group(process)
        return f"stopped after {budget_s:.0f} s; what it had measured is in its CSV"
    took = f"{time.monotonic() - begin:.0f} s"
    return f"ran, {took}" if code == 0 else f"FAILED, exit code {code}, {took}"


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children, kindly first."""
    os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=SETTLE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # whoever did not listen
    process.wait()


def summary(out: Path) -> str:
    """One line for each measured pass, with its floor."""
    floors = {
        (row["weights"], row["batch"]): float(row["floor_ms"])
        for row in read_csv(out / "roofline.csv")
        if row["component"] == "pass"
    }
    lines = []
    for path in sorted(out.glob("h200_engine_*.csv")):
        for row in read_csv(path):
            if row["component"] != "pass":
                continue
            floor = floors.get((row["weights"], row["batch"]))
            headroom = ""
            if floor is not None and row["model"] == "released":
                headroom = f", {float(row['ms_per_step']) / floor:.2f} x its floor"
            lines.append(
                f"{row['model']} {row['weights']} batch {row['batch']:>2} {row['server']:9} "
                f"{float(row['ms_per_step']):8.2f} ms a pass, "
                f"{float(row['tokens_per_s']):9.1f} tokens/s{headroom} ({row['machine']})"
            )
    return "\n".join(lines) or "No pass of an engine was measured."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what can be run, and say what was not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in parts(RESULTS)]
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--toy", action="store_true", help="toy sizes, on any device")
    parser.add_argument("--budget", type=float, default=1.0, help="scales every part's seconds")
    parser.add_argument("--out", type=Path, help="folder of the CSVs; default: $OUT, or results")
    options = parser.parse_args(arguments)
    out = options.out or Path(os.environ.get("OUT") or RESULTS)
    if options.toy and options.out is None:
        out = Path(tempfile.mkdtemp(prefix="dllm-toy-"))  # toy figures are nobody's results
    out.mkdir(parents=True, exist_ok=True)
    has_gpu = _has_gpu()
    rows: list[dict[str, object]] = []
    for part in parts(out.resolve()):
        if part.name not in options.parts:
            continue
        why = obstacle(part, is_toy=options.toy, has_gpu=has_gpu)
        print(f"\n=== {part.name}", flush=True)
        scale = options.budget * (TOY_PATIENCE if options.toy else 1)
        how = (
            f"NOT RUN: {why}"
            if why
            else run(part, is_toy=options.toy, budget_s=part.budget_s * scale)
        )
        print(how, flush=True)
        csv = part.csv.format(device="cuda" if has_gpu else "cpu") + ".csv"
        rows.append({"part": part.name, "outcome": how, "csv": csv})
        write_csv(out / "h200_parts.csv", rows)
    print("\n=== what was run" + (" (toy sizes: no figure means anything)" if options.toy else ""))
    for row in rows:
        print(f"{row['part']:12} {row['outcome']}  {row['csv']}")
    print(f"\n{summary(out)}\n{out}")
    return int(any("FAILED" in str(row["outcome"]) for row in rows))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
