"""Everything that wants a big GPU, in one command of under nine minutes; the 26B-A4B shape.

    python -m bench.gpu | tee $OUT/log          # CSV files in $OUT, or bench/results/gpu
    python -m bench.gpu --toy                   # the same parts at toy size on a CPU, in minutes
    python -m bench.gpu --parts sampler attention

    part         needs        what                                                      seconds
    roofline     nothing      least time of a pass, by component (bench.roofline)            10
    sampler      GPU          the sampling step (bench.sampling_step)                        50
    attention    GPU          our attention kernel (bench.attention)                         60
    serve-fp8    GPU, vLLM    ours and the built-in in turn (bench.serve, fixed)            170
    profile-fp8  GPU, vLLM    where a step's time goes, ours (bench.profile_step)           100
    serve-bf16   GPU, vLLM    as serve-fp8, in bf16                                         115

Each part is a process of its own, which is ended when its seconds are over (--budget scales them
all); what it had written by then stays. The engines serve dummy weights: 1, 8 and 32 requests at a
time, 1,024 random tokens each, two blocks, 16 denoise steps for every block. The built-in serves 8
at a time and lets others wait, as it does unless it is told otherwise (its source: more run out of
memory on one H200). The table at the end says what was not run, with the reason.

Dummy weights choose experts about evenly and never converge; nothing here says anything about
answers.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
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
from bench.roofline import released_config
from dllm.models.gemma.tiny import tiny_config, write_checkpoint

TOY_PATIENCE = 5  # a CPU may be busy with other things
SETTLE_S = 5.0  # between a part's budget and its processes being killed
BUILTIN = "built-in --language-model-only"  # with images it insists on an image processor


@dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        budget_s: until it is ended.
        command: arguments of ``python -m``.
        toy: more of them, which make it small.
    """

    name: str
    budget_s: float
    command: tuple[str, ...]
    toy: tuple[str, ...] = ()
    needs_gpu: bool = True
    needs_vllm: bool = False


def parts(out: Path, models: Path) -> list[Part]:
    """All parts, in the order in which they are run: what needs least comes first.

    Args:
        out: folder of the CSV files.
        models: folder of the checkpoints without weights, fp8 and bf16.
    """
    results = ("--results", str(out))
    sampler = "bench.sampling_step --profiles open,settled --rows 256,2048 --vocab 262144"
    attention = "bench.attention --peers sdpa --stop-after-s 45"
    return [
        Part("roofline", 10, ("bench.roofline", *results), needs_gpu=False),
        Part(
            "sampler", 50, (*sampler.split(), "--hidden", "2816", *results), ("--smoke", "--eager")
        ),
        Part("attention", 60, (*attention.split(), *results), ("--smoke",)),
        serve(170, 2.5, out, models / "fp8"),
        profile(100, out, models / "fp8"),
        serve(115, 1.6, out, models / "bf16"),
    ]


def serve(budget_s: float, minutes: float, out: Path, model: Path) -> Part:
    """Ours and the built-in on dummy weights, fixed steps."""
    flags = "--load-format dummy --max-model-len 2048 --kv-cache-memory-bytes 10G"
    flags += " --gpu-memory-utilization 0.45"  # two engines share the GPU
    command = f"bench.serve --schedule fixed --minutes {minutes}"
    command += " --input-len 1024 --output-len 512 --num-requests 16"
    toy = "--eager --rounds 1 --input-len 64 --output-len 64 --num-requests 4 --concurrency 1 2"
    toy_flags = "--load-format dummy --max-model-len 512 --kv-cache-memory-bytes 64M"
    files = ("--model", str(model), "--results", str(out / model.name))
    return Part(
        f"serve-{model.name}",
        budget_s,
        (*command.split(), *files, "--contestants", "ours", BUILTIN, "--serve-flags", flags),
        (*toy.split(), "--contestants", "ours", "built-in", "--serve-flags", toy_flags),
        needs_vllm=True,
    )


def profile(budget_s: float, out: Path, model: Path) -> Part:
    """A step of ours on dummy weights."""
    command = "bench.profile_step --mode compiled --concurrency 1 8 32 --input-len 1024 --blocks 2"
    toy = "--mode eager --concurrency 1 2 --input-len 64 --coverage 0"
    files = ("--model", str(model), "--results", str(out / model.name))
    llm = json.dumps({"load_format": "dummy", "kv_cache_memory_bytes": 10 << 30})
    return Part(
        f"profile-{model.name}",
        budget_s,
        (*command.split(), "--rounds", "1", *files, "--llm", llm),
        (*toy.split(), "--llm", json.dumps({"load_format": "dummy"})),
        needs_vllm=True,
    )


def obstacle(part: Part, *, is_toy: bool, has_gpu: bool) -> str:
    """Why a part cannot be run here, or nothing."""
    if part.needs_gpu and not has_gpu and not is_toy:
        return "no GPU"
    if part.needs_vllm and importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    if is_toy and part.name == "attention" and importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return ""


def run(part: Part, *, is_toy: bool, budget_s: float) -> str:
    """Run one part; how it went."""
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", *part.command, *(part.toy if is_toy else ())],
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


# --- models without weights ----------------------------------------------------------------------


def write_without_weights(path: Path, config: dict[str, object], *, is_fp8: bool) -> Path:
    """A folder that vLLM serves with ``--load-format dummy``.

    Args:
        is_fp8: as ``dllm quantize --scheme fp8-dynamic`` would have written it.
    """
    write_checkpoint(path)  # a tiny one, for its tokenizer and generation config
    (path / "model.safetensors").unlink()
    quantization = {"quantization_config": fp8_dynamic()} if is_fp8 else {}
    (path / "config.json").write_text(json.dumps(config | quantization, indent=2))
    return path


def fp8_dynamic() -> dict[str, object]:
    """``quantization_config`` of the FP8 recipe, without LLM Compressor."""
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    from dllm.quantize.recipes import RECIPES

    recipe = RECIPES["fp8-dynamic"]
    scheme = preset_name_to_scheme(recipe.preset, ["Linear"])
    scheme.format = recipe.file_format
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=list(recipe.plan.ignore),
        quantization_status="compressed",
        format=recipe.file_format,
    )
    written: dict[str, object] = config.model_dump(mode="json")
    return written


# --- command -------------------------------------------------------------------------------------


def summary(out: Path, *, is_toy: bool) -> str:
    """One line for each load of a server, beside the floor of a pass.

    A denoise step of a request is a pass of its batch; prefill, commits and waiting are in it.
    """
    floors = {
        (row["weights"], row["batch"]): float(row["floor_ms"])
        for row in read_csv(out / "roofline.csv")
    }
    lines = []
    for weights in ("fp8", "bf16"):
        rows = [
            row for path in sorted(out.glob(f"{weights}/serve_*.csv")) for row in read_csv(path)
        ]
        for row in (row for row in rows if row["tokens_per_s"]):
            step_ms = float(row["ms_per_denoise_step"])
            floor_ms = floors.get((weights, row["concurrency"]))
            above = f", {step_ms / floor_ms:.2f} x its floor" if floor_ms and not is_toy else ""
            lines.append(
                f"{weights} batch {row['concurrency']:>2} {row['contestant'].split()[0]:9} "
                f"{step_ms:8.2f} ms a denoise step, {float(row['tokens_per_s']):9.1f} tokens/s"
                f"{above} ({row['machine']})"
            )
    return "\n".join(lines) or "No engine was measured."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what can be run, and say what was not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in parts(RESULTS, RESULTS)]
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
    print("\n=== what was run" + (" (toy sizes: no figure means anything)" if options.toy else ""))
    for row in outcomes:
        print(f"{row['part']:12} {row['outcome']}")
    print(f"\n{summary(out, is_toy=options.toy)}\n{out}")
    return int(any("FAILED" in row["outcome"] for row in outcomes))


def run_all(options: argparse.Namespace, out: Path, models: Path) -> list[dict[str, str]]:
    """Every chosen part; gpu_parts.csv has the outcomes so far after each of them."""
    has_gpu = _has_gpu()
    outcomes: list[dict[str, str]] = []
    for part in parts(out, models):
        if part.name not in options.parts:
            continue
        print(f"\n=== {part.name}", flush=True)
        how = obstacle(part, is_toy=options.toy, has_gpu=has_gpu)
        if how:
            how = f"NOT RUN: {how}"
        else:
            weights = part.name.partition("-")[2]
            if weights and not (models / weights).exists():
                config = tiny_config() if options.toy else released_config()
                is_fp8 = weights == "fp8" and has_gpu  # vLLM has no FP8 experts on a CPU
                write_without_weights(models / weights, config, is_fp8=is_fp8)
            scale = options.budget * (TOY_PATIENCE if options.toy else 1)
            how = run(part, is_toy=options.toy, budget_s=part.budget_s * scale)
        print(how, flush=True)
        outcomes.append({"part": part.name, "outcome": how})
        write_csv(out / "gpu_parts.csv", outcomes)
    return outcomes


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
