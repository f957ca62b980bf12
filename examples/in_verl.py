"""rlkit's surrogates and group baselines in verl's registries.

    VERL_USE_EXTERNAL_MODULES=in_verl python3 -m verl.trainer.main_ppo \
        actor_rollout_ref.actor.policy_loss.loss_mode=rlkit_cispo algorithm.adv_estimator=rlkit_leave_one_out ...

verl 0.9.1 imports the modules of VERL_USE_EXTERNAL_MODULES in every process (verl/__init__.py), and looks both names up in
the registries of verl/trainer/ppo/core_algos.py. Every Ray node needs the variable, and this file on PYTHONPATH. The
rest stays verl's: aggregation over the step's batch, KL, entropy and rollout correction.

    python examples/in_verl.py                                  the registered losses on a small batch, beside verl's own
"""

import argparse
import sys
from functools import partial
from importlib.util import find_spec

if __name__ == "__main__":  # before verl is imported
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if find_spec("verl") is None:
        sys.exit("error: verl is not installed here: docs/own-trainer.md has the command")

import numpy as np
import torch
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, register_adv_est, register_policy_loss

from rlkit import advantages, losses

BASELINES = ["group_centered", "group_mean_batch_std", "group_zscore", "leave_one_out", "max_rl", "gpg"]


def dual_clip(config):
    """verl's default loss: its clip distances, and the dual clip."""
    low, high = (config.clip_ratio if x is None else x for x in (config.clip_ratio_low, config.clip_ratio_high))
    return partial(losses.dual_clip, clip_low=low, clip_high=high, clip_c=config.get("clip_ratio_c", 3.0))


SURROGATES = {  # name: the surrogate for this `actor` config
    "dual_clip": dual_clip,
    "cispo": lambda _: losses.cispo,
    "sapo": lambda _: losses.sapo,
    "topr": lambda _: losses.topr,
    "aspo": lambda _: losses.aspo,
}


def policy_loss(surrogate):
    """A policy loss of verl from `surrogate(config)(log_ratio, advantages, *, mask)`; all tensors are [B, L]."""

    def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None,
             rollout_is_weights=None):  # fmt: skip
        mask = response_mask.bool()
        token_loss = surrogate(config)(log_prob - old_log_prob, advantages, mask=mask)
        if rollout_is_weights is not None:
            token_loss = token_loss * rollout_is_weights
        total = agg_loss(token_loss, response_mask, loss_agg_mode, **config.global_batch_info)
        drift = (old_log_prob - log_prob).detach()[mask].mean()
        return total, {"actor/ppo_kl": drift.item()}

    return loss


def adv_estimator(baseline):
    """An advantage estimator of verl from `baseline(rewards, *, group_ids)`."""

    def estimate(token_level_rewards, response_mask, index, **_):
        group_ids = torch.as_tensor(np.unique(index, return_inverse=True)[1], device=token_level_rewards.device)
        per_sequence = baseline(token_level_rewards.sum(1), group_ids=group_ids)  # [B]
        advantages = per_sequence.unsqueeze(1) * response_mask  # [B, L]
        return advantages, advantages

    return estimate


for name, surrogate in SURROGATES.items():
    register_policy_loss(f"rlkit_{name}")(policy_loss(surrogate))
for name in BASELINES:
    register_adv_est(f"rlkit_{name}")(adv_estimator(getattr(advantages, name)))


def main():
    from verl.workers.config import FSDPActorConfig

    config = FSDPActorConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1, rollout_n=2)
    rng = torch.Generator().manual_seed(0)
    old, now, advantage = (torch.randn(4, 6, generator=rng) for _ in range(3))
    mask = torch.arange(6) < torch.tensor([[6], [2], [5], [3]])
    for name in ("vanilla", *(f"rlkit_{name}" for name in SURROGATES)):
        loss, _ = get_policy_loss_fn(name)(old, now, advantage, mask, config=config)
        print(f"{name:20s} {loss.item():.6f}")


if __name__ == "__main__":
    main()
