"""The command line of ``dllm quantize``, which is read in both environments (``job``)."""

import argparse
from pathlib import Path

from dllm.settings.command import positive

MADE = ("fp8-dynamic", "nvfp4")  # schemes


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="dllm quantize",
        description="Quantize a checkpoint with LLM Compressor.",
        allow_abbrev=False,
    )
    found.add_argument("model", type=Path, help="directory of a checkpoint in bf16")
    found.add_argument("--scheme", required=True, choices=MADE)
    found.add_argument("--out", type=Path, required=True, help="directory to make")
    found.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="LAYER",
        help="one more layer to leave in bf16: its name, or `re:.*` and a pattern, as in LLM "
        "Compressor's list; may be repeated",
    )
    found.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE.jsonl",
        help='prompts for nvfp4, {"prompt": ...} or {"messages": ...} a line (default: bundled '
        "general prompts)",
    )
    found.add_argument("--samples", type=positive, default=64, help="prompts to calibrate with")
    found.add_argument("--blocks", type=positive, default=2, help="canvases to fill for a prompt")
    found.add_argument("--seed", type=int, default=0, help="of the noise")
    found.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    found.add_argument(
        "--python",
        type=Path,
        help="interpreter that has LLM Compressor (default: .venv-quant of `make setup-quant`)",
    )
    return found
