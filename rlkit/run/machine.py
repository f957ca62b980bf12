"""What a run was started with: its command, its machine and the versions of its packages."""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rlkit._util.platform import num_cores
from rlkit._util.ranks import num_nodes, world_size
from rlkit._util.text import masked
from rlkit.run.signals import resume_command
from rlkit.settings import SERVERS

_PACKAGES = ("torch", "transformers", "numpy", "triton", *SERVERS)


def start_row(step: int) -> dict[str, Any]:
    """One line of `starts.jsonl`: a start of the run after step `step` (-1 and 0: from the beginning).

    Passwords in the command are ***. The host has no name here: a report is sent to others.
    """
    untold = hasattr(sys, "ps1") or num_nodes() > 1  # a notebook's cell, or a launcher's command on each node
    return {
        "step": max(step, 0),
        "unix": time.time(),
        "command": None if untold else masked(resume_command()),
        "folder": os.getcwd(),
        "machine": _machine(),
        "ranks": world_size(),
        "nodes": num_nodes(),
        "versions": _versions(),
    }


def _machine() -> dict[str, Any]:
    """The hardware of this node; GPUs only where this process uses CUDA."""
    facts: dict[str, Any] = {"system": f"{platform.system()} {platform.machine()}", "cpu": _cpu(), "cores": num_cores()}
    with suppress(ValueError, OSError, AttributeError):
        facts["memory_gib"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return facts


def _cpu() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if re.match(r"model name\s*:", line):
                return line.partition(":")[2].strip()
    return platform.machine()


def _versions() -> dict[str, str]:
    versions = {"rlkit": import_module("rlkit").__version__, "python": sys.version.partition(" ")[0]}
    for name in _PACKAGES:
        if name in sys.modules:
            with suppress(PackageNotFoundError):
                versions[name] = version(name)
    return versions
