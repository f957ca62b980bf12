"""How rows become examples."""

from __future__ import annotations

from chat_rows import answer, user, write

from rlkit.data.examples import sft_examples
from rlkit.data.load import load_rows
from rlkit.data.tiny import tiny_tokenizer


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
