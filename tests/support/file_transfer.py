"""A way for weights into a running engine of a CPU, in place of NCCL: tensors of files.

The steps are those of vLLM's NCCL engine, which loads each tensor that it has received on its own.
"""

from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    folder: str


class FileTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """``weight_transfer_config={"backend": "file"}``."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing has to be connected."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, str]) -> None:
        """Without vLLM's synchronization of an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        for path in sorted(Path(update_info.folder).glob("*.safetensors")):
            with safe_open(path, "pt") as weights:
                for name in weights.keys():  # noqa: SIM118
                    self.model.load_weights([(name, weights.get_tensor(name))])

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is open."""


WeightTransferEngineFactory.register_engine("file", FileTransfer)
