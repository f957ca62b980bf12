"""Completions on disk as they are made, and read again from there: a killed run need not sample twice."""

from __future__ import annotations

import json
import zlib
from array import array
from dataclasses import asdict
from pathlib import Path

from rlkit.parallel._files import append_file, explain_full_disk, replace_file
from rlkit.rollout.pausable import NOTHING, continued, joined, resumable
from rlkit.types import Completion, Generate, SamplingParams

Key = tuple[int, int, int]


class Journal:
    """A `generate` that writes each completion down before it returns it, and gives what is written without asking.

    A completion is known by the seed of its request and its context, so the seed must be given and be different for
    every request, as `rlkit.rollout` makes them. What was aborted is continued from its last token. An environment that
    is run again after a crash gets the same turns as long as it asks the same questions; from where it differs
    (a search that finds something else now), it is sampled anew.

    Files are `{folder}/{version}.jsonl` by the newest weights in a completion. On resume from weights `version` later
    ones are deleted, since those weights are gone; `forget` deletes what is too old to be asked for.

    Bits: a replayed completion is what was sampled, log-probs included. Those sampled beside it are batched differently
    by the engine than in a run that was not killed, and may differ from it by rounding.
    """

    def __init__(self, folder: Path, generate: Generate, *, version: int = 0) -> None:
        self._folder, self._generate = folder, generate
        self._known: dict[Key, Completion] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob("*.jsonl"), key=_version):
            if _version(path) > version:
                path.unlink()
            else:
                self._read(path)

    async def generate(self, prompt_ids: list[int], *, params: SamplingParams, rid: str | None = None) -> Completion:
        """See `rlkit.types.Generate`."""
        done = NOTHING
        while (known := self._known.pop(_key(params.seed, prompt_ids, done), None)) is not None:
            done = joined(done, known)
            done = resumable(done, params) if done.finish_reason == "abort" else done
            if done.finish_reason != "abort":
                return done
        out = await continued(self._generate, prompt_ids, done, params=params, rid=rid)
        if out.ids:
            self._write(_key(params.seed, prompt_ids, done), out)
        return joined(done, out)

    def forget(self, *, before: int) -> None:
        """Delete the files of versions before this one."""
        for path in self._folder.glob("*.jsonl"):
            if _version(path) < before:
                path.unlink()

    def _write(self, key: Key, out: Completion) -> None:
        line = (json.dumps({"key": key, **asdict(out)}, separators=(",", ":")) + "\n").encode()
        fix = "Free space there and resume: completions that were written are not sampled again."
        with explain_full_disk("a completion", self._folder, needed=len(line), fix=fix):
            append_file(self._folder / f"{max(out.versions)}.jsonl", line)

    def _read(self, path: Path) -> None:
        """A last line that was cut by a crash is cut off, so that the next one starts on a line of its own."""
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            replace_file(path, whole)
        for line in whole.splitlines():
            row = json.loads(line)
            key = tuple(row.pop("key"))
            self._known[key] = Completion(**row)


def _key(seed: int | None, prompt_ids: list[int], done: Completion) -> Key:
    if seed is None:
        raise ValueError("a journal knows a request by params.seed: give one")
    context = array("q", [*prompt_ids, *done.ids]).tobytes()
    return seed, len(context), zlib.crc32(context)


def _version(path: Path) -> int:
    return int(path.stem) if path.stem.isdecimal() else -1
