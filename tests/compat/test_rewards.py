from __future__ import annotations

import math
from functools import partial

import datasets
import pytest
import torch

from rlkit.compat import rewards
from rlkit.compat.rewards import with_messages
from rlkit.data.load import load_rows
from rlkit.data.tiny import tiny_tokenizer
from rlkit.rewards import RewardError, Sample, code, run_reward
from rlkit.rewards import math as math_rewards
from rlkit.rewards import text as text_rewards
from rlkit.rewards.call import check_signature
from rlkit.rewards.combine import weighted
from rlkit.rewards.rows import check_rows
from rlkit.types import Trajectory

TOKENIZER = tiny_tokenizer()
END = 258

ADAPTERS = dict(rewards._ADAPTERS)


def trajectory(ids, mask=None, **fields):
    mask = [True] * len(ids) if mask is None else mask
    return Trajectory([1, 2], ids, mask, [0.0] * len(ids), [0] * len(ids), **fields)


async def test_a_function_of_messages_and_answer():
    def reward_fn(messages, answer):
        return len(messages) + (messages[-1] == {"role": "assistant", "content": answer}) / 2

    row = {"prompt": "q", "answer": "a"}
    talk = [{"role": "user", "content": "q"}] * 4 + [{"role": "assistant", "content": "b"}]
    items = [Sample("a", row, 0), Sample("b", row, 1)]
    assert [r.reward for r in await run_reward(with_messages(reward_fn), items, timeout_s=5)] == [2.5, 2.0]
    items = [Sample("b", row, 0, {"messages": talk})]
    assert [r.reward for r in await run_reward(with_messages(reward_fn), items, timeout_s=5)] == [5.0]


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        ("completions", "trl"),
        ("completions, **kwargs", "trl"),
        ("prompts, completions, completion_ids, **kwargs", "trl"),
        ("completions, answer", "trl"),
        ("completion_ids, **kwargs", "trl"),
        ("text, item, completion_ids", None),
        ("data_source, solution_str, ground_truth, extra_info=None", "verl"),
        ("solution_str, ground_truth", "verl"),
        ("queries, prompts, labels", "openrlhf"),
        ("args, sample, **kwargs", "slime"),
        ("args, samples", "slime"),
        ("data_sources, solution_strs, ground_truths, extra_infos", "verl"),
        ("state, action, extra_info", "rl2"),
        ("messages, answer", "with_messages"),
        ("messages, ground_truth, **kwargs", "with_messages"),
        ("completion, row", None),
        ("completions, rows", None),
        ("completion, row, messages, answer", None),
        ("text, item", None),
    ],
)
def test_functions_of_other_libraries_are_recognised_by_their_parameters(monkeypatch, parameters, name):
    function = eval(f"lambda {parameters}: None")
    for adapter in {"trl", *(known.__name__ for known in ADAPTERS.values())}:
        monkeypatch.setattr(rewards, adapter, lambda f, adapter=adapter: (adapter, f))
    monkeypatch.setattr(rewards, "_ADAPTERS", {k: getattr(rewards, f.__name__, f) for k, f in ADAPTERS.items()})
    assert rewards.adapted(function) == (function if name is None else (name, function))


def test_trl_gets_the_keywords_that_it_takes():
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2", "level": 3}]
    seen = {}

    def everything(prompts, completions, completion_ids, **columns):
        assert all(callable(columns.pop(name)) for name in ("log_extra", "log_metric"))
        seen.update(columns, prompts=prompts, completions=completions, completion_ids=completion_ids)
        return [0.0, 1.0]

    assert rewards.trl(everything)(["x", "y"], rows, [[1], [2]]) == [0.0, 1.0]
    assert seen == {
        "answer": ["1", "2"], "level": [None, 3], "prompts": ["a", "b"], "completions": ["x", "y"],
        "completion_ids": [[1], [2]],
    }  # fmt: skip
    assert rewards.trl(lambda completions, answer: [*zip(completions, answer)])(["x", "y"], rows) == [
        ("x", "1"), ("y", "2"),
    ]  # fmt: skip


async def test_an_async_reward_of_trl_stays_async():
    async def slow(completions, **columns):
        return [float(len(c)) for c in completions]

    samples = [Sample(text, {"prompt": "q"}, i) for i, text in enumerate(("a", "bcd"))]
    found = await run_reward(rewards.adapted(slow), samples, timeout_s=5)
    assert [r.reward for r in found] == [1.0, 3.0]


def test_verl_may_take_fewer_arguments():
    row = {"reward_model": {"ground_truth": "4"}}
    assert rewards.verl(lambda solution_str, ground_truth: float(solution_str == ground_truth))("4", row) == 1.0


async def test_what_a_trl_function_logs_is_in_the_notes_and_the_metrics():
    def reward(completions, log_extra, log_metric, **columns):
        for text in completions:
            log_metric("size", len(text))
        log_extra("upper", [text.upper() for text in completions])
        return [None if text == "b" else 2.0 for text in completions]

    samples = [Sample(text, {"prompt": "q"}, 0) for text in ("a", "bcd")]
    found = await run_reward(rewards.trl(reward), samples, timeout_s=60)
    assert [(r.reward, r.metrics, r.notes) for r in found] == [
        (2.0, {"size": 2.0}, {"upper": "A"}), (2.0, {"size": 2.0}, {"upper": "BCD"}),
    ]  # fmt: skip
    judged = weighted({"f": rewards.trl(reward), "g": lambda completion, row: 1.0}, weights={"f": 1.0, "g": 1.0})
    first, second = await run_reward(judged, [*samples[:1], Sample("b", {"prompt": "q"}, 0)], timeout_s=60)
    assert (first.reward, second.reward) == (3.0, 1.0)
    assert second.metrics == {"f/size": 1.0, "g": 1.0}
    assert second.notes == {"f/upper": "B"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("log_extra('x', [1])", r"log_extra\('x'\) got 1 values for 2 completions"),
        ("log_metric('score', 1.0)", r"log_extra and log_metric cannot log \['score'\]: choose another name"),
    ],
)
async def test_a_log_that_cannot_be_is_an_error_of_the_function(call, message):
    function = eval(f"lambda completions, log_extra, log_metric: [{call}, 1.0][1:] * 2")
    samples = [Sample(text, {"prompt": "q"}, 0) for text in "ab"]
    with pytest.raises(RewardError, match=rf"<lambda> failed on a batch: ValueError: {message}"):
        await run_reward(rewards.trl(function), samples, timeout_s=60)


def test_what_only_a_trainer_has_is_refused_by_name():
    for name in ("trainer_state", "environments"):
        with pytest.raises(TypeError, match=rf"requires \['{name}'\], which only its own library has"):
            rewards.adapted(eval(f"lambda completions, {name}, **columns: None"))
        kept = rewards.trl(eval(f"lambda completions, {name}=None, **columns: [{name} is None]"))
        assert kept(["x"], [{"prompt": "q"}]) == [True]


async def test_an_error_names_the_users_function():
    def reward(completions, **columns):
        return [1 / 0]

    def compute_score(solution_str, ground_truth, scale):
        return 1 / 0

    for function in (rewards.trl(reward), rewards.verl(partial(compute_score, scale=1))):
        sample = Sample("a", {"prompt": "q", "answer": "1"}, 0)
        with pytest.raises(RewardError, match=r"function test_rewards\.py:test_an\w+\.(reward|compute_score) failed"):
            await run_reward(function, [sample], timeout_s=60)


async def custom_rm(args, sample):
    return float(sample.response == sample.label)


GOLD = ["answer", "ground_truth", "solution", "label", "gt_answer"]
ASKING = {
    "verl": rewards.verl(lambda solution_str, ground_truth: float(solution_str == ground_truth)),
    "openrlhf": rewards.openrlhf(lambda queries, prompts, labels: [float(queries[0] == "q" + labels[0])]),
    "messages": with_messages(lambda messages, answer: float(messages[-1]["content"] == answer)),
    "slime": rewards.slime(custom_rm),
}


@pytest.mark.parametrize("name", ASKING)
async def test_the_gold_answer_is_found_under_every_column(name):
    rows = [{"prompt": "q", column: "4"} for column in GOLD]
    rows.append({"prompt": "q", "label": None, "reward_model": {"ground_truth": "4"}})
    check_rows(ASKING[name], rows)
    found = await run_reward(ASKING[name], [Sample("4", row, 0) for row in rows], timeout_s=60)
    assert [r.reward for r in found] == [1.0] * len(rows)
    if name == "slime":  # `Sample.label` is optional there
        check_rows(ASKING[name], [{"prompt": "q"}])
        return
    with pytest.raises(ValueError, match=r"row 2: .*needs the column 'answer' or .*columns found: \['prompt'\]"):
        check_rows(ASKING[name], [rows[0], {"prompt": "q"}])
    with pytest.raises(RewardError, match=r"ValueError: the row has no gold answer .*columns found: \['prompt'\]"):
        await run_reward(ASKING[name], [Sample("4", {"prompt": "q"}, 0)], timeout_s=60)


def test_the_columns_that_a_trl_function_names_must_be_there():
    function = rewards.adapted(lambda prompts, completions, solution, level=3, **columns: None)
    check_rows(function, [{"prompt": "q", "solution": None}])
    with pytest.raises(ValueError, match=r"row 2: .*needs the column 'solution'; columns found: \['level', 'prompt'\]"):
        check_rows(function, [{"prompt": "q", "solution": 1}, {"prompt": "q", "level": 1}])
    check_rows(lambda completion, row: 0.0, [{}])


def test_verls_own_column_comes_first():
    row = {"answer": "long #### 4", "reward_model": {"ground_truth": "4"}}
    assert ASKING["verl"]("4", row) == 1.0
    assert ASKING["openrlhf"]("4", {**row, "prompt": "q", "label": "4"}) == {"reward": 1.0}


@pytest.mark.parametrize("name", ["verl", "openrlhf", "messages"])
@pytest.mark.parametrize("null", [{"label": None}, {"reward_model": {"style": "rule"}}, {"reward_model": None}])
def test_a_null_gold_answer_is_missing(name, null, tmp_path):
    rows = [{"prompt": "q", **dict.fromkeys(null, "4")}, {"prompt": "q", **null}]
    if "reward_model" in null:
        rows[0]["reward_model"] = {"style": "rule", "ground_truth": "4"}
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "data.parquet")
    empty = "label" if "label" in null else "reward_model.ground_truth"
    with pytest.raises(ValueError, match=rf"data\.parquet, row 2: .*with a value \({empty} is null\); columns found"):
        check_rows(ASKING[name], load_rows(tmp_path / "data.parquet"))


@pytest.mark.parametrize(
    ("function", "row", "needed"),
    [
        (math_rewards.boxed, {"answer": None}, "'answer' or 'ground_truth'.*answer is null"),
        (partial(math_rewards.answer_tag, column="gold"), {"answer": "4"}, "'gold'; columns"),
        (partial(math_rewards.anywhere, timeout_s=3.0), {"reward_model": {"ground_truth": None}}, "'answer' or"),
        (
            code.stdin_tests,
            {"test_cases": None},
            "'test_cases' or 'ground_truth' or 'reward_model'.*cases is null",
        ),
        (partial(code.assert_tests, column="asserts"), {"tests": "assert f(1) == 1"}, "'asserts' or 'ground_truth'"),
        (text_rewards.exact_match, {"solution": "4"}, "'answer'; columns"),
        (partial(text_rewards.f1, column="a"), {"answer": "4"}, "'a'; columns"),
        (text_rewards.contains, {"answer": None}, "'answer' with a value"),
        (text_rewards.contains, {"answer": " "}, r"'answer' with a value \(answer is empty\)"),
        (text_rewards.exact_match, {"answer": []}, r"'answer' with a value \(answer is empty\)"),
        (
            math_rewards.anywhere,
            {"answer": "", "solution": None},
            r".* \(answer and solution are empty\); .*; drop such",
        ),
    ],
)
def test_rewards_of_this_package_need_their_columns_before_training(function, row, needed):
    with pytest.raises(ValueError, match=f"row 1: .* needs the column {needed}"):
        check_rows(rewards.adapted(function), [row])
    good = [{"answer": "4", "gold": "4", "a": "4"}, {"answer": "4", "gold": "4", "a": "4"}]
    code_rows = [{"reward_model": {"ground_truth": "4"}}]
    check_rows(function, code_rows if function in (code.stdin_tests,) or "asserts" in needed else good)


async def results(function, *texts, row=None):
    samples = [Sample(text, {"prompt": "q", "answer": "4"} if row is None else row, 3) for text in texts]
    found = await run_reward(rewards.adapted(function), samples, timeout_s=60)
    return [(r.reward, r.score, r.metrics, r.notes) for r in found]


VERDICT = {"score": True, "acc": 0.5, "pred": None, "format": "box", "steps": [1, 2], "parts": {"a": 1}, "at": (0, 1)}
NOTES = {"format": "box", "steps": "[1, 2]", "parts": "{'a': 1}", "at": "(0, 1)"}


async def test_a_dict_of_verl_or_slime_may_hold_anything():
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        assert (data_source, extra_info) == (None, {})
        return VERDICT | {"long": ["x" * 9] * 900} if solution_str == "long" else VERDICT

    async def rm(args, sample):
        assert sample.metadata == {}
        return {**VERDICT, "reward": 2} if sample.response == "own" else VERDICT

    expected = (1.0, 1.0, {"acc": 0.5}, NOTES)
    assert await results(compute_score, "4") == [expected]
    assert len((await results(compute_score, "long"))[0][3]["long"]) == 500
    assert await results(rm, "4", "own") == [expected, (2.0, *expected[1:])]
    for function in (lambda solution_str, ground_truth: {"acc": 1}, lambda args, sample: {"acc": 1}):
        with pytest.raises(RewardError, match=r"returned a dict without 'reward' \(keys: \['acc'\]\)(.|\n)*'score'\)"):
            await results(function, "4")
    for score in (None, [1.0], math.nan):
        with pytest.raises(RewardError, match=r"returned .* under '(reward|score)'"):
            await results(lambda solution_str, ground_truth, score=score: {"score": score}, "4")


async def test_verls_async_and_batched_forms():
    async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return {"score": float(solution_str == ground_truth and (data_source, extra_info) == (None, {}))}

    def compute_score_batched(data_sources, solution_strs, ground_truths, extra_infos, level):
        assert (data_sources, ground_truths, extra_infos, level) == (["d"] * 2, ["4"] * 2, [{"i": 1}] * 2, [7] * 2)
        return [{"score": len(solution_strs), "pred": text} for text in solution_strs]

    async def batched_async(solution_strs, ground_truths, **kwargs):
        return [float(text == gold) for text, gold in zip(solution_strs, ground_truths, strict=True)]

    row = {"data_source": "d", "reward_model": {"ground_truth": "4"}, "extra_info": {"i": 1}, "level": 7}
    assert [r[:2] for r in await results(compute_score, "4", "5")] == [(1.0, 1.0), (0.0, 0.0)]
    assert await results(compute_score_batched, "4", "5", row=row) == [
        (2.0, 2.0, {}, {"pred": "4"}), (2.0, 2.0, {}, {"pred": "5"}),
    ]  # fmt: skip
    assert [r[0] for r in await results(batched_async, "4", "5")] == [1.0, 0.0]
    with pytest.raises(RewardError, match="returned 1 results for 2 completions"):
        await results(lambda solution_strs, ground_truths: [1.0], "4", "5")
    with pytest.raises(ValueError, match=r"row 1: .*needs the column 'level'; columns found: \['answer'\]"):
        check_rows(rewards.adapted(compute_score_batched), [{"answer": "4"}])
    with pytest.raises(RewardError, match=r"the row has no column 'level'; columns found: \['answer', 'prompt'\]"):
        await results(compute_score_batched, "4")


async def test_slimes_group_form_and_what_args_lacks():
    async def batch_rm(args, samples, **kwargs):
        assert getattr(args, "rm_type", "none") == "none"
        return [{"score": len(samples), "right": s.response == s.label} for s in samples]

    async def needs_url(args, sample):
        return args.rm_url

    async def needs_tokens(args, sample):
        return len(sample.tokens)

    assert await results(batch_rm, "4", "5") == [(2.0, 2.0, {"right": 1.0}, {}), (2.0, 2.0, {"right": 0.0}, {})]
    for function, name, fix in (
        (needs_url, r"args\.rm_url", "set the value in the function"),
        (needs_tokens, r"sample\.tokens", "a sample has prompt, response, label and metadata; for its tokens write"),
    ):
        with pytest.raises(RewardError, match=rf"AttributeError: slime's {name} is not here(.*\n)*.*fix: {fix}"):
            await results(function, "4")


async def test_openrlhfs_logs_and_wrong_results():
    def reward_func(queries, prompts, labels):
        return {"rewards": torch.tensor([2.0]), "extra_logs": {"len": torch.tensor([3.0]), "at": [5], "text": ["x"]}}

    async def judged(queries, prompts, labels):
        return [float(queries == ["q4"] and labels == ["4"])]

    assert await results(reward_func, "4") == [(2.0, 2.0, {"len": 3.0, "at": 5.0}, {"text": "x"})]
    assert [r[0] for r in await results(judged, "4", "5")] == [1.0, 0.0]
    wrong = {
        "returned 0 values for 1 query": ([], {"rewards": []}, {"rewards": [1.0], "scores": []}),
        "returned 2 values for 1 query": ([1.0, 2.0], torch.ones(2)),
        r"returned a dict without 'rewards' \(keys: \['reward'\]\)": ({"reward": 1.0},),
        "returned NoneType None": (None,),
    }
    for cause, values in wrong.items():
        for value in values:
            with pytest.raises(RewardError, match=rf"lambda> failed on row 4: {cause}"):
                await results(lambda queries, prompts, labels, value=value: value, "4")


def test_a_trl_function_that_reads_the_trainers_state_is_logged_once(caplog):
    def with_default(completions, trainer_state=None, **kwargs):
        return [0.0 if trainer_state is None else 1.0 for _ in completions]

    def by_keyword(completions, **kwargs):
        return [float(kwargs["trainer_state"].global_step) for _ in completions]

    for function in (with_default, by_keyword):
        caplog.clear()
        rewards.adapted(rewards.adapted(function))
        (line,) = caplog.messages
        assert f"{function.__name__} reads trainer_state, which rlkit does not give" in line
    caplog.clear()
    rewards.adapted(lambda completions, **kwargs: [0.0])
    assert not caplog.messages


async def test_errors_of_what_trl_gives_have_a_fix_of_their_own():
    def state(completions, **kwargs):
        return [kwargs["trainer_state"] for _ in completions]

    def chat(completions, **kwargs):
        return [float(len(completion[0]["content"])) for completion in completions]

    def plain(completions, **kwargs):
        return [float(len(completion.split())) for completion in completions]

    messages = {"prompt": [{"role": "user", "content": "q"}]}
    assert (await results(chat, "ab", row=messages))[0][0] == 2.0
    with pytest.raises(RewardError, match=r"KeyError(.|\n)*fix: rlkit gives no trainer_state"):
        await results(state, "4")
    for function, row in ((chat, {"prompt": "q"}), (plain, messages)):
        with pytest.raises(RewardError, match=r"fix: as in TRL, a completion is a string where the row's prompt is"):
            await results(function, "4", row=row)
    with pytest.raises(RewardError, match=r"returned NoneType None\n.*\n.*a second one that does \(--reward takes sev"):
        await results(lambda completions: [None], "4")


@pytest.mark.parametrize("parameters", ["args, batch", "response, answer", "text, solution", "x, samples"])
def test_two_parameters_of_another_library_are_refused(parameters):
    with pytest.raises(TypeError, match="would get a completion and its row, and names them"):
        check_signature(rewards.adapted(eval(f"lambda {parameters}: 0.0")))


@pytest.mark.parametrize("parameters", ["a, b", "text, item", "response, row", "solution_str, item"])
def test_other_names_are_a_completion_and_a_row(parameters):
    assert check_signature(rewards.adapted(eval(f"lambda {parameters}: 0.0")))[1] == []


def test_a_column_with_a_default_that_no_row_has_is_named_once(caplog):
    def matches(completions, solution=None, *, worth=1.0, answer=None, **kwargs):
        return [0.0 if solution is None else worth for _ in completions]

    check_rows(rewards.adapted(matches), [{"prompt": "1 + 1 =", "answer": "2"}])
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("matches reads 'solution', of which the data has no column; columns found: answer, prompt")


@pytest.mark.parametrize(
    ("gold", "expected"),
    [
        ("We add.\n#### 1,072", "1072"),
        (r"So it is \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("Paris is 2", "Paris is 2"),
        (7, 7),
    ],
)
async def test_a_function_of_verl_gets_the_final_answer_of_a_solution(gold, expected):
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return float(ground_truth == expected)

    for row in ({"answer": gold}, {"reward_model": {"ground_truth": expected}, "answer": "other"}):
        (reward,) = await run_reward(rewards.adapted(compute_score), [Sample("a", row, 0)], timeout_s=5)
        assert reward.reward == 1.0
