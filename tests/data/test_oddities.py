"""Rows that are trained as they are and seldom meant are named in one line each, and ordinary ones are not."""

from __future__ import annotations

import json
import logging

import pytest
from families import FAMILIES, tokenizer_of

from rlkit.compat.rows import read
from rlkit.data.examples import labelled_examples, preference_pairs, sft_examples
from rlkit.data.load import Rows, load_rows
from rlkit.data.prompts import rl_prompts
from rlkit.data.tiny import tiny_tokenizer
from rlkit.data.turns import LABELLED, PAIR, PROMPT, SFT

TOKENIZER = tiny_tokenizer()
ROADS = {
    "sft": (sft_examples, SFT), "pairs": (preference_pairs, (PAIR,)), "labelled": (labelled_examples, (LABELLED,)),
    "pairs of kto": (labelled_examples, (PAIR,)), "prompts": (rl_prompts, (PROMPT,)),
}  # fmt: skip


@pytest.fixture
def said(caplog):
    """`said(*rows)`: the lines that are logged of rows, on the road that reads them."""

    def call(*rows, road="sft", tokenizer=TOKENIZER, **more):
        make, forms = ROADS[road]
        limit = "max_prompt_tokens" if road == "prompts" else "max_example_tokens"
        given = rows[0] if isinstance(rows[0], Rows) else [*rows]
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="rlkit.data"):
            plain = more.get("apply_chat_template", True)
            read_as = read(given, *forms, apply_chat_template=plain)
            found = make(read_as, tokenizer=tokenizer, **{limit: 999}, **more)[0]
        call.found = found
        return [*caplog.messages]

    return call


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def on_roads(text):
    """A row for each road that trains this answer."""
    yield "sft", {"prompt": "hi", "response": text}
    yield "sft", {"messages": [user("hi"), assistant("yo"), user("more"), assistant(text)]}
    yield "pairs", {"prompt": "hi", "chosen": text, "rejected": "b"}
    yield "pairs", {"prompt": "hi", "chosen": "b", "rejected": [assistant(text)]}
    yield "labelled", {"prompt": "hi", "completion": text, "label": True}


CLOSED = "that close reasoning that nothing opens"


@pytest.mark.parametrize("tag", ["</think>", "[/THINK]", "</reasoning>", "<|end_of_thought|>"])
def test_an_answer_that_closes_reasoning_which_nothing_opened_is_named(tag, said):
    for road, row in on_roads(f"r1{tag}Because"):
        (line,) = said(row, road=road)
        assert line.startswith("kept 1 of 1")
        assert CLOSED in line
    bare = {"prompt": f"Q: hi\nA: {tag}", "response": f"r{tag} 4"}
    assert CLOSED in said(bare, apply_chat_template=False)[0]


def test_one_line_of_reasoning_that_is_closed_is_named(said):
    for text in ("</think>\n\nyo", "It is 4. </think> Yes", "so 4</think> Yes", "so 4\n</think>\n\nYes"):
        assert CLOSED in said({"prompt": "Think inside <think> and </think>.", "response": text})[0]


def test_reasoning_that_something_opened_is_not(said, tmp_path):
    opened = "<think>r1</think>Because"
    words = ("r (</think>) x", "Use `</think>` to end.", "The </think> tag.", opened, "a", "<think></think>a")
    for text in words:
        for road, row in on_roads(text):
            assert said(row, road=road) == [], text
    plain = {"prompt": "Q: hi\nA: <think>hm", "response": "r</think> 4"}
    assert said(plain, apply_chat_template=False) == []
    tokenizer = tokenizer_of(FAMILIES["deepseek-r1"], tmp_path)
    assert not [x for x in said({"prompt": "hi", "response": "r1</think>a"}, tokenizer=tokenizer) if CLOSED in x]
    tokenizer = tokenizer_of(FAMILIES["qwen2.5"], tmp_path)
    assert [x for x in said({"prompt": "hi", "response": "r1</think>a"}, tokenizer=tokenizer) if CLOSED in x]


MISSING = "rows that have a text that stands for a missing value"


@pytest.mark.parametrize(
    "text", ["nan", "NULL", "null", "None", "<noinput>", " NaN\n", "n/a", "undefined", "[deleted]", "TODO"]
)
def test_a_missing_value_that_became_text_is_named_in_any_column_that_is_read(text, said):
    line = f"kept 1 of 2 {MISSING}: row 2 ({text.strip()!r})"
    alpaca = {"instruction": "Add.", "input": "2 2", "output": "4"}
    for name in alpaca:
        assert said(alpaca, {**alpaca, name: text}) == [line]
    system = {"system": "Be brief.", "prompt": "hi", "response": "yo"}
    for name in system:
        assert said(system, {**system, name: text}) == [line]
    pair = {"prompt": "hi", "chosen": "a", "rejected": "b"}
    for name in pair:
        assert said(pair, {**pair, name: text}, road="pairs") == [line]
    assert said({"prompt": "hi"}, {"prompt": text}, road="prompts") == [line]
    assert said({"text": "hi"}, {"text": text}) == [line]


def test_words_of_missing_values_elsewhere_are_not(said):
    tool = [user("hi"), assistant("go"), {"role": "tool", "content": "None"}, assistant("None of them is null.")]
    assert said({"messages": tool}) == []
    assert said({"prompt": "Say nan", "response": "NA", "id": "nan", "input_note": None})[:1] == []
    assert said({"prompt": "hi", "answer": "None"}, road="prompts") == []  # rewards read it
    assert said({"prompt": "What does print(None) print?", "response": "None"}) == []


ODD = "rows that hold characters that are seldom meant"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a\0b", "NUL"), ("a\ufffdb", "U+FFFD"), ("a\r\nb", r"\r\n"), ("\ufeffab", "U+FEFF at the start"),
        ("is $\frac{1}{2}$", "'\\x0crac' of LaTeX in JSON, where a backslash is written twice"),
        ("is $\boxed{7}$", "'\\x08oxed' of LaTeX in JSON, where a backslash is written twice"),
        ("$2 \times 3$", "'\\times' of LaTeX in JSON, where a backslash is written twice"),
        ("\u200bab", "U+200B at the start"), ("a<0x0A>b", "<0x0A>"), ("it\u0120is", "'\u0120'"),
        ("so.\u010aYes", "'\u010a'"), ("it\u2581is", "'\u2581'"),
        *((text.encode().decode(wrong), repr(part)) for text, wrong, part in (
            ("Don’t", "cp1252", "â€™"), ("Café", "latin-1", "Ã©"), ("über", "cp1252", "Ã¼"), ("5 °C", "latin-1", "Â°"),
            ("ok 😀", "cp1252", "ðŸ"), ("Привет", "latin-1", "Ð¸"), ("Don’t", "latin-1", "â\x80\x99"),
            ("Кто написал", "cp1251", "РљС‚Рѕ"), ("Don’t", "cp1251", "вЂ™"),
        )),
    ],
)  # fmt: skip
def test_broken_characters_are_named_with_their_rows(text, what, said):
    for road, row in on_roads(text):
        (line,) = [x for x in said({**row}, road=road) if ODD in x]
        assert line.endswith(f"row 1 ({what})")
    (line,) = said({"text": "good"}, {"text": text})
    assert line.startswith(f"kept 1 of 2 {ODD}")
    if what != r"\r\n":
        assert said({"prompt": text}, road="prompts")[0].endswith(f"row 1 ({what})")


def test_ordinary_characters_are_not_named(said):
    texts = (
        "Don’t – “naïve” café, ÜBER, œuvre", "SÃO PAULO, NÃO, MÃE, AMANHÃ »", "ÎLE, Âge, LÂCHE",
        "Ðað er gott. Ñandú, ESPAÑA",
        "Il-Ġimgħa l-Ġdida ta' ĊIPRU, Ċensu", "▁▂▃▅▇", "今日は", "Привет, ÐÑ", "👩\u200d👩 family", "می\u200cخواهم",
        "a\tb\nc", "5 € â la carte", "«СССР», РЖД» и ЦСКА», РІЧНІ РІКИ, СРЈ, Р° С°", "вЂ РЂ",
    )  # fmt: skip
    for text in texts:
        assert said({"prompt": text, "response": f"x {text}"}, {"prompt": "hi\r\nho", "response": "y"}) == [], text


def test_a_csv_file_saved_by_windows_has_its_line_ends_named(tmp_path, said):
    path = tmp_path / "a.csv"
    path.write_bytes(b'prompt,response\r\nhi,"one\r\ntwo"\r\nho,three\r\n')
    (line,) = said(*load_rows(path))
    assert line.endswith(r"row 1 (\r\n)")


END, START = "at the end of a prompt, where the chat template", "at the beginning of an answer, where the chat template"


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        ("User: What is 2+2?\nBot:", "Bot:"), ("Q: What is 2+3?\nA:", "A:"),
        ("Human: Tell me. Assistant:", "Assistant:"),
        ("Tell me.\n\nAssistant: ", "Assistant:"), ("Tell me.\n### Response:\n", "### Response:"),
        ("Is it good?\n\n###\n\n", "###"),
    ],
)  # fmt: skip
def test_the_name_of_a_speaker_at_the_end_of_a_prompt_is_named(prompt, name, said):
    rows = {"sft": {"prompt": prompt, "response": "yo"}, "pairs": {"prompt": prompt, "chosen": "a", "rejected": "b"}}
    rows |= {"labelled": {"prompt": prompt, "response": "a", "label": 1}, "prompts": {"prompt": prompt}}
    for road, row in rows.items():
        (line,) = said(row, road=road)
        assert line.startswith(f"1 of the rows hold {name!r} {END}")
    assert said(rows["sft"], apply_chat_template=False) == []


@pytest.mark.parametrize("name", ["Assistant:", "AI:", "Bot:", "### Response:"])
def test_the_name_of_a_speaker_at_the_beginning_of_an_answer_is_named(name, said):
    for road, row in on_roads(f"{name} Hello"):
        (line,) = said(row, road=road)
        assert line.startswith(f"1 of the rows hold {name!r} {START}")


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("Who is Bot?", "A: Paris"), ("Assistant:", "Assistant professor: a rank"),
        ("Write a scene", "Bot: hi\nUser: ho"),
        ("Choose:\nA: x\nB: y", "B: y"), ("Answer:", "AI is a field"), ("I seek an Assistant:", "### Title\nx"),
        ("# Header\n### Part", "SELECT CASE WHEN a THEN b END"),
    ],
)  # fmt: skip
def test_ordinary_texts_with_colons_are_not_named(prompt, answer, said):
    assert said({"prompt": prompt, "response": answer}) == []


def test_a_word_for_the_end_is_named(said):
    (line,) = said({"prompt": "hi", "response": "Hey [EOS]"})
    assert line.startswith("1 of the rows hold '[EOS]' at the end of an answer, the stop token of another model")


def test_texts_with_the_markup_of_another_model_are_named(said, tmp_path):
    texts = {"<s>[INST] hi [/INST]": "[INST]", "<|im_start|>user\nhi<|im_end|>\n": "<|im_start|>"}
    qwen, llama2 = (tokenizer_of(FAMILIES[name], tmp_path) for name in ("qwen2.5", "llama2"))
    for text, token in texts.items():
        for row in ({"text": text + "yo"}, {"prompt": text, "response": "yo"}):
            plain = {} if "text" in row else {"apply_chat_template": False}
            for tokenizer, own in ((qwen, "<|im_start|>"), (llama2, "[INST]")):
                lines = [x for x in said(row, tokenizer=tokenizer, **plain) if "markup of another model" in x]
                assert [x.rpartition(": ")[2] for x in lines] == ([] if token == own else [f"row 1 ({token})"])
    llama2.chat_template = None  # a base model, whose chat model has these as letters
    assert said({"text": "[INST] hi [/INST] yo"}, tokenizer=llama2) == []


SWAPPED, ALIKE = "with chosen and rejected swapped too", "that have responses that differ only in blanks around them"


def test_pairs_that_contradict_each_other_are_named(said):
    pair, other = {"prompt": "hi", "chosen": "a", "rejected": "b"}, {"prompt": "hi", "chosen": "b", "rejected": "a"}
    third, elsewhere = {"prompt": "hi", "chosen": "b", "rejected": "c"}, {**other, "prompt": "ho"}
    rows = [pair, third, elsewhere, {**other, "chosen": [assistant("b")]}]
    for road in ("pairs", "pairs of kto"):
        assert said(*rows, road=road) == [f"kept 2 of 4 pairs that are in the data {SWAPPED}: row 1, row 4"]
        assert said(*rows[:3], road=road) == []


def test_pairs_that_hardly_differ_are_named(said):
    pair = {"prompt": "hi", "chosen": "Caf\u00e9", "rejected": "Cafe\u0301"}
    rows = [pair, {**pair, "rejected": "cafe"}, {"prompt": "hi", "chosen": "yo", "rejected": [assistant("yo \n")]}]
    (line,) = said(*rows, road="pairs")
    assert ALIKE in line
    assert line.startswith("kept 2 of 3 pairs")
    assert line.endswith(": row 1, row 3")
    plain = [{"prompt": "x", "chosen": " yo", "rejected": "yo"}, {"prompt": "x", "chosen": "y o", "rejected": "yo"}]
    (line,) = said(*plain, road="pairs", apply_chat_template=False)
    assert line.endswith(": row 1")


def test_rows_that_repeat_each_other_are_named(said):
    row, others = {"prompt": "hi", "response": "yo"}, [{"prompt": f"q{i}", "response": "a"} for i in range(9)]
    assert said(*[row] * 5, others[0]) == ["the 6 rows are 2 different texts: each trains as often as it is there"]
    assert said(*[row] * 4) == ["the 4 rows are all the same text: each trains as often as it is there"]
    assert said(*[row] * 3, *others[:2]) == said(*[row] * 3) == []
    assert said(*[{"text": "x"}] * 4)[0].startswith("the 4 rows are all the same text")
    both = [{"prompt": "hi", "response": "yo", "label": label} for label in (1, 1, 0, 1, 0)]
    assert [x for x in said(*both, road="labelled") if "rows are" in x] == [
        "the 5 rows are 2 different texts: each trains as often as it is there"
    ]


def test_one_prompt_or_one_answer_for_all_rows_is_named(said):
    fix = "check which columns hold the texts"
    same_answer = [{"prompt": f"q{i}", "response": "yo"} for i in range(10)]
    same_prompt = [{"prompt": "hi", "response": f"a{i}"} for i in range(10)]
    assert said(*same_answer) == [f"all 10 rows have the same answer: {fix}"]
    assert said(*same_prompt) == [f"all 10 rows have the same prompt: {fix}"]
    assert said(*same_answer[:9], same_prompt[0]) == said(*same_answer[:9]) == []
    assert said(*[{**row, "prompt": ""} for row in same_prompt], apply_chat_template=False) == []
    pairs = [{"prompt": f"q{i}", "chosen": "yo", "rejected": f"a{i}"} for i in range(10)]
    assert said(*pairs, road="pairs") == [f"all 10 rows have the same chosen response: {fix}"]
    assert said(*[{**row, "chosen": f"b{i}", "rejected": "no"} for i, row in enumerate(pairs)], road="pairs") == []


@pytest.mark.parametrize("text", ["['What is love?']", '["What is love?"]', "['a', \"it's\"]"])
def test_a_prompt_that_is_the_text_of_a_list_is_refused(text, said):
    rows = {"sft": {"prompt": text, "response": "yo"}, "pairs": {"prompt": text, "chosen": "a", "rejected": "b"}}
    rows |= {"labelled": {"question": text, "response": "a", "label": 1}, "prompts": {"question": text, "answer": "x"}}
    for road, row in rows.items():
        name = next(iter(row))
        with pytest.raises(ValueError, match=f"row 1: column '{name}' is the text of a list of texts, got .*; write"):
            said(row, road=road)
    meant = {"messages": [user(text), assistant("yo")]}
    assert said(meant) == said({"prompt": "hi", "response": text}, {"prompt": "ho", "response": "yo"}) == []
    assert said(rows["sft"], apply_chat_template=False) == []


@pytest.mark.parametrize("text", ["[1, 2]", "['a'] + ['b']", "Sort ['a']", "['a', 1]", "[]", "['a'", '["a"]["b"]'])
def test_other_prompts_with_brackets_are_not(text, said):
    assert said({"prompt": text, "response": "yo"}) == []


FURTHER = "have further turns inside an answer"


@pytest.mark.parametrize(
    "names",
    [
        ("Human:", "Assistant:"), ("### Instruction:", "### Response:"), ("User:", "Assistant:"),
        ("Utilisateur :", "Assistant :"), ("Utilisateur\u00a0:", "Assistant\u00a0:"), ("Benutzer:", "Assistent:"),
        ("Usuario:", "Asistente:"), ("用户：", "助手："), ("Пользователь:", "Ассистент:"),
    ],
)  # fmt: skip
def test_a_further_turn_inside_an_answer_is_named(names, said):
    first, second = names
    for road, row in on_roads(f"Four.\n\n{first} And 3+3?\n\n{second} Six."):
        (line,) = said(row, road=road)
        assert line.startswith(f"kept 1 of 1 rows that {FURTHER}")
        assert line.endswith(f"row 1 ({first} ... {second})")
    for text in (f"Write\n{first} a\n{second} b", f"So\n\n{first} a", f"So\n\n{second} a\n\n{first} b"):
        assert not [x for x in said({"prompt": "hi", "response": text}) if FURTHER in x], text
    assert said({"text": f"Hi\n\n{first} a\n\n{second} b"}) == []
    assert said({"prompt": "Write a dialogue", "response": f"Hi\n\n{first} a\n\n{second} b"}) == []


ROLES = "rows that hold the roles of a chat template without its tokens"


def test_what_decoding_without_special_tokens_leaves_of_a_template_is_named(said, tmp_path):
    """Llama 3 writes no line break before a header, so that the role follows the text before it at once."""
    for family in ("qwen2.5", "llama3"):
        tokenizer = tokenizer_of(FAMILIES[family], tmp_path)
        told = [user("Hi there."), assistant("Yo.")]
        opened, whole = (
            tokenizer.decode(
                tokenizer.apply_chat_template(x, add_generation_prompt=len(x) < 2)["input_ids"],
                skip_special_tokens=True,
            )
            for x in (told[:1], told)
        )
        answer = whole.removeprefix(opened.rpartition("assistant")[0])
        note = "user ... assistant"
        rows = [("sft", {"text": whole}, note), ("prompts", {"prompt": opened}, note)]
        rows += [("sft", {"prompt": opened, "response": "yo"}, note)]
        rows += [("pairs", {"prompt": "hi", "chosen": answer, "rejected": "b"}, "assistant")]
        for road, row, groups in rows:
            lines = [x for x in said(row, road=road) if ROLES in x]
            assert [x.rpartition(": ")[2] for x in lines] == [f"row 1 ({groups})"], (family, row)


def test_roles_that_are_meant_are_not(said):
    for text in (
        "system\nuser\nassistant",
        "user\nid name",
        "Assistants",
        "Call my assistant",
        "user: hi\nassistant: yo",
    ):
        assert said({"prompt": text, "response": f"x {text}"}, {"prompt": "hi", "response": text}) == [], text


def test_further_turns_of_a_template_without_its_tokens_are_named(said):
    for road, row in on_roads("Four.\nuser\nAnd 3+3?\nassistant\nSix."):
        (line,) = said(row, road=road)
        assert f"rows that {FURTHER}" in line
        assert line.endswith("row 1 (user ... assistant)")
    assert said({"prompt": "hi", "response": "Roles:\nuser\nassistant\ntool"}) == []


RESULT = "rows that have the result of a tool inside an answer"


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ('<tool_call>{"name": "f"}</tool_call>\n<tool_response>20</tool_response>\nIt is 20.', "tool_response"),
        ("<search>who?</search>\n\n<information>Doc 1</information> Bo.", "information"),
        ("Thought: I look.\nAction: search[Bo]\nObservation: Bo is a cat.\nAnswer: a cat", "Observation"),
        ("Thought: I look.\nAction: search\nAction Input: Bo\n\nObservation: x", "Observation"),
    ],
)
def test_results_of_tools_inside_an_answer_are_named(text, note, said):
    for road, row in on_roads(text):
        (line,) = [x for x in said(row, road=road) if RESULT in x]
        assert line.endswith(f"row 1 ({note})")
    assert not [x for x in said({"prompt": text}, road="prompts") if RESULT in x]
    for fine in (
        "<tool_call>{}</tool_call>",
        "Thought: a\nAction: b\nObservation:",
        "Observation: it rains",
        "</code><b>x",
    ):
        assert not [x for x in said({"prompt": "hi", "response": fine}) if RESULT in x]


SAYS = "rows that begin a response with the word for its label"


def test_responses_that_begin_with_the_word_for_their_label_are_named(said):
    for good, bad in (
        ("Chosen: {}", "Rejected: {}"),
        ("[GOOD] {}", "[BAD] {}"),
        ("**Better response:** {}", "Worse: {}"),
    ):
        pairs = [
            {"prompt": f"q{i}", "chosen": good.format(i), "rejected": [assistant(bad.format(i))]} for i in range(4)
        ]
        (line,) = said(*pairs, road="pairs")
        assert f"kept 4 of 4 {SAYS}" in line
        both = [
            {"prompt": x["prompt"], "completion": x[name], "label": name == "chosen"}
            for x in pairs
            for name in ("chosen", "rejected")
        ]
        (line,) = said(*both, road="labelled")
        assert f"kept 8 of 8 {SAYS}" in line
        swapped = [{**x, "chosen": x["rejected"], "rejected": x["chosen"]} for x in pairs]
        for fine in (swapped, pairs[:2] + swapped[2:], [{**x, "rejected": f"No {i}"} for i, x in enumerate(pairs)]):
            assert said(*fine, road="pairs") == []
    assert said({"prompt": "x", "chosen": "Good morning!", "rejected": "Bad: no"}, road="pairs") == []


DUE = "rows that have a user's message where the result of a call is due"


def test_results_of_calls_that_are_messages_of_a_user_are_named(said):
    call = assistant("", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {}}}])
    made = [user("hi"), call, user("20"), assistant("It is 20.")]
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls }};{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    rows = {"sft": {"messages": made}, "prompts": {"prompt": [*made, user("And?")]}}
    rows["pairs"] = {**rows["prompts"], "chosen": "a", "rejected": "b"}
    for road, row in rows.items():
        assert [x for x in said(row, road=road, tokenizer=tokenizer) if DUE in x]
        for turn in ({"role": "tool", "content": "20"}, user("<tool_response>20</tool_response>")):
            fine = {
                key: [turn if m == user("20") else m for m in x] if isinstance(x, list) else x for key, x in row.items()
            }
            assert not [x for x in said(fine, road=road, tokenizer=tokenizer) if DUE in x]
    orders = {"messages": [user("on"), call, user("off"), call]}
    assert not [x for x in said(orders, tokenizer=tokenizer) if DUE in x]


PYTHON = "have an answer that is Python's text of a value"


@pytest.mark.parametrize("text", ["['Answer 0.']", "b'Answer.'", "{'text': 'x'}", '["It\'s", ]'])
def test_answers_that_are_pythons_text_of_a_value_are_named(text, said):
    for road, row in on_roads(text):
        (line,) = said(row, road=road)
        assert line.startswith(f"kept 1 of 1 rows that {PYTHON}")
        assert line.endswith(f"row 1 ({text!r})")
    rows = [{"prompt": f"q{i}", "response": text if i < 4 else f"a{i}"} for i in range(9)]
    assert [x for x in said(*rows[:8]) if x.startswith(f"kept 4 of 8 rows that {PYTHON}")]
    assert not [x for x in said(*rows) if PYTHON in x]  # fewer than half
    assert not [x for x in said(*rows[3:5]) if PYTHON in x]  # fewer than four


def test_answers_of_json_code_and_brackets_are_not(said):
    for text in ('["a"]', '{"a": 1}', "['a', 'b']", "[1, 2]", "[see 'a']", "{x | x > 'a'}", "b", "[f(a='x')]", "{1}"):
        assert said({"prompt": "hi", "response": text}) == [], text


@pytest.mark.parametrize(("form", "road"), [("response", "sft"), ("pair", "pairs"), ("label", "labelled")])
def test_a_row_without_any_text_is_dropped_and_not_said_to_be_kept(form, road, said):
    def row(prompt, answer):
        more = {"pair": {"chosen": answer, "rejected": "c"}, "label": {"completion": answer, "label": True}}
        return {"prompt": prompt, **more.get(form, {"response": answer})}

    (line,) = said(row("hi", "yo"), row("", ""), road=road)
    assert line.startswith("dropped 1 of 2")
    (line,) = said(row("hi", "yo"), row("", "a"), road=road)
    assert "train the answer without a prompt (kept" in line


def on_all_roads(texts, *, asked=False):
    """Rows for each road that reads these texts, as answers or as what is asked."""
    if asked:
        yield "prompts", [{"prompt": text} for text in texts]
        yield (
            "prompts",
            [{"messages": [{"role": "system", "content": text}, user(f"u{i}")]} for i, text in enumerate(texts)],
        )
        yield "sft", [{"prompt": text, "response": f"a{i}"} for i, text in enumerate(texts)]
        yield "pairs", [{"prompt": text, "chosen": f"a{i}", "rejected": f"b{i}"} for i, text in enumerate(texts)]
        yield "labelled", [{"prompt": text, "completion": f"a{i}", "label": i % 2} for i, text in enumerate(texts)]
        return
    yield "sft", [{"prompt": f"q{i}", "response": text} for i, text in enumerate(texts)]
    yield "sft", [{"messages": [user(f"q{i}"), assistant(text)]} for i, text in enumerate(texts)]
    yield "pairs", [{"prompt": f"q{i}", "chosen": text, "rejected": f"b{i}"} for i, text in enumerate(texts)]
    yield "pairs", [{"prompt": f"q{i}", "chosen": f"a{i}", "rejected": text} for i, text in enumerate(texts)]
    yield "labelled", [{"prompt": f"q{i}", "completion": text, "label": i % 2} for i, text in enumerate(texts)]


TWICE, ENTITIES = "hold the text of escapes and no line break", "hold a text that is escaped for HTML"
UNFILLED = "hold the same placeholder, which nothing has filled"


@pytest.mark.parametrize(
    ("text", "why", "note"),
    [
        (r"line{}\nline2", TWICE, r"\n"), (r"First {}.\n\n- a\n- b", TWICE, r"\n"), (r"Caf\u00e9 {}", TWICE, r"\u00e9"),
        (r'"The text {}.\nof json.dumps"', TWICE, r"\n"),
        (r"He said \"{}\" twice.\nThen \"ok\".", TWICE, r"\n"),
        ("{} &lt; 3 &amp;&amp; y", ENTITIES, "&lt;"), ("It&#39;s {} &quot;ok&quot;", ENTITIES, "&#39;"),
    ],
)  # fmt: skip
def test_texts_that_were_escaped_once_too_often_are_named_where_most_are(text, why, note, said):
    texts = [text.replace("{}", str(i)) for i in range(4)]
    for asked in (False, True):
        for road, rows in on_all_roads(texts, asked=asked):
            (line,) = [x for x in said(*rows, road=road) if why in x]
            assert line.startswith("kept 4 of 4 rows")
            assert f"row 1 ({note}), row 2 (" in line
    (line,) = said(*[{"text": x} for x in texts])
    assert why in line
    rows = [{"prompt": f"q{i}", "response": (texts[i] if i < 4 else f"a{i}")} for i in range(9)]
    assert [x[:14] for x in said(*rows[:8])] == ["kept 4 of 8 ro"]
    assert said(*rows) == said(*rows[:3], *rows[4:8]) == []  # fewer than half, or than four


@pytest.mark.parametrize(
    "text",
    [
        r"print('a\nb')", r'Use "\n" or `\n`: {}', 'x = "a\\n"\ny = 1', r'{"text": "line\nline {}"}',
        r"\nabla f \neq \nu_{}",
        r"a \\n {}", r"$x \notin A$, \newline", "C:\\Users", '{"a": "Caf\\u00e9"}', "<b>&lt;</b> {}",
        "x < 3 &amp; y", "&copy; {}",
        "AT&T &amp; {}", "R&D", "a && b",
    ],
)  # fmt: skip
def test_code_formulas_json_and_html_are_not_escaped_too_often(text, said):
    for asked in (False, True):
        for road, rows in on_all_roads([text.replace("{}", str(i)) + " " * i for i in range(5)], asked=asked):
            assert not [x for x in said(*rows, road=road) if TWICE in x or ENTITIES in x]


@pytest.mark.parametrize(
    "place",
    ["{format}", "{question}", "{{question}}", "{{ text }}", "<|question|>", "${prompt}", "%(input)s", "<image>"],
)
def test_a_placeholder_that_every_row_has_is_named(place, said):
    texts = [f"Solve {i} of: {place}" for i in range(3)]
    for road, rows in on_all_roads(texts, asked=True):
        (line,) = [x for x in said(*rows, road=road) if UNFILLED in x]
        assert line.startswith("kept 3 of 3 rows")
        assert line.endswith(f"row 1 ({place.lstrip('$')}), row 2 ({place.lstrip('$')}), row 3 ({place.lstrip('$')})")
        rows[1] = {**rows[2], **({"prompt": "ho"} if "prompt" in rows[1] else {"messages": [user("ho")]})}
        assert not [x for x in said(*rows, road=road) if UNFILLED in x]
    rows = [{"prompt": f"{{premise}} {i}", "premise": "p", "response": "{answer}"} for i in range(2)]
    (line,) = [x for x in said(*rows) if UNFILLED in x]
    assert line.endswith("row 1 ({answer}, {premise}), row 2 ({answer}, {premise})")


@pytest.mark.parametrize(
    "text",
    [
        r"Put it in \boxed{answer}.", "End with {answer}.", r"x_{text}, \text{question}", "print(f'Hi {name}')",
        "{i}", "f({x})",
        '{"text": 1}', "<|user|>", "<question>", "{question, text}",
    ],
)  # fmt: skip
def test_braces_that_are_meant_are_no_placeholders(text, said):
    markup = [f"<|prompt|>{i}?<|answer|>{i}<|prompt|>ho<|answer|>x" for i in range(4)]  # of h2oGPT
    assert said(*[{"text": x} for x in markup]) == said(*[{"prompt": x[:19]} for x in markup], road="prompts") == []
    for road, rows in on_all_roads([f"{i} {text}" for i in range(4)], asked=True):
        assert not [x for x in said(*rows, road=road) if UNFILLED in x]


def test_a_placeholder_that_many_rows_have_is_named(said):
    rows = [{"prompt": f"Mail {i} {'to {name}' * (i < 4)}", "response": f"{i}"} for i in range(8)]
    (line,) = said(*rows)
    assert line.startswith("kept 4 of 8 rows")
    assert UNFILLED in line
    assert said(*rows[1:]) == []


REPLACED = "hold a text that is to be replaced, as its brackets say"


@pytest.mark.parametrize(
    "slot", ["[Your Name]", "[Insert date here]", "[YOUR COMPANY]", "{{Order Number}}", "<INSERT TOPIC HERE>"]
)
def test_a_text_that_is_to_be_replaced_is_named_in_most_rows(slot, said):
    for asked in (False, True):
        for road, rows in on_all_roads([f"Mail {i} for {slot}" for i in range(4)], asked=asked):
            (line,) = [x for x in said(*rows, road=road) if REPLACED in x]
            assert line.startswith("kept 4 of 4 rows")
            assert f"row 1 ({slot})" in line
    rows = [{"prompt": f"Mail {i}", "response": f"Dear {slot * (i < 3)} {i}"} for i in range(6)]
    assert said(*rows) == []


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("End with <answer>[YOUR ANSWER]</answer>.", "4"), ("Write a template of a mail.", "Dear [Your Name]"),
        ("Fill in: Dear [Your Name]", "Dear [Your Name]"), ("hi", "[Your Profile](https://x.org)"), ("hi", "[1] <td>"),
        ("hi", "[User Name]: hello"), ("hi", "[INST] x [/INST]"), ("hi", r"\frac{1}{2} <b>"),
    ],
)  # fmt: skip
def test_brackets_that_are_meant_are_not_to_be_replaced(prompt, text, said):
    rows = [{"prompt": f"{i}: {prompt}", "response": f"{i} {text}"} for i in range(4)]
    assert not [line for line in said(*rows) if REPLACED in line]
    assert not [line for line in said(*[{"prompt": row["prompt"]} for row in rows], road="prompts") if REPLACED in line]


STORIES = [  # 12 ordinary texts of more than 120 characters
    f"{who} walked {where} and met {whom} there, who told a long story of {what} that nobody had believed in all the "
    "years before, except perhaps a cat"
    for who in ("Ann", "Christopher", "The old miller")
    for where, whom, what in (
        ("home", "a fox", "gold"), ("to the far river", "two sisters", "ships and storms"), ("slowly", "Bo", "a war"),
        ("across the market", "a judge", "lost letters"),
    )
]  # fmt: skip
CUT = "have an answer that ends within a sentence at the same length, as if it was cut: "


def test_answers_that_were_cut_at_one_length_are_named(said):
    for road, rows in on_all_roads([text[:120] for text in STORIES[:5]]):
        (line,) = [x for x in said(*rows, road=road) if CUT in x]
        assert line.startswith("kept 5 of 5 rows")
        assert "row 1 (120 characters)" in line
    for end in ("...", "\u2026"):  # as a table is shown
        rows = [{"prompt": f"q{i}", "response": text[:117] + end} for i, text in enumerate(STORIES[:5])]
        assert [x for x in said(*rows) if CUT in x]
    short = [*(text[:120] for text in STORIES[:4]), *(f"{text[:40]}." for text in STORIES[4:])]
    for texts in (
        STORIES, short, [f"{text[:119]}." for text in STORIES], [text[:40] for text in STORIES],
        [f"After a look at all of the choices, the right one must be {x}" for x in "ABCDEF"],
    ):  # fmt: skip
        assert not [x for x in said(*[{"prompt": f"q{i}", "response": x} for i, x in enumerate(texts)]) if CUT in x]
    assert said(*[{"text": text[:120]} for text in STORIES]) == []  # pieces of a corpus


def test_prompts_that_were_cut_at_one_length_are_named(said):
    cut = "have a prompt that ends within a sentence at the same length, as if it was cut: row 1 (60 characters)"
    for answer in ({"answer": "1"}, {"response": "1"}):
        for texts, num in (([text[:60] for text in STORIES[:5]], 1), (STORIES[:5], 0), (["Ann walked to"] * 2, 0)):
            rows = [{"prompt": text, **answer} for text in texts]
            assert sum(cut in x for x in said(*rows, road="prompts" if "answer" in answer else "sft")) == num


GIVEN = "rows that have a prompt that ends with its own answer, or states it: "


def test_a_prompt_that_ends_with_its_gold_answer_is_named(said):
    golds = ["Paris", 8, "C++", "William Shakespeare", 1.5]
    rows = [{"prompt": f"Question {i}? Answer: {gold}.", "answer": gold} for i, gold in enumerate(golds)]
    line = f"kept 5 of 5 {GIVEN}row 1 (Paris), row 2 (8), row 3 (C++), row 4 (William Shakespeare), row 5 (1.5)"
    assert said(*rows, road="prompts") == [line]
    verl = [{"prompt": [user(row["prompt"])], "reward_model": {"ground_truth": str(row["answer"])}} for row in rows]
    assert said(*verl, road="prompts") == [line]
    for one in ({"prompt": "x"}, {"prompt": "Is it Paris or Rome?", "answer": "Paris"}):
        assert said(*rows, one, road="prompts")[0].startswith("kept 5 of 6 rows")
    choices = [{"prompt": f"{i}: yes or no?", "answer": "no"} for i in range(6)]
    last = [{"prompt": f"{i}. A) x{i} B) y{i}", "answer": f"{'xy'[i > 2]}{i}"} for i in range(8)]
    words = [{"prompt": f"Say {i} of 1{i}", "answer": f"{i}"} for i in range(6)]
    for ordinary in (choices, last, words, rows[:2]):
        assert said(*ordinary, road="prompts") == []


def test_a_prompt_that_states_its_gold_answer_is_named(said):
    def rows(text, golds=(127, 95, 64, 33, 78)):
        return [{"prompt": text.format(i, gold), "answer": str(gold)} for i, gold in enumerate(golds)]

    for text in (
        "Row {}?\nThe correct answer is {}.\nThink first.",
        "{}? Final answer: {}\nThink.",
        "{}? (Answer = {}) Go",
    ):
        assert said(*rows(text), road="prompts")[0].startswith(f"kept 5 of 5 {GIVEN}row 1 (127), row 2 (95)")
    shots = "Q: 1?\nAnswer: A\nQ: 2?\nAnswer: B\nQ: 3?\nAnswer: C\nQ: {}? Think."
    for ordinary in (
        rows("Q: 1+1? The answer is 2.\nQ: {}? Think."), rows("Row {}? Is the answer {}5? Think."),
        rows("Row {}? The answer is {}.5 by Bo. Is he right?"), rows("{}? End with Answer: X, e.g. Answer: {}, so"),
        rows(shots, "ABCCBA"),
    ):  # fmt: skip
        assert said(*ordinary, road="prompts") == []


def test_a_system_message_that_ends_with_the_gold_answer_is_named(said):
    def rows(system):
        messages = [[{"role": "system", "content": system.format(37 * i)}, user(f"Row {i}?")] for i in range(5)]
        return [{"prompt": asked, "answer": str(37 * i)} for i, asked in enumerate(messages)]

    assert said(*rows("Answer key: {}."), road="prompts")[0].startswith(f"kept 5 of 5 {GIVEN}row 1 (0), row 2 (37)")
    shots = [user("Which is first?"), {"role": "assistant", "content": "A"}, user("Which is next?")]
    letters = [{"prompt": [*shots[:1], {**shots[1], "content": x}, shots[2]], "answer": x} for x in "ABCDE"]
    for ordinary in (rows("Answer {} in one word"), letters):
        assert said(*ordinary, road="prompts") == []


def test_gold_answers_that_stand_for_a_missing_value_are_named(said):
    def rows(*golds, prompt="Row {}: how many?"):
        return [{"prompt": prompt.format(i), "answer": gold} for i, gold in enumerate(golds)]

    numbers = [str(i) for i in range(8)]
    for text in ("None", "nan", "null"):
        (line,) = said(*rows(*numbers, *[text] * 4), road="prompts")
        assert line.startswith("kept 4 of 12 rows that have a gold answer that stands for a missing value: row 9 ('")
    for golds, note in (
        (("Paris", "nan"), "kept 1 of 2"), (("Paris", "NA", "nan", "None", "N/A", "TODO", "Rome"), "kept 5 of 7"),
        (("4", "proof", "notfound", "6"), "kept 2 of 4"), ((*["good", "bad", "None"] * 4, "NaN"), "kept 1 of 13"),
        ((*numbers, *["proof"] * 4), "kept 4 of 12"),
    ):  # fmt: skip
        (line,) = said(*rows(*golds), road="prompts")
        assert line.startswith(f"{note} rows that have a gold answer that stands for a missing value: row ")
    for ordinary in (
        rows("4", "proof", "6"), rows("4", "NA", "unknown", "None"), rows(*["good", "bad", "None", "null"] * 3),
        rows(*numbers, "None"), rows(*["N/A"] * 4, *numbers), rows(*["Hate", "Offensive", "None"] * 5),
        rows(*numbers, *["None"] * 4, prompt="What does f({}) print here?"),
    ):  # fmt: skip
        assert said(*ordinary, road="prompts") == []


def test_a_prompt_that_ends_with_the_answer_that_trains_is_named(said):
    golds = ["Paris", "8", "C++", "William Shakespeare"]
    asked = [f"Question {i}?\nAnswer: {gold}" for i, gold in enumerate(golds)]
    both = [*zip(asked, golds, strict=True)]
    rows = {
        "sft": [{"prompt": prompt, "response": gold} for prompt, gold in both],
        "pairs": [{"prompt": [user(prompt)], "chosen": gold, "rejected": "b"} for prompt, gold in both],
        "labelled": [{"prompt": prompt, "completion": gold, "label": i % 2} for i, (prompt, gold) in enumerate(both)],
    }
    for road, given in rows.items():
        assert [x for x in said(*given, road=road) if GIVEN in x] == [
            f"kept 4 of 4 {GIVEN}row 1 (Paris), row 2 (8), row 3 (C++), row 4 (William Shakespeare)"
        ]
    told = [{"messages": [user("hi"), assistant("yo"), user(prompt), assistant(gold)]} for prompt, gold in both]
    assert [x for x in said(*told) if GIVEN in x]
    assert said(*[{"text": prompt} for prompt in asked]) == []
    choices = [{"prompt": f"{i}. A) x{i} B) y{i}", "response": f"{'xy'[i > 2]}{i}"} for i in range(8)]
    assert said(*choices) == said(*[{"prompt": x, "response": x} for x in "abcdef"]) == []


ONE, SPREADSHEET = (
    "repeat the prompt at the beginning of one of the responses",
    "that a spreadsheet wrote for another text",
)


def test_pairs_of_which_one_response_repeats_the_prompt_are_named(said):
    pairs = [
        {"prompt": f"What is the {i}th?", "chosen": f"What is the {i}th?\nA{i}", "rejected": "B"} for i in range(4)
    ]
    for rows in (pairs, [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in pairs]):
        (line,) = [x for x in said(*rows, road="pairs") if ONE in x]
        assert line.startswith("kept 4 of 4 pairs")
        plain = [{**row, "chosen": f"C{i}", "rejected": f"D{i}"} for i, row in enumerate(pairs)]
        assert said(*plain, *rows[:1], road="pairs") == []
    assert not [x for x in said({"prompt": "hi", "chosen": "hi, Bo", "rejected": "b"}, road="pairs") if ONE in x]


def test_pairs_of_which_one_side_alone_has_white_space_around_it_are_named(said):
    for blank in (" {}", "{}\n\n"):
        for side, other in (("chosen", "rejected"), ("rejected", "chosen")):
            pairs = [{"prompt": f"q{i}", side: blank.format(f"a{i}"), other: f"b{i}"} for i in range(5)]
            told = [{**row, side: [assistant(row[side])]} for row in pairs]
            line = f"kept 5 of 5 pairs that have white space at the beginning or end of the {side} response alone"
            for rows in (pairs, told):
                assert [x for x in said(*rows, road="pairs") if line in x]
            both = [{**row, other: blank.format(row[other])} for row in pairs]
            for ordinary in (both, pairs[:3], [*pairs[:4], {**pairs[4], side: "c"}]):
                assert said(*ordinary, road="pairs") == []


def test_pairs_of_which_one_response_is_the_other_one_cut_are_named(said):
    rows = [{"prompt": f"q{i}", "chosen": text, "rejected": text[:59]} for i, text in enumerate(STORIES)]
    swapped = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
    line = "pairs that have a response that is the other one cut within a word, and train on that"
    for given in (rows, swapped):
        assert [x for x in said(*given, road="pairs") if line in x]
    short = [
        {"prompt": f"q{i}", "chosen": f"{text}.", "rejected": f"{text}. But no."} for i, text in enumerate(STORIES)
    ]
    nearly = [{**row, "rejected": row["chosen"][:-2]} for row in rows]
    words = [{**row, "rejected": " ".join(row["chosen"].split()[:8])} for row in rows]
    for ordinary in (short, words, nearly):
        assert said(*ordinary, road="pairs") == []


def test_a_label_before_a_repeated_prompt_changes_nothing(said):
    asked = [f"What is the capital of land {i}?" for i in range(4)]
    for label in ("Question: ", "Q: ", "### Instruction:\n", "**User**: "):
        (line,) = said(*[{"prompt": x, "response": f"{label}{x}\nAnswer: a{i}"} for i, x in enumerate(asked)])
        assert "repeat the prompt at the beginning of the response" in line
    assert said(*[{"prompt": x, "response": f"Question: who?\n{x} a{i}"} for i, x in enumerate(asked)]) == []


def test_what_a_spreadsheet_made_of_answers_is_named(said, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("prompt,answer\nHalf of 1?,02-Jan\nHow many?,1.23E+12\nOf 3?,Sep-99\nOf 4?,7\n")
    (line,) = said(load_rows(path), road="prompts")
    assert line.startswith(f"{path}: kept 3 of 4")
    assert line.endswith("line 2 (02-Jan), line 3 (1.23E+12), line 4 (Sep-99)")
    path.write_text("prompt,response\nHalf of 1?,02-Jan\nOf 4?,7\n")
    assert SPREADSHEET in said(load_rows(path))[0]
    path.write_text("prompt,answer\nWhen is the 2nd of Jan.?,02-Jan\nWrite 1e12 as 1.0E+12,2.0E+12\nOf 3?,3E12\n")
    assert said(load_rows(path), road="prompts") == []
    assert said({"prompt": "Half of 1?", "answer": "02-Jan"}, road="prompts") == []  # of no spreadsheet


FAILED = "rows that have the error of a server or program for an answer: row 1 ("


@pytest.mark.parametrize(
    "text",
    [
        "Error code: 429 - {'error': {'message': 'Rate limit'}}", "Rate limit exceeded, try again.",
        "I'm sorry, an error occurred.", "Sorry, but something went wrong", "openai.RateLimitError: 429",
        "Traceback (most recent call last):\n  File x", "502 Bad Gateway", "{'error': {'code': 500}}",
        "Request timed out.",
    ],
)  # fmt: skip
def test_an_answer_that_is_the_error_of_a_server_is_named(text, said):
    for road, row in on_roads(text):
        assert FAILED in said(row, road=road)[0]
    for prompt in ("What does this code print?", "Show me the error", "Write a traceback"):
        assert not [x for x in said({"prompt": prompt, "response": text}) if FAILED in x]


def test_ordinary_answers_about_errors_are_not(said):
    for text in (
        "Error bars show it.",
        "I'm sorry, I can't help.",
        "Rate limits are common.",
        "An error occurred to me.",
    ):
        assert said({"prompt": "hi", "response": text}) == []


BARE = "rows that hold a call of a tool as the text of an answer"
WEATHER = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}}}


def test_calls_of_tools_that_are_the_text_of_an_answer_are_named(said):
    call = {"name": "weather", "arguments": {"city": "Paris"}}
    for text in (json.dumps(call), json.dumps([call, call], indent=1)):
        row = {"messages": [user("hi"), assistant(text), user("20"), assistant("It is 20.")], "tools": [WEATHER]}
        (line,) = [x for x in said(row) if BARE in x]
        assert line.endswith("row 1 (weather)")
        (line,) = [x for x in said({**row, "tools": json.dumps([WEATHER])}) if BARE in x]
        other = json.dumps({**call, "name": "sums"}), json.dumps({"name": "weather"}), "weather", "[1]"
        bare = [{**row, "messages": [user("hi"), assistant(x)]} for x in other] + [{"messages": row["messages"]}]
        assert not [x for one in bare for x in said(one) if BARE in x]


def test_a_second_reasoning_and_a_repeated_sentence_are_named(said):
    twice = "<think>\nso 4\n</think>\n\n<think>\n\n</think>\n\n4"
    lines = [x for road, row in on_roads(twice) for x in said(row, road=road) if "second, empty reasoning" in x]
    assert len(lines) == 5
    for text in ("<think>\n\n</think>\n\n4", "<think>a</think>4", "<td>a</td><td></td>"):
        assert not [x for x in said({"prompt": "hi", "response": text}) if "second, empty" in x]
    loops = [f"The capital of {i} is Paris. " * 6 for i in range(4)]
    rows = [{"prompt": f"q{i}", "response": text} for i, text in enumerate(loops)]
    (line,) = said(*rows)
    assert "kept 4 of 4 rows that have an answer that repeats one sentence: row 1 ('The capital of 0 is Paris')" in line
    asked = [{"prompt": f"Write six times: {text[:28]}", "response": text} for text in loops]
    assert said(*asked) == said(*rows[:1], *({"prompt": x, "response": x[::-1]} for x in "abcd")) == []


def test_prompts_of_a_system_message_alone_are_named(said):
    system = {"role": "system", "content": "You quiz. Capital of France?"}
    (line,) = said({"messages": [system], "answer": "Paris"}, {"prompt": [system, user("hi")]}, road="prompts")
    assert line == "kept 1 of 2 prompts that are a system message alone: the question is to be a user message: row 1"


BOXED = "We add.\n\n$\\boxed{{{0}}}$."
TWO = (
    "have gold answers that differ, also in objects, of which rewards read the first (answer, ground_truth, solution, "
)


@pytest.mark.parametrize(
    ("golds", "note"),
    [
        ({"answer": "5", "ground_truth": "6"}, "5 and 6"), ({"answer": 5, "gt_answer": 6.0}, ""),
        ({"answer": "1,005", "solution": "So.\n#### 1005"}, ""),
        ({"answer": "x\n#### 12", "solution": "13"}, "12 and 13"),
        ({"answer": "025", "solution": BOXED.format(25)}, ""),
        ({"answer": "4", "solution": BOXED.format(25)}, "25 and 4"),
        ({"answer": "A", "reward_model": {"ground_truth": "B"}}, "A and B"), ({"answer": "B", "ground_truth": "1"}, ""),
        ({"answer": 1, "ground_truth": "42"}, ""), ({"answer": "42", "label": "1"}, ""),
        ({"answer": 42, "label": 1}, ""),
        ({"answer": "1/2", "solution": "0.5"}, ""), ({"answer": "x = 2", "solution": "Thus x = 3."}, ""),
        ({"answer": "5", "solution": BOXED.format(6) + " Or so."}, ""), ({"answer": "Paris", "solution": "A"}, ""),
        ({"answer": "3", "solution": BOXED.format("x+4")}, ""), ({"answer": "A", "solution": "PIZZA"}, ""),
        ({"answer": "Lyon", "ground_truth": "Paris"}, "Lyon and Paris"),
        ({"answer": " paris", "ground_truth": "Paris"}, ""),
        ({"answer": "\\frac{1}{2}", "solution": BOXED.format("\\frac{1}{3}")}, "\\frac{1}{2} and \\frac{1}{3}"),
        ({"answer": "2.5", "reward_model": {"ground_truth": "3.5"}}, "2.5 and 3.5"),
        ({"answer": 2.5, "gt_answer": 3.5}, "2.5 and 3.5"),
        ({"answer": "$2.5$", "solution": BOXED.format("\\dfrac{5}{2}")}, ""),
        ({"answer": "0.33", "gt_answer": "1/3"}, ""),
        ({"answer": "1,250.5", "gt_answer": "1250.5."}, ""), ({"answer": "1/0", "gt_answer": "2.5"}, ""),
        ({"answer": "1,5", "gt_answer": "1.5"}, ""), ({"answer": float("nan"), "gt_answer": "7"}, ""),
        ({"answer": "Paris", "solution": "It is known"}, ""), ({"answer": "Paris", "gt_answer": "Paris in France"}, ""),
        ({"answer": "7", "metadata": {"answer": "8"}}, "7 and 8"),
        ({"answer": "Lyon", "extra_info": '{"final_answer": "Paris"}'}, "Lyon and Paris"),
        ({"answer": "8", "extra_info": {"answer": "2 * 4 = 8\n#### 8", "index": "9"}}, ""),
        ({"answer": "B", "metadata": {"answer": 1}}, ""),
        ({"answer": "7 cm", "ground_truth": "seven"}, ""), ({"answer": "-0.5", "ground_truth": "0.5"}, "-0.5 and 0.5"),
    ],
)  # fmt: skip
def test_gold_answers_that_differ_are_named(golds, note, said):
    lines = [x for x in said({"prompt": "q", **golds}, {"prompt": "r", "answer": "1"}, road="prompts") if TWO in x]
    assert [x.rpartition(": ")[2] for x in lines] == [f"row 1 ({note})"] * bool(note)


def test_a_prompt_with_two_gold_answers_is_named(said):
    rows = [{"prompt": "2+2", "answer": "4"}, {"prompt": "3+3", "answer": 6}, {"prompt": "2+2", "answer": "5"}]
    (line,) = said(*rows, road="prompts")
    assert line == "kept 2 of 3 prompts that stand there with another gold answer too: row 1 (4 and 5), row 3 (4 and 5)"
    assert not [
        x for x in said(*rows[:2], {**rows[0], "answer": " 4"}, {"prompt": "2+2"}, road="prompts") if "gold" in x
    ]


def test_a_result_of_no_call_is_named(said):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls }};{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}<assistant>{% endif %}"

    def row(made, answered):
        call = {"id": made, "type": "function", "function": {"name": "f", "arguments": {}}}
        result = {"role": "tool", "content": "1", "tool_call_id": answered}
        return {"messages": [user("hi"), assistant("", tool_calls=[call]), result, assistant("one")]}

    lines = said(row("a", "a"), row("a", "b"), row(None, "b"), row("a", None), tokenizer=tokenizer)
    why = "have the result of a tool under a tool_call_id that no call has"
    assert [x for x in lines if "tool_call_id" in x] == [f"kept 1 of 4 rows that {why}: row 2"]


def test_conversations_that_end_with_one_word_are_not_the_same_answer(said):
    rows = [{"messages": [user("go"), assistant(f"ls {i}"), user("ok"), assistant("Done.")]} for i in range(10)]
    assert not [line for line in said(*rows) if "the same answer" in line]
    assert [line for line in said(*[{"messages": [*r["messages"][2:]]} for r in rows]) if "the same text" in line]


def test_a_gold_answer_that_is_no_letter_of_the_choices_is_named(said):
    line = "rows that have a gold answer that is none of the letters of the choices in the prompt: row "
    choices = "Capital of Peru?\nA. Oslo\nB. Lima\nC. Riga"
    assert line + "1 ('F' of A to C)" in said({"prompt": choices, "answer": "F"}, road="prompts")[0]
    asks = choices.replace(".", ")") + "\nReply with the letter."
    assert line + "1 ('Lima' of A to C)" in said({"prompt": asks, "answer": "Lima"}, road="prompts")[0]
    inline = "Which?\nA. Oslo\nB. Lima  C. Riga"
    for prompt, gold in ((choices, "B"), (choices, "Lima"), (asks, "C"), (inline, "C"), ("Which vitamin?", "K")):
        assert said({"prompt": prompt, "answer": gold}, road="prompts") == []


def test_a_column_with_another_choice_than_the_gold_answers_is_named(said):
    row = {"prompt": "Capital?", "choices": ["Oslo", "Lima"], "answer": "A", "answer_text": "Lima"}
    assert "gold answers that differ" in said(row, road="prompts")[-1]
    assert "'Oslo' and 'Lima'" in said(row | {"answer": 0}, road="prompts")[-1]
    for right in (row | {"answer": "B"}, row | {"answer_text": "Oslo"}, row | {"answer_text": "the city of Lima"}):
        assert not [line for line in said(right, road="prompts") if "differ" in line]


def test_ranks_that_contradict_a_pair_are_named(said):
    pair = {"prompt": "hi", "chosen": "a", "rejected": "b", "chosen_rank": 3, "rejected_rank": 1}
    assert "kept 1 of 1 pairs that have a higher rank, of which 1 is the best" in said(pair, road="pairs")[-1]
    assert "a higher rank" not in str(said(pair | {"chosen_rank": 1, "rejected_rank": 3}, road="pairs"))


def test_a_picture_in_markdown_is_a_placeholder(said):
    rows = [{"prompt": f"![figure](f/{i}.png)\nFind angle {i}.", "answer": "1"} for i in range(3)]
    assert "hold the same placeholder, which nothing has filled: row 1 (![...](...))" in said(*rows, road="prompts")[0]
    assert said(*rows[:2], {"prompt": "Find it.", "answer": "2"}, road="prompts") == []


def with_tools():
    """A tokenizer whose template writes tools and calls."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ tools }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls }};"
    tokenizer.chat_template += "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    return tokenizer


CALL_TWICE = "rows that have a call in a message's text and in its tool_calls, so that it stands twice"


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        '{"name":"weather","parameters":{"city":"Paris"}}', "<function=weather><parameter=city>Paris</parameter>",
    ],
)  # fmt: skip
def test_a_call_that_stands_in_the_text_and_in_tool_calls_is_named(text, said):
    function = {"name": "weather", "arguments": {"city": "Paris"}}
    for calls in ([{"type": "function", "function": function}], [function]):
        made = assistant(text, tool_calls=calls)
        fine = [{**made, "content": x} for x in ("", "I call weather.", text.replace("weather", "sums"))]
        done = [{"role": "tool", "content": "20"}, assistant("It is 20.")]
        for message, line in [(made, CALL_TWICE), *((x, "") for x in fine)]:
            row = {"messages": [user("hi"), message, *done], "tools": [WEATHER]}
            lines = [x for x in said(row, tokenizer=with_tools()) if CALL_TWICE in x]
            assert lines == [f"kept 1 of 1 {line}: row 1"] * bool(line)


TOOLS_TWICE = "have their tools in a system message too"


def test_tools_that_stand_in_the_system_message_too_are_named(said):
    schema = json.dumps(WEATHER)
    for tools in ([WEATHER], json.dumps([WEATHER]), [WEATHER["function"]]):
        row = {"prompt": "hi", "response": "yo", "tools": tools}
        for text, num in ((f"Tools:\n<tools>{schema}</tools>", 1), ("Use weather for the weather.", 0), ("{}", 0)):
            told = {**row, "prompt": [{"role": "system", "content": text}, user("hi")]}
            for one in ({**row, "system": text}, told):
                lines = [x for x in said(one, tokenizer=with_tools()) if TOOLS_TWICE in x]
                assert len(lines) == num, (text, one)
    alone = {"prompt": [{"role": "system", "content": schema}, user("hi")], "response": "yo"}
    assert not [x for x in said(alone, tokenizer=with_tools()) if TOOLS_TWICE in x]


def test_a_message_of_a_user_that_stands_twice_in_a_row_is_named(said):
    line = "kept 1 of 1 rows that have the same message of a user twice in a row: row 1"
    twice = [user("2+2?"), user("2+2?")]
    rows = [("sft", {"messages": [*twice, assistant("4")]}), ("prompts", {"prompt": twice})]
    rows += [("pairs", {"prompt": twice, "chosen": "a", "rejected": "b"})]
    for road, row in rows:
        assert said(row, road=road) == [line]
    again = [user("2+2?"), assistant("4"), user("2+2?"), user("And 3+3?"), assistant("4, 6")]
    whole = {x: [*twice[:1], assistant(x)] for x in ("chosen", "rejected")}
    assert said({"messages": again}) == said({"prompt": twice[:1], **whole}, road="pairs") == []


def test_a_system_message_that_stands_twice_is_named(said):
    line = "rows that have their system message a second time, in a user's message or as it is: row 1, row 2"
    system, asked = {"role": "system", "content": "You answer in one word."}, [user("2+2?"), user("3+3?")]
    again = [user(f"You answer in one word.\n\n{m['content']}") for m in asked]
    for twice in ([[system, x] for x in again], [[system, system, x] for x in asked]):
        assert said(*({"prompt": x} for x in twice), road="prompts") == [f"kept 2 of 2 {line}"]
        assert said(*({"messages": [*x, assistant("4")]} for x in twice)) == [f"kept 2 of 2 {line}"]
    once, short = [{"prompt": [system, x]} for x in asked], {"role": "system", "content": "2+2"}
    assert said(*once, road="prompts") == said({"prompt": [short, asked[0]]}, road="prompts") == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<|user|>\n{}</s>\n<|assistant|>\nYes.</s>", "<|user|> ... <|assistant|>"),
        ("### Instruction:\n{}\n\n### Response:\nYes.", "### Instruction: ... ### Response:"),
        ("<s>[INST] {} [/INST] Yes.</s>", "[INST] ... [/INST]"),
    ],
)  # fmt: skip
def test_texts_that_hold_a_dialogue_are_named(text, found, said):
    rows = [{"text": text.format(f"Is {i} even?")} for i in range(4)]
    why = "hold the turns of a dialogue, of which every token trains, also the question's: give them as messages"
    assert [x for x in said(*rows) if x.startswith(f"kept 4 of 4 texts that {why}: row 1 ({found})")]
    for ordinary in (rows[:3], [*rows[:1], *({"text": f"{x}."} for x in STORIES)]):
        assert not [x for x in said(*ordinary) if "dialogue" in x]


def test_conversations_that_begin_alike_have_not_the_same_prompt(said):
    rows = [
        {"messages": [user("Hi!"), assistant("Hello, how can I help?"), user(f"Is {i} even?"), assistant(f"{i}!")]}
        for i in range(12)
    ]
    assert said(*rows) == []
    one = [{"messages": [user("Hi!"), assistant(f"{i}")]} for i in range(12)]
    assert said(*one) == ["all 12 rows have the same prompt: check which columns hold the texts"]


RESPONSE_OF_API = (
    "kept 1 of 1 rows that have the whole response of an API for an answer, which is a part of it: row 1 ("
)
SAID = {"role": "assistant", "content": "4"}
BODY = {"id": "x", "object": "chat.completion", "choices": [{"index": 0, "message": SAID, "finish_reason": "stop"}]}
PART = {"type": "output_text", "text": "4"}


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (json.dumps(BODY), "choices[0].message.content"), (json.dumps(BODY, indent=1), "choices[0].message.content"),
        (json.dumps({"choices": BODY["choices"]}), "choices[0].message.content"),
        ("ChatCompletion(id='x', choices=[Choice(finish_reason='stop')])", "choices[0].message.content"),
        (json.dumps({"object": "response", "output": [{"content": [PART]}]}), "output[0].content[0].text"),
        (json.dumps({"type": "message", "stop_reason": "end_turn", "content": [PART]}), "content[0].text"),
    ],
)  # fmt: skip
def test_a_whole_response_of_an_api_is_named(text, path, said):
    for road, row in on_roads(text):
        assert [x for x in said(row, road=road) if RESPONSE_OF_API in x] == [f"{RESPONSE_OF_API}{path})"]
    quiz = json.dumps({"question": "2+2?", "choices": [{"text": "4"}], "type": "quiz"})
    for fine in ({"prompt": "Write the JSON of an API", "response": text}, {"prompt": "hi", "response": quiz}):
        assert said(fine) == []


PAGE = "kept 1 of 1 rows that have what a web page shows round an answer in the answer, and train on it: row 1 ("


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("ChatGPT said:\nFour.", "ChatGPT said:"), ("So:\n\npython\nCopy code\nprint(4)", "Copy code"),
        ("pythonCopy code\nprint(4)", "pythonCopy code"), ("Four 【4†source】.", "【4†source】"),
        ("Four【4:0†a.pdf】.", "【4:0†a.pdf】"), ("Four :contentReference[oaicite:0]", ":contentReference[oaicite:0]"),
    ],
)  # fmt: skip
def test_what_a_web_page_shows_round_an_answer_is_named(text, note, said):
    for road, row in on_roads(text):
        assert said(row, road=road) == [f"{PAGE}{note})"]
    for fine in ("Click on Copy code.", "Bo said: four", "【注】四", "As ChatGPT said: 4", "See [4]"):
        assert said({"prompt": text, "response": fine}) == []


LONG = "have a long answer that ends within a sentence, as if it was cut"


def test_long_answers_that_end_within_a_sentence_are_named_at_any_length(said):
    cut = [". ".join(STORIES)[: 450 + 13 * i].rstrip(" .") for i in range(6)]
    for road, rows in on_all_roads(cut):
        (line,) = [x for x in said(*rows, road=road) if LONG in x]
        assert line.startswith("kept 6 of 6 rows")
        assert repr(cut[0][-30:]) in line
    listed = [f"{text}\n\n- one. And two\n- three and four" for text in cut]
    for texts in ([f"{text}." for text in cut], listed, [text[-180:] for text in cut]):
        assert not [x for x in said(*[{"prompt": f"q{i}", "response": x} for i, x in enumerate(texts)]) if LONG in x]


def test_another_tag_of_reasoning_than_most_rows_have_is_named(said):
    rows = [{"prompt": f"q{i}", "response": f"<think>\nhm {i}\n</think>\n{i}"} for i in range(3)]
    other = {"prompt": "q9", "response": "<reasoning>so</reasoning>9"}
    (line,) = [x for x in said(*rows, other) if "tag of reasoning" in x]
    expected = "rows that begin an answer with another tag of reasoning than most answers: row 4 (reasoning)"
    assert line == f"kept 1 of 4 {expected}"
    for others in ([], [{"prompt": "q8", "response": "no more than 8"}]):
        assert not [x for x in said(*rows, *others) if "tag of reasoning" in x]


def test_conversations_that_are_the_beginning_of_others_are_named(said):
    turns = [m for i in range(4) for m in (user(f"q{i}"), assistant(f"a{i}"))]
    rows = [{"messages": [user(f"{x}"), assistant(f"{x}!"), *turns][:num]} for x in "ab" for num in (4, 6, 8)]
    (line,) = said(*rows)
    assert line == (
        "4 of the 6 conversations are the beginning of another one, and train its answers again: keep the longest"
    )
    greeted = [{"messages": [user("hi"), assistant("Hello!"), user(x), assistant(x + "!")]} for x in "abcdef"]
    assert said(*greeted) == []
    last = [{"messages": [*row["messages"][:-1], {**row["messages"][-1], "weight": 1}]} for row in rows]
    for row in last:
        for message in row["messages"][:-1]:
            message["weight"] = int(message["role"] != "assistant")
    assert not [x for x in said(*json.loads(json.dumps(last))) if "beginning of another" in x]


def test_pairs_with_equal_scores_are_named(said):
    pairs = [
        {"prompt": f"q{i}", "chosen": f"a{i}", "rejected": "b", "score_chosen": 5, "score_rejected": 4.0}
        for i in range(8)
    ]
    ties = [{**pair, "score_rejected": 5.0} for pair in pairs[:2]]
    (line,) = [x for x in said(*ties, *pairs[2:], road="pairs") if "score for both" in x]
    assert (
        line
        == "kept 2 of 8 pairs that have the same score for both responses: which is better is arbitrary: row 1, row 2"
    )
    assert not [x for x in said(*pairs, road="pairs") if "score for both" in x]


def test_answers_without_the_reasoning_that_is_asked_for_are_named(said):
    why = "asks for reasoning in tags, and answers without"
    asks = "Write your reasoning in <think> </think>, then <answer>{}</answer>."
    rows = [{"messages": [user(asks), user(f"q{i}"), assistant(f"<answer>{i}</answer>")]} for i in range(4)]
    flat = [{"prompt": f"{asks} q{i}", "response": f"<answer>{i}</answer>"} for i in range(4)]
    for given in (rows, flat):
        (line,) = [x for x in said(*given) if why in x]
        assert line.startswith("kept 4 of 4 rows")
    reasoned = [{**row, "response": f"<think>x</think>{row['response']}"} for row in flat]
    plain = [{"messages": [user(f"What does <think> do in HTML, {i}?"), assistant(f"a{i}")]} for i in range(4)]
    again = [
        {
            "messages": [
                user("q"),
                assistant(f"<think>\n\n</think>\n\na{i}"),
                user("r"),
                assistant(f"<think>b</think>{i}"),
            ]
        }
        for i in range(4)
    ]
    for given in (reasoned, plain, again):
        assert not [x for x in said(*given) if why in x]
    writes = tiny_tokenizer()
    writes.chat_template = writes.chat_template.replace(
        "message.content", "(message.reasoning_content or '') + message.content"
    )
    beside = [{"messages": [*row["messages"][:2], {**row["messages"][2], "reasoning_content": "x"}]} for row in rows]
    assert not [x for x in said(*beside, tokenizer=writes) if why in x]


@pytest.mark.parametrize("names", [("USER:", "ASSISTANT:"), ("\n\nHuman:", "\n\nAssistant:")])
def test_a_text_with_the_turns_of_a_dialogue_is_named(names, said):
    texts = [{"text": f"{names[0]} q{i}\n\n{names[1]} a{i}"} for i in range(4)]
    assert any("hold the turns of a dialogue, of which every token trains" in x for x in said(*texts))


def test_conversations_without_a_user_are_named(said):
    rows = [{"messages": [{"role": "system", "content": f"Be {i}."}, assistant(f"a{i}")]} for i in range(4)]
    assert said(*rows) == [
        "kept 4 of 4 conversations that have no message of a user: only a system speaks: row 1, row 2, row 3, row 4"
    ]
    asked = [{"messages": [*row["messages"], user("q"), assistant("b")]} for row in rows]
    assert not [x for x in said(*asked) if "no message of a user" in x]


def test_letters_that_are_escaped_in_results_of_tools_are_named(said):
    def row(result, answer):
        call = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
        }
        return {"messages": [user("q"), call, {"role": "tool", "content": result}, assistant(answer)]}

    why = "letters as \\uXXXX in the result of a tool"
    writes = tiny_tokenizer()
    writes.chat_template = writes.chat_template.replace(
        "{{ message.content", "{{ message.tool_calls or '' }}{{ message.content"
    )
    for result, answer, named in (
        ('{"city": "\\u5317\\u4eac"}', "\u5317\u4eac", True),
        ('{"city": "\u5317\u4eac"}', "\u5317\u4eac", False),
        ('{"city": "\\u5317"}', "it is north", False),
    ):
        lines = said(*[row(result, f"{answer}{i}") for i in range(4)], tokenizer=writes)
        assert any(why in x for x in lines) == named
