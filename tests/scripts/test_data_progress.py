"""Long reading of data says how far it is: a line that is erased on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import json
import logging

import pytest

from rlkit.data.examples import sft_examples
from rlkit.data.load import load_rows
from rlkit.data.tiny import tiny_tokenizer
from rlkit.run.console import data_progress


class Screen(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a.jsonl"
    row = json.dumps({"prompt": "1", "response": "2"}) + "\n"
    path.write_text(row * 2500)
    return path


def read(*files, after_s):
    with data_progress(after_s=after_s):
        rows = load_rows(files)
        logging.getLogger("rlkit.data").warning("a warning")
        sft_examples(rows, tokenizer=tiny_tokenizer(), max_example_tokens=99)


@pytest.mark.slow
def test_a_terminal_shows_each_phase_in_one_line_that_is_erased(file, monkeypatch):
    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr("rlkit.run.console.time.monotonic", iter(range(1000)).__next__)
    read(file, file, after_s=0)
    shown = [line for line in screen.getvalue().split("\r\x1b[K") if line]
    assert shown[:4] == [f"reading {file} (file {n} of 2): {k} rows" for n in (1, 2) for k in (1000, 2000)]
    assert shown[4:9] == [f"rendering: {k} of 5000 rows" for k in (1000, 2000, 3000, 4000, 5000)]
    assert shown[-1] == "tokenizing: 5000 of 5000 texts"
    assert screen.getvalue().endswith("\r\x1b[K")


@pytest.mark.slow
def test_a_log_file_gets_a_line_now_and_then_and_short_reading_is_silent(file, monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr("sys.stderr", log)
    read(file, after_s=0)
    assert log.getvalue() == f"reading {file}: 1000 rows\n"  # the next one is due ten seconds later
    log.truncate(0)
    log.seek(0)
    read(file, after_s=60)
    assert log.getvalue() == ""
    level = logging.getLogger("rlkit.data.progress").level
    assert (level, logging.getLogger("rlkit.data").filters) == (logging.NOTSET, [])
