"""`gpu_kernels.py`, with the same flags, under the constants that `gpu_tune.py` found best and left in `--out`.

    PYTHONPATH=. python benchmarks/gpu_tuned.py --seconds 500

The constants are part of each result's `machine`; empty where nothing was tuned on this device.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gpu_kernels
import torch
from _gpu import machine
from gpu_tune import use


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    constants = use(parser.parse_known_args()[0].out)
    print(*(f"{key} = {value}" for key, value in constants.items()), sep="\n", flush=True)
    gpu_kernels.machine = lambda: machine() | {"constants": constants}
    gpu_kernels.__file__ = __file__  # after a loss of the device it starts its file again
    gpu_kernels.main()


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
