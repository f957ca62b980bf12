"""Pack trajectories into tensors and unpack them; split batches into mini-batches and micro-batches.

>>> t = Trajectory(prompt_ids=[5, 6, 7], ids=[8, 9], mask=[True, True], logp=[-0.5, -0.25], versions=[0, 0], reward=1.0)
>>> b = pack([[t, t]])
>>> b.prefix_tokens.tolist(), b.tokens.tolist(), b.targets.tolist(), b.cu_seqlens.tolist()
([5, 6], [7, 8, 7, 8], [8, 9, 8, 9], [0, 2, 4])
>>> unpack(b) == [[t, t]]
True
"""

from __future__ import annotations

import math
import warnings
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit._util.numbers import show
from rlkit._util.tensors import (
    check_below,
    check_bool,
    check_ids,
    check_log_probs,
    check_same_device,
    check_same_shape,
    masked,
    readable,
)
from rlkit.packing.balancing import plan_microbatches
from rlkit.segments import broadcast_to_tokens, cumulative, episode_advantages, seq_lens
from rlkit.types import Batch, Picture, Trajectory

_FLOATS = ("token_rewards", "rollout_logp", "old_logp", "ref_logp", "kept_mass", "advantages", "values", "returns")
_PER_TOKEN = ("tokens", "targets", "mask", "versions", *_FLOATS, "experts", "support", "teacher_ids", "teacher_logp")
_PER_SEQ = ("rewards", "truncated", "roles", "teachers", "teacher_prompts")
_IDS = ("group_ids", "episode_ids")
_LONG = 32  # tokens: a shorter prompt may be copied


def pack(groups: Iterable[Iterable[Trajectory]], *, share_prompts: bool = True) -> Batch:
    """Pack groups of trajectories into one batch. Targets are shifted here, and only here.

    With `share_prompts` (default) every distinct prompt of a group is stored once, as a prefix, and a sequence is
    `[last prompt token, s_1 .. s_{n-1}]`. Otherwise each sequence carries its whole prompt (mask False) and the
    prefixes are empty; sharing gives the same results. A truncated trajectory has one more input, mask False, for its
    bootstrap value. The terminal reward is on the last action; float streams are 0 where the mask is False.
    The pieces of one episode (`Trajectory.continues`) have equal `episode_ids`; each ends with the episode's reward.

    Errors: TypeError, naming group, sample and field, for anything but lists of numbers; ValueError, naming group and
    sample, for an empty prompt, a log-prob above 0.01, streams of different lengths, a non-finite
    log-prob or reward at a trained token, a trajectory without tokens that is not truncated, and a piece that follows
    no other piece or whose reward differs from the one before it; for trajectories of different temperatures; for a
    mask that is True at all tokens of version -1 and at no other; and for sampled `ids` that all begin with the prompt.
    A warning for one group of several prompts, with as many samples of each: those of a prompt are a group.
    """
    groups = _lists(groups)
    streams: list[_Streams] = []
    for g, group in enumerate(groups):
        for i, t in enumerate(group):
            streams.append(_checked(t, f"groups[{g}][{i}]"))
            if t.continues:
                _check_continues(t, group[i - 1] if i else None, f"groups[{g}][{i}]")
    samples = [t for group in groups for t in group]
    temperatures = sorted({t.temperature for t in samples if t.temperature is not None})
    if len(temperatures) > 1:
        raise ValueError(
            f"the trajectories were sampled at temperatures {', '.join(f'{x:g}' for x in temperatures)}: pack those of "
            "one temperature, which is the policy's"
        )
    roles = sorted({t.role for t in samples})
    group_ids = [g for g, group in enumerate(groups) for _ in group]
    prefixes, prefix_ids = dict[tuple[int, bytes, tuple[str, ...]], int](), list[int]()
    for g, x, t in zip(group_ids, streams, samples, strict=True):
        digests = tuple(image.digest for image in t.images)
        key = (g, x.prompt_ids[:-1].astype(np.int64).tobytes(), digests) if share_prompts else (g, b"", ())
        prefix_ids.append(prefixes.setdefault(key, len(prefixes)))
    _warn_of_one_group(groups, prefix_ids)
    heads = [x.prompt_ids[-1:] if share_prompts else x.prompt_ids for x in streams]
    lens = [len(h) - 1 + len(x.ids) + t.truncated for h, x, t in zip(heads, streams, samples, strict=True)]
    prompts = [np.frombuffer(p, np.int64) for _, p, _ in prefixes]
    return Batch(
        **_token_streams(streams, samples, heads, lens),
        cu_seqlens=cumulative(torch.tensor(lens, dtype=torch.long)),
        prefix_tokens=torch.from_numpy(np.concatenate([np.empty(0, np.int64), *prompts])),
        prefix_cu=cumulative(torch.tensor([len(p) for p in prompts], dtype=torch.long)),
        prefix_ids=torch.tensor(prefix_ids, dtype=torch.long),
        group_ids=torch.tensor(group_ids, dtype=torch.long),
        episode_ids=torch.tensor([not t.continues for t in samples], dtype=torch.long).cumsum(0) - 1,
        rewards=torch.tensor([t.reward for t in samples], dtype=torch.float32),
        truncated=torch.tensor([t.truncated for t in samples], dtype=torch.bool),
        temperature=temperatures[0] if temperatures else None,
        roles=torch.tensor([roles.index(t.role) for t in samples]) if len(roles) > 1 else None,  # type: ignore[arg-type]
        images=_images(samples, prefix_ids, len(prefixes), shared=share_prompts),
        **_experts(samples, [len(x.prompt_ids) - len(h) for x, h in zip(streams, heads)], lens, prefix_ids),
    )


def _warn_of_one_group(groups: Sequence[Sequence[Trajectory]], prefix_ids: Sequence[int]) -> None:
    """Warn of a single group that is the samples of several prompts, as many of each."""
    prompts, nums = len({*prefix_ids}), {*Counter(prefix_ids).values()}
    one = len(groups) == 1 and not any(t.continues or t.role for t in groups[0])
    if one and prompts > 1 and len(nums) == 1 and min(nums) > 1:
        fault = f"the one group has {prompts} prompts of {min(nums)} trajectories each, which are compared"
        warnings.warn(f"{fault}: pack takes a list of groups, one for each prompt", stacklevel=3)


def _token_streams(
    streams: Sequence[_Streams], samples: Sequence[Trajectory], heads: Sequence[np.ndarray], lens: Sequence[int]
) -> dict[str, Tensor]:
    """The `[T]` streams; each sequence is written in its place, so that nothing but they grows with T."""
    if len(streams) > 1 and all(map(_repeats_prompt, streams)):
        raise ValueError(
            "the ids of all samples begin with their prompt_ids: give those after it, ids[len(prompt_ids):]"
        )
    num = sum(lens)
    tokens, targets, versions = np.empty(num, np.int64), np.zeros(num, np.int64), np.full(num, -1, np.int32)
    mask, rewards, logp = np.zeros(num, np.bool_), np.zeros(num, np.float32), np.zeros(num, np.float32)
    start = 0
    for x, t, head, n in zip(streams, samples, heads, lens, strict=True):
        first, end = start + len(head) - 1, start + n  # of the targets that are in `ids`; a truncated one has one more
        ids = slice(first, first + len(x.ids))
        tokens[start : first + 1] = head
        tokens[first + 1 : end] = x.ids[: end - first - 1]
        targets[start:first] = head[1:]
        targets[ids], mask[ids], rewards[ids] = x.ids, x.mask, _token_rewards(x, t)
        np.copyto(logp[ids], x.logp, where=x.mask, casting="same_kind")
        np.copyto(versions[ids], x.versions, where=x.mask, casting="same_kind")
        start = end
    arrays = {"tokens": tokens, "targets": targets, "mask": mask, "token_rewards": rewards, "rollout_logp": logp}
    packed = {name: torch.from_numpy(x) for name, x in {**arrays, "versions": versions}.items()}
    return packed | _support(samples, [len(x) - 1 for x in heads], lens, packed["mask"], packed["rollout_logp"])


def _support(
    samples: Sequence[Trajectory], firsts: Sequence[int], lens: Sequence[int], mask: Tensor, rollout_logp: Tensor
) -> dict[str, Tensor]:
    """What truncated sampling kept at each token, where the samples have it; `rollout_logp` is then renormalised."""
    recorded = [t.support is not None for t in samples]
    if not any(t.support is not None and t.support.ids.shape[1] for t in samples):
        return {}
    if lacking := [i for i, t in enumerate(samples) if not recorded[i] and any(t.mask)]:
        raise ValueError(
            f"sample {lacking[0]} has no `support` and sample {recorded.index(True)} has one: an environment that "
            "makes its own Trajectory passes on `Completion.support`"
        )
    width = max(t.support.ids.shape[1] for t in samples if t.support is not None)
    ids, mass = np.full((sum(lens), width), -1, np.int32), np.ones(sum(lens), np.float32)
    start = 0
    for t, first, n in zip(samples, firsts, lens, strict=True):
        if t.support is not None:
            rows = slice(start + first, start + first + len(t.ids))
            ids[rows, : t.support.ids.shape[1]], mass[rows] = t.support
        start += n
    kept_mass = torch.from_numpy(mass)
    logp = masked((rollout_logp - kept_mass.log()).clamp(max=0), mask)
    return {"support": torch.from_numpy(ids), "kept_mass": kept_mass * mask, "rollout_logp": logp}


def without_support(batch: Batch) -> Batch:
    """The batch with log-probs of the whole vocabulary: `kept_mass` is still that of the weights that sampled."""
    if batch.support is None:
        return batch
    logp = masked(batch.rollout_logp + batch.kept_mass.log(), batch.mask)
    return replace(batch, support=None, rollout_logp=logp)


def _images(
    samples: Sequence[Trajectory], prefix_ids: Sequence[int], num_prefixes: int, *, shared: bool
) -> tuple[tuple[Picture, ...], ...] | None:
    """The pictures of each prefix and of each sequence: those of a prompt are in its prefix, if it has one."""
    if not any(t.images or t.later_images for t in samples):
        return None
    of_prefix: list[tuple[Picture, ...]] = [()] * num_prefixes
    of_seq: list[tuple[Picture, ...]] = [()] * len(samples)
    for i, (prefix, t) in enumerate(zip(prefix_ids, samples, strict=True)):
        in_prefix = shared and len(t.prompt_ids) > 1
        if in_prefix:
            of_prefix[prefix] = tuple(t.images)
        of_seq[i] = (*(() if in_prefix else t.images), *t.later_images)
    return (*of_prefix, *of_seq)


def _experts(
    samples: Sequence[Trajectory], starts: Sequence[int], lens: Sequence[int], prefix_ids: Sequence[int]
) -> dict[str, Tensor]:
    """The engine's experts of prefixes (those of their first sample) and of sequences, which begin at `starts` of a
    sample's tokens."""
    shapes = sorted({t.experts.shape[1:] for t in samples if t.experts is not None})
    if not shapes:
        return {}
    if len(shapes) > 1:
        raise ValueError(f"the trajectories have experts of [layers, k] {list(shapes[0])} and {list(shapes[1])}")
    prefixes: dict[int, np.ndarray] = {}
    of_seq = []
    for t, start, n, prefix in zip(samples, starts, lens, prefix_ids, strict=True):
        rows = np.full((start + n, *shapes[0]), -1, np.int16)  # the last token of a truncated sequence has none
        if t.experts is not None:
            rows[: len(t.experts)] = t.experts[: len(rows)]
        prefixes.setdefault(prefix, rows[:start])
        of_seq.append(rows[start:])
    both = {"experts": of_seq, "prefix_experts": [prefixes[i] for i in range(len(prefixes))]}
    return {name: torch.from_numpy(np.concatenate(parts)) for name, parts in both.items()}


def _lists(groups: Any) -> list[list[Trajectory]]:
    """The groups as lists, so that an iterator is read once."""
    if isinstance(groups, Tensor | Mapping | str | Trajectory) or not isinstance(groups, Iterable):
        fix = "padded tensors need no Batch: use streams, cu_seqlens = from_padded(*tensors, padding_mask=padding_mask)"
        fix = "use pack([[trajectory]])" if isinstance(groups, Trajectory) else fix
        fix = "await it: groups = await rollout(...)" if isinstance(groups, Awaitable) else fix
        kind = type(groups).__name__
        raise TypeError(f"groups must be lists of Trajectory, one list per prompt, got a {kind}; {fix}")
    out = []
    for g, group in enumerate(groups):
        if isinstance(group, str | Trajectory) or not isinstance(group, Iterable):
            kind = type(group).__name__
            raise TypeError(f"groups[{g}] must be a list of trajectories, one list per prompt, got a {kind}")
        out.append(list(group))
    return out


def unpack(batch: Batch) -> list[list[Trajectory]]:
    """The trajectories that were packed, in their groups. Floats have fp32 precision; `score`, `info`, `role`
    and `experts` are not kept.

    Pieces of one episode that are no longer adjacent (after `select`) become separate episodes.
    Of a batch with `support`, log-probs are those of the whole vocabulary, and the support is not kept.
    An unshared batch does not record where its prompts end: the first token of each sequence becomes the prompt, and
    the rest of the prompt masked tokens, whose images are `later_images`.
    """
    batch = without_support(batch)
    prefixes = [p.tolist() for p in batch.prefix_tokens.split(seq_lens(batch.prefix_cu).tolist())]
    lens = seq_lens(batch.cu_seqlens).tolist()
    streams = [
        [part.tolist() for part in x.split(lens)]
        for x in (batch.tokens, batch.targets, batch.mask, batch.rollout_logp, batch.versions, batch.token_rewards)
    ]
    groups: list[list[Trajectory]] = [[] for _ in range(int(batch.group_ids.max()) + 1 if lens else 0)]
    last_episode = [-1] * len(groups)
    images = [()] * (len(prefixes) + len(lens)) if batch.images is None else batch.images
    for i, (tokens, targets, mask, logp, versions, token_rewards) in enumerate(zip(*streams, strict=True)):
        truncated, reward = bool(batch.truncated[i]), float(batch.rewards[i])
        n = len(tokens) - truncated
        if True in mask:
            token_rewards[_last_true(mask)] -= reward
        group, episode = int(batch.group_ids[i]), int(batch.episode_ids[i])
        continues = last_episode[group] == episode
        last_episode[group] = episode
        groups[group].append(
            Trajectory(
                prompt_ids=[*prefixes[int(batch.prefix_ids[i])], tokens[0]],
                ids=targets[:n],
                mask=mask[:n],
                logp=logp[:n],
                versions=versions[:n],
                reward=reward,
                token_rewards=token_rewards[:n] if any(token_rewards) else None,
                truncated=truncated,
                continues=continues,
                temperature=batch.temperature,
                images=tuple(images[int(batch.prefix_ids[i])]),
                later_images=tuple(images[len(prefixes) + i]),
            )
        )
    return groups


class Packed(NamedTuple):
    """Streams `[T, ...]` and the `cu_seqlens` [B+1] of the rows they came from."""

    streams: tuple[Tensor, ...]
    cu_seqlens: Int[Tensor, "B1"]


def from_padded(*streams: Tensor, padding_mask: Bool[Tensor, "B L"]) -> Packed:
    """Remove the padding of `[B, L, ...]` tensors. `padding_mask` is True at real tokens, in any arrangement.

    `to_padded(*packed.streams, padding_mask=padding_mask)` is the exact inverse.
    Errors: ValueError for another shape, and for a mask that is True at the padding where an integer stream on the CPU
    shows it: one number wherever the mask is True, several where it is False. Floats alone do not show it.
    """
    _check_padding_mask(padding_mask)
    for i, x in enumerate(streams):
        if x.shape[:2] != padding_mask.shape:
            per_row = "; one value per row needs no packing" * (x.shape[:1] == padding_mask.shape[:1] and x.ndim == 1)
            raise ValueError(
                f"streams[{i}] must be [B, L, ...] like padding_mask, {list(padding_mask.shape)}, "
                f"got {list(x.shape)}{per_row}"
            )
        check_same_device(padding_mask=padding_mask, **{f"streams[{i}]": x})
    packed = tuple(x[padding_mask] for x in streams)
    for i, (x, flat) in enumerate(zip(streams, packed)):
        ids = flat.ndim == 1 and not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
        if ids and readable(x) and flat.numel() > 1 and _is_one_number(flat) and not _is_one_number(x[~padding_mask]):
            raise ValueError(
                f"streams[{i}] is {int(flat[0])} wherever padding_mask is True, and has several numbers where it is "
                "False: is the mask inverted? It is True at real tokens (~padding_mask)"
            )
    return Packed(packed, cumulative(padding_mask.sum(1)))


def to_padded(*streams: Tensor, padding_mask: Bool[Tensor, "B L"], fill: float = 0) -> tuple[Tensor, ...]:
    """Packed `[T, ...]` streams as padded `[B, L, ...]` tensors, `fill` at padding. Inverse of `from_padded`.

    Errors: ValueError for another shape, and for a `fill` that the dtype of an integer or bool stream cannot hold.
    """
    _check_padding_mask(padding_mask)
    num_real = int(padding_mask.sum())
    out = []
    for i, x in enumerate(streams):
        if x.shape[0] != num_real:
            raise ValueError(f"streams[{i}] must hold one row per True in padding_mask, {num_real}, got {x.shape[0]}")
        if not (x.is_floating_point() or x.is_complex()) and torch.tensor(fill).to(x.dtype).item() != fill:
            raise ValueError(f"streams[{i}] is {str(x.dtype).removeprefix('torch.')}, which cannot hold fill={fill}")
        padded = x.new_full((*padding_mask.shape, *x.shape[1:]), fill)
        out.append(padded.masked_scatter(padding_mask.view(*padding_mask.shape, *[1] * (x.ndim - 1)), x))
    return tuple(out)


def _is_one_number(x: Tensor) -> bool:
    return bool((x == x[:1]).all())


def _check_padding_mask(padding_mask: Tensor) -> None:
    check_bool("padding_mask", padding_mask, "a real token")
    if padding_mask.ndim != 2:
        raise ValueError(f"padding_mask must have shape [B, L], got {list(padding_mask.shape)}")


def select(batch: Batch, index: Int[Tensor, "M"] | Bool[Tensor, "N"] | Sequence[int]) -> Batch:
    """The sequences `index`, in that order, or those where a bool mask is True, with the prefixes they need.

    All ids are made dense again. Errors: ValueError for an index outside [0, N), and for a mask that is not `[N]`.
    """
    index = torch.as_tensor(index, device=batch.tokens.device)
    if index.dtype == torch.bool:
        check_same_shape(group_ids=batch.group_ids, index=index)
        index = index.nonzero().flatten()
    index = index if index.numel() else index.long()
    check_ids(index=index)
    check_below(batch.num_seqs, index=index)
    tokens, cu_seqlens = _rows(batch.cu_seqlens, index)
    used, prefix_ids = batch.prefix_ids[index].unique(return_inverse=True)
    images, num = batch.images, batch.prefix_cu.numel() - 1
    prefix_tokens, prefix_cu = _rows(batch.prefix_cu, used)
    per_token = {k: x[tokens] for k in _PER_TOKEN if (x := getattr(batch, k)) is not None}
    return Batch(
        **per_token,
        **{k: x[index] for k in _PER_SEQ if (x := getattr(batch, k)) is not None},
        **{k: getattr(batch, k)[index].unique(return_inverse=True)[1] for k in _IDS},
        cu_seqlens=cu_seqlens,
        prefix_tokens=batch.prefix_tokens[prefix_tokens],
        prefix_experts=None if batch.prefix_experts is None else batch.prefix_experts[prefix_tokens],
        prefix_cu=prefix_cu,
        prefix_ids=prefix_ids,
        temperature=batch.temperature,
        images=None if images is None else tuple(images[i] for i in [*used.tolist(), *(index + num).tolist()]),
    )


def split(batch: Batch, num_minibatches: int, *, epochs: int = 1, seed: int = 0) -> Iterator[Batch]:
    """Mini-batches of whole groups, `num_minibatches` per epoch; the order is reshuffled each epoch from `seed`."""
    check_batch(batch)
    group_ids = batch.group_ids.unique()
    if not 1 <= num_minibatches <= max(1, group_ids.numel()):
        raise ValueError(
            f"num_minibatches must be in [1, number of groups = {group_ids.numel()}], got {num_minibatches}"
        )
    if epochs < 1:
        raise ValueError(f"epochs must be at least 1, got {epochs}")
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        if num_minibatches == 1:
            yield batch
            continue
        order = torch.randperm(group_ids.numel(), generator=generator)
        for chosen in order.tensor_split(num_minibatches):
            yield select(batch, torch.isin(batch.group_ids, group_ids[chosen]).nonzero().flatten())


def microbatches(
    streams: tuple[Batch, *tuple[Tensor, ...]],
    *,
    max_tokens: int,
    isolate: Bool[Tensor, "N"] | None = None,
    whole_groups: bool = False,
    rank: int = 0,
    ranks: int = 1,
    attention: float = 0.0,
) -> Iterator[tuple[Batch, *tuple[Tensor, ...]]]:
    """Split a batch, and any `[T]` tensors with it, e.g. `(batch, weights)`, into balanced micro-batches.

    Every token of the batch is in exactly one micro-batch of at most `max_tokens` tokens (see `plan_microbatches`).
    Sequences where `isolate` is True never share a micro-batch with the others, e.g. sequences that need no gradient.
    `whole_groups` keeps groups intact, e.g. preference pairs, whose loss couples the samples. Data parallel rank `rank`
    of `ranks` gets its share; all ranks get the same number of micro-batches, some possibly empty. `attention` is that
    of `plan_microbatches`.
    """
    if not isinstance(streams, tuple | list) or not isinstance(streams[0], Batch):
        raise TypeError(
            f"streams must be a tuple that starts with a Batch, e.g. (batch, weights), got {_kinds(streams)}"
        )
    batch, *tensors = streams
    for i, x in enumerate(tensors, start=1):
        if x.shape[:1] != batch.tokens.shape:
            raise ValueError(f"streams[{i}] must have first axis T = {batch.num_tokens}, got {list(x.shape)}")
    seqs = torch.arange(batch.num_seqs)
    for part in [seqs] if isolate is None else [seqs[~isolate], seqs[isolate]]:
        subset = batch if part.numel() == batch.num_seqs else select(batch, part)
        weighing: Any = {"whole_groups": whole_groups, "attention": attention}
        plan = plan_microbatches(subset, max_tokens=max_tokens, ranks=ranks, **weighing)
        for members in plan.bins[rank::ranks]:
            if len(members) == batch.num_seqs:
                yield streams
                continue
            whole = len(members) == subset.num_seqs
            index = part if whole else part[torch.tensor(members, dtype=torch.long)]
            rows, _ = _rows(batch.cu_seqlens, index)
            yield (subset if whole else select(batch, index), *(x[rows] for x in tensors))


def _kinds(x: Any) -> str:
    if isinstance(x, tuple | list):
        return f"({', '.join(type(one).__name__ for one in x)})"
    return f"a {type(x).__name__}; use ({'batch' if isinstance(x, Batch) else '...'},)"


def join(batch: Batch) -> tuple[Int[Tensor, "PT"], Int[Tensor, "PT"]]:
    """The input of the policy: `[prefixes, sequences]` as one stream, and each token's position in its document."""
    prefix_lens = seq_lens(batch.prefix_cu)
    lens = torch.cat([prefix_lens, seq_lens(batch.cu_seqlens)])
    start = torch.cat([torch.zeros_like(prefix_lens), prefix_lens[batch.prefix_ids]])
    tokens = torch.cat([batch.prefix_tokens, batch.tokens])
    offset = (start - cumulative(lens)[:-1]).repeat_interleave(lens, output_size=tokens.numel())
    return tokens, torch.arange(tokens.numel(), device=tokens.device) + offset


def with_streams(batch: Batch, **streams: Tensor) -> Batch:
    """The batch with `[T]` streams replaced; each is set to 0 where the mask is False, even over NaN.

    Streams are data of the step and are detached: with `old_logp=policy(batch).logp`, computed under a gradient, the
    gradient of `logp - old_logp` would be 0. Errors: ValueError for log-probs above 0 (on the CPU).
    """
    for name, x in streams.items():
        if name not in _FLOATS:
            raise ValueError(f"{name} is not a per-token float stream of Batch; choose from {list(_FLOATS)}")
        check_same_shape(mask=batch.mask, **{name: x})
    where_sampled: dict[str, Any] = {k: masked(x.detach(), batch.mask) for k, x in streams.items()}
    check_log_probs(**{k: x for k, x in where_sampled.items() if k.endswith("logp")})
    return replace(batch, **where_sampled)


def check_batch(batch: Any) -> None:
    """Refuse groups that are not packed yet, and any other object: TypeError."""
    if not isinstance(batch, Batch):
        raise TypeError(f"batch must be a Batch, e.g. pack(groups), got a {type(batch).__name__}")


def with_advantages(batch: Batch, baseline: Callable[..., Float[Tensor, "E"]]) -> Batch:
    """The batch with `advantages [T]`: each token gets the advantage of its episode, 0 where the mask is False.

        A_t = baseline({r_e, g_e : e an episode})[episode of t]

    `baseline(rewards, group_ids=group_ids)` is a function of `rlkit.advantages` over episodes (`group_centered`,
    `leave_one_out`, ...), or your own. An episode in several pieces enters its baseline once.

    Example:  batch = with_advantages(pack(groups), group_centered)
    """
    check_batch(batch)
    advantages, num = episode_advantages(baseline, batch), batch.group_ids.numel()
    alone = readable(advantages) and not advantages.any() and batch.group_ids.unique().numel() == num
    if alone and batch.rewards.unique().numel() > 1:
        fault = f"each of the {num} trajectories is a group of its own, and all advantages are 0"
        warnings.warn(f"{fault}: sample several of a prompt (group_size)", stacklevel=2)
    return with_streams(batch, advantages=broadcast_to_tokens(advantages, cu_seqlens=batch.cu_seqlens))


def _rows(cu: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Token indices of the segments `index`, in order, and their cumulative lengths."""
    lens = seq_lens(cu)[index]
    new_cu = cumulative(lens)
    offset = (cu[index] - new_cu[:-1]).repeat_interleave(lens)
    return torch.arange(offset.numel(), device=cu.device) + offset, new_cu


def _check_continues(t: Trajectory, before: Trajectory | None, where: str) -> None:
    if before is None:
        raise ValueError(f"{where}: continues is True, but it is the first trajectory of its group")
    if t.reward != before.reward:
        raise ValueError(
            f"{where}: continues an episode of reward {before.reward}, but has reward {t.reward}; the pieces of an "
            "episode share one reward (use token_rewards where they differ)"
        )


class _Streams(NamedTuple):
    """The streams of a trajectory as arrays."""

    prompt_ids: np.ndarray
    ids: np.ndarray
    mask: np.ndarray
    logp: np.ndarray
    versions: np.ndarray
    token_rewards: np.ndarray | None


def _token_rewards(streams: _Streams, t: Trajectory) -> np.ndarray:
    token_rewards = streams.token_rewards
    rewards = np.zeros(len(streams.ids)) if token_rewards is None else token_rewards.astype(np.float64)
    if streams.mask.any():
        rewards[streams.mask.nonzero()[0][-1]] += t.reward
    return rewards


def _repeats_prompt(streams: _Streams) -> bool:
    """Whether the tokens of a sample, no fixed data, begin with its prompt, which is long."""
    prompt, sampled = streams.prompt_ids, (streams.versions >= 0).any()
    return bool(sampled) and len(prompt) >= _LONG and np.array_equal(streams.ids[: len(prompt)], prompt)


def _last_true(mask: list[bool]) -> int:
    return len(mask) - 1 - mask[::-1].index(True)


_KINDS = {
    "prompt_ids": Integral, "ids": Integral, "mask": Real, "logp": Real, "versions": Integral, "token_rewards": Real,
}  # fmt: skip


def _numbers(x: Any, kind: type, name: str) -> np.ndarray:
    """A sequence of integers or of real numbers, Python's or numpy's, as an array; one of `array` is not copied."""
    if isinstance(x, array) and (kind is Real or x.typecode not in "fdu"):
        return np.asarray(x)
    if isinstance(x, str) or not isinstance(x, Sequence):
        shape = getattr(x, "shape", None)
        fix = "" if shape is None else f" of shape {list(shape)}; use {name.split()[-1]}.tolist()"
        kind_of = type(x).__name__.removesuffix("Type").lower()
        raise TypeError(f"{name} must be a list, got a {kind_of}{fix}")
    if not set(map(type, x)) <= ({int} if kind is Integral else {float, int, bool}):
        for j, value in enumerate(x):
            if not isinstance(value, kind) and type(value).__name__ not in ("bool", "bool_"):
                expected = "an integer" if kind is Integral else "a number"
                raise TypeError(f"{name}[{j}] must be {expected}, got {show(value)}")
    return np.fromiter(x, np.int64 if kind is Integral else np.float64, len(x))


def _checked(t: Trajectory, where: str) -> _Streams:
    """The streams of a trajectory; the errors of `pack`."""
    if not isinstance(t, Trajectory):
        raise TypeError(f"{where} must be a Trajectory, got {show(t)}")
    arrays = {
        name: None if x is None and name == "token_rewards" else _numbers(x, kind, f"{where}: {name}")
        for name, kind in _KINDS.items()
        for x in [getattr(t, name)]
    }
    streams = _Streams(**arrays)  # type: ignore[arg-type]
    num = len(streams.ids)
    if not len(streams.prompt_ids):
        raise ValueError(f"{where}: prompt_ids is empty; a sequence starts with at least one token (e.g. the BOS id)")
    if not num and not t.truncated:
        raise ValueError(f"{where}: no tokens and not truncated; set truncated=True, or drop it")
    for name in ("mask", "logp", "versions", "token_rewards"):
        x = getattr(streams, name)
        if x is not None and len(x) != num:
            raise ValueError(f"{where}: {name} has {len(x)} entries for {num} ids")
    if not ((streams.mask == 0) | (streams.mask == 1)).all():
        raise ValueError(f"{where}: mask must hold bools; use [label != -100 for label in labels]")
    small = streams.mask.dtype == np.int8  # of `compact`: read where it is
    streams = streams._replace(mask=streams.mask.view(np.bool_) if small else streams.mask.astype(np.bool_))
    if 0 < (unsampled := streams.versions < 0).sum() < num and (streams.mask == unsampled).all():
        raise ValueError(f"{where}: mask is inverted: it is True at the tokens of version -1, which nobody sampled")
    if not isinstance(t.reward, Real) and getattr(t.reward, "shape", None) != ():
        raise TypeError(f"{where}: reward must be a number, got {show(t.reward)}")
    if not math.isfinite(t.reward):
        raise ValueError(f"{where}: reward is {t.reward}; it must be finite")
    possible = (streams.logp <= 0.01) & (streams.logp > -math.inf)  # engines round log-probs of almost 0
    if (impossible := streams.mask & ~possible).any():
        j = int(impossible.argmax())
        fault = f"{where}: logp[{j}] is {t.logp[j]}"
        if not math.isfinite(t.logp[j]):
            raise ValueError(f"{fault} at a trained token; did the engine return log-probs?")
        raise ValueError(f"{fault}, above 0 at a trained token; use math.log of a probability")
    if streams.token_rewards is not None and (streams.token_rewards[~streams.mask] != 0).any():
        raise ValueError(f"{where}: token_rewards must be 0 at tokens that the policy did not sample (mask False)")
    return streams
