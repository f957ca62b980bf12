"""`rlkit distill --teacher self` as a user runs it: hints from columns and from a verifier, and what is refused."""

from __future__ import annotations

import json

import pytest

from rlkit.data.load import Rows
from rlkit.data.prompts import Prompt, reworded, rl_prompts
from rlkit.data.template import Template
from rlkit.data.tiny import tiny_tokenizer
from rlkit.run.folder import read_metrics
from rlkit.scripts import cli

REWARD = """
def score(completion, row):
    return {"reward": float(len(completion) % 2), "feedback": f"{len(completion)} characters"}
"""
ROWS = [{"prompt": f"{i}+1", "answer": str(i + 1)} for i in range(8)]
RUN = "distill --model model --data prompts.jsonl --steps 2 --prompts-per-step 4 --max-new-tokens 4 --device cpu"


@pytest.fixture(scope="module")
def task(make_task):
    return make_task(prompts=ROWS, reward=REWARD)


@pytest.fixture
def command(task, monkeypatch):
    monkeypatch.chdir(task)
    return lambda *more: cli.main([*RUN.split(), *more])


@pytest.mark.slow
def test_the_hint_of_a_column_moves_the_model_and_the_average_starts_as_it(command, task):
    hint = ["--teacher", "self", "--teacher-prompt", r"{prompt}\n\nHint: {answer}"]
    command(*hint, "--output", "live", "--eval-data", "prompts.jsonl", "--eval-steps", "1")
    command(*hint, "--output", "average", "--teacher-ema", "0.5")
    command("--teacher", "model", *hint[2:], "--output", "base")
    live, average, base = (
        [line for line in read_metrics(task / x) if "teacher/loss" in line] for x in ("live", "average", "base")
    )
    assert live[0]["teacher/loss"] > 0
    assert live[0]["teacher/loss"] == pytest.approx(average[0]["teacher/loss"], rel=1e-5)
    assert average[0]["teacher/loss"] == base[0]["teacher/loss"]
    assert len({x[1]["teacher/loss"] for x in (live, average, base)}) == 3
    (line, *_) = [json.loads(x) for x in next((task / "live/trajectories").glob("*train*")).read_text().splitlines()][
        :1
    ]
    read = tiny_tokenizer().decode(line["info"]["teacher_prompt"])
    number = int(line["prompt"].split("user\n")[1].split("+")[0])
    assert f"{number}+1\n\nHint: {number + 1}<|im_end|>" in read


def test_the_hint_is_what_a_verifier_said_of_the_answer(command, task):
    command("--teacher", "self", "--teacher-prompt", "{prompt} {feedback}", "--reward", "reward.py:score",
            "--group-size", "2", "--output", "verifier", "--loss", "advantage")  # fmt: skip
    assert read_metrics(task / "verifier")[0]["teacher/loss"] != 0
    for line in map(json.loads, (task / "verifier/trajectories/train_000001.jsonl").read_text().splitlines()):
        assert line["info"]["notes"]["feedback"] in tiny_tokenizer().decode(line["info"]["teacher_prompt"])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--teacher-prompt", "{prompt} {hint}"], "line 1: there is no 'hint' to write into '{prompt} {hint}'"),
        (["--teacher-prompt", "{prompt} {answer} and more to read", "--max-tokens", "30"], "holds --max-tokens 30"),
        (
            ["--teacher-prompt", "{prompt} {answer}", "--teacher-ema", "0.1", "--lora-rank", "2"],
            "--teacher-ema excludes --lora-rank: it copies whole weights; drop one",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_loads(command, more, message, capsys):
    with pytest.raises(SystemExit):
        command("--teacher", "self", "--output", "refused", *more)
    assert message in capsys.readouterr().err


def test_the_last_user_message_is_written_anew():
    tokenizer = tiny_tokenizer()
    template = Template(tokenizer, "Be brief.", True, None, None, of_run=True)
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    prompt = Prompt([1], {"messages": said, "answer": [7]}, 0)
    text = tokenizer.decode(reworded(prompt, "{prompt}{{}} {answer}", template))
    parts = ["system\nBe brief.", "user\na", "assistant\nb", "user\nc{} [7]"]
    assert text == "".join(f"<|im_start|>{x}<|im_end|>\n" for x in parts) + "<|im_start|>assistant\n"
    plain = Template(tokenizer, None, False, None, None)
    assert (
        tokenizer.decode(reworded(Prompt([1], {"prompt": "Q"}, 0), r"{said}\n{prompt}", plain, {"said": "no"}))
        == "no\nQ"
    )
    with pytest.raises(ValueError, match="row 3: there is no 'answer' to write into"):
        reworded(Prompt([1], {"prompt": "Q", "answer": None}, 2), "{answer}", plain)
    with pytest.raises(ValueError, match="row 1: no message is the user's"):
        reworded(Prompt([1], {"messages": said[1:2]}, 0), "{prompt} x", template)
    rows = Rows([{"prompt": "Q"}, {"prompt": "R", "answer": None}], source="a.jsonl", places=["line 1", "line 9"])
    (_, of_file), _ = rl_prompts(rows, tokenizer=tokenizer, max_prompt_tokens=99)
    with pytest.raises(ValueError, match=r"^a.jsonl, line 9: there is no 'answer' to write into"):
        reworded(of_file, "{answer}", template)
