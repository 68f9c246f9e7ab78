"""Quantizes a checkpoint: calibrates if the scheme needs it, writes it, and checks it.

This is what ``dllm.quantize.command`` becomes in LLM Compressor's environment.
"""

import hashlib
import importlib.metadata
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError

from dllm.quantize.checkpoint import FEW, INDEX, Checkpoint, in_units
from dllm.quantize.convert import Tensors
from dllm.quantize.job import COMPANIONS, Job, check_out, prepare
from dllm.quantize.recipes import IGNORED, quantization_config
from dllm.quantize.verify import verify
from dllm.settings.command import FAILED, INTERRUPTED, OK, CommandError
from dllm.settings.files import whole

RUN = "quantize_run.json"  # beside the weights: what they were made with
say = partial(print, flush=True)  # lines of progress


Write = Callable[[Job, Path, Tensors], None]


def make(job: Job, write: Write, measure: Callable[[Job], Tensors]) -> None:
    """Raises CommandError if it cannot be done; ``job.out`` is not there then.

    ``write`` gets a folder with what is needed of the source, and the static scales of inputs.
    """
    input_scales = measure(job) if job.scheme.needs_calibration else {}
    config = quantization_config(job.scheme, job.ignored)
    try:
        with whole(job.out) as out, tempfile.TemporaryDirectory() as folder:
            out.mkdir()
            weights = (path.name for path in {*job.source.files.values()})
            for name in ("config.json", INDEX, *weights, *COMPANIONS):
                if (job.source.path / name).is_file():
                    (Path(folder) / name).symlink_to((job.source.path / name).absolute())
            write(replace(job, out=out), Path(folder), input_scales)
            for file in out.glob("*.safetensors"):
                file.chmod(0o644)  # safetensors writes it readable by its owner only
            _write_json(out / RUN, run_record(job))
            _write_json(out / "config.json", {**job.source.config, "quantization_config": config})
            _refuse_bad_scales(out)
            check_out(job.out)
    except (OSError, SafetensorError) as error:
        raise CommandError(f"the checkpoint cannot be written: {error}") from error


def _refuse_bad_scales(made: Path) -> None:
    """LLM Compressor writes, in silence, a scale of 1 in the place of one that is not finite."""
    if problems := verify(Checkpoint(made), None, lambda: None).problems:
        raise CommandError(
            f"{'; '.join(problems[:FEW])}. Nothing was written: weights are all zero or not "
            "finite, or calibration has never run a layer."
        )


def _write_json(file: Path, value: Mapping[str, object]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def run_record(job: Job) -> dict[str, object]:
    record: dict[str, object] = {
        "scheme": job.scheme.name,
        "not_quantized": {**IGNORED, **dict.fromkeys(job.ignored, "--ignore")},
        "made_with": {name: _version(name) for name in ("llmcompressor", "compressed-tensors")},
    }
    if job.scheme.needs_calibration:
        # Prompts may be traffic, which nobody wants to publish with the checkpoint.
        given = json.dumps(job.prompts, sort_keys=True).encode()
        record["calibration"] = {
            "prompts": len(job.prompts),
            "sha256": hashlib.sha256(given).hexdigest(),
            "blocks": job.blocks,
            "seed": job.seed,
        }
    return record


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def peak_memory() -> str:
    """The most memory that this process has had so far, mapped files included."""
    unit = 1 if sys.platform == "darwin" else 1024  # of getrusage: bytes or kilobytes
    return in_units(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def _measure(job: Job) -> Tensors:
    from dllm.quantize.calibrate import measure_inputs

    modules = [layer.module for layer in job.layers]
    say(f"calibration runs the model, all of which is in the memory of {job.device}")
    start, total = time.monotonic(), len(job.prompts)

    def on_prompt(number: int) -> None:
        if number in (1, total) or number % max(1, total // 8) == 0:
            seconds = time.monotonic() - start
            say(
                f"calibration: {number}/{total} prompts, {seconds:.1f} s of about "
                f"{seconds / number * total:.0f}, peak memory {peak_memory()}"
            )

    return measure_inputs(job, modules, on_prompt)


def main(argv: Sequence[str]) -> int:
    # Set before LLM Compressor is imported: it would log a line for every module that it touches.
    os.environ.setdefault("LLM_COMPRESSOR_LOG_DISABLED", "true")
    torch.set_grad_enabled(False)
    # By an exception, which clears away what was begun.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        job, _ = prepare(argv)
        if job.device.startswith("cuda") and not torch.cuda.is_available():
            raise CommandError(f"--device {job.device}: this environment's torch sees no GPU.")
        from dllm.quantize.compressor import write

        make(job, write, _measure)
    except CommandError as error:
        print(f"dllm quantize: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("dllm quantize: interrupted", file=sys.stderr)
        return INTERRUPTED
    say(f"peak memory {peak_memory()}")
    say(f"{job.out} is ready: `dllm check-quant {job.out} --against {job.source.path}`")
    return OK
