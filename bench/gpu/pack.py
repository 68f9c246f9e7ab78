"""Packs vLLM and what it needs for a GPU machine without a network (README.md).

    python -m bench.gpu.pack --out .lease             # .lease/1/*.tar.xz, .lease/2/*.tar.xz
    python -m bench.gpu.pack --out .lease --hide      # before the calls; --show after them

1 holds vLLM, the packages of pins.txt and checkpoints, 2 FlashAttention 4. The plugin is not
packed: the checkout itself travels with every call. An archive whose contents are as before is not
compressed again. Prints what each call carries; exits with 1 above LIMIT.

vLLM's CUDA libraries hold machine code for every GPU generation. That of the others is taken out
(``strip_cubins``), which makes them half as large.
"""

import argparse
import hashlib
import io
import lzma
import re
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

LIMIT = 64 << 20  # bytes that travel with a call
HERE = Path(__file__).parent
PYTHON = "3.12"
GLIBC_MINORS = range(39, 4, -1)  # pip takes each platform tag literally

FLASH = {
    "nvidia-cutlass-dsl": "4.8.0",
    "nvidia-cutlass-dsl-libs-base": "4.8.0",
    "nvidia-cutlass-dsl-libs-core": "4.8.0",
    "nvidia-cutlass-dsl-libs-cu13": "4.8.0",
    "quack-kernels": "0.6.5",
    "torch-c-dlpack-ext": "0.1.5",
}
MODELS = ("tiny-dllm", "tiny-nemotron", "tiny-sdar", "tiny-llada2", "tiny-ar", "tiny-drafter")
NOT_READ = ("checkpoints", "tests", "docs")  # checkpoints travel packed

# Files of vLLM's wheel that are left out: a front end that must be asked for, FlashAttention 2 and
# 3, kernels of other models and other GPUs. 4 is packed apart.
EXTENSION = "vllm/_C_stable_libtorch.abi3.so"
FLASH_4 = "vllm/vllm_flash_attn/cute/"
LEFT_OUT = re.compile(
    rf"vllm/vllm-rs|vllm/vllm_flash_attn/_vllm_fa[23]_C.*|{FLASH_4}.*"
    r"|vllm/third_party/(deep_gemm|fmha_sm100|tml_fa4)/.*|vllm/_qutlass_C.*"
)
# Data that no server reads: translations, tokenizers of others, profilers, static libraries.
UNREAD = re.compile(
    r"pycountry/locales/.*|mistral_common/data/.*|.*\.dist-info/(sboms/.*|RECORD)|.*/stubs/.*"
    r"|.*\.a|nvidia_cutlass_dsl/dsl_packages/iket/profiler/.*"
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


def read_pins(path: Path) -> dict[str, str]:
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return dict(line.split("==") for line in lines if line)


def download(pins: Mapping[str, str], cache: Path) -> list[Path]:
    cache.mkdir(parents=True, exist_ok=True)

    def cached(name: str, version: str) -> Path | None:
        stem = re.sub(r"[-_.]+", "_", name)
        fitting = re.compile(rf"{stem}-{re.escape(version)}(\+[^-]+)?-.*\.whl", re.IGNORECASE)
        return next((p for p in cache.glob("*.whl") if fitting.fullmatch(p.name)), None)

    missing = [f"{name}=={version}" for name, version in pins.items() if not cached(name, version)]
    if missing:
        tags = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS]
        tags += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download"]
        pip += ["--no-deps", "--only-binary=:all:", "--implementation=cp", f"--dest={cache}"]
        pip += [f"--python-version={PYTHON}", *(f"--platform={tag}" for tag in tags)]
        subprocess.run([*pip, *missing], check=True)
    found = [cached(name, version) for name, version in pins.items()]
    assert all(found), f"pip wrote other files than were asked for: {dict(pins)}"
    return [wheel for wheel in found if wheel is not None]


def wheel_files(wheel: Path) -> Files:
    """Installed files of a wheel: its scripts, headers and data are not."""
    files: Files = {}
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            name = re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", info.filename)
            is_data = re.match(r"[^/]+\.data/", name)
            if not (info.is_dir() or is_data or UNREAD.fullmatch(name)):
                files[name] = archive.read(info)
    return files


def engine_pieces(wheel: Path) -> tuple[dict[str, Files], Files]:
    """Pieces that are unpacked at once, and FlashAttention 4. ValueError: not the pinned vLLM."""
    files = wheel_files(wheel)
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
    """Write OUT/CALL/NAME.tar.xz of each (call, name) that has other contents than before."""
    todo: list[tuple[Path, str, bytes]] = []
    for (call, name), files in pieces.items():
        path, tar = out / call / f"{name}.tar.xz", tar_of(files)
        path.parent.mkdir(parents=True, exist_ok=True)
        key, note = hashlib.sha256(tar).hexdigest(), path.with_suffix(".sha256")
        if not (path.exists() and note.exists() and note.read_text() == key):
            todo.append((path, key, tar))
    with ProcessPoolExecutor(2) as pool:
        packed = pool.map(compressed, (tar for *_, tar in todo))
        for (path, key, _), data in zip(todo, packed, strict=True):
            path.write_bytes(data)
            path.with_suffix(".sha256").write_text(key)


def move(root: Path, out: Path, shows: bool) -> None:
    (out / "hidden").mkdir(exist_ok=True)
    for name in NOT_READ:
        here, there = root / name, out / "hidden" / name
        source, target = (there, here) if shows else (here, there)
        if source.exists() and not target.exists():
            source.rename(target)


def checkpoint_files(root: Path, models: Iterable[str] = MODELS) -> Files:
    found = (path for model in models for path in sorted((root / "checkpoints" / model).iterdir()))
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


def travels(root: Path, out: Path) -> dict[str, int]:
    """Bytes of the archives of each call, and of the tree without what is hidden."""
    git = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, capture_output=True, text=True, check=True).stdout.split("\0")
    read = [name for name in listed if name and name.split("/")[0] not in NOT_READ]
    paths = (root / name for name in read)
    sizes = {"tree": sum(path.stat().st_size for path in paths if path.is_file())}
    for call in ("1", "2"):
        sizes[call] = sum(path.stat().st_size for path in (out / call).glob("*.tar.xz"))
    return sizes


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
    parser.add_argument("--only-checkpoints", action="store_true", help="as a rehearsal needs")
    parser.add_argument("--hide", action="store_true", help="move what no call reads out, and end")
    parser.add_argument("--show", action="store_true", help="move it back, and end")
    given = parser.parse_args(arguments)
    out = given.out.resolve()
    root = out.parent
    if given.hide or given.show:
        move(root, out, given.show)
        return 0
    here = out / "hidden" if (out / "hidden" / "checkpoints").exists() else root
    pieces = {("1", "checkpoints"): checkpoint_files(here)}
    if not given.only_checkpoints:
        wheels = download(read_pins(HERE / "pins.txt"), out / "wheels")
        (vllm,) = (wheel for wheel in wheels if wheel.name.startswith("vllm-"))
        others = (wheel for wheel in wheels if wheel != vllm)
        of_vllm, flash = engine_pieces(vllm)
        pieces |= {("1", name): files for name, files in of_vllm.items()}
        pieces["1", "packages"] = {n: d for one in others for n, d in wheel_files(one).items()}
        for wheel in download(FLASH, out / "wheels"):
            flash |= wheel_files(wheel)
        pieces["2", "flash"] = flash
    write(pieces, out)
    sizes = travels(root, out)
    totals = {call: sizes[call] + sizes["tree"] for call in ("1", "2")}
    for call, total in totals.items():
        print(f"call {call}: {total / 2**20:.1f} of {LIMIT >> 20} MiB, when hidden")
    return int(max(totals.values()) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
