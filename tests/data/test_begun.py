"""Prompts that end with the beginning of the answer: rendered, trained from their end, rewarded, shown, or refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlkit.data.chat import opened_text
from rlkit.data.examples import labelled_examples, preference_pairs, sft_examples
from rlkit.data.prompts import rl_prompts
from rlkit.data.tiny import tiny_tokenizer
from rlkit.rewards.judge import question_messages
from rlkit.rewards.scoring import scorer
from rlkit.rollout.envs.chat import Chat
from rlkit.run.folder import read_lines
from rlkit.run.sync import run_sync
from rlkit.scripts import cli
from rlkit.types import Completion, Trajectory

TEMPLATES = Path(__file__).parents[1] / "rollout" / "templates"
ASKED = {"role": "user", "content": "1+1"}
BEGUN = "Let me think.\n<think>"
THINKS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"  # noqa: E501


def conversation(text=BEGUN, number=1):
    return [{"role": "user", "content": f"{number}+1"}, {"role": "assistant", "content": text}]


def tokenizer_with(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def prompts(rows, tokenizer=None, **how):
    return rl_prompts(rows, tokenizer=tokenizer or tiny_tokenizer(), max_prompt_tokens=200, **how)[0]


@pytest.mark.parametrize("name", ["chatml", "llama3", "qwen3", "mistral"])
@pytest.mark.parametrize("text", [BEGUN, "Sure: ", "<think>\nOkay, "])
def test_the_text_stands_literally_after_the_generation_prompt(name, text):
    """Whatever a template does to finished answers: Qwen3 writes an empty <think> before them, Llama 3 strips."""
    tokenizer = tokenizer_with((TEMPLATES / f"{name}.jinja").read_text())
    found = prompts([{"messages": conversation(text, number)} for number in (1, 2)], tokenizer)
    for number, prompt in enumerate(found, 1):
        asked = tokenizer.apply_chat_template(
            conversation(number=number)[:1], tokenize=False, add_generation_prompt=True
        )
        assert tokenizer.decode(prompt.ids) == asked + text
        assert prompt.begun == text
    if name == "chatml":  # which writes contents as they are
        theirs = tokenizer.apply_chat_template(conversation(text), tokenize=False, continue_final_message=True)
        assert tokenizer.decode(found[0].ids) == theirs


@pytest.mark.parametrize(
    ("text", "end"), [("<think>\nOkay", "<think>\nOkay"), ("<think>Okay", "<think>\nOkay"), ("Okay", "<think>\nOkay")]
)
def test_a_tag_that_the_template_opens_is_not_opened_twice(text, end):
    tokenizer = tokenizer_with(THINKS)
    (prompt, _) = prompts([{"messages": conversation(text)}] * 2, tokenizer)
    assert tokenizer.decode(prompt.ids) == f"[user]1+1[assistant]{end}"


def test_a_template_that_opens_a_tag_and_a_text_that_opens_it_later_are_refused_with_the_flag():
    with pytest.raises(ValueError, match=r'row 1: the chat template opens <think>, and .*enable_thinking": false'):
        prompts([{"messages": conversation()}] * 2, tokenizer_with(THINKS))


def test_a_template_that_writes_past_answers_otherwise_is_named_once(caplog):
    tokenizer = tokenizer_with((TEMPLATES / "qwen3.jinja").read_text())
    prompts([{"messages": conversation()}] * 3, tokenizer)
    (line,) = [r.getMessage() for r in caplog.records if "beginning of the answer as it is" in r.getMessage()]
    assert "'Let me think.\\n<think>'; the chat template writes a past one '<think>\\n\\n</think>" in line


@pytest.mark.parametrize(
    ("rows", "place"),
    [
        ([conversation("2"), conversation("3", 2)], 1),
        ([conversation("2")], 1),
        ([conversation()[:1], conversation()], 2),
    ],
    ids=["answers that differ", "one row", "some rows"],
)
def test_what_may_be_a_finished_answer_is_refused_and_the_flag_continues_it(rows, place, caplog):
    rows = [{"messages": messages} for messages in rows]
    with pytest.raises(ValueError, match=rf"^row {place}: the conversation ends with .*or --continue-answer samples"):
        prompts(rows)
    assert [p.begun for p in prompts(rows, continue_answer=True)] == [
        m["messages"][-1]["content"] if len(m["messages"]) > 1 else "" for m in rows
    ]
    assert "end with the beginning of the answer, after which sampling goes on" in caplog.text


def test_calls_and_reasoning_beside_the_text_are_refused():
    message = conversation()[1] | {"reasoning_content": "hm"}
    with pytest.raises(ValueError, match="row 1: the last message begins the answer, and holds 'reasoning_content'"):
        prompts([{"messages": [ASKED, message]}] * 2)


@pytest.mark.parametrize("road", ["sft", "dpo", "kto"])
def test_fixed_responses_go_on_after_the_beginning_with_the_flag(road):
    tokenizer = tiny_tokenizer()
    end = tokenizer.decode([tokenizer.eos_token_id])
    read, answer = {
        "sft": (sft_examples, {"response": "2</think>"}),
        "dpo": (preference_pairs, {"chosen": "2</think>", "rejected": "3"}),
        "kto": (labelled_examples, {"completion": "2</think>", "label": True}),
    }[road]
    rows = [{"prompt": conversation()} | answer] * 2
    with pytest.raises(ValueError, match="drop one of them, or --continue-answer"):
        read(rows, tokenizer=tokenizer, max_example_tokens=200)
    item = read(rows, tokenizer=tokenizer, max_example_tokens=200, continue_answer=True)[0][0]
    (prompt, _) = prompts([{"messages": conversation()}] * 2, tokenizer)
    if road == "sft":
        assert item.ids[: item.mask.index(True)] == prompt.ids
        trained = [i for i, on in zip(item.ids, item.mask, strict=True) if on]
    else:
        assert item.prompt == prompt.ids
        trained = item.chosen if road == "dpo" else item.response
    assert tokenizer.decode(trained) == f"2</think>{end}"


def test_a_reward_reads_the_answer_from_its_beginning():
    tokenizer, seen = tiny_tokenizer(), []

    def reward(completion, row, completion_ids):
        seen.append((completion, tokenizer.decode(completion_ids), len(row["messages"])))
        return 1.0

    (prompt, _) = prompts([{"messages": conversation()}] * 2, tokenizer)
    ids = tokenizer.encode("2</think>", add_special_tokens=False)
    sampled = Trajectory(prompt.ids, ids, [True] * len(ids), [0.0] * len(ids), [0] * len(ids))
    run_sync(scorer(reward, tokenizer=tokenizer, timeout_s=5)(prompt, [sampled]))
    assert seen == [(f"{BEGUN}2</think>", "2</think>", 2)]
    assert question_messages(prompt.row) == [ASKED]


def test_rows_of_verl_and_rewards_of_trl_have_the_answer_from_its_beginning():
    """TRL takes the beginning off the prompt that a reward gets, and puts it before the completion."""
    from rlkit.compat.rewards import adapted
    from rlkit.compat.rows import read
    from rlkit.data.turns import PROMPT

    rows = [{"data_source": "count", "prompt": conversation(), "reward_model": {"ground_truth": "2"}}] * 2
    tokenizer, seen = tiny_tokenizer(), []
    (prompt, _) = prompts(read(rows, PROMPT), tokenizer)
    assert tokenizer.decode(prompt.ids).endswith(f"assistant\n{BEGUN}")

    def reward(prompts, completions, **kwargs):
        seen.append((prompts[0], completions[0][0]["content"]))
        return [1.0]

    ids = tokenizer.encode("2", add_special_tokens=False)
    sampled = Trajectory(prompt.ids, ids, [True], [0.0], [0])
    run_sync(scorer(adapted(reward), tokenizer=tokenizer, timeout_s=5)(prompt, [sampled]))
    assert seen == [([ASKED], f"{BEGUN}2")]


def test_an_environment_goes_on_after_it_and_joins_the_turns():
    """The first turn of `Chat` has the prompt's tokens, its message both texts, and the second turn extends them."""
    tokenizer = tiny_tokenizer()
    (prompt, _) = prompts([{"messages": conversation()}] * 2, tokenizer)
    asked, said = [], ["2</think>", "3"]

    async def sample(prompt_ids, **_):
        asked.append(tokenizer.decode(prompt_ids))
        ids = [*tokenizer.encode(said[len(asked) - 1], add_special_tokens=False), tokenizer.eos_token_id]
        return Completion(ids, [0.0] * len(ids), [0] * len(ids), "stop")

    async def episode():
        chat = Chat(prompt, sample, tokenizer=tokenizer)
        await chat.turn()
        chat.add("and?")
        await chat.turn()
        return chat.messages

    messages = run_sync(episode())
    assert [m["content"] for m in messages] == ["1+1", f"{BEGUN}2</think>", "and?", "3"]
    assert asked[0] == tokenizer.decode(prompt.ids)
    assert asked[1] == opened_text(tokenizer, messages[:3]), "as the whole conversation is rendered"


REWARD = "def score(completion, row):\n    return float(completion.startswith('Let me think.'))\n"


@pytest.fixture(scope="module")
def task(make_task):
    return make_task(begun=[{"messages": conversation(number=i)} for i in range(4)], reward=REWARD)


@pytest.mark.slow_cases(
    "grpo --model model --data begun.jsonl --reward reward.py:score --group-size 2",
    "ppo --model model --data begun.jsonl --reward reward.py:score",
)
@pytest.mark.parametrize(
    "command",
    [
        "grpo --model model --data begun.jsonl --reward reward.py:score --group-size 2",
        "ppo --model model --data begun.jsonl --reward reward.py:score",
        "distill --model model --teacher model --data begun.jsonl",
    ],
)
def test_every_command_samples_after_it_and_shows_it(command, task, tmp_path, capsys, monkeypatch, no_pictures):
    monkeypatch.chdir(task)
    flags = f"--max-new-tokens 4 --prompts-per-step 2 --steps 1 --device cpu --output {tmp_path}/run"
    cli.main(f"{command} {flags}".split())
    said = capsys.readouterr().out
    assert f"begun: {json.dumps(BEGUN)}" in said
    row = read_lines(tmp_path / "run/trajectories/train_000001.jsonl")[0]
    assert row["prompt"].endswith(f"<|im_start|>assistant\n{BEGUN}")
    assert row["length"] <= 4
    assert row["reward"] == (0 if "distill" in command else 1)


def test_eval_and_data_read_it(task, capsys, monkeypatch):
    monkeypatch.chdir(task)
    evaluated = "eval model --eval-data begun.jsonl --reward reward.py:score --max-new-tokens 4 --device cpu"
    cli.main(evaluated.split())
    assert re.search(r"greedy +1\.0000", capsys.readouterr().out), "the reward sees the beginning"
    cli.main(["data", "begun.jsonl", "--model", "model", "--script", "grpo", "--row", "2"])
    assert f"<|im_start|>assistant\n{BEGUN}" in capsys.readouterr().out
