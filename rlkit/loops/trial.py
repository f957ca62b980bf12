"""Call a loss or an estimator of the user's on a small batch before a model is loaded, and check six plain laws.

`rlkit.testing.check_loss` checks more laws on many batches, and finds the smallest counterexample.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from rlkit._util.numbers import show
from rlkit.packing import pack, select, with_streams
from rlkit.rewards.failures import name_of, place_in, unwrapped
from rlkit.segments import broadcast_to_tokens
from rlkit.types import Batch, Trajectory

_log = logging.getLogger("rlkit.losses")
# (which tokens the policy sampled, advantage) of each sequence of each group; over the tokens, sum A |A| = 0
_GROUPS = (
    (("11011", 1.0), ("1101", -1.0)),
    (("1", 1.0), ("11", -1.0)),
    (("11", 0.5), ("101", -0.5)),
    (("1", 0.0),),
)
_TOLERANCE = 1e-4


class Broken(NamedTuple):
    """A law that a loss breaks, and how. A `refused` one trains on something else than the advantages."""

    law: str
    how: str
    refused: bool = False


def is_ours(function: Any) -> bool:
    """Whether a function, or what a partial binds, is of this package, whose laws are tested."""
    return str(getattr(unwrapped(function), "__module__", "")).startswith("rlkit.")


def toy_batch(*, masked: bool = True, values: bool = True, sign: float = 1.0) -> Batch:
    """Seven sequences in four groups, with every stream. Without `masked`, only the tokens that the policy sampled.

    Terminal rewards, which are 1/2 above the advantages, are multiplied by `sign`.
    """
    token, groups, advantages = 10, [], []
    for sequences in _GROUPS:
        group = []
        for sampled, advantage in sequences:
            mask = [x == "1" for x in sampled]
            ids = [*range(token, token + len(mask))]
            token += len(mask)
            kept = [i for i, on in enumerate(mask) if on or masked]
            logp = [-0.5 - 0.1 * (ids[i] % 7) if mask[i] else 0.0 for i in kept]
            rewards = [0.1 * (ids[i] % 3) if mask[i] else 0.0 for i in kept]
            group.append(
                Trajectory([1, 2], [ids[i] for i in kept], [mask[i] for i in kept], logp, [0] * len(kept),
                           sign * (advantage + 0.5), rewards)
            )  # fmt: skip
            advantages.append(advantage)
        groups.append(group)
    batch = pack(groups)
    per_token = broadcast_to_tokens(torch.tensor(advantages), cu_seqlens=batch.cu_seqlens)
    noise = torch.sin(batch.targets.float())
    streams = {
        "old_logp": batch.rollout_logp, "ref_logp": batch.rollout_logp + 0.1 * noise, "advantages": per_token,
        "kept_mass": torch.full_like(noise, 0.9), "returns": per_token + 0.2 * noise,
    }  # fmt: skip
    streams |= {"values": 0.3 * noise} if values else {}
    return with_streams(batch, **{name: x.where(batch.mask, 0.0) for name, x in streams.items()})


def try_surrogate(function: Callable[..., Any], surrogate: Callable[[Tensor, Batch], Tensor]) -> None:
    """Check six laws of a policy loss, `surrogate(log_ratio, batch)`, which `function` of the user's computes.

        shape            a loss per token, with a gradient
        mask_isolation   tokens that the policy did not sample (streams 0) change no other token, and are finite
        on_policy        at ratio 1 the gradient is -A, and changes with A
        descends         no token's gradient has the sign of its advantage near ratio 1, or where the ratio moved
                         against the advantage; where A is 0, it does not push the ratio away from 1 on both sides
        clipped          a gradient that is 0 where the ratio moved against the advantage, for either sign of A, is also
                         0 where it moved as far with it, and the loss is 0, too
        additive         the losses of two micro-batches are those of the batch

    Raises ValueError where one of the first two is broken, or where the gradient at ratio 1 is along the advantages
    rather than against them. Any other broken law is logged: sequence ratios, statistics of the batch and penalties
    break some of them. A surrogate that drops tokens by their ratio alone obeys `clipped` (its loss is 0 there), and so
    does the dual clip: at one of the two signs its gradient vanishes in neither direction, or in both.
    """
    name = name_of(function)
    try:
        with torch.random.fork_rng(devices=[]):
            broken = [*broken_laws(surrogate)]
    except Exception as error:
        raise _failure(function, error, "failed on a batch of 18 tokens") from error
    proof = "`rlkit.testing.check_loss` has the counterexample"
    for law, how, refused in broken:
        if refused:
            raise ValueError(f"{name}: {how} (law {law}): {proof}; `loss_unchecked` takes it as it is")
        _log.warning("%s: %s (law %s): rlkit.testing.check_loss has the counterexample", name, how, law)


def broken_laws(surrogate: Callable[[Tensor, Batch], Tensor]) -> Iterator[Broken]:
    """The laws of `try_surrogate` that a loss breaks; those after a broken shape are not checked."""
    batch = toy_batch()
    (loss, gradient), error = _loss(surrogate, batch)
    if error:
        yield Broken("shape", error, refused=True)
        return
    again, _ = _loss(surrogate, batch, seed=1)
    random = not torch.equal(loss, again[0])
    if not bool(loss.isfinite().all() and gradient.isfinite().all()):
        place = "at a token that the policy did not sample, where all streams are 0,"
        sampled = loss[batch.mask].isfinite().all() and gradient[batch.mask].isfinite().all()
        how = f"the loss or its gradient {'' if sampled else 'at a sampled token '}is NaN or infinite"
        yield Broken("mask_isolation" if sampled else "shape", f"{place} {how}" if sampled else how, refused=True)
        return
    if not random and (how := _isolation(surrogate, batch, (loss, gradient))):
        yield Broken("mask_isolation", how, refused=True)
    g, a = _loss(surrogate, batch, torch.zeros_like(batch.advantages))[0][1][batch.mask], batch.advantages[batch.mask]
    if not _near(g, -a):
        climbs = bool((g * a > _TOLERANCE).any()) and bool((g * a).sum() > _TOLERANCE)
        if climbs or not random:
            how = "" if random or climbs else _independent(surrogate, batch)
            yield Broken("on_policy", how or f"at ratio 1 the gradient is {_times(g, a)}, expected -A", refused=climbs)
            if how:
                return
    if how := _pushed(batch, log_ratio(batch), gradient) or ("" if random else _far(surrogate, batch)):
        yield Broken("descends", how)
    if not random and (how := _wrong_side(surrogate, batch)):
        yield Broken("clipped(clip_low=.., clip_high=..)", how)
    if not random and (how := _additivity(surrogate, batch, loss)):
        yield Broken("additive", how)


def log_ratio(batch: Batch) -> Float[Tensor, "T"]:
    """Log-ratios between -0.4 and 0.4, a function of the token; 0 where the policy did not sample."""
    return (0.4 * torch.cos(3.0 * batch.targets.float())).where(batch.mask, 0.0)


def _loss(
    surrogate: Callable[[Tensor, Batch], Tensor], batch: Batch, x: Tensor | None = None, *, seed: int = 0
) -> tuple[tuple[Tensor, Tensor], str]:
    """The loss per token and the gradient of its sum, or what is wrong with the result."""
    torch.manual_seed(seed)
    given = _copied(batch)
    with torch.enable_grad():
        x = (log_ratio(batch) if x is None else x).requires_grad_()
        loss = surrogate(x, batch)
        if wrong := _changed(batch, given) or _wrong(loss, x.shape):
            return (x.detach(), x.detach()), wrong
        return (loss.detach(), _slopes(loss, x)[0]), ""


def _failure(function: Callable[..., Any], error: Exception, what: str) -> ValueError:
    return ValueError(f"{name_of(function)} {what}: {type(error).__name__}: {error}{place_in(function, error)}")


def _copied(batch: Batch) -> dict[str, Tensor]:
    """A copy of each stream."""
    streams = ((field.name, getattr(batch, field.name)) for field in fields(batch))
    return {name: x.clone() for name, x in streams if isinstance(x, Tensor)}


def _changed(batch: Batch, given: dict[str, Tensor]) -> str:
    """The error of a function that has changed a stream; empty for none."""
    name = next((name for name, x in given.items() if not torch.equal(x, getattr(batch, name))), None)
    return "" if name is None else f"it changes `{name}` in place, which others read: work on a copy"


def _wrong(loss: Any, shape: torch.Size) -> str:
    """The error of a result that is no loss per element with a gradient; empty for one that is."""
    expected = f"it must return a loss for each element, a tensor of shape {list(shape)} like its first argument"
    if not isinstance(loss, Tensor):
        return f"{expected}, got {show(loss)}"
    if loss.shape != shape:
        return f"{expected}, got shape {list(loss.shape)}: do not average it"
    if not loss.requires_grad:
        fix = "compute it with torch, without .detach(), .item() or no_grad"
        return f"{expected}, and it has no gradient with respect to that: {fix}"
    return ""


def _slopes(loss: Tensor, *x: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss.sum(), x, allow_unused=True, materialize_grads=True)


def _isolation(surrogate: Any, batch: Batch, whole: tuple[Tensor, Tensor]) -> str:
    """How tokens that the policy did not sample change the others; empty if they do not."""
    alone, error = _loss(surrogate, toy_batch(masked=False))
    if error:
        return f"without tokens of the environment {error}"
    for what, both, part in zip(("loss", "gradient"), whole, alone):
        if not _near(both[batch.mask], part):
            return f"tokens that the policy did not sample (mask False) change the {what} of those that it sampled"
    return ""


def _independent(surrogate: Any, batch: Batch) -> str:
    """Whether a gradient at ratio 1 stays as it is under other advantages, in words; empty if it does not."""
    zeros = torch.zeros_like(batch.advantages)
    given = [replace(batch, advantages=x) for x in (batch.advantages, 1 - 2 * batch.advantages)]
    slopes = [_loss(surrogate, some, zeros.clone())[0][1][batch.mask] for some in given]
    same = bool(slopes[0].any()) and torch.equal(*slopes)
    return "the gradient does not depend on `batch.advantages`" if same else ""


def _pushed(batch: Batch, x: Tensor, gradient: Tensor) -> str:
    """The first token whose gradient has the sign of its advantage at log-ratio `x`; empty for none."""
    for t in (batch.mask & (gradient * batch.advantages > _TOLERANCE)).nonzero().flatten().tolist()[:1]:
        slope, how = f"the gradient {gradient[t]:.3g}", "has the sign of its advantage"
        return f"at ratio {x[t].exp():.3g} {slope} {how} {batch.advantages[t]:g}"
    return ""


def _uniform(surrogate: Any, batch: Batch, advantage: float, x: float) -> tuple[Tensor, Tensor]:
    """The loss and the gradient where all tokens have the same advantage and log-ratio."""
    given = replace(batch, advantages=advantage * batch.mask.float())
    return _loss(surrogate, given, x * batch.mask.float())[0]


def _far(surrogate: Any, batch: Batch) -> str:
    """How the gradient pushes a ratio further away from 1, by 1 and 3 nats; empty if it does not.

    Where the ratio moved with the advantage, a penalty pulls it back, so only the other side is checked. Where A is 0,
    an entropy bonus or the KL estimator k1 pushes in one direction, so both are.
    """
    for size in (1.0, 3.0):
        drifts = [x * _uniform(surrogate, batch, 0.0, x)[1][batch.mask] < -_TOLERANCE for x in (size, -size)]
        if bool((drifts[0] & drifts[1]).any()):
            return (
                f"where the advantage is 0, the gradient at ratios {math.exp(-size):.2g} and {math.exp(size):.2g} "
                "pushes the ratio further away from 1"
            )
        x = -size * batch.advantages.sign()
        if how := _pushed(batch, x, _loss(surrogate, batch, x.clone())[0][1]):
            return how
    return ""


def _wrong_side(surrogate: Any, batch: Batch) -> str:
    """How the gradient vanishes on the wrong side of a clip only; empty if it does not."""
    for x in (1.0, 3.0):
        places = ((1.0, -x), (-1.0, x), (1.0, x), (-1.0, -x))
        losses, slopes = zip(*(_uniform(surrogate, batch, *place) for place in places), strict=True)
        against, along = [slope == 0 for slope in slopes[:2]], [slope == 0 for slope in slopes[2:]]
        stuck, low, high = batch.mask & against[0] & against[1], math.exp(-x), math.exp(x)
        if bool((stuck & along[0] & along[1] & (losses[0] != 0) & (losses[1] != 0)).any()):
            return (
                "a clip without max(-A r, -A clip(r)): the loss is constant, and its gradient 0, also where the ratio "
                f"moved against the advantage ({low:.2g} for A > 0, {high:.2g} for A < 0)"
            )
        if bool((stuck & ~(along[0] | along[1])).any()):
            return (
                f"the clip is on the wrong side: the gradient is 0 where the ratio moved against the advantage "
                f"({low:.2g} for A > 0, {high:.2g} for A < 0), and not where it moved with it ({high:.2g}, {low:.2g}); "
                "PPO's loss is max(-A r, -A clip(r))"
            )
    return ""


def _additivity(surrogate: Any, batch: Batch, whole: Tensor) -> str:
    """How the loss of a token depends on the others of its micro-batch; empty if it does not."""
    parts = [select(batch, (batch.group_ids == g).nonzero().flatten()) for g in range(len(_GROUPS))]
    for part in parts:
        (loss, _), wrong = _loss(surrogate, part)
        there = torch.isin(batch.targets, part.targets)
        if wrong or not _near(loss, whole[there]):
            return wrong or "the loss of a token depends on what else is in its micro-batch"
    return ""


def _times(g: Tensor, a: Tensor) -> str:
    """The gradient in terms of the advantages."""
    share = g[a != 0] / a[a != 0]
    if _near(share, share[:1].expand_as(share)) and _near(g, share[0] * a):
        x = float(share[0])
        return (
            "0"
            if abs(x) < _TOLERANCE
            else f"{'+' if x > 0 else '-'}{'' if abs(abs(x) - 1) < 1e-3 else f'{abs(x):.3g} '}A"
        )
    worst = int((g + a).abs().argmax())
    return f"{g[worst]:.3g} where A = {a[worst]:g}"


def _near(x: Tensor, y: Tensor) -> bool:
    return torch.allclose(x, y.to(x.dtype), rtol=_TOLERANCE, atol=_TOLERANCE)


def try_pair_loss(function: Callable[..., Any]) -> None:
    """Call a loss of pairs, `function(chosen, rejected)`, of log-ratios or scores `[N]`.

    ValueError for one that fails or gives no finite loss per pair with a gradient, or that names the two the other way
    round. Logged: one that rises with the margin, or does not fall with it; that has no gradient for one of the two; or
    that falls as the rejected response becomes likelier. A loss may do so where margins are small or large, but not at
    both: discopop rises around 0.
    """
    _refuse_swapped(function, "chosen", "rejected")
    found: list[str] = []
    for size in (0.3, 15.0):
        chosen, rejected = (torch.linspace(-x, x, 6).requires_grad_() for x in (size, -size))
        loss = function(chosen, rejected) if found else _called(function, chosen, rejected)
        found.append(_of_pairs(*_slopes(loss, chosen, rejected)))
    if all(found):
        _log.warning("%s %s", name_of(function), found[0])


def _of_pairs(up: Tensor, down: Tensor) -> str:
    """What is wrong with the slopes of a pair loss, of chosen and rejected responses; empty if nothing is."""
    margin = "the log-ratio of the chosen response less that of the rejected"
    flat = [name for name, x in (("chosen", up), ("rejected", down)) if not x.any()]
    fall, least = (down - up).sum(), 1e-3 * (up.abs() + down.abs()).sum()
    if fall < -least:
        return f"rises with {margin}"
    if len(flat) == 1:
        return f"has no gradient with respect to the log-ratio of the {flat[0]} response"
    if bool((down < 0).all()):
        return "falls as the log-ratio of the rejected response rises"
    return f"does not fall with {margin}" if fall <= least else ""


def try_label_loss(function: Callable[..., Any], **options: Any) -> None:
    """Check a loss of labelled responses, `function(log_ratio, desirable, kl=, ...)`, as `try_pair_loss` does.

    Logged: one that rises with the log-ratio of desirable responses, compared with the others; whose gradient does not
    depend on the labels; or that falls as responses that are not desirable become likelier.
    """
    x, desirable = torch.linspace(-0.3, 0.3, 6).requires_grad_(), torch.tensor([True, False] * 3)
    slope, flipped = (
        _slopes(_called(function, x, labels, kl=torch.tensor(0.0), **options), x)[0]
        for labels in (desirable, ~desirable)
    )
    up, down, least = slope[desirable].sum(), slope[~desirable].sum(), 1e-3 * slope.abs().sum()
    for broken, how in (
        (
            torch.equal(slope, flipped),
            "has the same gradient for desirable and other responses: it ignores `desirable`",
        ),
        (up - down > least, "rises with the log-ratio of desirable responses"),
        (down < -least, "falls as the log-ratio of responses that are not desirable rises"),
    ):
        if broken:
            _log.warning("%s %s", name_of(function), how)
            return


def try_divergence(function: Callable[..., Any]) -> None:
    """Check a divergence of student and teacher, `function(log_q, log_p)` of log-probs `[.., V]`, in the same way."""
    _refuse_swapped(function, "student", "teacher")
    logits = torch.sin(torch.arange(1.0, 41.0)).view(5, 8)
    log_q, log_p = logits.log_softmax(1).requires_grad_(), (2 * logits.flip(0)).log_softmax(1)
    loss = _called(function, log_q, log_p)
    with torch.no_grad():
        least = function(log_p, log_p)
    if float(loss.detach().sum()) < float(least.sum()) - _TOLERANCE:
        _log.warning("%s is larger where the student is the teacher than elsewhere", name_of(function))


def try_kl(function: Callable[..., Any]) -> None:
    """Check an estimator of KL(policy || reference), `function(logp, ref_logp)` of sampled tokens, in the same way.

    Logged: one that is not 0 where the two are equal, or whose mean over the policy's tokens is negative.
    """
    _refuse_swapped(function, "policy", "ref")
    logits = torch.sin(torch.arange(1.0, 9.0))
    logp, ref_logp = logits.log_softmax(0).requires_grad_(), (2 * logits.flip(0)).log_softmax(0)
    kl = _called(function, logp, ref_logp)
    with torch.no_grad():
        equal, expected = function(logp, logp), (logp.exp() * kl).sum()
    if float(equal.abs().max()) > _TOLERANCE:
        _log.warning("%s is not 0 where policy and reference are equal", name_of(function))
    if float(expected) < -_TOLERANCE:
        _log.warning("%s has a negative mean over samples of the policy: is its sign right?", name_of(function))


def _refuse_swapped(function: Callable[..., Any], first: str, second: str) -> None:
    """Refuse (ValueError) a function whose first parameter is named as what it gets second, or the other way round."""
    try:
        names = [*inspect.signature(function).parameters][:2]
    except (TypeError, ValueError):  # of C
        return
    if second in names[0].lower() or first in names[-1].lower():
        raise ValueError(f"{name_of(function)} gets ({first}, {second}) in this order, and names them {names}")


def _called(function: Callable[..., Any], *given: Tensor, **options: Any) -> Tensor:
    """The loss of each entry of the first argument's first axis; ValueError for anything else."""
    name = name_of(function)
    try:
        with torch.enable_grad():
            loss = function(*given, **options)
    except Exception as error:
        raise _failure(function, error, "failed") from error
    if wrong := _wrong(loss, given[0].shape[:1]):
        raise ValueError(f"{name}: {wrong}")
    if not bool(loss.isfinite().all()):
        raise ValueError(f"{name}: its loss is NaN or infinite")
    return loss


def try_advantage(function: Callable[..., Any], *, values: bool) -> None:
    """Call an estimator `function(batch, bootstrap) -> Gae` on a small batch, with a critic's `values` or without.

    ValueError for one that fails, or whose advantages (and with `values` its returns) are no finite number per token,
    also for a group of one. These are logged: a result that depends on the order of the groups; advantages that are all
    0 although the rewards differ; advantages that are lower for terminal rewards R than for -R where R > 0, and higher
    where R < 0, summed over the tokens; advantages that are never negative and the same for R and -R, but not for 0.
    """
    name = name_of(function)
    batch, opposite, without = (
        replace(toy_batch(values=values, sign=sign), advantages=None, returns=None, kept_mass=None)  # type: ignore[arg-type]
        for sign in (1.0, -1.0, 0.0)
    )

    def estimated(of: Batch) -> list[Tensor]:
        given = _copied(of)
        try:
            found = function(of, torch.zeros(of.num_seqs))
        except Exception as error:
            raise _failure(function, error, "failed on a batch of 18 tokens") from error
        if wrong := _changed(of, given):
            raise ValueError(f"{name}: {wrong}")
        streams = [getattr(found, key, None) for key in ("advantages", "returns")[: 1 + values]]
        for key, x in zip(("advantages", "returns"), streams):
            got = f"{list(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else show(found)
            if not isinstance(x, Tensor) or x.shape != of.targets.shape or not x.is_floating_point():
                what = (
                    f"must return rlkit.advantages.Gae(advantages, returns), a float per token [{of.num_tokens}] each"
                )
                raise ValueError(f"{name} {what}, got {got}")
            if not bool(x[of.mask].isfinite().all()):
                raise ValueError(f"{name}: its {key} of a batch with a group of one are NaN or infinite")
        return [x[of.mask].detach() for x in streams if x is not None]

    order = torch.arange(batch.num_seqs)
    for turned in (select(batch, order.flip(0)), select(batch, order.roll(1))):  # a roll moves even places to odd ones
        place = turned.targets[turned.mask].argsort()
        if not all(_near(x, y[place]) for x, y in zip(estimated(batch), estimated(turned), strict=True)):
            _log.warning("%s: the result depends on the order of the groups in the batch (law permutation)", name)
            return
    if how := _of_rewards(lambda given: estimated(given)[0], batch, opposite, without):
        _log.warning("%s: %s", name, how)


def _of_rewards(advantages: Callable[[Batch], Tensor], batch: Batch, opposite: Batch, without: Batch) -> str:
    """How the advantages of sampled tokens do not follow the rewards R, -R and 0 of three batches; empty if they do."""
    rewards = broadcast_to_tokens(batch.rewards, cu_seqlens=batch.cu_seqlens)[batch.mask]
    found = []
    for ids in (batch.group_ids, torch.zeros_like(batch.group_ids)):  # groups of two, and one of seven
        up, down, zero = (advantages(replace(x, group_ids=ids)) for x in (batch, opposite, without))
        even = _near(up, down) and not _near(up, zero) and not bool((up < 0).any())
        found.append((bool(up.any()), even, float(((up - down) * rewards).sum())))
    if not any(some for some, *_ in found):
        return "all its advantages are 0 on a batch of unequal rewards, so that nothing would train"
    if any(even for _, even, _ in found):
        return "its advantages are the same for rewards R and -R, and never negative (law rewards_raise)"
    falls = all(follows < -_TOLERANCE for *_, follows in found)
    return "its advantages fall where the rewards rise (law rewards_raise): is its sign right?" if falls else ""
