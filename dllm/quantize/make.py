"""Quantizes a checkpoint: calibrates if the scheme needs it, then writes one group at a time.

This is the main program of LLM Compressor's environment; ``dllm.quantize.command`` starts it.
"""

import importlib.metadata
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from dllm.quantize.checkpoint import INDEX, byte_size, in_units, read_header
from dllm.quantize.groups import QuantizeFused, Tensors, quantize_group
from dllm.quantize.job import COMPANIONS, Job, prepare
from dllm.quantize.recipes import IGNORED, quantization_config
from dllm.quantize.staging import Staging
from dllm.settings.command import FAILED, INTERRUPTED, OK, CommandError

INPUT_SCALES = "input_scales.safetensors"
say = partial(print, flush=True)  # lines of progress


def make(
    job: Job,
    config: dict[str, object],
    quantize: QuantizeFused,
    measure: Callable[[Job], Tensors],
) -> None:
    """Write the quantized checkpoint; files that an interrupted run has finished are kept.

    Args:
        config: the ``quantization_config`` for its config.json.
        quantize: turns weights into the tensors of a checkpoint.
        measure: calibrates: finds the scales of inputs. Called if the scheme needs it.

    Raises:
        CommandError: says why it cannot be done; ``job.out`` does not exist then.
    """
    staging = Staging(job.out, run_record(job))
    input_scales: Tensors = {}
    if job.scheme.needs_calibration:
        if staging.has(INPUT_SCALES):
            say("calibration: already there")
        else:
            staging.save(INPUT_SCALES, measure(job))
        input_scales = staging.load(INPUT_SCALES)
    _write_groups(job, staging, quantize, input_scales)
    for name in COMPANIONS:
        if (job.source.path / name).is_file():
            staging.copy(job.source.path / name)
    staging.write_json("config.json", {**job.source.config, "quantization_config": config})
    staging.discard(INPUT_SCALES)
    staging.finish()


def _write_groups(
    job: Job, staging: Staging, quantize: QuantizeFused, input_scales: Tensors
) -> None:
    """Write the file of each group that has none yet, and their index."""
    weight_map: dict[str, str] = {}
    total = 0
    for number, group in enumerate(job.groups, 1):
        file = f"model-{number:05d}-of-{len(job.groups):05d}.safetensors"
        start, how = time.monotonic(), "already there"
        if not staging.has(file):
            scheme = job.scheme
            staging.save(file, quantize_group(job.source, group, scheme, quantize, input_scales))
            job.source.release()
            how = f"{time.monotonic() - start:.1f} s"
        header = read_header(staging.path / file)
        size = sum(byte_size(shape, dtype) for shape, dtype in header.values())
        say(f"{number}/{len(job.groups)} {group.label}: {in_units(size)}, {how}")
        weight_map |= dict.fromkeys(header, file)
        total += size
    staging.write_json(INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def run_record(job: Job) -> dict[str, object]:
    """Everything that the files depend on, and why some layers are not quantized."""
    files = sorted(set(job.source.files.values()))
    record: dict[str, object] = {
        "scheme": job.scheme.name,
        "source": {
            file.name: {"bytes": file.stat().st_size, "modified_ns": file.stat().st_mtime_ns}
            for file in files
        },
        "not_quantized": dict(IGNORED),
        "made_with": {name: _version(name) for name in ("llmcompressor", "compressed-tensors")},
    }
    if job.scheme.needs_calibration:
        record["calibration"] = {
            "prompts": job.prompts,
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
    """Calibrate with LLM Compressor's observers."""
    from dllm.quantize.calibrate import measure_inputs

    modules = [layer.module for group in job.groups for layer in group.layers]
    start = time.monotonic()

    def on_prompt(number: int) -> None:
        if number == len(job.prompts) or number % max(1, len(job.prompts) // 8) == 0:
            seconds = time.monotonic() - start
            say(
                f"calibration: {number}/{len(job.prompts)} prompts, {seconds:.1f} s, peak "
                f"memory {peak_memory()}"
            )

    return measure_inputs(job, modules, on_prompt)


def main(argv: Sequence[str]) -> int:
    """Do what ``dllm quantize`` was asked to; returns an exit status."""
    # Set before LLM Compressor is imported: it would log a line for every module that it touches.
    os.environ.setdefault("LLM_COMPRESSOR_LOG_DISABLED", "true")
    torch.set_grad_enabled(False)
    try:
        job, _ = prepare(argv)
        if job.device.startswith("cuda") and not torch.cuda.is_available():
            raise CommandError(f"--device {job.device}: this environment's torch sees no GPU.")
        from dllm.quantize.compressor import quantizer

        config = quantization_config(job.scheme)
        make(job, config, quantizer(job.scheme, job.device), _measure)
    except CommandError as error:
        print(f"dllm quantize: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("dllm quantize: interrupted; the same command goes on from here", file=sys.stderr)
        return INTERRUPTED
    say(f"peak memory {peak_memory()}")
    return OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
