"""A made-up GPU on a CPU: finds where the host would wait for the device.

Tensors that are "on the device" are `DeviceTensor`s: ordinary CPU tensors of another Python class.
Inside a `DeviceWatch` they say that they are on ``cuda:0``, and so do all results computed from
them. Every operation is real, so code under the watch goes its real way with real values. The watch
sees each call of PyTorch's Python API before it runs, and notes what would cost the host:

    read     the host needs a value, or a shape that depends on values: it waits for the device
    copy     a copy between host and device that is not asynchronous: memory that is not pinned,
             or a call without ``non_blocking``
    scalar   a number written by indexing: two kernels, one of which makes a tensor of the number
    mixed    an operation with host and device tensors, which a GPU refuses

What it cannot see: waits inside of C++ code whose Python call looks harmless. A custom operator and
what runs in `as_kernel` are single operations of the device.
"""

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Self
from unittest import mock

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

REPOSITORY = Path(__file__).parents[2]
DEVICE = torch.device("cuda", 0)
HOST = torch.device("cpu")

# By the name in PyTorch's API.
READS = frozenset(
    ["item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__"]
    + ["__complex__", "__contains__", "__format__", "__repr__", "is_nonzero", "nonzero"]
    + ["argwhere", "masked_select", "masked_scatter", "unique", "unique_consecutive"]
    + ["bincount", "histc", "equal", "allclose"]
)
WITHOUT_KERNEL = frozenset(
    ["empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "scalar_tensor"]
    + ["detach", "lift_fresh", "_unsafe_view"]
)
FILLS = frozenset(["index_fill", "index_fill_", "masked_fill", "masked_fill_"])
ABOUT = frozenset(["device", "is_cuda", "is_cpu", "get_device", "is_pinned"])


class DeviceTensor(torch.Tensor):
    """A tensor that is on the device for whoever asks under a `DeviceWatch`."""


class Finding(NamedTuple):
    """What would cost the host something: its kind, the call, and where: ``file:line``."""

    kind: str
    call: str
    where: str


def on_device(values: Any) -> Any:
    """The same tensors on the device; they share their memory. Structures of them, too."""
    return tree_map(_marked, values)


def off_device(values: Any) -> Any:
    """The same tensors as ordinary ones. Structures of them, too."""
    return tree_map(_plain, values)


def as_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as if it were a kernel: not watched, and its results are on the device."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            args, kwargs = off_device((args, kwargs))
            return on_device(function(*args, **kwargs))

    return run


class _Launches(TorchDispatchMode):
    """Counts operators that run a kernel: no views, no memory that is only allocated."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        # A conversion counts as a view where it changes nothing.
        is_view = func.is_view and _shares_memory(result, args[0])
        if not is_view and name not in WITHOUT_KERNEL:
            self._counts[name] += 1
        return result


class DeviceWatch(TorchFunctionMode):
    """Notes what the host would wait for.

    Attributes:
        findings: those in this repository's own code, in order.
        num_calls: operations on the device, by name.
        launches: kernels and copies that they launch, by the name of the operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.findings: list[Finding] = []
        self.num_calls: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self._launches = _Launches(self.launches)
        self._pinned: dict[int, Any] = {}  # by address; kept, so that no address is used again
        # vLLM's CPU worker replaces this method by one that does nothing.
        self._can_pin = mock.patch.object(torch.Tensor, "pin_memory", lambda t: self.pinned(t))

    def __enter__(self) -> Self:
        self._can_pin.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._can_pin.stop()

    def as_one_launch(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, watched, but what it launches counts as one: it is compiled."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before = self.launches.copy()
            result = function(*args, **kwargs)
            self.launches.clear()
            self.launches.update(before)
            self.launches[name] += 1
            return result

        return run

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in pinned memory."""
        copy = tensor.clone()
        self._pin(copy)
        return copy

    def of_kind(self, kind: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.kind == kind]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        kwargs = dict(kwargs or {})
        name = func.__name__
        if name == "__get__":  # an attribute of a tensor
            name = func.__self__.__name__
        if name in ABOUT:
            return self._about(name, args[0])
        target = _target(name, args, kwargs)
        is_on_device = DEVICE in (target, *map(_device_of, _tensors(args, kwargs)))
        kind = self._cost(name, args, kwargs, target) if is_on_device else None
        if kind is not None:
            self._note(kind, name)
        becomes_pinned = kwargs.pop("pin_memory", False)
        if name == "to" and target not in (None, _device_of(args[0])):
            self.launches["copy to the other side"] += 1
        with self._launches if is_on_device else nullcontext():
            result = func(*tree_map(_on_cpu, args), **tree_map(_on_cpu, kwargs))
        # PyTorch itself pins what an asynchronous `to` makes on the host.
        if becomes_pinned or (name == "to" and target == HOST and kwargs.get("non_blocking")):
            self._pin(result)
        if target == HOST:
            return off_device(result)
        if is_on_device:
            self.num_calls[name] += 1
            return on_device(result)
        return result

    def _about(self, name: str, tensor: torch.Tensor) -> Any:
        """What a tensor says about where it is."""
        if name == "is_pinned":
            return self._is_pinned(tensor)
        device = _device_of(tensor)
        return {
            "device": device,
            "is_cuda": device == DEVICE,
            "is_cpu": device == HOST,
            "get_device": 0 if device == DEVICE else -1,
        }[name]

    def _cost(
        self, name: str, args: Any, kwargs: Any, target: torch.device | None
    ) -> str | None:  # fmt: skip
        """The kind of a call with a device tensor, or one that names the device."""
        if name in READS or (name == "where" and len(args) == 1):
            return "read"
        if name in FILLS:  # the value is read if it is a tensor
            return "read" if isinstance(args[-1], torch.Tensor) else None
        if name == "repeat_interleave":
            is_sized = kwargs.get("output_size") is not None
            repeats = kwargs.get("repeats", args[-1])
            return "read" if isinstance(repeats, torch.Tensor) and not is_sized else None
        if name == "__getitem__":
            return _index_cost(*args)
        if name == "__setitem__":
            return _index_cost(*args[:2]) or _value_cost(args[2])
        if name in ("to", "cpu"):
            return self._copy_cost(args[0], None, target, kwargs)
        if name == "copy_":
            return self._copy_cost(args[1], args[0], _device_of(args[0]), kwargs)
        if name in ("tensor", "as_tensor", "new_tensor"):
            return "copy"
        is_mixed = any(_device_of(one) == HOST and one.dim() for one in _tensors(args, kwargs))
        return "mixed" if is_mixed and not name.endswith("_like") else None

    def _copy_cost(
        self, source: torch.Tensor, into: torch.Tensor | None, target: Any, kwargs: Any
    ) -> str | None:
        """The cost of a copy to ``target``, which may be the device of the source.

        None: the copy changes the dtype only.
        """
        if target in (None, _device_of(source)) or source.numel() == 0:
            return None
        on_host = source if target == DEVICE else into
        is_pinned = on_host is None or self._is_pinned(on_host)
        return None if is_pinned and kwargs.get("non_blocking") else "copy"

    def _note(self, kind: str, call: str) -> None:
        where = _place(sys._getframe(2))
        if where is not None:
            self.findings.append(Finding(kind, call, where))

    def _pin(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._pinned[storage.data_ptr()] = storage

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned


def _shares_memory(result: Any, given: torch.Tensor) -> bool:
    memory = given.untyped_storage().data_ptr()
    return all(one.untyped_storage().data_ptr() == memory for one in _tensors(result))


def _index_cost(indexed: torch.Tensor, index: Any) -> str | None:
    if _device_of(indexed) == HOST:  # by device tensors
        return "read"
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, slice) and _tensors(part.start, part.stop, part.step):
            return "read"
        if isinstance(part, list | np.ndarray):
            return "copy"
        if isinstance(part, torch.Tensor):
            if _device_of(part) == HOST:
                return "copy"
            if part.dtype in (torch.bool, torch.uint8) or part.dim() == 0:
                return "read"  # the places of a mask are counted; a single place becomes a number
    return None


def _value_cost(value: Any) -> str | None:
    if isinstance(value, torch.Tensor) and _device_of(value) == DEVICE:
        return None
    return "copy" if isinstance(value, torch.Tensor) and value.dim() else "scalar"


def _tensors(*values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _device_of(tensor: torch.Tensor) -> torch.device:
    """Weights are on the device, too."""
    return DEVICE if isinstance(tensor, DeviceTensor | torch.nn.Parameter) else HOST


def _target(name: str, args: Any, kwargs: Any) -> torch.device | None:
    """The device that a call names; None if it names none."""
    if name == "cpu":
        return HOST
    named = kwargs.get("device")
    if named is None and name == "to" and len(args) > 1:
        if isinstance(args[1], torch.Tensor):
            return _device_of(args[1])
        named = args[1] if isinstance(args[1], str | torch.device) else None
    if named is None:
        return None
    return DEVICE if torch.device(named).type == DEVICE.type else HOST


def _marked(value: Any) -> Any:
    return value.as_subclass(DeviceTensor) if type(value) is torch.Tensor else value


def _plain(value: Any) -> Any:
    return value.as_subclass(torch.Tensor) if isinstance(value, DeviceTensor) else value


def _on_cpu(value: Any) -> Any:
    is_device = isinstance(value, torch.device) and value.type == DEVICE.type
    return HOST if is_device else value


def _place(frame: FrameType | None) -> str | None:
    """The innermost line of this repository; None in vLLM's runner and in a kernel's stand-in.

    Packages may be installed inside the repository, in .venv.
    """
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.name == "model_runner.py":
            return None
        is_ours = path.is_relative_to(REPOSITORY) and "site-packages" not in path.parts
        if is_ours and path != Path(__file__):
            name = path.relative_to(REPOSITORY)
            is_kernel = name.parts[:2] == ("dllm", "cpu")
            return None if is_kernel else f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return None
