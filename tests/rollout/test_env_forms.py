"""Environments as users of other libraries write them, from the command line: what runs, and the line that refuses."""

from __future__ import annotations

import json
import re

import nightly
import pytest
import screens
from pictures import no_pictures

from rlkit.scripts import grpo, ppo
from rlkit.scripts.cli import run
from rlkit.scripts.tools import eval as eval_script

SOURCE = '''
from functools import partial
from types import SimpleNamespace

from rlkit.compat import envs
from rlkit.rollout.envs.chat import Chat
from rlkit.rollout.envs.gym import Step
from rlkit.types import Trajectory


async def own(prompt, sample):
    out = await sample(prompt.ids)
    prompt.row.clear()
    return Trajectory(prompt.ids, out.ids, [True] * len(out.ids), out.logp, out.versions, reward=1.0)


async def short_names(p, s):
    return await own(p, s)


def of_tokenizer(tokenizer):
    async def env(prompt, sample):
        chat = Chat(prompt, sample, tokenizer=tokenizer)
        async for turn in chat:
            chat.add("again")
        return chat.end(reward=float(len(chat.messages)))

    return env


class Game:
    def reset(self):
        return "Guess."

    def step(self, turn):
        return Step("no", reward=0.5)


class Gymnasium:
    def reset(self, *, seed=None, options=None):
        return f"Guess {options['answer']}.", {}

    def step(self, action):
        return "no", 0.25, False, False, {}


async def step(state, action, extra_info):
    extra_info["answer"] = "changed"
    return {"next_state": f"{state}{action}?", "reward": 1.0, "score": 0.5, "done": False, "extra_info": extra_info}


async def env_step(sample):
    return {"next_state": f"{sample.state_text}{sample.action_text}?", "reward": 2.0, "done": sample.turn == 2}


class AgentInstance:
    async def reset(self, states, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        return {"rewards": 0.75, "scores": 0.5, "environment_feedback": "no: ", "done": True}


rl2 = partial(envs.rl2, step)


class CustomEnv:
    """After rl4llm's BaseMDPEnv."""

    def _run_interaction_loop(self, env_state, llm, sampling_params, **kwargs): ...


def interact(messages):
    return [{"role": "user", "content": "again"}] if len(messages) < 4 else []


def reward_fn(messages, answer):
    return float(len(messages))


def score(completion, row, num_calls=0):
    return 1.0


def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: what to look for
    """
    return word


class WordleEnv:  # TRL's environment_factory
    def reset(self, **kwargs):
        return None

    def guess(self, word: str) -> str:
        """Guess."""
        return "no"


async def generate(args, sample, sampling_params):  # slime
    return sample


async def rollout_func(prompts, trainer):  # TRL
    return {"prompt_ids": [], "completion_ids": [], "logprobs": []}


class Gsm8kInteraction:  # verl
    async def start_interaction(self, instance_id=None, **kwargs): ...
    async def generate_response(self, instance_id, messages, **kwargs): ...


class Gsm8kTool:  # verl
    async def create(self, instance_id=None, **kwargs): ...
    async def execute(self, instance_id, parameters, **kwargs): ...


async def three(prompt, sample, tokenizer):
    return []


async def others(client, model):
    return []


async def nothing(prompt, sample):
    await sample(prompt.ids)


def of_chat(tokenizer):
    async def env(prompt, sample):
        chat = Chat(prompt, sample, tokenizer=tokenizer)
        async for turn in chat:
            return chat

    return env


def unchecked(tokenizer):
    async def env(prompt, sample):
        chat = Chat(prompt, sample, tokenizer=tokenizer)
        while True:
            turn = await chat.turn()
            chat.add(turn.text)

    return env


class Broken(Game):
    def step(self, turn):
        return helper(turn)


def helper(turn):
    import urllib.request

    urllib.request.urlopen("http://127.0.0.1:9/step", timeout=2)


class OldGym(Gymnasium):
    def step(self, action):
        return "no", 0.5, True, {}


async def never_done(state, action, extra_info):
    return {"next_state": state, "reward": 1.0}


async def no_column(prompt, sample):
    return prompt.row["solution"]


def load_environment():
    import a_missing_package
'''
RUNS = {  # the mean reward: turns of at most 4 tokens are cut, so an episode has one turn
    "own": 1, "short_names": 1, "of_tokenizer": 3, "Game": 0.5, "Gymnasium": 0.25, "step": 1, "env_step": 2, "rl2": 1,
    "AgentInstance": 0.75, "interact --reward env.py:reward_fn": 3,
}  # fmt: skip
FAILS = {  # the cause, and what follows
    "nothing": ("the environment returned no trajectory; return at least", ""),
    "of_chat": ("the environment returned Chat <", "return chat.end(reward=...)"),
    "Broken": ("URLError: <urlopen error", "(env.py, line {line})\n  fix: correct it"),
    "unchecked": ("AttributeError: 'NoneType'", "fix: a turn is None where"),
    "OldGym": ("OldGym.step must return (observation, rew", "step five values"),
    "never_done": ("step must return a dict with reward, done, got a dict with", ""),
    "no_column": ("KeyError: 'solution' (env.py, line", "columns found: ['answer'"),
}  # fmt: skip
PLAIN = "--no-chat-template"
OWN = "works on messages for the chat template: drop --no-chat-template; a base model needs a tokenizer.chat_template"
REFUSED = {
    "WordleEnv": "the class WordleEnv has no reset and step; TRL's environment_factory, whose public methods are tools",
    "generate": "got generate(args, sample, sampling_params); slime's generate: here `await sample(prompt.ids)` sam",
    "rollout_func": "got rollout_func(prompts, trainer); TRL's rollout_func: an environment gets one prompt",
    "Gsm8kInteraction": "has no reset and step; verl's interaction: write its turns as a class with reset and step",
    "Gsm8kTool": "has no reset and step; a tool of verl: give the function that it calls as --tools",
    "three": "an async function must take (prompt, sample), got three(prompt, sample, tokenizer); an environment is",
    "others": "an async function must take (prompt, sample), got others(client, model); an environment is",
    "interact": "interact(messages) gives no reward: add its reward_fn(messages, answer) as --reward",
    "CustomEnv": "a class of rl4llm gives no reward: add its reward functions as --reward",
    f"interact --reward env.py:reward_fn {PLAIN}": f"--env env.py:interact {OWN}",
    f"--tools env.py:look_up --reward env.py:score {PLAIN}": f"error: --tools {OWN}",
}


@pytest.fixture(scope="module")
def folder(make_task):
    folder = make_task(rows=[{"question": f"{i}+1?", "answer": str(i + 1)} for i in range(4)])
    (folder / "env.py").write_text(SOURCE)
    return folder


def flags(given, output="run"):
    sizes = "--prompts-per-step 2 --group-size 2 --max-new-tokens 4 --max-turns 3 --max-total-tokens 400"
    env = "" if given.startswith("--tools") else "--env env.py:"
    command = (
        f"--model model --data rows.jsonl --steps 1 --save-steps 0 --device cpu {sizes} --output {output} {env}{given}"
    )
    return command.split()


@pytest.mark.slow_cases(
    "AgentInstance",
    "Game",
    "Gymnasium",
    "interact --reward env.py:reward_fn",
    "of_tokenizer",
    "own",
    "rl2",
    "short_names",
    "step",
)
@pytest.mark.parametrize("given", RUNS)
def test_an_environment_runs_unchanged(given, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    with no_pictures():
        run(grpo.main, grpo.Args, None, argv=flags(given, tmp_path / "run"))
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["reward/mean"] == RUNS[given]
    (dump,) = (tmp_path / "run" / "trajectories").glob("train_*")
    episodes = [json.loads(line) for line in dump.read_text().splitlines()]
    assert {episode["gold"] for episode in episodes} <= {"1", "2", "3", "4"}


@pytest.mark.slow_cases("Broken", "OldGym", "nothing")
@pytest.mark.parametrize("given", nightly.only(FAILS, *[*FAILS][::2]))
def test_a_failing_environment_ends_the_run_in_one_line(given, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    with no_pictures(), pytest.raises(SystemExit) as ended:
        run(grpo.main, grpo.Args, None, argv=[*flags(given, tmp_path / "run"), "--no-trial"])
    said, (first, later) = capsys.readouterr().err.partition("error: environment ")[2], FAILS[given]
    line = next(i for i, text in enumerate(SOURCE.splitlines(), 1) if "urlopen" in text)
    assert ended.value.code == 1
    assert re.match(rf"env.py:{given} failed on rows.jsonl, line \d: {re.escape(first)}", said), said
    assert later.format(line=line) in said
    assert said.endswith("--debug shows the traceback\n")
    assert "Traceback" not in said


EARLY = ["nothing", "of_chat", "Broken", "OldGym", "never_done", "no_column"]  # of `FAILS`: in its first step


@pytest.mark.parametrize("given", EARLY)
@pytest.mark.parametrize("command", nightly.only(["grpo", "ppo", "eval"], "grpo"))
def test_an_environment_that_fails_in_its_first_step_is_refused_before_sampling(
    command, given, folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(folder)
    if command != "eval":  # which has its tokenizer from where it has the model
        monkeypatch.setattr("rlkit.model.launch.load_policy", None)
    evaluated = f"--eval-data rows.jsonl --env env.py:{given} --device cpu"
    argv = ["model", *evaluated.split()] if command == "eval" else flags(given, tmp_path / "run")
    script = {"grpo": grpo, "ppo": ppo, "eval": eval_script}[command]
    with pytest.raises(SystemExit) as ended:
        run(script.main, script.Args, None, argv=argv)
    (said,) = screens.errors(capsys.readouterr().err)
    first, later = (" ".join(text.split()) for text in FAILS[given])
    line = next(i for i, text in enumerate(SOURCE.splitlines(), 1) if "urlopen" in text)
    assert ended.value.code == 2
    named = f"error: --env env.py:{given}: environment env.py:{given} failed on rows.jsonl, line 1: "
    assert said.startswith(named + first), said
    assert later.format(line=line) in said
    assert "--no-trial skips this step" in said


def test_a_factory_that_fails_is_refused_with_its_line(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        run(grpo.main, grpo.Args, None, argv=flags("load_environment", tmp_path / "run"))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert ended.value.code == 2
    assert "env.py:load_environment: ModuleNotFoundError: No module named 'a_missing_package' (env.py, line" in line
    assert "install it where rlkit runs" in line


@pytest.mark.parametrize("given", REFUSED)
def test_what_is_no_environment_is_refused_before_the_model_is_loaded(given, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        run(grpo.main, grpo.Args, None, argv=["--model", "none", *flags(given)[2:]])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.startswith("error: ")
    assert REFUSED[given] in line
