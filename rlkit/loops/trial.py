"""Call a policy loss or an estimator of the user's on a small batch before a model is loaded, and check plain laws.

`rlkit.testing.check_loss` checks more laws on many batches, and finds the smallest counterexample.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from rlkit._util.numbers import show
from rlkit.packing import pack, select, with_streams
from rlkit.rewards.failures import name_of, place_in
from rlkit.segments import broadcast_to_tokens, group_mean, seq_count, seq_lens
from rlkit.settings import Penalties, Rollouts
from rlkit.types import Batch, Trajectory

_log = logging.getLogger("rlkit.losses")
# (which tokens the policy sampled, advantage) of each sequence of each group; over the tokens, sum A |A| = 0
_GROUPS = (
    (("11011", 1.0), ("1101", -1.0)),
    (("1", 1.0), ("11", -1.0)),
    (("11", 0.5), ("101", -0.5)),
    (("1", 0.0),),
)
TOLERANCE = 1e-4
_GIVEN_BY = {  # what gives a run's batch a stream
    "old_logp": "`minibatches` or `epochs` above 1", "ref_logp": "`kl_coef` above 0, or `kl_limit`",
    "kept_mass": "`top_p`, `top_k` or `min_p`, and in an estimator a critic", "values": "a critic (ppo)",
    "returns": "a critic (ppo)", "advantages": "an estimator, which comes before it",
}  # fmt: skip
_LAST = "the final reward changes the advantage of an answer's last token only: is the sum over later rewards?"
_UNCHECKED = " (it is random, or keeps a state), so that laws which compare two calls are not checked"
_TWICE = (
    ", and the run weighs tokens by old_logp over rollout_logp as well: if that is a correction of your own, turn the "
    "run's off (--correction none, PolicyLoss(correction=torch.ones_like))"
)


class Broken(NamedTuple):
    """A law that a loss breaks, and how. A `refused` one trains on something else than the advantages."""

    law: str
    fault: str
    refused: bool = False


def lacking(
    rollouts: Rollouts, penalties: Penalties, *, critic: bool = False, scored: bool = False, estimator: bool = False
) -> set[str]:
    """The streams that a run's batch does not have when it comes to the loss, or to the `estimator` of the advantages.

    `critic`: the run is PPO's. `scored`: it has old_logp in any case, as PPO has for an estimator that it is given.
    """
    several, kl_in_loss = rollouts.minibatches * rollouts.epochs > 1, penalties.kl_in in (None, "loss")
    there = {
        "old_logp": scored or several or (penalties.has_kl and (critic or not kl_in_loss)),
        "ref_logp": penalties.has_kl,
        "kept_mass": rollouts.params.truncates and (critic or not estimator),
        "advantages": not estimator, "returns": critic and not estimator, "values": critic,
    }  # fmt: skip
    return {name for name in there if not there[name]}


def weighs(correction: Callable[[Tensor], Tensor]) -> bool:
    """Whether a `PolicyLoss.correction` is other than 1 where the policy and the engine that sampled differ."""
    return not near(correction(torch.full((2,), 0.3)), torch.ones(2))


def toy_batch(*, gaps: int = 1, tail: int = 0, sign: float = 1.0, lacks: Collection[str] = ()) -> Batch:
    """Seven sequences in four groups, with every stream but those that it `lacks`.

    Tokens that the policy did not sample come `gaps` times, and `tail` of them at each end. Terminal rewards, which are
    1/2 above the advantages, are multiplied by `sign`.
    """
    token, groups, advantages = 10, [], []
    for sequences in _GROUPS:
        group = []
        for sampled, advantage in sequences:
            slots = [(i, x == "1") for i, x in enumerate(sampled, token) for _ in range(1 if x == "1" else gaps)]
            slots += [(0, False)] * tail
            token += len(sampled)
            logp = [-0.5 - 0.1 * (i % 7) if on else 0.0 for i, on in slots]
            rewards = [0.1 * (i % 3) if on else 0.0 for i, on in slots]
            group.append(
                Trajectory([1, 2], [i for i, _ in slots], [on for _, on in slots], logp, [0] * len(slots),
                           sign * (advantage + 0.5), rewards)
            )  # fmt: skip
            advantages.append(advantage)
        groups.append(group)
    batch = pack(groups)
    per_token = broadcast_to_tokens(torch.tensor(advantages), cu_seqlens=batch.cu_seqlens)
    noise = torch.sin(batch.targets.float())
    streams = {
        "old_logp": batch.rollout_logp, "ref_logp": batch.rollout_logp + 0.1 * noise, "advantages": per_token,
        "kept_mass": torch.full_like(noise, 0.9), "returns": per_token + 0.2 * noise, "values": 0.3 * noise,
    }  # fmt: skip
    return with_streams(batch, **{k: x.where(batch.mask, 0.0) for k, x in streams.items() if k not in lacks})


def _elsewhere(batch: Batch, **streams: Tensor) -> Batch:
    """The batch with log-probs that are lower by 0.3 at the sampled tokens."""
    return replace(batch, **{name: x - 0.3 * batch.mask for name, x in streams.items()})  # type: ignore[arg-type]


def try_surrogate(
    function: Callable[..., Any],
    surrogate: Callable[[Tensor, Batch], Tensor],
    *,
    weighs: bool = False,
    lacks: Collection[str] = (),
) -> None:
    """Check six laws of a policy loss, `surrogate(log_ratio, batch)`, which `function` of the user's computes.

        shape            a loss per token, with a gradient
        mask_isolation   tokens that the policy did not sample (streams 0) change no other token, and are finite
        on_policy        at ratio 1 the gradient is -A, and changes with A; or it has that of an entropy bonus, too; or
                         no token becomes less likely, and one of a higher advantage is raised more (AWR, RAFT)
        descends         no token's gradient has the sign of its advantage near ratio 1, or where the ratio moved
                         against the advantage; where A is 0, it does not push the ratio away from 1 on both sides.
                         Near ratio 1, a penalty in proportion to |A| may pull back a ratio that moved with A (SPO)
        clipped          a gradient that is 0 where the ratio moved against the advantage, for either sign of A, is also
                         0 where it moved as far with it, and the loss is 0, too
        additive         the losses of two micro-batches are those of the batch

    Raises ValueError where one of the first two is broken, or where the gradient at ratio 1 is along the advantages
    rather than against them; and for one that needs a stream which the batches of the run lack (`lacking`). Any other
    broken law is logged: sequence ratios, statistics of the batch and penalties break some of them. A surrogate that
    drops tokens by their ratio alone obeys `clipped` (its loss is 0 there), and so does the dual clip: at one of the
    two signs its gradient vanishes in neither direction, or in both. Also logged: a loss that differs between two calls
    (`pure`), of which the laws that compare calls are not checked; and one that depends on `rollout_logp` where the run
    `weighs` its tokens by old_logp over rollout_logp (`PolicyLoss.correction`).
    """
    name = name_of(function)
    try:
        with torch.random.fork_rng(devices=[]):
            broken = [*broken_laws(surrogate, lacks)]
            twice = weighs and _corrects(surrogate, toy_batch(lacks=lacks), broken)
    except Exception as error:
        refuse_needed(name, lambda batch: surrogate(log_ratio(batch), batch), lacks)
        raise failure(function, error, "failed on a batch of 18 tokens") from error
    proof = "`rlkit.testing.check_loss` has the counterexample"
    for law, fault, refused in broken:
        if refused:
            raise ValueError(f"{name}: {fault} (law {law}): {proof}; `loss_unchecked` takes it as it is")
        _log.warning("%s: %s (law %s): rlkit.testing.check_loss has the counterexample", name, fault, law)
    if twice:
        _log.warning("%s: the loss depends on `batch.rollout_logp`%s", name, _TWICE)


def broken_laws(surrogate: Callable[[Tensor, Batch], Tensor], lacks: Collection[str] = ()) -> Iterator[Broken]:
    """The laws of `try_surrogate` that a loss breaks; those after a broken shape are not checked."""
    batch = toy_batch(lacks=lacks)
    (loss, gradient), error = _loss(surrogate, batch)
    if error:
        yield Broken("shape", error, refused=True)
        return
    again, _ = _loss(surrogate, batch, seed=1)
    random = not torch.equal(loss, again[0])
    if not bool(loss.isfinite().all() and gradient.isfinite().all()):
        place = "at a token that the policy did not sample, where all streams are 0,"
        sampled = loss[batch.mask].isfinite().all() and gradient[batch.mask].isfinite().all()
        flaw = f"the loss or its gradient {'' if sampled else 'at a sampled token '}is NaN or infinite"
        yield Broken("mask_isolation" if sampled else "shape", f"{place} {flaw}" if sampled else flaw, refused=True)
        return
    if random:
        yield Broken("pure", f"two calls on one batch give different losses{_UNCHECKED}")
    if not random and (flaw := _isolation(surrogate, batch, (loss, gradient), lacks)):
        yield Broken("mask_isolation", flaw, refused=True)
    g, a = _loss(surrogate, batch, torch.zeros_like(batch.advantages))[0][1][batch.mask], batch.advantages[batch.mask]
    weighted = not near(g, -a) and not random and _is_weighted(surrogate, batch)
    if not near(g, -a) and not weighted:
        climbs = bool((g * a > TOLERANCE).any()) and bool((g * a).sum() > TOLERANCE)
        flaw = "" if random or climbs else _independent(surrogate, batch)
        if climbs or not (random or (not flaw and _has_entropy(surrogate, batch))):
            yield Broken("on_policy", flaw or f"at ratio 1 the gradient is {_times(g, a)}, expected -A", refused=climbs)
            if flaw:
                return
    flaw = _pushed(batch, log_ratio(batch), gradient)
    flaw = "" if flaw and not random and _pulls_back(surrogate, batch, gradient) else flaw
    if (flaw := flaw or ("" if random else _far(surrogate, batch))) and not weighted:
        yield Broken("descends", flaw)
    if not random and (flaw := _wrong_side(surrogate, batch)):
        yield Broken("clipped(clip_low=.., clip_high=..)", flaw)
    if not random and (flaw := _additivity(surrogate, batch, loss)):
        yield Broken("additive", flaw)


def _corrects(surrogate: Callable[[Tensor, Batch], Tensor], batch: Batch, broken: Sequence[Broken]) -> bool:
    """Whether a loss of the right form that does not differ between two calls depends on `rollout_logp`."""
    if any(one.refused or one.law == "pure" for one in broken):
        return False
    moved = _elsewhere(batch, rollout_logp=batch.rollout_logp)
    before, there, again = (_loss(surrogate, x)[0] for x in (batch, moved, batch))
    return all(map(near, before, again)) and not all(map(near, before, there))


def log_ratio(batch: Batch) -> Float[Tensor, "T"]:
    """Log-ratios between -0.4 and 0.4, a function of the token; 0 where the policy did not sample."""
    return (0.4 * torch.cos(3.0 * batch.targets.float())).where(batch.mask, 0.0)


def _loss(
    surrogate: Callable[[Tensor, Batch], Tensor], batch: Batch, x: Tensor | None = None, *, seed: int = 0
) -> tuple[tuple[Tensor, Tensor], str]:
    """The loss per token and the gradient of its sum, or what is wrong with the result."""
    torch.default_generator.manual_seed(seed)  # not those of GPUs, which are the user's
    copies = _copied(batch)
    with torch.enable_grad():
        x = (log_ratio(batch) if x is None else x).requires_grad_()
        loss = surrogate(x, batch)
        if fault := _changed(batch, copies) or wrong_loss(loss, x.shape):
            return (x.detach(), x.detach()), fault
        return (loss.detach(), slopes(loss, x)[0]), ""


def failure(function: Callable[..., Any], error: Exception, event: str) -> ValueError:
    """The error of a function that raised one, with the line of the user's file."""
    hint = "; an argument with the name `advantages` is that tensor" if "'Batch'" in str(error) else ""
    return ValueError(f"{name_of(function)} {event}: {type(error).__name__}: {error}{place_in(function, error)}{hint}")


def refuse_needed(name: str, call: Callable[[Batch], Any], lacks: Collection[str]) -> None:
    """Refuse (ValueError) a function that works on a batch with all streams, and needs one which the run lacks."""

    def works(batch: Batch) -> bool:
        with suppress(Exception), torch.random.fork_rng(devices=[]):
            call(batch)
            return True
        return False

    full = toy_batch()
    for stream in sorted(lacks) if works(full) else ():
        if not works(replace(full, **{stream: None})):  # type: ignore[arg-type]
            fault = f"{name} needs `batch.{stream}`, which this run does not have: it requires {_GIVEN_BY[stream]}"
            raise ValueError(fault)


def _copied(batch: Batch) -> dict[str, Tensor]:
    """A copy of each stream."""
    streams = ((field.name, getattr(batch, field.name)) for field in fields(batch))
    return {name: x.clone() for name, x in streams if isinstance(x, Tensor)}


def _changed(batch: Batch, copies: dict[str, Tensor]) -> str:
    """The error of a function that has changed a stream; empty for none."""
    name = next((name for name, x in copies.items() if not torch.equal(x, getattr(batch, name))), None)
    return "" if name is None else f"it changes `{name}` in place, which others read: work on a copy"


def wrong_loss(loss: Any, shape: torch.Size, *, graded: bool = True) -> str:
    """The error of a result that is no loss per element with a gradient; empty for one that is."""
    expected = f"it must return a loss for each element, a tensor of shape {list(shape)} like its first argument"
    if not isinstance(loss, Tensor):
        return f"{expected}, got {show(loss)}"
    if loss.shape != shape:
        return f"{expected}, got shape {list(loss.shape)}: do not average it"
    if graded and not loss.requires_grad:
        fix = "compute it with torch, without .detach(), .item() or no_grad"
        return f"{expected}, and it has no gradient with respect to that: {fix}"
    return ""


def slopes(loss: Tensor, *x: Tensor) -> tuple[Tensor, ...]:
    """The gradients of the sum."""
    return torch.autograd.grad(loss.sum(), x, allow_unused=True, materialize_grads=True)


def _isolation(surrogate: Any, batch: Batch, whole: tuple[Tensor, Tensor], lacks: Collection[str]) -> str:
    """How tokens that the policy did not sample change the others; empty if they do not."""
    alone, error = _loss(surrogate, toy_batch(gaps=0, lacks=lacks))
    if error:
        return f"without tokens of the environment {error}"
    found = [near(both[batch.mask], part) for both, part in zip(whole, alone)]
    if all(found):
        return ""
    # a loss of turns depends on where they end, and not on what or how much stands between them
    more, of_token = toy_batch(gaps=2, lacks=lacks), {f.name: getattr(batch, f.name) for f in fields(batch)}
    of_token = {k: x for k, x in of_token.items() if isinstance(x, Tensor) and x.shape == batch.mask.shape}
    streams = {k: x.where(batch.mask, 0.7) for k, x in of_token.items() if x.is_floating_point()}
    moved, x = replace(batch, **streams), log_ratio(batch).where(batch.mask, 0.3)
    others = [(_loss(surrogate, more), more.mask), (_loss(surrogate, moved, x), batch.mask)]
    if all(not fault and all(near(a[batch.mask], b[mask]) for a, b in zip(whole, of)) for (of, fault), mask in others):
        return ""
    name = "gradient" if found[0] else "loss"
    return f"tokens that the policy did not sample (mask False) change the {name} of those that it sampled"


def _independent(surrogate: Any, batch: Batch) -> str:
    """Whether a gradient at ratio 1 stays as it is under other advantages, in words; empty if it does not."""
    zeros = torch.zeros_like(batch.advantages)
    batches = [replace(batch, advantages=x) for x in (batch.advantages, 1 - 2 * batch.advantages)]
    slopes = [_loss(surrogate, some, zeros.clone())[0][1][batch.mask] for some in batches]
    same = bool(slopes[0].any()) and torch.equal(*slopes)
    return "the gradient does not depend on `batch.advantages`" if same else ""


def _is_weighted(surrogate: Any, batch: Batch) -> bool:
    """Whether a loss is the likelihood of the sampled tokens with weights of at least 0 that rise with the advantage.

    So are advantage-weighted regression and training on the best answers (RAFT).
    """
    ones, a = batch.mask.float(), batch.advantages[batch.mask]
    loss = [_loss(surrogate, batch, x * ones)[0][1][batch.mask] for x in (0.0, 1.0, 3.0, -1.0, -3.0)]
    rises = bool((a[:, None] >= a).logical_and(loss[0][:, None] > loss[0] + TOLERANCE).any().logical_not())
    return rises and not near(loss[0], loss[0][:1]) and not any(bool((x > TOLERANCE).any()) for x in loss)


def _has_entropy(surrogate: Any, batch: Batch) -> bool:
    """Whether a gradient at ratio 1 is -A + b old_logp + c with b > 0, that of an entropy bonus."""
    if batch.old_logp is None:
        return False
    other = replace(batch, advantages=(1 - 2 * batch.advantages) * batch.mask)
    rest, moved = (
        (_loss(surrogate, x, torch.zeros_like(x.advantages))[0][1] + x.advantages)[batch.mask] for x in (batch, other)
    )
    logp = batch.old_logp[batch.mask]
    logp, centred = logp - logp.mean(), rest - rest.mean()
    slope = (logp * centred).sum() / (logp * logp).sum()
    return near(rest, moved) and near(centred, slope * logp) and float(slope) > TOLERANCE


def _pulls_back(surrogate: Any, batch: Batch, gradient: Tensor) -> bool:
    """Whether a gradient has the sign of the advantage only where the ratio moved with that, and is linear in its size.

    A penalty of the size of the advantage does that, in place of a clip (SPO).
    """
    x = log_ratio(batch)
    twice = _loss(surrogate, replace(batch, advantages=2 * batch.advantages), x.clone())[0][1]
    return near(twice, 2 * gradient) and not _pushed(batch, x, gradient * (x * batch.advantages < 0))


def _pushed(batch: Batch, x: Tensor, gradient: Tensor) -> str:
    """The first token whose gradient has the sign of its advantage at log-ratio `x`; empty for none."""
    for t in (batch.mask & (gradient * batch.advantages > TOLERANCE)).nonzero().flatten().tolist()[:1]:
        slope, fault = f"the gradient {gradient[t]:.3g}", "has the sign of its advantage"
        return f"at ratio {x[t].exp():.3g} {slope} {fault} {batch.advantages[t]:g}"
    return ""


def _uniform(surrogate: Any, batch: Batch, advantage: float, x: float) -> tuple[Tensor, Tensor]:
    """The loss and the gradient where all tokens have the same advantage and log-ratio."""
    uniform = replace(batch, advantages=advantage * batch.mask.float())
    return _loss(surrogate, uniform, x * batch.mask.float())[0]


def _far(surrogate: Any, batch: Batch) -> str:
    """How the gradient pushes a ratio further away from 1, by 1 and 3 nats; empty if it does not.

    Where the ratio moved with the advantage, a penalty pulls it back, so only the other side is checked. Where A is 0,
    an entropy bonus or the KL estimator k1 pushes in one direction, so both are.
    """
    for size in (1.0, 3.0):
        drifts = [x * _uniform(surrogate, batch, 0.0, x)[1][batch.mask] < -TOLERANCE for x in (size, -size)]
        if bool((drifts[0] & drifts[1]).any()):
            return (
                f"where the advantage is 0, the gradient at ratios {math.exp(-size):.2g} and {math.exp(size):.2g} "
                "pushes the ratio further away from 1"
            )
        x = -size * batch.advantages.sign()
        if fault := _pushed(batch, x, _loss(surrogate, batch, x.clone())[0][1]):
            return fault
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
        (loss, _), fault = _loss(surrogate, part)
        there = torch.isin(batch.targets, part.targets)
        if fault or not near(loss, whole[there]):
            return fault or "the loss of a token depends on what else is in its micro-batch"
    return ""


def _times(g: Tensor, a: Tensor) -> str:
    """The gradient in terms of the advantages."""
    share = g[a != 0] / a[a != 0]
    if near(share, share[:1].expand_as(share)) and near(g, share[0] * a):
        x = float(share[0])
        if abs(x) < TOLERANCE:
            return "0"
        return f"{'+' if x > 0 else '-'}{'' if abs(abs(x) - 1) < 1e-3 else f'{abs(x):.3g} '}A"
    worst = int((g + a).abs().argmax())
    return f"{g[worst]:.3g} where A = {a[worst]:g}"


def near(x: Tensor, y: Tensor) -> bool:
    """Whether two results are equal up to rounding."""
    return torch.allclose(x, y.to(x.dtype), rtol=TOLERANCE, atol=TOLERANCE)


def try_advantage(
    function: Callable[..., Any], *, values: bool, lacks: Collection[str] = ("kept_mass",), weighs: bool = False
) -> None:
    """Call an estimator `function(batch, bootstrap) -> Gae` on a small batch, with a critic's `values` or without.

    ValueError for one that fails or needs a stream which the batches of the run lack (`lacking`), or whose advantages
    (and with `values` its returns) are no finite number per token, also for a group of one; that have a gradient; or
    that depend on tokens which the policy did not sample at the end of an answer.

    These are logged, and of them the first: results that differ between two calls; that depend on how many tokens the
    environment gave between those of the policy; on the order of the groups; or on old_logp over rollout_logp, where
    the run `weighs` the loss by it, too. Advantages that are all 0 although the rewards differ; that do not depend on
    them, nor on the reference; that are lower for terminal rewards R than for -R where R > 0, and higher where R < 0,
    summed over the tokens; that are never negative and the same for R and -R, but not for 0; that are equal in each
    group; that depend on the terminal reward at all sampled tokens but the first, or but the last, of every answer, or
    at the first one only; without `values` at the last one only, in answers without a gap. With `values`, returns that
    do not depend on the rewards, or fall where the values rise, and advantages that rise with the values.
    """
    lacks = {*lacks, "advantages", "returns", *(() if values else ("values",))}
    with torch.random.fork_rng(devices=[]):
        estimated = partial(_estimated, function, values=values, lacks=lacks)
        broken = _of_estimator(estimated, values=values, lacks=lacks, weighs=weighs)
    if broken and broken.refused:
        raise ValueError(f"{name_of(function)}: {broken.fault} (law {broken.law})")
    if broken:
        _log.warning("%s: %s%s", name_of(function), broken.fault, f" (law {broken.law})" if broken.law else "")


def _estimated(
    function: Callable[..., Any], batch: Batch, *, values: bool, lacks: Collection[str], seed: int = 0
) -> list[Tensor]:
    """The advantages of the sampled tokens, and with `values` the returns."""
    torch.default_generator.manual_seed(seed)
    name, copies = name_of(function), _copied(batch)
    try:
        returned = function(batch, torch.zeros(batch.num_seqs))
    except Exception as error:
        refuse_needed(name, lambda batch: function(batch, torch.zeros(batch.num_seqs)), lacks)
        raise failure(function, error, f"failed on a batch of {batch.num_tokens} tokens") from error
    if fault := _changed(batch, copies):
        raise ValueError(f"{name}: {fault}")
    streams = [getattr(returned, key, None) for key in ("advantages", "returns")[: 1 + values]]
    for key, x in zip(("advantages", "returns"), streams):
        got = f"{list(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else show(returned)
        if not isinstance(x, Tensor) or x.shape != batch.targets.shape or not x.is_floating_point():
            form = f"must return rlkit.advantages.Gae(advantages, returns), a float per token [{batch.num_tokens}] each"
            raise ValueError(f"{name} {form}, got {got}")
        if not bool(x[batch.mask].isfinite().all()):
            raise ValueError(f"{name}: its {key} of a batch with a group of one are NaN or infinite")
        if x.requires_grad:
            raise ValueError(f"{name}: its {key} have a gradient, which nothing trains: return {key}.detach()")
    return [x[batch.mask] for x in streams if x is not None]


def _of_estimator(
    estimated: Callable[..., list[Tensor]], *, values: bool, lacks: Collection[str], weighs: bool
) -> Broken | None:
    """The first law of `try_advantage` that an estimator breaks."""
    batch, *others = (toy_batch(sign=sign, lacks=lacks) for sign in (1.0, -1.0, 0.0))
    base = estimated(batch)

    def differ(other: Batch, **options: Any) -> bool:
        place = other.targets[other.mask].argsort()
        return not all(near(x, y[place]) for x, y in zip(base, estimated(other, **options), strict=True))

    if differ(batch, seed=1):
        return Broken("pure", f"two calls on one batch give different advantages{_UNCHECKED}")
    order = torch.arange(batch.num_seqs)
    if any(differ(select(batch, x)) for x in (order.flip(0), order.roll(1))):  # a roll moves even places to odd ones
        return Broken("permutation", "the result depends on the order of the groups in the batch")
    unsampled = "that the policy did not sample (mask False) change the advantages of those that it sampled"
    if differ(toy_batch(tail=2, lacks=lacks)):
        fix = "leave them out, as whiten(x, mask=batch.mask) does"
        return Broken("mask_isolation", f"tokens at the end of an answer {unsampled}: {fix}", refused=True)
    if differ(toy_batch(gaps=2, lacks=lacks)):
        return Broken("mask_isolation", f"tokens {unsampled}; rlkit's own estimators skip them")
    if weighs and batch.old_logp is not None:
        ratio, both = {"rollout_logp": batch.rollout_logp}, {"old_logp": batch.old_logp}
        if differ(_elsewhere(batch, **ratio)) and not differ(_elsewhere(batch, **ratio, **both)):
            return Broken("", f"the advantages depend on `batch.rollout_logp`{_TWICE}")
    fault, law = _of_rewards(lambda x: estimated(x)[0], [batch, *others], values=values)
    fault = fault or (_of_values(estimated, batch, base, others) if values else "")
    return Broken(law, fault) if fault else None


def _of_values(
    estimated: Callable[[Batch], list[Tensor]], batch: Batch, pair: Sequence[Tensor], others: Sequence[Batch]
) -> str:
    """How the advantages and returns `pair` of a batch do not follow the rewards (those of `others` are -R and 0) and
    the critic's values; empty for none."""
    advantages, returns = pair
    taught = [x if x.ref_logp is None else replace(x, ref_logp=2 * x.ref_logp) for x in others]  # by a teacher, too
    if all(near(returns, estimated(x)[1]) for x in taught):
        return "its returns do not depend on the rewards, and the critic learns nothing of them"
    higher = estimated(replace(batch, values=batch.values + 0.5 * batch.mask))
    if float((higher[1] - returns).sum()) < -TOLERANCE:
        return "its returns fall where the critic's values rise: are advantages and returns exchanged?"
    if float((higher[0] - advantages).sum()) > TOLERANCE:
        return "its advantages rise with the critic's values: an advantage is the return minus the value"
    return ""


def _of_rewards(advantages: Callable[[Batch], Tensor], batches: Sequence[Batch], *, values: bool) -> tuple[str, str]:
    """How the advantages of sampled tokens do not follow the rewards R, -R and 0 of three batches, and the law."""
    batch, law = batches[0], "rewards_raise"
    arranged = (batch.group_ids, torch.zeros_like(batch.group_ids))  # groups of two, and one of seven
    estimates = [[advantages(replace(x, group_ids=ids)) for x in batches] for ids in arranged]
    rewards, *ids = (
        broadcast_to_tokens(x, cu_seqlens=batch.cu_seqlens)[batch.mask] for x in (batch.rewards, *arranged)
    )
    if not any(bool(up.any()) for up, *_ in estimates):
        return "all its advantages are 0 on a batch of unequal rewards, so that nothing would train", ""
    same = torch.stack([(up - x).abs() <= TOLERANCE for up, *others in estimates for x in others]).all(0)
    if bool(same.all()):
        moved = None if batch.ref_logp is None else replace(batch, ref_logp=2 * batch.ref_logp)
        teaches = moved is not None and not near(advantages(moved), estimates[0][0])
        return ("", "") if teaches else ("its advantages do not depend on the rewards", law)
    if any(near(up, down) and not near(up, zero) and not bool((up < 0).any()) for up, down, zero in estimates):
        return "its advantages are the same for rewards R and -R, and never negative", law
    if all(float(((up - down) * rewards).sum()) < -TOLERANCE for up, down, _ in estimates):
        return "its advantages fall where the rewards rise", law
    if all(near(up, group_mean(up, group_ids=x)) for (up, *_), x in zip(estimates, ids, strict=True)):
        return "its advantages are equal for all answers to a prompt: is it the baseline, not the reward minus it?", ""
    return _unrewarded(batch, same, values=values) or ("" if values else _whitened(batch, *estimates[0])), ""


def _unrewarded(batch: Batch, same: Tensor, *, values: bool) -> str:
    """At which place of every answer the advantage is the `same` for all rewards, in words; empty for none."""
    counts, lens = seq_count(batch.mask, cu_seqlens=batch.cu_seqlens), seq_lens(batch.cu_seqlens)
    answers = same.split(counts.tolist())[:-1]  # the last one is a group of one, of advantage 0
    for place, which in (("first", 0), ("last", -1)):
        if all(bool(x[which]) for x in answers):
            credit = "has an advantage that does not depend on the answer's reward"
            return f"the {place} sampled token of every answer {credit}: are the advantages shifted by one?"
    if all(bool(x[1:].all()) for x in answers):
        return "the final reward changes the advantage of an answer's first sampled token only"
    one_turn = [x[:-1] for x, full in zip(answers, counts == lens) if full and len(x) > 1]
    if not values and all(bool(x.all()) for x in one_turn):
        return _LAST
    return ""


def _whitened(batch: Batch, up: Tensor, *others: Tensor) -> str:
    """Whether the final reward changes all but the last advantages of each answer of the first group by one scale and
    one shift, as whitening does of rewards that are not summed, in words; empty if not."""
    counts = seq_count(batch.mask, cu_seqlens=batch.cu_seqlens).tolist()
    num = sum(counts[:2])
    before = torch.ones(num, dtype=torch.bool).index_fill(0, torch.tensor([counts[0] - 1, num - 1]), False)
    for other in others:
        x, y = (x[:num] - x[:num][before].mean() for x in (other, up))
        scale = (x * y)[before].sum() / (x * x)[before].sum().clamp(min=TOLERANCE**2)
        if scale < 0 or near(scale * x, y) or not near((scale * x)[before], y[before]):
            return ""
    return _LAST
