"""Cross-check of the preference, reward-model and distillation losses against TRL's own code, on random ragged batches.

TRL's losses live in trainer methods; they are called here unbound, on a stand-in for the trainer and for the model's
outputs, so that what runs is TRL's source as installed. Printed is the largest difference of the batch losses over all
draws, relative to max(1, |loss|), and of the gradients where TRL gives one.

TRL lives in an environment of its own (torch first, so that it is not replaced; CPU is enough):

    python -m venv /tmp/trl && /tmp/trl/bin/pip install torch==2.13.0
    /tmp/trl/bin/pip install trl==1.16.0 jaxtyping einops
    TRL_EXPERIMENTAL_SILENCE=1 PYTHONPATH=. /tmp/trl/bin/python tests/parity/preference_trl.py

Exit status 1 if a difference exceeds its tolerance (1e-9 in fp64; 1e-5 where TRL only runs in fp32).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import trl
from torch import Tensor
from trl.experimental.gkd import GKDTrainer
from trl.experimental.iw_opd import IWOPDTrainer
from trl.experimental.sdpo import loss_utils
from trl_standins import PAIRS, VOCAB, Draw, trl_cpo, trl_dpo, trl_iw_opd, trl_kto, trl_orpo, trl_reward, trl_uld

from rlkit import losses as L
from rlkit.segments import seq_count

DRAWS = 10


def our_iw_opd(draw: Draw) -> Tensor:
    """The same from `opd_advantages`, `iw_opd_weights` and REINFORCE."""
    logp, teacher, mask = draw.logp.flatten(), draw.ref_logp.flatten(), draw.flat["mask"]
    advantages = L.opd_advantages(logp, teacher, mask=mask)
    return -(L.iw_opd_weights(advantages, **draw.flat, gamma=0.5) * advantages * logp).sum() / mask.sum()


def preference(draw: Draw) -> dict[str, tuple[Tensor, Tensor]]:
    """name: (TRL's batch loss, ours)."""
    logp, ref = draw.logp, draw.ref_logp
    c, r = draw.total(logp - ref)
    mean_c, mean_r = draw.mean(logp - ref)
    sum_logp, sum_ref, avg_logp = draw.total(logp), draw.total(ref), draw.mean(logp)
    lens_c, lens_r = seq_count(draw.flat["mask"], cu_seqlens=draw.flat["cu_seqlens"]).chunk(2)
    shared = torch.minimum(lens_c, lens_r).repeat(2)
    ld = L.ld_log_ratio((logp - ref).flatten(), shared_lens=shared, ld_alpha=0.4, **draw.flat).chunk(2)
    wpo = L.wpo_weights(logp.flatten(), draw.log_sum_sq.flatten(), **draw.flat).chunk(2)
    kl = L.kto_reference_point((logp - ref).sum(-1) + 5)
    kto = {"beta": 0.1, "desirable_weight": 1.3, "undesirable_weight": 0.7}
    b = {"beta": 0.1}

    def dpo_trainer(loss_type: str, **options: Any) -> Tensor:
        return trl_dpo(draw, loss_types=[loss_type], **options)

    def f_dpo(score: Callable[[Tensor], Tensor]) -> Tensor:
        return L.dpo(score(c), score(r), **b)

    margins = sum_logp[0] - sum_logp[1], sum_ref[0] - sum_ref[1]
    table = {
        "sigmoid": (dpo_trainer("sigmoid"), L.dpo(c, r, **b)),
        "hinge": (dpo_trainer("hinge"), L.hinge(c, r, **b)),
        "ipo (averages)": (dpo_trainer("ipo"), L.ipo(mean_c, mean_r, **b)),
        "exo_pair (fp32 label smoothing)": (
            dpo_trainer("exo_pair", label_smoothing=0.01),
            L.exo_pair(c, r, label_smoothing=0.01, **b),
        ),
        "nca_pair": (dpo_trainer("nca_pair"), L.nca_pair(c, r, **b)),
        "robust": (dpo_trainer("robust", label_smoothing=0.1), L.robust_dpo(c, r, label_smoothing=0.1, **b)),
        "bco_pair": (dpo_trainer("bco_pair"), L.bco_pair(c, r, **b)),
        "sppo_hard": (dpo_trainer("sppo_hard"), L.sppo_hard(c, r, **b)),
        "aot": (dpo_trainer("aot", label_smoothing=0.1), L.aot(*margins, label_smoothing=0.1, **b)),
        "aot_unpaired": (dpo_trainer("aot_unpaired", label_smoothing=0.1), L.aot(c, r, label_smoothing=0.1, **b)),
        "apo_zero": (dpo_trainer("apo_zero"), L.kto(c, r, **b)),
        "apo_down": (dpo_trainer("apo_down"), L.apo_down(c, r, **b)),
        "discopop": (dpo_trainer("discopop"), L.discopop(c, r, **b)),
        "sft": (dpo_trainer("sft"), -logp.chunk(2)[0][draw.kept.chunk(2)[0]]),
        "sigmoid_norm": (dpo_trainer("sigmoid_norm"), L.dpo(mean_c, mean_r, **b)),
        "f: forward_kl": (
            dpo_trainer("sigmoid", f_divergence_type="forward_kl"),
            f_dpo(partial(L.alpha_score, alpha=1.0)),
        ),
        "f: js_divergence": (dpo_trainer("sigmoid", f_divergence_type="js_divergence"), f_dpo(L.js_score)),
        "f: alpha_divergence 0.3 (fp32)": (
            dpo_trainer("sigmoid", f_divergence_type="alpha_divergence", f_alpha_divergence_coef=0.3),
            f_dpo(partial(L.alpha_score, alpha=1 - 0.3)),
        ),
        "ld_alpha 0.4": (dpo_trainer("sigmoid", ld_alpha=0.4), L.dpo(*ld, **b)),
        "use_weighting (WPO)": (dpo_trainer("sigmoid", use_weighting=True), wpo[0] * wpo[1] * L.dpo(c, r, **b)),
        "KTO kto": (trl_kto(draw, "kto"), L.kto(c, r, kl=kl, **kto) / 2),
        "KTO apo_zero_unpaired": (trl_kto(draw, "apo_zero_unpaired"), L.kto(c, r, **kto) / 2),
        "CPO sigmoid": (trl_cpo(draw, "sigmoid", False), L.dpo(*sum_logp, beta=2.0, label_smoothing=0.1)),
        "CPO simpo": (trl_cpo(draw, "simpo", True), L.simpo(*avg_logp, beta=2.0, label_smoothing=0.1)),
        "CPO alphapo 0.25": (
            trl_cpo(draw, "simpo", True, 0.25),
            L.simpo(*(L.alpha_score(x, alpha=0.25) for x in avg_logp), beta=2.0),
        ),
        "ORPO odds ratio (fp32)": (
            trl_orpo(draw),
            L.orpo(*avg_logp, **b),
        ),
        "IW-OPD": (trl_iw_opd(draw), our_iw_opd(draw)),
    }
    return {name: (theirs, ours.mean()) for name, (theirs, ours) in table.items()}


def reward_model(seed: int) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """RewardTrainer.compute_loss with margin and centring; first the leaf of the gradient."""
    rng = torch.Generator().manual_seed(seed)
    rewards = (torch.randn(2 * PAIRS, 1, dtype=torch.float64, generator=rng) * 3).requires_grad_()
    margin = torch.rand(PAIRS, dtype=torch.float64, generator=rng)
    ours = L.bradley_terry(*rewards.squeeze(-1).chunk(2), margin=margin, center_coef=0.01).mean()
    return rewards, {"RewardTrainer margin + centring": (trl_reward(rewards, margin), ours)}


def distillation(seed: int) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """GKD, the top-k form with a tail, and ULD; first the leaf of the gradient."""
    rng = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, PAIRS, VOCAB, dtype=torch.float64, generator=rng) * 2
    student.requires_grad_()
    table = {}
    for beta in (0.0, 0.1, 0.5, 1.0):
        theirs = GKDTrainer.generalized_jsd_loss(student, teacher, beta=beta, temperature=0.7, reduction="sum")
        table[f"GKD beta {beta}"] = theirs, L.jsd(student, teacher, beta=beta, temperature=0.7).sum()
        ids = {0.0: teacher, 1.0: student}.get(beta, teacher).detach().topk(5, -1).indices
        teacher_logp = teacher.log_softmax(-1).gather(-1, ids)
        ours = L.jsd_topk(student, ids, teacher_logp, beta=beta)
        if beta in (0.0, 1.0):
            theirs = IWOPDTrainer.generalized_jsd_loss(student, teacher, beta=beta, reduction="sum", top_k=5)
            table[f"top-5 + tail, beta {beta}"] = theirs, ours.sum()
        else:
            log_q = student.log_softmax(-1).gather(-1, ids)
            tails = (loss_utils.add_tail_bucket(x) for x in (log_q, teacher_logp))
            table[f"top-5 + tail, beta {beta}"] = loss_utils.compute_divergence(*tails, alpha=beta).sum(), ours.sum()
    smaller = teacher[:, : VOCAB - 4]
    table["GOLD uld"] = trl_uld(student, smaller), L.uld(student, smaller).mean()
    return student, table


def main() -> int:
    """Print the table; 1 if anything differs by more than its tolerance."""
    worst: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for seed in range(DRAWS):
        draw = Draw(seed)
        for leaf, table in ((draw.leaf, preference(draw)), reward_model(seed), distillation(seed)):
            for name, (theirs, ours) in table.items():
                a, b = (torch.autograd.grad(x, leaf, retain_graph=True)[0] for x in (theirs, ours))
                gaps = _gap(theirs, ours), _gap(a, b)
                worst[name] = [max(old, new) for old, new in zip(worst[name], gaps)]
    print(f"trl {trl.__version__}, torch {torch.__version__}, {DRAWS} draws of {PAIRS} pairs, fp64 unless noted\n")
    print(f"{'TRL':36s} {'max difference':>15s} {'of the gradient':>16s}")
    failed = False
    for name, (gap, grad_gap) in worst.items():
        bad = max(gap, grad_gap) > (1e-5 if "fp32" in name else 1e-9)
        failed |= bad
        print(f"{name:36s} {gap:15.1e} {grad_gap:16.1e}{'   DIFFERS' if bad else ''}")
    return int(failed)


def _gap(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest entry where that exceeds 1."""
    return (a - b).abs().max().item() / max(1.0, a.abs().max().item())


if __name__ == "__main__":
    sys.exit(main())
