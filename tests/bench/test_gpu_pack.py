"""bench/gpu's kit for a machine without a network: what is packed."""

import struct
import tarfile

import pytest

from bench.context import ROOT
from bench.gpu import pack
from bench.gpu.pack import MAGIC, strip_cubins


def entry(kind: int, architecture: int, body: bytes) -> bytes:
    header = bytearray(64)
    struct.pack_into("<HHIQ", header, 0, kind, 0, len(header), len(body))
    struct.pack_into("<I", header, 28, architecture)
    return bytes(header) + body


def library(*entries: bytes) -> bytes:
    """A 64-bit ELF with nothing but a section of GPU code, one container of these entries."""
    body = b"".join(entries)
    code = struct.pack("<IHHQ", MAGIC, 1, 16, len(body)) + body
    names = b"\0.nv_fatbin\0.names\0"
    offsets = 64, 64 + len(code), 64 + len(code) + len(names)
    header = bytearray(64)
    struct.pack_into("<Q", header, 0x28, offsets[2])
    struct.pack_into("<HHH", header, 0x3A, 64, 3, 2)
    table = b""
    for name, offset, size in ((0, 0, 0), (1, offsets[0], len(code)), (12, offsets[1], len(names))):
        table += struct.pack("<IIQQQQ", name, 0, 0, 0, offset, size).ljust(64, b"\0")
    return bytes(header) + code + names + table


def test_gpu_code_of_other_generations_is_taken_out():
    ptx, old, here = entry(1, 90, b"p" * 16), entry(2, 80, b"o" * 64), entry(2, 90, b"h" * 32)
    whole = library(ptx, old, here)
    stripped = strip_cubins(whole)
    assert len(stripped) == len(whole) and here in stripped
    assert old not in stripped and ptx not in stripped
    assert struct.unpack_from("<Q", stripped, 64 + 8) == (len(here),)
    assert ptx in strip_cubins(library(ptx, old)), "the driver translates it"
    assert strip_cubins(b"\x7fELF".ljust(64, b"\0")) == b"\x7fELF".ljust(64, b"\0")


def test_what_is_packed_of_vllm(tmp_path):
    refusal = b'if not found:\n    raise ImportError(\n        "no library"\n    )\nrest = 1\n'
    pieces, flash = pack.engine_pieces(
        {
            pack.FLASH_ATTENTION: refusal,
            f"{pack.FLASH_4}interface.py": b"4",
            "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": b"2",
            pack.EXTENSION: b"\x7fELF".ljust(64, b"\0"),
            "vllm/envs.py": b"",
        }
    )
    assert {name: set(files) for name, files in pieces.items()} == {
        "extension": {pack.EXTENSION},
        "kernels": set(),
        "engine": {pack.FLASH_ATTENTION, "vllm/envs.py", "bin/vllm"},
    }
    assert pieces["engine"][pack.FLASH_ATTENTION] == b"if not found:\n    pass\nrest = 1\n"
    assert flash == {f"{pack.FLASH_4}interface.py": b"4"}
    with pytest.raises(ValueError, match="not the one"):
        pack.engine_pieces({pack.FLASH_ATTENTION: b""})
    pack.write({("1", "engine"): pieces["engine"]}, tmp_path)
    with tarfile.open(tmp_path / "1/engine.tar.xz") as archive:
        assert set(archive.getnames()) == set(pieces["engine"])
        assert archive.getmember("bin/vllm").mode == 0o755


def test_checkpoints_are_packed_as_committed():
    names = pack.checkpoint_files(ROOT, ["tiny-drafter"]).keys()
    assert {"checkpoints/tiny-drafter/config.json"} < names
    assert all((ROOT / name).is_file() for name in names)


def test_pins_name_one_version_of_each_package():
    lines = (pack.HERE / "pins.txt").read_text().splitlines()
    pins = [line.partition("#")[0].strip() for line in lines]
    assert "vllm==0.32.0" in pins
    assert all(pin.count("==") == 1 for pin in (*filter(None, pins), *pack.FLASH))
