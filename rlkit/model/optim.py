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

from rlkit.metrics import Metrics, mean
from rlkit.model.families import check_is_model
from rlkit.parallel.pipeline import sum_copies
from rlkit.ranks import distributed, reshard, world_size
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
    check_is_model(model)
    reshard(model)
    params = [p for p in model.parameters() if p.requires_grad]
    if not params:
        raise ValueError("model has no trainable parameter: is everything frozen?")
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, eps=eps, fused=True)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr


@torch.no_grad()
def optimizer_step(optimizer: torch.optim.Optimizer, *, max_norm: float, model: Any = None) -> Metrics:
    """Clip the accumulated gradients to a global L2 norm, take a step, and clear the gradients.

        g <- g * min(1, max_norm / (||g|| + 1e-6))

    With a non-finite norm the step is skipped: parameters and states do not change, and `skipped_step` is 1. All ranks,
    pipeline stages included, use the same bits of the norm, so they skip together.
    Returns `grad_norm` (before clipping) and `skipped_step`. A process on its own warns where no parameter has a
    gradient, as before the first `backward()`; among several ranks one may have none.

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
    if not grads and not distributed():
        warnings.warn(
            "optimizer_step: no parameter has a gradient, so nothing trains: call loss.backward() first, on a loss of "
            "the model whose parameters the optimizer holds",
            stacklevel=3,  # past `no_grad`
        )
    size = float(norm)
    finite = math.isfinite(size)
    if finite and grads:
        if size + 1e-6 > max_norm:  # a product with 1 would read and write all gradients for nothing
            torch._foreach_mul_([_local(g) for g in grads], max_norm / (size + 1e-6))
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {"grad_norm": mean(norm), "skipped_step": mean(0.0 if finite else 1.0)}


def _sum_copies(params: Sequence[Any], model: Any) -> Any:
    """Sum the gradients of a tied weight's two copies; return this stage's if the norm must leave it out."""
    sizes = [p.device_mesh.size() for p in params if hasattr(p, "device_mesh")]
    if model is None and sizes and max(sizes) < world_size():
        raise TypeError("optimizer_step on pipeline stages needs model=..., for a weight that two stages share")
    copies = getattr(model, "copies", None)
    if copies is None:
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
        kinds.setdefault((getattr(g, "device_mesh", None), getattr(g, "placements", ())), []).append(_local(g))
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


def _local(x: Any) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


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
