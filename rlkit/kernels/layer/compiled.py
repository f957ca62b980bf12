"""layer.c as a library: compiled on first use with the machine's C compiler for its CPU, and kept for later runs.

Triton does the same on a GPU. It takes a second, once per version, compiler and kind of CPU. Without a C compiler
(`apt-get install gcc libc6-dev`), on other systems than Linux, or with RLKIT_C_KERNELS=0 there is no library, and
torch's operators do the work. Its threads are torch's.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from rlkit.files import TEMP_PREFIX, cache_folder

SOURCE = Path(__file__).with_name("layer.c")
_FLAGS = ["-O3", "-march=native", "-fPIC"]
_FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"]  # nan and inf stay
_P, _I, _F, _T = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_ARGUMENTS = {
    "rms_norm": [_P, _P, _F, _P, _P, _I, _I, _T],
    "rms_norm_backward": [*[_P] * 9, _I, _I, _T],
    "rotary": [_P, _I, _P, _F, _P, _P, _P, _I, _I, _I, _T],
    "rotary_backward": [_P, _P, _I, _P, _F, *[_P] * 5, _I, _I, _I, _T],
    "attention": [*[_P] * 3, _I, _P, _I, _F, _P, _P, *[_I] * 4, _T],
    "attention_backward": [*[_P] * 4, _I, _P, _I, _F, *[_P] * 4, *[_I] * 4, _T],
    "project": [*[_P] * 5, _F, *[_P] * 5, *[_I] * 5, _T],
    "project_backward": [*[_P] * 8, _F, *[_P] * 6, *[_I] * 5, _T],
    "finish": [*[_P] * 4, _F, *[_P] * 5, *[_I] * 4, _T],
    "finish_backward": [*[_P] * 11, *[_I] * 4, _T],
    "decoder": [_P, _P, _I, *[_P] * 4, _F, _F, *[_P] * 3, _I, *[_P] * 3, *[_I] * 7, _T, _T],
    "decoder_backward": [*[_P] * 3, _I, *[_P] * 4, _F, _F, *[_P] * 3, _I, *[_P] * 4, *[_I] * 7, _T, _T],
    "decode": [_P, _P, _I, *[_P] * 4, _F, _P, *[_I] * 7, _T],
}
_WITH_PRODUCTS = ("project", "project_backward", "finish", "finish_backward", "decoder", "decoder_backward", "decode")


@cache
def library() -> Any:
    """The functions of layer.c, or None; see above. A call keeps Python's lock, whose release costs more than
    most calls take; one with products in it does not."""
    if sys.platform != "linux" or os.environ.get("RLKIT_C_KERNELS") == "0":
        return None
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")
    openmp, torch_cpu = _loaded("libgomp", "libiomp5", "libomp"), _loaded("libtorch_cpu")
    if compiler is None or openmp is None or torch_cpu is None:
        return None
    flags = [*_FLAGS, *(["-mprefer-vector-width=512"] if platform.machine() == "x86_64" else [])]
    key = hashlib.sha256(repr((os.path.realpath(compiler), flags, _cpu())).encode() + SOURCE.read_bytes())
    path = cache_folder() / f"layer-{key.hexdigest()[:16]}.so"
    with suppress(OSError, subprocess.SubprocessError, AttributeError):  # the last without sgemm_
        if not path.exists():
            _compile(compiler, flags, path)
        ctypes.CDLL(openmp, mode=ctypes.RTLD_GLOBAL)
        found, releasing = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
        for name in _WITH_PRODUCTS:
            setattr(found, name, getattr(releasing, name))
        found.multiply = ctypes.cast(ctypes.CDLL(torch_cpu).sgemm_, _P)  # type: ignore[attr-defined]
        for name, types in _ARGUMENTS.items():
            function = getattr(found, name)
            function.argtypes, function.restype = types, None
        return found
    return None


def _compile(compiler: str, flags: list[str], path: Path) -> None:
    """In two commands, since one with -fopenmp would link the compiler's own OpenMP."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=TEMP_PREFIX, dir=path.parent) as folder:
        steps = [*flags, "-fopenmp", "-c", SOURCE, "-o", "layer.o"], ["-shared", "layer.o", "-o", path.name, "-lm"]
        for step in steps:
            subprocess.run([compiler, *step], check=True, capture_output=True, timeout=60, cwd=folder)
        Path(folder, path.name).replace(path)


def _loaded(*names: str) -> str | None:
    """The library that this process has of those names: a second OpenMP would have threads of its own."""
    paths = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    return next((path for path in paths if os.path.basename(path).startswith(names)), None)


def _cpu() -> str:
    """What `-march=native` depends on: home folders are shared between machines."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model", "CPU part"))}))
