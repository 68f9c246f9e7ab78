"""What a server serves: asked where vLLM makes an object, so that no class of ours has to ask."""

from collections.abc import Mapping
from enum import Enum
from typing import Any

from dllm.engine.derived import as_one_of, of_both
from dllm.models import AUTOREGRESSIVE, FAMILIES
from dllm.patches.contract import CPU_WORKER, GPU_WORKER


class Server(Enum):
    CANVASES = "a diffusion model"
    TOKENS = "a model that could have canvases, and is served token by token"
    TARGET = "another model, with a worker of ours"


def model_of(model_config: Any) -> Server | None:
    """By the architecture alone; None: it is none of ours."""
    architecture = None if model_config is None else model_config.architecture
    if architecture in FAMILIES:
        return Server.CANVASES
    return Server.TOKENS if architecture in AUTOREGRESSIVE else None


def served_as(vllm_config: Any) -> Server | None:
    """None: a server that is not ours."""
    if (model := model_of(vllm_config.model_config)) is not None:
        return model
    is_ours = vllm_config.parallel_config.worker_cls in (CPU_WORKER, GPU_WORKER)
    return Server.TARGET if is_ours else None


ByServer = Mapping[Server, type]  # a class of ours


def derives(theirs: type, ours: ByServer | type) -> None:
    """Where vLLM makes an object of its class, a server of ours gets one of a class of ours.

    That is derived from vLLM's, whose constructor takes the server's configuration first
    (``ServerConfig.served``). Where a class that is derived from vLLM's is asked for, the object is
    of both. A single class is for all servers.
    """

    def __new__(asked: type, *args: Any, **options: Any) -> Any:
        if isinstance(ours, type):
            kind: type | None = ours
        else:
            config = args[0] if args else options.get("vllm_config", options.get("config"))
            served = getattr(config, "served", None)  # without a configuration it is copied
            kind = None if served is None else ours.get(served)
        if kind is None or issubclass(asked, kind):
            kind = asked
        return object.__new__(kind if asked in (kind, theirs) else of_both(kind, asked))

    theirs.__new__ = __new__  # type: ignore[method-assign, assignment]


class Part:
    """An attribute that vLLM sets to an object which it makes itself: it becomes one of ours."""

    def __init__(self, ours: type) -> None:
        self._ours = ours

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_our_{name}"

    def __get__(self, whole: Any, owner: type) -> Any:
        return self if whole is None else getattr(whole, self._name)

    def __set__(self, whole: Any, made: Any) -> None:
        setattr(whole, self._name, None if made is None else as_one_of(self._ours, made))
