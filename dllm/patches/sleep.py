"""Sleep mode, level 2: what has to live on when the memory of ``load_model`` is given back.

After ``wake_up`` a trainer sends weights again, and vLLM restores the model's buffers. What else
was built while the model was loaded lies in the same memory, for instance the state of canvases
and the tables of the sampler. After ``wake_up`` it would hold whatever is in it then.
"""

import gc
from collections.abc import Callable, Iterable
from weakref import ref

import torch


class LoadedTensors:
    """All tensors of a device that were made while a model was loaded.

    Args:
        load: loads the model.
    """

    def __init__(self, load: Callable[[], None], device: torch.device) -> None:
        before = _tensors(device)  # kept, so that no new tensor has the id of one of them
        known = {id(tensor) for tensor in before}
        load()
        self._made = [ref(tensor) for tensor in _tensors(device) if id(tensor) not in known]
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []

    @torch.inference_mode()
    def save(self, others: Iterable[torch.Tensor]) -> None:
        """Copy their memory to the host, each piece once.

        Args:
            others: tensors that somebody else restores, the model's weights and buffers.
        """
        seen = {tensor.untyped_storage().data_ptr() for tensor in others}
        for reference in self._made:
            tensor = reference()
            if tensor is None or tensor.untyped_storage().data_ptr() in seen:
                continue
            seen.add(tensor.untyped_storage().data_ptr())
            memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            memory.set_(tensor.untyped_storage())
            self._saved.append((memory, memory.to("cpu", copy=True)))

    @torch.inference_mode()
    def restore(self) -> None:
        """Copy it back to where it was, because captured graphs read these addresses."""
        for memory, copy in self._saved:
            memory.copy_(copy)
        self._saved = []


def _tensors(device: torch.device) -> list[torch.Tensor]:
    # Not isinstance(): it asks every object for its class, and some answer with a warning.
    found = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    return [tensor for tensor in found if tensor.device == device]
