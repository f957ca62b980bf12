"""A chat template from a file: what is read, what is checked, and what the tokenizer then writes."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from rlkit.data.chat import render, stop_token_ids
from rlkit.data.template_files import read_template, set_template
from rlkit.data.tiny import tiny_tokenizer

TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
TEMPLATE = TURNS + "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
START, END, USER, ASSISTANT = 257, 258, 260, 261
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}"
    " {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


def base():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template, tokenizer.eos_token = None, "<|endoftext|>"
    return tokenizer


def test_each_kind_of_file_gives_the_template(tmp_path):
    (tmp_path / "a.jinja").write_text(TEMPLATE)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (tmp_path / "config.json").write_text(json.dumps({"model_max_length": 1, "chat_template": TEMPLATE}))
    model = tmp_path / "model"
    tokenizer = base()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    old = tmp_path / "old"  # as transformers wrote it before chat_template.jinja
    old.mkdir()
    (old / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    messages = [{"role": "user", "content": "hi"}]
    for path in ("a.jinja", "chat_template.json", "config.json", "model", "old"):
        tokenizer = base()
        set_template(tokenizer, tmp_path / path)
        ids = render(tokenizer, messages, add_generation_prompt=True)
        assert ids == [START, USER, *b":hi", END, START, ASSISTANT, *b":"], path
        assert stop_token_ids(tokenizer) == (256, END), path
        tokenizer.save_pretrained(tmp_path / "out")
        assert render(AutoTokenizer.from_pretrained(tmp_path / "out"), messages, add_generation_prompt=True) == ids


def test_templates_by_name_are_kept_by_name(tmp_path):
    named = {"default": TEMPLATE, "tool_use": "{{ tools | tojson }}" + TEMPLATE}
    listed = [{"name": name, "template": text} for name, text in named.items()]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    assert read_template(tmp_path) == (named, tmp_path / "tokenizer_config.json")
    tokenizer = base()
    set_template(tokenizer, tmp_path / "tokenizer_config.json")
    tokenizer.save_pretrained(tmp_path / "out")
    assert read_template(tmp_path / "out")[0] == named
    messages = [{"role": "user", "content": "hi"}]
    assert render(tokenizer, messages, add_generation_prompt=False, tools=[{"name": "f"}])[:3] == [*b'[{"']


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% for m in messages %}\n{{ m.content }\n{% endfor %}", r"a\.jinja, line 2: the chat template does not pars"),
        ("a\n\n{% if x %}b", r"a\.jinja, line 3: the chat template does not parse: Unexpected end of template"),
        ("\n{{ messages | nothing }}", r"a\.jinja, line 2: the chat template does not parse: No filter nam"),
        ("\n\n{{ foo.bar }}", r"a\.jinja, line 3: the chat template cannot write a user message: UndefinedErr"),
        ("\n{{ raise_exception('no\nsystem') }}", r"a\.jinja, line 2: .* write a user message: .*: no system$"),
        (TURNS, r"a\.jinja: the chat template has no generation prompt: it writes '<\|im_start\|>assistant:' before"),
        (TEMPLATE.replace("{% for", "{% for m in [] %}{% endfor %}{% for").replace("m.content", "''"),
         r"a\.jinja: the chat template does not write the content of the user's message: '<\|im_start\|>user:"),
        (TEMPLATE.replace("m.content", "m.content if m.role == 'user'"), "not write the content of the assistant's"),
        (" \n", r"a\.jinja: there is no chat template in this file"),
        (json.dumps(TEMPLATE + "\n"), r"a\.jinja: cannot be read as a chat template: it is quoted as in JSON; write it "
         r"without the quotes, and its \\n as line breaks$"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_be_used_is_one_line(tmp_path, text, message):
    (tmp_path / "a.jinja").write_text(text)
    tokenizer = base()
    with pytest.raises(ValueError, match=message) as refused:
        set_template(tokenizer, tmp_path / "a.jinja")
    assert "\n" not in str(refused.value)
    assert tokenizer.chat_template is None


def test_paths_without_a_template_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.jinja: no such file of a chat template \(looked for /"):
        read_template(tmp_path / "none.jinja")
    base().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"none of chat_template\.jinja, .* in this folder has a chat template"):
        read_template(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: there is no chat template in this file"):
        read_template(tmp_path / "tokenizer_config.json")
    (tmp_path / "a.json").write_text('{"chat_template": 3}')
    with pytest.raises(ValueError, match=r"a\.json: chat_template must be text, or a list of .*, got 3"):
        read_template(tmp_path / "a.json")
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ValueError, match=r"a\.json: cannot be read as a chat template: "):
        read_template(tmp_path / "a.json")
    (tmp_path / "a.json").write_text(json.dumps({"chat_template": "\n{% endif %}"}))
    with pytest.raises(ValueError, match=r"a\.json, line 2 of its chat_template: the chat template does not parse"):
        set_template(base(), tmp_path / "a.json")


def test_a_template_that_opens_turns_by_the_user_alone_is_fine(tmp_path, caplog):
    (tmp_path / "a.jinja").write_text(MISTRAL)
    set_template(base(), tmp_path / "a.jinja")
    assert caplog.text == ""


def test_a_turn_without_a_stop_token_and_a_lost_bos_are_named(tmp_path, caplog):
    from tokenizers.processors import TemplateProcessing

    (tmp_path / "a.jinja").write_text(TEMPLATE.replace("<|im_end|>", "<|eot|>"))
    set_template(base(), tmp_path / "a.jinja")
    assert "no special token of this tokenizer ends an answer ('<|eot|>' is written there)" in caplog.text
    assert "'<|endoftext|>' ends it, in training and in sampling" in caplog.text
    caplog.clear()
    (tmp_path / "b.jinja").write_text(TEMPLATE)
    for text, said in ((TEMPLATE, True), ("{{ bos_token }}" + TEMPLATE, False)):
        tokenizer = base()
        tokenizer.bos_token = "<|im_start|>"
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", START)]
        )
        (tmp_path / "b.jinja").write_text(text.replace("<|im_start|>{{ m", "{{ m"))
        set_template(tokenizer, tmp_path / "b.jinja")
        assert ("does not begin with {{ bos_token }} ('<|im_start|>')" in caplog.text) == said
        caplog.clear()
