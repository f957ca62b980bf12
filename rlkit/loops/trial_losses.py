"""Call a loss of pairs, of labels or of distributions, or an estimator of the KL, before a model is loaded.

They are functions of plain tensors, and tried on a few numbers. `rlkit.loops.trial` is for functions of a batch.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkit.loops.trial import TOLERANCE, failure, near, slopes, wrong_loss
from rlkit.rewards.failures import name_of

_log = logging.getLogger("rlkit.losses")
_SUMMED = (
    "weighs each token by its probability, as in a sum over the vocabulary, and sampled tokens have that weight "
    "already: leave the factor out, as k1 = logp - ref_logp does"
)


def try_pair_loss(function: Callable[..., Any]) -> None:
    """Call a loss of pairs, `function(chosen, rejected)`, of log-ratios or scores `[N]`.

    ValueError for one that fails or gives no finite loss per pair with a gradient, or that names the two the other way
    round. Logged: one that rises with the margin, or does not fall with it; that has no gradient for one of the two; or
    that falls as the rejected response becomes likelier. A loss may do so where margins are small or large, but not at
    both: discopop rises around 0.
    """
    _refuse_swapped(function, "chosen", "rejected")
    faults: list[str] = []
    for size in (0.3, 15.0):
        chosen, rejected = (torch.linspace(-x, x, 6).requires_grad_() for x in (size, -size))
        loss = function(chosen, rejected) if faults else _called(function, chosen, rejected)
        faults.append(_of_pairs(*slopes(loss, chosen, rejected)))
    if all(faults):
        _log.warning("%s %s", name_of(function), faults[0])


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
    depend on the labels; that falls as responses that are not desirable become likelier; or where a larger `kl`, from
    which log-ratios are measured, makes desirable responses better, or others worse.
    """
    x, desirable = torch.linspace(-0.3, 0.3, 6).requires_grad_(), torch.tensor([True, False] * 3)
    losses = [
        _called(function, x, labels, kl=torch.tensor(kl), **options)
        for labels, kl in ((desirable, 0.0), (~desirable, 0.0), (desirable, 0.1))
    ]
    slope, flipped, _ = (slopes(loss, x)[0] for loss in losses)
    further = (losses[2] - losses[0]).detach() / 0.1
    up, down, least = slope[desirable].sum(), slope[~desirable].sum(), 1e-3 * slope.abs().sum()
    adds_kl = further[desirable].sum() < -least or further[~desirable].sum() > least
    _log_first(function, {
        "has the same gradient for desirable and other responses: it ignores `desirable`": torch.equal(slope, flipped),
        "rises with the log-ratio of desirable responses": up - down > least,
        "falls as the log-ratio of responses that are not desirable rises": down < -least,
        "takes log-ratios from -kl on: it adds `kl`, which is to be subtracted from a log-ratio": adds_kl,
    })  # fmt: skip


def _log_first(function: Callable[..., Any], faults: Mapping[str, bool | Tensor]) -> None:
    """Log the first of the faults that a function has."""
    if fault := next((fault for fault, broken in faults.items() if broken), ""):
        _log.warning("%s %s", name_of(function), fault)


def try_divergence(function: Callable[..., Any]) -> None:
    """Check a divergence of student and teacher, `function(log_q, log_p)` of log-probs `[.., V]`, in the same way.

    Logged: one that is larger where the two are equal, or a mean over the vocabulary.
    """
    _refuse_swapped(function, "student", "teacher")
    logits = torch.sin(torch.arange(1.0, 41.0)).view(5, 8)
    log_q, log_p = logits.log_softmax(1).requires_grad_(), (2 * logits.flip(0)).log_softmax(1)
    loss = _called(function, log_q, log_p)
    with torch.no_grad():
        least = function(log_p, log_p)
    if float(loss.detach().sum()) < float(least.sum()) - TOLERANCE:
        _log.warning("%s is larger where the student is the teacher than elsewhere", name_of(function))
        return
    with torch.no_grad():  # as many tokens of no probability
        loss, wide = function(log_q, log_p), function(*(torch.cat([x, x * 0 - 60], 1) for x in (log_q, log_p)))
    if near(2 * wide, loss) and not near(wide, loss):
        _log.warning("%s averages over the vocabulary, where a divergence is the sum over it", name_of(function))


def try_kl(function: Callable[..., Any], *, place: str = "loss") -> None:
    """Check an estimator of KL(policy || reference), `function(logp, ref_logp)` of sampled tokens, in the same way.

    `place` is that of `Penalties.kl_in`. Expectations over the policy's tokens are exact, on two small vocabularies.
    ValueError in the loss for one whose expected gradient is 0, as that of k1, or points away from the reference in
    both directions of the KL. Logged, and of these the first: one whose value at a token depends on others; that is not
    0 where the two are equal; whose mean is negative; whose values sum to the KL over the vocabulary, as if no token
    had been sampled; that depends on the difference of the probabilities; whose mean is the KL with its arguments
    exchanged; and outside the loss, whose mean is 0. The forms of `rlkit.losses`, biased or not, pass.
    """
    _refuse_swapped(function, "policy", "ref")
    name, at = name_of(function), torch.arange(1.0, 9.0)
    pairs = [(torch.sin(at), 2 * torch.sin(at).flip(0)), (torch.sin(at), torch.sin(at) + 0.2 * torch.cos(2 * at))]
    numbers = [_kl_numbers(function, *pair, place=place) for pair in pairs]
    logp, ref_logp = (x.detach().log_softmax(0) for x in pairs[0])
    called = partial(_called, function, graded=False)
    equal, whole = called(logp, logp.clone()), called(logp, ref_logp)
    parts = [called(*(x.clone() for x in pair)) for pair in zip(logp.split(2), ref_logp.split(2), strict=True)]
    coupled = not near(whole, torch.cat(parts))
    more = [(x.exp() + 0.1).log() for x in (logp, ref_logp)]
    if all(x.flat for x in numbers) and not coupled:
        fix = "use the form of k2 or of unbiased, or `kl_in` reward"
        raise ValueError(f"{name} in the loss has gradient 0 on average, as k1 does: {fix}")
    if all(x.climbs for x in numbers) and not coupled:
        raise ValueError(f"{name} in the loss pushes the policy away from the reference: is its sign right?")
    of_probs = not near(called(logp - 0.5, ref_logp - 0.5), whole) and near(called(*more), whole)
    flat = place != "loss" and all(abs(x.mean) < TOLERANCE for x in numbers)
    _log_first(function, {
        "gives a token a value that depends on the other tokens of the batch (law additive)": coupled,
        "is not 0 where policy and reference are equal": float(equal.abs().max()) > TOLERANCE,
        "has a negative mean over samples of the policy: is its sign right?": numbers[0].mean < -TOLERANCE,
        _SUMMED: all(x.summed for x in numbers),
        "depends on the difference of the probabilities: it gets log-probs, and is to take their difference": of_probs,
        "is an estimator of the KL with logp and ref_logp exchanged": all(x.exchanged for x in numbers),
        "has mean 0 over samples of the policy, whatever the reference: it does not measure the KL": flat,
    })  # fmt: skip


class _Kl(NamedTuple):
    """Of an estimator on a small vocabulary: the mean, and what is wrong (see `try_kl`)."""

    mean: float
    flat: bool
    climbs: bool
    summed: bool
    exchanged: bool


def _kl_numbers(function: Callable[..., Any], logits: Tensor, ref_logits: Tensor, *, place: str) -> _Kl:
    logits, ref_logp = logits.requires_grad_(), ref_logits.log_softmax(0)
    logp = logits.log_softmax(0)
    p = logp.detach().exp()
    values = _called(function, logp, ref_logp, graded=place == "loss")
    ours = (logp.exp() * (logp - ref_logp)).sum()
    theirs = (ref_logp.exp() * (ref_logp - logp)).sum()
    flat = climbs = False
    if place == "loss":
        each, slope, *true = (
            torch.autograd.grad(x.sum(), at, retain_graph=True)[0]
            for x, at in ((values, logp), (p * values, logits), (ours, logits), (theirs, logits))
        )
        flat = bool(slope.abs().max() <= TOLERANCE * (p * each.abs()).sum())
        climbs = not flat and all(bool((slope * x).sum() < 0) for x in true)
    exact = [x.detach() for x in (ours, theirs, ours + theirs)]
    with torch.no_grad():
        mean, other = (p * values).sum(), (p * function(ref_logp, logp.detach())).sum()
    unbiased = any(near(mean, x) for x in exact)
    summed = not unbiased and any(near(values.detach().sum(), x) for x in exact)
    return _Kl(float(mean), flat, climbs, summed, not unbiased and near(other, exact[0]))


def _refuse_swapped(function: Callable[..., Any], first: str, second: str) -> None:
    """Refuse (ValueError) a function whose first parameter is named as what it gets second, or the other way round."""
    try:
        names = [*inspect.signature(function).parameters][:2]
    except (TypeError, ValueError):  # of C
        return
    if second in names[0].lower() or first in names[-1].lower():
        raise ValueError(f"{name_of(function)} gets ({first}, {second}) in this order, and names them {names}")


def _called(function: Callable[..., Any], *tensors: Tensor, graded: bool = True, **options: Any) -> Tensor:
    """The loss of each entry of the first argument's first axis; ValueError for anything else.

    With `graded`, it has a gradient with respect to that.
    """
    name, copies = name_of(function), [x.detach().clone() for x in tensors]
    try:
        with torch.enable_grad():
            loss = function(*tensors, **options)
    except Exception as error:
        raise failure(function, error, "failed") from error
    if not all(map(torch.equal, copies, tensors)):
        raise ValueError(f"{name}: it changes its arguments in place, which others read: work on a copy")
    if fault := wrong_loss(loss, tensors[0].shape[:1], graded=graded):
        raise ValueError(f"{name}: {fault}")
    if not bool(loss.isfinite().all()):
        raise ValueError(f"{name}: its loss is NaN or infinite")
    return loss
