"""The example environments: their tools, their games, and the script that trains on them."""

import importlib.util
import json
import os
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import warm

from rlkit.data.prompts import rl_prompts
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.loops.grpo import grpo
from rlkit.loops.rl import Task
from rlkit.model.forward import prepare_model
from rlkit.rewards.scoring import scorer
from rlkit.rollout.engines.local import LocalEngine
from rlkit.rollout.envs.chat import Chat, Turn
from rlkit.rollout.groups import rollout, sample_group
from rlkit.rollout.limits import limited
from rlkit.settings import Optim, Rollouts, Schedule
from rlkit.types import Completion, SamplingParams

ROOT = Path(__file__).parents[2]
TOKENIZER = tiny_tokenizer()


@cache
def environments():
    spec = importlib.util.spec_from_file_location("environments", ROOT / "examples" / "environments.py")
    module = sys.modules["environments"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def says(*texts):
    """A policy with fixed turns."""
    turns = iter(texts)

    async def sample(prompt_ids, *, max_new_tokens=None):
        ids = TOKENIZER.encode(next(turns) + "<|im_end|>", add_special_tokens=False)
        return Completion(ids, [-1.0] * len(ids), [0] * len(ids), "stop")

    return sample


def follow(messages):
    """A policy that talks like a demonstration."""
    return says(*(m["content"] for m in messages if m["role"] == "assistant"))


async def play(task, row, *samplers):
    tools = task.tools or None
    (prompt,), _ = rl_prompts([row], tokenizer=TOKENIZER, max_prompt_tokens=2000, tools=tools)
    score = scorer(task.reward, tokenizer=TOKENIZER, timeout_s=60.0) if task.reward else None
    return await sample_group(prompt, samplers, env=task.env, score=score)


@pytest.mark.parametrize(
    ("expression", "value"), [("12*34", 408), ("2*(3+4)", 14), ("-3-4", -7), ("(1)", 1), ("1000*1000", 1000000)]
)
def test_calc(expression, value):
    assert environments().calc(expression) == value


@pytest.mark.parametrize(
    "expression", ["", "2**9", "__import__('os')", "1/2", "a", "1.5", "'x'", "9999999999", "f(1)", "1;2"]
)
def test_calc_refuses_everything_else(expression):
    with pytest.raises((ValueError, SyntaxError)):
        environments().calc(expression)


@pytest.mark.parametrize("name", ["calculator", "search"])
async def test_demonstrations_with_a_call_are_rewarded_and_the_others_are_not(name):
    task = getattr(environments(), name)(TOKENIZER, num_rows=64)
    demonstrations = [(row, task.demonstrate(row)) for row in task.rows]
    called = [(r, m) for r, m in demonstrations if len(m) == 4]
    gave_up = [(r, m) for r, m in demonstrations if len(m) == 2]
    assert min(len(called), len(gave_up)) > 10
    for row, messages in called[:5]:
        (t,) = await play(task, row, follow(messages))
        assert t.info["messages"][2]["content"] == messages[2]["content"]
        assert (t.reward, t.info["num_calls"]) == (1.0, 1)
        assert t.info["metrics"] == {"calls": 1.0, "bad_calls": 0.0}
    for row, messages in gave_up[:5]:
        (t,) = await play(task, row, follow(messages))
        assert t.reward == 0.0
    assert len({row["prompt"] for row in task.rows}) == 64


def test_search_finds_by_words():
    find = environments().search_tool(["The cat sleeps.", "Rivers flow to the sea.", "A cat and a river."], k=2)
    assert find("sea") == "Rivers flow to the sea."
    assert set(find("cat").split("\n")) == {"The cat sleeps.", "A cat and a river."}
    assert find("nothing of this") == "nothing found"


async def test_guessing():
    task = environments().guessing(TOKENIZER, num_rows=20)
    for row in task.rows[:8]:
        messages = task.demonstrate(row)
        (t,) = await play(task, row, follow(messages))
        turns = t.info["num_turns"]
        won = messages[-1]["content"] == row["answer"]
        assert t.reward == float(won)
        assert turns <= 3
        said = [m["content"] for m in t.info["messages"]]
        assert said == [m["content"] for m in messages][: len(said)]
    game = environments().Guessing(SimpleNamespace(row={"answer": "5"}))
    assert [game.step(Turn(x, [], "stop")).observation for x in ("4", "6", "x", "1" * 5000, "٣", "")] == [*"+-++++"]


async def test_code_runs_public_tests_and_is_judged_by_hidden_ones():
    row = {
        "prompt": "Write add(a, b).",
        "public_tests": ["assert add(1, 1) == 2", "assert add(2, 3) == 5"],
        "tests": ["assert add(10, 5) == 15"],
    }
    task = environments().code(TOKENIZER, rows=[row])
    wrong, right = "def add(a, b):\n    return 2", "def add(a, b):\n    return a + b"
    call = environments().spoken
    tries = [call("run_tests", {"code": wrong}), call("run_tests", {"code": right}), f"```python\n{right}\n```"]
    group = await play(task, row, says(*tries), says(f"```python\n{wrong}\n```"))
    answers = [m["content"] for m in group[0].info["messages"] if m["role"] == "tool"]
    assert answers[0].startswith("test 2 of 2")
    assert answers[1] == "all tests passed"
    assert [t.reward for t in group] == [1.0, 0.0]


async def test_a_random_model_plays_each_of_them():
    model = tiny_model(TOKENIZER, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate=64)
    for name in ("calculator", "search", "guessing"):
        task = getattr(environments(), name)(TOKENIZER, num_rows=4)
        prompts, _ = rl_prompts(task.rows, tokenizer=TOKENIZER, max_prompt_tokens=900, tools=task.tools or None)
        async with LocalEngine(model, max_len=1500) as engine:
            groups = await rollout(
                prompts,
                generate=engine.generate,
                params=SamplingParams(max_new_tokens=12, stop_token_ids=(258, *range(100))),
                group_size=2,
                seed=0,
                env=limited(task.env, max_turns=3, max_total_tokens=1400),
            )
        assert [len(g) for g in groups] == [2] * 4


@pytest.mark.slow
async def test_a_game_of_two_turns_is_learnt(tmp_path):
    """From random weights: the reward is the share of digits in both turns, and it rises."""
    model = prepare_model(
        tiny_model(TOKENIZER, hidden=64, layers=2, heads=2, kv_heads=1, head_dim=32, intermediate=128)
    )
    prompts, _ = rl_prompts([{"prompt": c} for c in "abcdefgh"], tokenizer=TOKENIZER, max_prompt_tokens=20)

    async def env(prompt, sample):
        chat, said = Chat(prompt, sample, tokenizer=TOKENIZER), []
        for _ in range(2):
            turn = await chat.turn()
            if turn is None:  # the first turn was cut
                break
            said += turn.ids
            chat.add("more")
        return chat.end(reward=sum(48 <= i < 58 for i in said) / len(said), truncated=False)

    await grpo(
        model,
        TOKENIZER,
        LocalEngine(model, eos_token_ids=range(0, 263, 4)),
        Task(prompts, None, env=env),
        Rollouts(max_new_tokens=6),
        Schedule(tmp_path / "run", steps=15),
        Optim(lr=3e-3),
    )
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward/mean"] for line in lines]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15


@pytest.mark.slow
async def test_the_loop_takes_episodes_in_pieces(tmp_path):
    """Under a template that forgets what was thought: every game of two turns becomes two sequences."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (ROOT / "tests" / "rollout" / "templates" / "qwen3.jinja").read_text()
    model = prepare_model(tiny_model(tokenizer, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate=64))
    prompts, _ = rl_prompts([{"prompt": c} for c in "abcd"], tokenizer=tokenizer, max_prompt_tokens=20)

    async def env(prompt, sample):
        chat = Chat(prompt, sample, tokenizer=tokenizer)
        turn = await chat.turn()
        chat.messages[-1]["content"] = "<think>\nhm\n</think>\n\n" + turn.text  # as if it had thought
        chat.add("and?")
        last = await chat.turn()
        return chat.end(reward=float(len(turn.ids) + len((last or turn).ids)))

    await grpo(
        model,
        tokenizer,
        LocalEngine(model, eos_token_ids=range(0, 263, 2)),
        Task(prompts, None, env=env),
        Rollouts(prompts_per_step=4, group_size=4, minibatches=2, max_new_tokens=40),
        Schedule(tmp_path / "run", steps=2),
        Optim(lr=1e-3, max_tokens=200),
    )
    rows = [json.loads(x) for x in (tmp_path / "run" / "trajectories" / "train_000001.jsonl").read_text().splitlines()]
    assert len(rows) == 32
    assert all(a["reward"] == b["reward"] for a, b in zip(rows[::2], rows[1::2], strict=True))
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(line["mismatch/abs_max"] for line in metrics) < 1e-4
    expected = sum(row["reward"] for row in rows) / 32
    assert metrics[0]["reward/mean"] == pytest.approx(expected)


@pytest.mark.slow
def test_the_script_from_nothing_to_a_trained_model(tmp_path):
    command = [
        sys.executable, str(ROOT / "examples" / "tool_use.py"), "--output", str(tmp_path / "run"),
        "--sft-steps", "3", "--steps", "2", "--prompts-per-step", "2", "--group-size", "2", "--eval-limit", "2",
        "--max-turns", "3", "--max-total-tokens", "160", "--max-new-tokens", "30",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    out = warm.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert out.returncode == 0, out.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "grpo" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert "reward/calls" in lines[1]
    (dump,) = (tmp_path / "run" / "grpo" / "trajectories").glob("train_000001.jsonl")
    row = json.loads(dump.read_text().splitlines()[0])
    assert row["info"]["messages"][0]["role"] == "user"
    assert (tmp_path / "run" / "grpo" / "model" / "config.json").exists()
