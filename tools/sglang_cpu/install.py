"""Make (or find) a CPU-only SGLang environment outside the clone, and print the path of its Python.

python tools/sglang_cpu/install.py            # about 5 minutes and 2.3 GB the first time, instant afterwards
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from cpu_environment import provide  # noqa: E402

CHECK = """
import os
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
import torch, torchvision, sgl_kernel, sglang.launch_server
assert torch.version.cuda is None, f"torch {torch.__version__} is a CUDA build"
import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler, sglang.srt.multimodal.processors.qwen_vl
"""

if __name__ == "__main__":
    print(provide(HERE, "sglang-cpu", check=CHECK, pythons={(3, 11), (3, 12)}))
