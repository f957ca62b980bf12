"""Run at interpreter start (through a .pth file): what SGLang takes for granted, and a CPU torch lacks.

The CUDA build of torchvision can be imported. Its compiled operators cannot be loaded, and its Python code registers a
fake kernel for two of them. So they are defined, without a kernel, right before torchvision is imported for the first
time.

LoRA asks for pinned memory, also its backend `torch_native`. A CPU torch has no allocator for it, and needs none: in a
process that imports SGLang's LoRA, tensors that should be pinned are ordinary ones.

The buffer of the experts that tokens went to is registered with CUDA, which then does nothing.
"""

import functools
import importlib.abc
import sys


class _Missing(importlib.abc.MetaPathFinder):
    libraries = []  # noqa: RUF012  (a Library that is collected takes its operators with it)
    pins = True

    def find_spec(self, fullname, path=None, target=None):  # noqa: ARG002
        if fullname == "torchvision" and not self.libraries:
            import torch

            library = torch.library.Library("torchvision", "DEF")
            library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            self.libraries.append(library)
        elif fullname == "sglang.srt.lora.lora_manager" and self.pins:
            import torch

            self.pins = False
            for name in ("tensor", "empty", "zeros"):
                setattr(torch, name, _unpinned(getattr(torch, name)))
            torch.Tensor.pin_memory = lambda self, *_: self
        elif fullname == "sglang.srt.state_capturer.base":
            import torch

            torch.cuda.cudart = _NoCuda
        return


class _NoCuda:
    cudaHostRegister = cudaHostUnregister = staticmethod(lambda *_: 0)


def _unpinned(function):
    @functools.wraps(function)
    def call(*args, pin_memory=False, **kwargs):  # noqa: ARG001
        return function(*args, **kwargs)

    return call


sys.meta_path.insert(0, _Missing())
