from __future__ import annotations

import torch

from rlkit.data.tiny import tiny_model, tiny_tokenizer


def test_every_byte_is_its_own_id_and_every_text_comes_back():
    tokenizer = tiny_tokenizer()
    assert len(tokenizer) == 263
    for text in ("394215", "é 漢 🙂\n\t\x00~", " a  b ,  c .", "".join(chr(c) for c in range(0x21, 0x500))):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text


def test_special_tokens_have_the_documented_ids():
    tokenizer = tiny_tokenizer()
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "system", "user", "assistant", "tool"]
    assert tokenizer.convert_tokens_to_ids(names) == list(range(256, 263))
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (258, 256)
    assert tokenizer.decode([65, 260, 258], skip_special_tokens=True) == "Auser"


def test_the_chat_template_is_chatml():
    tokenizer = tiny_tokenizer()
    messages = [{"role": "user", "content": "394215"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert ids == [257, 260, 10, *b"394215", 258, 10, 257, 261, 10]
    messages += [{"role": "assistant", "content": "x"}, {"role": "tool", "content": ""}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, tools=[{"name": "f"}])
    assert text == (
        '<|im_start|>system\n[{"name": "f"}]<|im_end|>\n<|im_start|>user\n394215<|im_end|>\n'
        "<|im_start|>assistant\nx<|im_end|>\n<|im_start|>tool\n<|im_end|>\n"
    )


def test_model_weights_depend_on_the_seed_only():
    tokenizer = tiny_tokenizer()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    a = tiny_model(tokenizer, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(9)
    b, c = tiny_model(tokenizer, seed=1), tiny_model(tokenizer, seed=2)
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
    assert not torch.equal(a.lm_head.weight, c.lm_head.weight)
    assert sum(p.numel() for p in a.parameters()) == 1_051_776
    assert a(torch.tensor([[257, 260, 10]])).logits.shape == (1, 3, 263)
    assert tiny_model(tokenizer, hidden=64, layers=1, tie_word_embeddings=True).lm_head.weight.shape == (263, 64)
