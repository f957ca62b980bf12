"""Episodes in plain text: which contexts are continued, also with a tokenizer that marks the start of a text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import Script, check_exact, prompt_of, tokenizer_with

from rlkit.data.prompts import Prompt
from rlkit.rollout.text import Text
from rlkit.types import Completion


def sentencepiece():
    """Marks the first word of a text, like Llama 2's tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "▁", "▁a", "▁b", "▁c", *"abc:.", "ab"]
    backend = Tokenizer(models.Unigram([(p, -1.0 if len(p) > 1 else -2.0) for p in pieces], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>")


words = st.text("abc .", max_size=6)


def bare(text):
    """Without white space and ends of turns."""
    return "".join(text.replace("<|im_end|>", "").split())


@given(
    st.lists(
        st.tuples(words.filter(bool), words, st.sampled_from(["whole", "stripped", "new"])), min_size=1, max_size=4
    )
)
async def test_every_turn_is_in_the_context_it_was_sampled_in(turns):
    tokenizer = tokenizer_with("chatml")
    script = Script(tokenizer, *(said for said, *_ in turns))
    text = Text(prompt_of(tokenizer), script, tokenizer=tokenizer)
    context, restarts = text.start, 0
    for i, (said, answer, kind) in enumerate(turns):
        turn = await text.reply(context)
        assert turn.text == said
        assert bare(tokenizer.decode(script.calls[-1][0])) == bare(context)
        kept = said.strip() if kind == "stripped" else said
        context = f"Z{i}" + answer if kind == "new" else context + kept + answer  # numbered: never what was there
        restarts += kind == "new" and i < len(turns) - 1
    pieces = text.end()
    check_exact(pieces, script.calls)
    assert len(pieces) == restarts + 1


async def test_the_end_of_turn_token_appears_once():
    tokenizer = tokenizer_with("chatml")
    for between, joined in (("<|im_end|>\n!", "x<|im_end|>\n!y<|im_end|>"), ("\n!", "x<|im_end|>\n!y<|im_end|>")):
        script = Script(tokenizer, "x", "y")
        text = Text(prompt_of(tokenizer), script, tokenizer=tokenizer)
        await text.reply(text.start)
        await text.reply(text.start + "x" + between)
        (piece,) = text.end()
        assert tokenizer.decode(piece.ids) == joined


async def test_no_start_of_text_marker_inside_an_episode():
    tokenizer = sentencepiece()
    ids = tokenizer.encode("a b", add_special_tokens=False)
    ab = tokenizer.convert_tokens_to_ids("ab")
    script = Script(tokenizer, [ab], [ab])
    text = Text(Prompt(ids, {}, 0), script, tokenizer=tokenizer)
    assert text.start == "a b"
    await text.reply("a b")
    await text.reply("a bab:c")
    (piece,) = text.end()
    check_exact([piece], script.calls)
    assert tokenizer.convert_ids_to_tokens(piece.ids) == ["ab", ":", "c", "ab"]


async def test_a_truncated_turn_is_the_last():
    tokenizer = tokenizer_with("chatml")
    script = Script(tokenizer, Completion([*b"ab"], [-1.0, -1.0], [0, 0], "length"))
    text = Text(prompt_of(tokenizer), script, tokenizer=tokenizer)
    assert (await text.reply(text.start)).finish_reason == "length"
    assert await text.reply(text.start + "ab!") is None
    assert text.end()[0].truncated
    with pytest.raises(ValueError, match="before its first turn"):
        Text(prompt_of(tokenizer), script, tokenizer=tokenizer).end()
