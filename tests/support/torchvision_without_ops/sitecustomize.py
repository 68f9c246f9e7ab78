"""Lets the registry's CUDA build of torchvision import beside the CPU build of torch.

Its compiled operators cannot be loaded there, and its import stops at describing two of them:
"operator torchvision::nms does not exist". With those two declared, and never called, all that is
written in Python works, image processing included. Python imports this file at start when its
folder is on PYTHONPATH; a torchvision whose operators did load is left as it is.
"""

import sys
from importlib.abc import MetaPathFinder


class _DeclareOperators(MetaPathFinder):
    library = None  # the declarations live as long as this object

    def find_spec(self, name, path=None, target=None):
        """Declare the operators just before torchvision describes them; find nothing."""
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
