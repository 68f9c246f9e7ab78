"""Packs vLLM and what it needs for a GPU machine without a network (README.md).

    python -m bench.gpu.pack --out .lease             # .lease/1/*.tar.xz, .lease/2/*.tar.xz

1 holds vLLM, the packages of pins.txt and checkpoints, 2 FlashAttention 4; the checkout itself
travels with every call. Prints what each call carries; exits with 1 above LIMIT.

vLLM's CUDA libraries hold machine code for every GPU generation. That of the others is taken out
(``strip_cubins``), which makes them half as large.
"""

import argparse
import io
import lzma
import re
import shutil
import struct
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

LIMIT = 64 << 20  # bytes that travel with a call
HERE = Path(__file__).parent
PYTHON = "3.12"
GLIBC_MINORS = range(39, 4, -1)  # pip takes each platform tag literally

CUTLASS = ("", "-libs-base", "-libs-core", "-libs-cu13")
FLASH = (
    *(f"nvidia-cutlass-dsl{part}==4.8.0" for part in CUTLASS),
    *("quack-kernels==0.6.5", "torch-c-dlpack-ext==0.1.5"),
)
MODELS = ("tiny-dllm", "tiny-nemotron", "tiny-sdar", "tiny-llada2", "tiny-ar", "tiny-drafter")

# Files of vLLM's wheel that are left out: a front end that must be asked for, FlashAttention 2 and
# 3, kernels of other models and other GPUs. 4 is packed apart.
EXTENSION = "vllm/_C_stable_libtorch.abi3.so"
FLASH_4 = "vllm/vllm_flash_attn/cute/"
LEFT_OUT = re.compile(
    rf"vllm/vllm-rs|vllm/vllm_flash_attn/_vllm_fa[23]_C.*|{FLASH_4}.*"
    r"|vllm/third_party/(deep_gemm|fmha_sm100|tml_fa4)/.*|vllm/_qutlass_C.*"
)
# What no server reads: commands, translations, tokenizers of others, profilers, static libraries.
UNREAD = re.compile(
    r"(bin|etc|include|share)/.*|.*\.dist-info/(sboms/.*|RECORD|INSTALLER|REQUESTED)|.*/stubs/.*"
    r"|pycountry/locales/.*|mistral_common/data/.*|.*\.a"
    r"|nvidia_cutlass_dsl/dsl_packages/iket/profiler/.*"
)
# vllm_flash_attn, which vLLM imports on every CUDA machine, refuses to be without its libraries.
FLASH_ATTENTION = "vllm/vllm_flash_attn/__init__.py"
REFUSAL = re.compile(r"^    raise ImportError\(\n(?:.*\n)*?    \)\n", re.MULTILINE)
# A command of the machine's own Python, whatever that is.
COMMAND = b"""\
#!/usr/bin/env python3
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from vllm.entrypoints.cli.main import main

sys.exit(main())
"""

GPU_MAJOR = 9  # of the compute capability: H100, H200
MAGIC = 0xBA55ED50

Files = dict[str, bytes]


def installed(folder: Path, *asked: str) -> Files:
    """What pip installs there of the requirements that it is asked for, on the GPU's machine."""
    shutil.rmtree(folder, ignore_errors=True)
    tags = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS]
    tags += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    pip += ["--no-deps", "--no-compile", "--only-binary=:all:", "--implementation=cp"]
    pip += [f"--python-version={PYTHON}", *(f"--platform={tag}" for tag in tags)]
    subprocess.run([*pip, f"--target={folder}", *asked], check=True)
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in paths.items() if not UNREAD.fullmatch(name)}


def engine_pieces(files: Files) -> tuple[dict[str, Files], Files]:
    """Pieces of vLLM that are unpacked at once, and FlashAttention 4.

    Raises ValueError: not the pinned vLLM.
    """
    flash = {name: data for name, data in files.items() if name.startswith(FLASH_4)}
    kept = {name: data for name, data in files.items() if not LEFT_OUT.fullmatch(name)}
    for name in kept:
        if name.endswith(".so"):
            kept[name] = strip_cubins(kept[name])
    text, count = REFUSAL.subn("    pass\n", kept[FLASH_ATTENTION].decode())
    if count != 1:
        raise ValueError(f"{FLASH_ATTENTION} is not the one that was read for this script")
    kept[FLASH_ATTENTION] = text.encode()
    kept["bin/vllm"] = COMMAND
    pieces: dict[str, Files] = {"extension": {}, "kernels": {}, "engine": {}}
    for name, data in kept.items():
        is_library = name.endswith(".so")
        piece = "extension" if name == EXTENSION else "kernels" if is_library else "engine"
        pieces[piece][name] = data
    return pieces, flash


def tar_of(files: Files) -> bytes:
    """An archive that depends on nothing but the files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in sorted(files.items()):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.mode = 0o755 if name.startswith("bin/") else 0o644
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def compressed(data: bytes) -> bytes:
    filters = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 9}]  # of x86 code
    return lzma.compress(data, filters=filters)


def write(pieces: Mapping[tuple[str, str], Files], out: Path) -> None:
    """Write OUT/CALL/NAME.tar.xz of each (call, name)."""
    with ProcessPoolExecutor(2) as pool:
        packed = pool.map(compressed, map(tar_of, pieces.values()))
        for (call, name), data in zip(pieces, packed, strict=True):
            (out / call).mkdir(parents=True, exist_ok=True)
            (out / call / f"{name}.tar.xz").write_bytes(data)


def checkpoint_files(root: Path, models: Iterable[str] = MODELS) -> Files:
    """As committed: they are not in the tree that travels."""
    git = ["git", "-C", str(root), "archive", "HEAD", *(f"checkpoints/{one}" for one in models)]
    packed = subprocess.run(git, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        found = {one.name: archive.extractfile(one) for one in archive}
        return {name: file.read() for name, file in found.items() if file is not None}


def travels(root: Path, out: Path) -> dict[str, int]:
    """Bytes that each call carries: its archives, and the tree."""
    git = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, capture_output=True, text=True, check=True).stdout.split("\0")
    tree = [path for name in listed if name and (path := root / name).is_file()]
    return {
        call: sum(path.stat().st_size for path in (*tree, *(out / call).glob("*.tar.xz")))
        for call in ("1", "2")
    }


# --- GPU code of other generations ----------------------------------------------------------------

# The section ``.nv_fatbin`` is a row of containers, one for each compiled file: a header with the
# size of what follows, and entries, which are machine code of one architecture (it runs on its own
# generation only) or PTX (the driver translates it if no machine code fits). Containers stay where
# they are, because the library refers to their addresses; what is kept moves to the front of its
# container, and the rest becomes zeros that no size covers. A container with nothing for this GPU
# keeps one entry that does not fit, so that the driver says what it said before.


@dataclass(frozen=True)
class Entry:
    start: int
    end: int
    is_code: bool
    architecture: int

    @property
    def runs_here(self) -> bool:
        major = self.architecture // 10
        return major == GPU_MAJOR if self.is_code else major <= GPU_MAJOR


def strip_cubins(library: bytes) -> bytes:
    """The library without GPU code that no GPU of generation GPU_MAJOR runs."""
    data = bytearray(library)
    containers = list(_containers(data))
    foreign = [data[e.start : e.end] for _, some in containers for e in some if not e.runs_here]
    filler = min(foreign, key=len, default=b"")
    for at, entries in containers:
        fits = any(e.is_code and e.runs_here for e in entries)
        wanted = [e for e in entries if e.runs_here and (e.is_code or not fits)]
        body = b"".join(data[e.start : e.end] for e in wanted) or bytes(filler)
        begin, end = entries[0].start, entries[-1].end
        struct.pack_into("<Q", data, at + 8, len(body))
        data[begin:end] = body + bytes(end - begin - len(body))
    assert len(data) == len(library)
    return bytes(data)


def _containers(data: bytearray) -> Iterator[tuple[int, list[Entry]]]:
    """Where each container of GPU code is, and its entries."""
    at, end = _elf_section(data, b".nv_fatbin")
    while at < end:
        magic, _, header, body = struct.unpack_from("<IHHQ", data, at)
        if magic != MAGIC:
            at += 8  # padding
            continue
        entries, start, stop = [], at + header, at + header + body
        while start < stop:
            kind, _, head, size = struct.unpack_from("<HHIQ", data, start)
            (architecture,) = struct.unpack_from("<I", data, start + 28)
            assert kind in (1, 2) and 50 <= architecture < 200, "not the format that is known"
            entries.append(Entry(start, start + head + size, kind == 2, architecture))
            start = entries[-1].end
        assert entries and start == stop, "not the format that is known"
        yield at, entries
        at = stop


def _elf_section(data: bytearray, wanted: bytes) -> tuple[int, int]:
    """(start, end) in the file of a section of a 64-bit ELF; an empty range if there is none."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    for name, _, _, _, offset, length in headers:
        start = headers[names][4] + name
        if data[start : data.index(0, start)] == wanted:
            return offset, offset + length
    return 0, 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder in the checkout")
    out = parser.parse_args(arguments).out.resolve()
    files = installed(out / "site", f"--requirement={HERE / 'pins.txt'}")
    of_vllm = {name: data for name, data in files.items() if re.match("vllm[/-]", name)}
    pieces, flash = engine_pieces(of_vllm)
    pieces["packages"] = {name: files[name] for name in files.keys() - of_vllm}
    pieces["checkpoints"] = checkpoint_files(out.parent)
    archives = {("1", name): files for name, files in pieces.items()}
    write(archives | {("2", "flash"): flash | installed(out / "flash", *FLASH)}, out)
    totals = travels(out.parent, out)
    for call, total in totals.items():
        print(f"call {call}: {total / 2**20:.1f} of {LIMIT >> 20} MiB")
    return int(max(totals.values()) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
