"""The values that changed from one version of a file of weights to the next, and a copy that follows by them.

An update is a folder that trainer and copy see: `manifest.json`, written last, has the CRC-32 of each file of the new
version, and beside it lies the whole file, or NAME.changes:

    n, 8 bytes | n values of 16 bits | their distances, one byte each (255: that far and on), each to the one before

Who keeps a copy answers there with its path, or with what does not fit. No torch is needed.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import numpy as np

from rlkit._util.files import TEMP_PREFIX, crc32, replace_file

MANIFEST, ANSWER, CHANGES = "manifest.json", ".answer", ".changes"
_LOOK_EVERY = 0.2  # seconds
_FAR = 255


def changes(old: bytes, new: bytes) -> bytes:
    """What `patch` writes into a file of the bytes `old` to make it `new`, of equal and even length."""
    before, after = (np.frombuffer(x, "<u2") for x in (old, new))
    places = np.flatnonzero(before != after)
    distances = np.diff(places, prepend=0)
    ends = np.cumsum(distances // _FAR + 1) - 1
    codes = np.full(int(ends[-1]) + 1 if len(ends) else 0, _FAR, np.uint8)
    codes[ends] = distances % _FAR
    return len(places).to_bytes(8, "little") + after[places].tobytes() + codes.tobytes()


def patch(path: Path, data: bytes) -> None:
    """Write `changes` into a file, in place. Twice is once. ValueError, IndexError: they are not of this file."""
    count = int.from_bytes(data[:8], "little")
    values, codes = np.frombuffer(data, "<u2", count, 8), np.frombuffer(data, np.uint8, offset=8 + 2 * count)
    words = np.memmap(path, "<u2", "r+")
    words[np.cumsum(codes, dtype=np.int64)[codes < _FAR]] = values
    words.flush()


def bring_up(copy: Path, update: Path) -> str:
    """Bring the files in `copy` to the version of `update`. Returns what does not fit: then they need whole files."""
    sums: dict[str, int] = json.loads((update / MANIFEST).read_text())
    copy.mkdir(parents=True, exist_ok=True)
    for name, expected in sums.items():
        file, whole = copy / Path(name).name, update / Path(name).name
        if whole.exists():
            if not file.exists() or crc32(file) != expected:
                shutil.copyfile(whole, temp := file.with_name(TEMP_PREFIX + file.name))
                temp.replace(file)
        elif not file.exists():
            return f"{file} is missing"
        else:
            try:
                patch(file, whole.with_name(whole.name + CHANGES).read_bytes())
            except (ValueError, IndexError):
                return f"{file} is another file than the changes are of"
        if crc32(file) != expected:
            return f"{file} was not the version that the changes are of (its CRC-32 differs)"
    for file in copy.glob("*.safetensors"):
        if file.name not in sums:
            file.unlink()
    return ""


def follow(folder: Path, copy: Path, *, name: str) -> str:
    """Wait for the next update in `folder`, bring `copy` up to it and answer as `name`. Returns what it did."""
    while True:
        newest = max((file.parent for file in folder.glob(f"*/{MANIFEST}")), default=None, key=lambda x: x.name)
        if newest is not None and not (answer := newest / f"{name}{ANSWER}").exists():
            try:
                fault = bring_up(copy, newest)
                read = sum(file.stat().st_size for file in newest.glob("*.safetensors*"))
                answered = {"copy": os.path.abspath(copy), "fault": fault}
                replace_file(answer, json.dumps(answered).encode())
            except FileNotFoundError:  # the trainer has ended, and deleted it
                continue
            size = sum(file.stat().st_size for file in copy.iterdir())
            return fault or f"weights: {read:,} bytes brought a copy of {size:,} up to date"
        time.sleep(_LOOK_EVERY)
