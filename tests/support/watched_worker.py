"""The worker's own code of an engine on a CPU, run as if its tensors were on a GPU.

Watched are the methods through which vLLM's runner calls us: those of `DiffusionModelState` and
`DiffusionSampler`, and all that they call. The model's forward pass, and what a Triton kernel does
on a GPU, are single operations.
"""

import dataclasses
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from vllm.utils import torch_utils
from vllm.v1.worker.cpu.buffer_utils import UvaBuffer

from dllm.engine import grammars, model_state
from dllm.engine.grammars import DeviceGrammars
from tests.support.engine_harness import Engine
from tests.support.grammar_paths import write_paths
from tests.support.watched_device import DEVICE, DeviceWatch, as_kernel, off_device, on_device

# What `maybe_compile` compiles on a server.
COMPILED = {"state": ("_condition",), "sampler": ("_denoise_rows", "_store_rows", "_begin_rows")}
IN_PLACE = "attention of a full graph"  # among the engine steps
STATE_HOOKS = ("add_request", "apply_staged_writes", "prepare_inputs", "prepare_attn")
SAMPLER_HOOKS = ("add_request", "apply_staged_writes")
MODEL = ("forward", "embed_input_ids", "compute_logits")
ON_HOST = ("cpu", "seq_lens_cpu_upper_bound")  # attributes that stay on the host


class WorkerWatch(DeviceWatch):
    """A `DeviceWatch` that knows what the worker does.

    Attributes:
        calls: of each hook, how many operations each of its calls took.
        passes: how many operations each denoise step took.
        engine steps: what each call of each hook launched.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[int]] = defaultdict(list)
        self.passes: list[int] = []
        self.engine_steps: dict[str, list[Counter[str]]] = defaultdict(list)
        self._is_inside = False

    def hook(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, watched, with its arguments on the device."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:  # called by another hook
                return function(*args, **kwargs)
            # The second is read from vLLM 0.33 on.
            pinned: dict[str, Any] = {"is_pin_memory_available": lambda: True, "PIN_MEMORY": True}
            has_pinned = mock.patch.multiple(torch_utils, create=True, **pinned)
            before, self._is_inside = self.num_calls.total(), True
            launched = self.launches.copy()
            try:
                with self, has_pinned:
                    given = {key: _given(value) for key, value in kwargs.items()}
                    return function(*map(_given, args), **given)
            finally:
                self._is_inside = False
                self.calls[name].append(self.num_calls.total() - before)
                self.engine_steps[name].append(self.launches - launched)

        return run

    def count_pass(self, denoise: Callable[..., Any], *args: Any) -> Any:
        before = self.num_calls.total()
        output = denoise(*args)
        self.passes.append(self.num_calls.total() - before)
        return output


@contextmanager
def watched_worker(engine: Engine) -> Iterator[WorkerWatch]:
    """See what the worker would have waited for while it ran the requests inside."""
    watch, runner = WorkerWatch(), engine.runner
    state, sampler = runner.model_state, runner.sampler
    with ExitStack() as stack:

        def put(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(_replaced(owner, name, value))

        on_gpu = DeviceGrammars(state.vllm_config, state.max_num_reqs, torch.device("cpu"))
        put(state, "grammars", on_gpu)
        put(sampler, "grammars", on_gpu)
        put(on_gpu._pool, "_packed", on_device(on_gpu._pool._packed))
        put(grammars, "write_paths", as_kernel(write_paths))
        view = UvaBuffer.uva  # pinned memory that a GPU reads where it is
        put(UvaBuffer, "uva", lambda self, n=None: on_device(view(self, n)))
        seen: set[int] = set()
        for owner in (state, sampler, state.loop.forward_of.__self__):
            _move(owner, put, seen)
        for name in MODEL:
            kernel = as_kernel(getattr(state.model, name))
            put(state.model, name, watch.as_one_launch(name, kernel))
        for owner, names in ((state, COMPILED["state"]), (sampler, COMPILED["sampler"])):
            for name in names:
                put(owner, name, watch.as_one_launch(name, getattr(owner, name)))
        put(model_state, "build_attn_metadata", as_kernel(model_state.build_attn_metadata))
        prepare = partial(_in_a_graph_too, watch, state, state.prepare_attn)
        put(state, "prepare_attn", prepare)
        for label, owner, names in (
            ("requests", runner.req_states, ("apply_staged_writes",)),
            ("state", state, STATE_HOOKS),
            ("sampler", sampler, SAMPLER_HOOKS),
        ):
            for name in names:
                put(owner, name, watch.hook(f"{label}.{name}", getattr(owner, name)))
        kind = type(sampler)
        denoise = kind._denoise_batch
        put(kind, "_denoise_batch", lambda *args: watch.count_pass(denoise, *args))
        put(kind, "__call__", watch.hook("sampler", kind.__call__))
        yield watch


def _in_a_graph_too(
    watch: WorkerWatch, state: Any, prepare: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """`prepare_attn`, also as for a full CUDA graph where each row is one sequence."""
    batch, _, tables = args[:3]
    if len(state._sequences(batch).request_of) == batch.num_reqs:
        before = watch.launches.copy()
        state._metadata_of_full_graph(batch, tables)
        watch.engine_steps[IN_PLACE].append(watch.launches - before)
    return prepare(*args, **kwargs)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """The owner with another attribute, frozen or not."""
    assign = setattr if isinstance(owner, type | types.ModuleType) else object.__setattr__
    is_own, before = name in vars(owner), vars(owner).get(name)
    assign(owner, name, value)
    try:
        yield
    finally:
        current = vars(owner)[name]
        if is_own:  # what has been stored there meanwhile stays
            assign(owner, name, before if current is value else off_device(current))
        else:
            delattr(owner, name)


def _given(value: Any) -> Any:
    """An argument of a hook, on the device; of a batch, its tensors."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return on_device(value)
    fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    moved = {
        name: on_device(part)
        for name, part in fields.items()
        if isinstance(part, torch.Tensor) and name not in ON_HOST
    }
    return dataclasses.replace(value, **moved) if moved else value


def _move(owner: Any, put: Callable[[Any, str, Any], None], seen: set[int]) -> None:
    """Put all tensors of an object and of its parts on the device; not those of models."""
    if id(owner) in seen:
        return
    seen.add(id(owner))
    if isinstance(owner, list | tuple):
        for part in owner:
            _move(part, put, seen)
    is_ours = type(owner).__module__.startswith(("dllm.", "vllm.v1.worker."))
    if not is_ours or isinstance(owner, torch.nn.Module) or not hasattr(owner, "__dict__"):
        return
    for name, value in list(vars(owner).items()):
        if name in ON_HOST:
            continue
        if isinstance(value, torch.device):
            put(owner, name, DEVICE)
        elif isinstance(value, torch.Tensor):
            put(owner, name, on_device(value))
        elif isinstance(value, dict) and _holds_tensors(value):
            put(owner, name, {key: on_device(part) for key, part in value.items()})
        else:
            _move(getattr(value, "__self__", value), put, seen)  # the owner of a method


def _holds_tensors(values: dict[Any, Any]) -> bool:
    return any(isinstance(value, torch.Tensor) for value in values.values())
