"""Distillation on the student's own samples: the student samples, a teacher gives the log-probs of what it sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlkit.advantages import group_centered
from rlkit.data.columns import check_names
from rlkit.data.load import place_of_prompt
from rlkit.loops import coefficients
from rlkit.loops.checks import check_settings
from rlkit.loops.estimators import Advantage, told_below_zero, with_estimates
from rlkit.loops.rl import rl
from rlkit.loops.task import Step, Task
from rlkit.loops.updates import PolicyLoss, check_functions, grpo_update
from rlkit.losses import opd_advantages
from rlkit.losses.distillation import reverse_kl_rows
from rlkit.metrics import Metrics, mean
from rlkit.model.families import runs_packed
from rlkit.model.forward import make_policy, reference_policy, with_kept_mass, with_old_logp, with_ref_logp
from rlkit.model.optim import learning_rate, make_optimizer
from rlkit.model.teachers import Divergence, LocalTeacher, sequences_of, with_divergence
from rlkit.packing import pack, with_streams, without_support
from rlkit.rollout.groups import Group, Prompt, mix
from rlkit.run.sync import blocking
from rlkit.settings import Optim, Penalties, Rollouts, Schedule
from rlkit.types import Batch, Engine, Teacher, Trajectory


@dataclass(frozen=True)
class Distillation:
    """The divergence from the teacher, its support and its weight.

    Args:
        divergence: `divergence(log_q, log_p)`, a loss per row of the student's and the teacher's log-probs [.., V]: one
            of `rlkit.losses.distillation` (`reverse_kl_rows`, `forward_kl_rows`, `jsd_rows(beta)`, ...). None: the
            difference of the log-probs of the sampled token is its advantage (`opd_advantages`), for `loss`.
        top_k: the teacher's distribution is its k most likely tokens and one for all others; 0: the whole vocabulary.
        coef: weight of the divergence, or of that advantage.
        prompt: `prompt(prompt, trajectory)`, the token ids that the teacher reads in place of the answer's prompt: with
            the gold answer, a demonstration, or what a verifier said of this answer (`trajectory.info`). None: its own.
        ema: the teacher is a second copy of the model and follows it, w += ema (model - w) after each step. 0: it does
            not. It is saved and restored as a moving reference is.
        column: of the rows, where there are several teachers: it names the row's own.
    """

    divergence: Divergence | None = reverse_kl_rows
    top_k: int = 0
    coef: float = 1.0
    prompt: Callable[[Prompt, Trajectory], Sequence[int]] | None = None
    ema: float = 0.0
    column: str = "teacher"


async def distill(
    model: Any,
    teachers: Teacher | Mapping[str, Teacher],
    tokenizer: Any,
    engine: Engine,
    task: Task,
    rollouts: Rollouts,
    schedule: Schedule,
    optim: Optim = Optim(),
    penalties: Penalties = Penalties(),
    *,
    distillation: Distillation = Distillation(),
    loss: PolicyLoss = PolicyLoss(),
    baseline: Callable[..., Tensor] = group_centered,
    advantage: Advantage | None = None,
    kl_estimator: Callable[..., Tensor] | None = None,
    reference: Any = None,
) -> Path:
    """Train `model` in place towards a teacher on its own samples; returns the folder of the exported model.

        loss = sum_t w_t (surrogate_t + coef * D(student, teacher)_t)          w = loss.aggregate, by default 1 / tokens

    Of several `teachers` each row's `distillation.column` names its own. A `task` without a reward has advantage 0 and
    trains on the divergence alone; with one, `loss` and `baseline` are those of `rlkit.loops.grpo.grpo`, and so are all
    settings. A divergence over the whole vocabulary needs teachers in this process (`LocalTeacher`), whose forward is
    that of each micro-batch; the top k and the log-probs of the sampled tokens come from any `Teacher`, once per step.

    Self-distillation (SDFT, SDPO, OPSD) is a teacher of the same weights that reads more: `distillation.prompt`, and as
    the teacher `LocalTeacher(Policy(model, temperature))`, a frozen copy, or a copy that follows by `distillation.ema`.

    Logged: `teacher/loss`, the divergence per trained token in nats; of advantages, the mean of log q - log p.

    Differs: TRL's `DistillationTrainer` and `GKDTrainer` have no reward; their divergence and mean over tokens are the
    same (tested). Off-policy distillation is `rlkit.loops.sft` on the teacher's samples.
    Errors: ValueError for a row that names no teacher, for a whole vocabulary of a teacher that does not give it, and
    those of `rlkit.loops.grpo.grpo`, but for a group of 1.
    Reference: arXiv:2306.13649 (GKD), arXiv:2306.08543 (MiniLLM), arXiv:2601.19897 (SDFT), arXiv:2601.20802 (SDPO).
    """
    check_settings(task=task, rollouts=rollouts, schedule=schedule, optim=optim, penalties=penalties)
    check_functions(loss, advantage, rollouts, penalties, scored=distillation.divergence is None)
    baseline = told_below_zero(baseline)
    named = dict(teachers) if isinstance(teachers, Mapping) else {"": teachers}
    check_teachers(named, distillation)
    task = routed(task, [*named], column=distillation.column) if isinstance(teachers, Mapping) else task
    task = prompted(task, distillation.prompt, shares=runs_packed(model))
    average = averaged(distillation, named, model, penalties)
    has_kl, kl = coefficients.has_kl(penalties, reference), coefficients.kl_term(penalties, kl_estimator)
    policy = make_policy(model, temperature=rollouts.temperature, dtype=optim.dtype)
    ref_policy = reference_policy(policy, reference, moves=bool(penalties.ref_sync_steps))
    lr_at = learning_rate(optim, num_steps=schedule.steps)
    optimizer = make_optimizer(model, optim, lr=lr_at(0))
    scoring: dict[str, Any] = {"max_tokens": optim.max_tokens, "mesh": policy.mesh}
    by_index = [*named.values()]

    def prepare(groups: Sequence[Group], step: Step) -> Batch:
        batch = with_routes(pack(groups, share_prompts=runs_packed(model)), groups, [*named])
        batch = with_ref_logp(ref_policy if has_kl else None, batch, **scoring)
        if distillation.divergence is None or rollouts.minibatches * rollouts.epochs > 1 or kl.place != "loss":
            batch = with_old_logp(policy, batch, **scoring)
        batch = step.check(batch) if kl.place == "reward" else batch  # as in grpo
        batch = with_estimates(batch, baseline=baseline, advantage=advantage, kl=kl, kl_coef=step.kl_coef)
        batch = with_kept_mass(policy, batch, params=rollouts.params, on_policy=not rollouts.max_age, **scoring)
        return with_teachers(batch, by_index, distillation)

    def update(batch: Batch, step: Step) -> Metrics:
        lr, divergence = lr_at(step.index), distillation.divergence
        local = [teacher for teacher in by_index if isinstance(teacher, LocalTeacher)]  # all, for a whole vocabulary
        whole = partial(with_divergence, policy, divergence=divergence, teachers=local) if divergence else None
        metrics = grpo_update(
            batch, policy=policy, optimizer=optimizer, loss=loss, rollouts=rollouts, optim=optim, lr=lr,
            kl_coef=step.kl_coef * (kl.place == "loss"), entropy_coef=step.entropy_coef, kl=kl.in_loss,
            seed=mix(schedule.seed, step.index), teacher=whole, teacher_coef=distillation.coef,
        )  # fmt: skip
        follow(average, model, rate=distillation.ema)
        return metrics | ({} if divergence else sampled_gap(batch)) | {"lr": mean(lr)}

    state = {"model": model, "optimizer": optimizer, "reference": reference if penalties.ref_sync_steps else average}
    return await rl(
        policy, tokenizer, engine, task, rollouts, schedule, penalties, prepare=prepare, update=update, state=state,
        reference=ref_policy, max_tokens=optim.max_tokens,
    )  # fmt: skip


def check_teachers(teachers: Mapping[str, Teacher], distillation: Distillation) -> None:
    """Refuse (ValueError) a divergence over the whole vocabulary of a teacher that does not give it, and one over k
    tokens or on sampled tokens of a teacher with another tokenizer."""
    whole = distillation.divergence is not None and not distillation.top_k
    for name, teacher in teachers.items():
        if whole and not isinstance(teacher, LocalTeacher):
            fault = f"the teacher {name or type(teacher).__name__} gives log-probs of some tokens only"
            raise ValueError(f"{fault}: give Distillation(top_k=16), or divergence=None")
        if not whole and getattr(teacher, "tokenizers", None) is not None:
            raise ValueError(f"the teacher {name} has another tokenizer: only a divergence such as uld_rows suits it")


def check_routes(task: Task, names: Sequence[str], *, column: str) -> None:
    """Refuse (ValueError) a row whose `column` names none of the teachers."""
    check_names(((place_of_prompt(x), x.row) for x in task.prompts), column, names, kind="teachers")


def routed(task: Task, names: Sequence[str], *, column: str) -> Task:
    """The task whose trajectories carry the teacher that their row's `column` names, as "teacher" in `info`."""
    check_routes(task, names, column=column)

    async def score(prompt: Any, group: list[Trajectory]) -> list[Trajectory]:
        group = group if task.score is None else await task.score(prompt, group)
        return [replace(t, info={**t.info, "teacher": prompt.row.get(column)}) for t in group]  # None: held-out rows

    return replace(task, score=score)


def teacher_of(group: Group, names: Sequence[str]) -> int:
    """The index of the group's teacher."""
    return names.index(next((t.info["teacher"] for t in group if "teacher" in t.info), names[0]))


def with_routes(batch: Batch, groups: Sequence[Group], names: Sequence[str]) -> Batch:
    """The batch of all `groups` with each sequence's teacher, and the prompts that the teachers read.

    It has no `support`: teachers have the whole vocabulary.
    """
    of_group = torch.tensor([teacher_of(group, names) for group in groups])
    ids = [torch.tensor(t.info["teacher_prompt"]) for group in groups for t in group if "teacher_prompt" in t.info]
    prompts = pad_sequence(ids, batch_first=True, padding_value=-1) if ids else None
    return replace(without_support(batch), teachers=of_group[batch.group_ids], teacher_prompts=prompts)


def sampled_gap(batch: Batch) -> Metrics:
    """log q - log p of the sampled tokens."""
    return {"teacher/loss": mean(batch.old_logp - batch.teacher_logp[:, 0], mask=batch.mask)}


def prompted(task: Task, prompt_of: Callable[[Prompt, Trajectory], Sequence[int]] | None, *, shares: bool) -> Task:
    """The task whose trajectories carry the prompt that the teacher reads, as "teacher_prompt" in `info`; those of
    held-out prompts do not. Unchanged for None.

    Errors: ValueError for a model that runs without shared prompts; for an episode in pieces, and for images.
    """
    if prompt_of is None:
        return task
    if not shares:
        raise ValueError("a prompt of the teacher's own needs a model that runs packed (docs/models.md)")

    async def score(prompt: Prompt, group: list[Trajectory]) -> list[Trajectory]:
        group = group if task.score is None else await task.score(prompt, group)
        if prompt.images or any(t.continues or t.later_images for t in group):
            seen = "images" if prompt.images or any(t.later_images for t in group) else "an episode in several pieces"
            raise ValueError(f"{place_of_prompt(prompt)}: a prompt of the teacher's own does not suit {seen}")
        return [replace(t, info={**t.info, "teacher_prompt": [*prompt_of(prompt, t)]}) for t in group]

    async def unchanged(_prompt: Prompt, group: list[Trajectory]) -> list[Trajectory]:
        return group

    judge = task.score or unchanged
    held_out = {name: replace(one, score=one.score or judge) for name, one in task.held_out.items()}
    return replace(task, score=score, eval_prompts=(), eval_sets=held_out)


def averaged(
    distillation: Distillation, teachers: Mapping[str, Teacher], model: Any, penalties: Penalties = Penalties()
) -> Any:
    """The model of the teacher that follows by `distillation.ema`; None for a fixed one.

    Errors: ValueError for an `ema` outside [0, 1], beside a reference that moves, and for several teachers, one
    elsewhere, that which trains, and one of other parameters.
    """
    if not 0 <= distillation.ema <= 1:
        raise ValueError(f"`ema` must be in [0, 1], got {distillation.ema}")
    if not distillation.ema:
        return None
    if penalties.ref_sync_steps:
        raise ValueError("`ema` of the teacher and `ref_sync_steps` of the reference: a checkpoint holds one of them")
    found = next(iter(teachers.values()))
    mine = found.policy.model if isinstance(found, LocalTeacher) and len(teachers) == 1 else None
    if mine is None or mine is model or [*shapes(mine)] != [*shapes(model)]:
        raise ValueError("`ema` needs one teacher in this process: a second copy of the model, with its parameters")
    return mine


def shapes(model: Any) -> Iterator[tuple[str, torch.Size]]:
    """Name and shape of each parameter."""
    return ((name, x.shape) for name, x in model.named_parameters())


@torch.no_grad()
def follow(average: Any, model: Any, *, rate: float) -> None:
    """Move each parameter of `average`, if there is one, towards that of `model`: w += rate (model - w)."""
    if average is None:
        return
    for x, now in zip(average.parameters(), model.parameters(), strict=True):
        x.lerp_(now.to(x.dtype), rate)


def with_teachers(batch: Batch, teachers: Sequence[Teacher], distillation: Distillation) -> Batch:
    """The batch with `teacher_ids` and `teacher_logp` of each sequence's teacher, and for a divergence of None with
    coef (log p - log q) added to the advantages. Unchanged for the whole vocabulary.

    Errors: ValueError for ids and log-probs of another shape.
    """
    if distillation.divergence is not None and not distillation.top_k:
        return batch
    k = distillation.top_k or 1
    ids, logp = torch.zeros(batch.num_tokens, k, dtype=torch.long), torch.zeros(batch.num_tokens, k)
    for i, teacher in enumerate(teachers):
        part, tokens = sequences_of(i, batch)
        if not part.num_tokens:  # on all ranks: each has the whole batch
            continue
        if distillation.divergence is None:
            outputs = part.targets[:, None], teacher.logp(part)[:, None]
        else:
            outputs = teacher.top_logp(part, k)
        for name, x in zip(("ids", "log-probs"), outputs, strict=True):
            if x.shape != (part.num_tokens, k):
                raise ValueError(
                    f"the teacher gave {name} of shape {[*x.shape]} for {part.num_tokens} tokens and k = {k}"
                )
        ids[tokens], logp[tokens] = outputs[0].to(ids), outputs[1].to(logp)
    batch = replace(batch, teacher_ids=ids, teacher_logp=logp)
    if distillation.divergence is not None:
        return batch
    gap = distillation.coef * opd_advantages(batch.old_logp, logp[:, 0], mask=batch.mask)
    return with_streams(batch, advantages=batch.advantages + gap)


distill_sync = blocking(distill)  # a plain function, also where an event loop runs
