"""Run at interpreter start (through a .pth file): what SGLang takes for granted, and a CPU torch lacks.

LoRA asks for pinned memory, also its backend `torch_native`. A CPU torch has no allocator for it, and needs none: in a
process that imports SGLang's LoRA, tensors that should be pinned are ordinary ones.

The buffer of the experts that tokens went to is registered with CUDA, which then does nothing.

The processor of Qwen-VL's images imports the model of Qwen3.5, which takes its kernels by name: they need not be there.
"""

import functools
import importlib.abc
import sys

QWEN3_5 = (
    "fused_sigmoid_mul_cpu", "fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)  # fmt: skip


class _Missing(importlib.abc.MetaPathFinder):
    pins = True

    def find_spec(self, fullname, path=None, target=None):  # noqa: ARG002
        if fullname == "sglang.srt.lora.lora_manager" and self.pins:
            import torch

            self.pins = False
            for name in ("tensor", "empty", "zeros"):
                setattr(torch, name, _unpinned(getattr(torch, name)))
            torch.Tensor.pin_memory = lambda self, *_: self
        elif fullname == "sglang.srt.state_capturer.base":
            import torch

            torch.cuda.cudart = _NoCuda
        elif fullname == "sglang.srt.models.qwen3_5":
            import sgl_kernel
            import torch

            for name in QWEN3_5:
                setattr(torch.ops.sgl_kernel, name, getattr(sgl_kernel, name))
        return


class _NoCuda:
    cudaHostRegister = cudaHostUnregister = staticmethod(lambda *_: 0)


def _unpinned(function):
    @functools.wraps(function)
    def call(*args, pin_memory=False, **kwargs):  # noqa: ARG001
        return function(*args, **kwargs)

    return call


sys.meta_path.insert(0, _Missing())
