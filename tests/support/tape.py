"""CUDA graphs on a CPU: a tape of operations, with the memory and the numbers of the capture.

``install`` puts ``TapeGraph`` in the place of ``torch.cuda.CUDAGraph``, so that vLLM captures and
replays as on a GPU. A capture runs operations and records them: those of PyTorch, custom ones, and
launches of kernels, Triton's in its interpreter or what ``dllm/cpu`` has for one. A replay runs the
tape, without the Python that made it, on the very memory of the capture.

A tape holds no memory of others. What it needs and somebody has freed is a fault (``FAULTS``), and
is read as zeros, or NaN. What the capture took is memory of a pool, which graphs share:

    nobody has it when the capture ends    filled with NaN, or with wrong indices, before a replay
    somebody has it                        filled before a replay of a graph that was captured
                                           earlier, which may lie in the same memory

A capture that asks for a value of the device fails at once, as on a GPU.
"""

import ctypes
import functools
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import torch
import vllm
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._python_dispatch import _disable_current_modes as unseen
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime.interpreter import GridExecutor
from vllm.triton_utils.dispatcher import KernelOverride

FAULTS: Counter[str] = Counter()

REPOSITORY, VLLM = f"{Path(__file__).parents[2]}/", f"{Path(vllm.__file__).parents[1]}/vllm/"

# Operators whose result the host waits for on a GPU.
WAITS = frozenset(
    ["_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "nonzero_numpy"]
    + ["argwhere", "masked_select", "repeat_interleave", "bincount", "_unique", "_unique2"]
    + ["unique_dim", "unique_consecutive"]
)
# Operators that only take memory.
TAKES = frozenset(["empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"])
CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class CaptureError(RuntimeError):
    """A GPU could not capture this, or would replay something else."""


@dataclass(eq=False)
class Memory:
    """A storage that a graph uses.

    Attributes:
        is_taken: whether the capture took it.
        dtype: of the first tensor in it.
        bytes: the memory itself, which its owner may free; or the tape's own.
        is_own: whether nobody but the tape has it.
    """

    storage: StorageWeakRef
    address: int
    num_bytes: int
    is_taken: bool
    dtype: torch.dtype
    bytes: torch.Tensor | None = None
    is_own: bool = False

    def bind(self) -> None:
        """Point ``bytes`` at the memory, or at memory of the tape's own if that is free."""
        self.is_own = not self.is_there()
        if self.is_own or self.num_bytes == 0:
            self.bytes = torch.zeros(self.num_bytes, dtype=torch.uint8)
            return
        memory = (ctypes.c_char * self.num_bytes).from_address(self.address)
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)

    def is_there(self) -> bool:
        """Whether somebody else still has it, at the same address."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        return storage is not None and storage.data_ptr() == self.address

    def poison(self) -> None:
        """Fill it with what no right computation reads."""
        size = self.dtype.itemsize
        if self.dtype.is_floating_point and size > 1:
            whole = self.bytes[: self.num_bytes // size * size]
            whole.view(self.dtype).fill_(float("nan"))
        else:
            self.bytes.fill_(1 if self.dtype == torch.bool else 0x7F)


@dataclass(eq=False)
class View:
    """A tensor in a memory."""

    memory: Memory
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(self.memory.bytes.untyped_storage(), self.offset, self.size, self.stride)


@dataclass
class Entry:
    """An operation of a tape; tensors are Views until it is bound.

    Attributes:
        made: what its results are copied to; None for views, and for what it writes in place.
        where: the line of our code, or vLLM's, that ran it.
    """

    run: Callable[..., Any]
    name: str
    args: Any
    kwargs: Any
    made: list[View | None]
    where: str
    bound: tuple[Any, Any, list[torch.Tensor | None]] | None = field(default=None, repr=False)

    def bind(self) -> None:
        def real(value: Any) -> Any:
            return value.tensor() if isinstance(value, View) else value

        args, kwargs = tree_map(real, (self.args, self.kwargs))
        self.bound = args, kwargs, [real(view) for view in self.made]

    def replay(self) -> None:
        args, kwargs, made = self.bound
        if self.name in TAKES:
            return
        for result, memory in zip(tree_leaves(self.run(*args, **kwargs)), made, strict=True):
            if memory is None:
                continue
            if result.shape != memory.shape:
                raise CaptureError(f"the shape of {self.name} depends on values, {self.where}")
            memory.copy_(result)


class TapeGraph:
    """In the place of ``torch.cuda.CUDAGraph``."""

    graphs: ClassVar["weakref.WeakSet[TapeGraph]"] = weakref.WeakSet()
    _numbers: ClassVar[Any] = itertools.count()

    def __init__(self, keep_graph: bool = False) -> None:
        self.tape: list[Entry] = []
        self.numbers: list[torch.Tensor] = []
        self.memories: dict[int, Memory] = {}  # by the storage's own address
        self.number = next(self._numbers)
        self.graphs.add(self)

    def note(self, run: Callable[..., Any], name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Record an operation that has run."""
        given = {
            one.untyped_storage()._cdata
            for one in tree_leaves((args, kwargs))
            if isinstance(one, torch.Tensor)
        }

        def keep(value: Any, is_result: bool = False) -> Any:
            return self._view(value, is_result) if isinstance(value, torch.Tensor) else value

        def made(value: Any) -> View | None:
            if not isinstance(value, torch.Tensor) or value.untyped_storage()._cdata in given:
                return None
            return keep(value, is_result=True)

        kept = tree_map(keep, (args, kwargs))
        results = [made(one) for one in tree_leaves(result)]
        self.tape.append(Entry(run, name, *kept, results, _where()))

    def _view(self, tensor: torch.Tensor, is_result: bool) -> View:
        storage = tensor.untyped_storage()
        memory = self.memories.get(storage._cdata)
        if memory is None:
            place = storage.data_ptr(), storage.nbytes()
            memory = Memory(StorageWeakRef(storage), *place, is_result, tensor.dtype)
            self.memories[storage._cdata] = memory
        return View(
            memory, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        )

    @torch.inference_mode()
    def end(self) -> None:
        """Behind the capture, which has computed nothing on a GPU."""
        self._bind()
        for memory in self.memories.values():
            if memory.is_taken:
                memory.poison()

    @torch.inference_mode()
    def replay(self) -> None:
        """Run the tape.

        Raises:
            CaptureError: in a capture; or the shape of a result is another than in the capture.
        """
        if is_recording():
            raise CaptureError("a graph is replayed in a capture")
        self._bind()
        for graph in self.graphs:
            for memory in graph.memories.values():
                is_shared = graph.number > self.number and memory.is_there()
                if memory.is_taken and (graph is self or is_shared):
                    memory.poison()
        for entry in self.tape:
            entry.replay()

    def reset(self) -> None:
        """Part of the interface of a graph."""
        self.tape, self.memories = [], {}

    def _bind(self) -> None:
        """Find the memory of all entries; what was freed since the last replay is replaced."""
        lost = [one for one in self.memories.values() if not one.is_own and not one.is_there()]
        for memory in lost:
            memory.bind()
            if not memory.is_taken:
                FAULTS[f"freed memory is read by {self._reader(memory)}"] += 1
                if memory.dtype.is_floating_point:
                    memory.poison()
        new = [one for one in self.memories.values() if one.bytes is None]
        for memory in new:
            memory.bind()
        if lost or new:
            for entry in self.tape:
                entry.bind()

    def _reader(self, memory: Memory) -> str:
        """The first operation that is given the memory."""
        for entry in self.tape:
            for given in tree_leaves((entry.args, entry.kwargs)):
                if isinstance(given, View) and given.memory is memory:
                    return f"{entry.name}, {entry.where}"
        raise AssertionError("no operation has it")


class Capture:
    """In the place of ``torch.cuda.graph``: what runs within is recorded."""

    def __init__(self, cuda_graph: TapeGraph, pool: Any = None, stream: Any = None, **_: Any):
        self._graph, self._recorder = cuda_graph, Recorder(cuda_graph)

    def __enter__(self) -> None:
        if is_recording():
            raise CaptureError("a capture in a capture")
        self._recorder.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._recorder.__exit__(*error)
        self._graph.end()


class Recorder(TorchDispatchMode):
    """Records the operations of a capture."""

    def __init__(self, graph: TapeGraph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_written_in_python(func):
            with self:  # what it consists of is recorded
                return func.redispatch(CPU, *args, **kwargs)
        name = func.overloadpacket.__name__
        if name in WAITS or (name in ("index", "index_put_") and _counts_a_mask(args[1])):
            raise CaptureError(f"{name} waits for the device, {_where()}")
        result = func(*args, **kwargs)
        if name == "lift_fresh" and result.dim() == 0:
            self.graph.numbers.append(result)  # a launch carries it; there is no copy
        else:
            self.graph.note(func, name, args, kwargs, result)
        return result


def _is_written_in_python(operator: Any) -> bool:
    name = operator.name().replace("::", "/")
    keys = ("CPU", "CompositeExplicitAutograd")
    is_ours = operator.namespace not in ("aten", "prims")
    return is_ours and any(f"{name}/{key}" in torch.library._impls for key in keys)


def _counts_a_mask(indices: Any) -> bool:
    """Whether an index is a mask, whose places are counted on the device."""
    given = (one for one in indices if one is not None)
    return any(one.dtype in (torch.bool, torch.uint8) for one in given)


def is_recording() -> bool:
    """Whether a capture is going on."""
    return isinstance(_get_current_dispatch_mode(), Recorder)


def _where() -> str:
    """The innermost line of ours, or of vLLM's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        is_ours = path.startswith(REPOSITORY) and "site-packages" not in path
        if path.startswith(VLLM) or (is_ours and path != __file__):
            start = VLLM if path.startswith(VLLM) else REPOSITORY
            return f"{path.removeprefix(start)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


@functools.cache
def install() -> None:
    """Let this process capture and replay graphs. Before vLLM makes any."""
    torch.cuda.CUDAGraph = TapeGraph  # type: ignore[misc, assignment]
    torch.cuda.graph = Capture  # type: ignore[misc, assignment]
    GridExecutor.__call__ = recorded(GridExecutor.__call__, _with_one_grid)
    KernelOverride._launch = recorded(KernelOverride._launch, lambda kernel: kernel)
    for name in ("numpy", "tolist", "cpu"):
        setattr(torch.Tensor, name, _refused(name))


def recorded(launch: Callable[..., Any], fixed: Callable[[Any], Any]) -> Callable[..., Any]:
    """The launch of a kernel, which in a capture is one operation.

    Args:
        fixed: a kernel, in a state that nothing changes.
    """

    def call(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        mode = _get_current_dispatch_mode()
        if not isinstance(mode, Recorder):
            return launch(kernel, *args, **kwargs)
        with unseen():
            once = fixed(kernel)
            result = launch(once, *args, **kwargs)
            run = functools.partial(launch, once)
            mode.graph.note(run, getattr(kernel, "fn", kernel).__name__, args, kwargs, result)
        return result

    return call


def as_launch(function: Callable[..., None]) -> Callable[..., None]:
    """The function as a kernel: a capture records a call of it as one operation.

    It may not take memory, and returns nothing.
    """

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
        kernel(*args, **kwargs)

    return functools.partial(recorded(launch, lambda kernel: kernel), function)


def _with_one_grid(executor: GridExecutor) -> GridExecutor:
    """The same launch; a grid that is a function is asked once."""
    if callable(grid := executor.grid):
        copy = object.__new__(GridExecutor)
        vars(copy).update(vars(executor))
        found: list[Any] = []

        def grid_of_capture(meta: Any) -> Any:
            if not found:
                found.append(grid(meta))
            return found[0]

        copy.grid = grid_of_capture
        return copy
    return executor


def _refused(name: str) -> Callable[..., Any]:
    """The method of a tensor, which no capture calls."""
    method = getattr(torch.Tensor, name)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_recording():
            raise CaptureError(f"Tensor.{name} waits for the device, {_where()}")
        return method(*args, **kwargs)

    return call
