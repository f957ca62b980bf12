"""Atomic files and folders: written under a temporary name, synced to the disk, then renamed into place.

Also where a model and the cache are, for modules that do not import torch.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rlkit._util import untrusted

TEMP_PREFIX = ".tmp_"  # names that start with it are unfinished or abandoned, and may be deleted
_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file would pass the file size limit (ulimit -f)",
}
_CHUNK = 1 << 22
ADAPTER = "adapter_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def check_model_path(path: str | os.PathLike[str], *, of: str = "model") -> None:
    """FileNotFoundError for a folder without config.json, and for a hub id that cannot be had without a network.

    transformers takes a missing folder for a hub id, and reports a connection error after half a minute. ValueError for
    a GGUF file, NotADirectoryError for any other. `of` names what the path is of in them.
    """
    if str(path).endswith(".gguf"):
        fault = "rlkit reads folders saved by save_pretrained; docs/models.md has the lines that convert it"
        raise ValueError(f"{of} {str(path)!r} is a GGUF file: {fault}")
    if Path(path).is_file():
        folder = Path(path).parent
        raise NotADirectoryError(f"{of} {str(path)!r} is a file: give its folder, {str(folder)!r}")
    if (Path(path) / "config.json").is_file():
        return
    if is_adapter(path):
        return check_model_path(base_of(path), of=f"the base model of the adapter {str(path)!r}:")
    if (Path(path) / "model" / "config.json").is_file():
        raise FileNotFoundError(f"{of} {str(path)!r} is a run folder: give its model, {str(Path(path) / 'model')!r}")
    fault = "a folder without config.json" if Path(path).is_dir() else "no folder"
    beside = _beside(Path(path))
    if Path(path).is_dir() or not re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(path)):
        fix = f"give a folder saved by save_pretrained, or a hub id a/b{beside}"
        raise FileNotFoundError(f"{of} {str(path)!r}: {fault}; {fix}")
    if reason := _no_hub(str(path)):
        raise FileNotFoundError(f"{of} {str(path)!r}: no folder{beside}, and no hub id in the cache, and {reason}")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers reads: the single one, else those of the index, else all.

    Some repositories hold the weights twice, with other names in `consolidated.safetensors`.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    with suppress(OSError, ValueError, LookupError):  # none, or damaged
        return [folder / name for name in sorted({*json.loads((folder / INDEX).read_bytes())["weight_map"].values()})]
    return sorted(file for file in folder.glob("*.safetensors") if file.is_file())


def model_file(path: str | os.PathLike[str], name: str, *, cached: bool = False) -> Path | None:
    """A file of a model's folder or hub id; None where it has none. With `cached` nothing is downloaded."""
    if Path(path).is_dir():
        return Path(path) / name if (Path(path) / name).exists() else None
    from transformers.utils.hub import cached_file

    quiet: Any = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    file = cached_file(str(path), name, local_files_only=cached, **quiet)
    return Path(file) if file else None


def is_adapter(path: str | os.PathLike[str]) -> bool:
    """Whether a folder holds an adapter of peft and no model."""
    return (Path(path) / ADAPTER).is_file() and not (Path(path) / "config.json").is_file()


def adapter_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The adapter_config.json of a folder; ValueError for one that is damaged."""
    file = Path(path) / ADAPTER
    config = untrusted.read_json(file)
    if not isinstance(config, dict):
        raise ValueError(f"{file} is damaged, it is no JSON object: copy or download it again")
    return config


def base_of(path: str | os.PathLike[str]) -> str:
    """The folder or hub id of the model under an adapter of peft; any other path as it is.

    A relative path in adapter_config.json is tried from the current folder, as peft does, and from the adapter's.
    Errors: ValueError for an adapter that names no model, or another adapter; FileNotFoundError for a folder that is
    gone.
    """
    if not is_adapter(path):
        return str(path)
    name, fix = adapter_config(path).get("base_model_name_or_path"), f"give it: --model BASE --adapter {path}"
    if not name or not isinstance(name, str):
        raise ValueError(f"the adapter {str(path)!r} names no base model: {fix}")
    folder = next((place for place in (Path(name), Path(path) / name) if place.is_dir()), None)
    if folder is None and not re.fullmatch(r"\w[\w.-]*/[\w.-]+", name):
        raise FileNotFoundError(f"the adapter {str(path)!r} is of the base model {name!r}, which is not there: {fix}")
    if folder is not None and is_adapter(folder):
        raise ValueError(f"the adapter {str(path)!r} is of another adapter, {name!r}: merge that one into its model")
    return name if folder is None else str(folder)


def _beside(path: Path) -> str:
    """The folders beside a missing one, as ` (o/ holds a, b)`, or the one with nearly its name, ` (perhaps a)`."""
    if not path.parent.is_dir():
        return ""
    names = sorted(entry.name for entry in path.parent.iterdir() if entry.is_dir() and entry.name[0] != ".")
    if not path.exists() and (near := get_close_matches(path.name, names, n=1)):
        return f" (perhaps {path.with_name(near[0])})"
    if not path.parent.name:
        return ""
    return f" ({path.parent}/ holds {', '.join(names[:6])}{', ...' * (len(names) > 6)})" if names else ""


def _no_hub(name: str) -> str | None:
    """Why a model that is not in the cache cannot be downloaded, found out at once; transformers retries for 35 s."""
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    from huggingface_hub import constants

    cached = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    if constants.HF_HUB_OFFLINE or getproxies() or cached.exists():
        return None
    url = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((url.hostname, url.port or (80 if url.scheme == "http" else 443)), timeout=10).close()
    except OSError as error:
        return f"{url.hostname} cannot be reached ({error.strerror or error})"
    return None


@contextmanager
def no_code(path: os.PathLike[str] | str, *, kind: str = "file of a checkpoint") -> Iterator[None]:
    """In a block that reads the file `path` without running code, ValueError for any error but an OSError.

    torch's own text advises its reader to load the file in a way that runs its code.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        wanted, text = re.search(r"GLOBAL (\S+)", str(error)), str(error)
        if wanted:
            reason = f"it asks for {wanted[1]}, and rlkit runs no code of a file"
        else:
            reason = "torch cannot read it" if text.startswith("Weights only load failed") else text or repr(error)
        raise ValueError(f"{path} is damaged, or no {kind}: {' '.join(reason.split())[:200]}") from None


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/rlkit`, by default `~/.cache/rlkit`; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "rlkit"


def sync(path: Path) -> None:
    """Block until the content of a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes) -> None:
    """Write `data` and sync it. Not atomic: for files inside a temporary folder."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def share(path: Path) -> None:
    """Give a file that another library wrote for its owner alone the permissions of any other new file."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def append_file(path: Path, data: bytes) -> None:
    """Append all of `data`, or nothing if the write fails; only a crash of the machine may leave a part of it."""
    with path.open("ab", buffering=0) as file:
        start, rest = file.tell(), memoryview(data)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(start)
            raise


def temporary(path: Path) -> Path:
    """A name beside `path` that no other process, on whatever machine, uses."""
    return path.with_name(f"{TEMP_PREFIX}{path.name}.{socket.gethostname()}.{os.getpid()}")


def replace_file(path: Path, data: bytes) -> None:
    """Replace the content of `path` atomically: a reader, or a crash at any time, sees the old content or the new.

    Several processes, also of several machines, may write it at once.
    """
    temp = temporary(path)
    try:
        write_file(temp, data)
        temp.replace(path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    sync(path.parent)


def replace_folder(temp: Path, path: Path) -> None:
    """Rename the complete folder `temp` to `path`; an earlier folder is renamed first and deleted last."""
    for file in (*temp.rglob("*"), temp):
        sync(file)
    aside = path.with_name(path.name + ".old")
    if path.exists():
        remove_folder(aside)
        path.rename(aside)
    temp.rename(path)
    sync(path.parent)
    remove_folder(aside)


def remove_folder(path: Path) -> None:
    """Delete a folder, if it exists; a crash meanwhile leaves a folder with `TEMP_PREFIX` in its name."""
    if not path.exists():
        return
    if not path.name.startswith(TEMP_PREFIX):
        marked = path.with_name(TEMP_PREFIX + path.name)
        shutil.rmtree(marked, ignore_errors=True)
        path = path.rename(marked)
    shutil.rmtree(path, ignore_errors=True)


def crc32(path: Path) -> int:
    """CRC-32 of a file: the fastest in the standard library (2.8 GiB/s per core; SHA-256 1.6, BLAKE2b 0.8)."""
    value = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def free_space(folder: Path) -> int | None:
    """Bytes that this user may still write in `folder`; None where the filesystem does not report them."""
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize if stat.f_blocks else None


def require_room(item: str, folder: Path, *, needed: int, fix: str) -> None:
    """Raise the OSError of `explain_full_disk` if less than `needed` bytes are free, before anything is written."""
    free = free_space(folder)
    if free is not None and free < needed:
        raise _full(errno.ENOSPC, item, folder, needed, fix)


@contextmanager
def explain_full_disk(item: str, folder: Path, *, needed: int, fix: str) -> Iterator[None]:
    """Inside the block, a full disk raises one OSError with the path, the space needed and free, and the fix."""
    try:
        yield
    except BaseException as error:
        code = _cause(error)
        if code is None:
            raise
        raise _full(code, item, folder, needed, fix) from error


@contextmanager
def removed_on_error(folder: Path) -> Iterator[None]:
    """Delete `folder` if the block that fills it fails or is interrupted."""
    try:
        yield
    except BaseException:
        remove_folder(folder)
        raise


def _full(code: int, item: str, folder: Path, needed: int, fix: str) -> OSError:
    free = free_space(folder)
    room = "" if free is None else f", {_megabytes(free)} are free"
    return OSError(code, f"cannot save {item}, {_FULL[code]}: it needs {_megabytes(needed)}{room}. {fix}", str(folder))


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


def _cause(error: BaseException | None) -> int | None:
    """The errno of a full disk in the chain of `error`, or None. torch wraps it by context, cause or rank."""
    seen: set[int] = set()
    queue = [error]
    while queue:
        e = queue.pop()
        if e is None or id(e) in seen:
            continue
        seen.add(id(e))
        spelled = re.search(r"\(os error (\d+)\)", str(e))  # safetensors writes in Rust and raises its own type
        code = e.errno if isinstance(e, OSError) else int(spelled[1]) if spelled else None
        if code in _FULL:
            return code
        queue += [e.__cause__, e.__context__, *(f[0] for f in getattr(e, "failures", {}).values())]
    return None
