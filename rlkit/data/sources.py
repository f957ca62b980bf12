"""Where rows come from: the files, folders, splits, hub data sets and packages that a path stands for."""

from __future__ import annotations

import logging
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

from rlkit._util import untrusted
from rlkit.data.files import PACKED, READERS, Placed, format_of, need_datasets, numbered, read_file, reading
from rlkit.data.packages import package_of, rows_of

_log = logging.getLogger("rlkit.data")
_SPLITS = {  # the words by which file and folder names name a split, as `datasets` knows them
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
}
HELD_OUT = {word for word, split in _SPLITS.items() if split != "train"}
_PIECE = 1 << 16  # bytes
_INSTRUCTION = "instruction.md"  # of a task of Harbor
_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)")
_ABOUT = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}  # files about the data


class Source(NamedTuple):
    """A file, a saved split, a hub data set or a package's task: its name in messages, and its rows with places."""

    name: str
    rows: Callable[[], Placed]


def expand(spec: str | Path) -> list[str]:
    """The paths that a glob matches, sorted; anything else as it is. FileNotFoundError for a glob without a match."""
    text, path = str(spec), Path(spec).expanduser()
    if path.exists() or package_of(text) or not re.search(r"[*?\[]", text):
        return [text]
    paths = sorted(glob(str(path), recursive=True))
    if not paths:
        raise FileNotFoundError(_separate(text) or f"{text}: no file matches (looked from {Path.cwd()})")
    return paths


def identity(specs: Sequence[str | Path]) -> str:
    """The names of some files and a number of their contents: their sizes and up to 16 pieces of 64 KiB of each.

    Of FOLDER:SPLIT and a folder those of all its files are, but for hidden ones. A hub data set, or a package's task,
    is known by its name alone.
    """
    crc = 0
    for path in (_on_disk(path) for spec in specs for path in expand(spec)):
        inside = path.rglob("*") if path.is_dir() else ()
        shown = (p for p in inside if not any(part[0] == "." for part in p.relative_to(path).parts))
        files = sorted(p for p in shown if p.is_file()) or [path] * path.is_file()
        crc = zlib.crc32(b"" if files else str(path).encode(), crc)
        for file in files:
            size = file.stat().st_size
            crc = zlib.crc32(str(size).encode(), crc)
            with file.open("rb") as data:
                for piece in range(16):
                    data.seek(max(0, (size - _PIECE) * piece // 15))
                    crc = zlib.crc32(data.read(_PIECE), crc)
    return f"{' '.join(map(str, specs))} {crc:08x}"


def _on_disk(spec: str) -> Path:
    """The path of a spec, of FOLDER:SPLIT and FOLDER:NAME:SPLIT the folder's where it is there."""
    names = [spec.rsplit(":", n)[0] for n in range(3)]
    return next((path for name in names if (path := Path(name).expanduser()).exists()), Path(spec).expanduser())


def find(spec: str | Path, *, name: str | None, split: str | None, held_out: bool) -> list[Source]:
    """The sources of a path or hub id that is no glob. Errors: see `rlkit.data.load.load_rows`."""
    text, path = str(spec), Path(spec).expanduser()
    if scheme := re.match(r"\w[\w+.-]*://", text):
        hub = re.fullmatch(r"(?:hf|https?)://(?:huggingface\.co/)?datasets/([^/]+/[^/]+).*", text)
        instead = f"for the hub data set give {hub[1]}" if hub else "download it, and give the file"
        raise ValueError(f"{text}: {scheme[0]} addresses are not read: {instead}")
    if package_of(text):
        name = f"{text} held out" if held_out else text
        return [Source(name, lambda: numbered(rows_of(text, held_out=held_out)))]
    if path.is_file():
        return [Source(text, partial(read_file, path))]
    if path.is_dir():
        return _in_folder(path, split, held_out=held_out)
    start, colon, part = text.rpartition(":")
    first, *others = text.split(":")
    inside = Path(first, *others[:-1]).expanduser()  # FOLDER:SPLIT and FOLDER:SUBFOLDER:SPLIT
    if colon and inside.is_dir():
        return _in_folder(inside, part or split, held_out=held_out)
    if colon and Path(start).expanduser().is_file():
        raise ValueError(f"{text}: a file has no splits; give {start} alone")
    if format_of(path) in READERS or path.suffix.lower() in PACKED or path.is_absolute():
        raise FileNotFoundError(_separate(text) or _missing(path))
    return [_on_hub(text, name, split, path, held_out=held_out)]


def _in_folder(path: Path, split: str | None, *, held_out: bool) -> list[Source]:
    """The sources of a folder: what `save_to_disk` wrote there, or the files of one split."""
    if any((path / marker).is_file() for marker in ("state.json", "dataset_dict.json")):
        return [_saved(path, split, held_out=held_out)]
    if tasks := _tasks_in(path):
        return [Source(str(path), partial(_task_rows, tasks))]
    files = [p.relative_to(path) for p in sorted(path.rglob("*")) if _holds_data(p, path)]
    if not files:
        there = sorted(p.name for p in path.iterdir())[:8]
        raise ValueError(f"{path}: a folder without data files ({', '.join(READERS)}); it holds {there}")
    splits = defaultdict(list)
    for file in files:
        splits[_split_of(file)].append(file)
    if None in splits and len(splits) > 1:
        named = ", ".join(repr(str(key)) for key in splits if key)
        raise ValueError(
            f"{path}: some files are named by their split ({named}) and others are not, such as {splits[None][0]}: "
            f"give the files, or a glob such as '{path}/*{files[0].suffix}'"
        )
    chosen = _choose([key or "train" for key in splits], split, str(path), held_out=held_out)
    every, files = files, splits[chosen if None not in splits else None]
    _check_shards(path, chosen, files)
    usual = chosen in HELD_OUT if held_out else chosen == "train"
    if split is None and None not in splits and (len(files) < len(every) or not usual):
        left = _listed([file for file in every if file not in files])
        _log.warning("%s: reads the split %s: %s%s", path, chosen, _listed(files), f", and not {left}" if left else "")
    elif len(files) > 1 and not all(_SHARD.match(file.name) for file in files):
        _log.warning("%s: reads %d files: %s", path, len(files), _listed(files))
    return [Source(str(path / file), partial(read_file, path / file)) for file in files]


def _tasks_in(path: Path) -> list[Path]:
    """The folders of Harbor's tasks in a folder, or the folder itself: those with a `task.toml` and an instruction."""
    folders = [config.parent for config in sorted(path.glob("task.toml")) or sorted(path.glob("*/task.toml"))]
    tasks = [folder for folder in folders if (folder / _INSTRUCTION).is_file()]
    if tasks and (left := [Path(folder.name) for folder in folders if folder not in tasks]):
        _log.warning("%s: reads %d tasks, and not those without %s: %s", path, len(tasks), _INSTRUCTION, _listed(left))
    return tasks


def _task_rows(tasks: Sequence[Path]) -> Placed:
    """A row for each task: its instruction as the prompt, and its folder."""
    for task in tasks:
        with reading(file := task / _INSTRUCTION, "text"):
            text = untrusted.read(file, "row_mib").decode()
        yield task.name, {"prompt": text, "task": str(task.absolute())}


def _listed(files: Sequence[Path]) -> str:
    return ", ".join(map(str, files[:3])) + (f" and {len(files) - 3} more" if len(files) > 3 else "")


def _holds_data(file: Path, folder: Path) -> bool:
    hidden = any(part[0] in "._" for part in file.relative_to(folder).parts)  # .cache/, _SUCCESS
    return not hidden and file.name not in _ABOUT and format_of(file) in READERS and file.is_file()


def _split_of(file: Path) -> str | None:
    """The split that a file's name, or else the name of a folder that it is in, tells; None if none does."""
    shard = _SHARD.match(file.name)
    if shard and _splits_in(shard[1]):
        return shard[1]
    for part in reversed(file.parts):
        if len(splits := _splits_in(part)) == 1:
            return splits.pop()
    return shard[1] if shard else None


def _splits_in(name: str) -> set[str]:
    return {_SPLITS[word] for word in re.split(r"[^a-z]+", name.lower()) if word in _SPLITS}


def _choose(splits: Sequence[str], split: str | None, where: str, *, held_out: bool) -> str:
    """The split asked for; else the only one, else train or, with `held_out`, the only test or validation split."""
    if split is not None:
        name = split if split in splits else _SPLITS.get(split, split)
        if name not in splits:
            raise ValueError(f"{where}: no split {split!r}; it has {sorted(splits)}")
        return name
    if len(splits) == 1:
        return splits[0]
    fitting = [s for s in splits if (s in HELD_OUT if held_out else s == "train")]
    if len(fitting) != 1:
        which = "one test or validation split" if held_out else "'train'"
        raise ValueError(f"{where}: it has the splits {sorted(splits)}, and not {which}: name one, as {where}:SPLIT")
    return fitting[0]


def _check_shards(path: Path, split: str, files: Sequence[Path]) -> None:
    """ValueError for files of several formats or folders, of which one may be meant, and for missing shards."""
    kinds, folders = {format_of(file): file for file in files}, {}
    for file in files:
        folders[tuple(part for part in file.parent.parts if _split_of(Path(part)) is None)] = file.parent
    if len(kinds) > 1:
        fix = f"give a glob, such as '{path / files[0].parent}/*{files[0].suffix}'"
        raise ValueError(f"{path}: {split} is there as {' and as '.join(sorted(kinds))}: {fix}")
    if len(folders) > 1:
        names = [str(folder) for folder in folders.values()]
        one = ":".join(map(str, (path, files[0].parent, split)))
        raise ValueError(f"{path}: {split} is in the folders {', '.join(names[:8])}: give one, as {one}, or a glob")
    shards = [shard for file in files if (shard := _SHARD.match(file.name))]
    for shard in shards:
        missing = {*range(int(shard[3]))} - {int(other[2]) for other in shards if other[3] == shard[3]}
        if missing:
            first = f"{split}-{min(missing):0{len(shard[2])}d}-of-{shard[3]}"
            raise ValueError(
                f"{path}: {len(missing)} of {int(shard[3])} shards of {split} are missing, such as {first}"
            )


def _saved(path: Path, split: str | None, *, held_out: bool) -> Source:
    """A folder written by `save_to_disk`."""
    datasets = need_datasets(path)
    with reading(path, saved := "a folder of save_to_disk"):
        data: Any = datasets.load_from_disk(str(path))

    def rows(part: Any) -> Placed:
        with reading(path, saved):
            yield from numbered(part)

    if not isinstance(data, datasets.DatasetDict):
        if split is not None:
            raise ValueError(f"{path}: no split {split!r}: it is one data set without splits; give {path} alone")
        return Source(str(path), partial(rows, data))
    chosen = _choose(list(data), split, str(path), held_out=held_out)
    return Source(f"{path}:{chosen}", partial(rows, data[chosen]))


def _on_hub(spec: str, name: str | None, split: str | None, path: Path, *, held_out: bool) -> Source:
    """`spec`: owner/name, owner/name:configuration or owner/name:configuration:split."""
    dataset_id, own_name, own_split = (*spec.split(":", 2), "", "")[:3]
    name, split = own_name or name, own_split or split
    datasets = need_datasets(dataset_id)
    try:
        if split is None and held_out:
            names = datasets.get_dataset_split_names(dataset_id, name)
    except Exception as error:
        raise _not_on_hub(dataset_id, path, name, split, error) from error
    if split is None:
        configuration = f"{dataset_id}:{name or ''}"
        split = _choose(names, None, configuration, held_out=True) if held_out else "train"

    def rows() -> Iterator[tuple[str, Any]]:
        try:
            return numbered(datasets.load_dataset(dataset_id, name, split=split))
        except Exception as error:
            raise _not_on_hub(dataset_id, path, name, split, error) from error

    return Source(spec, rows)


def _not_on_hub(dataset_id: str, path: Path, name: str | None, split: str | None, error: Exception) -> Exception:
    return FileNotFoundError(
        f"{dataset_id}: no such file or folder ({path.absolute()}), and as a hub data set (name={name!r}, "
        f"split={split!r}) it fails with {type(error).__name__}: {error}"
    )


def _separate(text: str) -> str:
    """The message for a list of files in one argument; "" for anything else."""
    parts = [part.strip(" '\"") for part in text.strip("[]").split(",")]
    there = len(parts) > 1 and all(Path(part).expanduser().exists() for part in parts)
    return f"{text}: several files are separated by blanks: {' '.join(parts)}" if there else ""


def _missing(path: Path) -> str:
    message = f"{path}: no such file (looked for {path.absolute()}); the folder {path.parent} does not exist either"
    if path.parent.is_dir():
        near = sorted(p.name for p in path.parent.iterdir() if format_of(p) in READERS)[:8]
        message = f"{path}: no such file (looked for {path.absolute()}); data files in that folder: {near}"
    return f"{message}. A hub data set is given as owner/name, without a suffix"
