"""Set up a run: checks, the run folder, the device, the tokenizer, the models.

brought = bring(args, ...)              `rlkit.scripts.task` or `offline`: what the user gave, checked without torch
place = open_place(args, brought)       the run folder, and what the flags leave to this machine and to the model
... = make_task(args, brought, place)   the prompts or the examples, tokenized: what the loops take
"""

from __future__ import annotations

import logging
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rlkit._util.files import base_of, check_model_path, is_adapter
from rlkit._util.ranks import is_first, launched, number
from rlkit.data.vocabulary import vocabulary_size
from rlkit.scripts.args import Data, Lora, Model, log
from rlkit.scripts.cli import flags_of
from rlkit.scripts.trial import OfTokenizer, own_optimizer
from rlkit.scripts.unusual import warn_of_unusual
from rlkit.settings import Optim, ParallelArgs, Schedule, check_relations, refuse_if

if TYPE_CHECKING:
    from rlkit.scripts import distill, dpo, grpo, kto, ppo, reward_model, sft

    Sampled = grpo.Args | ppo.Args | distill.Args
    Offline = sft.Args | dpo.Args | kto.Args | reward_model.Args
    Flags: TypeAlias = Sampled | Offline

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Brought:
    """What the user brought, checked without torch.

    The base model and its adapter are apart, `lora` has the adapter's rank and scale, and `data` the files of its
    globs. `parts` are the training rows of each part of the data; `own_rewards` are of held-out sets with a reward of
    their own, on whose `questions` a script on fixed data samples. `env` and `reward` are those of one that samples.
    """

    model: Model
    lora: Lora
    data: Data
    parts: list[Rows]
    held_out: dict[str, Rows]
    own_rewards: Mapping[str, OfTokenizer]
    env: OfTokenizer | None = None
    reward: OfTokenizer | None = None
    questions: Mapping[str, Any] = field(default_factory=dict)

    def mixture(self, sizes: Iterable[int]) -> list[Any]:
        """The parts of the data: size, weight, and whose files they are."""
        from rlkit.data.order import Part
        from rlkit.data.sources import identity

        parts = zip(sizes, self.data.parts(), strict=True)
        return [Part(size, weight, identity(files)) for size, (files, weight) in parts]


@dataclass(frozen=True)
class Place:
    """Where a run takes place: its flags as this machine and the files of its models complete them.

    `model` has the device, and the layout that the GPU's memory allows; `optim` the dtype, the function of the
    optimizer, and a micro-batch that the memory allows. `template` is the file of the chat template (True: the
    tokenizer's own; False: none). `configs` are those of the model, the reference and the critic, by path.
    """

    model: Model
    lora: Lora
    optim: Optim
    template: Path | bool
    tokenizer: Any
    configs: dict[str, Any]

    @property
    def config(self) -> Any:
        """The config of the model."""
        return self.configs[self.model.model]

    @property
    def num_rows(self) -> int:
        """The rows of the smallest embedding of the models, which read the same tokens."""
        size: int = min(config.get_text_config().vocab_size for config in self.configs.values())
        return max(size, vocabulary_size(self.tokenizer)) if self.model.resize_embeddings else size

    def loading(self) -> dict[str, Any]:
        """Arguments of `rlkit.model.launch.load_policy`, `load_critic` and `load_judge`."""
        options = {"args": self.model.parallel, "device": self.model.device, "dtype": self.optim.dtype}
        return options | ({"min_rows": vocabulary_size(self.tokenizer)} if self.model.resize_embeddings else {})


def open_place(args: Flags, brought: Brought) -> Place:
    """Make the run folder, choose device and dtype, seed torch, and load the tokenizer and the models' configs.

    Errors: ValueError for a device that torch does not have and for models with other vocabularies, FileNotFoundError
    for a model folder that does not exist, and the errors of `rlkit.run.folder.keep_args`.
    """
    from rlkit.data.template_files import keep_template, read_template
    from rlkit.run.console import say
    from rlkit.run.folder import check_folder
    from rlkit.run.tracking import check_trackers

    warn_of_steps(args)
    path, schedule = brought.model.model, args.schedule
    others = {name: x for name in ("reference", "critic") if (x := getattr(args, name, None)) is not None}
    for name, other in (("model", path), *((f"`{name}`", x) for name, x in others.items())):
        check_model_path(other, of=name)  # and the folder: before torch is loaded
    if Path(path).is_dir() and Path(path).resolve() == Path(schedule.output).resolve():
        raise ValueError(f"`output` {schedule.output} is the folder of the model: give another one for the run")
    check_folder(schedule.output, resume=schedule.resume)
    check_trackers(schedule.track)
    file = template_file(brought.data, schedule)
    template = read_template(file) if file else None
    import torch

    from rlkit.model.launch import choose_device, make_deterministic
    from rlkit.model.pretrained import load_config

    check_device(brought.model.device)
    cuda = torch.cuda.is_available()
    bf16 = cuda and torch.cuda.is_bf16_supported(including_emulation=False)
    device, dtype = choose_device(brought.model.device, args.optim.dtype, cuda=cuda, bf16=bf16)
    model = replace(brought.model, device=device)
    chosen: dict[str, Any] = {"dtype": dtype, "make_optimizer": own_optimizer(args.optim.optimizer)}
    optim = replace(args.optim, **chosen)
    keep_flags(args, brought, model, optim)
    if template is not None and is_first() and keep_template(schedule.output, template[0]) and schedule.resume:
        say(f"resumed with the chat template of {template[1]}, which has changed")
    torch.manual_seed(schedule.seed)
    if model.deterministic:
        make_deterministic(schedule.seed)
    model = extended(model, schedule.output, urls=getattr(getattr(args, "engine", None), "engine_urls", ()))
    tokenizer = load_tokenizer(model.tokenizer, *others.values(), chat_template=file)
    configs = {x: load_config(x) for x in (model.model, *others.values())}
    template_used = file or bool(brought.data.chat_template)
    place = _checked(args, Place(model, brought.lora, optim, template_used, tokenizer, configs))
    if device.startswith("cuda") and not launched() and dtype == "bf16" and not brought.lora.lora_rank:
        engine, total = getattr(args, "engine", None), torch.cuda.get_device_properties(device).total_memory
        return within_memory(place, total, samples=engine is not None and engine.is_local)
    return place


def extended(model: Model, output: Path, *, urls: Sequence[str]) -> Model:
    """The model in a folder of the run that has its `yarn`; ValueError for one that YaRN does not fit.

    Servers at `urls` have the config that they were started with, so they must serve that folder.
    """
    if model.yarn is None:
        return model
    from rlkit.model.positions import positions
    from rlkit.model.pretrained import load_config
    from rlkit.model.yarn import EXTENDED, yarn_folder
    from rlkit.run.console import say

    before, folder = positions(load_config(model.model)), yarn_folder(model.model, model.yarn, output / EXTENDED)
    if is_first():
        if urls:
            log.warning("--yarn: the servers of --engine-urls must have been started with %s (or its config)", folder)
        say(f"model: YaRN of factor {model.yarn:g} over {before:,} positions: {positions(load_config(folder)):,}")
    return replace(model, model=str(folder))


def _checked(args: Flags, place: Place) -> Place:
    """The place; warns of unusual values of the flags, and refuses `train_vision` of a model without a tower."""
    from rlkit.model.vision import reads_images

    unseen = place.model.train_vision and not reads_images(place.config)
    refuse_if(unseen, f"`train_vision`: {place.model.model} has no vision tower")
    warn_of_unusual(dict(flags_of(replace(args, lora=place.lora))), num_rows=place.num_rows)
    return place


def keep_flags(args: Flags, brought: Brought, model: Model, optim: Optim) -> None:
    """Write the flags of the run to its folder, and those that repeat it."""
    from rlkit.run.console import say
    from rlkit.run.cores import choose_threads
    from rlkit.run.folder import CONFIG, keep_args, read_args
    from rlkit.scripts.config import render

    folder, resume = args.schedule.output, args.schedule.resume
    script = Path(getattr(sys.modules[type(args).__module__], "__file__", None) or "notebook").name
    used = replace(args, model=model, lora=brought.lora, data=brought.data, optim=optim)
    flags = dict(flags_of(used))
    if model.device == "cpu" and model.parallel.offload:
        log.warning("--parallel.offload has no effect on the CPU: it moves parameters there from a GPU")
    if model.device == "cpu":
        saved = read_args(folder) if resume else {}
        flags["threads"], line = choose_threads(num_threads=saved.get("threads"))
        if line:
            say(line)
    again = render(replace(used, model=brought.model))  # on a machine without this device, too
    text = f"# rlkit {Path(script).stem} --config {CONFIG} --output NEW repeats this run\nscript: {script}\n\n{again}"
    keep_args(folder, flags, script=script, resume=resume, config=text)


def within_memory(place: Place, total: int, *, samples: bool) -> Place:
    """The place with activation checkpointing, or fewer tokens in a micro-batch, where a GPU of `total` bytes needs it.

    Counted as `rlkit plan` does, for a full training of the types that it knows, with an engine that `samples` beside
    it; a line on the screen says what was changed. Errors: ValueError where no micro-batch fits.
    """
    from rlkit.model.memory import USABLE, Layout, engine_bytes, fitted, shape_of
    from rlkit.model.parallelize import COVERED
    from rlkit.run.console import say

    parallel, optim = place.model.parallel, place.optim
    if place.config.model_type not in COVERED:
        return place
    shape = shape_of(place.config)
    room = USABLE * total - samples * engine_bytes(shape, engine_tp=1)
    asked = Layout(1, tokens=optim.max_tokens, checkpointing=parallel.activation_checkpointing)
    fit = fitted(shape, replace(asked, offload=parallel.offload), room=room)
    size = f"{shape.parameters / 1e9:.1f} B parameters on {total / 2**30:.0f} GiB"
    if fit is None:
        fixes = "`lora_rank` 32 (its base in 8 or 4 bits: `lora_base`), `parallel.offload`, or several GPUs by torchrun"
        raise ValueError(f"training all weights of {size} does not fit: give {fixes}; `rlkit plan` counts what fits")
    changed = ["activation checkpointing is on"] * (fit.checkpointing > asked.checkpointing)
    changed += [f"--max-tokens is {fit.tokens} instead of {asked.tokens}"] * (fit.tokens < asked.tokens)
    if changed:
        say(f"memory: {size}: {', '.join(changed)}")
    fitting = replace(parallel, activation_checkpointing=fit.checkpointing)
    optim = replace(optim, max_tokens=fit.tokens)
    return replace(place, model=replace(place.model, parallel=fitting), optim=optim)


def with_adapter(model: Model, lora: Lora) -> tuple[Model, Lora]:
    """The base model in `model` and its adapter in `adapter`, and the adapter's rank and scale.

    ValueError for flags that contradict the adapter, and for one that is not trained (see `read_adapter`). Does not
    import torch.
    """
    from rlkit._util.extras import lacks
    from rlkit.model.adapter_files import read_adapter

    path = model.model if is_adapter(model.model) else model.adapter
    if path is None:
        return model, lora
    refuse_if(model.adapter and path != model.adapter, f"`model` {path} is an adapter too: give one, or its base model")
    refuse_if(not find_spec("peft"), lacks("peft", "lora", f"the adapter {path} needs"))
    base = base_of(path) if path == model.model else model.model
    file, subject = read_adapter(path), f"the adapter {path} has"
    if lora.lora_rank != 0:
        fix = "drop the flag to train the adapter on, or give `lora_rank` 0 to merge it and train all weights"
        names, targets = ", ".join(sorted(file.last_names)), ", ".join(sorted({*lora.lora_targets})) or None
        facts = ("rank", lora.lora_rank, file.rank), ("alpha", lora.lora_alpha, file.alpha), ("targets", targets, names)
        for name, flag, value in facts:
            has = value if isinstance(value, str) else f"{value:g}"
            refuse_if(flag not in (None, value), f"`lora_{name}` {flag}: {subject} {name} {has}: {fix}")
        lora = replace(lora, lora_rank=file.rank, lora_alpha=file.alpha)
        if file.dropout and not lora.lora_dropout:
            fix = f"--lora-rank {file.rank} --lora-dropout {file.dropout:g} keeps it in training on fixed data"
            log.warning(
                "%s lora_dropout %g, and trains on without dropout, as its export says: %s", subject, file.dropout, fix
            )
    return replace(model, model=base, adapter=path), lora


def check_device(device: str | None) -> None:
    """ValueError for a device that this torch does not have; None is chosen by rlkit."""
    import torch

    if not device:
        return
    try:
        available = torch.get_device_module(torch.device(device).type).is_available()
    except (RuntimeError, AttributeError):
        available = False
    if not available:
        raise ValueError(f"`device` {device}: torch {torch.__version__} finds no such device; use --device cpu")


def check_ranks(parallel: ParallelArgs) -> None:
    """ValueError in a plain process for sizes that need the ranks of torchrun. Does not import torch."""
    if parallel.ulysses and parallel.cp == 1:
        raise ValueError("--parallel.ulysses requires --parallel.cp above 1")
    names = [name for name in ("replicate", "shard", "cp", "tp", "pp", "ep") if getattr(parallel, name) > 1]
    if not names or launched():
        return
    sizes = " ".join(f"--parallel.{name} {getattr(parallel, name)}" for name in names)
    ranks = math.prod(getattr(parallel, name) for name in names if name != "ep")
    ranks = ranks if ranks > 1 else parallel.ep  # taken out of the others
    program = re.sub(r"^rlkit ", "-m rlkit.scripts.", sys.argv[0])
    start = f"torchrun --nproc-per-node {ranks} {program} ..."
    raise ValueError(f"{sizes} takes {ranks} processes, and this is one: start them with {start}")


def check_flags(args: Flags) -> tuple[Model, Lora]:
    """The model and the adapter of the flags (see `with_adapter`).

    Refuses (ValueError) sizes that need the ranks of torchrun, combinations of several settings that have no effect or
    fail late, and `resize_embeddings` where the new rows would not train, or another process lacks them.
    """
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        number(name)
    check_ranks(args.model.parallel)
    model, lora = with_adapter(args.model, args.lora)
    check_relations(replace(args, model=model, lora=lora))
    engine, rollouts = getattr(args, "engine", None), getattr(args, "rollouts", None)
    apart = launched() or (engine is not None and not engine.is_local) or getattr(rollouts, "overlap", False)
    fix = "resize in a run of rlkit sft, and give its model/"
    apart = model.resize_embeddings and apart
    refuse_if(apart, f"`resize_embeddings` is for one process with the model in it: {fix}")
    warn_of_warmup(args)
    return model, lora


def warn_of_steps(args: Flags) -> None:
    """Warn of a run without steps, learning rate or evaluation, and of held-out data or `eval_steps` without use."""
    schedule, data = args.schedule, args.data
    if best := schedule.keep_best:
        from rlkit.run.report.meanings import KEYS, meaning_of

        near = get_close_matches(best, [name for name in KEYS if name.startswith("eval/")], n=1, cutoff=0)
        refuse_if(meaning_of(best) is None, f"`keep_best` {best} is no metric: perhaps {''.join(near)}")
    if not data.eval_data and schedule.eval_steps not in (0, _default_of(args, "schedule", "eval_steps")):
        log.warning("--eval-steps %d has no effect without --eval-data", schedule.eval_steps)
    if schedule.steps == 0 and not data.eval_data:
        log.warning("--steps 0 without --eval-data: nothing is trained or measured")
    if data.eval_data and schedule.eval_steps == 0:
        log.warning("--eval-data is not used with --eval-steps 0")
    if schedule.steps and args.optim.lr == 0:
        log.warning("--lr 0: no step changes the weights of `model`")


def warn_of_warmup(args: Flags) -> None:
    """Warn of a warm-up that is longer than the run."""
    warmup, steps = args.optim.warmup_steps, args.schedule.steps
    if warmup > steps > 0:
        whose = " (the default)" if _default_of(args, "optim", "warmup_steps") == warmup else ""
        log.warning(
            "--warmup-steps %d%s is not below --steps %d: the learning rate never reaches --lr", warmup, whose, steps
        )


def _default_of(args: Flags, settings: str, name: str) -> Any:
    """The script's own default of a flag, which may differ from that of the settings; None for one that has none."""
    return getattr(next(f.default for f in fields(args) if f.name == settings), name, None)


def warn_of_repeats(flag: str, num: int, num_rows: int) -> None:
    """Warn of a step that takes more rows than there are."""
    if num > num_rows:
        log.warning("%s %d is more than the %d rows of the data: rows repeat within a step", flag, num, num_rows)


def note_strings(data: Data, rows: list[dict[str, Any]]) -> None:
    """Log that a string prompt becomes a user message (TRL takes the raw text), or that messages lose their roles."""
    warning = logging.getLogger("rlkit.data").warning
    if not data.chat_template:
        turns = (row.get("messages") or row.get("prompt") for row in rows)
        if any(isinstance(messages, list) and len(messages) > 1 for messages in turns):
            warning("--no-chat-template joins messages as plain text, without roles")
    elif any(isinstance(row.get("prompt"), str) for row in rows if row.get("messages") is None):
        warning("string prompts are one user message for the chat template; --no-chat-template takes them as raw text")


def template_file(data: Data, schedule: Schedule) -> Path | None:
    """The file of --chat-template, or the copy in the folder of a resumed run where that file is gone."""
    from rlkit.data.template_files import KEPT

    file, copy = data.chat_template, schedule.output / KEPT
    if isinstance(file, bool):
        return None
    gone = schedule.resume and copy.exists() and not Path(file).expanduser().exists()
    return copy if gone else Path(file)


def load_policies(place: Place, *, has_reference: bool, reference: str | None = None) -> tuple[Any, Any]:
    """Load the model, and return it with the `reference` model or None."""
    from rlkit.model.launch import load_policy, reference_of

    load: Callable[..., Any] = partial(load_policy, **place.loading(), train_vision=place.model.train_vision)
    model, adapter = load_trained(place, load), place.model.adapter
    stop_at_template(model, place)
    if not has_reference:
        return model, None
    return model, reference_of(model, reference, path=place.model.model, load=load, adapter=adapter)


def load_trained(place: Place, load: Callable[..., Any]) -> Any:
    """Load the model that trains, with its adapter, and print lines about it."""
    from rlkit.model.launch import report_model
    from rlkit.run.console import say

    adapter, rank = place.model.adapter, place.lora.lora_rank
    if adapter is None:
        check_rank(place.config, rank)
    model = load(place.model.model, adapter=adapter, **place.lora.options())
    report_model(model, dtype=str(place.optim.dtype))
    if adapter and is_first():
        effect = "trains on" if rank else "is merged into the weights, which all train"
        say(f"adapter: {adapter} {effect}; a reference is the model with the adapter as it is now")
    return model


def check_rank(config: Any, rank: int | None) -> None:
    """ValueError for adapters of a rank that no matrix of the model of this config has."""
    width = config.get_text_config().hidden_size
    above = rank is not None and rank > width
    refuse_if(above, f"`lora_rank` {rank} is more than the model's width {width}: no matrix has that rank")


def stop_at_template(model: Any, place: Place) -> None:
    """Let the exported model stop at the end of turn of the chat template too, wherever it is served."""
    config = getattr(model, "generation_config", None)
    if config is None or not place.template:
        return
    from rlkit.data.chat import stop_token_ids
    from rlkit.data.markup import markup_of
    from rlkit.data.template_files import read_template
    from rlkit.model import pretrained

    tokenizer = pretrained.load_tokenizer(place.model.tokenizer)
    markup = markup_of(tokenizer)
    if isinstance(place.template, Path):
        tokenizer.chat_template = read_template(place.template)[0]
    elif markup.ends <= {*markup.eos}:  # the model's own template ends turns as its generation config says
        return
    ends = list(stop_token_ids(tokenizer, model.config, config))
    config.update(eos_token_id=ends, _from_model_config=False)  # True: `generate` may go back to config.json's eos


def load_tokenizer(path: str, *others: str | None, chat_template: str | Path | None = None) -> Any:
    """The tokenizer of the model at `path`, with the template of the file `chat_template` (see `set_template`).

    ValueError if one of the models `others` has another vocabulary.
    """
    from rlkit.data.chat import check_same_tokens
    from rlkit.data.template_files import set_template
    from rlkit.model import pretrained

    try:
        tokenizer = pretrained.load_tokenizer(path)
    except OSError as error:  # of the hub: some name no model
        raise OSError(str(error) if path in str(error) else f"model {path!r}: {error}") from None
    if chat_template is not None:
        set_template(tokenizer, chat_template)
    for other in others:
        if other:
            check_same_tokens(tokenizer, other)
    return tokenizer


def image_reader(path: str, tokenizer: Any, rows: Iterable[Any], config: Any = None) -> Any:
    """What reads the images of the rows for the model at `path`, and refuses its placeholders; None for one of text.

    `config` is that of the model, if it is loaded.
    """
    from rlkit.data.images import reader_at, shows_images

    return reader_at(path, tokenizer, marked=any(map(shows_images, rows)), config=config)
