"""Measure a model on held-out data, without a run: mean@k, pass@k, the majority's answer and greedy decoding.

    rlkit eval MODEL --eval-data test.jsonl --reward my_rewards.py:score
    rlkit eval runs/grpo --eval-data gsm=a.jsonl hard=b.jsonl --samples 8 ...
    rlkit eval MODEL ... --eval-reward hard=other.py:score
    rlkit eval MODEL ... --eval-sampling hard=temperature:0.6,samples:16
    rlkit eval MODEL ... --output results     write metrics.json, answers.jsonl

The args.json of a run gives the system prompt and the sampling, unless a flag does.
Intervals are 95%, mean +- 1.96 standard errors over the prompts: too narrow for few prompts, or a mean near 0 or 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import tyro

from rlkit._util.files import check_model_path, is_adapter, replace_file
from rlkit.data.vocabulary import check_vocabulary
from rlkit.run.console import data_progress, say
from rlkit.scripts import grpo
from rlkit.scripts.args import Data, Episodes, Evaluation, Model
from rlkit.scripts.cli import Flat, run
from rlkit.scripts.engines import EngineSpec, check_engine, check_truncation, open_engine
from rlkit.scripts.flags import ChatTemplate
from rlkit.scripts.start import Rows, check_device, load_tokenizer, note_strings, template_file
from rlkit.scripts.task import check_context, engine_of, eval_sets, judged, read_env
from rlkit.scripts.tools.chat import SAMPLING, base_in, chosen_device, kept_flags, load
from rlkit.scripts.trial import OfTokenizer, own_rewards, read_reward, try_env
from rlkit.scripts.unusual import warn_of_unusual
from rlkit.settings import (
    Count,
    CountOr0,
    Engines,
    Positive,
    Range,
    Rollouts,
    Schedule,
    Seed,
    Share,
    check,
    is_default,
    refuse_if,
)

if TYPE_CHECKING:
    from rlkit.loops.evaluate import EvalSet

_NEW = Range("a new folder", lambda path: not Path(path).exists())
_OF_TRAINING = "weight_sync", "weight_sync_folder", "weight_sync_lora", "engine_pause", "engine_threads", "engine_cpus"
_RENDERING = ("system_prompt", "template_args")  # flags of a run that hold here where none is given


@dataclass(frozen=True)
class Args:
    """Flags."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """folder written by save_pretrained, adapter, hub id, or run folder (its model/, else its newest checkpoint)"""
    eval_data: str | tuple[str, ...]
    """held-out data, as for --eval-data of the other commands: NAME=FILE is a set that is measured by itself"""
    episodes: Flat[Episodes]
    evaluation: Flat[Evaluation] = Evaluation()
    samples: Count = 1
    """samples per prompt"""
    temperature: Positive | None = None
    """sampling temperature; None: the run's, else 1. Each set is decoded greedily, too"""
    max_new_tokens: Count | None = None
    """maximum tokens of an answer (of a turn, in an episode of several); None: the run's, else 1024"""
    top_p: Share | None = None
    """nucleus sampling; None: the run's, else off"""
    top_k: CountOr0 | None = None
    """sample from the k most likely tokens; None: the run's, else off"""
    min_p: Share | None = None
    """sample from tokens with at least this share of the most likely token's probability; None: the run's, else off"""
    stop: tuple[str, ...] = ()
    """strings that end a turn, in addition to the model's own stop tokens; none: the run's"""
    rename: dict[str, str] = field(default_factory=dict, hash=False)
    """rename columns of the data, old name and new name"""
    prompt: str | None = None
    """the prompt of each row as a format string over its columns, as for grpo"""
    system_prompt: str | None = None
    """system message for conversations that have none; None: the run's"""
    chat_template: ChatTemplate = True
    """file of a chat template; True: the model's own, or none where its run had none; False: none, strings are plain
    text (base models)"""
    template_args: str | None = None
    """JSON object of further arguments of the chat template; None: the run's"""
    seed: Seed = 0
    """random seed of the sampling"""
    device: str | None = None
    """cpu, cuda or mps (untested). None: cuda if there is a GPU, else cpu"""
    engine: Flat[Engines] = Engines()
    output: Annotated[Path | None, _NEW] = None
    """folder for metrics.json and answers.jsonl; None: print only"""

    def __post_init__(self) -> None:
        check(self, may_be_empty=("system_prompt",))
        refuse_if(self.episodes.eval_kl, "`eval_kl` compares a run with its reference: drop it")
        unread = next((name for name in _OF_TRAINING if not is_default(self.engine, name)), None)
        refuse_if(unread, f"`{unread}` is for training beside the engine: drop it")


class Asked(NamedTuple):
    """The rows of each set, and what judges their answers, checked without torch: functions of the tokenizer.

    `own` are the rewards of sets that have one of their own; `config` is that of the model.
    """

    rows: dict[str, Rows]
    own_rewards: Mapping[str, OfTokenizer]
    env: OfTokenizer
    score: OfTokenizer
    config: Any


def main(args: Args) -> None:
    """Print the numbers of each set, and write them and the answers to `output`."""
    from rlkit.run.sync import run_sync

    folder = Path(args.model)
    saved = kept_flags(folder)
    flags = flags_of_grpo(args, saved)
    with TemporaryDirectory() as scratch:  # logs of agents and of servers that are started here
        asked = bring(args, flags, saved, logs=args.output or Path(scratch))
        warn_of_unusual(vars(args))
        flags = replace(flags, model=replace(flags.model, device=chosen_device(args.device)))
        model, tokenizer = load_for(flags, folder, saved)
        flags = replace(flags, rollouts=replace(flags.rollouts, stop_token_ids=ends_of(flags, model, tokenizer, saved)))
        sets, env = make_sets(flags, asked, model, tokenizer)
        spec = engine_of(flags, flags.model, args.output or Path(scratch))
        numbers, answers = run_sync(measure(args, flags, spec, model, tokenizer, sets, env, asked.score(tokenizer)))
    for line in table(numbers, {name: len(one.prompts) for name, one in sets.items()}):
        say(line)
    if args.output:
        write(args.output, numbers, answers)


def bring(args: Args, flags: grpo.Args, saved: Mapping[str, Any], *, logs: Path) -> Asked:
    """Read the data and the user's code; ValueError for what cannot be measured."""
    from rlkit.data.turns import PROMPT
    from rlkit.model.pretrained import load_config

    if not saved or not flags.engine.is_local:
        check_model_path(flags.model.model)
    served = f"`engine` {flags.engine.engine} has no adapter {args.model}: use local, or give the merged model"
    refuse_if(not flags.engine.is_local and is_adapter(args.model), served)
    files = flags.data.eval_files()
    episodes = judged(flags.episodes, [spec for specs in files.values() for spec in specs])
    flags.evaluation.check_sets(files)
    check_engine(flags.engine, device=args.device)
    check_truncation(flags.engine, flags.rollouts, flags.evaluation)
    check_device(args.device)
    with data_progress():
        loaded, _ = flags.data.load_eval(limit=args.evaluation.eval_limit, unused=None)
    rows = {name: flags.data.read(part, PROMPT) for name, part in loaded.items()}
    rewards = own_rewards(args.evaluation, args.episodes, rows)
    env = read_env(args.episodes, flags.data, flags.rollouts, *rows.values(), output=logs)
    others = (part for name, part in rows.items() if name not in rewards)
    score = read_reward(episodes, *others, trial=args.evaluation.trial)
    exported = (Path(flags.model.model) / "config.json").is_file() or not saved
    config = load_config(flags.model.model if exported else base_in(Path(args.model), saved))
    check_context(flags, config, packed=False)
    return Asked(rows, rewards, env, score, config)


def make_sets(flags: grpo.Args, asked: Asked, model: Any, tokenizer: Any) -> tuple[dict[str, EvalSet], Any]:
    """The sets, tokenized, and the environment, which is tried."""
    sets, env = eval_sets(flags, tokenizer, asked.config, asked.rows, asked.own_rewards), asked.env(tokenizer)
    size = asked.config.get_text_config().vocab_size
    size = model.get_input_embeddings().num_embeddings if model is not None else size
    for name, one in sets.items():
        check_vocabulary(one.prompts, tokenizer=tokenizer, num_rows=size, rows=asked.rows[name])
    if flags.evaluation.trial:
        try_env(flags.episodes, tokenizer, env, next(iter(sets.values())).prompts, ends=flags.rollouts.stop_token_ids)
    for part in asked.rows.values():
        note_strings(flags.data, part)
    return sets, env


async def measure(
    args: Args, flags: grpo.Args, spec: EngineSpec, model: Any, tokenizer: Any, sets: Mapping[str, EvalSet], env: Any,
    score: Any,
) -> tuple[dict[str, float], list[dict[str, Any]]]:  # fmt: skip
    """The numbers of each set, and the answers."""
    from rlkit.loops.evaluate import answer_of, evaluate_sets
    from rlkit.run.samples import trajectory_rows

    answers: list[dict[str, Any]] = []

    def keep(prompt: Any, group: Any, *, kind: str) -> None:
        decode = partial(tokenizer.decode, skip_special_tokens=False)
        answers.extend({"kind": kind, "row": prompt.index} | row for row in trajectory_rows(group, decode=decode))

    async with open_engine(spec, model, tokenizer) as engine:
        numbers = await evaluate_sets(
            sets, generate=engine.generate, params=flags.rollouts.params, num_samples=args.samples, env=env,
            score=score, seed=args.seed, on_group=keep, engine=engine, answer=partial(answer_of, tokenizer=tokenizer),
        )  # fmt: skip
    return numbers, answers


def write(output: Path, numbers: Mapping[str, float], answers: Sequence[Mapping[str, Any]]) -> None:
    """Write metrics.json and answers.jsonl."""
    output.mkdir(parents=True, exist_ok=True)
    replace_file(output / "metrics.json", (json.dumps(numbers, indent=1) + "\n").encode())
    replace_file(output / "answers.jsonl", "".join(json.dumps(row, default=str) + "\n" for row in answers).encode())
    say(f"wrote {output / 'metrics.json'} and answers.jsonl")


def flags_of_grpo(args: Args, saved: Mapping[str, Any]) -> grpo.Args:
    """The same flags as those of `rlkit grpo`, with what the run of the model kept where none is given."""

    def kept(names: Iterable[str], run: Mapping[str, Any]) -> dict[str, Any]:
        flags = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
        return {name: run[name] for name in names if name in run} | flags

    template = False if args.chat_template is True and saved.get("chat_template") is False else args.chat_template
    data = Data(
        "-", rename=args.rename, prompt=args.prompt, eval_data=args.eval_data, chat_template=template,
        **kept(_RENDERING, {} if template is False else saved),
    )  # fmt: skip
    served = replace(args.engine, weight_sync_lora="merged") if args.engine.serves else args.engine
    exported = Path(args.model) / "model"
    path = str(exported) if (exported / "config.json").is_file() else args.model
    return grpo.Args(
        Model(path, device=args.device), data, args.episodes, args.evaluation,
        Rollouts(stop=args.stop or tuple(saved.get("stop", ())), eval_samples=args.samples, **kept(SAMPLING, saved)),
        Schedule(Path("-"), steps=0), engine=served,
    )  # fmt: skip


def load_for(flags: grpo.Args, folder: Path, saved: dict[str, Any]) -> tuple[Any, Any]:
    """The model, None where servers have it, and its tokenizer."""
    from rlkit.data.template_files import set_template

    if not flags.engine.is_local:
        return None, load_tokenizer(flags.model.model, chat_template=template_file(flags.data, flags.schedule))
    model, tokenizer = load(folder, saved, device=flags.model.device)
    if file := template_file(flags.data, flags.schedule):
        set_template(tokenizer, file)
    return model, tokenizer


def ends_of(flags: grpo.Args, model: Any, tokenizer: Any, saved: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end a turn."""
    from rlkit.data.chat import stop_token_ids
    from rlkit.model.pretrained import load_config

    configs = (load_config(flags.model.model),) if model is None else (model.config, model.generation_config)
    ends = stop_token_ids(tokenizer, *configs) if flags.data.chat_template else ()
    return (*ends, *saved.get("stop_token_ids", ()))


def table(numbers: Mapping[str, float], sizes: Mapping[str, int]) -> list[str]:
    """Lines of the numbers of each set, with their 95% intervals."""
    lines = []
    for name, size in sizes.items():
        prefix = f"eval/{name}/" if name else "eval/"
        keys = [key for key in numbers if key.startswith(prefix) and "/" not in key.removeprefix(prefix)]
        lines.append(f"{name or 'held-out data'}: {size} prompts")
        for key in (key for key in keys if not key.endswith("_se")):
            error = numbers.get(f"{key}_se")
            interval = "" if error is None else f" +- {1.96 * error:.4f}"
            lines.append(f"  {key.removeprefix(prefix):12} {numbers[key]:.4f}{interval}")
    return lines


if __name__ == "__main__":
    run(main, Args, __doc__)
