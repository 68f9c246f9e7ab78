"""Takes GPU code of other generations out of a CUDA library, which stays as long as it was.

The section ``.nv_fatbin`` is a row of containers, one for each compiled file: a header with the
size of what follows, and entries, which are machine code of one architecture (it runs on its own
generation only) or PTX (the driver translates it if no machine code fits). Containers stay where
they are, because the library refers to their addresses; what is kept moves to the front of its
container, and the rest becomes zeros that no size covers. A container with nothing for this GPU
keeps one entry that does not fit, so that the driver says what it said before.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

GPU_MAJOR = 9  # of the compute capability: H100, H200
MAGIC = 0xBA55ED50


@dataclass(frozen=True)
class Entry:
    """Machine code or PTX for one architecture, from its header to its end."""

    start: int
    end: int
    is_code: bool
    architecture: int

    @property
    def runs_here(self) -> bool:
        """On the GPU that is packed for, at least after a translation."""
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
