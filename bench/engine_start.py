"""Does an engine run here at all? vLLM's kernels compute, and tiny-dllm's answers are the CPU's.

    python -m bench.engine_start                               # eager
    python -m bench.engine_start --stages ours-compiled built-in-compiled
    python -m bench.engine_start --write                       # the expected answers, on a CPU

    stage              says
    kernels            vLLM's compiled library loads, and on a GPU its kernels compute
    ours, built-in     the engine serves checkpoints/tiny-dllm, eager
    ...-compiled       the same with torch.compile, and on a GPU with CUDA graphs

Each stage is a process of its own. Answers are compared with those in bench/expected_answers.json,
which a CPU gave: rounding differs between machines, so a text may differ, but not many more answers
may be wrong (--worse-by). Written to --results: start.csv, after every stage. Exits with 1 when a
stage failed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.context import RESULTS, ROOT, provenance, write_csv
from bench.profile_step import BUILTIN, OURS, environment

MODEL = ROOT / "checkpoints/tiny-dllm"
EXPECTED = ROOT / "bench/expected_answers.json"
KERNELS, COMPILED = "kernels", "-compiled"
STAGES = (KERNELS, OURS, BUILTIN, OURS + COMPILED, BUILTIN + COMPILED)
QUESTIONS_A_FAMILY = 2
MAX_TOKENS = 128


# --- vLLM's kernels ------------------------------------------------------------------------------


def check_kernels() -> str:
    """Load them; on a GPU, compare some with plain torch.

    Raises:
        ArithmeticError: one computes something else.
        ImportError: a library was built for another torch, or is not there.
    """
    import torch

    said = f"python {platform.python_version()}, torch {torch.__version__}"
    if not torch.cuda.is_available():
        importlib.import_module("vllm._C")
        return f"{said}; no GPU: only loaded"
    for library in ("_C_stable_libtorch", "_moe_C_stable_libtorch"):
        importlib.import_module(f"vllm.{library}")
    capability = "{}.{}".format(*torch.cuda.get_device_capability())
    return f"{said}, compute capability {capability}; {cuda_errors()}"


def cuda_errors() -> str:
    """The largest error of some kernels of each library, relative to the largest number."""
    import torch
    from vllm import _custom_ops as ops

    errors: dict[str, float] = {}

    def compare(name: str, got: Any, expected: Any, tolerance: float) -> None:
        error = float((got.float() - expected.float()).abs().max() / expected.float().abs().max())
        errors[name] = error
        if not error < tolerance:
            raise ArithmeticError(f"{name} is off by {error:.1e} of the largest number")

    x = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16)
    weight = torch.rand(512, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(x)
    ops.rms_norm(out, x, weight, 1e-6)
    normed = x.float() * (x.float().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    compare("rms_norm", out, normed * weight.float(), 2e-2)  # bf16: 2 ** -8, twice
    other = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    left, left_scale = ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    right, right_scale = ops.scaled_fp8_quant(other, use_per_token_if_dynamic=True)
    a, b = left.float() * left_scale, right.float() * right_scale
    compare("scaled_fp8_quant", a, x, 8e-2)  # e4m3: 2 ** -4
    scales = left_scale, right_scale.view(1, -1)
    product = ops.cutlass_scaled_mm(left, right.t(), *scales, torch.bfloat16)
    compare("cutlass_scaled_mm", product, a @ b.t(), 2e-2)
    logits = torch.randn(64, 128, device="cuda")
    weights = torch.empty(64, 8, device="cuda")
    experts, rows = (torch.empty(64, 8, device="cuda", dtype=torch.int32) for _ in range(2))
    ops.topk_softmax(weights, experts, rows, logits)
    chosen = logits.softmax(-1).topk(8)
    compare("topk_softmax", weights, chosen.values, 1e-4)
    if not torch.equal(experts.long(), chosen.indices):
        raise ArithmeticError("topk_softmax chose other experts")
    return ", ".join(f"{name} {error:.0e}" for name, error in errors.items())


# --- an engine -----------------------------------------------------------------------------------


def answers(stage: str, model: Path, questions: Sequence[str]) -> tuple[float, list[str]]:
    """Seconds until an engine was ready, and its answers, asked all at once, greedy.

    Raises:
        RuntimeError: the other implementation serves.
    """
    from vllm import LLM, SamplingParams

    server = stage.removesuffix(COMPILED)
    begin = time.monotonic()
    llm = LLM(
        str(model),
        enforce_eager=not stage.endswith(COMPILED),
        language_model_only=server == BUILTIN,  # else it wants an image processor
        max_model_len=512,
        max_num_seqs=8,
        kv_cache_memory_bytes=256 << 20,
        disable_log_stats=True,
    )
    ready_s = time.monotonic() - begin
    core: Any = llm.llm_engine.engine_core
    sampler = core.engine_core.model_executor.driver_worker.worker.model_runner.sampler
    if type(sampler).__module__.startswith("dllm.") != (server == OURS):
        raise RuntimeError(f"{type(sampler).__module__} serves {stage}")
    # The built-in refuses every temperature but its own.
    given = {"temperature": 0.0} if server == OURS else {}
    params = SamplingParams(max_tokens=MAX_TOKENS, **given)
    conversations: Any = [[{"role": "user", "content": question}] for question in questions]
    outputs = llm.chat(conversations, params, use_tqdm=False)
    return ready_s, [output.outputs[0].text for output in outputs]


def compared(
    stage: str, wanted: dict[str, Any], got: Sequence[str], model: Path, worse_by: int
) -> str:
    """How many answers agree with those of the CPU, and how many are right.

    Raises:
        ArithmeticError: more than ``worse_by`` fewer than there are right.
    """
    server, questions = stage.removesuffix(COMPILED), wanted["questions"][: len(got)]
    pairs = list(zip(questions, got, strict=True))
    same = sum(text == question[server] for question, text in pairs)
    right = sum(text.strip() in question["accepted"] for question, text in pairs)
    there = sum(question[server].strip() in question["accepted"] for question in questions)
    said = f"{same} of {len(got)} answers as on a CPU, {right} right (there {there})"
    if weights_sha256(model) != wanted["model_sha256"]:
        said += "; expected answers are those of other weights"
    if right < there - worse_by:
        raise ArithmeticError(said)
    return said


def weights_sha256(model: Path) -> str:
    """Of the checkpoint's only file of weights."""
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()


def write_expected(model: Path, path: Path) -> None:
    """Both implementations' answers, eager, to two questions of each family.

    Raises:
        RuntimeError: an engine failed.
    """
    from dllm.tasks.suite import FAMILIES, questions

    # Every family once, then every family again: a few of them are a sample of all.
    drawn = questions(FAMILIES, "heldout", QUESTIONS_A_FAMILY)
    drawn = [
        one for number in range(QUESTIONS_A_FAMILY) for one in drawn[number::QUESTIONS_A_FAMILY]
    ]
    rows: list[dict[str, object]] = [
        {"family": one.family, "question": one.prompt, "accepted": sorted(one.accepted)}
        for one in drawn
    ]
    wanted = {"model_sha256": weights_sha256(model), "questions": rows}
    path.write_text(json.dumps(wanted, indent=1, ensure_ascii=False) + "\n")
    for server in (OURS, BUILTIN):
        found = in_process(server, model, path, len(rows), worse_by=None)
        if found["status"] != "ok":
            raise RuntimeError(f"{server}: {found['detail']}")
        for row, text in zip(rows, found["answers"], strict=True):
            row[server] = text
        path.write_text(json.dumps(wanted, indent=1, ensure_ascii=False) + "\n")


# --- stages as processes -------------------------------------------------------------------------


def in_process(
    stage: str, model: Path, expected: Path, count: int, worse_by: int | None
) -> dict[str, Any]:
    """What ``run_stage`` writes, from a process of its own; what failed if it wrote nothing."""
    with tempfile.TemporaryDirectory(prefix="dllm-start-") as folder:
        path = Path(folder) / "found.json"
        chosen = {
            **{"stage": stage, "model": str(model), "expected": str(expected)},
            **{"count": count, "worse_by": worse_by, "path": str(path)},
        }
        command = [sys.executable, "-m", "bench.engine_start", "--here", json.dumps(chosen)]
        server = BUILTIN if stage.startswith(BUILTIN) else OURS
        begin = time.monotonic()
        done = subprocess.run(command, env=environment(server), cwd=ROOT, stderr=subprocess.STDOUT)
        found = {"status": "failed", "detail": f"exit code {done.returncode}", "answers": []}
        with contextlib.suppress(FileNotFoundError):
            found = json.loads(path.read_text())
        return found | {"seconds": time.monotonic() - begin}


def run_stage(chosen: dict[str, Any]) -> None:
    """Run a stage in this process, and write how it went."""
    stage, model = chosen["stage"], Path(chosen["model"])
    found: dict[str, Any] = {"status": "ok", "ready_s": None, "detail": "", "answers": []}
    try:
        if stage == KERNELS:
            found["detail"] = check_kernels()
        else:
            wanted = json.loads(Path(chosen["expected"]).read_text())
            asked = [one["question"] for one in wanted["questions"]][: chosen["count"]]
            found["ready_s"], got = answers(stage, model, asked)
            found["answers"] = got
            if chosen["worse_by"] is not None:
                found["detail"] = compared(stage, wanted, got, model, chosen["worse_by"])
    except Exception as error:  # whatever an engine raises; the next stage may still run
        found |= {"status": "failed", "detail": f"{type(error).__name__}: {error}"[:500]}
    Path(chosen["path"]).write_text(json.dumps(found))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES[:3]))
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--expected", type=Path, default=EXPECTED)
    parser.add_argument("--questions", type=int, default=100, help="at most so many")
    parser.add_argument("--worse-by", type=int, default=2, help="fewer right answers than on a CPU")
    parser.add_argument("--write", action="store_true", help="write --expected, on a CPU")
    parser.add_argument("--results", type=Path, default=RESULTS / "gpu", help="folder of the CSV")
    parser.add_argument("--here", type=json.loads, help=argparse.SUPPRESS)  # set by this command
    return parser.parse_args(arguments)


def main(
    arguments: Sequence[str] | None = None,
    run: Callable[..., dict[str, Any]] = in_process,
) -> int:
    """Run the stages, print a line for each, write the CSV."""
    options = parse(arguments)
    if options.here:
        run_stage(options.here)
        return 0
    if options.write:
        write_expected(options.model, options.expected)
        return 0
    about = provenance("bench.engine_start")
    rows: list[dict[str, object]] = []
    for stage in options.stages:
        found = run(stage, options.model, options.expected, options.questions, options.worse_by)
        columns = ("status", "seconds", "ready_s", "detail")
        rows.append({"stage": stage} | {name: found.get(name) for name in columns} | about)
        write_csv(options.results / "start.csv", rows)
        print(f"{stage:18} {found['status']:7} {found['seconds']:6.1f} s  {found['detail']}")
    return int(any(row["status"] != "ok" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
