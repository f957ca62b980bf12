from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest

from rlkit.compat.rewards import adapted
from rlkit.rewards import load_function
from rlkit.rewards.call import check_signature


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", ".")])  # not the folder
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "my_rewards", "broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def write(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_a_file_is_loaded_with_its_neighbours_and_afresh(folder):
    write(folder / "sub" / "rlkit_test_neighbour.py", "WORTH = 3")
    source = "from dataclasses import dataclass\nimport rlkit_test_neighbour as n\n@dataclass\nclass A:\n    x: int\n"
    path = write(folder / "sub" / "my_rewards.py", source + "def score(completion, row): return A(n.WORTH).x")
    assert load_function(f"{path}:score")("", {}) == 3
    assert load_function("sub/my_rewards.py:score")("", {}) == 3
    write(path, "def score(completion, row): return 4")
    assert load_function("sub/my_rewards.py:score")("", {}) == 4


def test_a_file_named_like_a_standard_module_shadows_nothing(folder):
    write(folder / "math.py", "def score(completion, row): return 5")
    assert load_function("math.py:score")("", {}) == 5
    assert load_function("math:sqrt")(9) == 3
    import math

    assert math.sqrt(4) == 2


def test_two_functions_of_a_file_share_a_module_that_spawned_processes_can_import(folder):
    path = write(folder / "rlkit_test_counted.py", "def one(c, r): return seen\ndef two(c, r): ...\nseen = []")
    one, two = load_function(f"{path}:one"), load_function(f"{path}:two")
    assert one.__globals__ is two.__globals__
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(one, "", {}).result(timeout=60) == []


def test_a_relative_import_is_refused_with_what_to_write(folder):
    write(folder / "mine.py", "import os\nfrom .sub import K\ndef score(c, r): ...")
    with pytest.raises(
        ImportError, match=r"mine\.py, line 2: a relative import finds no package: write `from NAME import"
    ) as raised:
        load_function("mine.py:score")
    assert "\n" not in str(raised.value)


USES = "from rlkit_test_uses.utils import WORTH\ndef score(completion, row): return WORTH"
RELATIVE = "from .utils import WORTH\nfrom dataclasses import dataclass\ndef score(completion, row): return WORTH"


@pytest.mark.parametrize("text", [USES, RELATIVE])
@pytest.mark.parametrize("place", ["rlkit_test_uses/mine.py", "rlkit_test_uses.mine"])
@pytest.mark.parametrize("is_package", [True, False])
def test_a_file_of_a_package_imports_from_it(folder, text, place, is_package):
    write(folder / "rlkit_test_uses" / "utils.py", "WORTH = 7")
    write(folder / "rlkit_test_uses" / "mine.py", text)
    if is_package:
        write(folder / "rlkit_test_uses" / "__init__.py", "")
    try:
        if text == RELATIVE and place.endswith(".py") and not is_package:
            with pytest.raises(ImportError, match=r"finds no package: .* or make its folder a package by an empty"):
                load_function(f"{place}:score")
        else:
            assert load_function(f"{place}:score")("", {}) == 7
    finally:
        for name in [name for name in sys.modules if name.startswith("rlkit_test_uses")]:
            del sys.modules[name]


def test_a_package_that_fails_while_imported_is_named(folder):
    write(folder / "rlkit_test_fails" / "__init__.py", "import rlkit_test_slime")
    write(folder / "rlkit_test_fails" / "mine.py", "def score(completion, row): return 1")
    with pytest.raises(ImportError, match=r"^rlkit_test_fails, line 1: no module 'rlkit_test_slime'"):
        load_function("rlkit_test_fails/mine.py:score")


def test_a_file_of_the_current_folder_is_a_module_too(folder):
    write(folder / "rlkit_test_mine.py", "def score(completion, row): return 8")
    assert load_function("rlkit_test_mine:score")("", {}) == 8


def test_a_module_is_loaded_by_its_dotted_name(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    write(folder / "rlkit_test_pkg" / "deep.py", "def score(completion, row): return 6")
    assert load_function("rlkit_test_pkg.deep:score")("", {}) == 6


@pytest.mark.parametrize("spec", ["my_rewards.py", ":score", "my_rewards.py:", "my_rewards.py:a b", ""])
def test_the_form_of_the_name_is_checked(spec):
    with pytest.raises(ValueError, match=r"'file\.py:function' or 'package\.module:function', got"):
        load_function(spec)


def test_a_file_without_a_function_and_a_bare_name_have_a_hint(folder):
    source = "import os\nLIMIT = 3\ndef score(c, r):\n    def inner(): ...\nasync def other(c, r): ...\n"
    write(folder / "mine.py", source + "mixed = partial(score)\ndef _own(): ...\nraise SystemExit")
    with pytest.raises(ValueError, match=r"got 'mine\.py'; mine\.py has \['score', 'other', 'mixed'\]$"):
        load_function("mine.py")
    with pytest.raises(ValueError, match=r"got 'exact_match'; did you mean rlkit\.rewards\.text:exact_match\?$"):
        load_function("exact_match")
    with pytest.raises(ValueError, match=r"got 'no_such_reward'$"):
        load_function("no_such_reward")


def test_trls_functions_are_known_by_name():
    pytest.importorskip("trl.rewards", reason="TRL is not installed: pip install --no-deps trl")
    with pytest.raises(ValueError, match=r"got 'accuracy_reward'; did you mean trl\.rewards:accuracy_reward\?$"):
        load_function("accuracy_reward")


def test_what_is_missing_is_named_with_what_is_there(folder):
    write(folder / "mine.py", "import os\nLIMIT = 3\ndef score(c, r): ...\ndef other(c, r): ...")
    with pytest.raises(ModuleNotFoundError, match=r"no module 'yours' \(a file is given with its suffix \.py\)"):
        load_function("yours:score")
    with pytest.raises(FileNotFoundError, match=r"no file .*your\.py \(Python files in that folder: \['mine\.py'\]\)"):
        load_function("your.py:score")
    with pytest.raises(FileNotFoundError, match="no such folder"):
        load_function("nowhere/your.py:score")
    with pytest.raises(AttributeError, match=r"mine\.py has no 'scores'; it has \['other', 'score'\]"):
        load_function("mine.py:scores")
    with pytest.raises(TypeError, match=r"mine\.py:LIMIT is not a function but int 3"):
        load_function("mine.py:LIMIT")
    with pytest.raises(ModuleNotFoundError, match=r"no module 'rlkit\.nowhere' "):
        load_function("rlkit.nowhere.deeper:score")


def test_a_missing_package_is_named_in_one_line(folder, monkeypatch):
    write(folder / "missing.py", "import json\nfrom rlkit_test_slime.utils.types import Sample")
    monkeypatch.syspath_prepend(folder)
    said = (
        r"missing(\.py)?, line 2: no module 'rlkit_test_slime': remove the import \(no class of another .* install it"
    )
    for spec in ("missing.py:score", "missing:score"):
        with pytest.raises(ImportError, match=said) as caught:
            load_function(spec)
        assert "\n" not in str(caught.value)


SCORERS = """
def wer(reference=None, hypothesis=None): return float(reference != hypothesis)
def grade(benchmark, sample, response): return 1.0
class Scorer:
    def __init__(self, kinds): ...
    def many(self, targets, prediction): ...
    def score(self, target, prediction): ...
"""


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("wer", "wer(reference=..., hypothesis=...)"),
        ("grade", "grade(benchmark=..., sample=..., response=...)"),
        ("Scorer", "Scorer(kinds=...).score(...)"),
    ],
)
def test_a_scorer_of_an_installed_package_gets_the_wrapper_to_write(folder, monkeypatch, name, call):
    write(folder / "site-packages" / "rlkit_test_scorers.py", SCORERS)
    monkeypatch.syspath_prepend(folder / "site-packages")
    monkeypatch.delitem(sys.modules, "rlkit_test_scorers", raising=False)
    function = load_function(f"rlkit_test_scorers:{name}")
    with pytest.raises(TypeError, match=r"give --reward FILE\.py:score") as caught:
        check_signature(adapted(function))
    text = str(caught.value)
    assert "RL2" not in text
    written = text.split("`")[1::2]
    assert written == [f"from rlkit_test_scorers import {name}", f"def score(completion, row): return {call}"]
    exec("\n".join(written), space := {})
    check_signature(space["score"])
    write(folder / "own.py", f"from rlkit_test_scorers import Scorer\nscore = Scorer(0).score\n{SCORERS}")
    for own in ("score", "wer"):  # a bound method has no name to import, and the user's own file can be edited
        with pytest.raises(TypeError, match=r"write \(completion, row\)|would get a completion"):
            check_signature(load_function(f"own.py:{own}"))


def test_a_missing_package_of_an_installed_one_is_to_be_installed(folder, monkeypatch):
    write(folder / "site-packages" / "rlkit_test_outer.py", "import rlkit_test_inner")
    write(folder / "site-packages" / "rlkit_test_inner.py", "import rlkit_test_missing")
    monkeypatch.syspath_prepend(folder / "site-packages")
    with pytest.raises(ImportError, match=r"no module 'rlkit_test_missing': install it where") as caught:
        load_function("rlkit_test_outer:score")
    assert "remove" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import json\ndef f():\n    return 1 / 0\nf()", r'broken\.py", line 3, in f\n.*\n(.*\n)?ZeroDivisionError'),
        ("def f(:\n", r'broken\.py", line 1\n(.*\n)+SyntaxError'),
    ],
)
def test_code_that_fails_while_imported_shows_its_own_traceback(folder, source, message, monkeypatch):
    write(folder / "broken.py", source)
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(ImportError, match=message) as caught:
        load_function("broken.py:score")
    assert "failed while it was imported" in str(caught.value)
    assert "importlib" not in str(caught.value)
    assert not [name for name in sys.modules if name.startswith("_rlkit_broken")]
    with pytest.raises(ImportError, match=message):
        load_function("broken:score")


def test_arguments_follow_the_name(folder):
    reward = load_function("rlkit.rewards.text:soft_overlong(max_tokens=10, cache_tokens=4)")
    assert reward("", {}, range(8)) == -0.5
    (folder / "options.py").write_text("def f(completion, row, *, tags=(), text=''):\n    return tags, text\n")
    given = load_function(f"{folder / 'options.py'}:f(tags=('a', 'b'), text='x:y(z)=1')")
    assert given("", {}) == (("a", "b"), "x:y(z)=1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("10", "arguments are keywords with literal values"),
        ("max_tokens=open('x')", "arguments are keywords with literal values"),
        ("**{}", "arguments are keywords with literal values"),
        ("max_tokens=1) or f(", "arguments are keywords with literal values"),
        (
            "max_token=1",
            "there is no argument 'max_token'; the function has _completion, _row, completion_ids, max_tokens",
        ),
    ],
)
def test_only_literal_arguments_that_the_function_has(arguments, message):
    with pytest.raises(ValueError, match=message):
        load_function(f"rlkit.rewards.text:soft_overlong({arguments})")
