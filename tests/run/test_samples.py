"""The samples of a run: the right file, rows that tell everything about a sample, and a table people can read."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rlkit.data.prompts import Prompt
from rlkit.data.tiny import tiny_tokenizer
from rlkit.run.folder import open_run
from rlkit.run.samples import Known, Samples, pieces, table, token_row, trajectory_row, trajectory_rows
from rlkit.settings import Rollouts
from rlkit.types import Trajectory

ROW = {"prompt": "What is 6 * 7?", "answer": "42", "topic": "products"}


def sampled(reward=0.0, *, text="42", metrics=None, **changes):
    ids = tiny_tokenizer().encode(text, add_special_tokens=False)
    info = {"finish_reason": "stop"} | ({"metrics": metrics} if metrics else {})
    zeros = [0] * len(ids)
    return replace(
        Trajectory([60], ids, [True] * len(ids), [-1.0] * len(ids), zeros, reward=reward, info=info), **changes
    )


def rows_in(folder):
    files = sorted((folder / "trajectories").iterdir())
    return {path.stem: [json.loads(line) for line in path.read_bytes().splitlines()] for path in files}


def test_groups_are_written_where_they_belong_and_the_status_counts(tmp_path):
    statuses = []
    engine = SimpleNamespace(progress=SimpleNamespace(running=3, waiting=7))
    groups = [[sampled(1.0), sampled(0.0)], [sampled(1.0)]]
    with open_run(tmp_path / "run", steps=3) as run:
        run.status = statuses.append
        samples = Samples(run, tiny_tokenizer(), engine=engine)
        for index, group in zip((4, 5), groups):
            samples.completed(Prompt([60], {}, index), group, step=2)
        samples.completed(Prompt([60], {}, 6), [sampled(0.0)], step=2, kept=False)
        samples.completed(Prompt([60], {}, 7), [sampled(1.0)], step=0, kind="eval_greedy")
        assert set(rows_in(tmp_path / "run")) == {"dropped_000002", "eval_greedy_000000"}
        known = Known(places=[0, 1], advantages=[0.5, -0.5])
        samples.trained([Prompt([60], {}, 4), Prompt([60], ROW, 5)], groups, known, step=2)
    found = {
        name: [(row["step"], row["group"], row.get("advantage", "none")) for row in rows]
        for name, rows in rows_in(tmp_path / "run").items()
    }
    assert found == {
        "train_000002": [(2, 4, 0.5), (2, 4, -0.5), (2, 5, None)],
        "dropped_000002": [(2, 6, "none")],
        "eval_greedy_000000": [(0, 7, "none")],
    }
    assert [row["gold"] for row in rows_in(tmp_path / "run")["train_000002"]] == [None, None, "42"]
    assert [s.split(",")[0] for s in statuses] == [
        "train: 1 groups", "train: 2 groups", "dropped: 1 groups", "eval_greedy: 1 groups",
    ]  # fmt: skip
    assert "reward 0.750" in statuses[1]
    assert all(s.endswith("3 running, 7 queued") for s in statuses)


def test_the_status_has_a_rate_where_groups_end_apart(tmp_path, monkeypatch):
    """Groups of equal lengths end together: a rate between the first and the last would be any number."""
    statuses = []
    with open_run(tmp_path / "run", steps=1) as run:
        run.status = statuses.append
        samples, answer = Samples(run, tiny_tokenizer(), engine=None), sampled()
        for later in (0.0, 0.001, 4.0):
            for tally in samples._tallies.values():
                now = tally.start + later
                monkeypatch.setattr("rlkit.run.samples.time.perf_counter", lambda now=now: now)
            samples.completed(Prompt([60], {}, 0), [answer] * 2, step=1)
    rate = 4 * len(answer.ids) / 4.0  # of the groups after the first
    assert [s.split(", ")[2:] for s in statuses] == [[], [], [f"{rate:.0f} tok/s"]]


def test_a_row_has_texts_rewards_and_the_finish_reason():
    tokenizer = tiny_tokenizer()
    chat = [{"role": "user", "content": "häh?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    answer = [*tokenizer.encode("12", add_special_tokens=False), tokenizer.eos_token_id]
    trajectory = Trajectory(
        prompt_ids=prompt, ids=answer, mask=[True, False, True], logp=[-0.5, 0.0, -0.25], versions=[0, -1, 0],
        reward=float("nan"), score=1.0,
        info={"finish_reason": "stop", "tool": {"calls": 2}, "metrics": {"format": 0.5}},
    )  # fmt: skip
    row = trajectory_row(trajectory, decode=tokenizer.decode)
    assert math.isnan(row.pop("reward"))
    assert row == {
        "prompt": "<|im_start|>user\nhäh?<|im_end|>\n<|im_start|>assistant\n",
        "completion": "12<|im_end|>",
        "rewards": {"format": 0.5},
        "score": 1.0,
        "length": 2,
        "versions": [0],
        "finish_reason": "stop",
        "info": {"tool": {"calls": 2}},
    }
    assert trajectory.info["metrics"], "the trajectory is as it was"
    cut = Trajectory(prompt_ids=[1], ids=[2], mask=[True], logp=[0.0], versions=[0], truncated=True)
    assert trajectory_row(cut, decode=str)["finish_reason"] == "length"
    assert trajectory_row(replace(cut, continues=True), decode=str)["continues"] is True


def test_the_table_shows_the_group_whose_rewards_differ_most(tmp_path, capsys):
    prompts = [
        Prompt([60], {"messages": [{"role": "user", "content": f"question {i}"}], "answer": i}, i) for i in (0, 1)
    ]
    equal = [sampled(1.0), sampled(1.0)]
    mixed = [
        sampled(x, text=f"<b>{x}</b>\x1b[31m\n", metrics={"correct": x, "correct/time": 3.0}) for x in (0, 3, 1, 2)
    ]
    known = Known(places=[2, 3, 4, 5], advantages=[t.reward - 1.5 for t in mixed])
    with open_run(tmp_path / "run", steps=99) as run:
        samples = Samples(run, tiny_tokenizer(), engine=None, rollouts=Rollouts(print_samples_steps=10))
        for step in range(1, 21):
            samples.trained(prompts, [equal, mixed], known, step=step)
    lines = capsys.readouterr().out.splitlines()
    titles = [line for line in lines if line.startswith("  step")]
    assert titles == [f'  step {n}, row 2 of the data: "question 1"   gold: 1 (a number)' for n in (1, 10, 20)]
    shown = [line.split(maxsplit=3) for line in lines[1:5]]
    assert shown == [
        ["reward", "advantage", "correct", "answer"],
        ["3.000", "+1.500", "3.000", r'"<b>3</b>\u001b[31m\n"'],
        ["1.000", "-0.500", "1.000", r'"<b>1</b>\u001b[31m\n"'],
        ["0.000", "-1.500", "0.000", r'"<b>0</b>\u001b[31m\n"'],
    ]
    assert len(lines) == 3 * 5


def test_numbers_of_many_digits_stay_apart():
    rows = [
        {"step": 1, "group": 0, "gold": None, "advantage": x, **trajectory_row(t, decode=tiny_tokenizer().decode)}
        for x in (1.5e6, -1.5e6)
        for t in [sampled(7e6 if x > 0 else -7e6, text="a", metrics={"digits": 12345678.0})]
    ]
    _, titles, first, last = table(rows, question="q", width=100)
    assert titles.split() == ["reward", "advantage", "digits", "answer"]
    assert first.split() == ["7000000.000", "+1500000.000", "12345678.000", '"a"']
    assert last.split() == ["-7000000.000", "-1500000.000", "12345678.000", '"a"']
    assert len({line.index(word) for line, word in ((titles, "answer"), (first, '"a"'), (last, '"a"'))}) == 1


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_table_fits_into_its_width_and_keeps_the_end_of_an_answer(width):
    long = "thinking " * 90 + "so it is 42"
    rows = [
        {"step": 7, "group": 3, "gold": long, "advantage": 0.5, **trajectory_row(t, decode=tiny_tokenizer().decode)}
        for t in (sampled(1.0, text=long), sampled(0.0, text=long, metrics={"a": 1.0}))
    ]
    lines = table(rows, question=long, width=width)
    assert all(len(line) <= max(width, 92) for line in lines)
    assert max(map(len, lines[2:])) == width
    assert all(line.endswith('so it is 42"') for line in lines[2:])


def test_a_prompt_made_in_python_is_shown_by_its_tokens(tmp_path, capsys):
    ids = tiny_tokenizer().encode("2+2", add_special_tokens=False)
    with open_run(tmp_path / "run", steps=9) as run:
        Samples(run, tiny_tokenizer(), engine=None, rollouts=Rollouts(print_samples_steps=1)).trained(
            [Prompt(ids, {}, 0)], [[sampled()]], Known(), step=4
        )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == '  step 4, row 1 of the data: "2+2"'
    assert lines[2].split() == ["0.000", "-", '"42"']


def test_a_rank_that_does_not_write_decodes_nothing(tmp_path):
    with open_run(tmp_path / "run", steps=9, active=False) as run:
        samples = Samples(run, None, engine=None, rollouts=Rollouts(print_samples_steps=1))
        samples.trained([], [[sampled()]], Known(), step=1)
        samples.completed(Prompt([60], {}, 0), [sampled()], step=1, kept=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["plain words", "über 日本語 🤗👩‍👩‍👧 مرحبا", "\n\n\t", ""])
def test_the_pieces_of_tokens_join_to_the_text(text):
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)

    def decode(ids):
        return tokenizer.decode(list(ids))

    found = pieces(ids, decode=decode)
    assert len(found) == len(ids)
    assert "".join(found) == decode(ids)
    if text.isascii():
        assert found == [decode([x]) for x in ids]


def test_halves_of_characters_wait_for_a_few_tokens_only():
    tokenizer, asked = tiny_tokenizer(), []
    (half,) = [i for i in range(len(tokenizer)) if tokenizer.convert_ids_to_tokens(i) == "Ù"]  # the byte 0xd9

    def decode(ids):
        asked.append(len(ids))
        return tokenizer.decode(list(ids))

    found = pieces([half] * 500, decode=decode)
    assert "".join(found) == "\ufffd" * 500
    assert max(asked) < 100, "the time is linear"


def test_numbers_of_tokens_are_short():
    streams = {"logp": [-0.123456, -2.0], "mask": [1, 1], "advantage": None, "version": [3, 4]}
    assert token_row([104, 105], streams, decode=lambda ids: "ab"[: len(ids)]) == {
        "text": ["a", "b"], "logp": [-0.1235, -2.0], "mask": 1, "advantage": None, "version": [3, 4]
    }  # fmt: skip


def test_rows_have_the_rewards_of_turns_and_of_pieces():
    piece = Trajectory([1], [2, 3], [True, True], [-1.0, -1.0], [0, 0], 0.0, token_rewards=[0.0, 0.25])
    group = [piece, replace(piece, continues=True, token_rewards=[0.5, 0.0]), replace(piece, token_rewards=None)]
    rows = trajectory_rows(group, decode=str)
    assert [row["reward"] for row in rows] == [0.25, 0.75, 0.0]
