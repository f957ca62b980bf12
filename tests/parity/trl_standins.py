"""TRL's trainer methods, callable without a trainer: stand-ins for it and for a model's outputs, on random batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import DPOTrainer, KTOTrainer, RewardTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.gold.gold_trainer import ULDLoss
from trl.experimental.iw_opd import IWOPDTrainer
from trl.experimental.orpo import ORPOTrainer

from rlkit.segments import cumulative, mean_per_seq, sum_per_seq

PAIRS, PROMPT, LONGEST, VOCAB = 16, 3, 11, 30


class Same:
    """An accelerator of one process."""

    device = torch.device("cpu")

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        return lambda x: x


class Model(torch.nn.Module):
    """Stands in for a language model: answers every call with the outputs it was given."""

    is_gradient_checkpointing = False

    def __init__(self, log_probs: Tensor, log_sum_sq: Tensor | None = None) -> None:
        super().__init__()
        zeros = torch.zeros_like(log_probs)
        self.outputs = SimpleNamespace(
            log_probs=log_probs, log_sum_sq_probs=log_sum_sq, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
        )

    def forward(self, **_: Any) -> SimpleNamespace:
        return self.outputs


class Draw:
    """One ragged batch, in TRL's padded layout ([chosen; rejected], prompts first) and packed for rlkit."""

    def __init__(self, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        lens = torch.randint(1, LONGEST + 1, (2 * PAIRS,), generator=rng)
        position = torch.arange(PROMPT + LONGEST)
        self.completion_mask = ((position >= PROMPT) & (position < PROMPT + lens[:, None])).long()
        kept = self.completion_mask[:, 1:].bool()
        logits, ref_logits = torch.randn(2, *kept.shape, VOCAB, dtype=torch.float64, generator=rng) * 1.5
        log_probs = logits.log_softmax(-1)
        self.leaf = log_probs[..., 0].clone().requires_grad_()
        self.logp = torch.where(kept, self.leaf, 0.0)  # as TRL's fused head gives it: 0 at ignored labels
        self.ref_logp = torch.where(kept, ref_logits.log_softmax(-1)[..., 0], 0.0)
        self.log_sum_sq = torch.logsumexp(2 * log_probs, -1)
        self.kept, self.lens = kept, lens
        self.flat = {"mask": kept.flatten(), "cu_seqlens": cumulative(torch.full((2 * PAIRS,), kept.shape[1]))}

    def total(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Sums over completion tokens, (chosen, rejected)."""
        return sum_per_seq(x.flatten(), **self.flat).chunk(2)

    def mean(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Means over completion tokens, (chosen, rejected)."""
        return mean_per_seq(x.flatten(), **self.flat).chunk(2)


def trl_dpo(draw: Draw, **options: Any) -> Tensor:
    """DPOTrainer._compute_loss with the given `loss_type` and options, at beta 0.1."""
    defaults = {
        "loss_types": ["sigmoid"],
        "beta": 0.1,
        "ld_alpha": None,
        "f_divergence_type": "reverse_kl",
        "f_alpha_divergence_coef": 0.5,
        "label_smoothing": 0.0,
        "use_weighting": False,
    }
    settings = defaults | options
    logp, ref, sq = draw.logp, draw.ref_logp, draw.log_sum_sq
    if settings["f_divergence_type"] == "alpha_divergence":  # TRL has this one in fp32 at most
        logp, ref = logp.float(), ref.float()
    model = Model(logp, sq)
    trainer = SimpleNamespace(
        **settings,
        loss_weights=[1.0] * len(settings["loss_types"]),
        model=model,
        ref_model=Model(ref),
        accelerator=Same(),
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        args=SimpleNamespace(discopop_tau=0.05, gradient_checkpointing_kwargs=None),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    ids = torch.ones_like(draw.completion_mask)
    inputs = {"input_ids": ids, "attention_mask": ids, "completion_mask": draw.completion_mask}
    return DPOTrainer._compute_loss(trainer, model, inputs, return_outputs=False)


def trl_kto(draw: Draw, loss_type: str) -> Tensor:
    """KTOTrainer._compute_loss; the reference point comes from the same completions, rolled by one."""
    model = Model(draw.logp)
    labels = torch.arange(2 * PAIRS) < PAIRS
    trainer = SimpleNamespace(
        loss_type=loss_type,
        beta=0.1,
        desirable_weight=1.3,
        undesirable_weight=0.7,
        calculate_KL=loss_type == "kto",
        model=model,
        accelerator=Same(),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        _compute_kl_logps=lambda *_: draw.logp.detach().sum(-1) + 5,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    ids = torch.ones_like(draw.completion_mask)
    inputs = {
        "input_ids": ids,
        "attention_mask": ids,
        "completion_mask": draw.completion_mask,
        "label": labels,
        "ref_logps": draw.ref_logp.sum(-1),
        "ref_KL_logps": draw.ref_logp.sum(-1),
    }
    return KTOTrainer._compute_loss(trainer, model, inputs, return_outputs=False)


def trl_cpo(draw: Draw, loss_type: str, average: bool, alpha: float = 0.0) -> Tensor:
    """CPOTrainer.cpo_loss at beta 2, gamma 0.5, label smoothing 0.1 (0 with alpha)."""
    smoothing = 0.0 if alpha else 0.1
    trainer = SimpleNamespace(
        loss_type=loss_type, beta=2.0, simpo_gamma=0.5, label_smoothing=smoothing, alpha=alpha, accelerator=Same()
    )
    return CPOTrainer.cpo_loss(trainer, *(draw.mean if average else draw.total)(draw.logp))[0].mean()


def trl_iw_opd(draw: Draw) -> Tensor:
    """IWOPDTrainer._compute_iw_opd_loss of two-token logits whose first log-prob is the draw's."""
    logits = torch.stack([draw.logp, torch.log1p(-draw.logp.exp().clamp(max=1 - 1e-9))], -1)
    trainer = SimpleNamespace(
        temperature=1.0,
        iw_opd_gamma=0.5,
        iw_opd_epsilon=1e-8,
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
    )
    labels = torch.where(draw.kept, 0, -100)
    return IWOPDTrainer._compute_iw_opd_loss(trainer, logits, torch.zeros_like(labels), labels, draw.ref_logp)


def trl_orpo(draw: Draw) -> Tensor:
    """ORPOTrainer.odds_ratio_loss at beta 0.1, which returns the loss with its sign flipped."""
    trainer = SimpleNamespace(beta=0.1, accelerator=Same())
    return -ORPOTrainer.odds_ratio_loss(trainer, *draw.mean(draw.logp))[0].mean()


def trl_reward(rewards: Tensor, margin: Tensor) -> Tensor:
    """RewardTrainer.compute_loss with margin and a centring coefficient of 0.01; rewards [2N, 1]."""
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False),
        args=SimpleNamespace(center_rewards_coefficient=0.01),
        accelerator=Same(),
        _metrics={"eval": defaultdict(list)},
        _total_train_tokens=0,
    )
    return RewardTrainer.compute_loss(trainer, lambda **_: SimpleNamespace(logits=rewards), {"margin": margin})


def trl_uld(student: Tensor, teacher: Tensor) -> Tensor:
    """GOLD's ULD loss of one sequence whose tokens are all answer and already aligned; logits [T, V] and [T, U]."""
    settings = SimpleNamespace(
        skip_student_eos=False,
        skip_teacher_eos=False,
        token_merge_strategy="observed",
        use_extended_uld=False,
        use_hybrid_loss=False,
        _vocab_mapping=None,
        student_temperature=1.0,
        teacher_temperature=1.0,
        distillation_weight=1.0,
        _get_start_and_size_answers=lambda x: ([0] * len(x), [x.shape[1]] * len(x)),
    )
    labels = torch.ones(1, len(student), dtype=torch.long)
    return ULDLoss._compute_distillation_loss(settings, student[None], teacher[None], labels, labels, labels, labels)
