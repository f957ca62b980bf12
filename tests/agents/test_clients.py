"""Clients from the package index, unchanged: what they say and read is token-exact in the episode."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from cpu_environment import cache_folder
from scripted import Script, check_tree, prompt_of, tokenizer_with

from rlkit.rollout.agents.command import command
from rlkit.rollout.envs.endpoint import agent_env

ROOT, PROGRAMS = Path(__file__).parents[2], Path(__file__).parent / "programs"
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 5, "b": 3}}\n</tool_call>'


def python_with(*packages):
    """A Python that has the packages: this one, or that of `make agents`."""
    if all(map(find_spec, packages)):
        return sys.executable
    made = cache_folder(ROOT / "tools" / "agents", "agents") / "bin" / "python"
    if not made.exists():
        pytest.skip(f"without {' and '.join(packages)}: `make agents` installs them")
    return str(made)


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Working folders of commands go to the test's."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


async def episode(line, *turns, tmp_path, **options):
    """The pieces of one episode of a command, checked against what was sampled."""
    tokenizer = tokenizer_with("qwen3")
    script = Script(tokenizer, *turns)
    env = agent_env(command(line, logs=tmp_path, timeout_s=100, **options), tokenizer=tokenizer)
    pieces = await env(prompt_of(tokenizer, "What is 5 + 3?"), script)
    check_tree(pieces, script.calls)
    assert script.turns == []
    return pieces, script


async def test_openai_chat_completions(tmp_path):
    said = "I add.\n" + ADD
    pieces, script = await episode(
        f"{python_with('openai')} {PROGRAMS / 'openai_chat.py'}", *[said, "8"] * 2, said, "no", "8", tmp_path=tmp_path
    )
    assert pieces[-1].reward == 1.0
    assert [sum(p.mask) for p in pieces] == [sum(len(script.calls[i][1].ids) for i in turns) for turns in _SHARES]


_SHARES = ((0, 1), (2, 3), (4, 5), (6,))  # the turns of each piece: the last choice of two is a branch


@pytest.mark.parametrize(("program", "package"), [("openai_responses", "openai"), ("anthropic_messages", "anthropic")])
async def test_other_formats(program, package, tmp_path):
    """Three conversations of two turns, each continued token by token."""
    turns = ["I add.\n" + ADD, "8"] * 3
    line = f"{python_with(package)} {PROGRAMS / program}.py"
    pieces, _ = await episode(line, *turns, tmp_path=tmp_path)
    assert pieces[-1].reward == 1.0
    assert pieces[-1].info["metrics"] == {"agent/branches": 2, "agent/rerendered": 0}


def calls(*made):
    return "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {json.dumps(a)}}}\n</tool_call>' for n, a in made)


@pytest.mark.slow
async def test_smolagents(tmp_path):
    """It puts each call into the history as a text of its own, so each turn is a branch, and that is counted."""
    turns = [
        "I add.\n" + calls(("add", {"a": 5, "b": 3})), calls(("add", {"a": 5, "b": 3}), ("add", {"a": 1, "b": 3})),
        calls(("final_answer", {"answer": "8"})),
        "Thought: I add.\n<code>\nprint(add(a=5, b=3))\n</code>", "<code>\nfinal_answer(8)\n</code>",
    ]  # fmt: skip
    line = f"{python_with('smolagents')} {PROGRAMS / 'smol.py'}"
    pieces, _ = await episode(line, *turns, tmp_path=tmp_path)
    assert (pieces[-1].reward, pieces[-1].info["answers"]) == (1.0, ["8", "8"])
    assert pieces[-1].info["metrics"] == {"agent/branches": 4, "agent/rerendered": 3}


@pytest.mark.slow
async def test_mini_swe_agent(tmp_path):
    """A coding agent of the command line. It drops a turn without a call from its history: the next one branches."""
    turns = [
        "I write it.\n" + calls(("bash", {"command": "echo hello > x"})), "no call",
        "Look.\n" + calls(("bash", {"command": "cat x"}), ("bash", {"command": "ls"})),
        calls(("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})),
    ]  # fmt: skip
    python = python_with("minisweagent")
    settings = "env MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors"
    line = f"{settings} {python} -m minisweagent -m openai/policy -t {{prompt}} -y --exit-immediately -o traj.json"
    pieces, script = await episode(line, *turns, tmp_path=tmp_path, needs_reward=False)
    assert pieces[-1].info["metrics"] == {"agent/branches": 1, "agent/rerendered": 0}
    lengths = [len(out.ids) for _, out in script.calls]
    assert [sum(p.mask) for p in pieces] == [lengths[0] + lengths[1], lengths[2] + lengths[3]]
    assert (Path(pieces[-1].info["folder"]) / "x").read_text() == "hello\n"
