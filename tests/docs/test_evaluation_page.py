"""docs/evaluation.md: its commands parse, and lm_eval (if installed) gives the greedy answers of `rlkit eval`."""

from __future__ import annotations

import json
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from subprocess import run

import pytest

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.scripts import cli, grpo, sft
from rlkit.scripts.flags import wrong_words
from rlkit.scripts.tools import eval, sweep

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "evaluation.md").read_text()
ARGS = {"grpo": grpo.Args, "sft": sft.Args, "eval": eval.Args, "sweep": sweep.Args}
REQUIRED = {"grpo": "--model m --data d --reward a:b", "sft": "--model m --data d", "eval": "", "sweep": ""}


def test_the_commands_of_the_page_are_accepted():
    text = re.sub(r" {3,}(one set|two, each.*)$", "", PAGE.replace("\\\n", " "), flags=re.MULTILINE)
    found = re.findall(r"^    rlkit (\w+) (.*)$", text, re.MULTILINE)
    assert [script for script, _ in found] == ["grpo", "grpo", "grpo", "sft", "eval", "eval", "sweep", "sweep"]
    for script, flags in found:
        words = shlex.split(f"{REQUIRED[script]} {flags.replace('...', '')}")
        assert wrong_words(words, ARGS[script]) == {}
        cli.parsed(words, ARGS[script])


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm_eval")
def test_lm_eval_gives_the_same_greedy_answers(tmp_path, monkeypatch):
    """Of a random model: the answers, not the score."""
    monkeypatch.chdir(tmp_path)
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer).save_pretrained("model")
    tokenizer.save_pretrained("model")
    rows = [{"prompt": f"{i} + {i} =", "answer": str(2 * i)} for i in range(8)]
    Path("test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("sums.yaml").write_text(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0])
    (command,) = re.findall(r"```bash\npython (.*?)```", PAGE, re.DOTALL)
    words = shlex.split(command.replace("\\\n", " ").replace("runs/grpo/model", "model"))
    run([sys.executable, *words, "--log_samples", "--output_path", "theirs"], check=True)
    (theirs,) = Path("theirs").rglob("samples_*.jsonl")
    said = {row["doc"]["prompt"]: row["resps"][0][0] for row in map(json.loads, theirs.read_text().splitlines())}
    flags = "--eval-data test.jsonl --reward rlkit.rewards.text:contains --max-new-tokens 24 --output ours"
    cli.main(["eval", "model", *flags.split()])
    ours = [json.loads(line) for line in Path("ours/answers.jsonl").read_text().splitlines()]
    greedy = [row for row in ours if row["kind"] == "eval_greedy"]
    assert len(greedy) == len(said) == 8
    special = re.compile(r"<\|\w+\|>")
    for row in greedy:
        (text,) = [text for prompt, text in said.items() if f"\n{prompt}<" in row["prompt"]]
        assert special.sub("", row["completion"]).strip() == text.strip()
