"""Tasks of Harbor: a folder of them is data, and a trial by Harbor itself is an episode with its verifier's reward."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from scripted import Script, check_tree, prompt_of, tokenizer_with

from rlkit.agents.command import command
from rlkit.agents.endpoint import agent_env
from rlkit.data.load import load_rows

ROOT, PROGRAMS = Path(__file__).parents[2], Path(__file__).parent / "programs"
AGENT, HARBOR = ROOT / "examples" / "harbor_agent.py", ROOT / ".venv-harbor" / "bin" / "harbor"
HOST = "harbor_host:Host"
VERIFIER = """#!/bin/bash
python3 -c '
text = open("/app/answer.txt", encoding="utf-8").read()
print(sum(c in "aeiou" for c in text) / max(1, len(text)))
' > /logs/verifier/reward.txt
"""
needs_harbor = pytest.mark.skipif(not HARBOR.exists(), reason="`make harbor` installs it, with Python 3.12 or later")


@pytest.fixture
def tasks(tmp_path):
    """Two tasks that ask for vowels."""
    for name in ("a", "b"):
        task = tmp_path / "tasks" / name
        for folder in ("environment", "tests", "solution"):
            (task / folder).mkdir(parents=True)
        (task / "task.toml").write_text('version = "1.0"\n[agent]\ntimeout_sec = 60.0\n')
        (task / "instruction.md").write_text(f"{name}: write vowels into /app/answer.txt.\n")
        (task / "environment" / "Dockerfile").write_text("FROM debian:bookworm-slim\nWORKDIR /app\n")
        (task / "tests" / "test.sh").write_text(VERIFIER)
        (task / "solution" / "solve.sh").write_text("#!/bin/bash\nprintf aeio. > /app/answer.txt\n")
    return tmp_path / "tasks"


def by_hand(*words, **env):
    line = [sys.executable, AGENT, *words]
    return subprocess.run(line, env={**os.environ, **env}, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def test_a_folder_of_tasks_and_a_task_are_rows(tasks, caplog):
    (tasks / "steps").mkdir()
    (tasks / "steps" / "task.toml").write_text("")
    rows = load_rows(tasks)
    assert f"{tasks}: reads 2 tasks, and not those without instruction.md: steps" in caplog.text
    assert [row["prompt"] for row in rows] == [f"{x}: write vowels into /app/answer.txt.\n" for x in "ab"]
    assert [row["task"] for row in rows] == [str(tasks / x) for x in "ab"]
    assert [*load_rows(tasks / "b")] == [rows[1]]
    (tasks / "a" / "instruction.md").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"a/instruction.md: cannot be read as text: UnicodeDecodeError"):
        load_rows(tasks)


@pytest.mark.parametrize(
    ("written", "words", "told"),
    [
        ({"verifier_result": {"rewards": {"reward": 0.5, "style": 2}}}, (), '{"reward": 0.5, "style": 2}'),
        ({"verifier_result": {"rewards": {"a": 1}}}, (), '{"a": 1}'),
        ({"verifier_result": {"rewards": {"a": 1, "b": 0}}}, (), "no reward 'reward' of the trial: it has ['a', 'b']"),
        ({"verifier_result": {"rewards": {"a": 1, "b": 0}}}, ("--reward", "b"), '{"a": 1, "b": 0}'),
        ({"verifier_result": None, "exception_info": {"exception_type": "E", "exception_message": "no image"}}, (),
         "error: no reward 'reward' of the trial: E: no image"),
        ({"verifier_result": {"rewards": {"reward": 1}},
          "exception_info": {"exception_type": "AgentTimeoutError", "exception_message": ""}}, (), '{"reward": 1}'),
        (None, (), "ended with 3 and wrote 0 results of a trial"),
    ],
)  # fmt: skip
def test_the_result_of_a_trial_is_the_reward(written, words, told, tasks, tmp_path):
    """A program in Harbor's place that writes a result where Harbor does."""
    harbor, result = tmp_path / "harbor", tmp_path / "result"
    write = f"mkdir -p $7/job/trial; echo '{json.dumps(written)}' > $7/job/trial/result.json" if written else "exit 3"
    asked = f"run -a x -p {tasks}/a -o $7 --yes -q"
    harbor.write_text(f'#!/bin/bash\n[ "$*" = "{asked}" ] || exit 4\n{write}\n')
    harbor.chmod(0o755)
    ended = by_hand(*words, tasks / "a", harbor, "run", "-a", "x", RLKIT_RESULT=str(result))
    assert told in ended.stdout + ended.stderr
    assert ended.returncode == ("error" in ended.stderr)
    if not ended.returncode:
        every = json.loads(told)
        reward = every[words[1]] if words else every.get("reward", every.get("a"))
        metrics = {f"harbor/{name}": value for name, value in every.items()}
        assert json.loads(result.read_text()) == {"reward": reward, "info": {"metrics": metrics}}


def test_a_missing_command_is_named(tasks):
    assert "error: ./no-harbor: No such file or directory: give Harbor's" in by_hand(tasks, "./no-harbor").stderr
    assert "give Harbor's command after the task" in by_hand(tasks).stderr


@pytest.mark.slow
@needs_harbor
def test_harbor_solves_a_task_by_hand(tasks):
    """Its oracle runs the task's own solution, four vowels of five letters."""
    ended = by_hand(tasks / "a", HARBOR, "run", "-a", "oracle", "-e", HOST, PYTHONPATH=str(PROGRAMS))
    assert json.loads(ended.stdout.splitlines()[-1]) == {"reward": 0.8}, ended.stderr


@pytest.mark.slow
@needs_harbor
@pytest.mark.skipif(shutil.which("tmux") is None, reason="Terminus 2 types into tmux")
async def test_terminus_2_is_an_episode(tasks, tmp_path, monkeypatch):
    """Harbor's agent: it types what the policy says into a terminal of the sandbox, asks again, and trains whole."""
    monkeypatch.setenv("PYTHONPATH", str(PROGRAMS))
    typed = {"keystrokes": "printf aeix > /app/answer.txt\n", "duration": 0.5}
    turn = {"analysis": "Nothing is there.", "plan": "Write it.", "commands": [typed], "task_complete": False}
    done = {"analysis": "It is there.", "plan": "None.", "commands": [], "task_complete": True}
    tokenizer = tokenizer_with("qwen3")
    script = Script(tokenizer, *map(json.dumps, (turn, done, done)))
    line = f"{sys.executable} {AGENT} {tasks / 'a'} {HARBOR} run -a terminus-2 -m openai/policy -e {HOST}"
    env = agent_env(command(line, logs=tmp_path, timeout_s=100), tokenizer=tokenizer)
    pieces = await env(prompt_of(tokenizer, "a task"), script)
    check_tree(pieces, script.calls)
    assert script.turns == []
    assert (pieces[-1].reward, pieces[-1].info["metrics"]["harbor/reward"]) == (0.75, 0.75)
    assert sum(sum(p.mask) for p in pieces) == sum(len(out.ids) for _, out in script.calls)


@pytest.mark.slow
@needs_harbor
def test_rlkit_grpo_trains_on_a_folder_of_tasks(tasks, make_task, tmp_path):
    """The reward of each episode is the share of vowels in what the policy wrote."""
    model = make_task() / "model"
    agent = f"{sys.executable} {AGENT} {{task}} {HARBOR} run -a harbor_host:Writer -m openai/policy -e {HOST}"
    line = [sys.executable, "-m", "rlkit.scripts", "grpo", "--model", model, "--data", tasks, "--agent", agent,
            "--agent-timeout", 200, "--max-turns", 1, "--max-total-tokens", 256, "--max-new-tokens", 12, "--steps", 1,
            "--prompts-per-step", 2, "--group-size", 3, "--output", tmp_path / "run"]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{PROGRAMS}"}
    subprocess.run([*map(str, line)], env=env, check=True, timeout=250)
    episodes = [json.loads(x) for x in (tmp_path / "run/trajectories/train_000001.jsonl").read_text().splitlines()]
    assert len(episodes) == 6
    for episode in episodes:
        said = episode["info"]["messages"][-1]["content"]
        assert episode["reward"] == pytest.approx(sum(c in "aeiou" for c in said) / max(1, len(said)))
