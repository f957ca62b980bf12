"""What kind of environment an object is, and what is refused before a model is loaded."""

import subprocess
import sys
from functools import partial

import pytest
from scripted import Script, check_exact, prompt_of, tokenizer_with

from rlkit.compat import envs
from rlkit.compat.libraries import resolved
from rlkit.compat.recognise import kind_of
from rlkit.rollout.envs.gym import Step, gym_env
from rlkit.rollout.groups import sample_group


class Game:
    """Without a constructor."""

    def reset(self):
        return "Guess."

    def step(self, turn):
        return Step("no", reward=0.5, done=turn.text == "42")


class KeywordsOnly(Game):
    def __init__(self, **kwargs):
        assert not kwargs


class Optional(Game):
    def __init__(self, limit=3):
        assert limit == 3


class Prompted(Game):
    def __init__(self, prompt=None):
        assert prompt.row["answer"] == "42"


class Gymnasium:
    """Gymnasium's form without its base."""

    made = []  # noqa: RUF012

    def reset(self, *, seed=None, options=None):
        self.given, self.actions = (seed, options["answer"]), []
        self.made.append(self)
        return "Guess.", {"hint": 1}

    def step(self, action):
        self.actions.append(action)
        return "no", 0.5, action == "42", False, {}


def make(prompt):
    assert prompt.row["answer"] == "42"
    return Gymnasium()


@pytest.mark.parametrize("foreign", [Game, KeywordsOnly, Optional, Prompted, Gymnasium, make])
async def test_objects_with_reset_and_step(foreign):
    tokenizer = tokenizer_with("chatml")
    script = Script(tokenizer, "7", "42")
    assert kind_of(foreign) == "object"
    (piece,) = await envs.adapted(foreign, tokenizer)(prompt_of(tokenizer), script)
    check_exact([piece], script.calls)
    assert [m["content"] for m in piece.info["messages"]] == ["Guess.", "7", "no", "42"]
    assert (piece.reward, piece.truncated) == (1.0, False)
    if foreign in (Gymnasium, make):
        assert Gymnasium.made[-1].given == (0, "42"), "the seed is the prompt's index, and the options are the row"
        assert Gymnasium.made[-1].actions == ["7", "42"]


@pytest.mark.parametrize(
    ("ends", "truncated"), [((True, False), False), ((False, True), True), ((True, True), False)]
)  # fmt: skip
async def test_the_end_of_an_episode_in_gymnasiums_form(ends, truncated):
    class Short(Gymnasium):
        def step(self, action):
            return "", 1.0, *ends, {}

    tokenizer = tokenizer_with("chatml")
    (piece,) = await envs.adapted(Short, tokenizer)(prompt_of(tokenizer), Script(tokenizer, "7"))
    assert (piece.reward, piece.truncated) == (1.0, truncated)


@pytest.mark.parametrize(
    ("opening", "answer", "message"),
    [
        ("go", ("no", 0.0, False, {}), r"Wrong.step must return Step\(observation, reward, done, truncated\), got"),
        ("go", ("no", 0.0, False, {}), "in Gymnasium's form reset returns"),
        ("go", ("no", 0.0, False, False, {}), r"Wrong.step must return Step\("),
        (("go", {}), ("no", 0.0, False, {}), r"\(observation, reward, terminated, truncated, info\), as reset returns"),
    ],
)
async def test_a_step_of_another_form_than_its_reset_is_an_error(opening, answer, message):
    class Wrong:
        def reset(self):
            return opening

        def step(self, _):
            return answer

    tokenizer = tokenizer_with("chatml")
    with pytest.raises(TypeError, match=message) as raised:
        await sample_group(
            prompt_of(tokenizer), [Script(tokenizer, "a")], env=gym_env(lambda _: Wrong(), tokenizer=tokenizer)
        )
    assert raised.value.__notes__ == ["in an episode of row 1"]
    with pytest.raises(TypeError, match=r"make\(prompt\) must return an object with reset and step, got None"):
        await gym_env(lambda _: None, tokenizer=tokenizer)(prompt_of(tokenizer), Script(tokenizer, "a"))


class AgentInstance:
    """After examples/python/agent_func.py of OpenRLHF at 04655bc; a reward is a tensor there."""

    async def reset(self, states: dict, **kwargs):
        self.seen = []
        return {"observation": states["observation"] + f"({states['label']}) "}

    async def step(self, states: dict, **kwargs):
        self.seen.append(states)
        done = len(self.seen) == 2
        if done:
            before, now = self.seen
            assert now["observation_text"] == before["observation_text"] + before["action_text"] + "\nno: "
            assert now["action_text"] == "42<|im_end|>"
        import torch

        return {
            "rewards": torch.tensor([0.5]), "scores": torch.tensor(float(done)), "environment_feedback": "\nno: ",
            "done": done, "sampling_params": states.get("sampling_params"), "extra_logs": {"turns": len(self.seen)},
        }  # fmt: skip


async def test_openrlhf():
    tokenizer = tokenizer_with("chatml")
    assert kind_of(AgentInstance) == "openrlhf"
    prompt = prompt_of(tokenizer)
    prompt.row["label"] = "42"
    for env in (envs.openrlhf(AgentInstance, tokenizer), envs.adapted(AgentInstance, tokenizer)):
        script = Script(tokenizer, "7", "42")
        pieces = await env(prompt, script)
        check_exact(pieces, script.calls)
        end = pieces[-1]
        whole = tokenizer.decode(end.prompt_ids + end.ids)
        assert whole == tokenizer.decode(prompt.ids) + "(42) 7<|im_end|>\nno: 42<|im_end|>", (
            "the sampled end is there once"
        )
        assert (end.reward, end.score, end.info["metrics"]) == (1.0, 1.0, {"turns": 2.0})


async def slime(args, sample, sampling_params):
    """slime's custom generate function."""


async def of_one(tokenizer):
    pass


class Interaction:
    """verl's, without reset and step."""

    turns = 0


class TwoArguments(Game):
    def __init__(self, prompt, tokenizer):
        pass


class ResetNeedsState(Game):
    def reset(self, state):
        pass


class StepNeedsTwo(Game):
    def step(self, state, action):
        pass


def no_argument():
    pass


@pytest.mark.parametrize(
    ("foreign", "message"),
    [
        (slime, r"an async function must take \(prompt, sample\), got slime\(args, sample, sampling_p.*; slime's gen"),
        (of_one, r"an async function must take \(prompt, sample\), got of_one\(tokenizer\); an environment is"),
        (no_argument, r"no_argument\(\) must return an object with reset and step, .*, got None"),
        (Game(), r"Game is one Game, and each episode needs its own: write `def make\(\): return"),
        (Interaction, "the class Interaction has no reset and step; an environment is `async def env"),
        (TwoArguments, r"the class TwoArguments: it must be made with the prompt or without arguments, got \(prompt, "),
        (ResetNeedsState, r"the class ResetNeedsState: reset must take no arguments.* got \(self, state\)"),
        (StepNeedsTwo, r"the class StepNeedsTwo: step must take one argument, the turn, got \(self, state, action\)"),
    ],
)
def test_what_is_no_environment_is_refused_in_one_line(foreign, message):
    with pytest.raises(ValueError, match=f"^{message}") as raised:
        kind_of(resolved(foreign))
    assert "\n" not in str(raised.value)


async def test_a_function_without_arguments_makes_an_object_for_each_episode():
    tokenizer, made = tokenizer_with("chatml"), []

    def make_game():
        made.append(Game())
        return made[-1]

    env = envs.adapted(make_game, tokenizer)
    for _ in range(2):
        (piece,) = await env(prompt_of(tokenizer), Script(tokenizer, "42"))
        assert piece.reward == 0.5
    assert len({*map(id, made)}) == 3, "the first tells what it is"


def test_functions_of_the_tokenizer():
    class Env:
        def __init__(self, tokenizer):
            pass

        async def __call__(self, prompt, sample):
            raise NotImplementedError

    async def env(prompt, sample):
        raise NotImplementedError

    for factory in (lambda tokenizer: env, Env, partial(envs.openrlhf, AgentInstance)):
        assert kind_of(factory) == "factory"
    for env_ in (env, Env(None)):
        assert kind_of(env_) == "env"


def test_the_check_does_not_import_torch():
    code = "import sys, rlkit.compat.libraries\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
