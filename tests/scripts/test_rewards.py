"""Reward functions from the command line: several in one run, and what is refused before torch is imported."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import screens
from pictures import no_pictures
from transformers import AutoTokenizer

from rlkit.data.load import load_rows
from rlkit.data.tiny import tiny_tokenizer
from rlkit.rewards import scorer
from rlkit.rewards.call import ONE_TURN
from rlkit.rollout.groups import Prompt, sample_group
from rlkit.scripts import grpo
from rlkit.scripts.args import Episodes
from rlkit.scripts.cli import run
from rlkit.scripts.trial import read_reward
from rlkit.types import Completion

ROOT = Path(__file__).parents[2]
REWARDS = """
def ascii_of(text):
    return [char for char in text if char.isascii()]


def length(prompts, completions, completion_ids, solution, log_metric, **columns):  # TRL
    log_metric("longest", max(map(len, completion_ids)))
    sizes = [len(ascii_of(text)) for text in completions]
    return [None if n % 2 else n / 4 + s for n, s in zip(sizes, solution, strict=True)]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):  # verl
    return {"score": len(ascii_of(solution_str)) - ground_truth, "acc": 0.25}


async def custom_rm(args, sample):  # slime
    return len(set(ascii_of(sample.response))) + sample.label


def score(completion, row, completion_ids, truncated):
    return {"reward": min(len(completion_ids), 64) / 8, "cut": truncated}


def mean(completion, row):
    return 0.0


def needs_level(completions, level):
    return [0.0] * len(completions)


def needs_state(completions, trainer_state):
    return [0.0] * len(completions)


def needs_more(completion, row, state_of_game):
    return 0.0


def five(data_source, solution_str, ground_truth, extra_info, url):
    return 0.0


def routed(solution_str, ground_truth, reward_router_address):
    return 0.0


async def openrlhf(queries, prompts, labels):
    return [0.0]


def three_places(completion, row):
    return 0.0


def responses(response, answer):
    return 0.0


from functools import partial
from rlkit.rewards import math as mathematics

gold_level = partial(mathematics.boxed, column="level")
"""


NULL = [{"prompt": "1+1=", "label": gold, "reward_model": {"style": "rule"}} for gold in ("2", None)]


@pytest.fixture(scope="module")
def task(make_task):
    rows = [{"prompt": f"{i}+1=", "solution": i % 3} for i in range(8)]
    mixed = [row | {"data_source": ("openai/gsm8k", "code")[i % 2]} for i, row in enumerate(rows)]
    others = [*mixed, {"prompt": "x", "data_source": "other"}]
    more = {"mixed": mixed, "others": others, "unnamed": [*mixed, {"prompt": "x"}]}
    folder = make_task(rows=rows, bare=[{"prompt": "1+1="}], null=NULL, **more, reward=REWARDS)
    for other in (folder / "other.py", folder / "sub" / "other.py"):
        other.parent.mkdir(exist_ok=True)
        other.write_text("def score(completion, row):\n    return 1.0\n")
    return folder


def flags_of(task, output, *rewards, data="rows"):
    return [
        "--model", str(task / "model"), "--data", str(task / f"{data}.jsonl"), "--output", str(output), "--reward",
        *rewards, "--steps", "3", "--save-steps", "0", "--prompts-per-step", "3", "--group-size", "4",
        "--max-new-tokens", "6", "--device", "cpu",
    ]  # fmt: skip


def train(task, output, *rewards):
    run(grpo.main, grpo.Args, None, argv=flags_of(task, output, *rewards))
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    dumped = {
        line["step"]: [json.loads(text) for text in (output / f"trajectories/train_{line['step']:06d}.jsonl").open()]
        for line in lines
        if line["step"]
    }
    return lines, dumped


@pytest.fixture(scope="module")
def lines(task, tmp_path_factory):
    """The metrics of each step of one run with four functions, with the samples of the step."""
    file, output = task / "reward.py", tmp_path_factory.mktemp("several") / "run"
    given = [f"{file}:length=0.5", f"{file}:compute_score=0", f"{file}:custom_rm", f"{file}:score=-2"]
    with no_pictures():
        run(grpo.main, grpo.Args, None, argv=flags_of(task, output, *given))
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    dumps = [output / f"trajectories/train_{row['step']:06d}.jsonl" for row in rows if row["step"]]
    return rows[-3:], [[json.loads(line) for line in dump.read_text().splitlines()] for dump in dumps]


@pytest.mark.slow
def test_each_of_several_functions_is_a_metric_and_their_sum_trains(lines, task):
    end = AutoTokenizer.from_pretrained(task / "model").eos_token
    absent = 0
    for line, samples in zip(*lines, strict=True):
        assert len(samples) == 12
        totals, parts = [], {name: [] for name in ("length", "compute_score", "custom_rm", "score")}
        for sample in samples:
            text, gold = sample["completion"].removesuffix(end), sample["group"] % 3
            seen = [char for char in text if ord(char) < 128]
            parts["length"].append(math.nan if len(seen) % 2 else len(seen) / 4 + gold)
            parts["compute_score"].append(len(seen) - gold)
            parts["custom_rm"].append(len(set(seen)) + gold)
            parts["score"].append(sample["length"] / 8)
            totals.append(np.nansum([0.5 * parts["length"][-1], parts["custom_rm"][-1], -2 * parts["score"][-1]]))
            assert sample["reward"] == pytest.approx(totals[-1])
        absent += sum(map(math.isnan, parts["length"]))
        for name, values in parts.items():
            assert line[f"reward/{name}"] == pytest.approx(np.nanmean(values), rel=1e-5)
        assert line["reward/mean"] == pytest.approx(np.mean(totals), rel=1e-5)
        assert line["reward/compute_score/acc"] == 0.25
        assert "score/mean" not in line
        longest = [max(s["length"] for s in samples[i : i + 4]) for i in (0, 4, 8)]
        assert line["reward/length/longest"] == pytest.approx(np.mean(longest))
        assert line["reward/score/cut"] == line["truncated"]
    assert 0 < absent < 36


@pytest.mark.usefixtures("no_pictures")
def test_each_source_has_its_reward(task, tmp_path):
    """Of forms of two systems, one of which would fail on the other's rows; a further one judges all rows."""
    file = task / "reward.py"
    given = [f"openai/gsm8k={file}:compute_score", f"code={file}:custom_rm=2", f"{file}:score=0.5"]
    run(grpo.main, grpo.Args, None, argv=flags_of(task, tmp_path / "run", *given, data="mixed"))
    end = AutoTokenizer.from_pretrained(task / "model").eos_token
    for line in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()):
        path = tmp_path / "run" / f"trajectories/train_{line['step']:06d}.jsonl"
        parts, totals = {"openai/gsm8k": [], "code": []}, []
        for sample in map(json.loads, path.read_text().splitlines()):
            seen = [char for char in sample["completion"].removesuffix(end) if ord(char) < 128]
            gold, is_code = sample["group"] % 3, sample["group"] % 2
            value = len(set(seen)) + gold if is_code else len(seen) - gold
            parts["code" if is_code else "openai/gsm8k"].append(value)
            totals.append(value * (1 + is_code) + 0.5 * sample["length"] / 8)
            assert sample["reward"] == pytest.approx(totals[-1])
        assert line["reward/mean"] == pytest.approx(np.mean(totals), rel=1e-5)
        for name, values in parts.items():
            expected = pytest.approx(np.mean(values), rel=1e-5) if values else None
            assert line.get(f"reward/{name}") == expected


def test_a_source_without_rows_is_named(task, caplog):
    file = task / "reward.py"
    reward = (f"openai/gsm8k={file}:score", f"code={file}:score", f"maths={file}:score")
    read_reward(Episodes(reward=reward), load_rows(task / "mixed.jsonl"))
    (line,) = [record.getMessage() for record in caplog.records if "maths" in record.getMessage()]
    assert line.endswith("no row is of that source, its data_source is 'code', 'openai/gsm8k' (--reward-column)")


def test_rewards_of_sources_have_names():
    given = ("math=a.py:f", "code=b.py:f=0.5", "code=b.py:g(x='a=b')", "a.py:f", "c.py:f=0")
    episodes = Episodes(reward=given, reward_column="kind")
    assert episodes.rewards() == {
        "math": ("a.py:f", None), "code.f": ("b.py:f", 0.5), "code.g": ("b.py:g(x='a=b')", None),
        "a.f": ("a.py:f", None), "c.f": ("c.py:f", 0.0),
    }  # fmt: skip
    assert episodes.reward_sources() == {"math": "math", "code.f": "code", "code.g": "code"}


@pytest.mark.slow
def test_one_function_without_a_weight_is_as_ever(task, tmp_path):
    keys = []
    for name, given in (("one", "score"), ("weight", "score=1")):
        run(grpo.main, grpo.Args, None, argv=flags_of(task, tmp_path / name, f"{task / 'reward.py'}:{given}"))
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        keys.append([{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows])
    one, weighted = keys
    assert json.loads((tmp_path / "one" / "args.json").read_text())["reward"] == f"{task / 'reward.py'}:score"
    assert "reward/cut" in one[-1]
    for a, b in zip(one, weighted, strict=True):
        assert {k: v for k, v in b.items() if not k.startswith("reward/score")} == {
            k: v for k, v in a.items() if k != "reward/cut"
        }


NAMED = "'expected_answer' or 'final_answer' or 'correct_answer' or 'reference_answer'"
WRONG = [
    (
        ["openai/gsm8k=reward.py:score", "code=reward.py:score", "--data", "others.jsonl"],
        "others.jsonl, line 9: 'data_source' is 'other', and the sources of --reward are openai/gsm8k, code",
    ),
    (
        ["openai/gsm8k=reward.py:score", "code=reward.py:score", "--data", "unnamed.jsonl"],
        "unnamed.jsonl, line 9: there is no column 'data_source', and the sources of --reward are openai/gsm8k, code",
    ),
    (
        ["openai/gsm8k=reward.py:score", "code=reward.py:needs_level", "--data", "mixed.jsonl"],
        "reward.py:needs_level: mixed.jsonl, line 2: reward.py:needs_level needs the column 'level'; columns found: ",
    ),
    (["math=reward.py:score", "math=other.py:score", "math=sub/other.py:score"], "two functions math.other.score, "),
    (
        ["math=reward.py:score=much"],
        "math=reward.py:score=much: the weight must be a finite number, as in reward.py:sc",
    ),
    (["reward.py:score", "--reward-column", "kind"], "--reward-column is for sources: give --reward as NAME=FILE.py:F"),
    (
        ["a=reward.py:score", "b=reward.py:score", "--combine", "lexicographic"],
        "--combine lexicographic compares rewards of one row, and those of --reward NAME=... have others",
    ),
    (["reward.py:score(x=1)=0.5"], "reward.py:score(x=1): "),
    (
        ["reward.py:score", "other.py:score", "sub/other.py:score=0.5"],
        "names two functions other.score, other.py:score and sub/other.py:score, and each is logged as "
        "reward/other.score: "
        "rename one, or import it under another name in a file of your own",
    ),
    (["reward.py:score=much"], "reward.py:score=much: the weight must be a finite number, as in reward.py:score=0.5"),
    (["reward.py:score="], "reward.py:score=: the weight must be a finite number"),
    (["reward.py:score=inf"], "reward.py:score=inf: the weight must be a finite number"),
    (["reward.py:score=0", "other.py:one=0"], "has only weights of 0, so nothing would train"),
    (["reward.py:score", "reward.py:mean"], "reward.py:mean: reward/mean is a metric of every run; rename the func"),
    (["reward.py:none=2", "reward.py:score"], "reward.py:none: reward.py has no 'none'; it has ['ascii_of', 'compute"),
    (["reward.py:score", "rlkit.rewards.none:f"], "no module 'rlkit.rewards.none'"),
    (["reward.py:score", "rlkit.rewards.text:none"], "rlkit.rewards.text has no 'none'; it has ["),
    (
        ["reward.py:needs_level=2"],
        "reward.py:needs_level: rows.jsonl, line 1: reward.py:needs_level needs the column 'level'; columns found: "
        "['prompt', 'solution']; rename one with --rename",
    ),
    (["reward.py:needs_state"], "reward.py:needs_state requires ['trainer_state'], which only its own library has"),
    (
        ["reward.py:needs_more"],
        "reward.py:needs_more asks for ['state_of_game'], which the samples do not have; after (completion, row) it "
        "may ask for ['completion_ids', 'finish_reason', 'index', 'prompt_ids', 'truncated']",
    ),
    (
        ["reward.py:five"],
        "rows.jsonl, line 1: reward.py:five needs the column 'url'; columns found: ['prompt', 'solution']",
    ),
    (
        ["reward.py:routed"],
        "reward.py:routed requires ['reward_router_address'], which only its own library has: give the parameter a",
    ),
    (
        ["reward.py:openrlhf", "--data", "null.jsonl"],
        "null.jsonl, line 2: reward.py:openrlhf needs the column 'answer' or 'ground_truth' or 'solution' or "
        f"{NAMED} or 'label' or 'gt_answer' or 'reward_model' with a value (label and reward_model.ground_truth "
        "are null); columns found: "
        "['label', 'prompt', 'reward_model']",
    ),
    (
        ["reward.py:three_places", "rlkit.rewards.math:boxed=0.5", "--data", "bare.jsonl"],
        "--reward rlkit.rewards.math:boxed: bare.jsonl, line 1: math.py:boxed needs the column 'answer' or ",
    ),
    (
        ["reward.py:gold_level"],
        "rows.jsonl, line 1: math.py:boxed needs the column 'level'; columns found: ['prompt', 'solution']",
    ),
    (["reward.py:responses"], "would get a completion and its row, and names them ['response', 'answer']: write (comp"),
    (["reward.py"], "got 'reward.py'; reward.py has ['ascii_of', 'length', 'compute_score', 'custom_rm', 'score', "),
    (["reward.score"], "got 'reward.score'; did you mean reward.py:score?"),
    (["boxed"], "got 'boxed'; did you mean rlkit.rewards.math:boxed?"),
    (
        ["reward.py:compute_score", "--data", "bare.jsonl"],
        "bare.jsonl, line 1: reward.py:compute_score needs the column 'answer' or 'ground_truth' or 'solution' or "
        f"{NAMED} or 'label' or 'gt_answer' or 'reward_model'; columns found: ['prompt']",
    ),
    (
        ["reward.py:length", "--eval-data", "bare.jsonl"],
        "bare.jsonl, line 1: reward.py:length needs the column 'solution'; columns found: ['prompt']",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("where", screens.EVERYWHERE)
def test_what_is_wrong_with_a_reward_is_one_line_before_torch_is_imported(task, where):
    wrong = WRONG if where == "pipe" else WRONG[::4]
    data = ["--data", "rows.jsonl"]
    commands = [["grpo", "--model", "none", *data * ("--data" not in x), "--reward", *x] for x, _ in wrong]
    found = screens.refused_early(commands, where, cwd=task, env={"PYTHONPATH": str(ROOT)})
    for line, (given, message) in zip(found, wrong, strict=True):
        assert message in line, given
    assert not (task / "runs").exists()


async def test_what_a_sample_of_one_turn_has_is_what_a_reward_may_ask_for():
    async def answer(ids, **how):
        return Completion([5], [0.0], [0], "stop")

    seen = {}

    def everything(completion, row, *, index, **extra):
        seen.update(extra, index=index)
        return 0.0

    (prompt,) = [Prompt([1], {}, 0)]
    await sample_group(prompt, [answer], score=scorer(everything, tokenizer=tiny_tokenizer(), timeout_s=60))
    assert sorted(seen) == sorted(ONE_TURN)


def test_a_row_without_a_gold_answer_is_named_once(task, caplog):
    own = Episodes(reward=(f"{task / 'other.py'}:score", f"{task / 'reward.py'}:score"))
    rows = load_rows(task / "null.jsonl")
    read_reward(own, rows, load_rows(task / "bare.jsonl"))
    assert [record.getMessage() for record in caplog.records] == [
        f"{task / 'null.jsonl'}: kept 1 of 2 rows that have no gold answer (missing, null or empty): line 2"
    ]


FORMS = {
    "plain": "def f(completion, row):\n    return float(row['answer'] in completion)\n",
    "verl": "def f(data_source, solution_str, ground_truth, extra_info):\n    return solution_str == ground_truth\n",
    "TRL": "def f(completions, answer, **kwargs):\n    return [c == a for c, a in zip(completions, answer)]\n",
    "OpenRLHF": "def f(queries, prompts, labels):\n    return [float(q == x) for q, x in zip(queries, labels)]\n",
}


@pytest.mark.parametrize("form", FORMS)
def test_an_empty_gold_answer_is_named_for_a_function_of_the_users_in_any_form(form, tmp_path, caplog):
    (tmp_path / "rows.csv").write_text("prompt,answer\n1+1,2\n2+2,\n3+3,  \n4+4,8\n")
    (tmp_path / "mine.py").write_text(FORMS[form])
    read_reward(Episodes(reward=f"{tmp_path / 'mine.py'}:f"), load_rows(tmp_path / "rows.csv"))
    named = "rows.csv: kept 2 of 4 rows that have no gold answer (missing, null or empty): line 3, line 4"
    assert [named in record.getMessage() for record in caplog.records].count(True) == 1


def test_an_empty_gold_answer_is_refused_with_its_line_where_a_reward_needs_it(tmp_path):
    (tmp_path / "rows.csv").write_text("prompt,answer\n1+1,2\n2+2,\n")
    for spec in ("rlkit.rewards.math:anywhere", "rlkit.rewards.text:contains"):
        with pytest.raises(ValueError, match=r"rows\.csv, line 3: .*\(answer is empty\)"):
            read_reward(Episodes(reward=spec), load_rows(tmp_path / "rows.csv"))


def test_the_weights_of_the_flag(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b").mkdir()
    (tmp_path / "a=b" / "c.py").touch()
    assert Episodes(reward="a=b/c.py:f").rewards() == {"f": ("a=b/c.py:f", None)}
    assert Episodes(reward=("a=b/c.py:f=1e-1", "m.n:g")).rewards() == {"f": ("a=b/c.py:f", 0.1), "g": ("m.n:g", None)}
    assert Episodes(reward="a.py:mean").rewards() == {"mean": ("a.py:mean", None)}
    assert Episodes(reward=("x/math.py:f", "code.py:f=0.5", "a.py:math", "p.code:g", "rl.text:f=0")).rewards() == {
        "math.f": ("x/math.py:f", None), "code.f": ("code.py:f", 0.5), "math": ("a.py:math", None),
        "g": ("p.code:g", None), "text.f": ("rl.text:f", 0.0),
    }  # fmt: skip
