"""Distillation from a teacher on the student's own samples, with or without a reward.

    rlkit distill --model STUDENT --teacher TEACHER --data prompts.jsonl
    rlkit distill ... --teacher http://HOST:8000 --teacher-top-k 16
    rlkit distill ... --teacher math=M code=C --teacher-column subject
    rlkit distill ... --reward my_rewards.py:score --teacher-coef 0.1
    rlkit distill --model M --teacher M --teacher-prompt "{prompt} ({answer})"

A teacher is a folder, a hub id, the URL of an SGLang or vLLM server, or the model itself, which then reads a hint.
Data, environments and engines are those of `rlkit grpo`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from rlkit._util.files import is_adapter
from rlkit._util.ranks import is_first, on_all_ranks
from rlkit.data.prompt_columns import columns_in
from rlkit.scripts.args import (
    Correction,
    Data,
    Episodes,
    Evaluation,
    KlEstimator,
    Lora,
    Model,
    check_column_flag,
    log,
    places_of,
)
from rlkit.scripts.cli import Flat, run
from rlkit.scripts.start import Place, load_tokenizer, open_place
from rlkit.scripts.task import baseline_of, bring, clipped_loss, load_models, load_tools, make_task, with_engine
from rlkit.scripts.trial import kl_estimator_of, trial_of, tried_function
from rlkit.scripts.unusual import warn_of_teacher_prompt
from rlkit.settings import (
    OF_KL,
    OWN,
    CountOr0,
    Engines,
    For,
    GroupBaseline,
    LimitOr0,
    NotNegative,
    Optim,
    Penalties,
    Rollouts,
    Schedule,
    Share,
    Without,
    check,
    is_default,
    named,
    refuse_if,
)


@dataclass(frozen=True)
class Loss:
    """The teacher, and what becomes of its log-probs."""

    teacher: str | tuple[str, ...]
    """folder, hub id or URL (SGLang, vLLM) of the teacher; several as NAME=TEACHER, chosen by --teacher-column.
    self: the model itself, which reads --teacher-prompt"""
    teacher_prompt: str | None = None
    """what the teacher reads as the last user message: a format string of {prompt}, of columns of the row, and of texts
    and numbers that the reward returned by name, as "{prompt}\\n\\nHint: {answer}". None: what the student reads"""
    teacher_ema: Annotated[
        Share, For("teacher", "self"), Without("lora_rank", "adapter", why="it copies whole weights; drop one")
    ] = 0.0
    """--teacher self: the teacher is a copy that moves this share of the way to the model after each step
    (0: the current weights)"""
    loss: Annotated[str, named("reverse_kl", "forward_kl", "jsd", "advantage", "uld")] = "reverse_kl"
    """divergence of student q and teacher p at each token: reverse_kl is KL(q, p), forward_kl KL(p, q), jsd has --beta.
    advantage: log p - log q of the sampled token is its advantage, for PPO's clip. uld: of two tokenizers.
    Or FILE.py:FUNCTION, `def loss(log_q, log_p)`, a loss per row of log-probs"""
    beta: Annotated[Share, For("loss", "jsd")] = 0.5
    """jsd: weight of the teacher in the mixture (TRL's; its 0 and 1 are forward_kl and reverse_kl)"""
    teacher_top_k: Annotated[CountOr0, For("loss", "reverse_kl", "forward_kl", "jsd", OWN)] = 0
    """use the teacher's k most likely tokens and one for the rest (0: the whole vocabulary, of local teachers)"""
    teacher_coef: NotNegative = 1.0
    """weight of the divergence, or of the advantage, beside that of the reward"""
    teacher_column: str = "teacher"
    """column of the rows that names one of several teachers"""
    clip_low: LimitOr0 = 0.2
    """clip the ratio of advantages below at 1 - clip_low"""
    clip_high: LimitOr0 = 0.28
    """clip the ratio of advantages above at 1 + clip_high"""
    aggregate: Literal["token", "episode", "prompt"] = "token"
    """average the loss over tokens, answers or prompts"""
    baseline: GroupBaseline = "group_centered"
    """estimator of the reward's advantages (docs/advantages.md)"""

    def __post_init__(self) -> None:
        check(self)
        served = next((url for url in self.teachers().values() if is_url(url)), "")
        what = f"`teacher` {served} gives its most likely tokens: add `teacher_top_k` 16, or use `loss` advantage"
        what = f"`loss` uld needs all log-probs of {served}: load that model here" if self.loss == "uld" else what
        refuse_if(served and self.loss != "advantage" and not self.teacher_top_k, what)
        check_column_flag(self, "teacher", self.teachers())
        names = columns_in(self.teacher_prompt, flag="teacher_prompt") if self.teacher_prompt is not None else []
        refuse_if(
            "self" in self.teachers().values() and set(names) <= {"prompt"},
            "`teacher` self says what the model says: add `teacher_prompt` with more, as '{prompt} Hint: {answer}'",
        )

    def teachers(self) -> dict[str, str]:
        """The place of each teacher by its name; that of a single one without a name is ""."""
        return places_of("teacher", self.teacher)


@dataclass(frozen=True)
class Args:
    """Flags."""

    model: Flat[Model]
    data: Flat[Data]
    loss: Flat[Loss]
    episodes: Flat[Episodes] = Episodes()
    evaluation: Flat[Evaluation] = Evaluation()
    rollouts: Flat[Rollouts] = Rollouts(prompts_per_step=64, group_size=1)
    schedule: Flat[Schedule] = Schedule(Path("runs/distill"), steps=200, eval_steps=25, save_steps=50)
    optim: Flat[Optim] = Optim()
    correction: Flat[Correction] = field(default_factory=Correction)
    penalties: Flat[Penalties] = Penalties()
    kl: Flat[KlEstimator] = KlEstimator()
    reference: Annotated[str | None, OF_KL] = None
    """reference model; None: the initial weights of `model` (with LoRA, and no second copy: `model`
    without its adapter, or with `adapter` as it was)"""
    lora: Flat[Lora] = Lora()
    engine: Flat[Engines] = Engines()

    def __post_init__(self) -> None:
        judged = self.episodes.has_judge
        refuse_if(
            self.rollouts.group_size < 2 and judged,
            "`group_size` must be at least 2 with a reward: a sample is compared with the others of its prompt",
        )
        in_reward = self.penalties.kl_in == "reward"
        refuse_if(
            self.rollouts.group_size < 2 and in_reward,
            "`kl_in` reward compares the samples of a prompt, and `group_size` is 1: use `kl_in` loss or advantage",
        )
        compares = judged or in_reward
        acts = compares or self.penalties.kl_in == "advantage" or self.loss.loss == "advantage"
        lacks = "to compare" if acts else f"with `loss` {self.loss.loss}"
        for flags, names, read in (
            (self.loss, ("baseline",), compares), (self.loss, ("clip_low", "clip_high"), acts),
            (self.correction, ("correction", "tis_max_weight"), acts),
        ):  # fmt: skip
            for name in names:
                fault = f"`{name}` is for advantages, and without a `reward` there are none {lacks}"
                refuse_if(not read and not is_default(flags, name), fault)
        nothing = self.loss.teacher_coef == 0 and not judged
        refuse_if(nothing, "`teacher_coef` 0 trains nothing without a `reward`: give one of them")
        served = next((place for place in self.loss.teachers().values() if is_url(place)), "")
        refuse_if(
            served and self.rollouts.temperature != 1,
            f"`temperature` {self.rollouts.temperature:g}: {served} gives log-probs of temperature 1",
        )


def main(args: Args) -> Path:
    """Train, and return the folder of the exported model."""
    flags, trial = args.loss, trial_of(lambda trial: trial.try_divergence)
    divergence = tried_function("loss", flags.loss, trial) if ":" in flags.loss else None
    kl_estimator = kl_estimator_of(args.kl, args.penalties)
    brought = bring(args)
    place = open_place(args, brought)
    task = make_task(args, brought, place)
    from rlkit.loops.distill import distill

    load_teachers, prompt_of = checked_teachers(args, place, task), teacher_prompt_of(args, place, task)
    model, reference, rollouts = load_models(args, place)
    teachers = load_teachers(model)
    return with_engine(args, place, model, lambda engine: distill(
        model, teachers, place.tokenizer, engine, task, rollouts, args.schedule, place.optim, args.penalties,
        distillation=distillation_of(flags, divergence, prompt_of),
        loss=clipped_loss(flags, args.correction, flags.aggregate),
        baseline=baseline_of(flags), kl_estimator=kl_estimator, reference=reference,
    ))  # fmt: skip


def is_url(place: str) -> bool:
    """Whether a teacher is a server."""
    return place.startswith(("http://", "https://"))


def distillation_of(flags: Loss, divergence: Any, prompt_of: Any = None) -> Any:
    """The `Distillation` of the flags, with the user's `divergence` (None is for advantages)."""
    from rlkit.loops.distill import Distillation
    from rlkit.losses import distillation

    rows = divergence
    if flags.loss == "jsd":
        rows = distillation.jsd_rows(flags.beta)
    elif divergence is None and flags.loss != "advantage":
        rows = getattr(distillation, f"{flags.loss}_rows")
    how = flags.teacher_top_k, flags.teacher_coef, prompt_of, flags.teacher_ema, flags.teacher_column
    return Distillation(rows, *how)


def teacher_prompt_of(args: Args, place: Place, task: Any) -> Callable[[Any, Any], list[int]] | None:
    """The teacher's prompt for a prompt and an answer to it; None for the student's.

    Those of all rows are made now: ValueError for a name that no column has (with a reward or an environment, which may
    give it, later), and for one that is too long with its answer.
    """
    if (text := args.loss.teacher_prompt) is None:
        return None
    from rlkit.data.prompts import reworded
    from rlkit.data.template import Template
    from rlkit.model.positions import check_positions

    warn_of_teacher_prompt(columns := columns_in(text))
    data, episodes = args.data.rendering(), args.episodes
    template = Template(
        place.tokenizer, data["system_prompt"], data["apply_chat_template"], load_tools(episodes) or None,
        data["template_args"], of_run=True,
    )  # fmt: skip
    judged, names = episodes.has_judge, {*columns} - {"prompt"}
    readable = [prompt for prompt in task.prompts if not judged or names <= prompt.row.keys()]
    longest = max((len(reworded(x, text, template)) for x in readable), default=0)
    most = longest + args.rollouts.max_new_tokens
    check_positions(most, place.config, setting="`teacher_prompt` + `max_new_tokens`", fix="shorten it")
    says = f"the teacher's prompt with its answer may have {most} tokens, and a micro-batch holds `max_tokens`"
    refuse_if(most > place.optim.max_tokens, f"{says} {place.optim.max_tokens}: raise it, or lower `max_new_tokens`")

    def prompt_of(prompt: Any, trajectory: Any) -> list[int]:
        info = trajectory.info
        return reworded(prompt, text, template, {**info, **info.get("metrics", {}), **info.get("notes", {})})

    return prompt_of


def checked_teachers(args: Args, place: Place, task: Any) -> Callable[[Any], Any]:
    """A function of the model that loads the teacher, or several by name, which are checked now (`checked_teacher`)."""
    from rlkit.loops.distill import check_routes

    paths = args.loss.teachers()
    if len(paths) > 1:
        check_routes(task, [*paths], column=args.loss.teacher_column)
    has_images = any(prompt.images for prompt in task.prompts)
    load = {name: checked_teacher(args, place, path, has_images=has_images) for name, path in paths.items()}
    if _teaches_nothing(args):
        log.warning("--teacher is --model itself: their divergence is 0, and there is nothing to learn from it")

    def make(model: Any) -> Any:
        teachers = {name: make_one(model) for name, make_one in load.items()}
        return teachers if len(teachers) > 1 else next(iter(teachers.values()))

    return make


def _teaches_nothing(args: Args) -> bool:
    """Whether every teacher is the model as it begins, and nothing else trains."""
    model, loss = args.model, args.loss
    changed = model.adapter or args.lora.lora_base or args.episodes.has_judge or loss.teacher_prompt or ":" in loss.loss
    paths = {model.model, *loss.teachers().values()}
    return not changed and len({Path(path).resolve() if Path(path).is_dir() else path for path in paths}) == 1


def checked_teacher(args: Args, place: Place, path: str, *, has_images: bool) -> Callable[[Any], Any]:
    """A function of the model that makes the teacher, which is checked now: that it answers, that it has the tokenizer,
    and that it reads images where the prompts show some."""
    from rlkit.data.chat import check_same_tokens
    from rlkit.model.pretrained import load_config
    from rlkit.model.vision import reads_images

    tokenizer = place.tokenizer
    refuse_if(is_url(path) and has_images, f"`teacher` {path}: images are not sent to servers; load that model here")
    if is_url(path):
        from rlkit.rollout.engines.servers.teacher import ServedTeacher

        served = ServedTeacher(path.rstrip("/"))
        on_all_ranks(lambda: served.check(tokenizer, k=args.loss.teacher_top_k or 1) if is_first() else None)
        return lambda _model: served
    mine = path == "self"
    live, path = mine and not args.loss.teacher_ema, place.model.model if mine else path
    more: dict[str, Any] = {"adapter": args.model.model} if mine and is_adapter(args.model.model) else {}
    config = load_config(path)
    fault = f"`teacher` {path} reads text only, and the prompts show images"
    refuse_if(has_images and not reads_images(config), f"{fault}: take one that reads them (docs/models.md)")
    k, rows = args.loss.teacher_top_k, min(place.num_rows, config.get_text_config().vocab_size)
    refuse_if(k > rows, f"`teacher_top_k` {k} is more than the {rows} tokens of the vocabulary")
    tokenizers = None
    if args.loss.loss != "uld":
        check_same_tokens(tokenizer, path)
    elif (theirs := load_tokenizer(path)).get_vocab() != tokenizer.get_vocab():
        tokenizers = tokenizer, theirs

    def make(model: Any) -> Any:
        from rlkit.model.forward import Policy
        from rlkit.model.launch import load_policy, report_model
        from rlkit.model.teachers import LocalTeacher

        if not live:  # one that follows has weights as exact as the model's
            model = load_policy(path, frozen=not args.loss.teacher_ema, **place.loading(), **more)
            report_model(model, dtype=str(place.optim.dtype), name="teacher")
        policy = Policy(model, args.rollouts.temperature, str(place.optim.dtype))
        return LocalTeacher(policy, place.optim.max_tokens, tokenizers)

    return make


if __name__ == "__main__":
    run(main, Args, __doc__)
