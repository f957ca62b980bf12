"""Reads the files of a checkpoint so that none of them can run code, whoever wrote it.

torch.distributed.checkpoint keeps its table of tensors, `.metadata`, as a pickle, and a pickle may call any function.
`Reader` allows the classes of that table and nothing else; every other file is read with `weights_only=True`.
"""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from rlkit._util.files import no_code

_CLASSES = [
    metadata.ChunkStorageMetadata, metadata.Metadata, metadata.MetadataIndex, metadata.StorageMeta,
    metadata.TensorProperties, metadata.TensorStorageMetadata, metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo,
    torch.Size,
]  # fmt: skip
# not BytesStorageMetadata: torch reads such an entry with weights_only=False
_KNOWN: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__name__): kind for kind in _CLASSES},
    **{("torch", name): kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)},
    **{(module, "PosixPath"): PurePosixPath for module in ("pathlib", "pathlib._local")},  # where it was written
    ("torch.serialization", "_get_layout"): lambda _: torch.strided,
    ("builtins", "getattr"): lambda _, name: metadata._MEM_FORMAT_ENCODING[name],  # an enum's member, in Python 3.11.0
}


class Reader(dcp.FileSystemReader):
    """torch's reader of a checkpoint, without a way to run code. ValueError, with the file, for what it refuses."""

    def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:
        """The table of tensors of all ranks."""
        path = Path(self.path) / ".metadata"
        with no_code(path), path.open("rb") as file:
            table = _Unpickler(file).load()
            if not _is_table(table):
                raise pickle.UnpicklingError("it is no table of tensors")
        table.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return table

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the tensors of this rank."""
        with no_code(Path(self.path) / ".metadata"):
            names = sorted({self.storage_data[item.storage_index].relative_path for item in plan.items})
        with no_code(Path(self.path) / ", ".join(names)):
            return super().read_data(plan, planner)


def read_plain(path: Path) -> Any:
    """The tensors, numbers, strings, lists, tuples and dicts of a file of `torch.save`. ValueError for any other."""
    with no_code(path):
        if not zipfile.is_zipfile(path):
            raise pickle.UnpicklingError("it is no file of torch.save")
        return torch.load(path, map_location="cpu", weights_only=True)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
        return _KNOWN[module, name]


def _is_table(table: Any) -> bool:
    """Whether it describes tensors in files beside it."""
    if not isinstance(table, metadata.Metadata):
        return False
    tensors, places = table.state_dict_metadata, table.storage_data
    return (
        isinstance(tensors, dict)
        and all(isinstance(entry, metadata.TensorStorageMetadata) for entry in tensors.values())
        and isinstance(places, dict)
        and all(isinstance(place, filesystem._StorageInfo) for place in places.values())
        and all(Path(place.relative_path).name == place.relative_path for place in places.values())
    )
