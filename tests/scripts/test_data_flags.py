"""--data and --eval-data from the command line: which rows train, and what the run folder keeps."""

from __future__ import annotations

import importlib
import json
import os

import pytest

from rlkit.data import order
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.data.turns import LABELLED, PAIR, PROMPT, SFT
from rlkit.scripts.args import Data
from rlkit.scripts.cli import run

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data_flags")
    tokenizer = tiny_tokenizer()
    sizes = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 48}
    tiny_model(tokenizer, **sizes).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for name in ("a", "b", "c", "shards/train", "shards/test"):
        (folder / name).parent.mkdir(exist_ok=True)
        rows = [{"prompt": f"{i}+1=", "response": name, "seed": i if i % 2 else str(i)} for i in range(2)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text("def score(completion, row):\n    return len(completion) % 3\n")
    return folder


def call(task, output, *flags, script="sft", steps=1):
    module = importlib.import_module(f"rlkit.scripts.{script}")
    start = ["--model", str(task / "model"), "--output", str(output), "--steps", str(steps), "--warmup-steps", "0"]
    more = ["--batch-size", "2"] if script == "sft" else ["--prompts-per-step", "2", "--group-size", "2"]
    if script == "grpo":
        more += ["--reward", str(task / "reward.py:score"), "--max-new-tokens", "4"]
    os.chdir(task)
    return run(module.main, module.Args, None, argv=[*start, *more, *flags])


def kept(output):
    return json.loads((output / "args.json").read_text())


@pytest.mark.slow
def test_a_glob_and_its_files_are_the_same_data_also_on_resume(task, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(task)
    call(task, tmp_path / "run", "--data", "[ab].jsonl")
    assert kept(tmp_path / "run")["data"] == ["a.jsonl", "b.jsonl"]
    capsys.readouterr()
    call(task, tmp_path / "run", "--data", "a.jsonl", "b.jsonl", "--resume", steps=2)
    assert "resumed with data" not in capsys.readouterr().out
    call(task, tmp_path / "run", "--data", "b.jsonl", "a.jsonl", "--resume", steps=3)
    said = capsys.readouterr().out
    assert "resumed with data ['b.jsonl', 'a.jsonl'] (it was ['a.jsonl', 'b.jsonl'])" in said


@pytest.mark.slow
def test_a_run_with_one_file_keeps_its_name_and_resumes_with_more(task, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(task)
    call(task, tmp_path / "run", "--data", "a.jsonl", "--eval-data", "shards")
    assert kept(tmp_path / "run")["data"] == "a.jsonl"
    assert kept(tmp_path / "run")["eval_data"] == "shards"
    capsys.readouterr()
    call(task, tmp_path / "run", "--data", "a.jsonl", "--eval-data", "shards", "--resume", steps=2)
    assert "resumed with data" not in capsys.readouterr().out
    call(task, tmp_path / "run", "--data", "a.jsonl", "c.jsonl", "--eval-data", "shards", "--resume", steps=3)
    assert "resumed with data ['a.jsonl', 'c.jsonl'] (it was 'a.jsonl')" in capsys.readouterr().out


@pytest.mark.slow
def test_held_out_rows_that_also_train_are_named(task, tmp_path, caplog, monkeypatch):
    monkeypatch.chdir(task)
    call(task, tmp_path / "1", "--data", "shards", "--eval-data", "shards")
    shared = "--eval-data is not held out: the prompts of 2 of 2 rows are also in --data: "
    assert f"{shared}shards/test.jsonl, line 1, line 2" in caplog.text
    call(task, tmp_path / "2", "--data", "shards", "--eval-data", "shards:train")
    assert "--eval-data is not held out: shards/train.jsonl is also in --data" in caplog.text
    caplog.clear()
    rows = [json.loads(line) for line in (task / "b.jsonl").read_text().splitlines()]
    copied = "".join(json.dumps(dict(reversed(row.items()))) + "\n" for row in reversed(rows))
    (tmp_path / "copy.jsonl").write_text(copied)
    call(task, tmp_path / "3", "--data", "a.jsonl", "b.jsonl", "--eval-data", str(tmp_path / "copy.jsonl"))
    assert f"{shared}{tmp_path / 'copy.jsonl'}, line 1, line 2" in caplog.text


def chat(*texts):
    return [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)]


HELD_OUT = {  # the form of --eval-data, whose second row asks what a row of --data does
    "grpo": ([PROMPT], [{"question": "a", "answer": "1"}, {"question": "b", "answer": "2"}]),
    "sft": (SFT, [{"prompt": "a", "completion": "1"}, {"prompt": "b", "completion": "other"}]),
    "sft of messages": (SFT, [{"messages": chat("b", "1", "c", "2")}, {"messages": chat("b", "other")}]),
    "sft of Alpaca": (SFT, [{"instruction": "a", "input": "b", "output": "1"}, {"instruction": "b", "output": "2"}]),
    "dpo": ([PAIR], [{"prompt": x, "chosen": "1", "rejected": "2"} for x in "ab"]),
    "dpo of conversations": ([PAIR], [{"chosen": chat(x, "1"), "rejected": chat(x, "2")} for x in "ab"]),
    "kto": ([PAIR, LABELLED], [{"prompt": x, "response": "1", "label": True} for x in "ab"]),
}  # fmt: skip


@pytest.mark.parametrize("name", HELD_OUT)
def test_held_out_prompts_that_also_train_are_counted(name, tmp_path, caplog):
    forms, rows = HELD_OUT[name]
    train = {
        "grpo": [{"messages": chat(" b ")}, {"messages": chat("c")}],
        "dpo": [{"prompt": x, "chosen": "5", "rejected": "6"} for x in "bc"],
        "kto": [{"prompt": x, "response": "5", "label": True} for x in "bc"],
    }.get(name.partition(" ")[0], [{"messages": chat("b", "5")}, {"messages": chat("c", "6")}])
    for file, found in (("train", train), ("test", [rows[0]] * 3 + rows[1:]), ("fresh", rows[:1])):
        (tmp_path / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    Data(str(tmp_path / "train.jsonl"), eval_data=f"t={tmp_path / 'test.jsonl'}").rows(*forms)
    said = [line for line in caplog.messages if "held out" in line]
    where = f"{tmp_path / 'test.jsonl'}, line 4"
    assert said == [f"--eval-data is not held out: the prompts of 1 of 4 rows are also in --data: {where}"]
    caplog.clear()
    Data(str(tmp_path / "train.jsonl"), eval_data=str(tmp_path / "fresh.jsonl")).rows(*forms)
    assert "held out" not in caplog.text


@pytest.mark.slow
def test_a_column_of_several_types_stops_no_run_and_a_reward_is_told(task, tmp_path, caplog, monkeypatch):
    monkeypatch.chdir(task)
    call(task, tmp_path / "1", "--data", "a.jsonl")
    assert "mixes types" not in caplog.text
    call(task, tmp_path / "2", "--data", "a.jsonl", script="grpo")
    assert "column 'seed' mixes types: string in a.jsonl, line 1, number in line 2 (1): a reward sees" in caplog.text
    rows = (tmp_path / "2" / "trajectories" / "train_000001.jsonl").read_text()
    assert json.loads(rows.splitlines()[0])["step"] == 1


def test_the_places_of_choices_count_alike_in_all_files(tmp_path):
    """In a few held-out rows that count from 1, the last place may be missing: they look as if they counted from 0."""
    for name, places in (("train", (1, 2, 3)), ("test", (1, 2)), ("letters", (0, 2))):
        rows = [{"q": f"{name} {i}", "choices": [*"abc"], "answer": i} for i in places]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train, test, letters = (str(tmp_path / f"{name}.jsonl") for name in ("train", "test", "letters"))
    with pytest.raises(ValueError, match="`prompt`: the answers of some files are the places of choices from 0"):
        Data(train, prompt="{q} {choices}", eval_data=test).rows(PROMPT)
    (part,), sets = Data(letters, prompt="{q} {choices}", eval_data=test).rows(PROMPT)
    assert [row["answer"] for row in (*part, *sets[""])] == ["A", "C", "B", "C"]


@pytest.mark.slow
def test_files_with_weights_are_mixed_in_their_shares(task, tmp_path, monkeypatch):
    """3 to 1 at every fourth group; the files have two rows each, so those of a repeat."""
    monkeypatch.chdir(task)
    call(task, tmp_path, "--data", "a.jsonl=3", "b.jsonl=1", "--too-long", "cut-left", script="grpo", steps=4)
    rows = [json.loads(line) for path in sorted((tmp_path / "trajectories").glob("train_*.jsonl"))
            for line in path.read_text().splitlines()]  # fmt: skip
    assert [sum(row["group"] < 2 for row in rows[:n]) for n in (8, 16)] == [6, 12]
    assert {row["group"] for row in rows} == {0, 1, 2, 3}
    assert kept(tmp_path)["data"] == ["a.jsonl=3", "b.jsonl=1"]
    (task / "a=2").write_text((task / "a.jsonl").read_text())
    assert Data(("a=2", "b.jsonl")).parts() == [(["a=2", "b.jsonl"], 1.0)], "a file of that name"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (("a.jsonl=3", "b.jsonl"), "--data has weights for 1 of 2 files: give each file a weight"),
        (("a.jsonl=0", "b.jsonl=1"), "--data a.jsonl=0: the weight must be above 0"),
        (("a.jsonl=inf", "b.jsonl=1"), "--data a.jsonl=inf: the weight must be above 0"),
        (("a.jsonl=1", "gone.jsonl=1"), "gone.jsonl: no such file"),
        (
            ("a.jsonl", "--too-long", "error", "--max-example-tokens", "4"),
            "a.jsonl, line 1: 14 tokens; 2 of 2 examples",
        ),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(data, message, task, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        call(task, tmp_path / "run", "--data", *data)
    assert " ".join(capsys.readouterr().err.split()).rpartition("error: ")[2].startswith(message)


@pytest.mark.slow_cases("kto", "sft")
@pytest.mark.parametrize("script", ["dpo", "kto", "reward_model", "sft"])
def test_all_commands_on_fixed_data_mix(script, task, tmp_path, monkeypatch):
    """One step of a batch of three from two files: two rows of the first, one of the second."""
    monkeypatch.chdir(task)
    for name in ("x", "y"):
        (task / f"{name}.jsonl").write_text(json.dumps({"prompt": name, "chosen": name, "rejected": "no"}) + "\n")
        (task / f"{name}_sft.jsonl").write_text(json.dumps({"prompt": name, "response": name * 3}) + "\n")
    seen = []
    real = order.mixed_index
    monkeypatch.setattr(order, "mixed_index", lambda *args, **how: seen.append(real(*args, **how)) or seen[-1])
    ends = "_sft.jsonl" if script == "sft" else ".jsonl"
    module = importlib.import_module(f"rlkit.scripts.{script}")
    flags = ["--model", "model", "--data", f"x{ends}=2", f"y{ends}=1", "--batch-size", "3", "--steps", "1"]
    run(module.main, module.Args, None, argv=[*flags, "--output", str(tmp_path), "--device", "cpu"])
    sizes = 2 if script == "kto" else 1
    assert [row // sizes for row in seen[-3:]].count(0) == 2


def test_a_glob_may_have_a_weight(tmp_path):
    for name in ("part-1", "part-2", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "a"}\n')
    specs = (f"{tmp_path}/part-*.jsonl=2", f"{tmp_path}/b.jsonl=1")
    assert Data(specs).expanded().data == specs
    assert Data(f"{tmp_path}/part-*.jsonl").expanded().data == tuple(f"{tmp_path}/part-{i}.jsonl" for i in (1, 2))
