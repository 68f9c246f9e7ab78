"""What Triton compiles for a launch, and what the compiler makes of it; without a GPU.

`recorded` collects the kernel launches of ordinary code as `Variant`s instead of running them, so
tensors may be on the meta device and cost nothing. `Variant.compiled` then compiles one for any GPU
with the compiler and the assembler that Triton brings. Not while kernels are interpreted
(TRITON_INTERPRET).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource
from triton.runtime import driver


@dataclass(frozen=True)
class Compiled:
    """What became of a kernel on one GPU; registers of a thread, bytes of a program (shared memory)
    and of a thread (spills).

    matrix: the matrix instruction: tcgen05, wgmma, mma, or empty. waits: for each loop that loads
    ahead, how many groups of loads are still under way while it computes; 0 means that computing
    begins when everything has arrived. loads: load instructions of global memory, asynchronous ones
    included. barriers: of all threads of a program. instructions: of a thread, in machine code;
    each counts once, also in a loop; None where they are not counted.
    """

    registers: int
    spilled: int
    shared: int
    num_warps: int
    matrix: str
    waits: tuple[int, ...]
    loads: int
    barriers: int
    instructions: int | None


@dataclass(frozen=True)
class Variant:
    """One launch as Triton's cache knows it: ``key`` says if it needs to be compiled."""

    kernel: Any
    key: str
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    num_warps: int
    num_stages: int

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.kernel.fn.__name__)

    def compiled(self, arch: int, counts_instructions: bool) -> Compiled:
        """Compile and assemble for a GPU, for instance 90. Raises if either step fails.

        To count instructions takes as long as to compile.
        """
        result = triton.compile(
            ASTSource(self.kernel, self.signature, self.constants, self.attributes),
            target=GPUTarget("cuda", arch, 32),
            options={"num_warps": self.num_warps, "num_stages": self.num_stages},
        )
        ptx, ttgir = result.asm["ptx"], result.asm["ttgir"]
        registers, spilled = _assembled(ptx, arch)
        return Compiled(
            registers=registers,
            spilled=spilled,
            shared=result.metadata.shared,
            num_warps=result.metadata.num_warps,
            matrix=_matrix_instruction(ptx),
            waits=_waits_in_loops(ttgir),
            loads=len(re.findall(r"\b(?:ld\.global|cp\.async\.c[ag]|cp\.async\.bulk)", ptx)),
            barriers=len(re.findall(r"\bbar(?:rier)?\.(?:cta\.)?sync", ptx)),
            instructions=_instructions(result.asm["cubin"]) if counts_instructions else None,
        )


def _assembled(ptx: str, arch: int) -> tuple[int, int]:
    """Registers of a thread, and bytes of a thread that did not fit into them."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={sm_arch_from_capability(arch)}"]
        command += [file.name, "-o", "/dev/null"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", log)
    assert registers, log
    return int(registers[1]), sum(map(int, re.findall(r"(\d+) bytes spill stores", log)))


def _instructions(cubin: bytes) -> int:
    """Of a kernel's machine code, without those that only fill space or end it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9_]+)", text)
    return sum(name not in ("NOP", "BRA") for name in names)


def _matrix_instruction(ptx: str) -> str:
    for name, text in (("tcgen05", "tcgen05.mma"), ("wgmma", "wgmma.mma"), ("mma", "mma.sync")):
        if text in ptx:
            return name
    return ""


def _waits_in_loops(ttgir: str) -> tuple[int, ...]:
    """The number of each wait for loads inside an innermost loop, in TTGIR's text."""
    waits: list[int] = []
    loops: list[tuple[int, list[int]]] = []  # of the open loops: indentation, waits
    outer: set[int] = set()  # indentation of the open loops that contain others
    for line in ttgir.splitlines():
        indent = len(line) - len(line.lstrip())
        is_end = line.lstrip().startswith("}") and "} do {" not in line
        if loops and is_end and indent == loops[-1][0]:
            found = loops.pop()[1]
            waits += [] if indent in outer else found
            outer.discard(indent)
        if re.search(r"\bscf\.(for|while)\b", line):
            outer |= {each for each, _ in loops}
            loops.append((indent, []))
        wait = re.search(r"ttg\.async_wait .*num = (\d+)", line)
        if wait and loops:
            loops[-1][1].append(int(wait[1]))
    return tuple(waits)


def _no_device(arch: int) -> Any:
    """What Triton asks its driver at a launch, for a GPU that is not there."""
    target = GPUTarget("cuda", arch, 32)
    return SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: target,
    )


@contextmanager
def recorded() -> Iterator[list[Variant]]:
    """Launches within are not run: each adds a Variant to the list, equal keys as well."""
    launches: list[Variant] = []

    def record(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        launches.append(
            Variant(
                fn.jit_function, key, compile["signature"], compile["constants"],
                compile["configs"][0], compile["num_warps"], compile["num_stages"],
            )
        )  # fmt: skip
        return True  # nothing to compile, nothing to run

    with mock.patch.object(driver, "_active", _no_device(90)), knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = record
        yield launches
