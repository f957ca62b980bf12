"""Games of Gymnasium, GEM, TextArena and OpenEnv through `rlkit.compat.envs`.

Each runs with a stand-in, written after the source that it names, and (marked slow) with the package where installed.
"""

import asyncio
import random
import re
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from foreign import BOTH, user_says, with_row
from scripted import Script, check_exact, prompt_of, tokenizer_with

from rlkit.compat import envs
from rlkit.compat.actions import actions_of
from rlkit.compat.libraries import published, with_opponent
from rlkit.data.prompts import rl_prompts
from rlkit.rollout.groups import sample_group
from rlkit.rollout.limits import limited


def gymnasium_module(real):
    """The base class alone: what the adapter calls is the game's own."""
    return (
        pytest.importorskip("gymnasium")
        if real
        else SimpleNamespace(Env=type("Env", (), {"__module__": "gymnasium.core"}))
    )


def secret_game(gymnasium):
    class Secret(gymnasium.Env):
        """reset(seed, options) and a step of five values; at most three guesses."""

        closed = 0

        def reset(self, *, seed=None, options=None):
            if gymnasium.__name__ == "gymnasium":
                super().reset(seed=seed, options=options)
            self.secret, self.guesses = str(seed), 0
            return f"{options['prompt']}?", {}

        def step(self, action):
            self.guesses += 1
            if action == "boom":
                raise KeyError("boom")
            if action == "array":
                return [1.0, 2.0], 0.0, False, False, {}
            return f"not {action}", float(action == self.secret), action == self.secret, self.guesses == 3, {}

        def close(self):
            type(self).closed += 1

    return Secret


@BOTH
async def test_gymnasium(real):
    gymnasium, tokenizer = gymnasium_module(real), tokenizer_with("chatml")
    gymnasium.__name__ = "gymnasium" if real else "stand-in"
    game = secret_game(gymnasium)
    prompt = with_row(tokenizer, {"prompt": "number"}, index=5)
    for env in (envs.gymnasium(lambda _: game(), tokenizer), envs.adapted(game, tokenizer)):
        script = Script(tokenizer, "3", "4", "5")
        (piece,) = await env(prompt, script)
        check_exact([piece], script.calls)
        assert user_says(piece) == ["number?", "not 3", "not 4"]
        assert (piece.reward, piece.truncated, piece.info["turn_rewards"]) == (1.0, False, [0.0, 0.0, 1.0])
        (piece,) = await env(prompt, Script(tokenizer, "3", "4", "6"))
        assert (piece.reward, piece.truncated) == (0.0, True)
    assert game.closed == 4
    for said, error, message in (
        ("boom", KeyError, "boom"),
        ("array", TypeError, r"Secret: an observation must be text, got \[1.0, 2.0\]; fix: wrap"),
    ):
        with pytest.raises(error, match=message) as raised:
            await sample_group(prompt, [Script(tokenizer, said)], env=env)
        assert raised.value.__notes__ == ["in an episode of row 6"]
    env = envs.gymnasium(lambda _: game(), tokenizer, token_rewards=True)
    (piece,) = await env(prompt, Script(tokenizer, "3", "5"))
    assert (piece.reward, piece.score, piece.token_rewards[-1]) == (0.0, 1.0, 1.0)


@pytest.mark.slow
async def test_a_game_that_gymnasium_ships_through_its_own_wrappers():
    gymnasium, tokenizer = pytest.importorskip("gymnasium"), tokenizer_with("chatml")
    text = gymnasium.spaces.Text(max_length=99)

    def make(prompt):
        lake = gymnasium.make("FrozenLake-v1", is_slippery=False, max_episode_steps=int(prompt.row["steps"]))
        lake = gymnasium.wrappers.TransformObservation(lake, lambda at: f"you are at {at}", text)
        return gymnasium.wrappers.TransformAction(lake, lambda said: ["left", "down", "right", "up"].index(said), text)

    env = envs.gymnasium(make, tokenizer)
    script = Script(tokenizer, "down", "down", "right", "right", "down", "right")
    (piece,) = await env(with_row(tokenizer, {"steps": 9}), script)
    check_exact([piece], script.calls)
    assert user_says(piece) == [f"you are at {at}" for at in (0, 4, 8, 9, 10, 14)]
    assert (piece.reward, piece.truncated) == (1.0, False)
    (piece,) = await env(with_row(tokenizer, {"steps": 2}), Script(tokenizer, "down", "down"))
    assert (piece.reward, piece.truncated) == (0.0, True)


def gem_stand_in():
    """After gem/core.py and game:GuessTheNumber of gem-llm 0.1.0: reset(seed) seeds Python's global generator."""

    class Guess:
        def reset(self, seed=None):
            random.seed(seed)
            self.secret, self.turns = random.randint(1, 50), 0
            return "Guess the number, in \\boxed{}.", {"suffix": ""}

        def step(self, action):
            self.turns += 1
            match = re.search(r"\\boxed{(\d+)}", action)
            if match is None:
                return "no guess", -0.1, True, self.turns == 20, {}
            guess = int(match[1])
            if guess == self.secret:
                return "Congratulations!", 1.0, True, False, {}
            return f"the target number is {'lower' if guess > self.secret else 'higher'}", 0, False, False, {}

    class Board:
        """As game:FifteenPuzzle: what the player must see is in info."""

        def reset(self, seed=None):
            return "The current board layout is shown below", {"prefix": "", "suffix": "Here is the board: \n__  1"}

        def step(self, action):
            return f"At turn 1, you made a move: {action}.", 0.0, False, False, {"suffix": "Here is the board: \n 1 __"}

    return SimpleNamespace(make=lambda name: Guess() if "Guess" in name else Board())


@BOTH
async def test_a_board_of_gem_is_shown_at_every_turn(real):
    """GEM's ObservationWrapper writes info's suffix after an observation; the environment alone does not."""
    gem = pytest.importorskip("gem") if real else gem_stand_in()
    tokenizer, name = tokenizer_with("chatml"), "game:FifteenPuzzle-v0-easy"
    prompt = with_row(tokenizer, {})
    forms = [envs.gem(lambda _: gem.make(name), tokenizer)]
    if real:
        forms.append(envs.adapted(lambda prompt: gem.make(name), tokenizer))  # recognised by what it returns
    for env in forms:
        env = limited(env, max_turns=2)
        (piece,) = await env(prompt, Script(tokenizer, "\\boxed{up}", "\\boxed{left}"))
        shown = user_says(piece)
        assert len(shown) == 3
        assert all("board" in text.rpartition("Here is the")[2] for text in shown), shown
        assert [text.count("Here is the") for text in shown] == [1] * len(shown)


@BOTH
async def test_gem(real):
    gem = pytest.importorskip("gem") if real else gem_stand_in()
    tokenizer = tokenizer_with("chatml")
    env = envs.gem(lambda prompt: gem.make(prompt.row["env"]), tokenizer)
    rows = [{"prompt": "-", "env": "game:GuessTheNumber-v0-hard"}] * 4
    prompts = rl_prompts(rows, tokenizer=tokenizer, max_prompt_tokens=99)[0]

    async def bisect(prompt, seen):
        """A policy that halves what is left."""
        low, high, guess = 1, 50, 0

        async def sample(prompt_ids, *, max_new_tokens=None):
            nonlocal low, high, guess
            last = tokenizer.decode(prompt_ids).rpartition("user\n")[2]
            if "is higher" in last:
                low = guess + 1
            elif "is lower" in last:
                high = guess - 1
            guess = (low + high) // 2
            return await Script(tokenizer, f"\\boxed{{{guess}}}")(prompt_ids)

        pieces = await env(prompt, sample)
        seen.append(guess)
        return pieces

    secrets = {}
    for prompt in prompts:
        seen = secrets[prompt.index] = []
        groups = await asyncio.gather(*(bisect(prompt, seen) for _ in range(4)))
        assert len(set(seen)) == 1, "one group plays one game"
        for (piece,) in groups:
            assert piece.info["turn_rewards"][-1] == 1.0
            assert not piece.truncated
    assert len({s[0] for s in secrets.values()}) > 1
    (piece,) = await env(prompts[0], Script(tokenizer, "I do not know"))
    assert piece.reward == -0.1
    if real:
        (piece,) = await envs.adapted(type(gem.make("game:GuessTheNumber-v0-hard").unwrapped), tokenizer)(
            prompts[0], Script(tokenizer, "I do not know")
        )
        assert piece.reward == -0.1


def textarena_stand_in():
    """After core.py, state.py and the wrappers of textarena 0.7.4: a game of names, 'ann' wins."""

    class Names:
        def __init__(self, raw):
            self.raw = raw

        def reset(self, num_players, seed=None):
            random.seed(seed)
            self.first = random.choice("ab")
            roles = {i: f"Player {i}" for i in range(num_players)}
            self.state = SimpleNamespace(role_mapping={**roles, -1: "GAME"}, current_player_id=0)
            self.seen = {i: [(-1, f"You are Player {i}. Say a name with {self.first}.", None)] for i in roles}

        def get_observation(self):
            player = self.state.current_player_id
            new, self.seen[player] = self.seen[player], []
            return player, new if self.raw else "all"

        def step(self, action):
            player = self.state.current_player_id
            for seen in self.seen.values():
                seen.append((player, action, None))
            self.state.current_player_id = (player + 1) % len(self.seen)
            self.rewards = {i: 1 if i == player else -1 for i in self.seen} if action == "ann" else None
            return self.rewards is not None, {}

        def close(self):
            return self.rewards, {}

    return SimpleNamespace(make=lambda name: Names(name.endswith("-raw")))


async def test_textarena():
    tokenizer, heard = tokenizer_with("chatml"), []
    ta = textarena_stand_in()

    def opponent(text, said=iter(["bob", "ann"] * 2)):
        heard.append(text)
        return next(said)

    env = envs.textarena(lambda _: ta.make("Names-v0-raw"), tokenizer, opponents=[opponent])
    for turns, reward in ((["bea", "ben"], -1.0), (["bea", "ann"], 1.0)):
        script = Script(tokenizer, *turns)
        (piece,) = await env(prompt_of(tokenizer), script)
        check_exact([piece], script.calls)
        assert piece.reward == reward
        assert user_says(piece)[1:] == ["[Player 1] bob"]
    assert heard[1] == heard[0] + "\n[Player 1] bob\n[Player 0] ben"
    with pytest.raises(TypeError, match="'NAME-raw'"):
        await envs.textarena(lambda _: ta.make("Names-v0"), tokenizer)(prompt_of(tokenizer), Script(tokenizer))


async def test_the_policy_plays_all_players_of_textarena():
    """Each player has its own conversation, role and reward, and reads the actions of the others without reasoning."""
    tokenizer = tokenizer_with("chatml")
    ta = textarena_stand_in()
    env = envs.textarena(lambda _: ta.make("Names-v0-raw"), tokenizer, seats=2)
    script = Script(tokenizer, "<think>ann?</think>bea", "bob", "<think>now</think>ann")
    first, second = await env(prompt_of(tokenizer), script)
    assert (first.role, second.role) == ("player_0", "player_1")
    assert (first.reward, second.reward) == (1.0, -1.0)
    assert user_says(first)[1:] == ["[Player 1] bob"]
    assert user_says(second)[0].endswith("[Player 0] bea")
    assert "You are Player 1" in user_says(second)[0]
    assert sum(map(sum, (first.mask, second.mask))) == sum(len(out.ids) for _, out in script.calls)
    cut = await limited(env, max_turns=2)(prompt_of(tokenizer), Script(tokenizer, "bea", "bob"))
    assert [(piece.reward, piece.truncated) for piece in cut] == [(0.0, True)] * 2


async def test_an_opponent_may_be_async_and_reads_no_reasoning():
    tokenizer, heard = tokenizer_with("chatml"), []
    ta = textarena_stand_in()

    async def opponent(text):
        heard.append(text)
        return "ann"

    env = envs.textarena(lambda _: ta.make("Names-v0-raw"), tokenizer, opponents=[opponent])
    (piece,) = await env(prompt_of(tokenizer), Script(tokenizer, "<think>secret</think>bea"))
    assert piece.reward == -1.0
    assert heard[0].endswith("[Player 0] bea")


@pytest.mark.slow
async def test_textarena_with_the_package():
    ta, tokenizer = pytest.importorskip("textarena"), tokenizer_with("chatml")
    alone = envs.textarena(lambda _: ta.make("GuessTheNumber-v0-raw"), tokenizer)

    async def secret_of(index):
        script = Script(tokenizer, *(f"[{n}]" for n in range(1, 12)))
        (piece,) = await alone(with_row(tokenizer, {}, index=index), script)
        check_exact([piece], script.calls)
        return len(script.calls), piece.reward, user_says(piece)

    games = await asyncio.gather(*(secret_of(index) for index in (0, 1, 2, 3) for _ in range(3)))
    assert all(games[i] == games[i + 1] == games[i + 2] for i in (0, 3, 6, 9))
    assert len({reward for _, reward, _ in games}) > 1
    assert games[0][2][1] == "[GAME] The target number is higher."
    assert "You are playing Guess The Number" in games[0][2][0]

    game = type(ta.make("GuessTheNumber-v0-raw"))
    script = Script(tokenizer, "[21]", "[22]")  # out of range, twice
    (piece,) = await envs.adapted(game, tokenizer)(prompt_of(tokenizer), script)
    check_exact([piece], script.calls)
    assert "invalid move" in user_says(piece)[1]

    wins = iter(["[4]", "[0]"])  # a column of tic-tac-toe
    against = envs.textarena(lambda _: ta.make("TicTacToe-v0-raw"), tokenizer, opponents=[lambda text: next(wins)])
    script = Script(tokenizer, "[2]", "[5]", "[8]")
    (piece,) = await against(prompt_of(tokenizer), script)
    check_exact([piece], script.calls)
    assert (piece.reward, piece.info["num_turns"]) == (1.0, 3)
    assert "[Player 1] [4]" in user_says(piece)[1]
    assert "[Player 0] [2]" not in user_says(piece)[1]
    with pytest.raises(TypeError, match="'NAME-raw'"):
        await envs.textarena(lambda _: ta.make("GuessTheNumber-v0"), tokenizer)(prompt_of(tokenizer), script)

    poker = with_opponent(published("textarena:KuhnPoker-v0"), "self")
    script = Script(tokenizer, *["<think>[bet]</think>[check]"] * 6)  # three rounds, each to the showdown
    pieces = await envs.adapted(poker, tokenizer)(prompt_of(tokenizer), script)
    assert [piece.role for piece in pieces] == ["player_0", "player_1"]
    assert sorted(piece.reward for piece in pieces) in ([-1.0, 1.0], [0.0, 0.0])
    assert all(f"You are Player {i}" in user_says(piece)[0] for i, piece in enumerate(pieces))
    assert all("think" not in text for piece in pieces for text in user_says(piece))


def openenv_client(sync):
    """After core/env_client.py, core/sync_client.py and core/client_types.py of openenv-core 0.3.0."""

    class Client:
        closed = 0

        async def reset(self, **kwargs):
            self.secret = str(kwargs["seed"])
            return SimpleNamespace(observation={"echo": "begin"}, reward=None, done=False)

        async def step(self, action, **kwargs):
            right = action["message"] == self.secret
            return SimpleNamespace(observation={"echo": action["message"]}, reward=float(right) or None, done=right)

        async def close(self):
            type(self).closed += 1

    class SyncClient(Client):
        def reset(self, **kwargs):
            return asyncio.run(super().reset(**kwargs))

        def step(self, action, **kwargs):
            return asyncio.run(super().step(action, **kwargs))

        def close(self):
            type(self).closed += 1

    return SyncClient if sync else Client


@pytest.mark.parametrize("sync", [False, True])
async def test_openenv(sync):
    tokenizer, client = tokenizer_with("chatml"), openenv_client(sync)
    ways = {"act": lambda text: {"message": text}, "show": lambda seen: seen["echo"]}
    env = envs.openenv(lambda _: client(), tokenizer, **ways)
    script = Script(tokenizer, "6", "7")
    (piece,) = await env(with_row(tokenizer, {}, index=7), script)
    check_exact([piece], script.calls)
    assert user_says(piece) == ["begin", "6"]
    assert (piece.reward, piece.info["turn_rewards"], client.closed) == (1.0, [0.0, 1.0], 1)


async def test_openenv_without_a_free_session():
    """Episodes wait for one, and end with what to do where none comes."""
    tokenizer, free = tokenizer_with("chatml"), [False, False, True]

    class Busy(openenv_client(sync=False)):
        async def reset(self, **kwargs):
            if not free.pop(0):
                raise RuntimeError("Server error: 1/1 sessions active (code: CAPACITY_REACHED)")
            return await super().reset(**kwargs)

    ways = {"act": lambda text: {"message": text}, "show": lambda seen: seen["echo"]}
    env = envs.openenv(lambda _: Busy(), tokenizer, **ways)
    (piece,) = await env(with_row(tokenizer, {}, index=7), Script(tokenizer, "7"))
    assert (piece.reward, Busy.closed) == (1.0, 3)
    free += [False] * 9
    env = envs.openenv(lambda _: Busy(), tokenizer, wait_s=0.05, **ways)
    with pytest.raises(TimeoutError, match=r"no free session for 0.05 s .*at_once=4"):
        await env(with_row(tokenizer, {}, index=7), Script(tokenizer, "7"))


async def test_a_wrong_action_of_openenv_is_told_to_the_policy():
    tokenizer = tokenizer_with("chatml")

    class Strict(openenv_client(sync=False)):
        async def step(self, action, **kwargs):
            if action["message"] == "8":
                raise RuntimeError("Server error: Invalid message (code: VALIDATION_ERROR)")
            return await super().step(action, **kwargs)

    act, hint = actions_of({"properties": {"message": {"type": "string"}, "n": {"type": "integer"}}})
    show = lambda seen: seen["echo"]
    env = envs.openenv(lambda _: Strict(), tokenizer, act=act, show=show, hint=hint)
    script = Script(tokenizer, "hm", '{"message": "8"}', '<think>{"a": 1}</think>So {"message": "7", "n": 2}.')
    (piece,) = await env(with_row(tokenizer, {}, index=7), script)
    opening, unreadable, invalid = user_says(piece)
    assert opening == f"begin\n\n{hint}"
    assert unreadable.startswith("Error: no JSON object is in the answer; an action is one JSON object of")
    assert "VALIDATION_ERROR" in invalid
    assert piece.info["turn_rewards"] == [0.0, 0.0, 1.0]


@pytest.fixture
def openenv_server():
    """The address of a real server of an environment whose secret is the seed."""
    core = pytest.importorskip("openenv.core")
    import uvicorn
    from openenv.core.env_server import create_fastapi_app
    from openenv.core.env_server.types import Action, Observation
    from pydantic import create_model

    class Say(Action):
        message: str

    Heard = create_model("Heard", __base__=Observation, echo=(str, ...))
    at_once = type("AtOnce", (core.Environment,), {"SUPPORTS_CONCURRENT_SESSIONS": True})

    class Secret(at_once):
        def reset(self, seed=None, **kwargs):
            self.secret = str(seed)
            return Heard(echo="begin")

        def step(self, action, **kwargs):
            right = action.message == self.secret
            return Heard(echo=action.message, reward=float(right) or None, done=right)

        @property
        def state(self):
            return core.State()

    app = create_fastapi_app(Secret, Say, Heard, max_concurrent_envs=8)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", ws="websockets-sansio"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.handle_exit(signal.SIGTERM, None)
    thread.join(20)


@pytest.mark.slow
@pytest.mark.parametrize("sync", [False, True])
async def test_openenv_with_the_package(openenv_server, sync):
    from openenv.core import GenericEnvClient

    tokenizer = tokenizer_with("chatml")

    def connect(prompt):
        client = GenericEnvClient(base_url=openenv_server)
        return client.sync() if sync else client

    ways = {"act": lambda text: {"message": text}, "show": lambda seen: seen["echo"]}
    env = envs.openenv(connect, tokenizer, **ways)
    scripts = [Script(tokenizer, "6", "7"), Script(tokenizer, "7")]
    group = await sample_group(with_row(tokenizer, {}, index=7), scripts, env=env)
    for piece, script in zip(group, scripts, strict=True):
        check_exact([piece], script.calls)
    assert [user_says(piece) for piece in group] == [["begin", "6"], ["begin"]]
    assert [piece.info["turn_rewards"] for piece in group] == [[0.0, 1.0], [1.0]]
