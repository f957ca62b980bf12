from __future__ import annotations

import re
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.rewards.text import (
    contains,
    exact_match,
    f1,
    gold_answer,
    language_share,
    last_boxed,
    last_code_block,
    last_number,
    last_tag,
    repeated_share,
    repetition,
    repetition_of_tokens,
    squad_normalize,
)

# Decided by SQuAD's evaluation script: https://rajpurkar.github.io/SQuAD-explorer, evaluate-v2.0.py
SQUAD = [
    ("The Denver Broncos", "denver broncos!", 1, 1.0),
    ("Denver Broncos, of course", "Denver Broncos", 0, 2 * 2 / 4 / (1 + 2 / 4)),
    ("in 1990", "1990s", 0, 0.0),
    ("a b b c", "b b", 0, 0.8),
    ("b b", "b c", 0, 0.5),
    ("", "", 1, 1.0),
    ("the", "", 1, 1.0),
    ("", "x", 0, 0.0),
    ("U.S.A.", "USA", 1, 1.0),
]


@pytest.mark.parametrize(("answer", "reference", "exact", "overlap"), SQUAD)
def test_squad(answer, reference, exact, overlap):
    row = {"answer": reference} if reference else {"answer": [reference]}
    assert exact_match(answer, row) == exact
    assert f1(answer, row) == pytest.approx(overlap)


def test_the_two_forms_of_an_accented_letter_are_equal():
    for one, other in (("Z\u00fcrich", "Zu\u0308rich"), ("U\u0308BER", "\u00fcber"), ("3 \u00e9", "3 e\u0301")):
        for answer, reference in ((one, other), (other, one)):
            assert exact_match(answer, {"answer": reference}) == f1(answer, {"answer": reference}) == 1.0
            assert contains(f"in {answer}.", {"answer": reference}) == 1.0
            assert exact_match("Zurich", {"answer": reference}) == 0.0


def test_the_best_of_several_references_counts():
    row = {"answers": ["Paris, France", "Paris"]}
    assert exact_match("paris", row, column="answers") == 1.0
    assert f1("it is paris france", row, column="answers") == pytest.approx(2 * 2 / 6)
    assert contains("it is Paris in France", row, column="answers") == 1.0
    assert contains("parisian", row, column="answers") == 0.0
    for row in ({}, {"answer": []}, {"answer": True}, {"answer": [3]}, {"answer": {"a": 1}}):
        with pytest.raises(ValueError, match="must be a text or a list of texts"):
            exact_match("a", row)
    with pytest.raises(
        ValueError, match=r"got an object with the keys value, aliases: write a list of its texts there"
    ):
        exact_match("Paris", {"answer": {"value": "Paris", "aliases": ["Paris"]}})


@pytest.mark.parametrize("answer", [4, 4.0, "4"])
def test_a_number_is_its_text(answer):
    assert exact_match("4", {"answer": answer}) == 1.0
    assert exact_match("4.5", {"answer": 4.5}) == 1.0


# Decided by hand: SQuAD's script takes a sign, point or slash away, and an article.
MEANT = [
    ("A", "A", 1), ("A", " (a). ", 1), ("A", "", 0), ("A", "B", 0), ("the", "The", 1),
    ("+", "+", 1), ("+", "-", 0), ("+", "", 0),
    ("\u22123", "-3", 1), ("\u22123", "3", 0), ("\uff16\uff11", "61", 1), ("61", "\uff16\uff11", 1),
    ("-3", "-3", 1), ("-3", "3", 0), ("3", "-3", 0), ("-3", "\u22123.", 1), ("2.5", "2.5.", 1), ("2.5", "25", 0),
    ("25", "2.5", 0), (".5", "5", 0), ("1/2", "1/2", 1), ("1/2", "12", 0), ("12", "1/2", 0), ("1,000", "1000", 1),
    ("$5", "5", 1), ("-$5", "$5", 0), ("50", "50%", 1), ("1e-5", "1e5", 0), ("1-0", "10", 1),
    ("a 2.5 mile", "25 mile", 1),
    (0.00001, "0.00001", 1), (1e16, "10000000000000000", 1), (2.5, "25", 0),
]  # fmt: skip


@pytest.mark.parametrize(("reference", "answer", "right"), MEANT)
def test_a_reference_keeps_its_meaning(reference, answer, right):
    assert exact_match(answer, {"answer": reference}) == f1(answer, {"answer": reference}) == right
    assert contains(f"so it is {answer}", {"answer": reference}) == right


def test_the_gold_answer_of_each_librarys_rows():
    rows = [
        {"question": "q", "answer": "So 70 + 2 = 72.\n#### 72"},  # openai/gsm8k
        {"ground_truth": 0, "label": 5},
        {"problem": "q", "solution": "$5$"},  # AI-MO/NuminaMath
        {"label": "5", "reward_model": {"ground_truth": "6"}},
        {"label": 1, "expected_answer": "4"},  # nvidia/OpenMathReasoning, beside a level
        {"label": 0, "correct_answer": "mesophilic organisms"},  # allenai/sciq
        {"gt_answer": ["5", "6"]},  # ColossalAI
        {"answer": None, "reward_model": {"style": "rule", "ground_truth": "72"}},  # verl
        {"answer": None, "reward_model": "served"},
        {},
    ]
    assert [gold_answer(row) for row in rows] == [
        "So 70 + 2 = 72.\n#### 72", 0, "$5$", "5", "4", "mesophilic organisms", ["5", "6"], "72", None, None,
    ]  # fmt: skip


@given(st.lists(st.sampled_from("xyz"), max_size=8), st.lists(st.sampled_from("xyz"), min_size=1, max_size=8))
def test_f1_by_matching_words_one_by_one(words, wanted):
    left, common = list(wanted), 0
    for word in words:
        if word in left:
            left.remove(word)
            common += 1
    expected = 0.0
    if common:
        precision, recall = common / len(words), common / len(wanted)
        expected = 2 * precision * recall / (precision + recall)
    assert f1(" ".join(words), {"answer": " ".join(wanted)}) == pytest.approx(expected)


def test_normalisation_in_squads_order():
    assert squad_normalize("A-an the\tTHE x.") == "aan x"
    assert squad_normalize("an.") == ""


@given(st.lists(st.integers(0, 3), max_size=12), st.integers(1, 4))
def test_repetition_by_looking_back(items, n):
    grams = [tuple(items[i : i + n]) for i in range(len(items) - n + 1)]
    seen_before = sum(gram in grams[:i] for i, gram in enumerate(grams))
    assert repeated_share(items, n=n) == pytest.approx(seen_before / len(grams) if grams else 0.0)
    assert repetition(" ".join(map(str, items)), {}, n=n, max_penalty=-2.0) == pytest.approx(
        -2.0 * seen_before / len(grams) if grams else 0.0
    )


def test_repetition_at_its_ends():
    assert repetition("one two three four", {}) == 0.0
    assert repetition("Go GO go " * 4, {}, n=3) == pytest.approx(-(1 - 1 / 10))
    assert repetition_of_tokens("", {}, [5, 6, 5, 6, 5], n=2, max_penalty=-3.0) == pytest.approx(-3.0 * 2 / 4)
    for call in (
        lambda: repetition("a", {}, max_penalty=1.0),
        lambda: repetition_of_tokens("", {}, [], max_penalty=1.0),
    ):
        with pytest.raises(ValueError, match="max_penalty must not be positive"):
            call()
    with pytest.raises(ValueError, match="n must be at least 1"):
        repeated_share([1], n=0)


def test_the_share_of_a_script():
    assert language_share("Hello, 123!", {}) == 1.0
    assert language_share("да no", {}) == 0.5
    assert language_share("да no", {}, scripts=("CYRILLIC", "LATIN")) == 1.0
    assert language_share("你好 ab", {}, scripts=["CJK"]) == 0.5
    assert language_share("42", {}) == 1.0
    assert language_share("да no", {}, scripts="Cyrillic") == language_share("да no", {}, scripts=["latin"]) == 0.5
    for name, near in (("English", "e.g. LATIN"), ("Cyrilic", "did you mean CYRILLIC"), ("L", "begins with 'L'")):
        with pytest.raises(ValueError, match=near):
            language_share("no", {}, scripts=[name])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("\\boxed{5}", "5"),
        ("\\boxed{1} \\boxed{ \\frac{1}{2} } end", "\\frac{1}{2}"),
        ("\\boxed {7}", "7"),
        ("\\fbox{7}", "7"),
        ("\\fboxed{7}", "7"),
        ("\\boxed 5 and", "5"),
        ("$\\boxed\\pi$", "\\pi"),
        ("\\boxed{1} then \\boxed{2", "1"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{\\left\\{ x \\right.}", "\\left\\{ x \\right."),
        ("\\boxed{a}}", "a"),
        ("\\boxed{}", ""),
        ("\\boxed", None),
        ("boxed{3}", None),
        ("", None),
    ],
)
def test_the_last_box(text, found):
    assert last_boxed(text) == found


@given(st.recursive(st.sampled_from(["x", "1", ""]), lambda s: st.tuples(s, s).map(lambda p: f"{p[0]}{{{p[1]}}}")))
def test_any_balanced_content_comes_back(content):
    assert last_boxed(f"so {{ \\boxed{{{content}}} }} done") == content


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<answer>1</answer>", "1"),
        ("<answer>1</answer><answer>\n2 </answer>", "2"),
        ("<answer>1<answer>2</answer>", "2"),
        ("<answer>1</answer> <answer>2", "1"),
        ("<Answer>1</Answer>", None),
    ],
)
def test_the_last_tag(text, found):
    assert last_tag(text) == found


def test_the_last_number():
    assert last_number("x2 is -1,234.5. So 7") == "7"
    assert last_number("it costs $1,234.50.") == "1234.50"
    assert last_number("-3") == "-3"
    assert last_number("version a1") is None


def test_code_blocks():
    assert last_code_block("```python\na = 1\n```\ntext\n```py\nb = 2\n```") == "b = 2\n"
    assert last_code_block("```python\na\n```\n```text\nout\n```") == "a\n"
    assert last_code_block("````python\n```\nx\n```\n````") == "```\nx\n```\n"
    assert last_code_block("~~~python\ny\n~~~") == "y\n"
    assert last_code_block("```python\nunclosed") is None
    assert last_code_block("```\nplain\n```") is None
    assert last_code_block("```\nplain\n```", languages=("",)) == "plain\n"
    assert last_code_block("1.\n   ```python\n   z\n   ```") == "   z\n"


def test_counts_agree_with_a_regular_expression():
    text = "a b c a b c a b"
    grams = Counter(re.findall(r"(?=(\w \w \w))", text))
    assert repeated_share(text.split(), n=3) == pytest.approx(1 - len(grams) / sum(grams.values()))


REPEATED = [
    "\\boxed{",
    "so \\boxed{1 + ",
    "{{{\\boxed{",
    "\\boxed 1",
    "```python\n",
    "```python\nx=1\n",
    "<answer>",
    "1,1.1 ",
]


@pytest.mark.parametrize("piece", REPEATED)
@pytest.mark.parametrize("find", [last_boxed, last_code_block, last_tag, last_number])
def test_extraction_takes_linear_time(find, piece):
    began = time.process_time()
    find(piece * 10_000)
    assert time.process_time() - began < 2.0


def test_an_unclosed_or_invalid_fence_hides_no_block():
    block = "```python\na\n```"
    assert last_code_block(f"~~~~\n{block}") == "a\n"
    assert last_code_block(f"````\n{block}") == "a\n"
    assert last_code_block(f"```x = 1``` is it:\n{block}") == "a\n"
    assert last_code_block(block.replace("\n", "\r\n")) == "a\r\n"
