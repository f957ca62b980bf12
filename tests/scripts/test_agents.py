"""`rlkit grpo --agent`: a command or a function as the environment of a run."""

import json
import re
import sys
from pathlib import Path

import pytest

from rlkit._util.text import Explained
from rlkit.data.prompts import Prompt
from rlkit.data.tiny import tiny_tokenizer
from rlkit.rewards.episodes import EpisodeError
from rlkit.scripts import cli, grpo
from rlkit.scripts.args import Data, Episodes, Model
from rlkit.scripts.task import read_env
from rlkit.settings import Rollouts, Schedule

COMMAND = """
import json, os, sys, urllib.request
assert not os.listdir("."), "the folder is new"
row = json.load(open(os.environ["RLKIT_ROW"]))
assert sys.argv[1:] == [row["prompt"], json.dumps(row["numbers"])], sys.argv
body = {"model": "m", "messages": [{"role": "user", "content": sys.argv[1]}], "temperature": 0.1}
texts = []
for _ in range(2):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode())
    said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    body["messages"] += [said, {"role": "user", "content": "and?"}]
    texts.append(said["content"])
json.dump(texts, open("answers.json", "w"))
print("done")
"""
FUNCTIONS = """
import json, urllib.request

def score(completion, row, messages, folder, num_turns):
    texts = json.load(open(folder + "/answers.json"))
    assert num_turns == 2 and [m["content"] for m in messages if m["role"] == "assistant"] == texts
    return len(set(texts[1])) / 8

def agent(prompt, base_url):
    body = {"messages": [{"role": "user", "content": prompt.row["prompt"]}]}
    if prompt.index == 0:
        raise KeyError("mine")
    request = urllib.request.Request(base_url + "/chat/completions", json.dumps(body).encode())
    text = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    return {"reward": len(set(text)) / 8}

def wrong(prompt): ...
"""


@pytest.fixture
def files(make_task, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = make_task(rows=[{"prompt": f"{i}+1", "numbers": [i, 1]} for i in range(4)], reward=FUNCTIONS)
    (folder / "agent.py").write_text(COMMAND)
    monkeypatch.chdir(folder)
    return folder


def args_of(files, *, data=(), **how):
    return grpo.Args(
        Model(str(files / "model")),
        Data(str(files / "rows.jsonl"), **dict(data)),
        Episodes(max_total_tokens=200, **how),
        rollouts=Rollouts(prompts_per_step=2, group_size=4, max_new_tokens=8),
        schedule=Schedule(files / "run", steps=2, eval_steps=0),
    )


def lines_of(files):
    lines = [json.loads(line) for line in (files / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(line["mismatch/abs_max"] for line in lines) < 1e-5
    return lines


COMMAND_LINE = f"{sys.executable} -S agent.py {{prompt}} {{numbers}}"


@pytest.mark.slow
def test_a_run_with_a_command_and_a_reward_of_its_messages_and_files(files, tmp_path, no_pictures):
    grpo.main(args_of(files, agent=COMMAND_LINE, reward=f"{files / 'reward.py'}:score"))
    lines = lines_of(files)
    assert all(line["reward/failed"] == line["reward/agent/rerendered"] == 0 for line in lines)
    assert lines[0]["reward/std"] > 0
    logs = [*(files / "run" / "agents").iterdir()]
    assert [log.read_text() for log in logs] == ["done\n"] * 16
    assert list(tmp_path.glob("rlkit-agents-*/*")) == []


@pytest.mark.slow
def test_a_run_with_a_function_that_fails_on_a_row(files, no_pictures):
    grpo.main(args_of(files, agent="reward.py:agent"))
    lines = lines_of(files)
    assert [line["reward/failed"] for line in lines] in ([0.5, 0.0], [0.0, 0.5])
    rows = [json.loads(x) for p in (files / "run/trajectories").iterdir() for x in p.read_text().splitlines()]
    assert {r["info"].get("error") for r in rows} == {None, "the agent failed: KeyError: 'mine'"}


@pytest.mark.parametrize("returned", ["'yes'", "(1.0, 'why')", "{'rewrad': 1.0}"])
async def test_a_wrong_result_of_a_function_is_one_line_with_its_name(files, returned):
    (files / "returning.py").write_text(f"def agent(prompt, base_url):\n    return {returned}\n")
    args = args_of(files, agent="returning.py:agent")
    env = read_env(args.episodes, args.data, args.rollouts, output=files / "run")(tiny_tokenizer())
    with pytest.raises(EpisodeError) as caught:
        await env(Prompt([1], {"prompt": "q"}, 2), None)
    assert isinstance(caught.value, Explained)  # which a script prints without a traceback
    (line,) = str(caught.value).splitlines()
    assert line.startswith("agent returning.py:agent failed on row 3: the program returned ")
    assert "return its reward, a number, or a dict with some of info, reward, score" in line


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"agent": "no-such-program {prompt}"}, "there is no program 'no-such-program': give a command"),
        ({"agent": "python missing.py"}, "there is no file missing.py: name it as from here, "),
        ({"agent": "python x {question}"}, "the data has no column 'question'; found: prompt, numbers"),
        ({"agent": "python 'x"}, "No closing quotation"),
        ({"agent": " "}, "the command is empty"),
        ({"agent": "reward.py:wrong"}, "it must be a function of (prompt, base_url)"),
        ({"agent": "reward.py:agent", "agent_memory": 1.0}, "a function runs in this process"),
        ({"agent": "python x", "agent_address": "192.0.2.1"}, "nothing can listen at 192.0.2.1: Cannot assign"),
        ({"agent": "python x", "agent_certificate": Path("c.pem")}, "`agent_certificate`: there is no file c.pem"),
        ({"agent": "python x", "data": {"chat_template": False}}, "`agent` works on messages for the chat template"),
    ],
)
def test_an_agent_that_cannot_start_is_refused_before_a_model_is_loaded(files, how, message):
    args, row = args_of(files, **how), {"prompt": "1+1", "numbers": [1]}
    with pytest.raises(ValueError, match=re.escape(message)):
        read_env(args.episodes, args.data, args.rollouts, [row], output=files / "run")


def test_the_folder_of_the_command_line_is_that_of_its_files(files):
    """Words that name files are made absolute: the command runs in another folder."""
    from rlkit.agents.command import _words

    assert _words("python agent.py {prompt}") == ["python", str(Path(files, "agent.py")), "{prompt}"]


@pytest.mark.slow
def test_an_evaluation_leaves_no_logs_where_it_was_called(files, capfd):
    agent = f"{sys.executable} agent.py {{prompt}} {{numbers}}"
    limits = "--max-new-tokens", "8", "--max-total-tokens", "200"
    judged = "--agent", agent, "--reward", "reward.py:score"
    cli.main(["eval", "model", "--eval-data", "rows.jsonl", *judged, *limits])
    assert "sampled" in capfd.readouterr().out
    assert not (files / "-").exists()
