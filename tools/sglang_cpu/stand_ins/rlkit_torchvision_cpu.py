"""Run at interpreter start (through a .pth file): lets the CUDA build of torchvision be imported beside a CPU torch.

Its compiled operators cannot be loaded, and its Python code registers a fake kernel for two of them. So they are
defined, without a kernel, right before torchvision is imported for the first time.
"""

import importlib.abc
import sys


class _Operators(importlib.abc.MetaPathFinder):
    libraries = []  # noqa: RUF012  (a Library that is collected takes its operators with it)

    def find_spec(self, fullname, path=None, target=None):  # noqa: ARG002
        if fullname == "torchvision" and not self.libraries:
            import torch

            library = torch.library.Library("torchvision", "DEF")
            library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            self.libraries.append(library)
        return


sys.meta_path.insert(0, _Operators())
