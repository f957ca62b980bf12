"""Reward models from preference pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from rlkit import losses
from rlkit.data.examples import Pair
from rlkit.data.order import Parts
from rlkit.loops.preference import check_pairs, pair_metrics, train_pairs
from rlkit.loops.supervised import Examples, Sets, every
from rlkit.metrics import Metrics, mean
from rlkit.model.families import check_is_model
from rlkit.model.forward import make_policy
from rlkit.model.heads import pack_whole, rewards
from rlkit.settings import Optim, Schedule
from rlkit.types import Batch


def reward_model(
    model: Any,
    tokenizer: Any,
    pairs: Sequence[Pair],
    schedule: Schedule,
    optim: Optim = Optim(lr=1e-5),
    *,
    loss: Callable[[Tensor, Tensor], Tensor] = partial(losses.bradley_terry, center_coef=0.01),
    batch_size: int = 64,
    eval_pairs: Sets[Pair] = (),
    parts: Parts = (),
) -> Path:
    """Train `model`, from `load_reward_model`, in place; returns the folder of the exported sequence classifier.

    The loss is the mean over a step's pairs of `loss(chosen reward, rejected reward)`, where the reward is the model's
    number at the last token of the response. The default also pulls the sum of the two towards 0, so that models of
    several runs are comparable.

    Logged: `accuracy`, `margin`, `chosen` and `rejected` (mean rewards). `rlkit.rewards.judge.remote_reward_model` uses
    a served export as a reward. A padding id that also ends the responses is removed from the config, because
    transformers would read the token before it.
    """
    check_is_model(model)
    check_pairs(pairs=pairs, eval_pairs=eval_pairs)
    config = model.config.get_text_config()
    if config.pad_token_id in {ids[-1] for pair in every(pairs) for ids in (pair.chosen, pair.rejected)}:
        config.pad_token_id = None

    dtype = make_policy(model, dtype=optim.dtype).dtype

    def pair_losses(micro: Batch) -> tuple[Tensor, Metrics]:
        numbers = rewards(model, micro, dtype=dtype)
        value = loss(numbers[0::2], numbers[1::2])
        return value, {"loss": mean(value), **pair_metrics(numbers)}

    data = Examples(pairs, batch_size, eval_pairs, parts=parts)
    return train_pairs(model, tokenizer, data, schedule, optim, pack=pack_whole, pair_losses=pair_losses, extra=2)
