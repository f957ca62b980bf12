"""Versions of a machine, the host's cost of a launch, and of the first attention call of a new shape, as JSON."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import time
from pathlib import Path

import torch
import transformers
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

LAUNCHES = 20_000


def launches() -> dict[str, float]:
    """Microseconds of host time of one small kernel, launched eagerly and from a CUDA graph."""
    x, y = torch.zeros(2, 1, device="cuda")
    began = time.perf_counter()
    for _ in range(LAUNCHES):
        x.add_(y)
    host = time.perf_counter() - began
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(1000):
            x.add_(y)
    graph.replay()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    return {
        "launch_us": round(1e6 * host / LAUNCHES, 2),
        "graph_us": round(1e6 * (time.perf_counter() - began) / 20_000, 2),
    }


def attention(places: int, *, masked: bool) -> list[float]:
    """Milliseconds of the first and the second call with so many places; the first may build a plan on the host."""
    q = torch.randn(64, 8, 2, 128, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(64, 8, places, 128, device="cuda", dtype=torch.bfloat16)
    mask = torch.zeros(64, 1, 1, places, device="cuda", dtype=torch.bfloat16) if masked else None
    took = []
    for _ in range(2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        scaled_dot_product_attention(q, k, k, attn_mask=mask)
        torch.cuda.synchronize()
        took.append(round(1e3 * (time.perf_counter() - began), 2))
    return took


def probe() -> dict:
    """What is there, and the times on a CUDA device."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "tools": {name: shutil.which(name) for name in ("make", "gcc", "ncu", "nvcc")},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    if not torch.cuda.is_available():
        return found
    began = time.perf_counter()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    found |= {"cuda_start_s": round(time.perf_counter() - began, 2), "cudnn": torch.backends.cudnn.version()}
    found |= launches()
    found["sdpa_ms"] = {f"{n} masked={m}": attention(n, masked=m) for m in (True, False) for n in (160, 176, 192)}
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        found["sdpa_ms_without_cudnn"] = {
            f"{n} masked={m}": attention(n, masked=m) for m in (True, False) for n in (208, 224)
        }
    return found


def main() -> None:
    """Print the probe and write it to `--out`/probe.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for probe.json")
    args = parser.parse_args()
    text = json.dumps(probe(), indent=1)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "probe.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
