"""docs/make_conformance.py on a project of three functions, and what docs/conformance.md says of each failure."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "conformance.md"
FAILS = ("fails", "holds in fp32")
CODE = """
import a_package_that_nobody_has

@register("kl")
@a_package_that_nobody_has.compile
def kl_penalty_forward(logprob: a_package_that_nobody_has.Tensor, ref_logprob, kl_penalty):
    if kl_penalty == "k1":
        return logprob.float() - ref_logprob.float()
    return (torch.exp(ref_logprob - logprob) - 1 - ref_logprob + logprob) * SCALE
"""


@pytest.fixture
def make():
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        yield importlib.import_module("make_conformance")
    finally:
        sys.path.remove(str(ROOT / "docs"))


def rows(make):
    found = {row.name: row for row in make.kl_rows() if row.project == "verl"}
    return [found[f"verl `kl_penalty_forward` {kind}"] for kind in ("k1", "k3")]


def failed(make, row, sources):
    return {x.law: x.note for x in make.check(row, sources, max_examples=6) if x.outcome in FAILS}


@pytest.mark.slow
def test_a_function_is_checked_without_its_project_and_a_wrong_one_fails(make, tmp_path):
    file = tmp_path / "verl-0.9.1" / make.VERL
    file.parent.mkdir(parents=True)
    k1, k3 = rows(make)
    file.write_text(CODE.replace("SCALE", "1"))
    assert failed(make, k1, tmp_path).keys() == {"dtypes"}  # it casts to fp32, and is compared in fp64 for all the rest
    assert not {"expectation", "gradient_expectation"} & failed(make, k3, tmp_path).keys()
    file.write_text(CODE.replace("SCALE", "2"))
    wrong = failed(make, k3, tmp_path)
    assert {"expectation", "gradient_expectation"} <= wrong.keys()
    assert "smallest counterexample" in wrong["expectation"]
    page = make.page({k3: make.check(k3, tmp_path, max_examples=6)})
    assert "| expectation, within the drawn cases | **fails** |" in page
    assert "| dtypes | holds in fp32 |" in page
    assert "**dtypes** (" in page
    assert wrong["expectation"].splitlines()[0].strip() in page


def test_a_result_of_bf16_from_fp32_is_a_failure(make, tmp_path):
    file = tmp_path / "verl-0.9.1" / make.VERL
    file.parent.mkdir(parents=True)
    file.write_text(CODE.replace("logprob.float() - ref_logprob.float()", "(logprob - ref_logprob).bfloat16()"))
    (dtypes,) = [x for x in make.check(rows(make)[0], tmp_path, max_examples=1) if x.law == "dtypes"]
    assert dtypes.outcome == "fails"


def test_openrlhf_multiplies_by_the_mask_and_has_a_text_of_its_own(make):
    by_name = {row.name: row for row in make.estimator_rows()}
    names = ("OpenRLHF `get_advantages_and_returns`", "SkyRL `compute_gae_advantage_return`")
    theirs, other = (make.meaning(by_name[name], "padded_is_packed") for name in names)
    assert "multiplied by the mask" in theirs
    assert "multiplied by the mask" not in other


def test_a_failure_that_nobody_explained_and_a_function_of_another_version_are_errors(make, tmp_path):
    with pytest.raises(ValueError, match=r"fails permutation: add what that means to docs/conformance\.tsv"):
        make.meaning(rows(make)[0], "permutation")
    (tmp_path / "file.py").write_text("def other(): pass\n")
    with pytest.raises(ValueError, match="has no missing: it is of another version"):
        make.load(tmp_path / "file.py", "missing")


def test_the_page_has_every_function_and_a_text_for_every_failure(make):
    text = PAGE.read_text()
    heads = re.findall(r"^\| law \| (.*) \|$", text, re.MULTILINE)
    named = [name for head in heads for name in head.split(" | ")]
    expected = [row.name for row in (*make.policy_rows(), *make.kl_rows(), *make.estimator_rows())]
    assert sorted(named) == sorted(expected)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *laws = [line.strip("| \n").split(" | ") for line in table.splitlines()]
        for law, *signs in laws:
            for name, sign in zip(head[1:], signs, strict=True):
                said = re.search(rf"^\*\*{law}\*\* \(.*{re.escape(name)}[,.]", text, re.MULTILINE)
                assert (said is not None) == (sign in ("**fails**", *FAILS)), (name, law)
