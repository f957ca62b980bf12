"""A small file system for one process. Commands of tests import this, with the folder on their path."""

import ctypes
import os
import sys
from pathlib import Path

NOT_ALLOWED = 77  # exit status
NEW_MOUNTS, NEW_USER, RECURSIVE_PRIVATE = 0x20000, 0x10000000, 0x44000


def mount_small(folder: Path, size: str) -> None:
    """Make `folder` a file system of `size` for this process and those that it forks; end it where this is refused."""
    libc, ids = ctypes.CDLL(None), {"uid_map": os.getuid(), "gid_map": os.getgid()}
    unshare = getattr(libc, "unshare", lambda flags: -1)
    if unshare(NEW_MOUNTS) != 0:  # who is not root also needs a namespace of users
        if unshare(NEW_MOUNTS | NEW_USER) != 0:
            sys.exit(NOT_ALLOWED)
        Path("/proc/self/setgroups").write_text("deny")
        for name, own in ids.items():
            Path("/proc/self", name).write_text(f"0 {own} 1")
    failed = libc.mount(b"none", b"/", None, RECURSIVE_PRIVATE, None)
    if failed or libc.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, f"size={size}".encode()):
        sys.exit(NOT_ALLOWED)
