"""Gym-like environments on messages and on tokens, with a scripted policy and with a real engine."""

import asyncio
import random
import threading

import pytest
import torch
from scripted import Script, check_exact, prompt_of, tokenizer_with

from rlkit.agents.branches import Branches
from rlkit.data.prompts import rl_prompts
from rlkit.data.tiny import tiny_model
from rlkit.model.forward import forward, prepare_model
from rlkit.packing import pack
from rlkit.rollout import calling, rollout
from rlkit.rollout.engines.local import LocalEngine
from rlkit.rollout.envs.chat import Chat
from rlkit.rollout.envs.gym import Step, gym_env
from rlkit.rollout.envs.turns import Turns
from rlkit.rollout.groups import sample_group
from rlkit.rollout.limits import limited
from rlkit.types import SamplingParams


class HigherLower:
    """Guess a number; the prompt's answer is the secret."""

    def __init__(self, prompt):
        self.secret, self.threads, self.closed = int(prompt.row["answer"]), set(), False

    def reset(self):
        return "Guess a number."

    def step(self, turn):
        self.threads.add(threading.current_thread())
        if not turn.text.isdigit():
            return Step("Digits, please.", reward=-0.5)
        guess = int(turn.text)
        if guess == self.secret:
            return Step("", reward=1.0, done=True)
        return Step("higher" if guess < self.secret else "lower")

    def close(self):
        self.closed = True


async def test_an_object_that_still_plays_another_episode_is_refused():
    tokenizer = tokenizer_with("chatml")
    game = HigherLower(prompt_of(tokenizer))
    env, inner = gym_env(lambda prompt: game, tokenizer=tokenizer), Script(tokenizer, "42")

    async def sample(*args, **kwargs):
        with pytest.raises(ValueError, match=r"make\(prompt\) must make an object per episode: its <"):
            await env(prompt_of(tokenizer), Script(tokenizer, "42"))
        return await inner(*args, **kwargs)

    await env(prompt_of(tokenizer), sample)
    await env(prompt_of(tokenizer), Script(tokenizer, "42"))  # after the other's end


async def test_an_object_with_reset_and_step_is_an_environment():
    tokenizer, made = tokenizer_with("chatml"), []

    def make(prompt):
        made.append(HigherLower(prompt))
        return made[-1]

    script = Script(tokenizer, "x", "50", "42")
    (piece,) = await gym_env(make, tokenizer=tokenizer)(prompt_of(tokenizer), script)
    check_exact([piece], script.calls)
    assert [m["content"] for m in piece.info["messages"]] == [
        "Guess a number.", "x", "Digits, please.", "50", "lower", "42",
    ]  # fmt: skip
    assert (piece.reward, piece.truncated, piece.token_rewards) == (0.5, False, None)
    assert piece.info["turn_rewards"] == [-0.5, 0.0, 1.0]
    assert made[0].closed
    assert threading.main_thread() not in made[0].threads


async def test_token_rewards_are_at_the_ends_of_their_turns():
    tokenizer = tokenizer_with("chatml")
    env = gym_env(HigherLower, tokenizer=tokenizer, token_rewards=True)
    (piece,) = await env(prompt_of(tokenizer), Script(tokenizer, "x", "42"))
    assert (piece.reward, piece.score) == (0.0, 0.5)
    assert [r for r in piece.token_rewards if r] == [-0.5, 1.0]
    assert piece.token_rewards[1] == -0.5  # "x" and the end of turn


class Echo:
    """Async, on tokens: echo the sampled tokens doubled until there are three."""

    def __init__(self, prompt):
        self.start = prompt.ids

    async def reset(self):
        return self.start

    async def step(self, turn):
        return Step([*turn.ids, *turn.ids], reward=len(turn.ids), done=len(turn.ids) > 2)


async def test_observations_may_be_tokens():
    tokenizer = tokenizer_with("chatml")
    prompt = prompt_of(tokenizer)
    script = Script(tokenizer, [5, 6], [7, 8, 9])
    (piece,) = await gym_env(Echo, tokenizer=tokenizer)(prompt, script)
    check_exact([piece], script.calls)
    assert piece.prompt_ids == prompt.ids
    assert piece.ids == [5, 6, 5, 6, 5, 6, 7, 8, 9]
    assert piece.reward == 5.0


async def test_a_game_starts_from_the_prompt_is_truncated_and_fails():
    tokenizer, closed = tokenizer_with("chatml"), []

    class Limit:
        def reset(self):
            return None

        def step(self, turn):
            if turn.text == "boom":
                raise KeyError("boom")
            return Step([{"role": "tool", "content": "t"}], truncated=turn.text == "b")

        def close(self):
            closed.append(True)

    env = gym_env(lambda _: Limit(), tokenizer=tokenizer)
    prompt = prompt_of(tokenizer)
    script = Script(tokenizer, "a", "b")
    (piece,) = await env(prompt, script)
    check_exact([piece], script.calls)
    assert (piece.prompt_ids, piece.truncated) == (prompt.ids, True)
    with pytest.raises(KeyError, match="boom"):
        await env(prompt, Script(tokenizer, "boom"))
    assert closed == [True, True]


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_game_is_closed_after_the_step_of_a_cancelled_episode(hangs, monkeypatch):
    """Its thread goes on; only one that hangs is not waited for to its end."""
    monkeypatch.setattr("rlkit.rollout.envs.gym._END_S", 0.2 if hangs else 60.0)
    tokenizer, said, begun, release = tokenizer_with("chatml"), [], threading.Event(), threading.Event()

    class Slow(HigherLower):
        def step(self, turn):
            begun.set()
            release.wait(60)
            said.append("stepped")
            return Step("", done=True)

        def close(self):
            said.append("closed")
            release.set()

    env = gym_env(Slow, tokenizer=tokenizer)
    episode = asyncio.create_task(env(prompt_of(tokenizer), Script(tokenizer, "a")))
    await asyncio.to_thread(begun.wait, 60)
    episode.cancel()
    await asyncio.sleep(0.05)
    if not hangs:
        assert said == []
        release.set()
    with pytest.raises(asyncio.CancelledError):
        await episode
    assert said[0] == ("closed" if hangs else "stepped")
    assert "closed" in said


async def test_mixing_tokens_and_messages_is_refused():
    tokenizer = tokenizer_with("chatml")
    for opening, answer in ([[5], "text"], [[5], [{"role": "user", "content": "x"}]]):
        game = type("G", (), {"reset": lambda self, o=opening: o, "step": lambda self, t, a=answer: Step(a)})
        with pytest.raises(TypeError, match="observation must be token ids, got"):
            await gym_env(lambda _, game=game: game(), tokenizer=tokenizer)(
                prompt_of(tokenizer), Script(tokenizer, "a", "b")
            )


async def test_turns_restart_from_another_context():
    tokenizer = tokenizer_with("chatml")
    script = Script(tokenizer, [5], [6], [7])
    turns = Turns([1, 2], script)
    await turns.sample()
    turns.append([8])
    await turns.sample()
    turns.append([9])  # nobody samples after it
    turns.restart([3])
    await turns.sample()
    turns.restart([4])  # nor here
    pieces = turns.pieces(reward=1.0)
    check_exact(pieces, script.calls)
    assert [(p.prompt_ids, p.ids) for p in pieces] == [([1, 2], [5, 8, 6]), ([3], [7])]
    assert [c for c, _ in script.calls] == [[1, 2], [1, 2, 5, 8], [3]]


@pytest.mark.parametrize("said", ["seen", ("seen", 0.0, False, False, {})])
async def test_a_wrong_step_result_is_an_error_that_names_the_environment(said):
    class Gymnasium:
        def reset(self):
            return "go"

        def step(self, turn):
            return said

    tokenizer = tokenizer_with("chatml")
    env = gym_env(lambda prompt: Gymnasium(), tokenizer=tokenizer)
    message = r"Gymnasium.step must return Step\(observation, reward, done, truncated\), got .*seen"
    with pytest.raises(TypeError, match=message):
        await env(prompt_of(tokenizer), Script(tokenizer, "a"))


WRONG = [{"obs": "hello", "legal": [1, 2]}, 5, True, [], (), {"a"}, [3.5], ["a", 3], object()]


@pytest.mark.parametrize("gymnasium", [False, True])
@pytest.mark.parametrize("observation", WRONG)
async def test_a_wrong_observation_is_an_error_that_names_the_method(observation, gymnasium):
    class Dicts:
        def __init__(self, opening, later):
            self.opening, self.later = opening, later

        def reset(self):
            return (self.opening, {}) if gymnasium else self.opening

        def step(self, turn):
            return (self.later, 0.0, False, False, {}) if gymnasium else Step(self.later)

    tokenizer = tokenizer_with("chatml")
    for game, message in (
        (Dicts(observation, "x"), r"Dicts\.reset must return a string, messages, token ids or None, got "),
        (
            Dicts("go", observation),
            r"Dicts\.step must return an observation that is a string, messages or token ids, got",
        ),
        (Dicts("go", None), r"Dicts\.step must .* got NoneType None"),
    ):
        with pytest.raises(TypeError, match=message):
            await gym_env(lambda prompt, game=game: game, tokenizer=tokenizer)(
                prompt_of(tokenizer), Script(tokenizer, "a", "b")
            )


async def test_observations_of_several_texts_are_as_many_messages():
    class Texts:
        def reset(self):
            return ["a", {"role": "system", "content": "b"}][::-1]

        def step(self, turn):
            return Step(["c", "d"])

    tokenizer = tokenizer_with("chatml")
    script = Script(tokenizer, "x", "y")
    env = limited(gym_env(lambda prompt: Texts(), tokenizer=tokenizer), max_turns=2)
    (piece,) = await env(prompt_of(tokenizer), script)
    told = [(m["role"], m["content"]) for m in piece.info["messages"]]
    assert told[:5] == [("system", "b"), ("user", "a"), ("assistant", "x"), ("user", "c"), ("user", "d")]


async def test_an_empty_observation_is_named_once(caplog):
    class Silent:
        def reset(self):
            return ""

        def step(self, turn):
            return Step("", 1.0, done=True)

    tokenizer = tokenizer_with("chatml")
    for _ in range(2):
        await gym_env(lambda prompt: Silent(), tokenizer=tokenizer)(prompt_of(tokenizer), Script(tokenizer, "a"))
    (said,) = caplog.messages
    assert said.startswith(
        "Silent.reset gives an empty observation, which is an empty user message; reset may return None"
    )


@pytest.mark.parametrize("seeded", [True, False])
async def test_samples_of_a_prompt_that_begin_differently_are_named_once(seeded, caplog, monkeypatch):
    monkeypatch.setattr(calling, "_reported", set())

    class Guess:
        def reset(self, seed=None):
            return f"Is it {random.Random(seed if seeded else None).random()}?"

        def step(self, turn):
            return Step("", 1.0, done=True)

    tokenizer = tokenizer_with("chatml")
    env = limited(gym_env(lambda prompt: Guess(), tokenizer=tokenizer), max_turns=2)
    for _ in range(2):
        scripts = [Script(tokenizer, "a") for _ in range(4)]
        assert len(await sample_group(prompt_of(tokenizer), scripts, env=env)) == 4
    assert len(caplog.messages) == (not seeded)
    if not seeded:
        assert "begins the samples of one prompt with different observations (row 1): " in caplog.text


async def test_agents_may_begin_the_samples_of_a_prompt_differently(caplog):
    tokenizer, asked = tokenizer_with("chatml"), []

    async def agent(prompt, sample):
        branches = Branches(prompt, sample, tokenizer=tokenizer, parse=lambda text, tools: [])
        asked.append(f"It is {len(asked)} o'clock.")
        await branches.reply([{"role": "user", "content": asked[-1]}], tools=None)
        return branches.end(reward=1.0)

    await sample_group(prompt_of(tokenizer), [Script(tokenizer, "a") for _ in range(3)], env=agent)
    assert len({*asked}) == 3
    assert caplog.messages == []


def babble(tokenizer):
    """Turns of a random model instead of a script."""
    sizes = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 64}
    return prepare_model(tiny_model(tokenizer, **sizes, seed=1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama3"])
async def test_log_probs_of_several_turns_are_those_of_the_training_forward(name):
    tokenizer = tokenizer_with(name)
    model = babble(tokenizer)
    stops = (tokenizer.eos_token_id, 10, 200)
    rng = random.Random(0)
    rows = [{"prompt": "".join(rng.choices("abc", k=3)), "answer": "1"} for _ in range(3)]
    prompts, _ = rl_prompts(rows, tokenizer=tokenizer, max_prompt_tokens=64)

    async def env(prompt, sample):
        chat = Chat(prompt, sample, tokenizer=tokenizer)
        async for turn in chat:
            if chat.turns.num_turns == 3:
                break
            chat.messages[-1]["content"] = "<think>\nhm\n</think>\n\n" + turn.text  # as if it had thought
            chat.add({"role": "tool", "content": "seven"} if chat.turns.num_turns == 1 else "and then?")
        return chat.end(reward=float(len(chat.messages)))

    async with LocalEngine(model, eos_token_ids=stops, max_len=512) as engine:
        groups = await rollout(
            prompts,
            generate=engine.generate,
            params=SamplingParams(max_new_tokens=200),
            group_size=3,
            seed=0,
            env=limited(env, max_total_tokens=400),
        )
    batch = pack(groups)
    assert int(batch.episode_ids.max()) + 1 == 9
    if name == "qwen3":  # a user's message makes it forget
        assert batch.num_seqs > 9
    with torch.no_grad():
        out = forward(model, batch)
    worst = float((out.logp - batch.rollout_logp).abs().where(batch.mask, 0).max())
    assert int(batch.mask.sum()) > 100
    assert worst < 1e-4


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (("more", 0.5, "false"), r"Game.step returned done 'false', and it must be True or False"),
        (("more", 0.5, False, 0.3), r"Game.step returned truncated 0.3, and it must be True or False"),
        (("", True, 1), r"Game.step returned reward True and done 1: the order is Step"),
    ],
)
async def test_what_ends_an_episode_is_true_or_false(returned, message):
    class Game:
        def reset(self):
            return "go"

        def step(self, turn):
            return returned

    tokenizer = tokenizer_with("chatml")
    with pytest.raises(TypeError, match=message):
        await gym_env(lambda _: Game(), tokenizer=tokenizer)(prompt_of(tokenizer), Script(tokenizer, "a", "b"))
