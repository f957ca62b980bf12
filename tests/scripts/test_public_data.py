"""The table of public data sets in docs/data.md: the command beside a schema reads its rows, and trains on them."""

from __future__ import annotations

import gzip
import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from rlkit.data.tiny import tiny_model, tiny_tokenizer, tiny_vision_model
from rlkit.scripts import cli

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
TABLE = re.findall(
    r"^\| \[([\w./-]+)\]\(https://huggingface.co/datasets/\1\) \| (.*?) \| `(.*?)` \|$", PAGE, re.MULTILINE
)
IDS = [f"{name.rpartition('/')[2]}, {command.split()[1]}" for name, _, command in TABLE]


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def turns(i: int, answer: str) -> list[dict[str, str]]:
    return [said("user", f"Name bird {i}."), said("assistant", answer)]


def picture(i: int) -> dict[str, Any]:
    with io.BytesIO() as file:
        Image.new("RGB", (16, 16), (40 * i, 0, 0)).save(file, "PNG")
        return {"bytes": file.getvalue(), "path": None}


TESTS = json.dumps({"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]})
DOUBLE = '["print(2 * int(input()))"]'
OF_TACO = ("difficulty", "raw_tags", "name", "source", "tags", "skill_types", "url", "Expected Auxiliary Space",
           "time_limit", "date", "picture_num", "memory_limit", "Expected Time Complexity")  # fmt: skip
FILES: dict[str, tuple[str, Any]] = {  # the file as the hub has it, and row i
    "openai/gsm8k": ("parquet", lambda i: {
        "question": f"Ann has {i} nuts and finds 2. How many has she?",
        "answer": f"{i} + 2 = <<{i}+2={i + 2}>>\n#### {i + 2}"}),
    "BytedTsinghua-SIA/DAPO-Math-17k": ("parquet", lambda i: {
        "data_source": "math_dapo", "ability": "MATH",
        "prompt": [said("user", f'The last line is "Answer: $Answer".\n\nWhat is {i} + 1?')],
        "reward_model": {"ground_truth": str(i + 1), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"9a1-{i}"}}),
    "agentica-org/DeepScaleR-Preview-Dataset": ("json", lambda i: {
        "problem": f"Find ${i} + 1$.", "answer": str(i + 1), "solution": f"It is $\\boxed{{{i + 1}}}$."}),
    "codeparrot/apps": ("jsonl", lambda i: {
        "problem_id": i, "question": f"Read n and print 2n, problem {i}.", "solutions": DOUBLE,
        "input_output": TESTS, "difficulty": "interview", "url": f"https://example.org/{i}", "starter_code": ""}),
    "BAAI/TACO": ("parquet", lambda i: {
        "question": f"Read n and print 2n, problem {i}.", "solutions": DOUBLE,
        "starter_code": "", "input_output": TESTS, **dict.fromkeys(OF_TACO, f"{i}")}),
    "open-r1/codeforces": ("parquet", lambda i: {
        "id": f"{i}/A", "title": "Twice", "description": f"Double a number, problem {i}.", "note": None,
        "input_format": "One number.", "output_format": "Its double.", "examples": [{"input": "1", "output": "2"}],
        "official_tests": [{"input": "2", "output": "4"}]}),
    "PeterJinGo/nq_hotpotqa_train": ("parquet", lambda i: {
        "id": f"train_{i}", "question": f"who built tower {i}", "golden_answers": ["Ann", "Ann Lee"],
        "prompt": [said("user", f"Answer inside <answer> and </answer>. Question: who built tower {i}?\n")],
        "ability": "fact-reasoning", "reward_model": {"ground_truth": {"target": ["Ann", "Ann Lee"]}, "style": "rule"},
        "extra_info": {"index": i, "split": "train"}, "data_source": "nq", "metadata": None}),
    "hiyouga/geometry3k": ("parquet", lambda i: {
        "images": [picture(i)], "problem": f"<image>Find side {i} of the triangle.", "answer": str(i)}),
    "rajpurkar/squad": ("parquet", lambda i: {
        "id": f"5{i}", "title": "Ports", "context": f"Tower {i} stands in Porto.", "question": f"Where is tower {i}?",
        "answers": {"text": ["Porto"], "answer_start": [18]}}),
    "allenai/ai2_arc": ("parquet", lambda i: {
        "id": f"M_{i}", "question": f"Which is hot ({i})?", "answerKey": "B",
        "choices": {"text": ["ice", "fire"], "label": ["A", "B"]}}),
    "cais/mmlu": ("parquet", lambda i: {
        "question": f"What is {i} + 1?", "subject": "abstract_algebra",
        "choices": ["0", "1", "2", str(i + 9)], "answer": i % 4}),
    "Anthropic/hh-rlhf": ("jsonl.gz", lambda i: {
        side: f"\n\nHuman: Name bird {i}.\n\nAssistant: {answer}"
        for side, answer in (("chosen", "A wren."), ("rejected", "No."))}),
    "HuggingFaceH4/ultrafeedback_binarized": ("parquet", lambda i: {
        "prompt": f"Name bird {i}.", "prompt_id": f"f0e{i}", "chosen": turns(i, "A wren."), "rejected": turns(i, "No."),
        "messages": turns(i, "A wren."), "score_chosen": 9.0, "score_rejected": 2.0}),
    "allenai/llama-3.1-tulu-3-8b-preference-mixture": ("parquet", lambda i: {
        "id": f"t{i}", "prompt": f"Name bird {i}.", "source": "mix",
        "chosen": turns(i, "A wren."), "rejected": turns(i, "No.")}),
    "open-thoughts/OpenThoughts-114k": ("parquet", lambda i: {
        "system": "Think first.", "conversations": [
            {"from": "user", "value": f"What is {i} + 1?"},
            {"from": "assistant", "value": f"<|begin_of_thought|>\n\nAdd.\n\n<|end_of_thought|>\n\n{i + 1}"}]}),
}  # fmt: skip


def written(folder: Path, name: str) -> Path:
    """Four rows in the schema of a data set, in a file of the kind that the hub has."""
    kind, row = FILES[name]
    path, rows = folder / f"train.{kind}", [row(i) for i in range(4)]
    if kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif kind == "json":
        path.write_text(json.dumps(rows))
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(lines) if kind.endswith("gz") else lines)
    return path


def flags_of(command: str, path: Path) -> tuple[str, list[str]]:
    """The script of a command, and its flags with the file in the place of the data set."""
    _, script, *flags = shlex.split(command)
    at = flags.index("--data")
    return script, [*flags[:at], "--data", str(path), *flags[at + 2 :]]


def test_the_table_has_each_schema_with_its_columns():
    assert {name for name, *_ in TABLE} == {*FILES}
    for name, columns, _ in TABLE:
        there = re.findall("`(.*?)`", re.sub(r"\(.*?\)", "", columns))
        assert {*there} <= {*FILES[name][1](0)}, name


@pytest.mark.parametrize(("name", "columns", "command"), TABLE, ids=IDS)
def test_the_command_reads_its_rows(name, columns, command, tmp_path, capsys):
    script, flags = flags_of(command, written(tmp_path, name))
    given = [x for x in flags if x != "--data"]
    if script == "grpo":
        cli.main(["data", *given, "--script", script])
        said_of_rewards = re.findall(r"^  its gold answer .*  1$", capsys.readouterr().out, re.MULTILINE)
        assert said_of_rewards or "(column=" in command  # of which the trial does not know the gold answer
    else:
        cli.main(["data", *given, "--script", script])
        assert re.search(rf"^  rlkit [\w, ]*\b{script}\b[\w, ]*  (?!no: )", capsys.readouterr().out, re.MULTILINE)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[bool, Path]:
    """A small model of text, and one that reads images."""
    folder, tokenizer = tmp_path_factory.mktemp("models"), tiny_tokenizer()
    sizes = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 32}
    tiny_model(tokenizer, **sizes).save_pretrained(folder / "text")
    tokenizer.save_pretrained(folder / "text")
    tiny_vision_model(folder / "images", hidden=32, layers=2)
    return {False: folder / "text", True: folder / "images"}


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(("name", "columns", "command"), TABLE, ids=IDS)
def test_the_command_trains_on_its_rows(name, columns, command, tmp_path, models):
    script, flags = flags_of(command, written(tmp_path, name))
    sizes = ["--prompts-per-step", "2", "--group-size", "2", "--max-new-tokens", "4", "--max-prompt-tokens", "300"]
    sizes = sizes if script == "grpo" else ["--batch-size", "2"]
    base = [
        "--model",
        str(models["geometry" in name]),
        "--device",
        "cpu",
        "--steps",
        "1",
        "--output",
        str(tmp_path / "run"),
    ]
    cli.main([script, *flags, *base, *sizes])
    (metrics,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert metrics["step"] == 1
