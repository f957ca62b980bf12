from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.data.chat import check_same_tokens, encode_growing, end_of_turn_id, render, stop_token_ids, turn_tokens
from rlkit.data.prompts import rl_prompts
from rlkit.data.tiny import tiny_tokenizer

START, END, SYSTEM, USER, ASSISTANT, TOOL, NL = 257, 258, 259, 260, 261, 262, 10
TOKENIZER = tiny_tokenizer()

# Past turns lose what stands before </think> as soon as a user message follows; those of the present exchange keep it.
FORGETFUL = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Drops the reasoning of every turn, the present one too.
DROPS_ALWAYS = FORGETFUL.replace("loop.index0 < ns.last", "true")
# Puts an empty reasoning block before the content of a turn that has none.
FILLS_IN = FORGETFUL.replace(
    "{{ m.content }}{% endif %}", "{% if m.role == 'assistant' %}[]{% endif %}{{ m.content }}{% endif %}"
)
# Closes with white space before its special token, and without special tokens between turns.
SPACED = (
    "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content | trim }} <|im_end|>"
    "{% else %}({{ m.content }}){% endif %}{% endfor %}"
)


def with_template(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def tool(text):
    return {"role": "tool", "content": text}


def test_render_is_what_the_template_writes():
    assert render(TOKENIZER, [user("hi")], add_generation_prompt=False) == [START, USER, NL, *b"hi", END, NL]
    ids = render(TOKENIZER, [user("hi")], add_generation_prompt=True, tools=[{"f": 1}])
    assert ids == [START, SYSTEM, NL, *b'[{"f": 1}]', END, NL, START, USER, NL, *b"hi", END, NL, START, ASSISTANT, NL]
    shout = with_template("{% for m in messages %}{{ m.content * times }}{% endfor %}")
    assert render(shout, [user("a")], add_generation_prompt=True, template_args={"times": 3}) == [97, 97, 97]


@pytest.mark.parametrize("name", ["tokenize", "messages", "tools", "continue_final_message", "add_generation_prompt"])
def test_arguments_that_rlkit_sets_are_refused(name):
    with pytest.raises(ValueError, match=f"^`template_args`: '{name}' is set by rlkit and cannot be given: drop it$"):
        render(TOKENIZER, [user("hi")], add_generation_prompt=True, template_args={name: None})
    with pytest.raises(ValueError, match=f"^`template_args`: '{name}' is set by rlkit"):
        rl_prompts([{"prompt": "hi"}], tokenizer=TOKENIZER, max_prompt_tokens=99, template_args={name: None})


def test_a_missing_template_is_said_with_the_fix():
    tokenizer = with_template(None)
    with pytest.raises(ValueError, match=r"no chat_template.*apply_chat_template=False"):
        render(tokenizer, [user("a")], add_generation_prompt=True)


def test_turn_tokens_close_and_open_with_and_without_a_sampled_end():
    so_far = [user("q"), assistant("ab")]
    opened = [NL, START, TOOL, NL, *b"7", END, NL, START, ASSISTANT, NL]
    assert turn_tokens(TOKENIZER, so_far, [tool("7")], sampled_ids=[97, 98, END]) == opened
    assert turn_tokens(TOKENIZER, so_far, [tool("7")], sampled_ids=[97, 98]) == [END, *opened]
    # the newline after the end of turn, sampled too
    assert turn_tokens(TOKENIZER, so_far, [tool("7")], sampled_ids=[97, 98, END, NL]) == opened[1:]
    # stopped by another token: it stays, and the template's closing follows
    assert turn_tokens(TOKENIZER, so_far, [tool("7")], sampled_ids=[97, 98, 256]) == [END, *opened]
    # a cut turn that ends like the middle of the closing is not taken for it
    assert turn_tokens(TOKENIZER, so_far, [tool("7")], sampled_ids=[97, 98, NL]) == [END, *opened]
    assert turn_tokens(TOKENIZER, so_far, [tool("7")], sampled_ids=[]) == [END, *opened]


contents = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda t: "<|" not in t)


@given(texts=st.lists(contents, min_size=2, max_size=5), cut=st.booleans())
def test_joined_turns_are_the_rendered_conversation(texts, cut):
    messages, ids = [user("q")], render(TOKENIZER, [user("q")], add_generation_prompt=True)
    for text in texts:
        sampled = TOKENIZER.encode(text, add_special_tokens=False) + ([] if cut else [END])
        messages.append(assistant(text))
        new = [tool(text), user("next")]
        added = turn_tokens(TOKENIZER, messages, new, sampled_ids=sampled)
        messages += new
        ids += sampled + added
    assert ids == render(TOKENIZER, messages, add_generation_prompt=True)


def test_sampled_tokens_that_no_encoder_would_choose_are_kept():
    # a model may sample a word byte by byte where the tokenizer has one token for it: its text renders differently
    sampled = [*b"user", END]
    added = turn_tokens(TOKENIZER, [user("q"), assistant("user")], [user("x")], sampled_ids=sampled)
    start = render(TOKENIZER, [user("q")], add_generation_prompt=True)
    again = render(TOKENIZER, [user("q"), assistant("user"), user("x")], add_generation_prompt=True)
    assert again == [*start, USER, END, *added]
    assert TOKENIZER.decode(start + sampled + added) == TOKENIZER.decode(again)


def test_rewritten_history_gives_none():
    tokenizer = with_template(FORGETFUL)
    thinks = [user("q"), assistant("<think>a</think>b")]
    assert turn_tokens(tokenizer, thinks, [tool("7")], sampled_ids=[97, END])[:3] == [NL, START, TOOL]
    assert turn_tokens(tokenizer, thinks, [user("7")], sampled_ids=[97, END]) is None
    assert turn_tokens(tokenizer, [user("q"), assistant("b")], [user("7")], sampled_ids=[98, END])[:3] == [
        NL,
        START,
        USER,
    ]
    # an earlier turn is rewritten, not the last one
    earlier = [*thinks, tool("7"), assistant("c")]
    assert turn_tokens(tokenizer, earlier, [user("8")], sampled_ids=[99, END]) is None
    assert turn_tokens(tokenizer, earlier, [tool("8")], sampled_ids=[99, END])[:3] == [NL, START, TOOL]


def test_a_change_of_equal_length_before_the_turn_gives_none():
    marked = FORGETFUL.replace(
        "{% else %}{{ m.content }}", "{% else %}{{ '*' if loop.index0 == ns.last else '-' }}{{ m.content }}"
    )
    tokenizer = with_template(marked)
    assert turn_tokens(tokenizer, [user("q"), assistant("b")], [tool("7")], sampled_ids=[98, END]) is not None
    assert turn_tokens(tokenizer, [user("q"), assistant("b")], [user("7")], sampled_ids=[98, END]) is None


def test_a_turn_that_is_closed_in_another_way_gives_none():
    tokenizer = with_template(
        "{% for m in messages %}({{ m.content }})"
        "{% if m.tool_calls %}<|endoftext|>{% else %}<|im_end|>{% endif %}{% endfor %}"
    )
    calls = {**assistant("b"), "tool_calls": [{"name": "f"}]}
    assert turn_tokens(tokenizer, [user("q"), assistant("b")], [tool("7")], sampled_ids=[98]) == [
        *b")",
        END,
        *b"(7)",
        END,
    ]
    assert turn_tokens(tokenizer, [user("q"), calls], [tool("7")], sampled_ids=[98]) is None


def test_a_template_that_drops_the_turns_own_reasoning_gives_none():
    tokenizer = with_template(DROPS_ALWAYS)
    assert turn_tokens(tokenizer, [user("q"), assistant("<think>a</think>b")], [tool("7")], sampled_ids=[97]) is None
    assert turn_tokens(tokenizer, [user("q"), assistant("b")], [tool("7")], sampled_ids=[98, END]) is not None
    # the dropped text stands elsewhere in the conversation: that is not this turn
    repeated = [user("<think>a</think>b"), assistant("<think>a</think>b")]
    assert turn_tokens(tokenizer, repeated, [tool("7")], sampled_ids=[97]) is None


def test_a_generation_prompt_that_history_lacks_gives_none():
    tokenizer = with_template(
        FORGETFUL.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<t>{% endif %}")
    )
    assert turn_tokens(tokenizer, [user("q"), assistant("b")], [tool("7")], sampled_ids=[98, END]) is None
    # the message may repeat what the generation prompt wrote, where its template needs it there
    kept = turn_tokens(tokenizer, [user("q"), assistant("<t>b")], [tool("7")], sampled_ids=[98, END])
    assert kept == [NL, START, TOOL, NL, *b"7", END, NL, START, ASSISTANT, NL, *b"<t>"]
    inside = with_template(
        tokenizer.chat_template.replace("{{ m.content }}{%", "{{ '<t>' if m.role == 'assistant' }}{{ m.content }}{%")
    )
    assert turn_tokens(inside, [user("q"), assistant("b")], [tool("7")], sampled_ids=[98, END]) == kept


def test_reasoning_in_a_field_of_its_own_must_be_written_too():
    template = FORGETFUL.replace("{% else %}{{ m.content }}", "{% else %}{{ m.reasoning_content }}{{ m.content }}")
    turn = {"role": "assistant", "content": "b", "reasoning_content": "a"}
    tokenizer = with_template(template)
    assert turn_tokens(tokenizer, [user("q"), turn], [tool("7")], sampled_ids=[97, 98, END]) is not None
    assert turn_tokens(tokenizer, [user("q"), turn], [user("7")], sampled_ids=[97, 98, END]) is None


def test_a_template_that_refuses_a_plain_turn_before_a_tool_gives_none():
    refuses = (
        "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
        "{{ raise_exception('no call') }}{% endif %}{% endfor %}"
    )
    tokenizer = with_template(refuses + tiny_tokenizer().chat_template)
    call = {**assistant("b"), "tool_calls": [{"name": "f"}]}
    assert turn_tokens(tokenizer, [user("q"), call], [tool("7")], sampled_ids=[98, END]) is None
    assert turn_tokens(tokenizer, [user("q"), call], [user("7")], sampled_ids=[98, END])[:3] == [NL, START, USER]
    with pytest.raises(Exception, match="no call"):
        turn_tokens(tokenizer, [user("q"), assistant("b")], [tool("7")], sampled_ids=[98, END])


def test_what_a_template_adds_or_trims_in_the_turn_does_not_reach_the_joined_tokens():
    filled = turn_tokens(with_template(FILLS_IN), [user("q"), assistant("b")], [tool("7")], sampled_ids=[98, END])
    assert filled == [NL, START, TOOL, NL, *b"7", END, NL, START, ASSISTANT, NL]
    spaced = with_template(SPACED)
    assert turn_tokens(spaced, [user("q"), assistant(" b\n")], [user("7")], sampled_ids=[98]) == [32, END, *b"(7)"]
    assert turn_tokens(spaced, [user("q"), assistant("b")], [user("7")], sampled_ids=[98, 32]) == [END, *b"(7)"]
    assert turn_tokens(spaced, [user("q"), assistant("b")], [user("7")], sampled_ids=[98, 32, END]) == [*b"(7)"]


def test_a_start_of_text_marker_is_not_written_between_turns():
    """SentencePiece-like tokenizers mark a text's first word; a joined turn is not the start of a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "▁", "▁q", "▁x", "▁b", "q", "x", "b", ":"]
    backend = Tokenizer(models.Unigram([(p, -1.0 if len(p) > 1 else -2.0) for p in pieces], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}:{% endfor %}"
    whole = render(tokenizer, [user("q"), assistant("b"), user("x")], add_generation_prompt=True)
    prompt = render(tokenizer, [user("q")], add_generation_prompt=True)
    sampled = [tokenizer.convert_tokens_to_ids("b")]
    assert (
        prompt + sampled + turn_tokens(tokenizer, [user("q"), assistant("b")], [user("x")], sampled_ids=sampled)
        == whole
    )


def test_misuse_is_named():
    with pytest.raises(ValueError, match=r"must end with the sampled assistant message, got roles \['user'\]"):
        turn_tokens(TOKENIZER, [user("q")], [tool("x")], sampled_ids=[1])
    with pytest.raises(ValueError, match="new_messages must hold at least one message"):
        turn_tokens(TOKENIZER, [user("q"), assistant("x")], [], sampled_ids=[1])


def test_the_end_of_turn_is_the_templates_and_not_the_eos():
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    assert end_of_turn_id(tokenizer) == END
    assert end_of_turn_id(with_template(SPACED)) == END
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert end_of_turn_id(tokenizer) == 256
    tokenizer.chat_template = None
    assert end_of_turn_id(tokenizer) == 256


def test_stop_ids_are_the_union_of_all_sources():
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    assert stop_token_ids(tokenizer) == (256, END)
    config, generation = SimpleNamespace(eos_token_id=7), SimpleNamespace(eos_token_id=[9, 256])
    assert stop_token_ids(tokenizer, config, generation, SimpleNamespace(eos_token_id=None)) == (7, 9, 256, END)
    tokenizer.eos_token = None
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"no stop token.*set tokenizer\.eos_token"):
        stop_token_ids(tokenizer)


def test_a_model_of_other_tokens_is_refused(tmp_path):
    ours, more = tiny_tokenizer(), tiny_tokenizer()
    more.add_tokens(["<more>"])
    more.save_pretrained(tmp_path / "more")
    for name in ("more", "bare"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text('{"model_type": "qwen3"}')
    check_same_tokens(ours, str(tmp_path / "more"))
    check_same_tokens(ours, str(tmp_path / "bare"))
    ours.add_tokens(["<pad>", "<more>"])
    with pytest.raises(ValueError, match="has other tokens: '<more>' is 263 there and 264 in the trained model"):
        check_same_tokens(ours, str(tmp_path / "more"))
    with pytest.raises(FileNotFoundError, match="no folder"):
        check_same_tokens(ours, str(tmp_path / "none"))


def test_a_model_that_has_another_token_at_an_id_is_named(tmp_path, caplog):
    """As a distilled model whose turns are marked by other control tokens at the ids of its base's."""
    ours, theirs = tiny_tokenizer(), tiny_tokenizer()
    ours.add_tokens(["<more>", "<last>"])
    theirs.add_tokens(["<User>", "<last>"])
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    check_same_tokens(ours, str(tmp_path))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("reads these ids as other tokens: 263 is '<User>' there and '<more>' in the trained model")


def pieced(scheme, **of_token):
    """A SentencePiece-like tokenizer with the token <e>."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "▁", "▁a", "▁b", "▁ab", "a", "b", "ab", "\n", ":"]
    backend = Tokenizer(models.Unigram([(p, -2.0 / len(p)) for p in pieces], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.add_special_tokens([AddedToken("<e>", normalized=False, **of_token)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


class Begun(type(TOKENIZER)):
    """A tokenizer that begins each text it is given with a token of its own."""

    def __call__(self, text, **options):
        out = super().__call__(text, **options)
        out["input_ids"] = [[1, *ids] for ids in out["input_ids"]]
        return out


OF_TEXTS = {
    "tiny": (TOKENIZER, "<|im_end|>"),
    "first": (pieced("first"), "<e>"),
    "always": (pieced("always"), "<e>"),
    "never": (pieced("never"), "<e>"),
    "blanks before": (pieced("first", lstrip=True), "<e>"),
    "blanks after": (pieced("first", rstrip=True), "<e>"),
    "begun": (Begun(tokenizer_object=TOKENIZER.backend_tokenizer), "<|im_end|>"),
}


@pytest.mark.parametrize("name", OF_TEXTS)
def test_texts_that_grow_have_the_tokens_of_each_by_itself(name):
    """Also where a text rewrites what was before, and where an answer holds the token."""
    tokenizer, end = OF_TEXTS[name]
    growing = [f"ab: a{end}", f"ab: a{end}\nb:", f"ab: a{end}\nb:ab {end}{end}", f"ab: a{end}\nb:ab {end}{end} b\n"]
    rewritten = [f"{end}a b", f"{end}a b{end}", f"{end}b{end} a b: ", f"b{end}"]
    conversations = [growing, rewritten, growing[:1], [], ["a", "a", ""]]
    own = [[tokenizer([x], add_special_tokens=False)["input_ids"][0] for x in texts] for texts in conversations]
    assert encode_growing(tokenizer, conversations) == own


def test_the_beginnings_of_a_conversation_are_tokenized_in_linear_time(monkeypatch):
    seen = []
    call = type(TOKENIZER).__call__
    monkeypatch.setattr(
        type(TOKENIZER), "__call__", lambda self, x, **o: seen.extend(map(len, x)) or call(self, x, **o)
    )
    text = ""
    texts = [text := f"{text}<|im_start|>user\n{i} and more<|im_end|>\n" for i in range(100)]
    encode_growing(TOKENIZER, [texts])
    assert sum(seen) < 2.2 * len(text)
