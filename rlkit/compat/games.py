"""Games of Gymnasium, GEM and TextArena, each as an environment of rlkit: an adapter for each library."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rlkit.rollout.calling import call
from rlkit.rollout.envs.calls import answer_of
from rlkit.rollout.envs.chat import Chat, Turn
from rlkit.rollout.envs.gym import Step, gym_env, seed_of
from rlkit.rollout.groups import Env, Prompt, Sampler
from rlkit.types import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Make = Callable[[Prompt], Any]
_SEEDING = threading.Lock()  # GEM and TextArena seed, and draw from, Python's global generator


def gymnasium(make: Make, tokenizer: PreTrainedTokenizerBase, *, token_rewards: bool = False) -> Env:
    """Text games with Gymnasium's interface: `make(prompt)` returns a new `gymnasium.Env` for each episode.

        reset(seed, options) -> observation, info
        step(text)           -> observation, reward, terminated, truncated, info

    Observations are text, as user messages; an action is the text of a turn. Wrap an environment with others
    (`gymnasium.wrappers.TransformObservation`, `TransformAction`). The seed is `seed_of` the prompt, so the samples of
    a group play one game; `options` is the row. The reward is the sum of the steps' rewards (see `gym_env`, also for
    `token_rewards`). An episode that ends by `truncated` alone is truncated. Checked against gymnasium 1.4.0.
    """
    return gym_env(partial(_Steps, make, nullcontext(), True), tokenizer=tokenizer, token_rewards=token_rewards)


def gem(make: Make, tokenizer: PreTrainedTokenizerBase, *, token_rewards: bool = False) -> Env:
    """GEM's environments: `make(prompt)` returns a new one for each episode, e.g. `gem.make(prompt.row["env"])`.

    Its interface is Gymnasium's without `options`; see `gymnasium`. The texts `prefix` and `suffix` of info (a board)
    stand before and after an observation, as its ObservationWrapper writes them. GEM seeds Python's global
    generator: the games of a process are made and reset one after another. Checked against gem-llm 0.1.0.

    A `ToolEnvWrapper` describes its tools in the first observation and answers their calls itself. An
    `ObservationWrapper` repeats the whole game at every turn, which the conversation has already: ValueError.
    """
    return gym_env(partial(_Steps, make, _SEEDING, False), tokenizer=tokenizer, token_rewards=token_rewards)


class _Steps:
    """An environment whose `step` returns five values, as an object for `gym_env`. GEM's has no `options`."""

    def __init__(self, make: Any, lock: Any, takes_options: bool, prompt: Prompt) -> None:
        self._make, self._lock, self._prompt, self._is_gem = make, lock, prompt, not takes_options
        self._env: Any = None
        self._options = {"options": dict(prompt.row)} if takes_options else {}

    def reset(self) -> str:
        with self._lock:
            self._env = self._make(self._prompt)
            if self._is_gem:
                _refuse_history(self._env)
            return self._shown(*self._env.reset(seed=seed_of(self._prompt), **self._options))

    def step(self, turn: Turn) -> Step:
        observation, reward, terminated, truncated, info = self._env.step(turn.text)
        return Step(self._shown(observation, info), reward, bool(terminated), bool(truncated and not terminated))

    def _shown(self, observation: Any, info: Mapping[str, Any]) -> str:
        text = self._text(observation)
        before, after = (info.get("prefix", ""), info.get("suffix", "")) if self._is_gem else ("", "")
        after = "" if after in text else after  # GEM's own wrapper has written it
        return ("" if before in text else before) + text + "\n" * (bool(after) and not text.endswith("\n")) + after

    def close(self) -> None:
        getattr(self._env, "close", lambda: None)()

    def _text(self, observation: Any) -> str:
        if isinstance(observation, str):
            return observation
        what = f"{type(self._env).__name__}: an observation must be text, got {observation!r:.80}"
        raise TypeError(f"{what}; fix: wrap the environment in gymnasium.wrappers.TransformObservation")


def _refuse_history(env: Any) -> None:
    """ValueError for a game of GEM in a wrapper that writes all turns into each observation."""
    while env is not None:
        if type(env).__name__ == "ObservationWrapper" and type(env).__module__.startswith("gem."):
            fix = "drop it (the wrappers concat, concat_with_action and concat_chat): the conversation has all turns"
            raise ValueError(f"gem's ObservationWrapper repeats the whole game at every turn: {fix}")
        env = vars(env).get("env") if hasattr(env, "__dict__") else None


def textarena(
    make: Make, tokenizer: PreTrainedTokenizerBase, *, opponents: Sequence[Callable[[str], Any]] = (), seats: int = 0
) -> Env:
    """TextArena's games: `make(prompt)` returns a new one for each episode, e.g. `textarena.make("TicTacToe-v0-raw")`.

        reset(num_players, seed)                 step(action) -> done, info
        get_observation() -> player, messages    close() -> rewards, info

    A player reads the messages that are new to it, without its own. Its action is the text of its turn after the
    reasoning, which the others would read. Games must be the raw version: the library's text wrapper repeats the whole
    game every turn. The seed is `seed_of` the prompt. Without `seats` the policy is player 0, and each of `opponents`
    is one of the other players, a sync or async function from all text so far to its action (TextArena's agents are
    such). The reward is the one of player 0 at the end, or 0 if a limit of the episode ends the game.

    With `seats`, the number of players, the policy plays all of them (self-play), and all of them train: the pieces of
    player i have the role `player_i`, a conversation of their own and that player's reward. `max_turns` counts the
    turns of all players. Checked against textarena 0.7.4.
    """
    if seats:
        return partial(_self_play, make, tokenizer, seats)
    return gym_env(partial(_Arena, make, opponents), tokenizer=tokenizer)


def _begin(make: Make, prompt: Prompt, num_players: int) -> Any:
    with _SEEDING:
        game = make(prompt)
        game.reset(num_players=num_players, seed=seed_of(prompt))
    return game


def _news(game: Any, *, whole: bool = False) -> tuple[int, str]:
    """The player whose turn it is, and the messages that are new to it; with `whole` also its own."""
    player, messages = game.get_observation()
    if isinstance(messages, str):
        raise TypeError("the game gives its whole history as text: make its raw version, 'NAME-raw'")
    names = {-1: "GAME", **game.state.role_mapping}
    return player, "\n".join(f"[{names[m[0]]}] {m[1]}" for m in messages if whole or m[0] != player)


async def _self_play(
    make: Make, tokenizer: PreTrainedTokenizerBase, seats: int, prompt: Prompt, sample: Sampler
) -> list[Trajectory]:
    """One game in which the policy plays every player."""
    game, talks, done = await call(_begin, make, prompt, seats), dict[int, Chat](), False
    moved = set[int]()
    while not done:
        player, news = _news(game)
        if player in talks:
            talks[player].add(news)
        else:
            opening = [{"role": "user", "content": news}]
            talks[player] = Chat(prompt, sample, tokenizer=tokenizer, messages=opening)
        if (turn := await talks[player].turn()) is None:  # a limit
            break
        moved.add(player)
        done = (await call(game.step, answer_of(turn.text)))[0]
    rewards = game.close()[0] if done else defaultdict(float)
    return [
        replace(piece, role=f"player_{player}")
        for player in sorted(moved or talks)
        for piece in talks[player].end(reward=float(rewards[player]), truncated=None if done else True)
    ]


class _Arena:
    """A game of TextArena in which the policy is player 0, as an object for `gym_env`."""

    def __init__(self, make: Any, opponents: Sequence[Any], prompt: Prompt) -> None:
        self._make, self._opponents, self._prompt = make, opponents, prompt
        self._heard: dict[int, str] = defaultdict(str)

    async def reset(self) -> Any:
        self._game = await call(_begin, self._make, self._prompt, 1 + len(self._opponents))
        return (await self._next(done=False)).observation

    async def step(self, turn: Turn) -> Step:
        return await self._next(done=(await call(self._game.step, answer_of(turn.text)))[0])

    async def _next(self, *, done: bool) -> Step:
        """Let the opponents play until it is the policy's turn."""
        while not done:
            player, news = _news(self._game, whole=self._game.state.current_player_id != 0)
            if not player:
                return Step(news)
            self._heard[player] += f"\n{news}"
            action = await call(self._opponents[player - 1], self._heard[player])
            done = (await call(self._game.step, action))[0]
        return Step("", self._game.close()[0][0], done=True)
