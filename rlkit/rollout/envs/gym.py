"""Environments of several turns: token-exact episodes, as an async function or as a Gym-like object.

An environment is `async (prompt, sample) -> list[Trajectory]`: the pieces of one episode. Three ways to write one, each
built on the previous:

    Turns      tokens: read or sampled, with masks, log-probs and versions
    Chat       messages: the model's own chat template writes the tokens between two turns
    gym_env    an object with `reset` and `step`, one for each episode

    async def guess(prompt, sample):
        chat = Chat(prompt, sample, tokenizer=tokenizer)
        async for turn in chat:
            if turn.text == prompt.row["answer"]:
                return chat.end(reward=1.0)
            chat.add("Try again.")
        return chat.end(reward=0.0)

Sampled tokens are never tokenised again. `rlkit.rollout.limits.limited` bounds the turns, the context and the sampled
tokens of any environment; `SamplingParams.max_new_tokens` bounds a turn. A turn that a bound cuts is the last one, and
its episode is `truncated`. Text only: a processor of a vision model is refused.

Differs: TRL, verl and SkyRL find sampled tokens by searching a rendered conversation, or render messages after a fixed
base; if a template rewrites history they train on tokens that were not sampled in that context (verl issue 3960), or
fail. Here such an episode becomes several trajectories (see `rlkit.segments`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rlkit._numbers import is_number, to_number
from rlkit.data.chat import Message
from rlkit.rollout.calling import call
from rlkit.rollout.envs.chat import Chat, Turn, next_turn, refuse_vision
from rlkit.rollout.envs.turns import Turns
from rlkit.rollout.rollout import Env, Prompt, Sample
from rlkit.rollout.text import Text
from rlkit.types import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Chat", "Step", "Text", "Turn", "Turns", "gym_env", "own_rewards", "refuse_vision"]


class Step(NamedTuple):
    """The result of `step`: next observation, reward of the turn, and whether the episode ends.

    An observation is a string (a user's message), a list of messages, or token ids.
    """

    observation: str | Sequence[Message] | Sequence[int]
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
    """An environment from Gym-like objects, one made for each episode.

    `reset()` returns the opening: a string, messages or token ids, or None for the prompt itself. `step(turn) -> Step`
    answers a `Turn` of the policy. Both may be async; `close()`, if there is one, is called at the end.

    `make(prompt)` is called for every sample of a group, so what the samples share (the secret, the seed) must come
    from the prompt: `make=lambda prompt: Guessing(random.Random(prompt.index))`. Sync methods run in a thread, so a
    slow one does not block other episodes; the calls of one episode never overlap.

    The reward is the sum of the steps' rewards, which `info["turn_rewards"]` lists; with `token_rewards` each is placed
    at the end of its turn, for returns and GAE, the terminal reward is 0, and the sum is the score.

    Differs from Gymnasium: no seed (see above), no info, and `step` gets the turn with its tokens.
    """

    async def env(prompt: Prompt, sample: Sample) -> list[Trajectory]:
        game = make(prompt)
        try:
            opening = await call(game.reset)
            if _is_tokens(opening):
                talk: Chat | _TokenTalk = _TokenTalk(opening, sample, tokenizer)
            else:
                messages = [{"role": "user", "content": opening}] if isinstance(opening, str) else opening
                talk = Chat(
                    prompt, sample, tokenizer=tokenizer, messages=messages, system_prompt=system_prompt,
                    template_args=template_args,
                )  # fmt: skip
            return await _play(game, talk, token_rewards)
        finally:
            if hasattr(game, "close"):
                await call(game.close)

    return env


async def own_rewards(prompt: Prompt, group: list[Trajectory]) -> list[Trajectory]:  # noqa: ARG001
    """A `score` for environments that set the reward themselves: it keeps the reward."""
    return group


async def _play(game: Any, talk: Chat | _TokenTalk, token_rewards: bool) -> list[Trajectory]:
    rewards: list[float] = []
    cut = None
    while (turn := await talk.turn()) is not None:
        said = await call(game.step, turn)
        if not isinstance(said, tuple) or not 0 < len(said) <= len(Step._fields):
            form = f"Step({', '.join(Step._fields)})"
            raise TypeError(f"{type(game).__name__}.step must return {form}, got {said!r:.200}")
        answer = Step(*said)
        rewards.append(to_number(answer.reward) if is_number(answer.reward) else answer.reward)
        if answer.done or answer.truncated:
            cut = answer.truncated or None
            break
        talk.add(*([answer.observation] if isinstance(answer.observation, str) else answer.observation))
    wrong = [reward for reward in rewards if not is_number(reward)]
    total, info = wrong[0] if wrong else sum(rewards), {"turn_rewards": rewards}
    if token_rewards:
        return talk.end(turn_rewards=rewards, score=total, truncated=cut, info=info)
    return talk.end(reward=total, truncated=cut, info=info)


class _TokenTalk:
    """`Chat` without messages, for observations that are tokens."""

    def __init__(self, opening: Sequence[int], sample: Sample, tokenizer: Any) -> None:
        self._turns, self._tokenizer = Turns(opening, sample), tokenizer
        self.end = self._turns.pieces

    async def turn(self) -> Turn | None:
        return None if self._turns.truncated else await next_turn(self._turns, self._tokenizer)

    def add(self, *observation: Any) -> None:
        if not _is_tokens(observation):
            raise TypeError(f"reset gave token ids, so a step's observation must be token ids, got {observation!r:.80}")
        self._turns.append(observation)


def _is_tokens(observation: Any) -> bool:
    return not isinstance(observation, str) and bool(observation) and all(isinstance(x, int) for x in observation)
