"""Environments of several turns: token-exact episodes, as an async function or as a Gym-like object.

An environment is `async (prompt, sample) -> list[Trajectory]`: the pieces of one episode. There are three ways to write
one, each built on the previous:

    Turns      tokens, read or sampled, with masks, log-probs and versions
    Chat       messages; the model's own chat template writes the tokens between two turns
    gym_env    an object with `reset` and `step` per episode

    async def guess(prompt, sample):
        chat = Chat(prompt, sample, tokenizer=tokenizer)
        async for turn in chat:
            if turn.text == prompt.row["answer"]:
                return chat.end(reward=1.0)
            chat.add("Try again.")
        return chat.end(reward=0.0)

Sampled tokens are never tokenised again. `rlkit.rollout.limits.limited` bounds the turns, the context and the sampled
tokens of any environment; `SamplingParams.max_new_tokens` bounds a turn. A turn that a limit cuts is the last one, and
its episode is `truncated`. Observations show images to a model that reads them.

If a template rewrites history, the episode becomes several trajectories (see `rlkit.segments`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from rlkit._util.numbers import as_number, is_number, show
from rlkit.data.episode_images import parts_of
from rlkit.data.messages import is_seed_row
from rlkit.rollout.calling import accepted, call, is_async, report_once
from rlkit.rollout.envs.chat import Chat, Turn, next_turn
from rlkit.rollout.envs.turns import Turns
from rlkit.rollout.groups import Env, Prompt, Sampler
from rlkit.types import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_END_S = 10.0  # seconds in which the call of a cancelled episode must end


class Step(NamedTuple):
    """The result of `step`: next observation, reward of the turn, and whether the episode ends.

    An observation is a string (a user message), a list of messages, or token ids; or a picture of Pillow, or a list of
    parts with texts and images (a user message).
    """

    observation: Any
    reward: float = 0.0
    done: bool = False
    truncated: bool = False


def gym_env(
    make: Callable[[Prompt], Any],
    *,
    tokenizer: PreTrainedTokenizerBase,
    system_prompt: str | None = None,
    template_args: Mapping[str, Any] | None = None,
    token_rewards: bool = False,
) -> Env:
    """An environment from Gym-like objects; one is made per episode.

    `reset()` returns the opening: a string, messages or token ids, or None for the prompt itself. `step(turn) -> Step`
    answers a `Turn` of the policy. Both may be async; `close()`, if there is one, is called at the end.

    An object in Gymnasium's form, whose `reset` returns (observation, info), gets the text of a turn, and its `step`
    returns (observation, reward, terminated, truncated, info). A `reset` with arguments `seed` and `options`, in either
    form, gets `seed_of` the prompt and the row. Errors: TypeError for other results, with the class; ValueError for an
    object that still plays another episode. An empty observation is named once.

    `make(prompt)` is called for every sample of a group, so state that the samples share (a secret, a seed) must come
    from the prompt: `make=lambda prompt: Guessing(random.Random(prompt.index))`. Sync methods run in a thread, so that
    a slow one does not block other episodes; the calls of one episode never overlap: where it is cancelled inside one,
    `close` waits for that, for at most 10 s.

    The reward is the sum of the steps' rewards, which are listed in `info["turn_rewards"]`. With `token_rewards`, for
    returns and GAE, each is placed at the end of its turn, the terminal reward is 0, and the sum is the score.

    Differs from Gymnasium: info is ignored, and in rlkit's own form `step` gets the turn with its tokens.
    """
    playing: dict[int, Any] = {}

    async def env(prompt: Prompt, sample: Sampler) -> list[Trajectory]:
        game = make(prompt)
        if not (hasattr(game, "reset") and hasattr(game, "step")):
            raise TypeError(f"make(prompt) must return an object with reset and step, got {game!r:.200}")
        if id(game) in playing:
            raise ValueError(f"make(prompt) must make an object per episode: its {game!r:.200} plays another one still")
        playing[id(game)], alone = game, partial(_alone, threading.Lock())
        try:
            arguments = {"seed": seed_of(prompt), "options": dict(prompt.row)}
            opening = await call(alone(partial(game.reset, **accepted(game.reset, arguments))))
            gymnasium = isinstance(opening, tuple) and len(opening) == 2 and isinstance(opening[1], Mapping)
            opening = opening[0] if gymnasium else opening
            if _is_tokens(opening):
                talk: Chat | _TokenTalk = _TokenTalk(opening, sample, tokenizer)
            else:
                messages = _opening(opening, prompt, f"{type(game).__name__}.reset")
                talk = Chat(
                    prompt, sample, tokenizer=tokenizer, messages=messages, system_prompt=system_prompt,
                    template_args=template_args,
                )  # fmt: skip
            return await _play(game, alone(game.step), talk, token_rewards, gymnasium=gymnasium)
        finally:
            del playing[id(game)]
            if hasattr(game, "close"):
                await call(alone(game.close))

    return env


def seed_of(prompt: Prompt) -> int:
    """The seed of an episode: the row's column `seed`, or the prompt's index."""
    seed = prompt.row.get("seed", prompt.index)
    return seed if isinstance(seed, int) else prompt.index


def _alone(lock: threading.Lock, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that waits for the thread of the one before, which a cancelled episode leaves running."""
    if is_async(method):
        return method

    def after_it(*args: Any) -> Any:
        waited = lock.acquire(timeout=_END_S)
        try:
            return method(*args)
        finally:
            if waited:
                lock.release()

    return after_it


async def _play(
    game: Any, step: Callable[..., Any], talk: Chat | _TokenTalk, token_rewards: bool, *, gymnasium: bool = False
) -> list[Trajectory]:
    rewards: list[float] = []
    cut = None
    while (turn := await talk.turn()) is not None:
        answer = _step(game, await call(step, turn.text if gymnasium else turn), gymnasium)
        rewards.append(as_number(answer.reward))
        if answer.done or answer.truncated:
            cut = answer.truncated or None
            break
        talk.add(*_messages(answer.observation, f"{type(game).__name__}.step"))
    not_numbers = [reward for reward in rewards if not is_number(reward)]
    total, info = not_numbers[0] if not_numbers else sum(rewards), {"turn_rewards": rewards}
    if token_rewards:
        return talk.end(turn_rewards=rewards, score=total, truncated=cut, info=info)
    return talk.end(reward=total, truncated=cut, info=info)


def _step(game: Any, returned: Any, gymnasium: bool) -> Step:
    """What `step` returned, as a `Step`; TypeError for anything else."""
    num = len(returned) if isinstance(returned, tuple) else 0
    name = f"{type(game).__name__}.step"
    if gymnasium and num == 5:
        observation, reward, terminated, truncated, _ = returned
        _check_ends(name, terminated=terminated, truncated=truncated)
        return Step(observation, reward, bool(terminated), bool(truncated and not terminated))
    form = "(observation, reward, terminated, truncated, info), as reset returns (observation, info)"
    if not gymnasium:
        form = f"Step({', '.join(Step._fields)})"
        if 0 < num <= len(Step._fields) and not isinstance(returned[-1], Mapping):
            answer = Step(*returned)
            if isinstance(answer.reward, bool) and not isinstance(answer.done, bool):
                values = f"reward {answer.reward} and done {answer.done}"
                raise TypeError(f"{name} returned {values}: the order is {form}")
            _check_ends(name, done=answer.done, truncated=answer.truncated)
            return answer
    raise TypeError(f"{name} must return {form}, got {returned!r:.200}{_OLD_GYM if num == 4 else ''}")


def _check_ends(name: str, **ends: Any) -> None:
    """TypeError for what says whether an episode ends, and is neither true nor false."""
    for end, value in ends.items():
        if not (isinstance(value, int) or getattr(value, "shape", None) == ()) or value not in (0, 1):
            raise TypeError(f"{name} returned {end} {value!r:.80}, and it must be True or False")


class _TokenTalk:
    """`Chat` for observations that are token ids."""

    def __init__(self, opening: Sequence[int], sample: Sampler, tokenizer: Any) -> None:
        self._turns, self._tokenizer = Turns(opening, sample), tokenizer
        self.end = self._turns.pieces

    async def turn(self) -> Turn | None:
        return None if self._turns.truncated else await next_turn(self._turns, self._tokenizer)

    def add(self, *observation: Any) -> None:
        if not _is_tokens(observation):
            raise TypeError(f"reset gave token ids, so a step's observation must be token ids, got {observation!r:.80}")
        self._turns.append(observation)


def _opening(opening: Any, prompt: Prompt, name: str) -> Any:
    """The messages of an opening; None for the prompt's own. TypeError where that is only the name of a seed."""
    if opening is not None:
        return _messages(opening, name)
    if is_seed_row(prompt.row):
        fix = "return the opening, or give --data FILE"
        raise TypeError(f"{name} returns None, for the prompt of the row, and a row of a seed alone has none: {fix}")
    return None


def _messages(observation: Any, name: str) -> Any:
    """The messages of an observation of the method `name`; token ids as they are. TypeError for anything else."""
    if isinstance(observation, str) or parts_of(observation) is not None:
        if isinstance(observation, str) and not observation.strip():
            report_once(name, "gives an empty observation, which is an empty user message", _NO_TEXT)
        return [{"role": "user", "content": observation}]
    several = isinstance(observation, list | tuple) and bool(observation)
    if several and all(isinstance(message, str | Mapping) for message in observation):
        return [{"role": "user", "content": m} if isinstance(m, str) else m for m in observation]
    if _is_tokens(observation):
        return observation
    forms = "a string, messages, token ids or None" if name.endswith("reset") else "a string, messages or token ids"
    verb = "return" if name.endswith("reset") else "return an observation that is"
    raise TypeError(f"{name} must {verb} {forms}, got {show(observation)}")


_OLD_GYM = (
    "; in Gymnasium's form reset returns (observation, info), step five values, and it gets the turn's text. Around "
    "gym's old four values write a class whose step returns observation, reward, done, False, info, and in place of a "
    "running score its increase (docs/environments.md)"
)
_NO_TEXT = "; reset may return None, to begin with the prompt of the row"


def _is_tokens(observation: Any) -> bool:
    if isinstance(observation, str) or not isinstance(observation, Sequence):
        return False
    return bool(observation) and all(isinstance(x, int) for x in observation)
