"""What every training script does around loading its model: checks, the run folder, the tokenizer, the models."""

from __future__ import annotations

import inspect
import logging
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import cache, partial, wraps
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from rlkit.data.vocabulary import check_vocabulary, vocabulary_size
from rlkit.files import base_of, check_model_path, is_adapter
from rlkit.ranks import is_first, launched
from rlkit.run.console import data_progress
from rlkit.scripts.args import OF_RETURNS, OF_VALUES, Data, Examples, Lora, Model, log
from rlkit.scripts.cli import LossError, flags_of
from rlkit.settings import Optim, ParallelArgs, check_relations, is_default, refuse_if

STREAM_HEAD = 1000  # rows of each file that are read at the start of a run that streams


def begin(args: Any) -> Any:
    """Make the run folder and seed torch; returns the flags with `device` and `dtype` resolved for this machine.

    Errors: ValueError for a device that torch does not have, FileNotFoundError for a model folder that does not exist,
    and the errors of `rlkit.run.folder.keep_args`.
    """
    from rlkit.data.template_files import keep_template, read_template
    from rlkit.run.console import say
    from rlkit.run.cores import choose_threads
    from rlkit.run.folder import CONFIG, check_folder, keep_args, read_args
    from rlkit.run.tracking import check_trackers
    from rlkit.scripts.config import render

    warn_of_steps(args)
    args = replace(args, data=args.data.expanded())
    check_model_path(args.model.model)  # and the folder: before torch is loaded
    for name in ("reference", "critic"):
        if (path := getattr(args, name, None)) is not None:
            check_model_path(path, of=f"`{name}`")
    if Path(args.model.model).is_dir() and Path(args.model.model).resolve() == Path(args.schedule.output).resolve():
        raise ValueError(f"`output` {args.schedule.output} is the folder of the model: give another one for the run")
    check_folder(args.schedule.output, resume=args.schedule.resume)
    check_trackers(args.schedule.track)
    file = template_file(args)
    template = read_template(file) if file else None
    import torch

    from rlkit.model.launch import choose_device, make_deterministic

    if args.model.device:
        check_device(args.model.device)
    cuda = torch.cuda.is_available()
    bf16 = cuda and torch.cuda.is_bf16_supported(including_emulation=False)
    given = args.model.device
    device, dtype = choose_device(given, args.optim.dtype, cuda=cuda, bf16=bf16)
    optim = replace(args.optim, dtype=dtype, make_optimizer=own_optimizer(args.optim.optimizer))
    args = replace(args, model=replace(args.model, device=device), optim=optim)
    script = Path(getattr(sys.modules[type(args).__module__], "__file__", None) or "notebook").name
    flags = dict(flags_of(args))
    if device == "cpu" and args.model.parallel.offload:
        log.warning("--parallel.offload has no effect on the CPU: it moves parameters there from a GPU")
    if device == "cpu":
        kept = read_args(args.schedule.output) if args.schedule.resume else {}
        flags["threads"], line = choose_threads(kept=kept.get("threads"))
        if line:
            say(line)
    again = render(replace(args, model=replace(args.model, device=given)))  # on a machine without this device, too
    text = f"# rlkit {Path(script).stem} --config {CONFIG} --output NEW repeats this run\nscript: {script}\n\n{again}"
    keep_args(args.schedule.output, flags, script=script, resume=args.schedule.resume, config=text)
    if template is not None and is_first():
        changed = keep_template(args.schedule.output, template[0])
        if changed and args.schedule.resume:
            say(f"resumed with the chat template of {template[1]}, which has changed")
    torch.manual_seed(args.schedule.seed)
    if args.model.deterministic:
        make_deterministic(args.schedule.seed)
    if device.startswith("cuda") and not launched() and dtype == "bf16" and not args.lora.lora_rank:
        args = within_memory(args, torch.cuda.get_device_properties(device).total_memory)
    return args


def within_memory(args: Any, total: int) -> Any:
    """The flags with activation checkpointing, or fewer tokens in a micro-batch, where a GPU of `total` bytes needs it.

    Counted as `rlkit plan` does, for a full training of the types that it knows; a line on the screen says what was
    changed. Errors: ValueError where no micro-batch fits.
    """
    from rlkit.model.memory import USABLE, Layout, engine_bytes, fitted, shape_of
    from rlkit.model.parallelize import COVERED
    from rlkit.model.pretrained import load_config
    from rlkit.run.console import say

    config, parallel = load_config(args.model.model), args.model.parallel
    if config.model_type not in COVERED:
        return args
    shape = shape_of(config)
    samples = getattr(args, "engine", None) is not None and args.engine.engine == "local"
    room = USABLE * total - samples * engine_bytes(shape, engine_tp=1)
    asked = Layout(1, tokens=args.optim.max_tokens, checkpointing=parallel.activation_checkpointing)
    found = fitted(shape, replace(asked, offload=parallel.offload), room=room)
    size = f"{shape.parameters / 1e9:.1f} B parameters on {total / 2**30:.0f} GiB"
    if found is None:
        fixes = "`lora_rank` 32 (its base in 8 or 4 bits: `lora_base`), `parallel.offload`, or several GPUs by torchrun"
        raise ValueError(f"training all weights of {size} does not fit: give {fixes}; `rlkit plan` counts what fits")
    changed = ["activation checkpointing is on"] * (found.checkpointing > asked.checkpointing)
    changed += [f"--max-tokens is {found.tokens} instead of {asked.tokens}"] * (found.tokens < asked.tokens)
    if changed:
        say(f"memory: {size}: {', '.join(changed)}")
    kept = replace(parallel, activation_checkpointing=found.checkpointing)
    optim = replace(args.optim, max_tokens=found.tokens)
    return replace(args, model=replace(args.model, parallel=kept), optim=optim)


def with_adapter(args: Any) -> Any:
    """The flags with the base model in `model` and its adapter in `adapter`, and with the adapter's rank and scale.

    ValueError for flags that contradict the adapter, and for one that is not trained (see `read_adapter`). Does not
    import torch.
    """
    from rlkit._extras import lacks
    from rlkit.model.adapter_files import read_adapter

    model, lora = args.model, args.lora
    path = model.model if is_adapter(model.model) else model.adapter
    if path is None:
        return args
    refuse_if(model.adapter and path != model.adapter, f"`model` {path} is an adapter too: give one, or its base model")
    refuse_if(not find_spec("peft"), lacks("peft", "lora", f"the adapter {path} needs"))
    base = base_of(path) if path == model.model else model.model
    file, what = read_adapter(path), f"the adapter {path} has"
    if lora.lora_rank != 0:
        fix = "drop the flag to train the adapter on, or give `lora_rank` 0 to merge it and train all weights"
        for name, given, own in (("rank", lora.lora_rank, file.rank), ("alpha", lora.lora_alpha, file.alpha)):
            refuse_if(given not in (None, own), f"`lora_{name}` {given}: {what} {name} {own:g}: {fix}")
        same = {*lora.lora_targets} in (set(), file.last_names)
        refuse_if(not same, f"`lora_targets`: {what} {', '.join(sorted(file.last_names))}: {fix}")
        lora = replace(lora, lora_rank=file.rank, lora_alpha=file.alpha)
    return replace(args, model=replace(model, model=base, adapter=path), lora=lora)


def check_device(device: str) -> None:
    """ValueError for a device that this torch does not have."""
    import torch

    try:
        found = torch.get_device_module(torch.device(device).type).is_available()
    except (RuntimeError, AttributeError):
        found = False
    if not found:
        raise ValueError(f"`device` {device}: torch {torch.__version__} finds no such device; use --device cpu")


def check_ranks(parallel: ParallelArgs) -> None:
    """ValueError in a plain process for sizes that need the ranks of torchrun. Does not import torch."""
    if parallel.ulysses and parallel.cp == 1:
        raise ValueError("--parallel.ulysses requires --parallel.cp above 1")
    names = [name for name in ("replicate", "shard", "cp", "tp", "pp", "ep") if getattr(parallel, name) > 1]
    if not names or launched():
        return
    given = " ".join(f"--parallel.{name} {getattr(parallel, name)}" for name in names)
    ranks = math.prod(getattr(parallel, name) for name in names if name != "ep")
    ranks = ranks if ranks > 1 else parallel.ep  # taken out of the others
    program = re.sub(r"^rlkit ", "-m rlkit.scripts.", sys.argv[0])
    start = f"torchrun --nproc-per-node {ranks} {program} ..."
    raise ValueError(f"{given} takes {ranks} processes, and this is one: start them with {start}")


def warn_of_steps(args: Any) -> None:
    """Warn of a run without steps, learning rate or evaluation, and of held-out data or `eval_steps` without use."""
    schedule, data = args.schedule, args.data
    if best := schedule.keep_best:
        from rlkit.run.meanings import KEYS, meaning_of

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


def warn_of_clip(args: Any) -> None:
    """Warn of clip distances that cannot act, with one optimizer step on a batch every ratio is 1, and of bounds."""
    low, high = args.loss.clip_low, args.loss.clip_high
    if low is not None and high is not None and 0.5 <= low < 1 < high <= 1.5:
        said = "--clip-low %g --clip-high %g are distances from 1: the ratio is clipped to %g and %g"
        log.warning(said, low, high, 1 - low, 1 + high)
    given = [f"--{x.replace('_', '-')}" for x in ("clip_low", "clip_high") if not is_default(args.loss, x)]
    if given and args.rollouts.minibatches * args.rollouts.epochs == 1:
        log.warning(
            "%s: nothing is clipped with one optimizer step on a batch, where every ratio is 1; use --minibatches or "
            "--epochs above 1", " and ".join(given),
        )  # fmt: skip


def warn_of_warmup(args: Any) -> None:
    """Warn of a warm-up that is longer than the run."""
    warmup, steps = args.optim.warmup_steps, args.schedule.steps
    if warmup > steps > 0:
        whose = " (the default)" if _default_of(args, "optim", "warmup_steps") == warmup else ""
        log.warning(
            "--warmup-steps %d%s is not below --steps %d: the learning rate never reaches --lr", warmup, whose, steps
        )


def _default_of(args: Any, settings: str, name: str) -> Any:
    """The script's own default of a flag, which may differ from that of the settings; None for one that has none."""
    return getattr(next(f.default for f in fields(args) if f.name == settings), name, None)


def warn_of_repeats(flag: str, num: int, num_rows: int) -> None:
    """Warn of a step that takes more rows than there are."""
    if num > num_rows:
        log.warning("%s %d is more than the %d rows of the data: rows repeat within a step", flag, num, num_rows)


def note_strings(data: Data, rows: list[dict[str, Any]]) -> None:
    """Log that a string prompt becomes a user message (TRL takes the raw text), or that messages lose their roles."""
    if not data.chat_template:
        turns = (row.get("messages") or row.get("prompt") for row in rows)
        if any(isinstance(messages, list) and len(messages) > 1 for messages in turns):
            logging.getLogger("rlkit.data").warning("--no-chat-template joins messages as plain text, without roles")
    prompts = (row.get("prompt") for row in rows if row.get("messages") is None)
    if data.chat_template and any(isinstance(prompt, str) for prompt in prompts):
        logging.getLogger("rlkit.data").warning(
            "string prompts are one user message for the chat template; --no-chat-template takes them as raw text"
        )


def template_file(args: Any) -> Path | None:
    """The file of --chat-template, or the copy in the folder of a resumed run where that file is gone."""
    from rlkit.data.template_files import KEPT

    given, kept = args.data.chat_template, args.schedule.output / KEPT
    if isinstance(given, bool):
        return None
    gone = args.schedule.resume and kept.exists() and not Path(given).expanduser().exists()
    return kept if gone else Path(given)


def where(args: Any) -> dict[str, Any]:
    """Arguments of `rlkit.model.launch.load_policy`, `load_critic` and `load_judge` from the flags."""
    given: dict[str, Any] = {"args": args.model.parallel, "device": args.model.device, "dtype": args.optim.dtype}
    if args.model.resize_embeddings:
        given["min_rows"] = vocabulary_size(load_tokenizer(args.model.model))
    return given


def check_resize(args: Any) -> None:
    """Refuse (ValueError) `resize_embeddings` where the new rows would not train, or another process lacks them."""
    if not args.model.resize_embeddings:
        return
    engine, rollouts = getattr(args, "engine", None), getattr(args, "rollouts", None)
    apart = launched() or (engine is not None and engine.engine != "local") or getattr(rollouts, "overlap", False)
    fix = "resize in a run of rlkit sft, and give its model/"
    refuse_if(apart, f"`resize_embeddings` is for one process with the model in it: {fix}")


def rows_of(model: Model, tokenizer: Any, *others: str | None) -> int:
    """The rows of the smallest embedding of the model, and of the `others` that read the same tokens."""
    from rlkit.model.pretrained import load_config

    size = min(load_config(path).get_text_config().vocab_size for path in (model.model, *others) if path)
    return max(size, vocabulary_size(tokenizer)) if model.resize_embeddings else size


def load_policies(args: Any, *, has_reference: bool) -> tuple[Any, Any]:
    """Load the model, print one line about it, and return it with the reference model or None."""
    from rlkit.model.launch import load_policy, reference_of, report_model

    adapter = args.model.adapter
    if adapter is None:
        check_rank(args.model.model, args.lora.lora_rank)
    load: Callable[..., Any] = partial(load_policy, **where(args), train_vision=args.model.train_vision)
    model = load(args.model.model, adapter=adapter, **args.lora.options())
    report_model(model, dtype=args.optim.dtype)
    report_adapter(args.model, args.lora)
    stop_at_template(model, args)
    if not has_reference:
        return model, None
    return model, reference_of(model, args.reference, path=args.model.model, load=load, adapter=adapter)


def report_adapter(model: Model, lora: Lora) -> None:
    """Print what becomes of the adapter of the flags, on rank 0."""
    from rlkit.run.console import say

    if model.adapter and is_first():
        what = "trains on" if lora.lora_rank else "is merged into the weights, which all train"
        say(f"adapter: {model.adapter} {what}; a reference is the model with the adapter as it is now")


def check_rank(path: str, rank: int | None) -> None:
    """ValueError for adapters of a rank that no matrix of the model has."""
    if rank:
        from rlkit.model.pretrained import load_config

        width = load_config(path).get_text_config().hidden_size
        refuse_if(rank > width, f"`lora_rank` {rank} is more than the model's width {width}: no matrix has that rank")


def stop_at_template(model: Any, args: Any) -> None:
    """Let the exported model stop at the end of turn of the chat template too, wherever it is served."""
    config = getattr(model, "generation_config", None)
    if config is None or not args.data.chat_template:
        return
    from rlkit.data.chat import stop_token_ids
    from rlkit.data.markup import markup_of
    from rlkit.data.template_files import read_template
    from rlkit.model import pretrained

    tokenizer, file = pretrained.load_tokenizer(args.model.tokenizer), template_file(args)
    markup = markup_of(tokenizer)
    if file is not None:
        tokenizer.chat_template = read_template(file)[0]
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


def image_reader(path: str, tokenizer: Any, rows: Iterable[Any]) -> Any:
    """What reads the images of the rows for the model at `path`, and refuses its placeholders; None for one of text."""
    from rlkit.data.images import reader_at, shows_images

    return reader_at(path, tokenizer, marked=any(map(shows_images, rows)))


def offline(
    args: Any,
    read: Callable[..., tuple[list[Any], int]],
    *forms: Any,
    reference: str | None = None,
    answers: Callable[[Any, Any], Any] = lambda _args, _rows: None,
) -> tuple[Any, Any, Any, Any, Any]:
    """The flags (see `begin`), the tokenizer, the examples that `read` makes of the training rows (and their `mixture`)
    and of those of each held-out set, and what `answers` makes of the rows of these sets before torch is loaded."""
    check_ranks(args.model.parallel)
    args = with_adapter(args)
    check_relations(args)
    check_resize(args)
    if args.examples.stream:
        check_stream(args.examples, args.optim, *forms)
    parts, held_out = args.data.rows(*forms, limit_each=STREAM_HEAD if args.examples.stream else None)
    of_answers = answers(args, held_out)
    warn_of_warmup(args)
    args = begin(args)
    tokenizer = load_tokenizer(args.model.tokenizer, reference, chat_template=template_file(args))
    known = {"tokenizer": tokenizer, "num_rows": rows_of(args.model, tokenizer, reference)}
    render: dict[str, Any] = {
        "tokenizer": tokenizer,
        "max_example_tokens": longest_example(args.examples, args.model.model, reference),
        "images": image_reader(args.model.model, tokenizer, chain(*parts, *held_out.values())),
        **args.data.rendering(),
    }

    def make(rows: Any) -> list[Any]:
        made = read(rows, **render)[0]
        check_vocabulary(made, rows=rows, **known)
        return made

    with data_progress():
        of_part = [make(part) for part in parts]
    every, sizes = [example for some in of_part for example in some], [*map(len, of_part)]
    if args.examples.stream:
        every, sizes = _streamed(args.data, make, *forms, head=every)
    examples = every, mixture(args.data, sizes)
    note_strings(args.data, parts[0])
    warn_of_repeats("--batch-size", args.examples.batch_size, len(examples[0]))
    examples_of = {name: make(part) for name, part in held_out.items()}
    return args, tokenizer, examples, examples_of, of_answers


def longest_example(how: Examples, *paths: str | None) -> int:
    """`max_example_tokens`, or the positions of one of the models where it has fewer, which is logged."""
    from rlkit.model.positions import check_positions, positions
    from rlkit.model.pretrained import load_config

    longest = how.max_example_tokens
    for config in (load_config(path) for path in paths if path):
        try:
            check_positions(longest, config, what="--max-example-tokens", fix="longer examples count as too long")
        except ValueError as error:
            log.warning("%s", error)
            longest = positions(config, packed=True) or longest
    return longest


def check_stream(how: Examples, optim: Optim, *forms: Any) -> None:
    """Refuse (ValueError) `stream` where all examples are needed, or some may not fit a micro-batch."""
    from rlkit.data.rows import LABELLED, PAIR

    refuse_if(LABELLED in forms, "`stream` is for sft, dpo and reward_model: kto counts the labels of all examples")
    num, most = (2 if PAIR in forms else 1) * how.max_example_tokens, optim.max_tokens
    refuse_if(num > most, f"`stream`: an example may have {num} tokens, and `max_tokens` is {most}: raise it")


def _streamed(data: Data, make: Callable[[Any], Any], *forms: Any, head: list[Any]) -> tuple[Any, list[int]]:
    """The training examples as they stream, and the number of rows of each part of the data."""
    from rlkit.data.load import Rows
    from rlkit.data.streaming import DiskRows, Streamed

    rows = DiskRows(*(files for files, _ in data.parts()), rename=data.rename)
    first = cache(rows.row)  # of a file: it decides the form of the others

    def of_row(index: int) -> Any:
        one, row = first(rows.file_of(index).start), rows.row(index)
        both = Rows([*one, *row], source=row.source, places=[*one.places, *row.places])
        return make(Rows(data.read(both, *forms)[1:], source=row.source, places=row.places))

    return Streamed(rows, of_row, head=head), rows.sizes


def mixture(data: Data, sizes: Iterable[int]) -> list[Any]:
    """The parts of the data: size, weight, and whose files they are."""
    from rlkit.data.order import Part
    from rlkit.data.sources import identity

    parts = zip(sizes, data.parts(), strict=True)
    return [Part(size, weight, identity(files)) for size, (files, weight) in parts]


def function_of(flag: str, spec: str) -> Any:
    """The function of a flag FILE.py:FUNCTION or MODULE:FUNCTION; ValueError, with the flag, if it does not exist."""
    from rlkit.rewards.load import load_function

    try:
        return load_function(spec)
    except (AttributeError, TypeError, ValueError, FileNotFoundError) as error:
        raise ValueError(f"`{flag}` {spec}: {error}") from None
    except ImportError as error:
        raise ImportError(f"`{flag}` {spec}: {error}", name=error.name) from None


def advantage_of(text: str, *, values: bool, **given: Any) -> Any:
    """The estimator of `--advantage`, with those of the options `given` that it has; ValueError for one that does not
    exist, or that needs a critic's `values` that are not there, or of yours that fails on a small batch."""
    name = text.partition("(")[0]
    own = ":" in name
    trial = trial_of(lambda trial: trial.try_advantage, values=values) if own else callable
    function = tried_function("advantage", text if own else f"rlkit.loops.estimators:{text}", trial)
    refuse_if(
        name in OF_VALUES and not values,
        f"`advantage` {name} needs a critic's values: use rlkit ppo --advantage {name}",
    )
    refuse_if(name in OF_RETURNS and values, f"`advantage` {name} uses no critic: use rlkit grpo --advantage {name}")
    bound = getattr(function, "keywords", {})
    parameters = inspect.signature(function).parameters
    return partial(function, **{key: x for key, x in given.items() if key in parameters and key not in bound})


def kl_estimator_of(args: Any, *, place: str = "loss") -> Any:
    """The function of `--kl-estimator`, or None; `place` is where the script puts the KL by default.

    ValueError for an estimator that does not suit the place, and for one of yours that fails on a few tokens.
    """
    name = args.kl.kl_estimator
    if name is None:
        return None
    refuse_if(not args.penalties.has_kl, "`kl_estimator` requires `kl_coef` above 0, or `kl_limit`")
    from rlkit import losses
    from rlkit.loops.coefficients import kl_term

    if ":" in name:
        function = tried_function("kl_estimator", name, trial_of(lambda trial: trial.try_kl))
    else:
        function = getattr(losses, "unbiased_kl" if name == "unbiased" else name)
    return kl_term(args.penalties, function, default=place).estimator


def own_optimizer(spec: str) -> Any:
    """The function of `--optimizer FILE.py:FUNCTION`, tried on a small matrix; None for the name of one of rlkit."""
    if ":" not in spec:
        return None
    import torch

    from rlkit.model.optim import check_optimizer

    make = function_of("optimizer", spec)
    try:
        check_optimizer(make([{"params": [torch.nn.Parameter(torch.zeros(2, 2))], "weight_decay": 0.0}]))
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"--optimizer {spec} failed on a parameter group: {what}") from error
    return make


def tried_function(flag: str, spec: str, trial: Callable[[Any], object]) -> Any:
    """`function_of`, after `trial(function)` has called it; ValueError, with the flag, for one that it refuses."""
    function = function_of(flag, spec)
    try:
        trial(function)
    except (ValueError, TypeError) as error:
        raise ValueError(f"`{flag}` {spec}: {error}") from error
    return function


def trial_of(choose: Callable[[Any], Any], **options: Any) -> Callable[[Any], object]:
    """The function that `choose` takes of `rlkit.loops.trial`, which is imported, with torch, when it is called."""

    def trial(function: Any) -> None:
        from rlkit.loops import trial

        choose(trial)(function, **options)

    return trial


def own_loss(spec: str, trial: Callable[[Any], object]) -> Any:
    """`tried_function` of `--loss FILE.py:FUNCTION`, a loss per element; None for the name of one of rlkit."""
    return _checked_loss(f"--loss {spec}", spec, tried_function("loss", spec, trial)) if ":" in spec else None


def _checked_loss(given: str, spec: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The loss function; LossError, with the user's line, where it raises or returns no loss per element."""
    calls = 0

    @wraps(function)
    def checked(x: Any, *args: Any, **options: Any) -> Any:
        nonlocal calls
        import torch

        try:
            found = function(x, *args, **options)
        except Exception as error:
            file = str(Path(spec.rpartition(":")[0]).expanduser().absolute())
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
            where = f" ({Path(file).name}, line {lines[-1]})" if lines else ""
            raise LossError(f"{given} failed: {type(error).__name__}: {error}{where}") from error
        expected = f"a loss for each element, a tensor of shape {list(x.shape)} like its first argument"
        if not isinstance(found, torch.Tensor):
            raise LossError(f"{given} must return {expected}, got {type(found).__name__} {found!r:.80}")
        if found.shape != x.shape:
            raise LossError(f"{given} must return {expected}, got shape {list(found.shape)}: do not average it")
        if x.requires_grad and torch.is_grad_enabled() and not found.requires_grad:
            fix = "compute it with torch, without .detach(), .item() or no_grad"
            raise LossError(f"{given} must return {expected}, and it has no gradient with respect to that: {fix}")
        calls += 1
        if calls == 1 and found.numel() and bool(found.isnan().all()):
            raise LossError(f"{given} must return {expected}, and all of it is NaN at the first call")
        return found

    return checked
