"""How rows become examples."""

from __future__ import annotations

from chat_rows import answer, user, write

from rlkit.data.examples import sft_examples
from rlkit.data.load import load_rows
from rlkit.data.tiny import tiny_tokenizer

PHI = (  # as of Phi-3 and Phi-4-mini: eos stands once, at the end of the whole conversation
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% else %}<|endoftext|>{% endif %}"
)
LAST_ONLY = (  # an end of turn after the last answer alone
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% else %}<|im_end|>{% endif %}"
)
REWRITES = (  # past answers lose what stands before </t>
    "{% for m in messages %}[{{ m.role }}]{{ m.content if loop.last else m.content.split('</t>')[-1] }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
TWO_TURNS = [user("hi"), answer("one"), user("ho"), answer("two")]


def trained(template, *messages):
    """The texts of the examples, with the trained tokens between « and »."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    found, _ = sft_examples([{"messages": [*messages]}], tokenizer=tokenizer, max_example_tokens=999)
    marked = []
    for example in found:
        parts = [("«{}»" if on else "{}").format(tokenizer.decode([i])) for i, on in zip(example.ids, example.mask)]
        marked.append("".join(parts).replace("»«", ""))
    return marked


def test_a_template_that_ends_only_the_whole_conversation_gives_one_example(caplog):
    assert trained(PHI, *TWO_TURNS) == [
        "[user]hi<|im_end|>\n[assistant]«one<|im_end|>»\n[user]ho<|im_end|>\n[assistant]«two<|im_end|>»"
    ]
    assert "become" not in caplog.text


def test_a_template_that_ends_past_turns_otherwise_is_not_said_to_rewrite_them(caplog):
    assert trained(LAST_ONLY, *TWO_TURNS) == [
        "[user]hi[assistant]«one<|im_end|>»", "[user]hi[assistant]one[user]ho[assistant]«two<|im_end|>»",
    ]  # fmt: skip
    why = "kept 1 of 1 conversations that become 2 examples, since the chat template"
    assert f"{why} ends a past turn otherwise than the last: row 1" in caplog.text
    assert "rewrites" not in caplog.text
    caplog.clear()
    assert len(trained(REWRITES, user("hi"), answer("<t>x</t>one"), *TWO_TURNS[2:])) == 2
    assert f"{why} rewrites past turns: row 1" in caplog.text


def test_a_conversation_that_the_tokenizer_splits_is_reported(tmp_path, caplog):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = tiny_tokenizer()
    vocab = {token: i for token, i in tokenizer.get_vocab().items() if i < 256}
    backend = Tokenizer(models.BPE(vocab={**vocab, "ĊĊ": 263}, merges=[("Ċ", "Ċ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # of GPT-2
    backend.decoder = tokenizer.backend_tokenizer.decoder
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer._tokenizer = backend
    tokenizer.chat_template = tokenizer.chat_template.replace("\n{{", "\n\n{{").replace(
        "assistant\n{%", "assistant\n\n{%"
    )
    row = {"messages": [user("a"), answer("b"), user("hi"), answer("yo")]}
    path = write(tmp_path / "rows.jsonl", [row])
    found, _ = sft_examples(load_rows(path), tokenizer=tokenizer, max_example_tokens=999)
    assert len(found) == 2
    assert [r.getMessage() for r in caplog.records] == [
        f"{path}: kept 1 of 1 conversations that become 2 examples, since the tokenizer merges the opening of a turn "
        "with its text: line 1"
    ]
