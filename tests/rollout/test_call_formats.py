"""The calls that chat templates write, read back: one small template per format, in the form of the models' own."""

import json
import logging

import pytest
from scripted import Script, check_exact, prompt_of

from rlkit.agents.endpoint import agent_env
from rlkit.data.chat import render_text
from rlkit.data.examples import sft_examples
from rlkit.data.tiny import tiny_tokenizer
from rlkit.rollout import calling
from rlkit.rollout.envs.call_format import call_parser
from rlkit.rollout.envs.calls import FORMATS, BadCall, Call, message_of, value_of
from rlkit.rollout.envs.tools import tool_env, tool_schemas

HEAD = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}"
)
TAIL = "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
NAME, ARGS, VALUE = "{{ f.name }}", "{{ f.arguments | tojson }}", "{{ v if v is string else v | tojson }}"
PLAIN = "{{ v | tojson if v is mapping or v is sequence and v is not string else v | string }}"  # True, not true
QUOTED = "{% if v is string %}'{{ v }}'{% elif v is mapping %}{{ v | tojson }}{% else %}{{ v }}{% endif %}"


def each(call, between=""):
    """`call` for each call `c` with its function `f`."""
    last = "{{ '" + between + "' if not loop.last }}"
    return "{% for c in m.tool_calls %}{% set f = c.function %}" + call + last + "{% endfor %}"


def items(one, between=""):
    """`one` for each key `k` and value `v` of the arguments."""
    last = "{{ '" + between + "' if not loop.last }}"
    return "{% for k, v in f.arguments.items() %}" + one + last + "{% endfor %}"


def json_of(name, arguments):
    return '{"' + name + '": "{{ f.name }}", "' + arguments + '": {{ f.arguments | tojson }}}'


FIRST = "{% set f = m.tool_calls[0].function %}"
DSML = "<｜DSML｜parameter name=\"{{ k }}\" string=\"{{ v is string and 'true' or 'false' }}\">"
XTML = "<|open|>argument key=\"{{ k }}\" type=\"{{ v is string and 'string' or 'array' }}\"<|sep|>"
KIMI = "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
GEMMA = (
    "{% macro text(v) %}{% if v is string %}<|\"|>{{ v }}<|\"|>{% elif v is mapping %}{{ '{' }}"
    "{% for k, x in v | dictsort %}{{ k }}:{{ text(x) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}"
    "{% elif v is boolean or v is none or v is number %}{{ v | tojson }}"
    "{% else %}[{% for x in v %}{{ text(x) }}{{ ',' if not loop.last }}{% endfor %}]{% endif %}{% endmacro %}"
)
FORMS = {  # how a template writes its calls, and the function that reads them
    "Qwen 3": ("hermes", each("\n<tool_call>\n" + json_of("name", "arguments") + "\n</tool_call>")),
    "Llama 3": ("json", FIRST + json_of("name", "parameters")),
    "Mistral 2024": ("json", "[TOOL_CALLS] [" + each(json_of("name", "arguments"), ", ") + "]"),
    "Phi 4": ("json", each("<|tool_call|>{{ f | tojson }}<|/tool_call|>")),
    "Nemotron 2": ("json", "<TOOLCALL>[" + each(json_of("name", "arguments"), ", ") + "]</TOOLCALL>\n"),
    "Command": ("json", "<|START_ACTION|>[\n" + each(json_of("tool_name", "parameters"), ",\n") + "]<|END_ACTION|>"),
    "Qwen 3.5": (
        "function",
        each(
            f"\n<tool_call>\n<function={NAME}>\n"
            + items("<parameter={{ k }}>\n" + PLAIN + "\n</parameter>\n")
            + "</function>\n</tool_call>"
        ),
    ),
    "Seed-OSS": (
        "function",
        each(
            f"<seed:tool_call>\n<function={NAME}>"
            + items("<parameter={{ k }}>" + VALUE + "</parameter>\n")
            + "</function>\n</seed:tool_call>"
        ),
    ),
    "GLM 4.5": (
        "arg_key",
        each(
            f"\n<tool_call>{NAME}\n"
            + items("<arg_key>{{ k }}</arg_key>\n<arg_value>" + VALUE + "</arg_value>\n")
            + "</tool_call>"
        ),
    ),
    "GLM 4.7": (
        "arg_key",
        each(
            f"<tool_call>{NAME}"
            + items("<arg_key>{{ k }}</arg_key><arg_value>" + VALUE + "</arg_value>")
            + "</tool_call>"
        ),
    ),
    "MiniMax M2": (
        "invoke",
        "\n<minimax:tool_call>\n"
        + each(
            f'<invoke name="{NAME}">\n' + items('<parameter name="{{ k }}">' + VALUE + "</parameter>\n") + "</invoke>\n"
        )
        + "</minimax:tool_call>",
    ),
    "DeepSeek V3.2": (
        "invoke",
        "\n\n<｜DSML｜function_calls>\n"
        + each(
            f'<｜DSML｜invoke name="{NAME}">\n' + items(DSML + VALUE + "</｜DSML｜parameter>\n") + "</｜DSML｜invoke>\n"
        )
        + "</｜DSML｜function_calls>",
    ),
    "Kimi K3": (
        "xtml",
        "<|open|>tools<|sep|>"
        + each(
            f'<|open|>call tool="{NAME}" index="1"<|sep|>'
            + items(XTML + VALUE + "<|close|>argument<|sep|>")
            + "<|close|>call<|sep|>"
        )
        + "<|close|>tools<|sep|>",
    ),
    "LFM 2.5": (
        "pythonic",
        "<|tool_call_start|>[" + each(NAME + "(" + items("{{ k }}=" + QUOTED, ", ") + ")", ", ") + "]<|tool_call_end|>",
    ),
    "Llama 4": ("pythonic", "[" + each(NAME + "(" + items("{{ k }}={{ v | tojson }}", ", ") + ")", ", ") + "]"),
    "OLMo 3": (
        "pythonic",
        "<function_calls>"
        + each(NAME + "(" + items("{{ k }}={{ v | tojson }}", ", ") + ")", "\n")
        + "</function_calls>",
    ),
    "gpt-oss": (
        "harmony",
        FIRST
        + f"<|start|>assistant<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>{ARGS}<|call|>",
    ),
    "gpt-oss, recipient first": (
        "harmony",
        FIRST + f"<|start|>assistant to=functions.{NAME}<|channel|>commentary json<|message|>{ARGS}<|call|>",
    ),
    "DeepSeek V3": (
        "deepseek",
        "<｜tool▁calls▁begin｜>"
        + each(f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n{ARGS}\n```<｜tool▁call▁end｜>")
        + "<｜tool▁calls▁end｜>",
    ),
    "DeepSeek V3.1": (
        "deepseek",
        "<｜tool▁calls▁begin｜>"
        + each(f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{ARGS}<｜tool▁call▁end｜>")
        + "<｜tool▁calls▁end｜>",
    ),
    "Kimi K2": (
        "kimi",
        "<|tool_calls_section_begin|>" + each(f"{KIMI}{ARGS}<|tool_call_end|>") + "<|tool_calls_section_end|>",
    ),
    "Mistral 2025": ("mistral", each(f"[TOOL_CALLS]{NAME}[ARGS]{ARGS}")),
    "Devstral": ("mistral", each(f"[TOOL_CALLS]{NAME}" + "[CALL_ID]{{ c.id }}" + f"[ARGS]{ARGS}")),
    "Gemma 4": ("gemma", GEMMA + each("<|tool_call>call:{{ f.name }}{{ text(f.arguments) }}<tool_call|>")),
}
ONE_CALL = ("Llama 3", "gpt-oss", "gpt-oss, recipient first")  # which call one tool per turn
WHOLE = ("Llama 3", "Llama 4")  # formats in which nothing stands before a call


def look_up(text: str, count: int, share: float, fresh: bool, names: list[str], more: dict) -> str:
    """Look something up.

    Args:
        text: a text
        count: a number
        share: a number
        fresh: whether
        names: a list
        more: an object
    """
    return json.dumps([text, count, share, fresh, names, more])


SCHEMAS = tool_schemas([look_up])
ODD = {
    "text": "007", "count": -3, "share": 0.25, "fresh": False, "names": ["1", "true", "Ünï"],
    "more": {"a b": {"c": [1, 2.5, True, None, "x, y={z}"]}, "quote": "it's \"so\"\n\ttwo"},
}  # fmt: skip
EVEN = {**ODD, "text": 'Zoë: "a, b=1" isn\'t\n{"c": [2]}', "fresh": True, "count": 0}


def tokenizer_of(form):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = HEAD + FORMS[form][1] + TAIL
    return tokenizer


def written(form, *arguments, before=""):
    """The turn that the template writes."""
    made = [
        {"type": "function", "id": f"functions.look_up:{n}", "function": {"name": "look_up", "arguments": a}}
        for n, a in enumerate(arguments)
    ]
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": before, "tool_calls": made}]
    text = render_text(tokenizer_of(form), said, add_generation_prompt=False)
    return text.partition("<|im_start|>assistant\n")[2].removesuffix("<|im_end|>\n")


@pytest.mark.parametrize("form", FORMS)
def test_a_template_chooses_the_function_that_reads_it(form):
    parse = call_parser(tokenizer_of(form), tools=SCHEMAS)
    assert parse == FORMATS[FORMS[form][0]] == call_parser(tokenizer_of(form))
    for arguments in (ODD, EVEN):
        (call,) = parse(written(form, arguments), SCHEMAS)
        assert (call.name, json.dumps(call.arguments, sort_keys=True)) == (
            "look_up",
            json.dumps(arguments, sort_keys=True),
        )
        assert call.id == ("functions.look_up:0" if form == "Kimi K2" else None)


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ONE_CALL])
def test_two_calls_of_a_turn_are_two(form):
    given = (ODD, ODD) if form == "LFM 2.5" else (ODD, EVEN)  # LFM's template does not escape the quotes of a text
    found = call_parser(tokenizer_of(form))(written(form, *given), SCHEMAS)
    assert [call.arguments for call in found] == [*given]


@pytest.mark.parametrize("form", [form for form in FORMS if form not in WHOLE])
def test_text_and_reasoning_stand_before_a_call(form):
    before = "I look." if FORMS[form][0] != "harmony" else "<|channel|>analysis<|message|>I look.<|end|>"
    text = written(form, ODD, before=before)
    parse = call_parser(tokenizer_of(form))
    assert [call.arguments for call in parse(text, SCHEMAS)] == [ODD]
    kept = message_of(text, calls=True)
    assert kept.get("thinking", kept["content"]).strip() == "I look."
    if FORMS[form][0] != "harmony":  # which has no <think>
        assert [call.arguments for call in parse(f"<think>so {text}</think>\n{text}", SCHEMAS)] == [ODD]
        assert parse(f"<think>so {text}</think>no", SCHEMAS) == parse(f"<think>so {text}", SCHEMAS) == []


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "text", ["", "42", "It is 6.", '{"answer": 42}', "<b>x</b>", "a to=functions.look_up <c>", "{"]
)
def test_an_answer_is_no_call(form, text):
    assert FORMATS[FORMS[form][0]](text, SCHEMAS) == []


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("function", "<tool_call>\n<function=f>\n<parameter=a>\n1\n", "the call of f is not closed"),
        ("function", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "must be like <function=name>"),
        ("function", "<tool_call><function=f>a=1</function></tool_call>", "has 'a=1' outside of its values"),
        ("function", "<tool_call><function=f><parameter=a>1</function></tool_call>", "outside of its values"),
        ("function", "<function=>x</function>", "must be like <function=name>"),
        ("arg_key", '<tool_call>{"name": "f"}</tool_call>', "must be like <tool_call>name<arg_key>"),
        ("arg_key", "<tool_call>f\n<arg_key>a</arg_key>", "the call of f is not closed"),
        ("arg_key", "<tool_call>f\n<arg_value>1</arg_value></tool_call>", "outside of its values"),
        ("invoke", '<minimax:tool_call><invoke name="f"><parameter name="a">1', "the call of f is not closed"),
        ("invoke", "<minimax:tool_call>f(1)</minimax:tool_call>", "must be like <invoke name="),
        ("xtml", "<|open|>tools<|sep|>f(1)<|close|>tools<|sep|>", "must be like <|open|>call tool="),
        ("pythonic", "<|tool_call_start|>[f(1)]<|tool_call_end|>", "every argument by its name"),
        ("pythonic", "<|tool_call_start|>[f(a=<|tool_call_end|>", "not valid Python"),
        ("pythonic", "<|tool_call_start|>x = 1<|tool_call_end|>", "a call must be like name("),
        (
            "harmony",
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{a: 1}",
            "arguments of f are not",
        ),
        ("harmony", "<|channel|>commentary to=functions.f {}", "must be like <|channel|>commentary"),
        ("deepseek", "<｜tool▁call▁begin｜>f(1)<｜tool▁call▁end｜>", "must be like <｜tool▁call▁begin｜>name"),
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]<｜tool▁call▁end｜>", "must be an object"),
        ("kimi", "<|tool_call_begin|>f:0{}<|tool_call_end|>", "must be like <|tool_call_begin|>"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{", "arguments of f are not valid JSON"),
        ("mistral", "[TOOL_CALLS] f 1", "must be like [TOOL_CALLS]name"),
        ("gemma", "<|tool_call>call:f{a:}<tool_call|>", "arguments of f are not valid JSON"),
        ("gemma", "<|tool_call>f(1)<tool_call|>", "must be like <|tool_call>call:name"),
    ],
)
def test_a_malformed_call_gets_an_explanation(name, text, error):
    (bad,) = FORMATS[name](text, SCHEMAS)
    assert isinstance(bad, BadCall)
    assert error in bad.error
    assert len(bad.error) < 300


@pytest.mark.parametrize(
    "calls",
    [
        "[look_up(text='it's'), look_up(text='b')]",  # two calls, or one with a strange text
        "[look_up(text='it's, count=3')]",
        "[look_up(text=it's)]",
        "[other(text='it's')]",
    ],
)
def test_texts_without_escapes_are_read_only_where_there_is_one_reading(calls):
    (bad,) = FORMATS["pythonic"](f"<|tool_call_start|>{calls}<|tool_call_end|>", SCHEMAS)
    assert "not valid Python" in bad.error


ITEM = {"$ref": "#/$defs/Item"}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "7", "7"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
        ({"type": "integer"}, "7", 7),
        ({"type": "integer"}, "seven", "seven"),  # which the check of arguments explains
        ({"type": "integer"}, "1.5", "1.5"),
        ({"type": "number"}, "7", 7),
        ({"type": "number"}, " 1.5\n", 1.5),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "array"}, "['a', None]", ["a", None]),
        ({"type": "object"}, '{"a": null}', {"a": None}),
        ({"type": "object"}, "{'a': True}", {"a": True}),
        ({"type": ["integer", "string"]}, "7", 7),
        ({"type": ["integer", "string"]}, "x", "x"),
        ({"type": "string", "nullable": True}, "None", None),
        ({"type": "string", "nullable": True}, "none", "none"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [ITEM, {"type": "null"}]}, '{"n": 1}', {"n": 1}),
        (ITEM, '{"n": 1}', {"n": 1}),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({}, "7", 7),
        ({}, "x", "x"),
        ({}, '"x"', '"x"'),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
        ({"type": "integer"}, "1" * 10_000, "1" * 10_000),
    ],
)
def test_bare_text_has_the_type_of_the_schema(schema, text, value):
    parameters = {"properties": {"key": schema}, "$defs": {"Item": {"type": "object"}}}
    found = value_of(text, parameters, "key")
    assert (type(found), found) == (type(value), value)


def test_the_response_template_of_a_tokenizer_comes_first():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = HEAD + each(f"CALL {NAME} {ARGS};") + TAIL
    call = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
    field = {
        "open_pattern": r"CALL (?P<name>\w+) ",
        "close": ";",
        "repeats": True,
        "content": "json",
        "transform": call,
    }
    fields = {"tool_calls": field, "content": {"content": "text"}}
    tokenizer.response_template = {"start_anchor": "<|im_start|>assistant\n", "fields": fields}
    parse = call_parser(tokenizer, tools=SCHEMAS)
    assert parse('So: CALL look_up {};CALL f {"a": [1]};', SCHEMAS) == [Call("look_up", {}), Call("f", {"a": [1]})]
    assert parse("So.", SCHEMAS) == parse("<think>CALL f {};", SCHEMAS) == []
    (bad,) = parse("CALL f {;", SCHEMAS)
    assert bad.error.startswith("the call cannot be read: ")
    tokenizer.chat_template = HEAD + FORMS["GLM 4.5"][1] + TAIL  # of --chat-template
    assert call_parser(tokenizer, tools=SCHEMAS) == FORMATS["arg_key"]


def test_a_template_that_no_function_reads_is_refused():
    tokenizer = tokenizer_of("Qwen 3")
    tokenizer.chat_template = HEAD + each(f"\nCALL {NAME} {ARGS}") + TAIL
    with pytest.raises(ValueError, match=r"no parser .*'CALL look_up \{.*--tool-calls FILE.py:FUNCTION"):
        tool_env([look_up], tokenizer=tokenizer)

    def own(text):
        _, found, rest = text.partition("CALL ")
        name, _, arguments = rest.partition(" ")
        return [(name, json.loads(arguments))] if found else []

    parse = call_parser(tokenizer, own, tools=SCHEMAS)
    assert parse("CALL f {}", SCHEMAS) == [Call("f", {})]


def test_texts_that_a_template_does_not_quote_are_for_tools_without_texts():
    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: one
            b: other
        """
        return a + b

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = HEAD + FORMS["Llama 4"][1].replace("{{ v | tojson }}", "{{ v }}") + TAIL
    assert call_parser(tokenizer, tools=tool_schemas([add])) == FORMATS["pythonic"]
    with pytest.raises(ValueError, match="no parser reads back"):
        call_parser(tokenizer, tools=SCHEMAS)


@pytest.mark.parametrize(
    ("own", "error"),
    [
        (lambda text: None, r"must return a list of \(name, arguments\), got None"),
        (lambda text: [text], r"must return a list of \(name, arguments\), got '' in it"),
        (lambda text: [("f", [1])], r"must return a list of \(name, arguments\)"),
        (lambda text: 1 / 0, "<lambda>: ZeroDivisionError: division"),
    ],
)
def test_a_function_of_the_user_is_tried_at_once(own, error):
    with pytest.raises(ValueError, match=error):
        call_parser(tokenizer_of("Qwen 3"), own)


def test_a_function_that_does_not_read_the_template_is_reported(caplog):
    call_parser(tokenizer_of("GLM 4.5"), FORMATS["hermes"], tools=SCHEMAS)
    (message,) = caplog.messages
    assert message.startswith("hermes_calls does not read the call that the chat template writes, '<tool_call>look")
    assert message.endswith("arg_key_calls does: drop --tool-calls (`parse`)")


def test_a_template_without_calls_is_read_by_the_marks_of_its_prompt(caplog, monkeypatch):
    monkeypatch.setattr(calling, "_reported", set())
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (HEAD + TAIL).replace("{{ tools | tojson }}", "{{ tools | tojson }} {{ how }}")
    parse = call_parser(tokenizer, tools=SCHEMAS)
    assert parse('<tool_call>{"name": "f"}</tool_call>', SCHEMAS) == [Call("f", {})]
    parse = call_parser(tokenizer, tools=SCHEMAS, template_args={"how": "Write <function=f>"})
    assert parse("<function=f></function>", SCHEMAS) == [Call("f", {})]
    parse = call_parser(tokenizer, tools=SCHEMAS, system_prompt="Write <|tool_call_start|>[f(x=1)]")
    assert parse("[f(x=1)]", SCHEMAS) == [Call("f", {"x": 1})]
    assert len(caplog.messages) == 3
    assert all(text.startswith("the chat template writes no tool calls: they are read as ") for text in caplog.messages)


@pytest.mark.parametrize("form", ["Qwen 3.5", "GLM 4.5", "LFM 2.5", "Kimi K2"])
async def test_an_episode_runs_the_calls_that_its_template_writes(form):
    tokenizer = tokenizer_of(form)
    script = Script(tokenizer, written(form, ODD), "done")
    pieces = await tool_env([look_up], tokenizer=tokenizer)(prompt_of(tokenizer, tools=[look_up]), script)
    check_exact(pieces, script.calls)
    assert [pieces[-1].info[key] for key in ("num_calls", "num_bad_calls", "num_failed_calls")] == [1, 0, 0]
    (answer,) = [m for m in pieces[-1].info["messages"] if m["role"] == "tool"]
    assert (answer["name"], answer["content"]) == ("look_up", look_up(**ODD))
    assert answer.get("tool_call_id") == ("functions.look_up:0" if form == "Kimi K2" else None)


KIMI_ROW = {
    "messages": [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "id": f"functions.look_up:{n}", "function": {"name": "look_up", "arguments": {"n": n}}}
            for n in range(2)
        ]},
        {"role": "tool", "content": "7", "tool_call_id": "functions.look_up:0"},
        {"role": "tool", "content": "8", "tool_call_id": "functions.look_up:1"},
        {"role": "assistant", "content": "It is 7."},
    ]
}  # fmt: skip


def test_calls_whose_names_stand_in_their_ids_are_written():
    tokenizer = tokenizer_of("Kimi K2")
    (example,), _ = sft_examples([KIMI_ROW], tokenizer=tokenizer, max_example_tokens=999)
    text = tokenizer.decode([i for i, on in zip(example.ids, example.mask, strict=True) if on])
    assert '<|tool_call_begin|>functions.look_up:1<|tool_call_argument_begin|>{"n": 1}' in text
    user, said, *rest = KIMI_ROW["messages"]
    calls = [{**call, "id": f"call_{n}"} for n, call in enumerate(said["tool_calls"])]
    row = {"messages": [user, {**said, "tool_calls": calls}, *rest]}
    fix = "it writes their ids: give each call one with its function's name, 'functions.look_up:0', or write it into"
    with pytest.raises(ValueError, match=f"does not write 'tool_calls' of the message .*; {fix}"):
        sft_examples([row], tokenizer=tokenizer, max_example_tokens=999)


HARMONY = (
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{% if '<|channel|>' in m.content %}{{ raise_exception('channels') }}{% endif %}"
    "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>commentary to=functions.{{ f.name }} <|constrain|>json<|message|>"
    "{{ f.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% elif m.role == 'tool' %}{% if not loop.previtem.tool_calls %}{{ raise_exception('no call') }}{% endif %}"
    "<|start|>functions.{{ loop.previtem.tool_calls[0].function.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
HARMONY_CALL = (
    "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.look_up "
    "<|constrain|>json<|message|>"
)
HARMONY_ANSWER = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>It is 7."


def harmony_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = HARMONY
    marks = ["start", "end", "message", "channel", "constrain", "call", "return"]
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{mark}|>" for mark in marks]})
    return tokenizer


async def test_an_episode_of_harmony_keeps_the_channels():
    tokenizer = harmony_tokenizer()
    turns = [HARMONY_CALL + json.dumps(ODD), HARMONY_CALL + "{x", HARMONY_ANSWER]
    script = Script(tokenizer, *turns, end="<|call|>")
    pieces = await tool_env([look_up], tokenizer=tokenizer)(prompt_of(tokenizer, tools=[look_up]), script)
    check_exact(pieces, script.calls)
    assert [pieces[-1].info[key] for key in ("num_calls", "num_bad_calls", "num_failed_calls")] == [2, 1, 0]
    first = tokenizer.decode(script.calls[1][0])
    assert HARMONY_CALL + json.dumps(ODD, ensure_ascii=False) + "<|call|><|start|>functions.look_up to=" in first
    assert json.dumps(look_up(**ODD), ensure_ascii=False) in first
    assert "the arguments of look_up are not valid JSON" in tokenizer.decode(script.calls[2][0])


async def asked_of(tokenizer, script):
    """The pieces of a program that calls a tool and asks twice, and the messages it got."""
    seen = []

    async def agent(prompt, base_url):
        from aiohttp import ClientSession

        messages = [{"role": "user", "content": "question"}]
        async with ClientSession() as session:
            for n in range(3):
                body = {"model": "policy", "messages": messages, "tools": SCHEMAS}
                async with session.post(f"{base_url}/chat/completions", json=body) as reply:
                    seen.append((await reply.json())["choices"][0]["message"])
                messages = [*messages, seen[-1]]
                if n:
                    messages += [{"role": "user", "content": "again"}]
                else:
                    answer = {"role": "tool", "tool_call_id": seen[0]["tool_calls"][0]["id"], "content": "7"}
                    messages += [answer]
        return {"reward": 1.0}

    pieces = await agent_env(agent, tokenizer=tokenizer)(prompt_of(tokenizer, tools=SCHEMAS), script)
    check_exact(pieces, script.calls)
    (call,) = seen[0]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("look_up", ODD)
    return pieces, seen


@pytest.mark.parametrize("form", ["Qwen 3.5", "GLM 4.5", "LFM 2.5", "Kimi K2", "Gemma 4"])
async def test_an_agent_gets_the_calls_that_its_template_writes(form):
    tokenizer = tokenizer_of(form)
    script = Script(tokenizer, written(form, ODD, before="So: "), "done", "done")
    (piece,), seen = await asked_of(tokenizer, script)
    assert [message["content"].strip() for message in seen] == ["So:", "done", "done"]
    assert piece.info["metrics"] == {"agent/branches": 0, "agent/rerendered": 0}


async def test_an_agent_gets_the_calls_and_texts_of_harmony():
    tokenizer = harmony_tokenizer()
    script = Script(tokenizer, HARMONY_CALL + json.dumps(ODD), HARMONY_ANSWER, HARMONY_ANSWER, end="<|call|>")
    pieces, seen = await asked_of(tokenizer, script)
    assert [message["content"] for message in seen] == ["", "It is 7.", "It is 7."]
    assert len(pieces) == 2  # the answer and what follows it are one


async def test_an_agent_with_tools_is_refused_where_calls_cannot_be_read(caplog):
    tokenizer = tokenizer_of("Qwen 3")
    tokenizer.chat_template = HEAD + each(f"\nCALL {NAME} {ARGS}") + TAIL

    def agent(tools):
        async def ask(prompt, base_url):
            from aiohttp import ClientSession

            body = {"model": "policy", "messages": [{"role": "user", "content": "question"}], **tools}
            async with ClientSession() as session, session.post(f"{base_url}/chat/completions", json=body):
                pass

        return ask

    prompt = prompt_of(tokenizer)
    with caplog.at_level(logging.WARNING):
        env = agent_env(agent({}), tokenizer=tokenizer, raise_errors=False)
    assert "agents that give tools end the run: no parser reads back" in caplog.text
    assert sum((await env(prompt, Script(tokenizer, "x")))[0].mask) == 2
    with pytest.raises(ValueError, match="no parser reads back"):
        await agent_env(agent({"tools": SCHEMAS}), tokenizer=tokenizer, raise_errors=False)(
            prompt, Script(tokenizer, "x")
        )


def test_a_template_that_leaves_out_results_is_refused():
    tokenizer = tokenizer_of("Qwen 3")
    tokenizer.chat_template = tokenizer.chat_template.replace("in messages %}", "in messages if m.role != 'tool' %}")
    with pytest.raises(ValueError, match="leaves out the messages of role 'tool'"):
        tool_env([look_up], tokenizer=tokenizer)
    within = "{% if m.tool_calls %}{{ messages[loop.index].content }}"  # as Gemma 4 writes them
    tokenizer.chat_template = tokenizer.chat_template.replace("{% if m.tool_calls %}", within)
    tool_env([look_up], tokenizer=tokenizer)
