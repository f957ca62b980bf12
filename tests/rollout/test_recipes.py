"""The code of docs/environments.md runs unchanged."""

import asyncio
import json
import re
import sys
import urllib.request
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from scripted import Script, check_exact, prompt_of, tokenizer_with

from rlkit.agents.endpoint import agent_env
from rlkit.compat import envs
from rlkit.data.prompts import rl_prompts
from rlkit.data.tiny import tiny_tokenizer
from rlkit.rollout.calling import is_async
from rlkit.rollout.envs.chat import Chat
from rlkit.rollout.envs.compaction import compacted
from rlkit.rollout.envs.gym import Step, gym_env
from rlkit.rollout.envs.tools import tool_env
from rlkit.rollout.limits import limited
from rlkit.scripts.args import Data, Episodes
from rlkit.scripts.task import read_env
from rlkit.settings import Rollouts
from rlkit.types import SamplingParams

DOC = Path(__file__).parents[2] / "docs" / "environments.md"
BLOCKS = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.S)


def run(marker, **given):
    """Execute the one block that contains `marker`; returns what it defines."""
    (block,) = [b for b in BLOCKS if marker in b]
    names = {
        "Chat": Chat, "Step": Step, "gym_env": gym_env, "limited": limited, "SamplingParams": SamplingParams,
        "rl_prompts": rl_prompts, "tool_env": tool_env, "agent_env": agent_env, "envs": envs,
        "partial": partial,
    }  # fmt: skip
    space = names | given
    exec(compile(block, str(DOC), "exec"), space)
    return SimpleNamespace(**{k: v for k, v in space.items() if not k.startswith("__")})


async def test_the_opening_example_and_limits():
    tokenizer = tokenizer_with("chatml")
    guess = run("async def guess", tokenizer=tokenizer).guess
    script = Script(tokenizer, "7", "42")
    (piece,) = await guess(prompt_of(tokenizer), script)
    check_exact([piece], script.calls)
    assert piece.reward == 1.0
    env = run("max_total_tokens=4096", guess=guess).env
    (piece,) = await env(prompt_of(tokenizer), Script(tokenizer, *["0"] * 9))
    assert (piece.info["num_turns"], piece.truncated, piece.reward) == (8, True, 0.0)
    env = run("compacted(guess", guess=guess, compacted=compacted).env
    *_, end = await env(prompt_of(tokenizer), Script(tokenizer, *["0" * 400] * 9, "42"))
    assert (end.info["num_turns"], end.info["metrics"], end.reward) == (9, {"compactions": 1}, 1.0)


async def test_two_roles():
    tokenizer = tokenizer_with("chatml")
    trade = run("async def trade", tokenizer=tokenizer, replace=replace).trade
    script = Script(tokenizer, "9", "yes")
    pieces = await trade(prompt_of(tokenizer), script)
    for i in range(2):  # each role has a context of its own
        check_exact(pieces[i : i + 1], script.calls[i : i + 1])
    assert [(t.role, t.reward) for t in pieces] == [("seller", 1.0), ("buyer", 3.0)]


async def test_the_object_and_the_tool():
    tokenizer = tokenizer_with("chatml")
    env = run("class HigherLower", tokenizer=tokenizer).higher_lower
    (piece,) = await env(prompt_of(tokenizer), Script(tokenizer, "10", "42"))
    assert [m["content"] for m in piece.info["messages"]][1:] == ["10", "higher", "42"]
    rows = [{"prompt": "1+1", "answer": "2"}]
    space = run("def calculate", tokenizer=tokenizer, rows=rows, evaluate=lambda x: float(sum(map(int, x.split("+")))))
    call_it = '<tool_call>{"name": "calculate", "arguments": {"expression": "1+1"}}</tool_call>'
    (piece,) = await space.with_tools(space.prompts[0], Script(tokenizer, call_it, "2"))
    assert piece.info["messages"][2] == {"role": "tool", "name": "calculate", "content": "2.0"}


async def test_contents_alone_for_base_models():
    tokenizer = tiny_tokenizer()
    run("for message in messages %}{{ message.content }}", tokenizer=tokenizer)
    script = Script(tokenizer, [*b" yes"], [*b" no", 258])
    chat = Chat(prompt_of(tokenizer, "Is it?"), script, tokenizer=tokenizer)
    await chat.turn()
    chat.add("\nSure?")
    await chat.turn()
    (piece,) = chat.end()
    check_exact([piece], script.calls)
    assert tokenizer.decode(piece.prompt_ids + piece.ids) == "Is it? yes\nSure? no<|im_end|>"


@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")
async def test_the_reward_of_what_an_agent_wrote(tmp_path):
    score = run("async def score(completion, row, folder)").score
    row = {"tests": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]}
    rewards = []
    for body in ("a + b", "3", "0"):
        (tmp_path / "solution.py").write_text(f"def add(a, b):\n    return {body}\n")
        rewards.append((await score("", row, str(tmp_path)))["reward"])
    assert rewards == [1.0, 0.5, 0.0]


@pytest.mark.slow
async def test_a_program_with_the_openai_package():
    class Completions:
        def __init__(self, base_url):
            self.base_url = base_url

        async def create(self, **body):
            data = json.dumps(body).encode()
            request = urllib.request.Request(f"{self.base_url}/chat/completions", data)
            reply = await asyncio.to_thread(lambda: json.loads(urllib.request.urlopen(request, timeout=100).read()))
            message = reply["choices"][0]["message"]
            said = SimpleNamespace(content=message["content"], model_dump=lambda: message)
            return SimpleNamespace(choices=[SimpleNamespace(message=said)])

    def client(base_url, **_):
        return SimpleNamespace(chat=SimpleNamespace(completions=Completions(base_url)))

    if find_spec("openai") is not None:
        import openai
    else:
        openai = SimpleNamespace(AsyncOpenAI=client)
    tokenizer = tokenizer_with("chatml")
    env = run("drafting = agent_env", openai=openai, tokenizer=tokenizer).drafting
    script = Script(tokenizer, "41", "42")
    (piece,) = await env(prompt_of(tokenizer), script)
    check_exact([piece], script.calls)
    assert piece.reward == 1.0


async def test_the_class_around_a_package_whose_score_runs(monkeypatch):
    steps, closed = iter([("no", 0, False, {}), ("yes", 2, False, {}), ("end", 3, True, {})]), []
    game = SimpleNamespace(reset=lambda: ("go", {}), step=lambda _: next(steps), close=lambda: closed.append(1))
    gym = SimpleNamespace(register_game=lambda file, **_: file, make=lambda _: game)
    monkeypatch.setitem(sys.modules, "textworld", SimpleNamespace(gym=gym))
    monkeypatch.setitem(sys.modules, "textworld.gym", gym)
    tokenizer = tokenizer_with("chatml")
    env = envs.adapted(run("class TextWorld", __name__="my_env").TextWorld, tokenizer)
    (piece,) = await env(prompt_of(tokenizer), Script(tokenizer, "a", "b", "c"))
    assert (piece.reward, piece.info["turn_rewards"], closed) == (3.0, [0.0, 2.0, 1.0], [1])


async def test_the_lines_for_the_command_line(tmp_path):
    """Each is a function of the tokenizer, and `--env` runs it."""
    tokenizer = tokenizer_with("chatml")
    asked = SimpleNamespace(make=lambda name: asked)
    vf_env = SimpleNamespace()
    given = {"step": None, "gymnasium": asked, "gem": asked, "textarena": asked, "agent": None}
    made = run("partial(envs.rl2, step)", **given, load_environment=lambda: vf_env)
    for function in (made.game, made.guess, made.tictactoe, made.wiki):
        assert is_async(function(tokenizer))
    (tmp_path / "my_env.py").write_text(
        "from functools import partial\nfrom rlkit.compat import envs\n"
        "async def step(state, action, extra_info):\n"
        "    right = float(action == extra_info['answer'])\n"
        "    return {'next_state': state + action, 'reward': right, 'score': right, 'done': True}\n"
        "env = partial(envs.rl2, step)\n"
    )
    episodes = Episodes(env=f"{tmp_path / 'my_env.py'}:env")
    env = read_env(episodes, Data("rows.jsonl"), Rollouts(), output=tmp_path)(tokenizer)
    (piece,) = await env(prompt_of(tokenizer), Script(tokenizer, "42"))
    assert (piece.reward, piece.score) == (1.0, 1.0)
