"""Makes the CUDA build of torchvision importable beside the CPU build of torch.

PyPI's torchvision is a CUDA build. Beside a CPU build of torch its compiled operators cannot be
loaded, and its import fails with "operator torchvision::nms does not exist". Here the two operators
that the import asks for are declared, without an implementation. Everything in torchvision that is
written in Python then works, for example image processing.

Python imports this file at start if its folder is on PYTHONPATH. If torchvision's operators can be
loaded, nothing is changed.
"""

import sys
from importlib.abc import MetaPathFinder


class _DeclareOperators(MetaPathFinder):
    library = None  # the operators stay declared as long as this object exists

    def find_spec(self, name, path=None, target=None):
        """Declare the operators just before torchvision needs them. Always returns None."""
        if name == "torchvision._meta_registrations":
            sys.meta_path.remove(self)
            if not sys.modules["torchvision.extension"]._has_ops():
                import torch

                self.library = torch.library.Library("torchvision", "FRAGMENT")
                for operator in ("nms", "qnms"):
                    self.library.define(
                        f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                    )
        return None


_finder = _DeclareOperators()
sys.meta_path.insert(0, _finder)
