"""verl's functions on padded batches, and the same batches packed for rlkit."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import torch
from torch import Tensor

from rlkit.packing import from_padded

if importlib.util.find_spec("ray") is None:  # verl imports it at its top; nothing that is called here uses it
    sys.modules["ray"] = MagicMock(__version__="2.47.0")

from verl.trainer.config import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.utils import torch_functional
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

__all__ = ["Draw", "Row", "core_algos", "rollout_corr_helper", "torch_functional", "verl_policy"]

GROUPS, LONGEST, VOCAB = (2, 3, 5, 2, 4), 12, 20
SEQS = sum(GROUPS)
EPS8 = 1e-6  # tolerance where verl adds 1e-8 to a count, a variance or a length


class Row(NamedTuple):
    """One comparison: verl's result, ours, and the leaf of their gradients."""

    name: str
    verl: Tensor
    ours: Tensor
    leaf: Tensor | None = None
    note: str = ""
    tol: float = 1e-9
    value: bool = True


class Draw:
    """One ragged batch: padded `[B, L]` as verl takes it, with `pack` for the same tensor as rlkit takes it.

    `real` is True at tokens, `mask` at trainable ones: about a third of the tokens are gaps (tool output), which hold
    random numbers, not zeros. No group is a singleton and no sequence without a trainable token.
    """

    def __init__(self, seed: int) -> None:
        self.rng = torch.Generator().manual_seed(seed)
        lens = torch.randint(1, LONGEST + 1, (SEQS,), generator=self.rng)
        lens[0] = LONGEST
        position = torch.arange(LONGEST)
        self.real = position < lens[:, None]
        anywhere = (torch.rand(SEQS, generator=self.rng) * lens).long()[:, None]
        self.mask = self.real & ((self.rand() > 0.35) | (position == anywhere))
        ids = torch.arange(len(GROUPS)).repeat_interleave(torch.tensor(GROUPS))
        self.group_ids = ids[torch.randperm(SEQS, generator=self.rng)]
        self.index = self.group_ids.numpy()
        logits = self.randn(VOCAB) * 1.5
        self.logits = logits.clone().requires_grad_()
        self.logp = logits.log_softmax(-1)[..., 0].clone().requires_grad_()
        self.sum_pi_squared = logits.softmax(-1).square().sum(-1)
        self.old_logp = (self.logp.detach() - 0.4 * self.randn()).clamp(max=-1e-3)
        self.ref_logp = self.logp.detach() - 0.5 * self.randn()
        self.token_advantages = self.randn()
        self.advantages = self.randn()[:, :1].expand(-1, LONGEST)
        self.scores = torch.randn(SEQS, generator=self.rng)
        self.cu_seqlens = from_padded(padding_mask=self.real).cu_seqlens
        self.flat: dict[str, Tensor] = {"mask": self.pack(self.mask), "cu_seqlens": self.cu_seqlens}

    def randn(self, *more: int) -> Tensor:
        """Normal numbers `[B, L, ...]`."""
        return torch.randn(SEQS, LONGEST, *more, generator=self.rng)

    def rand(self) -> Tensor:
        """Uniform numbers `[B, L]`."""
        return torch.rand(SEQS, LONGEST, generator=self.rng)

    def pack(self, x: Tensor) -> Tensor:
        """A padded tensor as rlkit takes it, with its gradient."""
        return from_padded(x, padding_mask=self.real).streams[0]

    def at_actions(self, x: Tensor) -> Tensor:
        """A padded tensor, packed, with zeros at the gaps: what rlkit's outputs are to equal."""
        return torch.where(self.flat["mask"], self.pack(x), 0)

    def terminal(self, scores: Tensor) -> Tensor:
        """`[B]` rewards on the last trainable token, as `[B, L]` token rewards."""
        last = LONGEST - 1 - self.mask.flip(1).int().argmax(1)
        return torch.zeros(SEQS, LONGEST).scatter(1, last[:, None], scores[:, None])

    def verl(self, name: str, rewards: Tensor | None = None, **options: Any) -> Tensor:
        """Advantages of the estimator that verl registers under `name`, packed, 0 at the gaps."""
        rewards = self.terminal(self.scores) if rewards is None else rewards
        inputs = {"token_level_rewards": rewards, "response_mask": self.mask.double(), "index": self.index}
        return self.at_actions(core_algos.get_adv_estimator_fn(name)(**(inputs | options))[0])


def verl_policy(
    draw: Draw,
    name: str,
    advantages: Tensor,
    *,
    agg: str = "token-mean",
    weights: Tensor | None = None,
    correction: dict[str, Any] | None = None,
    policy_loss: dict[str, Any] | None = None,
    **options: Any,
) -> Tensor:
    """The batch loss that verl registers under `name`, from its own ActorConfig."""
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(
            **(policy_loss or {}), rollout_correction=RolloutCorrectionConfig(**(correction or {}))
        ),
        **({"clip_ratio_low": 0.2, "clip_ratio_high": 0.28} | options),
    )
    loss = core_algos.get_policy_loss_fn(name)
    mask = draw.mask.double()
    return loss(draw.old_logp, draw.logp, advantages, mask, agg, config, rollout_is_weights=weights)[0]
