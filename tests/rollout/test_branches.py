"""The calls of a program as a tree of turns: what is continued, what branches, and what is found re-rendered."""

import asyncio
from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import Script, check_tree, prompt_of, tokenizer_with

from rlkit.agents.branches import Branches
from rlkit.data import episode_images
from rlkit.data.chat import render, render_text
from rlkit.data.episode_images import EpisodeImages
from rlkit.packing import pack
from rlkit.parallel.forest import forest
from rlkit.rollout.envs.tools import hermes_calls
from rlkit.types import Completion

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def tool(text):
    return {"role": "tool", "content": text, "tool_call_id": "x"}


def calling(arguments):
    return [{"id": "other", "type": "function", "function": {"name": "add", "arguments": arguments}}]


def episode(*turns, template="chatml"):
    tokenizer = tokenizer_with(template)
    script = Script(tokenizer, *turns)
    return Branches(prompt_of(tokenizer), script, tokenizer=tokenizer, parse=hermes_calls), script


def ended(branches, script):
    pieces = branches.end(reward=1.0)
    check_tree(pieces, script.calls)
    assert pieces[-1].info["metrics"] == {
        "agent/branches": len(pieces) - 1, "agent/rerendered": branches.num_rerendered,
    }  # fmt: skip
    return pieces


async def test_a_conversation_that_goes_on_is_one_piece():
    branches, script = episode(" a\n", CALL, "<think>\nhm\n</think>\n\nc", "d")
    told = [user("q")]
    await branches.reply(told)
    told += [said("a"), user("x")]  # white space aside
    await branches.reply(told)
    told += [said("", tool_calls=calling({"b": 2, "a": 1})), tool("3")]  # another order, another id
    await branches.reply(told)
    told += [said("<think>hm</think>c"), user("y")]
    await branches.reply(told)
    (piece,) = ended(branches, script)
    assert piece.info["messages"] == [*told, said("d")]
    assert branches.num_rerendered == 0


CHANGED = {
    "other words": said("I add!" + CALL),
    "without its call": said("I add."),
    "another argument": said("I add.", tool_calls=calling({"a": 1, "b": 3})),
    "one call more": said("I add.", tool_calls=[*calling({"a": 1, "b": 2}), *calling({})]),
    "without its reasoning": said("I add." + CALL),
}


@pytest.mark.parametrize("changed", CHANGED)
async def test_a_turn_that_comes_back_changed_is_context(changed):
    """As what the program says, not as what the policy sampled."""
    branches, script = episode("<think>\nhm\n</think>\n\nI add." + CALL, "b")
    await branches.reply([user("q")])
    history = [user("q"), CHANGED[changed], tool("3")]
    await branches.reply(history)
    pieces = ended(branches, script)
    assert (len(pieces), branches.num_rerendered) == (2, 1)
    tokenizer = tokenizer_with("chatml")
    assert pieces[1].prompt_ids == render(tokenizer, history, add_generation_prompt=True)


async def test_an_edited_result_branches_after_the_last_turn_before_it():
    """The turn after the edit was sampled in another context: it is read as text, and counted."""
    branches, script = episode("one", "two", "three")
    await branches.reply([user("q")])
    await branches.reply([user("q"), said("one"), user("long text")])
    await branches.reply([user("q"), said("one"), user("cleared"), said("two"), user("z")])
    first, second = ended(branches, script)
    assert branches.num_rerendered == 1
    shared = [*first.prompt_ids, *first.ids[: len(script.calls[0][1].ids)]]
    assert second.prompt_ids[: len(shared)] == shared
    assert second.ids == script.calls[2][1].ids


async def test_an_earlier_turn_is_continued_beside_the_later_ones():
    branches, script = episode("one", "two", "other", "end")
    first = [user("q"), said("one")]
    await branches.reply(first[:1])
    await branches.reply([*first, user("x")])
    await branches.reply([*first, user("y")])
    await branches.reply([*first, user("x"), said("two"), user("z")])
    pieces = ended(branches, script)
    lengths = [len(out.ids) for _, out in script.calls]
    assert [sum(p.mask) for p in pieces] == [lengths[2], lengths[0] + lengths[1] + lengths[3]]
    assert branches.num_rerendered == 0
    assert pieces[-1].info["messages"][-1] == said("end")


async def test_examples_of_the_program_are_not_turns_of_the_policy():
    branches, script = episode("a", "b")
    shots = [user("1?"), said("1"), user("2?")]
    await branches.reply(shots)
    await branches.reply([{"role": "system", "content": "another"}, *shots])
    assert (len(ended(branches, script)), branches.num_rerendered) == (2, 0)


async def test_other_tools_are_another_context():
    branches, script = episode("a", "b", template="qwen3")
    await branches.reply([user("q")])
    await branches.reply([user("q"), said("a"), user("x")], tools=TOOLS)
    assert (len(ended(branches, script)), branches.num_rerendered) == (2, 1)


async def test_reasoning_may_come_back_apart():
    branches, script = episode("<think>\nhm\n</think>\n\n" + CALL, "b", template="qwen3")
    turn = said("", reasoning_content="hm", tool_calls=calling({"a": 1, "b": 2}))
    await branches.reply([user("q")], tools=TOOLS)
    await branches.reply([user("q"), turn, tool("3")], tools=TOOLS)
    assert (len(ended(branches, script)), branches.num_rerendered) == (1, 0)


async def test_a_template_that_rewrites_history_is_counted():
    """Qwen 3 drops the reasoning of past turns when the user speaks."""
    branches, script = episode("<think>\nhm\n</think>\n\na", "b", template="qwen3")
    await branches.reply([user("q")])
    await branches.reply([user("q"), said("<think>\nhm\n</think>\n\na"), user("x")])
    assert (len(ended(branches, script)), branches.num_rerendered) == (2, 1)


async def test_calls_at_once_that_continue_one_turn():
    branches, script = episode("one", "a", "b", "c")

    async def slow(prompt_ids, *, max_new_tokens=None):
        await asyncio.sleep(0)
        return await script(prompt_ids)

    branches._sample = slow
    await branches.reply([user("q")])
    await asyncio.gather(*(branches.reply([user("q"), said("one"), user("x")]) for _ in range(3)))
    pieces = ended(branches, script)
    assert [sum(p.mask) for p in pieces] == [6, 2, 2]


async def test_turn_rewards_go_to_the_branch_of_their_turn():
    branches, _ = episode("one", "two", "three")
    for messages in ([user("q")], [user("other")], [user("q"), said("one"), user("x")]):
        await branches.reply(messages)
    other, main = branches.end(turn_rewards=[1.0, 2.0, 3.0])
    assert [r for r in other.token_rewards if r] == [2.0]
    assert [r for r in main.token_rewards if r] == [1.0, 3.0]
    assert main.info["num_turns"] == 3
    with pytest.raises(ValueError, match="one entry per turn, 3, got 1"):
        branches.end(turn_rewards=[1.0])


async def test_turn_rewards_are_in_the_order_of_the_calls_whichever_ends_first():
    branches, script = episode("c", "b", "a")
    waits = iter([3, 2, 1])

    async def slow(prompt_ids, *, max_new_tokens=None):
        for _ in range(next(waits)):
            await asyncio.sleep(0.01)
        return await script(prompt_ids)

    branches._sample = slow
    said = await asyncio.gather(*(branches.reply([user("q")]) for _ in range(3)))  # the choices of a request
    pieces = branches.end(turn_rewards=[float(ord(turn.turn.text)) for turn in said])
    trained = {chr(p.ids[0]): [r for r in p.token_rewards if r] for p in pieces}
    assert trained == {text: [float(ord(text))] for text in "abc"}


async def test_a_stop_string_ends_the_text_and_stays_in_the_tokens():
    tokenizer = tokenizer_with("chatml")
    ids = tokenizer.encode("act\nObservation:", add_special_tokens=False)
    branches, script = episode(Completion(ids, [-1.0] * len(ids), [0] * len(ids), "stop"), "b")
    asked = []

    async def sample(prompt_ids, **limits):
        asked.append(limits)
        return await script(prompt_ids)

    branches._sample = sample
    turn = (await branches.reply([user("q")], stop=("Observation:",))).turn
    await branches.reply([user("q"), said(turn.text), user("Observation: 5")])
    assert (turn.text, asked[0]["stop"], "stop" in asked[1]) == ("act\n", ("Observation:",), False)
    (piece,) = ended(branches, script)
    assert piece.ids[: len(ids)] == ids
    assert piece.ids[len(ids) : len(ids) + 1] == tokenizer.encode("<|im_end|>")


words = st.text("ab c", min_size=1, max_size=6)
steps = st.lists(
    st.tuples(
        st.integers(0, 30),  # the conversation to go on from, of those so far
        st.sampled_from(["continue", "continue", "strip", "change", "drop", "cut", "retry", "tools"]),
        words,
        st.booleans(),  # whether the call is made while the one before it runs
    ),
    max_size=12,
)


@pytest.mark.slow_cases("chatml", "qwen3")
@pytest.mark.parametrize("template", ["chatml", "qwen3", "llama3"])
@given(steps=steps, said_first=st.lists(words, min_size=13, max_size=13))
def test_any_program_is_captured_exactly(template, steps, said_first):
    """Whatever a program makes of the conversations so far: each turn trains once, after what it was sampled in."""
    tokenizer = tokenizer_with(template)
    turns = [f"<think>\n{w}\n</think>\n\n{w}" if i % 3 == 2 else w for i, w in enumerate(said_first)]
    script = Script(tokenizer, *turns, end={"llama3": "<|eot_id|>"}.get(template, "<|im_end|>"))

    async def sample(prompt_ids, **limits):
        await asyncio.sleep(0)  # so that calls at once overlap
        return await script(prompt_ids, **limits)

    branches = Branches(prompt_of(tokenizer), sample, tokenizer=tokenizer, parse=hermes_calls)

    async def ask(history, tools=None):
        turn = (await branches.reply(history, tools=tools)).turn
        told = render_text(tokenizer, history, add_generation_prompt=True, tools=tools)
        read = [tokenizer.decode(context) for context, _ in script.calls]
        assert "".join(told.split()) in ["".join(text.split()) for text in read]
        return [*history, said(turn.text)]

    async def program():
        known = [await ask([user("question")])]
        waiting = []
        for which, what, word, at_once in steps:
            history = [*known[which % len(known)]]
            match what:
                case "strip":
                    history[-1] = said(history[-1]["content"].strip())
                case "change":
                    history[-1] = said(history[-1]["content"] + word)
                case "drop":
                    del history[-1]
                case "cut":
                    history = history[-2:]
                case "retry":
                    history = history[:-1] or history
            more = [] if what == "retry" else [user(word)]
            waiting.append(asyncio.ensure_future(ask([*history, *more], TOOLS if what == "tools" else None)))
            if not at_once:
                known += await asyncio.gather(*waiting)
                waiting = []
        await asyncio.gather(*waiting)

    asyncio.run(program())
    pieces = ended(branches, script)
    assert branches.num_turns == len(steps) + 1
    assert sum(sum(p.mask) for p in pieces) == sum(len(out.ids) for _, out in script.calls)


async def test_branches_are_forwarded_once_and_trained_once():
    """The forest of a batch has each shared token once; each sampled token is in one place of the loss."""
    branches, script = episode(*("word " * 8 for _ in range(6)))
    history = [user("question " * 20)]
    for _ in range(3):
        turn = (await branches.reply(history)).turn
        await branches.reply([*history, said(turn.text), user("aside")])
        history += [said(turn.text), user("more")]
    pieces = ended(branches, script)
    batch = pack([pieces])
    tree = forest(batch)
    documents = [p.prompt_ids + p.ids for p in pieces]
    distinct = {tuple(d[: i + 1]) for d in documents for i in range(len(d) - 1)}
    assert sum(s.length for s in tree.spans) <= len(distinct) + len(pieces)
    assert int(batch.mask.sum()) == sum(len(out.ids) for _, out in script.calls)


async def test_choices_that_differ_in_white_space_alone_are_continued_each_by_itself():
    branches, script = episode("if x:\n    y()", "if x:\ny()", "a", "b")
    for _ in range(2):
        await branches.reply([user("q")])
    for text in ("if x:\n    y()", "if x:\ny()"):
        await branches.reply([user("q"), said(text), user("go on")])
    pieces = ended(branches, script)
    assert [list(piece.ids[: len(script.calls[i][1].ids)]) for i, piece in enumerate(pieces)] == [
        script.calls[i][1].ids for i in range(2)
    ]
    assert (len(pieces), branches.num_rerendered) == (2, 0)


async def test_a_template_without_the_role_developer_shows_its_message_as_the_systems():
    branches, script = episode("a")
    await branches.reply([{"role": "developer", "content": "Be brief."}, user("q")])
    expected = [{"role": "system", "content": "Be brief."}, user("q")]
    assert script.calls[0][0] == render(tokenizer_with("chatml"), expected, add_generation_prompt=True)


def test_what_a_template_leaves_out_is_named_once(caplog):
    episode_images._warn_once.cache_clear()
    tokenizer = deepcopy(tokenizer_with("chatml"))
    tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}\n{% endfor %}"
    shown = EpisodeImages(tokenizer)
    told = [{"role": "system", "content": "Use verbs."}, user("q"), said("", tool_calls=calling({})), tool("three")]
    for _ in range(2):
        shown.render(told, tools=TOOLS, template_args=None)
    left_out = [line.split("leaves out ")[1].split(",")[0] for line in caplog.messages]
    assert left_out == ["a message of role 'system'", "earlier tool calls", "a message of role 'tool'", "the tools"]
    caplog.clear()
    EpisodeImages(tokenizer_with("qwen3")).render(told, tools=TOOLS, template_args=None)
    assert not caplog.messages
