"""Flags that several training scripts have: a dataclass for each subject, which refuses values without effect."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from rlkit._util.extras import lacks
from rlkit._util.untrusted import loads
from rlkit.rollout.envs.calls import FORMATS
from rlkit.run.console import data_progress
from rlkit.scripts.flags import ChatTemplate
from rlkit.settings import (
    Above1,
    AtLeast1,
    Below1,
    Count,
    CountOr0,
    Finite,
    For,
    Needs,
    ParallelArgs,
    Positive,
    Range,
    Rollouts,
    SamplingParams,
    Without,
    check,
    collected,
    is_default,
    named,
    refuse_if,
)

log = logging.getLogger("rlkit.scripts")


@dataclass(frozen=True)
class Model:
    """The model, and the device it trains on."""

    model: str
    """folder written by save_pretrained, or a hub id; or an adapter on its base model, as for --adapter"""
    adapter: str | None = None
    """LoRA adapter of `model` that training goes on in: a folder of peft's save_pretrained, or RUN/adapter. The
    reference is the model with the adapter as it was; --lora-rank 0 merges it, and trains all weights"""
    device: str | None = None
    """cpu, cuda (each rank of torchrun takes one GPU) or mps (untested). None: cuda if there is a GPU, else cpu"""
    parallel: ParallelArgs = field(default_factory=ParallelArgs)
    """how the model is sharded over the ranks of torchrun"""
    resize_embeddings: Annotated[
        bool, Without("lora_rank", "critic_lora_rank", why="it adds rows that adapters do not train")
    ] = False
    """add a row to the embedding (and the head) for each token that was added to the tokenizer: the mean of the others.
    In one process with --engine local, without --lora-rank, which would not train them"""
    yarn: Above1 | None = None
    """extend the context of `model` to this many times its positions by YaRN, in training, engines and exports; None:
    as its config.json says (docs/models.md)"""
    train_vision: bool = False
    """train the tower of a vision model too; by default it is frozen"""
    deterministic: bool = False
    """use deterministic CUDA kernels (slower): a resumed run repeats every bit, as on CPUs it always does (not with
    --overlap)"""
    debug: bool = False
    """show the traceback of errors that are otherwise printed in one line"""

    def __post_init__(self) -> None:
        check(self)

    @property
    def tokenizer(self) -> str:
        """Where the tokenizer is: that of an adapter may have a chat template of its own."""
        return self.adapter if self.adapter and (Path(self.adapter) / "tokenizer_config.json").is_file() else self.model


def _arguments(text: str) -> Any:
    """The parsed JSON; None if it is not JSON."""
    try:
        return loads(text)
    except ValueError:
        return None


_JSON_OBJECT = Range('a JSON object like {"name": true}', lambda text: isinstance(_arguments(text), dict))
_OF_TEMPLATE = Needs("chat_template", why="drop it, or --no-chat-template")


@dataclass(frozen=True)
class Data:
    """Training and held-out rows, and how they are rendered."""

    data: str | tuple[str, ...]
    """training data: JSON, JSONL, CSV, TSV (also .gz), Parquet or Arrow files or a glob, folders (of shards, or of
    save_to_disk; FOLDER:SPLIT names a split), hub ids OWNER/NAME:CONFIG:SPLIT or tasks of a package, as in
    "reasoning_gym:chain_sum(size=2000)". Several are read one after the other, or mixed by weights: a.jsonl=2
    b.jsonl=1"""
    rename: dict[str, str] = field(default_factory=dict, hash=False)
    """rename columns of the data, old name and new name: `--rename question prompt output response`"""
    prompt: str | None = None
    r"""the prompt of each row as a format string over its columns, "{context}\n\n{question}", where \n is a line break
    (docs/data.md). None: the column that a form has for it"""
    eval_data: str | tuple[str, ...] | None = None
    """held-out data, in the same formats; of several splits the only test or validation split. NAME=FILE is a set that
    is measured by itself, as eval/NAME/...; files without a name are one set. None: no evaluation"""
    system_prompt: Annotated[str | None, _OF_TEMPLATE, Without("agent", why="which writes its own messages")] = None
    """system message for conversations that have none"""
    chat_template: ChatTemplate = True
    """file of a chat template; True: the model's own; False: none, strings are plain text (base models)"""
    template_args: Annotated[str, _JSON_OBJECT, _OF_TEMPLATE] = "{}"
    """JSON object of further arguments of the chat template, e.g. {"enable_thinking": false} for Qwen3"""
    too_long: Literal["drop", "cut-left", "cut-right", "error"] = "drop"
    """prompts and examples above the limit of tokens: drop (and report) them, cut their first (left) or last tokens, or
    end with an error. Of a prompt the text of the last user message is cut; of a pair, cut-left cuts the prompt,
    cut-right the responses"""

    continue_answer: bool = False
    """prompts that end with an assistant message begin the answer, whatever it is; in RL the same one in all rows does
    without the flag, and answers that differ are refused"""

    def __post_init__(self) -> None:
        check(self, may_be_empty=("system_prompt", "template_args"))
        if self.system_prompt and len(self.system_prompt) < 200 and Path(self.system_prompt).is_file():
            fix = f'give the text: "$(cat {self.system_prompt})"'
            raise ValueError(
                f"`system_prompt` {self.system_prompt!r} is the name of a file, and would be the message: {fix}"
            )
        self.eval_files()
        self.parts()

    def parts(self) -> list[tuple[list[str], float]]:
        """The files and the weight of each part of `data`: one part of all files where there are no weights."""
        specs = [self.data] if isinstance(self.data, str) else self.data
        weighted = [_weighted(text) for text in specs]
        weights = [weight for _, weight in weighted if weight is not None]
        if not weights:
            return [([*specs], 1.0)]
        fix = "give each file a weight, as in a.jsonl=2 b.jsonl=1, or none"
        refuse_if(len(weights) < len(specs), f"`data` has weights for {len(weights)} of {len(specs)} files: {fix}")
        for text, (_, weight) in zip(specs, weighted, strict=True):
            refuse_if(weight is not None and not 0 < weight < math.inf, f"`data` {text}: the weight must be above 0")
        return [([spec], 1.0 if weight is None else weight) for spec, weight in weighted]

    def eval_files(self) -> dict[str, list[str]]:
        """The files of each held-out set; those without a name are the set ""."""
        sets: dict[str, list[str]] = {}
        for text in (self.eval_data,) if isinstance(self.eval_data, str) else self.eval_data or ():
            name, spec = split_name(text)
            fix = "give each file a name of its own, or one glob, as in 'hard=part-*.jsonl'"
            refuse_if(name and name in sets, f"`eval_data` has two sets {name}: {fix}")
            refuse_if(not spec, f"`eval_data` {text}: no file after the name")
            sets.setdefault(name, []).append(spec)
        return sets

    def template(self) -> Any:
        """The parsed `template_args`; None if it is not JSON."""
        return _arguments(self.template_args)

    def rendering(self) -> dict[str, Any]:
        """Arguments of `rlkit.data.prompts.rl_prompts` and of the readers of `rlkit.data.examples`."""
        return {
            "system_prompt": self.system_prompt,
            "apply_chat_template": bool(self.chat_template),
            "template_args": self.template() or None,
            "too_long": self.too_long,
            "continue_answer": self.continue_answer,
        }

    @data_progress()
    def rows(
        self, *forms: Any, limit: int | None = None, limit_each: int | None = None, whole: bool = False
    ) -> tuple[list[list[dict[str, Any]]], dict[str, list[dict[str, Any]]]]:
        """The training rows of each of `parts`, at most `limit_each` of a file, and at most `limit` rows of each
        held-out set. Held-out rows whose prompt also trains are logged; with `whole` those of which all columns do.

        ValueError for a row that has none of the `forms`.
        """
        from rlkit.data.load import mixed_types, name_splits
        from rlkit.data.prompts import shared
        from rlkit.data.turns import PROMPT

        elsewhere = {*self.rename}
        rows = [self._load(files, absent=elsewhere, limit_each=limit_each) for files, _ in self.parts()]
        held_out, absent = self.load_eval(limit=limit, unused=set()) if self.eval_data else ({}, {*self.rename})
        if both := sorted(elsewhere & absent):  # a column that one of the two has need not be in the other
            where = "neither --data nor --eval-data has that column" if self.eval_data else "no file has that column"
            raise ValueError(f"--rename {both[0]}: {where}")
        pair = [self.read(part, *forms) for part in rows], {name: self.read(x, *forms) for name, x in held_out.items()}
        read_as = zip((*rows, *held_out.values()), (*pair[0], *pair[1].values()))
        kinds = {type(made[0].get("answer")) for raw, made in read_as if raw and type(raw[0].get("answer")) is int}
        fault = "the answers of some files are the places of choices from 0, and of others from 1"
        refuse_if(self.prompt is not None and len(kinds) > 1, f"`prompt`: {fault}: write the letters A, B, ... in all")
        for part in rows:
            name_splits(part)
        for column in (line for part in rows for line in mixed_types(part)) if PROMPT in forms else ():
            log.warning("%s: a reward sees the value of each row as it is", column)
        names = [name for part in rows for name in part.sources]
        both = shared([*pair[1].values()], pair[0], whole=whole) if held_out else []
        for part, line in zip(held_out.values(), both, strict=True):
            if same := [name for name in names if name in part.sources]:
                log.warning("--eval-data is not held out: %s is also in --data", same[0])
            elif line:
                log.warning("--eval-data is not held out: %s", line)
        return pair

    def load_eval(self, *, limit: int | None, unused: set[str] | None) -> tuple[dict[str, Any], set[str]]:
        """The rows of each held-out set as they are, and the columns of `rename` that none of the sets has."""
        absent, named = {*self.rename}, self.eval_files().items()
        sets = {name: self._load(files, absent=absent, limit=limit, held_out=True) for name, files in named}
        if absent and unused is None:
            raise ValueError(f"--rename {min(absent)}: --eval-data does not have that column")
        return sets, absent

    def _load(self, files: list[str], *, absent: set[str], held_out: bool = False, **limits: Any) -> Any:
        """The rows of some files; the columns of `rename` that these have leave `absent`."""
        from rlkit.compat.libraries import env_rows
        from rlkit.data.load import load_rows

        unused, sources = set[str](), [env_rows(file, held_out=held_out) for file in files]
        rows = load_rows(sources, rename=self.rename, held_out=held_out, unused=unused, **limits)
        absent &= unused
        return rows

    def read(self, rows: Any, *forms: Any) -> list[dict[str, Any]]:
        """The rows in the columns of rlkit."""
        from rlkit.compat.rows import read

        made = None if self.prompt is None else self.prompt.replace("\\n", "\n")
        return read(rows, *forms, apply_chat_template=bool(self.chat_template), prompt=made)

    def files(self) -> list[str]:
        """What `data` names, as a list."""
        return [self.data] if isinstance(self.data, str) else list(self.data)

    def expanded(self) -> Data:
        """The data with the files of its globs in their place, as a run folder keeps it."""
        from rlkit.data.sources import expand

        def files(value: Any) -> Any:
            paths = [path for spec in ((value,) if isinstance(value, str) else value or ()) for path in expand(spec)]
            return tuple(paths) if len(paths) > 1 else next(iter(paths), None)

        weighed, sets = any(weight is not None for _, weight in map(_weighted, self.files())), self.eval_files()
        held_out = self.eval_data if {*sets} - {""} else files(self.eval_data)
        return replace(self, data=self.data if weighed else files(self.data), eval_data=held_out)


def _weighted(text: str) -> tuple[str, float | None]:
    """FILE and the weight of FILE=WEIGHT; None where the text is a file, or what follows the last `=` is no number."""
    spec, equals, number = text.rpartition("=")
    if not equals or os.path.exists(text):
        return text, None
    try:
        return spec, float(number)
    except ValueError:
        return text, None


def split_name(text: str) -> tuple[str, str]:
    """NAME and the rest of NAME=REST; "" and the text where that is a file, or nothing before a `=` is a name."""
    name, equals, rest = text.partition("=")
    return (name, rest) if equals and name.isidentifier() and not os.path.exists(text) else ("", text)


@dataclass(frozen=True)
class Evaluation:
    """Rewards and sampling of the held-out sets, and the trial of rewards."""

    eval_reward: Annotated[tuple[str, ...], Needs("eval_data")] = ()
    """reward on held-out prompts in place of --reward: FILE.py:FUNCTION, with a weight where there are several, as for
    --reward; NAME=FILE.py:FUNCTION is for the set NAME of --eval-data"""
    eval_sampling: Annotated[tuple[str, ...], Needs("eval_data")] = ()
    """sampling on held-out prompts, as temperature:0.6,samples:4 (also top_p, top_k, min_p, max_new_tokens);
    NAME=... is for the set NAME of --eval-data"""
    eval_limit: Count = 128
    """maximum number of held-out prompts of each set"""
    trial: bool = True
    """call reward functions and the environment on the first row with a gold answer before the model is loaded
    (--no-trial: not, e.g. where a call costs money; rlkit's own judges are not called)"""

    def __post_init__(self) -> None:
        check(self)
        for name, texts in self._by_set(self.eval_sampling).items():
            refuse_if(len(texts) > 1, f"`eval_sampling` is given twice{f' for {name}' if name else ''}: join by commas")
            self._sampling(texts[0])

    @staticmethod
    def _by_set(texts: tuple[str, ...]) -> dict[str, list[str]]:
        by_set: dict[str, list[str]] = {}
        for name, rest in map(split_name, texts):
            by_set.setdefault(name, []).append(rest)
        return by_set

    def reward_of(self, name: str) -> tuple[str, ...] | None:
        """The rewards of a set; None: those of training."""
        return tuple(self._of_set(self.eval_reward, name)) or None

    def sampling_of(self, name: str) -> dict[str, Any]:
        """What differs in the sampling of a set: fields of `SamplingParams`, and `samples`."""
        texts = self._of_set(self.eval_sampling, name)
        return self._sampling(texts[0]) if texts else {}

    def samplings(self) -> dict[str, dict[str, Any]]:
        """`sampling_of` each set that `eval_sampling` names, in its order."""
        return {name: self.sampling_of(name) for name in self._by_set(self.eval_sampling)}

    def longest(self, rollouts: Rollouts) -> Rollouts:
        """The rollouts with the longest answers of training and of all sets."""
        asked = [own.get("max_new_tokens", 0) for own in self.samplings().values()]
        return replace(rollouts, max_new_tokens=max(rollouts.max_new_tokens, *asked, 0))

    def _of_set(self, texts: tuple[str, ...], name: str) -> Sequence[str]:
        by_set = self._by_set(texts)
        return by_set.get(name, by_set.get("", ()))

    def _sampling(self, text: str) -> dict[str, Any]:
        options: dict[str, Any] = {}
        for pair in text.split(","):
            key, _, value = pair.partition(":")
            kind = _SAMPLING.get(key)
            try:
                options[key] = kind(value) if kind else None
            except ValueError:
                kind = None
            allowed = f"{', '.join(_SAMPLING)}, each with a number, as in temperature:0.6,samples:4"
            refuse_if(kind is None, f"`eval_sampling` {text}: {pair} is not one of {allowed}")
        if None in options.values():
            return {}
        samples, greedy = options.get("samples", 1), options.get("temperature") == 0
        with collected() as faults:
            SamplingParams(**{k: x for k, x in options.items() if k != "samples"})
            refuse_if(samples < 1, "samples must be at least 1")
            refuse_if(samples > 1 and greedy, "at temperature 0 all samples are the same: drop samples")
        refuse_if(faults, f"`eval_sampling` {text}: {''.join(faults[:1]).replace('`', '')}")
        return options

    def check_sets(self, sets: Iterable[str]) -> None:
        """Refuse settings of a set that `eval_data` does not have."""
        names = {*sets}
        for flag in ("eval_reward", "eval_sampling"):
            by_set = self._by_set(getattr(self, flag))
            for name in sorted({*by_set} - names - {""}) if names else ():
                there = f"has no set {name}; its names are {', '.join(sorted(names - {''}))}"
                there = there if names - {""} else f"names no set: write `eval_data` {name}=FILE"
                refuse_if(True, f"`{flag}` {name}=...: `eval_data` {there}")


_SAMPLING: dict[str, Any] = {
    "temperature": float, "samples": int, "top_p": float, "top_k": int, "min_p": float, "max_new_tokens": int,
}  # fmt: skip


@dataclass(frozen=True)
class Examples:
    """Batches of offline data."""

    batch_size: Count = 64
    """examples, pairs or labelled responses per step"""
    max_example_tokens: Count = 2048
    """maximum tokens of an example, or of each response of a pair with its prompt; for longer ones see --too-long"""
    stream: bool = False
    """leave --data on the disk (JSONL or Parquet files), for more than memory holds: a row is read and tokenized when a
    step takes it, and reports are of the first 1000 rows of each file"""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class Lora:
    """LoRA adapters (needs peft)."""

    lora_rank: CountOr0 | None = None
    """rank of LoRA adapters, which alone are trained (beside a reward model's head); 0: train all weights. None: 0, and
    of an --adapter its own"""
    lora_targets: Annotated[tuple[str, ...], Needs("lora_rank")] = ()
    """names of the layers that get an adapter, e.g. q_proj v_proj; none: all but the head, also experts"""
    lora_alpha: Annotated[Positive | None, Needs("lora_rank")] = None
    """scale of the adapters times their rank: W + (alpha / rank) B A; None: twice the rank"""
    lora_dropout: Annotated[Below1, Needs("lora_rank")] = 0.0
    """share of the adapters' inputs that are dropped in training on fixed data"""
    lora_base: Annotated[Literal["int8", "nf4"] | None, Needs("lora_rank")] = None
    """quantize the frozen weights under the adapters to 8 or 4 bits (nf4 as in QLoRA); None: fp32, of a model in
    FP8 its own"""

    def __post_init__(self) -> None:
        check(self)
        if joined := next((target for target in self.lora_targets if "," in target), None):
            apart = " ".join(part.strip(" []'\"") for part in joined.split(","))
            refuse_if(True, f"`lora_targets` {joined}: several names are separated by blanks: {apart}")
        refuse_if(self.lora_rank and not find_spec("peft"), lacks("peft", "lora", "`lora_rank` needs"))

    def options(self) -> dict[str, Any]:
        """Arguments of the loaders of `rlkit.model.launch`."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def _is_address(text: str) -> bool:
    """Whether the text is HOST or HOST:PORT, and no address that a server only listens at."""
    host, _, port = text.rpartition(":")
    has_port = host not in ("0.0.0.0", "") and port.isdecimal() and int(port) < 1 << 16
    return has_port or (text.count(":") != 1 and text not in ("0.0.0.0", "::"))


_OF_AGENT = Needs("agent")
_OF_TURNS = Needs("env", "agent", "tools", why="else there is one turn, of at most `max_new_tokens`")


@dataclass(frozen=True)
class Episodes:
    """Prompts, environment and reward."""

    reward: str | tuple[str, ...] | None = None
    """FILE.py:FUNCTION or MODULE:FUNCTION that scores a completion; None: the environment's own reward.
    Several are summed with weights and logged as reward/FUNCTION, e.g. a.py:right b.py:form=0.1 (0: only logged).
    Arguments may follow: "rlkit.rewards.text:soft_overlong(max_tokens=512, cache_tokens=128)=0.5\".
    NAME=FILE.py:FUNCTION judges the rows of one source, as in math=a.py:f code=b.py:g, and is logged as reward/NAME"""
    reward_column: str = "data_source"
    """column of the rows with the name of their source, for --reward NAME=FILE.py:FUNCTION"""
    combine: Literal["sum", "tchebycheff", "normalize_then_sum", "lexicographic"] = "sum"
    """how several rewards become one (docs/advantages.md): their weighted sum; tchebycheff: minus the largest weighted
    distance to --ideal; normalize_then_sum: z-scores in the group, summed (GDPO); lexicographic: by the first, ties by
    the second, and so on. All but sum log the weighted sum as the score"""
    ideal: Annotated[tuple[Finite, ...], For("combine", "tchebycheff")] = ()
    """with --combine tchebycheff: the best value of each reward with a weight other than 0, in their order"""
    env: str | tuple[str, ...] | None = None
    """FILE.py:NAME or MODULE:NAME of an environment: `async def env(prompt, sample)`, a function of the tokenizer that
    returns one, a class with reset and step, or one of another system (docs/environments.md). Or LIBRARY:ID of gem,
    textarena, verifiers, openenv, aviary or gymnasium, which brings its own --data. Several as NAME=FILE.py:NAME,
    chosen by --env-column. None: one question, one answer"""
    opponent: Annotated[str | None, Needs("env")] = None
    """who plays the other players of a game of TextArena: self (the policy, which trains as all of them), or
    FILE.py:FUNCTION from the text so far to an action"""
    env_column: str = "env"
    """column of the rows that names one of several environments"""
    agent: Annotated[str | None, Without("env", "tools", why="an agent is an environment; drop them")] = None
    """a command that is run once per episode and calls the policy as a model over HTTP (OPENAI_BASE_URL,
    ANTHROPIC_BASE_URL), e.g. "python my_agent.py {question}" with columns of the row. Or FILE.py:FUNCTION,
    `def agent(prompt, base_url)` (docs/environments.md)"""
    agent_timeout: Annotated[Positive, _OF_AGENT] = 600.0
    """seconds after which an agent's episode fails, without those in which it waits for a turn while the run trains"""
    agent_memory: Annotated[Positive | None, _OF_AGENT] = None
    """GiB of memory of a command with all its processes, above which its episode fails; None: no limit"""
    agent_address: Annotated[
        str, Range("HOST or HOST:PORT with a host that agents can reach", _is_address), _OF_AGENT
    ] = "127.0.0.1"
    """HOST or HOST:PORT at which agents reach the policy: an address of this machine, for agents on others"""
    agent_certificate: Annotated[Path | None, _OF_AGENT] = None
    """PEM file of a certificate for the host of --agent-address, with its chain: agents reach the policy by HTTPS"""
    agent_key: Annotated[Path | None, _OF_AGENT, Needs("agent_certificate")] = None
    """PEM file of the key of --agent-certificate; None: in the same file"""
    agent_sampling: Annotated[Literal["run", "refuse"], _OF_AGENT] = "run"
    """requests that ask for a temperature or other sampling parameters: run samples as the flags say, and reports it
    once; refuse answers with status 400"""
    tools: tuple[str, ...] = ()
    """FILE.py:FUNCTION of each function that the model may call; the first turn without a call is its answer. With
    --env the prompts list them, and the environment runs calls"""
    tool_calls: Annotated[
        str | None, named(*FORMATS), Needs("tools", "agent"), Without("env", why="an environment reads calls itself")
    ] = None
    """how calls of `tools`, or of those of an `agent`, are read. None: as the chat template itself writes them. Else a
    format (hermes, function, arg_key, json, pythonic, harmony, mistral, deepseek, kimi, xtml, invoke, gemma), or
    FILE.py:FUNCTION of a turn's text that returns a list of (name, arguments), empty for an answer"""
    max_prompt_tokens: Count = 1024
    """maximum tokens of a prompt; for longer ones see --too-long"""
    max_turns: Annotated[Count | None, _OF_TURNS] = None
    """maximum turns of an episode; None: the environment's own limit"""
    max_total_tokens: Count | None = None
    """maximum context of an episode, prompt and all turns; None: max_prompt_tokens + max_new_tokens"""
    max_sampled_tokens: Annotated[Count | None, _OF_TURNS] = None
    """maximum sampled tokens of an episode, all turns together; None: no limit"""
    compact_at: Annotated[Count | None, Needs("env", "tools", why="an agent compacts its conversations itself")] = None
    """ask the policy for a summary where the context, a turn and a summary would have more tokens, and go on from it:
    episodes may be longer than the context. Summaries train with the episode's reward (docs/environments.md)"""
    reward_timeout: Positive = 30.0
    """seconds that one call of the reward function may take"""
    reward_max_failed: Below1 | None = None
    """share of the last 100 samples whose reward or agent may fail; failed samples do not train. 0: the first ends the
    run. None: 0, and 0.5 with an agent"""
    eval_kl: Annotated[bool, Needs("eval_data")] = False
    """measure the KL to the reference model (which is loaded for it) on held-out prompts"""

    def __post_init__(self) -> None:
        check(self)
        self._check_combine()
        check_column_flag(self, "env", self.envs())
        unread = not self.reward_sources() and not is_default(self, "reward_column")
        refuse_if(unread, "`reward_column` is for sources: give `reward` as NAME=FILE.py:FUNCTION")

    @property
    def one_turn(self) -> bool:
        """Whether an episode is one question and one answer."""
        return self.env is None and not self.tools and self.agent is None

    @property
    def has_judge(self) -> bool:
        """Whether a reward, an environment or an agent judges samples."""
        return bool(self.reward) or self.env is not None or self.agent is not None

    @property
    def max_failed(self) -> float:
        """`reward_max_failed` with its default."""
        return (0.0 if self.agent is None else 0.5) if self.reward_max_failed is None else self.reward_max_failed

    def _check_combine(self) -> None:
        """Refuse a way to combine rewards that does not suit them."""
        used = {name: weight for name, (_, weight) in self.rewards().items() if weight != 0}
        refuse_if(
            self.combine != "sum" and len(used) < 2, f"`combine` {self.combine} needs several functions of `reward`"
        )
        apart = self.combine != "sum" and bool(self.reward_sources())
        refuse_if(
            apart, f"`combine` {self.combine} compares rewards of one row, and those of `reward` NAME=... have others"
        )
        refuse_if(
            self.combine == "tchebycheff" and len(self.ideal) != len(used),
            f"`ideal` has {len(self.ideal)} numbers: give one for each of the {len(used)} rewards of tchebycheff",
        )
        weighs = self.combine == "lexicographic" and any(weight not in (None, 1) for weight in used.values())
        refuse_if(weighs, "`combine` lexicographic goes by the order of the rewards: drop their weights")

    def rewards(self) -> dict[str, tuple[str, float | None]]:
        """(FILE.py:FUNCTION, weight or None) of each reward function, by its name: FUNCTION, or FILE.FUNCTION where
        several functions are named FUNCTION; of a source its name, or SOURCE.FUNCTION where several judge it.
        """
        from rlkit.rewards.call import RESERVED

        specs, rewards = self._specs(), dict[str, tuple[str, float | None]]()
        for name, spec, weight, text in specs:
            finite, taken = math.isfinite(weight or 0.0), name in RESERVED and (len(specs) > 1 or weight is not None)
            refuse_if(not finite, f"`reward` {text}: the weight must be a finite number, as in {spec}=0.5")
            refuse_if(taken, f"`reward` {text}: reward/{name} is a metric of every run; rename the function")
            both = f"two functions {name}, {rewards.get(name, [''])[0]} and {spec}, and each is logged as reward/{name}"
            fix = "rename one, or import it under another name in a file of your own"
            refuse_if(name in rewards, f"`reward` names {both}: {fix}")
            rewards[name] = spec, weight
        nothing = rewards and all(weight == 0 for _, weight in rewards.values())
        refuse_if(nothing, "`reward` has only weights of 0, so nothing would train: give one function another weight")
        return rewards

    def reward_sources(self) -> dict[str, str]:
        """The source of each reward function that judges the rows of one only, by the function's name."""
        return {name: source for name, *_, text in self._specs() if (source := _of_source(text)[0])}

    def _specs(self) -> list[tuple[str, str, float | None, str]]:
        """The name, FILE.py:FUNCTION, weight and text of each reward function."""
        texts = (self.reward,) if isinstance(self.reward, str) else self.reward or ()
        sources, rest = [_of_source(text)[0] for text in texts], [_parsed(_of_source(text)[1]) for text in texts]
        functions = [(source, spec.partition("(")[0].rpartition(":")[2]) for source, (spec, _) in zip(sources, rest)]
        named = []
        for text, (source, function), (spec, weight) in zip(texts, functions, rest):
            place = spec.partition("(")[0].rpartition(":")[0]
            stem = os.path.basename(place)[:-3] if place.endswith(".py") else place.rpartition(".")[2]
            name = f"{stem}.{function}" if functions.count((source, function)) > 1 else function
            alone = source and sources.count(source) == 1
            named.append((source if alone else f"{source}.{name}" if source else name, spec, weight, text))
        return named

    def envs(self) -> dict[str, str]:
        """FILE.py:NAME of each environment by its name; that of a single one is ""."""
        return places_of("env", self.env) if self.env is not None else {}

    def max_len(self, rollouts: Rollouts) -> int:
        """The longest context of an episode."""
        return self.max_total_tokens or self.max_prompt_tokens + rollouts.max_new_tokens


def places_of(flag: str, value: str | tuple[str, ...]) -> dict[str, str]:
    """What a flag names, PLACE or several NAME=PLACE, by name; that of a single place without a name is ""."""
    texts = (value,) if isinstance(value, str) else value
    places: dict[str, str] = {}
    for text in texts:
        name, place = split_name(text)
        refuse_if(not name and len(texts) > 1, f"`{flag}` {text}: of several each has a name, as in math={text}")
        refuse_if(not place, f"`{flag}` {text}: nothing stands behind the name")
        refuse_if(name in places, f"`{flag}` has two of the name {name}: rename one")
        places[name] = place
    refuse_if(not places, f"`{flag}` is empty: give a value, or leave it out")
    return places


def check_column_flag(settings: Any, flag: str, places: Mapping[str, str]) -> None:
    """Refuse the column that chooses among the `places` of a flag where there are not several."""
    column = f"{flag}_column"
    wrong = len(places) < 2 and not is_default(settings, column)
    refuse_if(wrong, f"`{column}` chooses among several: give `{flag}` more than one")


def _of_source(text: str) -> tuple[str, str]:
    """The source and the rest of SOURCE=FILE.py:FUNCTION; "" and the text of a function for all rows."""
    source, _, rest = text.partition("=")
    is_path = os.path.exists(text.partition("(")[0].rpartition(":")[0])  # of a folder with a `=`
    return (source, rest) if source and ":" in rest and not {*":("} & {*source} and not is_path else ("", text)


def _parsed(text: str) -> tuple[str, float | None]:
    """FILE.py:FUNCTION and the weight after `=` (None without one, NaN for what is no number)."""
    end = text.rfind(")") + 1 or text.rfind(":") + 1  # of the arguments, which have a `=` too
    _, equals, number = text[end:].partition("=")
    try:
        weight = float(number) if equals else None
    except ValueError:
        weight = math.nan
    return text.removesuffix(equals + number), weight


OF_VALUES = ("gae", "vapo", "td_lambda", "n_step", "vtrace", "retrace")
OF_TURNS = ("turn_returns", "gigpo")
OF_RETURNS = ("returns", "reinforce_pp", *OF_TURNS)
_NAMED = f"one of {', '.join((*OF_VALUES, *OF_RETURNS))}, perhaps with (arguments), or FILE.py:FUNCTION"
Estimator = Annotated[str, Range(_NAMED, lambda x: x.partition("(")[0] in (*OF_VALUES, *OF_RETURNS) or ":" in x)]


@dataclass(frozen=True)
class KlEstimator:
    """The estimator of the KL to the reference model."""

    kl_estimator: Annotated[str, named("k1", "k2", "k3", "unbiased")] | None = None
    """estimator of the KL at each token: k1, k2, k3, or unbiased (k3 times the ratio), in the loss only. Or
    FILE.py:FUNCTION, `def kl(logp, ref_logp)` (docs/losses.md). None: unbiased in the loss, else k1"""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class Correction:
    """Importance weights of tokens that older weights, or an engine with other numerics, sampled."""

    correction: Literal["tis", "icepop", "none"] = "tis"
    """weight of tokens sampled by older weights or an engine with other numerics: tis caps it at --tis-max-weight.
    icepop drops tokens whose weight is outside [0.5, 5]; none gives all tokens weight 1"""
    tis_max_weight: Annotated[AtLeast1, For("correction", "tis")] = 2.0
    """cap of the weight with --correction tis (inf: no cap)"""

    def __post_init__(self) -> None:
        check(self)

    def function(self) -> Any:
        """The function from log-ratio to weight."""
        import torch

        from rlkit.losses import icepop, tis

        tis_capped = partial(tis, max_weight=self.tis_max_weight)
        return {"tis": tis_capped, "icepop": icepop, "none": torch.ones_like}[self.correction]
