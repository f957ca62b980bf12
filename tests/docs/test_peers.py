"""docs/peers.tsv has a row for each name of another project in the docs; docs/check_peers.py finds what is wrong."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("check_peers")


def test_every_name_of_another_project_has_a_row_and_every_row_is_used(peers: Any) -> None:
    missing, unused = peers.unmatched(peers.uses(), peers.read())
    assert missing == []
    assert unused == []


def test_the_table_is_as_the_script_writes_it(peers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, text = peers.read(), peers.TABLE.read_bytes()
    assert len(rows) > 500
    assert len({(row.name, row.project, row.version) for row in rows}) == len(rows)
    monkeypatch.setattr(peers, "TABLE", tmp_path / "peers.tsv")
    peers.write(rows[::-1])
    assert (tmp_path / "peers.tsv").read_bytes() == text


SENTENCES = {
    "verl `gspo` clips.": {("gspo", "verl")},
    "TRL's `delta`, as here.": {("delta", "TRL")},
    "(slime `--use-tis`, `--tis-clip`)": {("--use-tis", "slime"), ("--tis-clip", "slime")},
    "SkyRL and verl `abs`": {("abs", "SkyRL"), ("abs", "verl")},
    'TRL `loss_type=["sigmoid", "sft"]`': {("loss_type", "TRL"), ("sigmoid", "TRL"), ("sft", "TRL")},
    "prime `opd`; Tinker `dro`": {("opd", "prime-rl"), ("dro", "tinker-cookbook")},
    "verl `k1+` and OpenRLHF `--algo.kl.init_coef`": {("k1+", "verl"), ("--algo.kl.init_coef", "OpenRLHF")},
    "Reference: TRL experimental/cpo.": {("experimental/cpo", "TRL")},
    "from TRL (MaxRLTrainer): nothing": {("MaxRLTrainer", "TRL")},
    "verl clips more than `ppo_clip`, TRL less.": set(),
    "torch's `inference_mode`, on which TRL builds": set(),
    "`TRUE` is no name, nor is 1.5 in verl `0.5`": set(),
}


@pytest.mark.parametrize("text", SENTENCES)
def test_a_name_after_a_project_belongs_to_it(peers: Any, text: str) -> None:
    found = {
        (use.name, project) for use in peers.uses_in_sentence(text, (), (), "") if use.sure for project in use.projects
    }
    assert found == SENTENCES[text]


def test_a_page_is_read_by_its_columns_sections_and_commands(
    peers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "migrating.md"
    page.write_text(
        "# Coming from TRL\n\n| here | TRL `loss_type` | elsewhere |\n|---|---|---|\n"
        "| `ppo_clip` | `dapo`, GSPOTrainer | AReaL `c_clip`; `dual_clip` |\n\n"
        "## slime\n\nWith `--partial-rollout` use `pack`.\n\n"
        "```bash\npython3 train.py --rm-type math \\\n    --num-rollout 3   # 2 GPUs\n"
        "python examples/grpo.py --lr 1\n```\n"
    )
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    found = {(use.name, use.projects, use.sure) for use in peers.uses_in_page(page)}
    assert found == {
        ("loss_type", ("TRL",), True),
        ("dapo", ("TRL",), True),
        ("GSPOTrainer", ("TRL",), True),
        ("c_clip", ("AReaL",), True),
        ("dual_clip", ("AReaL",), False),
        ("--partial-rollout", ("slime",), False),
        ("pack", ("slime",), False),
        ("--rm-type", ("slime",), True),
        ("--num-rollout", ("slime",), True),
    }


@pytest.mark.slow
def test_a_name_missing_from_the_sources_is_found(
    peers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, code in {
        "verl": 'x = 1\n\n\n\n\n\n@register("gspo")\nupper = 0\n',
        "TRL-1.0": "class Old:\n    beta: float\n",
    }.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "core.py").write_text(code)
    rows = [
        peers.Row("up", "verl", "0.9.1", "core.py", 8),  # `upper` is another name
        peers.Row("gspo", "verl", "0.9.1", "core.py", 1),  # six lines further down
        peers.Row("--dpo.beta", "TRL", "1.0", "core.py", 2),
        peers.Row("gone", "TRL", "1.0", "no_such_file.py", 1),
        peers.Row("anything", "rlax", "unchecked", "", 0),
    ]
    monkeypatch.setattr(peers, "TABLE", tmp_path / "peers.tsv")
    monkeypatch.setattr(peers, "uses", lambda: [peers.Use(row.name, (row.project,), True, "") for row in rows])
    peers.write(rows)
    monkeypatch.setattr(sys, "argv", ["check_peers.py", "--sources", str(tmp_path)])
    assert peers.main() == 1
    assert capsys.readouterr().out.splitlines() == [
        "not there: TRL 1.0 `gone` at no_such_file.py:1",
        "not there: verl 0.9.1 `gspo` at core.py:1 but at 7",
        "not there: verl 0.9.1 `up` at core.py:8",
        "5 rows, 4 looked up, 3 wrong",
    ]
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--update"])
    assert peers.main() == 1
    assert {row.name: row.line for row in peers.read()}["gspo"] == 7
