"""Episodes in messages: joined exactly, split where a template rewrites history, for four model families."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import END, Script, check_exact, prompt_of, tokenizer_with

from rlkit.data.chat import render
from rlkit.data.prompts import rl_prompts
from rlkit.rollout.envs.chat import Chat, refuse_vision
from rlkit.types import Completion

TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}


def tool(text):
    return {"role": "tool", "content": text}


def user(text):
    return {"role": "user", "content": text}


async def talk(name, turns, answers, **kwargs):
    """An episode: the policy's turns, and the environment's messages between them."""
    tokenizer = tokenizer_with(name)
    script = Script(tokenizer, *turns, end=END[name])
    chat = Chat(prompt_of(tokenizer, tools=kwargs.get("tools")), script, tokenizer=tokenizer, **kwargs)
    answers = iter(answers)
    async for _ in chat:
        if not script.turns:
            break
        chat.add(*next(answers))
    pieces = chat.end(reward=2.0)
    check_exact(pieces, script.calls)
    return chat, pieces, script.calls


@pytest.mark.parametrize("name", ["chatml", "llama3"])
async def test_a_template_that_keeps_history_gives_one_piece_equal_to_its_rendering(name):
    tokenizer = tokenizer_with(name)
    turns = ["<think>a</think>b", "c", "d"]
    chat, (piece,), _ = await talk(name, turns, [[tool("7"), tool("8")], [user("more")]])
    assert [m["content"] for m in chat.messages] == ["question", "<think>a</think>b", "7", "8", "c", "more", "d"]
    rendered = render(tokenizer, chat.messages, add_generation_prompt=False)
    joined = piece.prompt_ids + piece.ids
    assert rendered[: len(joined)] == joined
    sampled = [i for i, m in zip(piece.ids, piece.mask, strict=True) if m]
    assert tokenizer.decode(sampled) == END[name].join([*turns, ""])


async def test_the_template_arguments_of_a_row_reach_all_turns():
    tokenizer = tokenizer_with("qwen3")
    row = {"prompt": "question", "chat_template_kwargs": {"enable_thinking": False}}
    ((prompt,), _) = rl_prompts([row], tokenizer=tokenizer, max_prompt_tokens=99)
    script = Script(tokenizer, "a", "b")
    chat = Chat(prompt, script, tokenizer=tokenizer, template_args={"enable_thinking": True})
    await chat.turn()
    chat.add("more")
    await chat.turn()
    for context, _ in script.calls:
        assert tokenizer.decode(context).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


async def test_reasoning_that_a_template_drops_starts_a_new_piece():
    turns = ["<think>\na\n</think>\n\nb", "<think>\nc\n</think>\n\nd", "e"]
    tokenizer = tokenizer_with("qwen3")
    # tool answers belong to the same question: the reasoning stays, one piece
    _, pieces, _ = await talk("qwen3", turns, [[tool("7")], [tool("8")]])
    assert len(pieces) == 1
    # a user's message begins a new question: what was thought before it is gone
    chat, pieces, calls = await talk("qwen3", turns, [[tool("7")], [user("more")]])
    assert [p.continues for p in pieces] == [False, True]
    assert [sum(p.mask) for p in pieces] == [len(calls[0][1].ids) + len(calls[1][1].ids), len(calls[2][1].ids)]
    second = tokenizer.decode(pieces[1].prompt_ids)
    assert "<think>" not in second
    assert pieces[1].prompt_ids == render(tokenizer, chat.messages[:-1], add_generation_prompt=True)
    assert [p.reward for p in pieces] == [2.0, 2.0]
    assert pieces[0].info == {}
    assert pieces[1].info == {"finish_reason": "stop", "num_turns": 3, "messages": chat.messages}


async def test_an_opened_reasoning_block_that_history_lacks_makes_each_turn_a_piece():
    """enable_thinking=False: Qwen 3 opens a turn with an empty block, and writes past turns without one."""
    tokenizer = tokenizer_with("qwen3")
    script = Script(tokenizer, "b", "c")
    args = {"enable_thinking": False}
    chat = Chat(prompt_of(tokenizer, template_args=args), script, tokenizer=tokenizer, template_args=args)
    await chat.turn()
    chat.add("more")
    await chat.turn()
    pieces = chat.end()
    check_exact(pieces, script.calls)
    assert len(pieces) == 2


async def test_a_template_that_wants_structured_calls_gets_them_from_the_environment():
    tokenizer = tokenizer_with("mistral")
    script = Script(tokenizer, '[TOOL_CALLS] [{"name": "f"}]', "done", end="</s>")
    chat = Chat(prompt_of(tokenizer), script, tokenizer=tokenizer)
    await chat.turn()
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {}}}
    chat.messages[-1] = {"role": "assistant", "content": "", "tool_calls": [call]}
    chat.add({"role": "tool", "content": "7", "tool_call_id": "abcdefghi"})
    await chat.turn()
    pieces = chat.end()
    check_exact(pieces, script.calls)
    assert "abcdefghi" in tokenizer.decode(pieces[-1].prompt_ids)


async def test_a_template_that_lists_tools_at_the_last_question_rewrites_history():
    """Mistral lists tools at the last question only: after the next question, history is rewritten."""
    turns, tokenizer = ["a", "b"], tokenizer_with("mistral")
    _, pieces, _ = await talk("mistral", turns, [[user("more")]], tools=[TOOL])
    assert [tokenizer.decode(p.prompt_ids).count("[AVAILABLE_TOOLS]") for p in pieces] == [1, 1]
    assert tokenizer.decode(pieces[1].prompt_ids).index("a</s>") < tokenizer.decode(pieces[1].prompt_ids).index("[AVAI")
    _, pieces, _ = await talk("mistral", turns, [[user("more")]])
    assert len(pieces) == 1


words = st.text(st.characters(codec="utf-8", exclude_characters="<[|"), max_size=6)
# bytes that no tokenizer would choose (a role's name spelt out, halves of a character) among plain text
spelt = st.one_of(
    words.map(lambda text: list(text.encode())),
    st.sampled_from([[*b"user"], [*b"tool x"], [0xC3], [0xE2, 0x82], [*b"<think>\nhm\n</think>\n\nyes"], [10, 32, 10]]),
)


@given(
    name=st.sampled_from(["chatml", "qwen3", "llama3"]),
    turns=st.lists(st.tuples(spelt, words, st.booleans(), st.booleans()), min_size=1, max_size=4),
    tools=st.booleans(),
)
async def test_every_token_is_trained_in_the_context_it_was_sampled_in(name, turns, tools):
    end = tokenizer_with(name).encode(END[name], add_special_tokens=False)
    said = [[*ids, *end] for ids, *_ in turns]
    answers = [[(user if by_user else tool)(text)] * (2 if twice else 1) for _, text, by_user, twice in turns]
    chat, pieces, calls = await talk(name, said, answers, **({"tools": [TOOL]} if tools else {}))
    assert sum(sum(p.mask) for p in pieces) == sum(map(len, said))
    assert len(calls) == chat.turns.num_turns == len(turns)
    if name == "chatml":
        assert len(pieces) == 1


async def test_messages_before_the_first_turn_are_read():
    tokenizer = tokenizer_with("chatml")
    script = Script(tokenizer, "a", "b")
    chat = Chat(prompt_of(tokenizer), script, tokenizer=tokenizer)
    chat.add(user("a hint"))
    await chat.turn()
    chat.add("go on")
    await chat.turn()
    (piece,) = pieces = chat.end(reward=1.0)
    check_exact(pieces, script.calls)
    messages = [user("question"), user("a hint")]
    assert piece.prompt_ids == render(tokenizer, messages, add_generation_prompt=True)


@pytest.mark.parametrize("message", [5, None, ["a"], object()])
def test_what_is_no_message_is_refused(message):
    tokenizer = tokenizer_with("chatml")
    chat = Chat(prompt_of(tokenizer), Script(tokenizer), tokenizer=tokenizer)
    with pytest.raises(TypeError, match="a message must be a string or a dict with role and content, got"):
        chat.add(message)
    with pytest.raises(TypeError, match="a message must be a string or a dict with role and content, got"):
        Chat(prompt_of(tokenizer), Script(tokenizer), tokenizer=tokenizer, messages=[message])


async def test_a_truncated_turn_ends_the_episode():
    tokenizer = tokenizer_with("chatml")
    cut = Completion([*b"ab"], [-1.0, -2.0], [3, 3], "length")
    script = Script(tokenizer, "fine", cut)
    chat = Chat(prompt_of(tokenizer), script, tokenizer=tokenizer)
    seen = []
    async for turn in chat:
        seen.append((turn.text, turn.finish_reason))
        chat.add("go on")
    assert seen == [("fine", "stop"), ("ab", "length")]
    (piece,) = chat.end()
    check_exact([piece], script.calls)
    assert piece.truncated
    assert piece.info["finish_reason"] == "length"
    assert await chat.turn() is None


async def test_messages_after_the_last_turn_are_dropped():
    tokenizer = tokenizer_with("chatml")
    script = Script(tokenizer, "fine", Completion([], [], [], "length"))
    chat = Chat(prompt_of(tokenizer), script, tokenizer=tokenizer)
    async for _ in chat:
        chat.add("go on")
    (piece,) = chat.end()
    check_exact([piece], script.calls)
    assert tokenizer.decode(piece.ids) == "fine<|im_end|>"
    assert piece.truncated
    assert chat.turns.num_turns == 1


async def test_without_room_for_a_first_turn_the_episode_is_empty_and_truncated():
    tokenizer = tokenizer_with("chatml")
    chat = Chat(prompt_of(tokenizer), Script(tokenizer, Completion([], [], [], "length")), tokenizer=tokenizer)
    assert await chat.turn() is None
    (piece,) = chat.end(truncated=False)
    assert (piece.ids, piece.truncated, piece.info["num_turns"]) == ([], True, 0)


async def test_misuse_raises():
    tokenizer = tokenizer_with("chatml")
    prompt = prompt_of(tokenizer)
    chat = Chat(prompt, Script(tokenizer, "a", "b"), tokenizer=tokenizer)
    with pytest.raises(ValueError, match="ends before its first turn"):
        chat.end()
    await chat.turn()
    with pytest.raises(ValueError, match=r"no message was added since the last turn: call chat\.add"):
        await chat.turn()
    with pytest.raises(
        ValueError, match=r"row 1: .*rendered 'user\\nque.* 'system\\n.*: the environment's system_prompt is"
    ):
        Chat(prompt, Script(tokenizer), tokenizer=tokenizer, system_prompt="be brief")
    with pytest.raises(ValueError, match=r"row 1: .*: give both the same tokenizer, system_prompt, tools"):
        Chat(prompt, Script(tokenizer), tokenizer=tokenizer, tools=[TOOL])
    with pytest.raises(ValueError, match="turn_rewards must have one entry per turn, 1, got 2"):
        chat.end(turn_rewards=[0.0, 1.0])


async def test_own_messages_and_a_system_prompt():
    tokenizer = tokenizer_with("chatml")
    script = Script(tokenizer, "a")
    chat = Chat(prompt_of(tokenizer), script, tokenizer=tokenizer, messages=[user("x")], system_prompt="be brief")
    await chat.turn()
    assert tokenizer.decode(script.calls[0][0]).startswith(
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nx<"
    )


async def test_turn_rewards_are_at_the_ends_of_their_turns():
    tokenizer = tokenizer_with("qwen3")
    script = Script(tokenizer, "<think>\na\n</think>\n\nb", "c", "d")
    chat = Chat(prompt_of(tokenizer), script, tokenizer=tokenizer)
    for answer in (user("x"), tool("y"), None):
        await chat.turn()
        if answer:
            chat.add(answer)
    pieces = chat.end(turn_rewards=[1.0, 2.0, 4.0], score=7.0)
    assert len(pieces) == 2
    ends = [[(t, r) for t, r in zip(p.ids, p.token_rewards, strict=True) if r] for p in pieces]
    assert ends == [[(258, 1.0)], [(258, 2.0), (258, 4.0)]]
    assert pieces[1].token_rewards[-1] == 4.0
    assert [p.score for p in pieces] == [None, 7.0]


def test_vision_models_are_refused():
    class TinyVLProcessor:
        image_processor, tokenizer = object(), object()

    with pytest.raises(ValueError, match=r"TinyVLProcessor is of a vision or audio model \(it has image_processor\)"):
        Chat(None, None, tokenizer=TinyVLProcessor())
    model = type("TinyVLModel", (), {"config": SimpleNamespace(vision_config={"depth": 2})})()
    with pytest.raises(ValueError, match=r"TinyVLModel.*vision_config.*take the tokenizer"):
        refuse_vision(model)
    refuse_vision(tokenizer_with("chatml"))
    tokenizer = tokenizer_with("chatml")
    parts = [{"type": "text", "text": "what is it?"}, {"type": "image", "image": "x.png"}]
    with pytest.raises(ValueError, match="role 'user' shows an image, and the model reads text only"):
        Chat(prompt_of(tokenizer), None, tokenizer=tokenizer, messages=[{"role": "user", "content": parts}])


async def test_text_parts_of_a_message_are_joined():
    parts = [{"type": "text", "text": "7"}, {"type": "text", "text": "8"}]
    joined, apart = [await talk("chatml", ["a", "b"], [[tool(content)]]) for content in ("78", parts)]
    assert apart[1] == joined[1]
    with pytest.raises(ValueError, match="of role 'tool' shows an image, and the model reads text only"):
        await talk("chatml", ["a", "b"], [[tool([{"type": "image", "image": "x.png"}])]])
