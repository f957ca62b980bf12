"""Reward models from preference pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from rlkit import losses
from rlkit.data.examples import Pair
from rlkit.loops.preference import pair_metrics, train_pairs
from rlkit.metrics import Metrics, mean
from rlkit.model.heads import pack_whole, rewards
from rlkit.types import Batch


def reward_model(
    model: Any,
    tokenizer: Any,
    pairs: Sequence[Pair],
    *,
    folder: Path,
    steps: int,
    lr_at: Callable[[int], float],
    loss: Callable[[Tensor, Tensor], Tensor] = partial(losses.bradley_terry, center_coef=0.01),
    batch_size: int = 64,
    weight_decay: float = 0.0,
    max_norm: float = 1.0,
    max_tokens: int = 16384,
    dtype: str = "fp32",
    eval_pairs: Sequence[Pair] = (),
    eval_steps: int = 0,
    print_steps: int = 1,
    save_steps: int = 0,
    keep: int = 2,
    seed: int = 0,
    resume: bool = False,
) -> Path:
    """Train `model`, from `load_reward_model`, in place; returns the folder of the exported sequence classifier.

    The loss is the mean over a step's pairs of `loss(chosen reward, rejected reward)`; a reward is read at the last
    token of the response. The default pulls the rewards towards 0, so that models of several runs are comparable.

    Logged: `accuracy`, `margin`, `chosen` and `rejected` (mean rewards). A served export is a reward by
    `rlkit.rewards.judge.remote_reward_model`. A padding id that also ends the responses is taken out of its config:
    transformers would not read the token that was trained on.
    """
    if model.config.pad_token_id in {ids[-1] for pair in pairs for ids in (pair.chosen, pair.rejected)}:
        model.config.pad_token_id = None

    def pair_losses(micro: Batch) -> tuple[Tensor, Metrics]:
        numbers = rewards(model, micro, dtype=dtype)
        value = loss(numbers[0::2], numbers[1::2])
        return value, {"loss": mean(value), **pair_metrics(numbers)}

    return train_pairs(
        model, tokenizer, pairs, pack=pack_whole, pair_losses=pair_losses, folder=folder, steps=steps, lr_at=lr_at,
        batch_size=batch_size, weight_decay=weight_decay, max_norm=max_norm, max_tokens=max_tokens,
        eval_pairs=eval_pairs, eval_steps=eval_steps, print_steps=print_steps, save_steps=save_steps, keep=keep,
        seed=seed, resume=resume,
    )  # fmt: skip
