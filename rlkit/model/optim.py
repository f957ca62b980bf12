"""One optimizer step with clipping, and learning-rate schedules as pure functions of the step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlkit._util.numbers import show
from rlkit._util.ranks import distributed, on_all_ranks, reshard, world_size
from rlkit.metrics import Metrics, mean
from rlkit.model.checkpoint import of_stages
from rlkit.model.families import check_is_model
from rlkit.model.sharding import own_part
from rlkit.parallel.pipeline import sum_copies
from rlkit.settings import Optim


def adamw(
    model: nn.Module,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> torch.optim.AdamW:
    """Fused AdamW over the trainable parameters, without weight decay on vectors (norms, biases).

    Parameters and states are fp32: under bf16 compute they are the master weights. Parameters that a forward left
    gathered are resharded first, because the optimizer must hold the shards.
    Reference: arXiv:1711.05101
    """
    groups = parameter_groups(model, weight_decay=weight_decay)
    _check_numbers(lr=lr, eps=eps)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


def parameter_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters in two groups, matrices and, without weight decay, vectors (norms, biases).

    All pipeline stages have the same groups, so one that is empty here may have members on another stage.
    """
    check_is_model(model)
    _check_numbers(weight_decay=weight_decay)
    reshard(model)
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if not (groups := _held(groups, model)):
        raise ValueError("model has no trainable parameter: is everything frozen?")
    return groups


def _held(groups: list[dict[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
    """The groups that have members on any pipeline stage: a checkpoint holds one list of groups for all stages."""
    stages = of_stages(model, [len(group["params"]) for group in groups])
    return [group for group, *sizes in zip(groups, *stages, strict=True) if any(sizes)]


def _check_numbers(**values: Any) -> None:
    """TypeError for a value that is no number, such as text of a YAML file, where 1e-5 is text; ValueError for `lr`."""
    for name, x in values.items():
        if not isinstance(x, Tensor | float | int):
            raise TypeError(f"{name} must be a number, got {show(x)}" + f"; use float({name})" * isinstance(x, str))
        if name == "lr" and not isinstance(x, Tensor) and not 0 <= x <= 1:
            raise ValueError(f"lr must be from 0 to 1, got {x}; 1e-6 to 1e-4 is usual for AdamW")


def make_optimizer(model: nn.Module, optim: Optim, *, lr: float) -> torch.optim.Optimizer:
    """The optimizer of the settings over the trainable parameters: `adamw`, `muon`, or that of a function of the user.

    The function gets `parameter_groups`. Its learning rate is set before each step, the same for all groups.

    Errors: ValueError for an optimizer that lacks a trainable parameter, and for one that is NaN or infinite; those of
    `muon` and `check_optimizer`.
    """
    if broken := broken_weights(model):
        raise ValueError(f"the model's weights are damaged, NaN or infinite: {broken}; copy or download it again")
    if optim.make_optimizer is None:
        return (muon if optim.optimizer == "muon" else adamw)(model, lr=lr, weight_decay=optim.weight_decay)
    optimizer = check_optimizer(optim.make_optimizer(parameter_groups(model, weight_decay=optim.weight_decay)))
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if missing := [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]:
        fault = f"`optimizer` {optim.optimizer} lacks {len(missing)} trainable parameters, such as {missing[0]}"
        raise ValueError(f"{fault}: pass all groups on")
    set_lr(optimizer, lr)
    return optimizer


def broken_weights(model: nn.Module) -> str:
    """How many trainable parameters hold NaN or infinities on any rank, and the name of one; "" for none."""
    trained = [(name, p.detach()) for name, p in model.named_parameters() if p.requires_grad and not p.is_meta]
    broken = on_all_ranks(lambda: [name for name, p in trained if not own_part(p).isfinite().all()])
    names = sorted({name for of_rank in broken for name in of_rank})
    return f"{len(names)} of {len(trained)} tensors, such as {names[0]}" if names else ""


def check_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """TypeError for what a function of the user returned, if it is no optimizer of torch."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        fault = f"must return a torch.optim.Optimizer, got {type(optimizer).__name__}"
        raise TypeError(f"`optimizer`: the function {fault}; as in def make(groups): return torch.optim.SGD(groups)")
    return optimizer


def muon(model: nn.Module, *, lr: float, weight_decay: float = 0.0) -> torch.optim.Optimizer:
    """Muon over the matrices of hidden layers, AdamW over embeddings, the head, vectors and stacked experts.

    Muon's update is the orthogonalized momentum, scaled by 0.2 sqrt(max(rows, columns)): its root mean square is that
    of AdamW's, so both take one learning rate. On several ranks each keeps the momentum of its shards, and
    orthogonalizes a share of the whole matrices.
    Reference: torch.optim.Muon; arXiv:2502.16982, eq. 4
    """
    of_ends = {id(p) for m in model.modules() for p in m.parameters(recurse=False) if isinstance(m, nn.Embedding)}
    # by name, too: the last pipeline stage's copy of a tied weight is in no nn.Embedding
    ends = {"embed_tokens", "lm_head", "score"}
    of_ends |= {id(p) for name, p in model.named_parameters() if ends & {*name.split(".")[-2:-1]}}
    hidden, others = [], []
    _check_numbers(lr=lr)
    for group in parameter_groups(model, weight_decay=weight_decay):
        inside = [p for p in group["params"] if p.ndim == 2 and id(p) not in of_ends]
        rest = [p for p in group["params"] if p.ndim != 2 or id(p) in of_ends]
        hidden.append({**group, "params": inside})
        others.append({**group, "params": rest})
    hidden, others = _held(hidden, model), _held(others, model)
    parts: list[torch.optim.Optimizer] = []
    if hidden:
        cut = any(hasattr(p, "placements") for group in hidden for p in group["params"])
        parts.append((_CutMuon if cut else torch.optim.Muon)(hidden, lr=lr, adjust_lr_fn="match_rms_adamw"))
    if others:
        parts.append(torch.optim.AdamW(others, lr=lr, fused=True))
    return _Joined(parts)


class _CutMuon(torch.optim.Muon):
    """torch's Muon over DTensors: the same update, and the same state, sharded as the parameters."""

    @torch.no_grad()
    def step(self, _: Any = None) -> None:  # type: ignore[override]
        """All matrices of one shape and sharding are orthogonalized together."""
        for group in self.param_groups:
            lr, alike = float(group["lr"]), dict[Any, list[tuple[Any, Tensor]]]()
            for p in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p.grad))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                update = own_part(p.grad).lerp(own_part(momentum), group["momentum"])
                alike.setdefault((p.shape, p.device_mesh, p.placements), []).append((p, update.bfloat16()))
            for (shape, *_), members in alike.items():
                params, updates = zip(*members, strict=True)
                for p, update in zip(params, _orthogonal(updates, like=params[0], group=group), strict=True):
                    own_part(p).mul_(1 - lr * group["weight_decay"])
                    own_part(p).add_(update.to(p.device), alpha=-0.2 * math.sqrt(max(shape)) * lr)


def _orthogonal(shards: Sequence[Tensor], *, like: Any, group: dict[str, Any]) -> Sequence[Tensor]:
    """This rank's shards of N matrices, each placed as `like` -> its shards of the orthogonalized matrices.

    All ranks of the mesh call it together. They exchange the stack [rows, columns, N] in bf16, which is cut along N in
    between: each holds and multiplies its share of the whole matrices.
    """
    from torch.distributed.tensor import DTensor, Shard
    from torch.optim._muon import _zeropower_via_newtonschulz

    mesh, size = like.device_mesh, torch.Size((*like.shape, len(shards)))
    form: dict[str, Any] = {"run_check": False, "shape": size, "stride": torch.empty(size, device="meta").stride()}
    stack = torch.stack([*shards], dim=2).to(mesh.device_type)
    whole = DTensor.from_local(stack, mesh, like.placements, **form).redistribute(placements=[Shard(2)] * mesh.ndim)
    share, constants = whole.to_local(), (group["ns_coefficients"], group["ns_steps"], group["eps"])
    for x in share.unbind(2):
        x.copy_(_zeropower_via_newtonschulz(x.clone(memory_format=torch.contiguous_format), *constants))
    back = DTensor.from_local(share, mesh, whole.placements, **form).redistribute(placements=like.placements)
    return back.to_local().unbind(2)


class _Joined(torch.optim.Optimizer):
    """Several optimizers as one, with the groups and the state of all."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._parts, self._counts = parts, [len(part.param_groups) for part in parts]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """A step of each; groups and state may have been loaded since the last one."""
        left = list(self.param_groups)
        for part, count in zip(self._parts, self._counts, strict=True):
            part.param_groups, left = left[:count], left[count:]
            part.state = self.state
            part.step(closure)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups, in place where it is a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


@torch.no_grad()
def optimizer_step(optimizer: torch.optim.Optimizer, *, max_norm: float, model: Any = None) -> Metrics:
    """Clip the accumulated gradients to a global L2 norm, take a step, and clear the gradients.

        g <- g * min(1, max_norm / (||g|| + 1e-6))

    With a non-finite norm the step is skipped: parameters and states do not change, and `skipped_step` is 1. All ranks,
    pipeline stages included, use the same bits of the norm, so they skip together.
    Returns `grad_norm` (before clipping) and `skipped_step`. A process on its own warns where no parameter has a
    gradient, as before the first `backward()`; among several ranks one may have none. Without `model`, as in a loop of
    your own, it also warns where all gradients of the first step are exactly 0.

    `model` is that of the parameters. Pipeline stages need it: two of them may hold a copy of a tied weight, whose
    gradients are summed first.

    Errors: ValueError for `max_norm <= 0`. In other libraries 0 turns clipping off; here `math.inf` does.
    TypeError without `model` on pipeline stages.
    """
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"optimizer must be an optimizer, e.g. adamw(model, lr=1e-6), got a {type(optimizer).__name__}")
    if not max_norm > 0:
        raise ValueError(f"max_norm must be above 0, got {max_norm}: inf clips nothing, 0 would train nothing")
    params = [p for group in optimizer.param_groups for p in group["params"]]
    copy = _sum_copies(params, model)
    norm = global_norm([p.grad for p in params if p.grad is not None and p is not copy])
    grads = [p.grad for p in params if p.grad is not None]
    if not grads and world_size() == 1:
        warnings.warn(
            "optimizer_step: no parameter has a gradient, so nothing trains: call loss.backward() first, on a loss of "
            "the model whose parameters the optimizer holds",
            stacklevel=3,  # past `no_grad`
        )
    size = float(norm)
    if grads and size == 0 and model is None and not optimizer.state and world_size() == 1:
        warnings.warn(
            "optimizer_step: every gradient is exactly 0, so nothing trains in this first step: either all advantages "
            "are 0 (equal rewards in each group, or groups of one: group_ids), or the loss does not depend on the "
            "model (old log-probs need .detach())",
            stacklevel=3,
        )
    finite = math.isfinite(size)
    if finite and grads:
        if size + 1e-6 > max_norm:  # a product with 1 would read and write all gradients for nothing
            torch._foreach_mul_([own_part(g) for g in grads], max_norm / (size + 1e-6))
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {"grad_norm": mean(norm), "skipped_step": mean(0.0 if finite else 1.0)}


def _sum_copies(params: Sequence[Any], model: Any) -> Any:
    """Sum the gradients of a tied weight's two copies; return this stage's if the norm must leave it out."""
    sizes = [p.device_mesh.size() for p in params if hasattr(p, "device_mesh")]
    if model is None and sizes and max(sizes) < world_size():
        raise TypeError("optimizer_step on pipeline stages needs model=..., for a weight that two stages share")
    if (copies := getattr(model, "copies", None)) is None:
        return None
    reshard(model)  # the optimizer holds the shards
    weight = model.base_model.embed_tokens.weight
    if not any(p is weight for p in params):
        return None
    sum_copies(weight, copies)
    return weight if copies.rank() > 0 else None


def global_norm(grads: Sequence[Tensor]) -> Tensor:
    """The L2 norm over all gradients, each counted once however it is sharded or replicated; identical on all ranks.

    Differs: `clip_grad_norm_` fails where some gradients are plain and some DTensors, or on several meshes (tensor
    parallel with FSDP, expert parallel). Here the squares are summed per (mesh, placements), over the ranks that hold
    different shards. Ranks outside the meshes of a rank's gradients are other pipeline stages, with other parameters.
    """
    kinds: dict[Any, list[Tensor]] = {}
    for g in grads:
        kinds.setdefault((getattr(g, "device_mesh", None), getattr(g, "placements", ())), []).append(own_part(g))
    total = torch.zeros((), device=grads[0].device if grads else None)
    for (mesh, placements), parts in kinds.items():
        square = torch.nn.utils.get_total_norm(parts).square().to(total)
        for dim, placement in enumerate(placements):
            if not placement.is_replicate():
                dist.all_reduce(square, group=mesh.get_group(dim))
        total += square
    if not distributed():
        return total.sqrt()
    copies = max((mesh.size() for mesh, _ in kinds if mesh is not None), default=dist.get_world_size())
    total /= copies
    dist.all_reduce(total)
    return total.sqrt()


def constant_lr(step: int, *, lr: float, warmup_steps: int = 0) -> float:
    """Linear warm-up, then constant: lr * min(1, (step + 1) / warmup_steps), so step 0 trains at lr / warmup_steps."""
    return lr * min(1.0, (step + 1) / max(1, warmup_steps))


def linear_lr(step: int, *, lr: float, num_steps: int, warmup_steps: int = 0) -> float:
    """Linear warm-up, then linear decay that reaches 0 at step `num_steps`, the one after the last."""
    left = (num_steps - step) / max(1, num_steps - warmup_steps)
    return min(constant_lr(step, lr=lr, warmup_steps=warmup_steps), lr * max(0.0, left))


def cosine_lr(step: int, *, lr: float, num_steps: int, warmup_steps: int = 0, floor: float = 0.0) -> float:
    """Linear warm-up, then half a cosine from `lr` to `floor * lr` at `num_steps`. Reference: arXiv:1608.03983"""
    done = min(1.0, max(0.0, (step - warmup_steps) / max(1, num_steps - warmup_steps)))
    cosine = lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))
    return min(constant_lr(step, lr=lr, warmup_steps=warmup_steps), cosine)


def schedule(name: str, *, lr: float, num_steps: int, warmup_steps: int = 0) -> Callable[[int], float]:
    """The schedule of that name, `constant`, `linear` or `cosine`, as a function of the step."""
    if name == "constant":
        return partial(constant_lr, lr=lr, warmup_steps=warmup_steps)
    falling = {"linear": linear_lr, "cosine": cosine_lr}
    if name not in falling:
        raise ValueError(f"schedule {name!r} is unknown: choose constant, linear or cosine")
    return partial(falling[name], lr=lr, num_steps=num_steps, warmup_steps=warmup_steps)


def learning_rate(optim: Optim, *, num_steps: int) -> Callable[[int], float]:
    """The learning rate as a function of the step, in a run of `num_steps` steps."""
    if optim.lr_at is not None:
        return optim.lr_at
    return schedule(optim.lr_schedule, lr=optim.lr, num_steps=num_steps, warmup_steps=optim.warmup_steps)
