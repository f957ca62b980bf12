"""Sample groups of trajectories with any engine (`Generate`) in any environment (an async function)."""

from __future__ import annotations

import asyncio
import sys
import warnings
from array import array
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar, get_args

import numpy as np

from rlkit._util.numbers import is_number, show
from rlkit._util.tensors import check_call
from rlkit.data.load import place_of_prompt
from rlkit.data.prompts import Prompt
from rlkit.rollout.calling import Watched, not_cancelled, report_absent, report_once
from rlkit.types import Completion, FinishReason, Generate, Picture, SamplingParams, Support, Trajectory

X = TypeVar("X")
_REASONS = get_args(FinishReason)
IDLE_S = 60.0  # seconds without a turn after which an environment is named


class Sampler(Protocol):
    """Sample one turn of the policy after a context."""

    async def __call__(
        self,
        prompt_ids: list[int],
        *,
        max_new_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        images: Sequence[Picture] | None = None,
    ) -> Completion:
        """`max_new_tokens` may lower the limit of `SamplingParams` for this turn, `stop` are further stop strings.

        `images` are those of the placeholders in `prompt_ids`, in their order; None: those of the rollout's prompt.
        """
        ...


Env = Callable[[Prompt, Sampler], Coroutine[Any, Any, Trajectory | list[Trajectory]]]
Score = Callable[[Prompt, list[Trajectory]], Awaitable[list[Trajectory]]]
Group = list[Trajectory]


async def single_turn(prompt: Prompt, sample: Sampler) -> Trajectory:
    """The environment of one question and one answer: the policy continues the prompt once."""
    out = await sample(prompt.ids)
    return Trajectory(
        prompt.ids, out.ids, [True] * len(out.ids), out.logp, out.versions, truncated=out.finish_reason != "stop",
        info={"finish_reason": out.finish_reason}, experts=out.experts, support=out.support,
    )  # fmt: skip


async def rollout(
    prompts: Sequence[Prompt],
    *,
    generate: Generate,
    params: SamplingParams,
    group_size: int,
    seed: int,
    env: Env = single_turn,
    score: Score | None = None,
    on_group: Callable[[Prompt, Group], None] | None = None,
    indices: Sequence[int] | None = None,
) -> list[Group]:
    """Sample `group_size` episodes per prompt, all concurrently; returns the groups in the order of the prompts.

    See `sample_group`. `on_group` is called when a group has its rewards, e.g. to log it. The noise of each sample is a
    function of `seed`, the prompt's index, the sample's index and the turn, so the same call samples the same
    trajectories. `indices` are those of the prompts; None: 0, 1, ... The first error cancels all other episodes and is
    raised.
    """

    sample = partial(seeded_group, generate=generate, params=params, group_size=group_size, env=env, score=score)

    async def one_group(index: int, prompt: Prompt) -> Group:
        group = await sample(prompt, (seed, index))
        if on_group is not None:
            on_group(prompt, group)
        return group

    check_sampling(prompts, env=env, score=score)
    engine = callable(getattr(generate, "generate", None))
    if engine and not callable(generate):
        raise TypeError(f"generate is the engine, a {type(generate).__name__}: give engine.generate")
    check_call("generate", generate, "generate(prompt_ids, params=params)")
    if not isinstance(params, SamplingParams):
        raise TypeError(f"params must be SamplingParams(max_new_tokens=..., ...), got a {type(params).__name__}")
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, got {group_size}")
    if group_size > 1 and (params.temperature == 0 or params.top_k == 1):
        greedy = "top_k 1" if params.temperature else "temperature 0"
        same = f"{greedy}: all samples of a group are the same, so nothing would train"
        warnings.warn(same, stacklevel=_level_of_user())
    numbered = zip(range(len(prompts)) if indices is None else indices, prompts, strict=True)
    return await all_or_cancel([one_group(index, prompt) for index, prompt in numbered])


def _level_of_user() -> int:
    """The `stacklevel` of the first line outside rlkit and asyncio, whose event loop calls a coroutine."""
    frame, level = sys._getframe(1), 0
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("rlkit", "asyncio"):
        frame, level = frame.f_back, level + 1
    return level + 1


def check_sampling(prompts: Sequence[Prompt], *, env: Env, score: Score | None, keep_group: Any = None) -> None:
    """Refuse, before anything is sampled, prompts that are not tokenized and functions of another form: TypeError."""
    for i, prompt in enumerate(prompts):
        if not hasattr(prompt, "ids"):
            fix = "rl_prompts(rows, tokenizer=tokenizer, max_prompt_tokens=...) makes prompts of rows"
            raise TypeError(f"prompts[{i}] must be a Prompt, got {show(prompt)}: {fix}")
        if isinstance(prompt.ids, str):
            raise TypeError(f"prompts[{i}].ids must be token ids, got {show(prompt.ids)}: give tokenizer.encode(text)")
        if hasattr(prompt.ids, "tolist"):
            fault = f"prompts[{i}].ids must be a list of token ids, got a {type(prompt.ids).__name__}"
            raise TypeError(f"{fault}: give ids.tolist()")
    check_call("env", env, "env(prompt, sample)")
    if score is not None:
        if callable(score) and _TEXTS & set(getattr(getattr(score, "__code__", None), "co_varnames", ())[:2]):
            raise TypeError(_REWARD_FUNCTION)
        check_call("score", score, "score(prompt, trajectories)")
    if keep_group is not None:
        check_call("keep_group", keep_group, "keep_group(group)")


_NOT_ONE_GAME = "begins the samples of one prompt with different observations"
_ONE_GAME = (
    "their rewards are compared as if the game were the same; draw what is random from the prompt "
    "(random.Random(prompt.index), or the argument `seed` of reset)"
)
_TEXTS = {"completion", "completions", "row", "rows"}
_REWARD_FUNCTION = "score is a reward function: give scorer(score, tokenizer=tokenizer, timeout_s=...)"


async def sample_group(
    prompt: Prompt, samplers: Sequence[Sampler], *, env: Env = single_turn, score: Score | None = None
) -> Group:
    """Run one episode of `prompt` with each sampler, concurrently, then compute the rewards.

    Each episode gets a copy of the row. An environment may return an episode in pieces (a list; see
    `Trajectory.continues`), which are consecutive in the group. `score` gets the last piece of each episode and returns
    it with its reward; None keeps the environment's own rewards. All pieces get the reward of the last one. If `score`
    masks a last piece entirely, all pieces are masked. The pieces of each role (`Trajectory.role`) count as an episode.

    Episodes that begin with different observations are named once, unless they are an agent's.

    Errors: ValueError for a reward that is not a number; NaN and infinity are left to the loops (`rlkit.loops.nans`).
    """
    openings: list[int] = []
    played = await all_or_cancel([_episode(env, prompt, sample, openings) for sample in samplers])
    episodes = [pieces for roles in played for pieces in roles]
    last = [pieces[-1] for pieces in episodes]
    agents = any("agent/branches" in (t.info.get("metrics") or ()) for t in last)  # whose requests may differ
    if not agents and len({*openings}) > 1:
        report_once("the environment", _NOT_ONE_GAME, f" ({place_of_prompt(prompt)}): {_ONE_GAME}")
    if score is not None:
        scores = score(prompt, last)
        if not isinstance(scores, Awaitable):
            raise TypeError(f"score must be an async function of (prompt, trajectories). {_REWARD_FUNCTION}")
        with not_cancelled():
            scored = await scores
        if len(scored) != len(last):
            raise ValueError(f"score returned {len(scored)} trajectories for {len(last)}: return one for each")
        last = scored
    group: Group = []
    for pieces, end in zip(episodes, last, strict=True):
        dropped = any(pieces[-1].mask) and not any(end.mask)
        for piece in pieces[:-1]:
            mask, rewards = ([False] * len(piece.mask), None) if dropped else (piece.mask, piece.token_rewards)
            group.append(replace(piece, reward=end.reward, mask=mask, token_rewards=rewards))
        group.append(end)
    for trajectory in group:
        if fault := wrong_reward(trajectory, is_valid=lambda x: isinstance(x, float) or is_number(x)):
            raise ValueError(f"{place_of_prompt(prompt)}: {fault}; an environment or a score must give a number")
    return [_in_floats(t) for t in group]


def _in_floats(t: Trajectory) -> Trajectory:
    """The trajectory with its reward and score as Python's floats, which a file can hold."""
    if isinstance(t.reward, float) and (t.score is None or isinstance(t.score, float)):
        return t
    return replace(t, reward=float(t.reward), score=None if t.score is None else float(t.score))


async def seeded_group(
    prompt: Prompt, key: tuple[int, ...], *, generate: Generate, params: SamplingParams, group_size: int, env: Env,
    score: Score | None,
) -> Group:  # fmt: skip
    """`sample_group` with samplers on `generate`, whose noise is a function of `key`, the sample and the turn.

    The trajectories have the temperature of their log-probs: 1 for greedy decoding.
    """
    samplers = [sampler(generate, params, (*key, i), images_of(prompt)) for i in range(group_size)]
    group = await sample_group(prompt, samplers, env=env, score=score)
    return [replace(t, temperature=params.temperature or 1.0) for t in group]


def compact(group: Sequence[Trajectory]) -> Group:
    """The group with its streams in arrays (see `Trajectory`): ids and versions of 32 bits, log-probs in fp32."""
    prompts = {id(t.prompt_ids): t.prompt_ids for t in group}  # most trajectories of a group have the same list
    arrays = {key: _array("i", np.int32, ids) for key, ids in prompts.items()}
    return [
        replace(
            t, prompt_ids=arrays[id(t.prompt_ids)], ids=_array("i", np.int32, t.ids), mask=_array("b", np.int8, t.mask),
            logp=_array("f", np.float32, t.logp), versions=_array("i", np.int32, t.versions),
            token_rewards=None if t.token_rewards is None else _array("d", np.float64, t.token_rewards),
        )
        for t in group
    ]  # fmt: skip


def _array(code: str, dtype: type, values: Any) -> Any:
    """A list as `array(code)`, faster than that reads one; what holds no such numbers as it is: `pack` says why."""
    if not isinstance(values, list):
        return values
    try:
        if values and values[0] == values[-1] and values.count(values[0]) == len(values):  # most masks and versions
            return array(code, values[:1]) * len(values)
        if not set(map(type, values)) <= ({int, float, bool} if code in "fd" else {int, bool}):
            return values
        return array(code, np.fromiter(values, dtype, len(values)).tobytes())
    except (TypeError, ValueError, OverflowError):
        return values


def joined_experts(before: Any, after: Any) -> Any:
    """The experts of a completion, which has those of all tokens it has read, after those of the tokens so far."""
    if before is None or after is None:
        return None
    return np.concatenate((before, after[len(before) :]))


def joined_support(*parts: Support | None) -> Support | None:
    """The support of consecutive tokens; None without parts, and unless each has one."""
    supports = [x for x in parts if x is not None]
    if not parts or len(supports) < len(parts):
        return None
    ids = np.full((sum(len(x.ids) for x in supports), max(x.ids.shape[1] for x in supports)), -1, np.int32)
    start = 0
    for x in supports:
        ids[start : start + len(x.ids), : x.ids.shape[1]] = x.ids
        start += len(x.ids)
    return Support(ids, np.concatenate([x.mass for x in supports]))


def wrong_reward(trajectory: Trajectory, *, is_valid: Callable[[Any], bool] = is_number) -> str | None:
    """Describe which of reward, score and trained token rewards is not a finite number; None if all are."""
    if trajectory.reward is None:
        return "reward is missing (end(reward=...) gives the one that trains; a score is only logged)"
    tokens = trajectory.token_rewards or () if any(trajectory.mask) else ()
    score = () if trajectory.score is None else (trajectory.score,)
    for name, values in (("reward", (trajectory.reward,)), ("score", score), ("token_rewards", tokens)):
        if bad := [value for value in values if not is_valid(value)]:
            return f"{name} is {show(bad[0])}"
    return None


def last_pieces(group: Sequence[Trajectory]) -> Group:
    """The last piece of each episode, which carries `score`, `info` and `truncated`."""
    following = [*(t.continues for t in group[1:]), False]
    return [t for t, continued in zip(group, following, strict=False) if not continued]


def is_judged(end: Trajectory) -> bool:
    """Whether the reward of an episode is its own: its reward function did not fail (`rlkit.rewards.scoring`)."""
    return not end.info.get("metrics", {}).get("failed")


def with_totals(group: Sequence[Trajectory]) -> list[tuple[Trajectory, float]]:
    """`last_pieces`, each with the reward of its episode: the terminal one, and the token rewards of all pieces."""
    ends: list[tuple[Trajectory, float]] = []
    for t, total in zip(group, totals(group), strict=True):
        ends[-1 if t.continues else len(ends) :] = [(t, total)]
    return ends


def totals(group: Sequence[Trajectory]) -> list[float]:
    """Of each piece the reward of its episode so far: the terminal one, and the token rewards up to and with it."""
    found: list[float] = []
    for t in group:
        before = found[-1] if t.continues else t.reward
        found.append(before + (0.0 if t.token_rewards is None else float(sum(t.token_rewards))))
    return found


def images_of(prompt: Any) -> tuple[Picture, ...]:
    """The images that a prompt shows; none of an object of your own without `images`."""
    return getattr(prompt, "images", ())


def sampler(
    generate: Generate, params: SamplingParams, key: tuple[int, ...], images: Sequence[Picture] = ()
) -> Sampler:
    """A `Sampler` on `generate`; each turn gets its own seed, derived from `key`. `images` are the prompt's."""
    turn, of_prompt = 0, images

    async def sample(
        prompt_ids: list[int],
        *,
        max_new_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        images: Sequence[Picture] | None = None,
    ) -> Completion:
        nonlocal turn
        turn += 1
        seen = of_prompt if images is None else images
        options: dict[str, Any] = {"images": [*seen]} if seen else {}
        limit = min(params.max_new_tokens, max_new_tokens or params.max_new_tokens)
        turn_params = replace(params, seed=mix(*key, turn), max_new_tokens=limit, stop=(*params.stop, *stop))
        completion = await generate(prompt_ids, params=turn_params, **options)
        if (reason := completion.finish_reason) not in _REASONS:
            raise ValueError(f"generate: finish_reason must be one of {_REASONS}, got {reason!r}")
        return completion

    return sample


async def all_or_cancel(coroutines: Sequence[Coroutine[Any, Any, X]]) -> list[X]:
    """`asyncio.gather` that leaves no task running: the first error cancels and awaits the others, then is raised."""
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel the tasks and await their end, whatever it is."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def mix(*parts: int) -> int:
    """Hash integers to a 63-bit seed; different parts give unrelated seeds (splitmix64, public domain)."""
    x = 0
    for part in parts:
        x = (x ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
        x ^= x >> 31
    return x >> 1


_MASK = (1 << 64) - 1


class _Idle:
    """Warns, once in a process, of an episode that neither samples nor ends for a minute."""

    def __init__(self, prompt: Prompt) -> None:
        self._place, self._busy = place_of_prompt(prompt), 1
        self._timer: asyncio.TimerHandle | None = None

    def count(self, step: int) -> None:
        """1: a turn begins, or the episode has ended; -1: a turn has ended, or the episode begins."""
        self._busy += step
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if self._busy else asyncio.get_running_loop().call_later(IDLE_S, self._report)

    def _report(self) -> None:
        where = f", in an episode of {self._place}; the run waits for it"
        report_once("the environment", f"has asked for nothing for {IDLE_S:g} s", where)


async def _episode(env: Env, prompt: Prompt, sample: Sampler, openings: list[int]) -> list[Group]:
    """The pieces of each role of one episode, with `continues` set; `openings` gets the hash of its first context."""
    absent, idle = set[str](), _Idle(prompt)
    names_images = opened = False

    async def watched(prompt_ids: list[int], **limit: Any) -> Completion:
        nonlocal names_images, opened
        if not opened:
            openings.append(hash(tuple(prompt_ids)) if isinstance(prompt_ids, Sequence) else 0)
        opened = True
        names_images = names_images or limit.get("images") is not None
        idle.count(1)
        try:
            return await sample(prompt_ids, **limit)
        finally:
            idle.count(-1)

    try:
        idle.count(-1)
        with not_cancelled():
            out = await env(replace(prompt, row=Watched(prompt.row, absent)), watched)  # a group shares the row
        report_absent("the environment", absent, prompt.row)
    except Exception as error:
        if getattr(error, "index", None) != prompt.index:  # of `rlkit.rewards.episodes`, which names the row
            error.add_note(f"in an episode of {place_of_prompt(prompt)}")
        raise
    finally:
        idle.count(1)
    pieces = pieces_of(out, f"{place_of_prompt(prompt)}: ")
    pieces = [_showing(t, prompt) for t in pieces] if images_of(prompt) and not names_images else pieces
    by_role: dict[str, Group] = {}
    for t in pieces:
        of_one = by_role.setdefault(t.role, [])
        of_one.append(t if t.continues == bool(of_one) else replace(t, continues=bool(of_one)))
    return [*by_role.values()]


def _showing(trajectory: Trajectory, prompt: Prompt) -> Trajectory:
    """The trajectory with the images of its prompt, which it must begin with."""
    if list(trajectory.prompt_ids[: len(prompt.ids)]) != list(prompt.ids):
        cause = "its chat template rewrites past turns, or the environment renders the prompt again"
        fix = "name the images of each context (`Turns`, or `images` of `sample`)"
        raise ValueError(
            f"{place_of_prompt(prompt)}: an episode with images must go on from its prompt: {cause}; {fix}"
        )
    return replace(trajectory, images=prompt.images)


def pieces_of(returned: Any, place: str = "") -> Group:
    """What an environment returned, as a list of pieces; ValueError, with what to return, for anything else."""
    pieces = [returned] if isinstance(returned, Trajectory) else returned
    if isinstance(pieces, list | tuple) and pieces and all(isinstance(piece, Trajectory) for piece in pieces):
        if any("failed" in (piece.info.get("metrics") or ()) for piece in pieces):
            raise ValueError(f"{place}info['metrics'] has 'failed', a metric of rlkit's own: give it another name")
        return [*pieces]
    fix = "return at least one piece: a Trajectory, or a list of them"
    nothing = returned is None or (isinstance(returned, list | tuple) and not returned)
    if is_number(returned):
        fix = "return the episode with it, as in chat.end(reward=...)"
    if hasattr(returned, "end"):
        fix = f"return {type(returned).__name__.lower()}.end(reward=...)"
    raise ValueError(f"{place}the environment returned {'no trajectory' if nothing else show(returned)}; {fix}")
