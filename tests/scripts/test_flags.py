"""The flags of every script: ranges, empty texts, combinations, devices; named at once, before torch is loaded."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import logging
import math
import re
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import get_args, get_type_hints

import nightly
import pytest
import screens
import tyro

import rlkit
from rlkit.rollout.engines import EngineError
from rlkit.run.console import TRAINING
from rlkit.scripts import cli, distill, grpo, kto, ppo
from rlkit.scripts.args import Correction, Data, Episodes, Model
from rlkit.scripts.cli import COMMANDS, flags_of, spelled
from rlkit.scripts.engines import check_engine
from rlkit.scripts.flags import CONFIG, grouped, help_text, list_flags, wrong_words
from rlkit.scripts.start import check_device
from rlkit.scripts.task import check_rl
from rlkit.scripts.trial import advantage_of
from rlkit.scripts.unusual import warn_of_teacher_prompt, warn_of_unusual
from rlkit.settings import Critic, Engines, Penalties, Rollouts, check, collected

ROOT = Path(__file__).parents[2]
SCRIPTS = [name for name in COMMANDS if name not in ("copy", "patch", "plot", "track")]
EXAMPLES = ["demo", "tool_use"]


def module_of(script):
    if script in SCRIPTS:
        return importlib.import_module(cli.module_of(script))
    spec = importlib.util.spec_from_file_location(script, ROOT / "examples" / f"{script}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[script] = module
    spec.loader.exec_module(module)
    return module


def settings_of(kind):
    """The dataclass and those in its fields, without their `Annotated`."""
    yield kind
    for hint in get_type_hints(kind).values():
        if is_dataclass(hint):
            yield from settings_of(hint)


def numbers_of(kind):
    """Fields that take a number."""
    for name, hint in get_type_hints(kind).items():
        inner = [hint, *get_args(hint), *(y for x in get_args(hint) for y in get_args(x))]
        yield from ((name, number) for number in (int, float) if number in inner)


@pytest.mark.parametrize("script", [*SCRIPTS, *EXAMPLES])
def test_every_number_of_every_script_has_a_range_and_refuses_what_is_outside(script):
    without = {"range", "log_range", "engine_cpus", "stop_token_ids", "lr_at", "critic_lr_at"}
    for kind in settings_of(module_of(script).Args):
        for name, number in numbers_of(kind):
            if name in without:
                continue
            bad = math.nan if number is float else -1
            for value in (bad, (bad,), (bad, bad)):
                settings = object.__new__(kind)
                vars(settings).update({f.name: getattr(kind, f.name, None) for f in fields(kind)} | {name: value})
                with collected() as messages:
                    check(settings)
                assert any(x.startswith(f"`{name}` must be ") for x in messages), (
                    f"{kind.__name__}.{name} takes {value}"
                )


def args_of(kind=grpo.Args, **changes):
    """The flags of a script at their defaults; each of the `changes` goes to the settings that have it."""
    needed = {"model": Model("x"), "data": Data("x"), "episodes": Episodes(reward="a:b")}
    args = kind(**needed)
    for name, value in changes.items():
        holders = [f for f, x in vars(args).items() if is_dataclass(x) and hasattr(x, name)]
        if holders:
            args = replace(args, **{holders[0]: replace(getattr(args, holders[0]), **{name: value})})
        else:
            args = replace(args, **{name: value})
    return args


def refused(kind, **changes):
    """What a wrong value is refused with, as the command line prints it."""
    with pytest.raises(ValueError, match=r".") as error:
        check_rl(args_of(kind, **changes))
    return spelled(str(error.value), kind)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"weight_decay": -0.1}, "--weight-decay must be at least 0, got -0.1"),
        ({"weight_decay": math.inf}, "--weight-decay must be at least 0, got inf"),
        ({"max_norm": 0.0}, "--max-norm must be above 0 (inf: no limit), got 0.0"),
        ({"temperature": 0.0}, "--temperature must be above 0, got 0.0"),
        ({"top_p": 1.5}, "--top-p must be above 0 and at most 1, got 1.5"),
        ({"success_range": (0.1, math.nan)}, "--success-range must be a finite number, got nan"),
        ({"success_range": (0.9, 0.1)}, "--success-range must be from low to high, got 0.9 0.1"),
        ({"seed": 10**30}, "--seed must be from 0 to 2**63 - 1"),
        ({"output": Path()}, "--output must be a folder other than the current one, got ."),
        ({"eval_data": ""}, "--eval-data is empty: give a value, or leave it out"),
        ({"stop": ("",)}, "--stop is empty"),
        ({"rename": {"prompt": ""}}, "--rename prompt is empty"),
        ({"template_args": "[1]"}, "--template-args must be a JSON object"),
        (
            {"engine_cpus": (0, 10**6)},
            "--engine-cpus must be numbers of CPUs that this process may use, on Linux, got 1000",
        ),
        ({"reward": None}, "give --reward, --env or --agent: something has to judge"),
        ({"reward_max_failed": 1.0}, "--reward-max-failed must be at least 0 and below 1, got 1.0"),
        ({"tools": ("a:b",), "tool_calls": "xml"}, "--tool-calls must be one of hermes, function, arg_key, json, "),
        ({"agent": "x", "agent_memory": 0.0}, "--agent-memory must be above 0, got 0.0"),
        ({"agent": "x", "agent_address": "0.0.0.0:80"}, "--agent-address must be HOST or HOST:PORT with a host"),
        ({"agent": "x", "agent_address": "host:http"}, "--agent-address must be HOST or HOST:PORT with a host"),
        ({"minibatches": 9}, "--minibatches 9 is more than the 8 groups of --prompts-per-step"),
        ({"epochs": 0}, "--epochs must be at least 1, got 0"),
        ({"keep_best": "reward/mean"}, "--keep-best must be a metric of held-out data, as eval/greedy, got rew"),
        ({"profile_steps": (3, 2)}, "--profile-steps must be from low to high, got 3 2"),
        ({"profile_steps": (3, 201)}, "--profile-steps 3 201 are not all of the 200 --steps"),
        ({"optimizer": "lion"}, "--optimizer must be one of adamw, muon or FILE.py:FUNCTION, got lion"),
        ({"ref_sync_steps": 3}, "--ref-sync-steps requires --kl-coef above 0"),
        ({"reference": "x"}, "--reference requires --kl-coef above 0, --kl-limit or --eval-kl"),
    ],
)
def test_an_error_names_its_flag(flags, message):
    assert refused(grpo.Args, **flags).startswith(message)


URL = ("http://127.0.0.1:30000",)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"engine": "local", "engine_tp": 2}, "`engine_tp` is for `engine` sglang or vllm, not local"),
        (
            {"engine_urls": URL, "engine_memory": 0.5},
            "`engine_memory` excludes `engine_urls`: it is for servers that are started here; drop one",
        ),
        ({"engine_memory": 1.0}, "`engine_memory` must be above 0 and below 1"),
        ({"engine_gpus": (0, 1, 2), "engine_tp": 2}, "`engine_gpus` are 3: give a multiple of `engine_tp` 2"),
        (
            {"weight_sync": "changes", "engine_urls": URL},
            "`weight_sync` changes requires `weight_sync_folder`: it is for servers on other machines",
        ),
        (
            {"weight_sync_lora": "adapter", "engine_release": True},
            "`weight_sync_lora` adapter excludes `engine_release`: use merged",
        ),
    ],
)
def test_flags_of_servers_that_cannot_act_are_refused(given, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        Engines(**{"engine": "sglang", **given})


def test_weights_do_not_go_to_another_machine_through_memory():
    how = Engines("sglang", engine_urls=("http://192.0.2.7:1",), weight_sync="ipc")
    with pytest.raises(
        ValueError, match=r"^`engine_urls` http://192.0.2.7:1 is another machine: .*`weight_sync` group"
    ):
        check_engine(how)


def test_meaningful_values_are_accepted():
    free = {"max_norm": math.inf, "clip_low": math.inf, "clip_high": math.inf, "value_clip": math.inf}
    none = {"lr": 0.0, "steps": 0, "eval_steps": 0, "save_steps": 0, "system_prompt": "", "entropy_coef": -0.1}
    check_rl(args_of(ppo.Args, **free, **none, tis_max_weight=math.inf))
    assert refused(ppo.Args, gamma=1.5) == "--gamma must be from 0 to 1, got 1.5"
    assert refused(ppo.Args, value_range=(1.0, 0.0)) == "--value-range must be from low to high, got 1.0 0.0"
    how = {"tools": ("a:b",), "tool_calls": "json", "max_turns": 3, "max_sampled_tokens": 9}
    args = args_of(eval_data="x", reference="y", kl_coef=0.1, minibatches=8, success_range=(0.1, 0.9))
    rollouts = replace(args.rollouts, max_dropped=3, staleness=0.5, drop_off_policy=True)
    episodes = Episodes(reward="a:b", eval_kl=True, **how)
    check_rl(replace(args, rollouts=rollouts, episodes=episodes, penalties=Penalties(kl_coef=0.1, ref_sync_steps=3)))


def test_a_missing_device_is_named():
    for device in ("gpu", "meta"):
        with pytest.raises(ValueError, match=f"`device` {device}: torch .* finds no such device"):
            check_device(device)


@pytest.mark.parametrize("text", ["", "enable_thinking=false", "[1]", '{"a": }'])
def test_invalid_json_in_a_flag_is_an_error_with_its_name(text):
    with pytest.raises(ValueError, match="`template_args` must be a JSON object"):
        Data("x", template_args=text)
    assert Data("x", template_args='{"enable_thinking": false}').template() == {"enable_thinking": False}


def test_names_of_flags_are_those_of_the_settings():
    names = dict(flags_of(args_of()))
    assert names.keys() == dict(flags_of(grpo.Args)).keys()
    assert {"group_size", "output", "lr", "parallel.tp", "kl_target", "engine_urls"} <= {*names}
    assert (
        spelled("`tp` `group_size` `no_flag` `compile`", grpo.Args) == "--parallel.tp --group-size `no_flag` --compile"
    )


HELP = """
import sys
from rlkit.scripts import cli
for command in sys.argv[1:]:
    try:
        cli.main([*command.split(), "--help"])
    except SystemExit as ended:
        assert not ended.code
    loaded = {"torch", "transformers", "numpy", "datasets", "pandas", "jaxtyping"} & {*sys.modules}
    assert not loaded, (command, loaded)
    print("-- end of", command)
"""


def help_of(capsys, command, columns="80", *words):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", columns)
        with pytest.raises(SystemExit, match="0"):
            cli.main([command, "--help", *words])
    return capsys.readouterr().out


def test_help_of_a_word_has_the_flags_with_it_in_their_name_or_text(capsys):
    for command in COMMANDS:
        if command != "copy":
            every = help_of(capsys, command)
            rows = [block for block in re.split(r"^(?=  \S)", every, flags=re.M) if re.match(r"  -|  [A-Z]+ ", block)]
            wanted = [row.split()[0] for row in rows if re.search("file|gpu", row.partition("\n\n")[0].lower())]
            if not wanted:
                continue
            some = help_of(capsys, command, "80", "file", "gpu")
            assert wanted == re.findall(r"^  (-\S+|[A-Z]+) ", some, re.M), command
            assert "usage:" not in some
    two = help_of(capsys, "grpo", "80", "clip_low", "WARMUP")
    assert re.findall(r"^  (--\S+)", two, re.M) == ["--warmup-steps", "--clip-low"]
    assert "Main flags" not in two
    for words in (["grpo", "--help", "zzz"], ["help", "grpo", "zzz"], ["--help", "grpo", "zzz"]):
        with pytest.raises(SystemExit, match="2"):
            cli.main(words)
        assert capsys.readouterr().err == (
            "error: no flag has zzz in its name or text; rlkit grpo --help lists all flags\n"
        )


def test_a_group_of_flags_without_a_docstring_is_called_flags():
    """The class of --config is `object`, whose docstring is Python's."""

    @dataclass(frozen=True)
    class Mine:
        model: str
        output: str = "o"
        steps: int = 1
        other: int = 2

    text = help_text(Mine, "What it does.", program="mine.py", width=80)
    assert "class" not in text
    assert re.findall(r"^([A-Z].*):$", text, re.M) == ["Main flags", "Flags"]
    flags = list(list_flags(Mine))[::-1]  # of a script whose first flag is not --model
    titles = [title for title, _ in grouped(Mine, [*flags, *CONFIG])]
    assert titles == ["Flags"]


@pytest.mark.slow_cases("140", "40")
@pytest.mark.parametrize("columns", ["40", "80", "140"])
def test_help_has_examples_then_the_flags_that_matter_then_groups_and_fits_the_screen(capsys, columns):
    for command in COMMANDS:
        if command != "copy":
            text = help_of(capsys, command, columns)
            assert columns == "40" or max(map(len, text.splitlines())) <= int(columns), command
            assert text.startswith(f"usage: rlkit {command} ")
    for command in ("grpo", "ppo", "sft", "dpo", "kto", "reward_model") if columns != "40" else ():
        text = help_of(capsys, command, columns)
        before, *groups = re.split(r"^(?=[A-Z].*:$)", text, flags=re.MULTILINE)
        assert f"\n    rlkit {command} --model MODEL" in before
        first = [line.split()[0] for line in groups[0].splitlines() if line.startswith("  --")]
        reward = ["--reward"] * (command in ("grpo", "ppo"))
        config = ["--config", "--print-config"]
        assert first == ["--model", "--data", *reward, "--eval-data", "--steps", "--output", *config]
        assert len(groups) >= 5
        flags = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
        assert len(flags) == len({*flags})
        kind = importlib.import_module(cli.module_of(command)).Args
        in_python = {"lr_at", "critic_lr_at", "controllers", "make_optimizer"}
        known = {f"--{name}".replace("_", "-") for name, _ in flags_of(kind) if name not in in_python}
        known |= {"--no-chat-template", *config}  # the other flag of chat_template; those for a file
        assert {flag.replace("[no-]", "") for flag in flags} == known
        assert "--parallel.[no-]reshard-after-forward" in flags
    assert re.search(
        r"^  --steps INT +training steps, of one batch each; 0 only\s+evaluates\s+\(default: 200\)$",
        help_of(capsys, "ppo"),
        re.M,
    )
    assert "--lr-schedule constant|linear|cosine" in help_of(capsys, "sft")


def test_version_and_help(capsys):
    for words in (["--version"], ["version"], ["-V"]):
        cli.main(words)
        assert capsys.readouterr().out == f"rlkit {rlkit.__version__}\n"
    cli.main([])
    listed = capsys.readouterr().out
    for words in (["help"], ["--help"], ["-h"]):
        cli.main(words)
        assert capsys.readouterr().out == listed
    with pytest.raises(SystemExit, match="0"):
        cli.main(["help", "reward-model"])
    assert capsys.readouterr().out.startswith(
        "usage: rlkit reward-model --model TEXT --data TEXT ... [FLAGS]\n\nTrain a"
    )
    done = subprocess.run([sys.executable, "-m", "rlkit", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"rlkit {rlkit.__version__}\n"


def test_the_check_of_the_words_accepts_what_tyro_accepts():
    """Also numbers that look like flags, `=`, underscores, later values, and flags in any order with positionals."""
    needed = "--model m --data d --reward a:b "
    for command, words in [
        ("grpo", "--lr=1e-5 --entropy-coef -0.5 --max-norm inf --clip-low -.0 --steps 1_000 --steps 3"),
        ("grpo", "--stop a b --stop-token-ids 1 2 --tools --rename a b c d"),
        ("grpo", "--stop_token_ids --rename"),
        ("grpo", "--success-range 0.01 0.99 --dtype None --staleness None --no-overlap --parallel.no-offload"),
        ("grpo", "--success-range None --parallel.tp=2 --no_chat_template --template-args={}"),
        ("plot", "a b -o x.png"), ("plot", "-o x.png a"), ("chat", "--prompt x run"), ("chat", "run --prompt x"),
        ("track", "--to wandb run"), ("track", "run --follow --to=mlflow"),
        ("sweep", "--range lr 1 2 lr_schedule -1 inf -- rlkit sft --steps x"),
        ("sweep", "--choice lr 1,2 --seed 3 rlkit"),
    ]:  # fmt: skip
        kind = importlib.import_module(cli.module_of(command)).Args
        argv = (needed * (command == "grpo") + words).split()
        tyro.cli(kind, args=argv)
        assert wrong_words(argv, kind) == {}, words


def test_a_list_that_is_given_twice_is_named(caplog):
    words = "--model m --data a --data b --reward a:b --steps 1 --steps 2"
    assert wrong_words(words.split(), grpo.Args) == {}
    assert caplog.messages == ["--data is given twice: the later values replace the others (several follow one flag)"]


OTHER_TYPES = """
import enum, sys
from dataclasses import dataclass
from rlkit.scripts.cli import run

class Colour(enum.Enum):
    RED = 1
    BLUE = 2

@dataclass(frozen=True)
class Args:
    colour: Colour = Colour.RED

run(print, Args, None, argv=["--colour", "green"])
"""


@pytest.mark.slow_cases(
    "ascii",
    "dumb",
    "latin-1",
    "latin-1 terminal",
    "narrow",
    "no colour",
    "pipe",
    "stderr in a file",
    "terminal",
    "ascii terminal",
)
@pytest.mark.parametrize("where", screens.PLACES)
def test_a_type_that_only_tyro_reads_has_a_message_too(where):
    code, out, err = screens.run([sys.executable, "-c", OTHER_TYPES], where)
    (message,) = screens.errors(out + err)
    assert code == 2
    assert all(word in message for word in ("--colour", "green", "RED", "BLUE"))


def test_help_loads_no_torch():
    commands = ["", *[name for name in COMMANDS if name != "copy"]]
    done = subprocess.run([sys.executable, "-c", HELP, *commands], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *shown, rest = re.split(r"^-- end of .*\n", done.stdout, flags=re.MULTILINE)
    assert (len(shown), rest) == (len(commands), "")
    assert all("usage: " in text for text in shown)


@pytest.mark.parametrize(("script", "examples"), [("plot", 2), ("track", 2), ("copy", 1)])
def test_help_has_each_example_in_a_line_of_its_own(script, examples, capsys):
    with suppress(SystemExit):
        cli.main([script, "--help"])
    shown = capsys.readouterr().out.splitlines()
    assert [line.count(f"rlkit {script} ") for line in shown if f"rlkit {script} " in line][-examples:] == [
        1
    ] * examples
    assert (
        sum(f"rlkit {script} " in line for line in shown[0:1] + [x for x in shown if x.startswith("    ")])
        > examples - 1
    )


def test_a_resumed_run_without_flags_is_told_where_they_are(tmp_path):
    (tmp_path / "args.json").write_text("{}")
    said = screens.refused(cli.main, ["grpo", "--output", str(tmp_path), "--resume"])
    where = f"a resumed run takes its flags again: they are in {tmp_path}/args.json"  # of a version without config.yaml
    assert said == f"error: missing --model and --data; {where}"


def test_all_wrong_flags_are_answered_at_once():
    flags = "--model_name_or_path m --dataset_name d --learning_rate 1e-6 --loss sigmoid --foo 3 --no-debug"
    assert screens.refused(cli.main, ["dpo", *flags.split()]) == (
        "error: 5 flags are not known here; --help WORD finds flags by a word --model_name_or_path is --model here "
        "--dataset_name is --data here --learning_rate is --lr here --loss sigmoid is dpo here --foo is no flag "
        "The command of TRL is here, in the last line TRL's defaults: rlkit dpo --model m --data d --lr 1e-6 "
        "--loss dpo --batch-size 8 --max-example-tokens 1024 --warmup-steps 0 note: --batch-size is that of 1 GPU: "
        "their sizes are per GPU note: add --steps: 3 * rows / 8"
    )


WRONG = [
    ("grpo --model m --data no.jsonl --reward a:b --lr -1", "--lr must be from 0 to 1, got -1.0"),
    ("sft --model m --data no.jsonl --lr 1e6", "--lr must be from 0 to 1, got 1000000.0"),
    ("grpo --model m --data no.jsonl --reward a:b --staleness 1e30", "--staleness must be from 0 to 100, got 1e+30"),
    ("dpo --model m --data no.jsonl --label-smoothing 0.9", "--label-smoothing must be at least 0 and below 0.5, got"),
    ("dpo --model m --data no.jsonl --loss robust_dpo --label-smoothing 0.5", "--label-smoothing must be at least 0"),
    (
        "dpo --model m --data no.jsonl --loss robust_dpo",
        "--loss robust_dpo requires --label-smoothing above 0: at 0 it",
    ),
    ("grpo --model m --data no.jsonl --reward a:b --kl-target 0.1", "--kl-target requires --kl-coef"),
    ("grpo --model m --data no.jsonl --reward a:b --group-size 1", "--group-size must be at least 2"),
    ("grpo --model m --data no.jsonl --reward a:b --max-dropped 3", "--max-dropped requires --success-range"),
    ("grpo --model m --data no.jsonl --reward a:b --loss grpo2", "--loss must be one of ppo_clip, dual_clip"),
    ("grpo --model m --data no.jsonl --reward a:b --loss grpo", "--loss grpo is ppo_clip with --aggregate episode"),
    ("grpo --model m --reward a:b", "missing --data; --help"),
    ("dpo", "missing --model and --data; --help"),
    ("chat", "missing RUN; --help"),
    (
        "chat --checkpoint runs/a",
        "--checkpoint is no flag: give RUN without one, as in rlkit chat runs/a; --help",
    ),
    ("chat --model m", "--model is no flag: give RUN without one, as in rlkit chat m"),
    ("eval --model tiny --eval-data d", "--model is no flag: give MODEL without one, as in rlkit eval tiny"),
    ("eval --model=tiny", "--model is no flag: give MODEL without one, as in rlkit eval tiny"),
    ("data --files a.jsonl", "--files is no flag: give FILE without one, as in rlkit data a.jsonl"),
    ("eval --model", "--model is no flag: give MODEL without one, as in rlkit eval runs/grpo"),
    ("chat m --max-tokens 5", "--max-tokens is --max-new-tokens here"),
    ("plot --logdir runs/a", "--logdir is no flag: give FOLDERS without one, as in rlkit plot runs/a"),
    ("plot runs/a --output a.png", "--output is --out here"),
    ("plot --wrong", "--wrong is no flag; --help lists the flags"),
    ("grpo", "missing --model and --data; --help lists the flags"),
    (
        "sweep --choice group-size 2 4 -- rlkit grpo",
        "--choice must be pairs of a name and a value, got group-size 2 4: ",
    ),
    (
        "sweep --choice group-size 2 4 8 -- rlkit grpo",
        "--choice 4 is no flag: several values are separated by commas, as in group-size 4,8",
    ),
    ("grpo --model m --data d --reward a:b --drop-truncated false", "--drop-truncated takes no value: for off give"),
    ("grpo --model m --data d --steps x", "--steps must be a whole number, got 'x'"),
    ("grpo --model m --data d --steps=1e3", "--steps must be a whole number, got '1e3'"),
    ("grpo --model m --data d --lr abc", "--lr must be a number, got 'abc'"),
    ("grpo --model m --data d --lr -x", "--lr needs a number"),
    ("grpo --model m --data d --dtype fp16", "--dtype must be one of fp32, bf16 or None, got 'fp16'"),
    ("grpo --data m --model a b c --reward a:b", "--model takes one value, got 3: a b c"),
    ("grpo --model --data d", "--model needs a value"),
    ("grpo --model m --data d --overlap yes", "--overlap takes no value: leave 'yes' out"),
    ("grpo --model m --data d --resume runs/a", "--resume takes no value: write --resume --output runs/a"),
    ("grpo --model m --data d --success-range 1", "--success-range must be two numbers or None, got '1'"),
    ("grpo --model m --data d --engine-cpus 1 b", "--engine-cpus must be whole numbers, got 1 b"),
    ("grpo --model m --data d --aggregate x", "--aggregate must be one of token, episode, prompt, length or None, got"),
    ("grpo model=m", "model=m is no flag: write --model m"),
    ("grpo model=../m data=p.jsonl steps=1", "model=../m data=p.jsonl steps=1 are no flags: write --model ../m --data"),
    ("grpo --model m -lr 1e-5 --data d", "-lr needs two dashes: --lr"),
    (
        "grpo --model m -learning_rate 1e-5",
        "-learning_rate is --lr here; --help WORD finds flags by a word",
    ),
    ("grpo --model m --data d --reward data.py:f=0.5 --group-size 1", "--group-size must be at least 2"),
    ("ppo --model m --baseline gpg", "--baseline is for rlkit grpo"),
    ("grpo --model m --critic-lr 1e-5", "--critic-lr is for rlkit ppo"),
    ("sft --group-size 8 --model m", "--group-size is for rlkit grpo, ppo and distill"),
    ("sft --kl-coef 1 --model m", "--kl-coef is for rlkit grpo, ppo and distill"),
    ("sft --loss x --model m", "--loss must be one of nll, dft, got 'x'"),
    ("kto --temperature 0.5 --model m", "--temperature is for rlkit grpo, ppo and distill"),
    ("eval m --lr 1", "--lr is a flag of the commands that train"),
    (
        "grpo --model m --data d --reward a:b --parallel.tp 2",
        "--parallel.tp 2 takes 2 processes, and this is one: start",
    ),
    (
        "sft --model m --data d --parallel.cp 2 --parallel.pp 2",
        "--parallel.cp 2 --parallel.pp 2 takes 4 processes, and",
    ),
    (
        "sft --model m --data d --parallel.ep 2",
        "--parallel.ep 2 takes 2 processes, and this is one: start them with to",
    ),
    ("grpo --lr-at f", "--lr-at is set in Python only"),
    ("grpo --model m --data d --steps x --lr y", "2 flags are wrong --steps must be a whole number, got 'x' --lr must"),
    ("sft --model m --data d --rename a", "--rename must be pairs of a name and a value, got 'a'"),
    (
        "sft --model m --data d --rename inputs=prompt targets=response",
        "--rename must be pairs of a name and a value with blanks between them: inputs prompt targets response",
    ),
    (
        "sft --model m --data d --rename inputs=prompt",
        "--rename must be pairs of a name and a value with blanks between them: inputs prompt",
    ),
    ("track run", "missing --to (one of wandb, mlflow, tensorboard, trackio)"),
    ("track run --to tensorbord", "--to must be one of wandb, mlflow, tensorboard, trackio, got 'tensorbord'"),
    (
        "sweep --log-range lr 1e-6 1e-4 rlkit sft --data d",
        "--data is no flag; the command to run comes after --, as in",
    ),
    ("sweep --log-range lr 1e-6 rlkit", "--log-range must be a name and two numbers for each flag, got lr 1e-6 rlkit"),
    ("sweep --log-range lr 1e-6 -- rlkit", "--log-range must be a name and two numbers for each flag, got lr 1e-6"),
    ("grop", "no command 'grop' (perhaps grpo): choose one of"),
    ("grpo --model m --data d --group-sizes 4", "--group-sizes is no flag: perhaps --group-size"),
    ("sft --eval-every 5", "--eval-every is --eval-steps here"),
    ("grpo --model m --data d --stop-token-ids 1,2", "--stop-token-ids must be whole numbers, got 1,2: several values"),
    ("grpo --rollout.n 8", "--rollout.n is --group-size here"),
    ("grpo actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.n is --group-size here"),
    ("grpo --report_to wandb", "--report_to is --track here"),
    (
        "grpo --use_wandb --project_name x",
        "2 flags are not known here; --help WORD finds flags by a word --use_wandb is "
        "--track wandb here --project_name is --track-project here",
    ),
    ("reward", "no command 'reward' (reward_model is that here)"),
    ("ppo --model m --data no.jsonl --reward a:b", "no.jsonl: no such file"),
    ("sft --model m --data no.jsonl", "no.jsonl: no such file"),
    ("sft --model m --data no.jsonl --parallel.tp 0", "--parallel.tp must be at least 1, got 0"),
    ("dpo --model m --data d --loss orpo --reference r", "--reference is for --loss dpo, ipo, hinge, robust_dpo,"),
    ("kto --model m --data d --loss dpo", "--loss must be one of kto, apo_zero or FILE.py:FUNCTION, got dpo"),
    ("reward_model --model m --data d --loss a.py:f --center-coef 1", "--center-coef is for --loss bradley_terry, not"),
    ("grpo --model m --data d --learning_rate 1", "--learning_rate is --lr here; --help WORD finds flags by a word"),
    ("sft --per-device-train-batch-size=8", "--per-device-train-batch-size is --batch-size (per device * GPUs *"),
    ("ppo --per_device_train_batch_size 8", "--per_device_train_batch_size is --prompts-per-step (per device *"),
    ("sft --packing", "--packing has no flag here: examples are packed without padding, always"),
    ("grpo --model m --data d --reward a:b --beta 0.1 --steps 1", "--beta is --kl-coef here"),
    ("nothing", "no command 'nothing': choose one of grpo, ppo"),
    ("copy grpo", "usage: rlkit copy SCRIPT FILE.py"),
    ("copy grop my.py", "no script 'grop' (perhaps grpo): usage: rlkit copy SCRIPT FILE.py"),
    ("copy grpo /", "/ is a folder: give a file, such as /my_grpo.py"),
    ("copy reward-model /etc/passwd", "/etc/passwd is there already, and is not overwritten: give a new file, such as"),
]


@pytest.mark.slow_cases("terminal")
@pytest.mark.parametrize("where", nightly.only(screens.PLACES, "terminal", "pipe"))
def test_a_wrong_flag_or_file_is_one_line_before_torch_is_loaded(where):
    wrong = WRONG if where in screens.EVERYWHERE else WRONG[::4]
    found = screens.refused_early([flags.split() for flags, _ in wrong], where)
    for line, (flags, message) in zip(found, wrong, strict=True):
        assert line.startswith(f"error: {message}"), flags


@pytest.mark.slow
@pytest.mark.parametrize("script", ["grpo", "dpo"])
def test_a_copied_script_has_the_same_flags(tmp_path, script, capsys):
    cli.main(["copy", script, str(tmp_path / "mine.py")])
    assert "run it with python" in capsys.readouterr().out
    shown = [
        subprocess.run([sys.executable, *how, "--help"], capture_output=True, text=True, check=True).stdout
        for how in ([tmp_path / "mine.py"], ["-m", f"rlkit.scripts.{script}"])
    ]
    assert shown[0].partition("\n\n")[2] == shown[1].partition("\n\n")[2] != ""
    with pytest.raises(SystemExit):
        cli.main(["copy", script, str(tmp_path / "mine.py")])
    assert f"error: {tmp_path / 'mine.py'} is there already, and is not overwritten" in capsys.readouterr().err


def test_the_demo_deletes_nothing_but_a_demo(tmp_path):
    demo = module_of("demo")
    mine = tmp_path / "grpo" / "metrics.jsonl"
    mine.parent.mkdir()
    mine.write_text("precious")
    with pytest.raises(FileExistsError, match="holds other things than a demo"):
        demo.make_folder(demo.Args(output=tmp_path))
    assert mine.read_text() == "precious"
    again = demo.Args(output=tmp_path / "demo")
    demo.make_folder(again)
    (again.output / "random").mkdir()
    (again.output / "old").touch()
    demo.make_folder(again)
    assert sorted(p.name for p in again.output.iterdir()) == ["eval.jsonl", "sft.jsonl", "train.jsonl"]


def test_settings_of_scripts_need_no_command_line_parser():
    code = """
        import sys
        sys.modules["tyro"] = None
        from rlkit.scripts import grpo
        from rlkit.scripts.cli import flags_of
        from rlkit.scripts.args import Data, Model
        from rlkit.scripts.args import Episodes
        args = grpo.Args(model=Model("m"), data=Data("d"), episodes=Episodes(reward="a:b"))
        assert dict(flags_of(args))["group_size"] == 8, dict(flags_of(args))
        """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=100)


INTERRUPTED = """
import sys
from dataclasses import dataclass
from rlkit.scripts.cli import run

@dataclass(frozen=True)
class Args:
    debug: bool = False

def main(args):
    raise KeyboardInterrupt

run(main, Args, None)
"""


@pytest.mark.slow_cases("True")
@pytest.mark.parametrize("debug", [False, True])
def test_ctrl_c_before_training_shows_no_traceback(debug):
    command = [sys.executable, "-c", INTERRUPTED, *["--debug"] * debug]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGINT, "a shell's loop ends with it"
    assert ("Traceback" in done.stderr) == debug
    assert done.stderr.strip().splitlines()[-1] == "KeyboardInterrupt"


def test_ctrl_c_ends_by_the_signal_where_torch_imports_tabulate_at_exit(tmp_path):
    (tmp_path / "tabulate.py").write_text("from collections import namedtuple\nRow = namedtuple('Row', 'cells')\n")
    at_exit = "import atexit, importlib\natexit.register(importlib.import_module, 'tabulate')"  # as torch._dynamo does
    done = subprocess.run([sys.executable, "-c", at_exit + INTERRUPTED], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == -signal.SIGINT


def test_a_swept_command_keeps_its_own_flags():
    argv = ["--range", "x", "0", "1", "--", "rlkit", "dpo", "--beta", "0.1", "--max-steps", "3"]
    sweep = importlib.import_module("rlkit.scripts.tools.sweep")
    found = cli.run(lambda args: args.command, sweep.Args, None, argv=argv)
    assert found == ("rlkit", "dpo", "--beta", "0.1", "--max-steps", "3")


@pytest.mark.parametrize("rank", [None, "0", "1"])
def test_an_engine_that_is_gone_is_one_line_also_on_several_ranks(monkeypatch, rank):
    def main():
        error = EngineError("http://host: no answer for 31 s")
        error.add_note(f"{TRAINING}; the run folder is runs/a")
        raise error

    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    logger = logging.getLogger("rlkit")
    level = logger.level
    found = screens.everywhere(lambda: cli.on_ranks(main))
    logger.setLevel(level)  # a rank other than 0 is quiet
    assert isinstance(found.error, SystemExit)
    assert found.err.startswith("error: http://host: no answer for 31 s\n  go on from the last checkpoint: ")
    assert found.err.count("\n") == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"teacher": "http://x"}, "`teacher` http://x gives its most likely tokens: add `teacher_top_k` 16"),
        ({"teacher": "http://x", "loss": "uld"}, "`loss` uld needs all log-probs of http://x: load that model here"),
        ({"teacher": ("a", "b")}, "`teacher` a: of several each has a name, as in math=a"),
        ({"teacher": ("x=a", "x=b")}, "`teacher` has two of the name x: rename one"),
        ({"teacher": ()}, "`teacher` is empty: give a value, or leave it out"),
        ({"teacher": "a", "teacher_column": "x"}, "`teacher_column` chooses among several"),
        ({"teacher": "self"}, "`teacher` self says what the model says: add `teacher_prompt` with more"),
        ({"teacher": "self", "teacher_prompt": "Q: {prompt}"}, "`teacher` self says what the model says"),
        ({"teacher": "a", "teacher_ema": 0.1}, "`teacher_ema` is for `teacher` self, not a"),
        (
            {"teacher": "a", "teacher_prompt": "{prompt} {}"},
            "`teacher_prompt` '{prompt} {}': a column is written {name}",
        ),
        ({"teacher": "a", "teacher_prompt": "{prompt"}, "`teacher_prompt` '{prompt': expected '}' before end"),
    ],
)
def test_flags_of_a_teacher_that_cannot_act_are_refused(flags, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        distill.Loss(**flags)


@pytest.mark.parametrize(
    ("flags", "given", "message"),
    [
        ({"baseline": "group_zscore"}, {}, "`baseline` is for advantages, and without a `reward` there are none with"),
        ({"clip_low": 0.1}, {}, "`clip_low` is for advantages, and without a `reward` there are none with `loss` reve"),
        ({}, {"correction": Correction("icepop")}, "`correction` is for advantages, and without a `reward` there are"),
        (
            {"loss": "advantage", "baseline": "group_zscore"},
            {},
            "`baseline` is for advantages, and without a `reward` there are none to compare",
        ),
        (
            {},
            {"penalties": Penalties(kl_coef=0.1, kl_in="reward")},
            "`kl_in` reward compares the samples of a prompt, and `group_size` is 1",
        ),
        ({"loss": "advantage", "clip_low": 0.1}, {"correction": Correction("none")}, None),
        ({"clip_high": 0.1}, {"penalties": Penalties(kl_coef=0.1, kl_in="advantage")}, None),
        (
            {"baseline": "group_zscore"},
            {"penalties": Penalties(kl_coef=0.1, kl_in="reward"), "rollouts": Rollouts(group_size=2)},
            None,
        ),
    ],
)
def test_what_distillation_reads_of_advantages_is_refused_where_there_are_none(flags, given, message):
    make = lambda: distill.Args(Model("m"), Data("d"), distill.Loss("t", **flags), **given)
    if message is None:
        make()
    else:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            make()


def test_coefficients_that_train_nothing_are_refused():
    loss = distill.Loss("t", teacher_coef=0.0)
    distill.Args(Model("m"), Data("d"), loss, Episodes(reward="a:b"), rollouts=Rollouts(group_size=2))  # GRPO
    with pytest.raises(ValueError, match=r"^`teacher_coef` 0 trains nothing without a `reward`"):
        distill.Args(Model("m"), Data("d"), loss)
    with pytest.raises(ValueError, match=r"^`desirable_weight` and `undesirable_weight` are 0, so nothing trains"):
        kto.Loss(desirable_weight=0.0, undesirable_weight=0.0)
    with pytest.raises(ValueError, match=r"^`max_ratio` must be above 1, the ratio on-policy, got 0\.5"):
        grpo.Loss(max_ratio=0.5)


def test_a_reward_has_arguments_and_a_weight():
    spec = "rlkit.rewards.text:soft_overlong(max_tokens=512, cache_tokens=128)"
    assert Episodes(reward=(f"{spec}=0.5", "a/b.py:f=2")).rewards() == {
        "soft_overlong": (spec, 0.5),
        "f": ("a/b.py:f", 2),
    }
    assert Episodes(reward=spec).rewards() == {"soft_overlong": (spec, None)}


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        (grpo, {"advantage": "gae"}, "--advantage gae needs a critic's values: use rlkit ppo --advantage gae"),
        (
            grpo,
            {"advantage": "returns(x=1)"},
            "--advantage rlkit.loops.estimators:returns(x=1): rlkit.loops.estimators:ret",
        ),
        (
            grpo,
            {"advantage": "returns(gamma=99)"},
            "--advantage rlkit.loops.estimators:returns(gamma=99): estimators.py:",
        ),
        (
            ppo,
            {"advantage": "n_step(n=1.5)"},
            "--advantage rlkit.loops.estimators:n_step(n=1.5): estimators.py:n_step f",
        ),
        (
            ppo,
            {"advantage": "vapo(alpha=-1)"},
            "--advantage rlkit.loops.estimators:vapo(alpha=-1): estimators.py:vapo f",
        ),
        (ppo, {"advantage": "gae(gamma=99)"}, "--advantage rlkit.loops.estimators:gae(gamma=99): estimators.py:gae f"),
        (grpo, {"kl_estimator": "k2"}, "--kl-estimator requires --kl-coef above 0, or --kl-limit"),
        (
            grpo,
            {"kl_estimator": "k1", "kl_coef": 0.1},
            "--kl-estimator k1 in the loss has gradient 0 on average: use k2",
        ),
        (ppo, {"kl_estimator": "unbiased", "kl_coef": 0.1}, "--kl-estimator unbiased is for --kl-in loss, not reward"),
        (
            grpo,
            {"max_ratio": 20.0},
            "--max-ratio requires --minibatches above 1 or --epochs above 1: with one optimizer step",
        ),
        (grpo, {"group_size": 1}, "--group-size must be at least 2"),
        (
            ppo,
            {"advantage": "gae(lam_policy=0.1, foo=3)"},
            "--advantage rlkit.loops.estimators:gae(lam_policy=0.1, foo",
        ),
        (ppo, {"advantage": "gae(gamma=0.2)", "gamma": 0.9}, "--gamma and --advantage gae(gamma=0.2) both give gamma"),
        (ppo, {"advantage": "td_lambda", "lam_value": 0.9}, "--advantage td_lambda has no argument --lam-value, so it"),
        (ppo, {"advantage": "reinforce_pp"}, "--advantage reinforce_pp uses no critic: use rlkit grpo"),
        (ppo, {"advantage": "gigpo"}, "--advantage gigpo uses no critic: use rlkit grpo"),
        (
            grpo,
            {"advantage": "turn_returns(gamma=0.9)", "baseline": "role_average"},
            "--advantage turn_returns(gamma=0.9) compares turns, and --baseline role_average episodes",
        ),
        (
            ppo,
            {"advantage": "vtrace", "correction": "none"},
            "--advantage vtrace leaves the ratio to the sampling policy to --correction: drop none",
        ),
    ],
)
def test_an_estimator_that_cannot_act_is_refused(script, flags, message):
    with pytest.raises(ValueError, match=r".") as error:
        script.main(args_of(script.Args, **flags))
    assert spelled(str(error.value), script.Args).startswith(message)


@pytest.mark.parametrize("name", ["gae", "vapo", "td_lambda"])
def test_arguments_in_brackets_come_before_the_flags_of_the_critic(name):
    critic = Critic(lam_value=0.9 if name != "td_lambda" else 1.0)
    args = args_of(ppo.Args)
    taken = advantage_of(f"{name}(gamma=0.25)", args, critic=critic).keywords
    flags = {
        "gae": {"lam_policy": 0.95, "lam_value": 0.9},
        "vapo": {"lam_value": 0.9},
        "td_lambda": {"lam_policy": 0.95},
    }
    assert taken == {"gamma": 0.25, **flags[name]}
    assert advantage_of("gae", args, critic=critic) is None


def test_a_pair_of_baseline_and_advantage_without_meaning_is_refused():
    with pytest.raises(ValueError, match="`baseline` none requires `advantage`: it compares no rewards; add rein"):
        grpo.Loss(baseline="none")
    with pytest.raises(ValueError, match="`advantage` must be one of gae, vapo"):
        grpo.Loss(advantage="gea")


OVERLONG = "rlkit.rewards.text:soft_overlong"
UNUSUAL = {  # flags, and the start of the line; "" for values that are meant
    "clip_low=20": "--clip-low 20: a distance from 1, so the ratio is never clipped below",
    "clip_low=1.0 loss=gmpo": "",
    "clip_low=inf clip_high=inf": "",
    "clip_high=20": "--clip-high 20: a distance from 1, so only ratios above 21 are clipped",
    "clip_high=5.0": "",
    "clip_high=1.28 epochs=2": "--clip-high 1.28: a distance from 1, so only ratios above 2.28 are clipped; if it ",
    "clip_high=1.2 loss=gmpo": "",
    "clip_low=0.2 clip_high=0.2 loss=gspo": "--clip-high 0.2: gspo clips the ratio of a whole answer, per token, and ",
    "clip_low=0.2 loss=gspo": "--clip-low 0.2: gspo clips the ratio of a whole answer",
    "clip_low=3e-3 clip_high=0.01 loss=gspo": "",
    "success_range=(1.0,99.0)": "--success-range 1 99: bounds of the mean score itself; if percents are meant of",
    "success_range=(0.01,0.99)": "",
    "success_range=(1.0,10.0)": "",  # a judge's
    "success_range=(-5.0,20.0)": "",
    "clip_low=0.8 epochs=2": "--clip-low 0.8: a distance from 1, so only ratios below 0.2 are clipped; if it is ",
    "clip_low=0.5 clip_high=3.0": "",
    "entropy_coef=-0.01": "--entropy-coef -0.01: a negative bonus lowers the entropy",
    "temperature=6.0": "--temperature 6: samples are close to random tokens",
    "temperature=1.5": "",
    "top_k=1": "--top-k 1: always the most likely token, so that all samples of a group are the same",
    "tis_max_weight=1.0": "",
    "entropy_target=6.0": "--entropy-target 6: no policy has that entropy: the uniform one has ln V = 5.57 nats",
    "entropy_limit=5.6": "--entropy-limit 5.6: no policy has that entropy",
    "entropy_limit=5.5": "",
    "lr=0.1": "--lr 0.1: a step of AdamW changes each weight by about that much",
    "lr=0.01": "",
    "lr=0.1 optimizer=muon": "",
    "lr=0.1 lora_rank=8": "",
    f"reward=('m:f','{OVERLONG}(max_tokens=4096,cache_tokens=512)=0.5') max_new_tokens=64": (
        f"--reward m:f {OVERLONG}(max_tokens=4096,cache_tokens=512)=0.5: it begins above max_tokens - cache_tokens"
    ),
    f"reward='{OVERLONG}(max_tokens=64,cache_tokens=16)' max_new_tokens=64": "",
    f"reward='{OVERLONG}(max_tokens=4096,cache_tokens=512)' max_new_tokens=64 tools=('a:b',)": "",
    "staleness=50.0 overlap=True": "--staleness 50: groups train up to that many steps late",
    "staleness=8.0 overlap=True": "",
    "engine='vllm' engine_quantization='fp8' correction='none'": "--engine-quantization fp8: nothing weighs",
    "engine='vllm' engine_quantization='fp8'": "",
}


@pytest.mark.parametrize("given", UNUSUAL)
def test_a_value_that_is_hardly_ever_meant_gets_a_line(given, caplog):
    flags = {name: value for name, _, value in (pair.partition("=") for pair in given.split())}
    flags = {name: value if name in ("loss", "optimizer") else ast.literal_eval(value.replace("inf", "1e999"))
             for name, value in flags.items()}  # fmt: skip
    warn_of_unusual(dict(flags_of(args_of(grpo.Args, **flags))), num_rows=263)
    lines = [record.getMessage() for record in caplog.records]
    expected = UNUSUAL[given]
    assert len(lines) == bool(expected)
    assert not expected or lines[0].startswith(expected)


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name not in ("data", "plan", "report", "sweep")])
def test_no_default_is_unusual(script, caplog):
    warn_of_unusual(dict(flags_of(module_of(script).Args)), num_rows=32_000)
    assert not caplog.records


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_a_variable_of_torchrun_that_is_no_number_is_named(name, monkeypatch):
    monkeypatch.setenv(name, "abc")
    with pytest.raises(ValueError, match=f"^the environment variable {name} is 'abc', and torchrun sets a number: uns"):
        check_rl(args_of(grpo.Args))


@pytest.mark.parametrize(("names", "said"), [(["prompt", "answer"], 0), (["question", "answer"], 0), (["answer"], 1)])
def test_a_teacher_that_does_not_see_the_question_is_named(names, said, caplog):
    warn_of_teacher_prompt(names)
    line = "--teacher-prompt reads answer and no {prompt}: the teacher does not see the question"
    assert caplog.messages == [line] * said
