"""``dllm quantize``: checks the request, then becomes ``make`` in LLM Compressor's environment."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import dllm
from dllm.quantize.arguments import parser
from dllm.settings.command import CommandError
from dllm.settings.files import ROOT, beside

# That environment has no package of ours. It is loaded by its path: this environment's
# site-packages on PYTHONPATH would bring everything else along.
START = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("dllm", sys.argv[1])
sys.modules["dllm"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["dllm"])
from dllm.quantize.make import main
sys.exit(main(sys.argv[2:]))
"""


def main(argv: Sequence[str]) -> NoReturn:
    """Raises CommandError: it cannot be done."""
    parser().parse_args(argv)  # --help, or a wrong command line, before torch is imported
    from dllm.quantize.job import prepare

    _, args = prepare(argv)
    python = find_python(args.python).absolute()
    print(f"{args.model} -> {args.out} ({args.scheme})", flush=True)
    os.environ.pop("PYTHONPATH", None)
    os.execv(python, [str(python), "-u", "-P", "-c", START, str(dllm.__file__), *argv])


def find_python(given: Path | None) -> Path:
    """In a checkout, its environment is made if missing. Raises CommandError: there is none."""
    if given is not None:
        if not given.is_file():
            raise CommandError(f"--python {given}: there is no such file.")
        return given
    if (python := beside("quant")) is not None:
        return python
    if (ROOT / "Makefile").is_file():
        print("Making LLM Compressor's environment (once): make setup-quant", flush=True)
        status = subprocess.run(["make", "-C", str(ROOT), "setup-quant"]).returncode
        if status == 0 and (python := beside("quant")) is not None:
            return python
        raise CommandError(
            f"`make setup-quant` failed; run it in {ROOT} to see why, or name an interpreter that "
            "has LLM Compressor with --python."
        )
    raise CommandError(
        "LLM Compressor needs an environment of its own. Make one (python3 -m venv quant-env; "
        "quant-env/bin/pip install 'llmcompressor==0.14.*' torch==2.13.0) and name it: --python "
        "quant-env/bin/python."
    )
