"""Context compaction: no context beyond the limit, each token trained where it was sampled, an unbiased gradient."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scripted import END, Script, check_exact, prompt_of, tokenizer_with

from rlkit import pack, with_advantages
from rlkit.advantages import leave_one_out
from rlkit.data.chat import stop_token_ids
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.loops.updates import per_length
from rlkit.losses import reinforce
from rlkit.model.forward import forward, prepare_model
from rlkit.rewards.episodes import named
from rlkit.rollout import rollout
from rlkit.rollout.calling import _reported
from rlkit.rollout.engines.local import LocalEngine
from rlkit.rollout.envs.chat import Chat
from rlkit.rollout.envs.compaction import compacted
from rlkit.rollout.envs.gym import gym_env
from rlkit.rollout.groups import sample_group
from rlkit.rollout.limits import limited
from rlkit.settings import SamplingParams
from rlkit.types import Completion

ASK = {"ask": "Summarize.", "carry": "Summary: "}


def reading(tokenizer, pages, **ends):
    """An environment that answers each turn with the next page."""

    async def env(prompt, sample):
        chat, left = Chat(prompt, sample, tokenizer=tokenizer), iter(pages)
        async for _ in chat:
            if (page := next(left, None)) is None:
                break
            chat.add(page)
        return chat.end(**(ends or {"reward": 2.0}))

    return env


async def played(name, pages, said, *, at=170, **ends):
    tokenizer = tokenizer_with(name)
    script = Script(tokenizer, *said, end=END[name])
    env = compacted(reading(tokenizer, pages, **ends), at=at, max_new_tokens=16, **ASK)
    pieces = await env(prompt_of(tokenizer), script)
    check_exact(pieces, script.calls)
    return tokenizer, pieces, script.calls


@pytest.mark.parametrize(("name", "at"), [("chatml", 170), ("qwen3", 170), ("llama3", 170), ("mistral", 155)])
async def test_the_policy_goes_on_from_its_summary_the_last_turn_and_what_is_new(name, at):
    pages = [f"page {i} " + "." * 40 for i in range(4)]
    said = ["turn 0", "turn 1", "<think>so</think> first", "turn 2", "second", "turn 3", "third", "turn 4"]
    tokenizer, pieces, calls = await played(name, pages, said, at=at)
    texts = [tokenizer.decode(p.prompt_ids) for p in pieces]
    assert [[f"turn {i}" in text for i in range(5)] for text in texts] == [
        [False] * 5, *([j == i for j in range(5)] for i in (1, 2, 3)),
    ]  # fmt: skip
    assert [[f"page {i}" in text for i in range(4)] for text in texts] == [
        [False] * 4, *([j == i for j in range(4)] for i in (1, 2, 3)),
    ]  # fmt: skip
    for text, summary in zip(texts[1:], ["first", "second", "third"], strict=True):
        assert text.count("Summary: ") == text.count(f"question\n\nSummary: {summary}") == 1
        assert "Summarize." not in text
    trained = [i for p in pieces for i, m in zip(p.ids, p.mask, strict=True) if m]
    assert trained == [i for _, out in calls for i in out.ids]
    assert max(len(context) + 16 for context, _ in calls) <= at
    info = pieces[-1].info
    assert (info["num_turns"], info["summaries"]) == (5, ["first", "second", "third"])
    assert info["metrics"] == {"compactions": 3}
    assert [m["content"] for m in info["messages"]] == [
        "question\n\nSummary: third", "turn 3", pages[3], "turn 4",
    ]  # fmt: skip


async def test_a_conversation_that_fits_is_not_compacted():
    _, (piece,), calls = await played("chatml", ["a", "b"], ["x", "y", "z"])
    assert len(calls) == 3
    assert piece.info["metrics"] == {"compactions": 0}


async def test_a_summary_is_asked_for_when_it_and_the_turn_would_not_fit():
    tokenizer, _, calls = await played("chatml", ["." * 40] * 2, ["x", "y", "z"], at=999)
    asked = tokenizer.encode("\n<|im_start|>user\nSummarize.<|im_end|>\n<|im_start|>assistant\n")
    needed = len(calls[-1][0]) + len(asked) + 2 * 16
    for at, num_pieces in ((needed, 1), (needed - 1, 2)):
        _, pieces, _ = await played("chatml", ["." * 40] * 2, ["x", "y", "z", "z"], at=at)
        assert len(pieces) == num_pieces


@given(
    at=st.integers(80, 200),
    pages=st.lists(st.integers(0, 90), max_size=8),
    lens=st.lists(st.integers(1, 24), min_size=20, max_size=20),
)
async def test_no_context_with_its_tokens_exceeds_the_limit(at, pages, lens):
    tokenizer, left, calls = tokenizer_with("chatml"), iter(lens), []

    async def sample(prompt_ids, *, max_new_tokens=None, stop=(), images=None):
        num = next(left)
        ids = [*b"x" * num, tokenizer.eos_token_id][:max_new_tokens]
        cut = "length" if len(ids) <= num else "stop"
        calls.append((prompt_ids, Completion(ids, [-1.0 * len(calls)] * len(ids), [0] * len(ids), cut)))
        return calls[-1][1]

    env = compacted(reading(tokenizer, ["p" * n for n in pages]), at=at, max_new_tokens=20, **ASK)
    pieces = await env(prompt_of(tokenizer), sample)
    check_exact(pieces, calls)
    assert max(len(context) + len(out.ids) for context, out in calls) <= at
    assert max(len(p.prompt_ids) + len(p.ids) for p in pieces) <= at
    assert max(len(out.ids) for _, out in calls) <= 20
    assert sum(map(len, (out.ids for _, out in calls))) == sum(sum(p.mask) for p in pieces)
    cut = calls[-1][1].finish_reason == "length"
    assert cut <= pieces[-1].truncated
    if not pieces[-1].truncated:
        assert len(pieces) == pieces[-1].info["metrics"]["compactions"] + 1 == len(calls) - len(pages)


async def test_a_summary_that_is_cut_ends_the_episode():
    cut = Completion([*b"ab"], [-1.0, -2.0], [3, 3], "length")
    _, (piece,), _ = await played("chatml", ["." * 40] * 2, ["x", "y", cut], at=150)
    assert piece.truncated
    assert piece.info["summaries"] == []
    assert sum(piece.mask) == 6  # its tokens are trained


async def test_rewards_of_turns_leave_summaries_out_and_are_reported(caplog):
    _reported.clear()
    ends = {"turn_rewards": [1.0, 2.0, 4.0]}
    _, pieces, _ = await played("chatml", ["." * 40] * 2, ["x", "y", "note", "z"], at=150, **ends)
    paid = [[r for r in p.token_rewards if r] for p in pieces]
    assert paid == [[1.0, 2.0], [4.0]]
    assert pieces[0].token_rewards[-1] == 0.0  # the summary's end
    assert "gives rewards of turns: with turn_returns and gigpo a summary gets those of later turns" in caplog.text


async def test_other_wrappers_may_stand_inside_and_outside():
    tokenizer = tokenizer_with("chatml")
    env = named(reading(tokenizer, ["." * 40] * 3, reward=0.0), reading)
    for wrapped in (limited(compacted(env, at=150, max_new_tokens=16, **ASK), max_turns=4),
                    compacted(limited(env, max_turns=4), at=150, max_new_tokens=16, **ASK)):  # fmt: skip
        *_, end = await wrapped(prompt_of(tokenizer), Script(tokenizer, "x", "y", "note", "z"))
        assert end.info["summaries"] == ["note"]
        assert end.truncated  # a summary counts as a turn of `limited`


async def test_what_cannot_be_compacted_is_refused():
    tokenizer = tokenizer_with("chatml")

    class Tokens:
        def reset(self):
            return [1, 2]

        def step(self, _turn):
            return [3], 0.0, True

    env = compacted(gym_env(lambda _: Tokens(), tokenizer=tokenizer), at=99, max_new_tokens=9)
    with pytest.raises(ValueError, match="the environment has no `Chat`"):
        await env(prompt_of(tokenizer), Script(tokenizer, "x"))
    with pytest.raises(ValueError, match=r"at must be above 2 \* max_new_tokens, .*, got 18 and 9"):
        compacted(env, at=18, max_new_tokens=9)


async def test_log_probs_of_all_pieces_are_the_trainers():
    tokenizer = tiny_tokenizer()
    model = prepare_model(tiny_model(tokenizer, hidden=32, layers=2, seed=1))
    params = SamplingParams(max_new_tokens=12, stop_token_ids=(*stop_token_ids(tokenizer), *range(128, 256)))
    env = compacted(reading(tokenizer, ["." * 30] * 4), at=150, max_new_tokens=12, **ASK)
    async with LocalEngine(model, max_len=150) as engine:
        prompts = [prompt_of(tokenizer, text) for text in ("a", "b")]
        groups = await rollout(prompts, generate=engine.generate, params=params, group_size=4, seed=0, env=env)
    assert sum(t.continues for group in groups for t in group) > 2
    batch = pack(groups)
    with torch.no_grad():
        out = forward(model, batch)
    assert float((out.logp - batch.rollout_logp).abs().where(batch.mask, 0).max()) < 1e-5


# A game of tabular logits, small enough to list all of its episodes. Its first action chooses between an episode of one
# piece and one with a summary.


def tabular_logp(weights, context):
    """Log-probs of the two actions, the bytes 0 and 1: every token of the context counts, by its place."""
    places = 0.97 ** torch.arange(len(context) - 1, -1, -1, dtype=torch.float64)
    return (places @ weights[list(context)]).log_softmax(-1)


async def game(prompt, sample, tokenizer):
    chat = Chat(prompt, sample, tokenizer=tokenizer)
    first = await chat.turn()
    chat.add("go")
    await chat.turn()
    chat.add("long " * 4 if first.ids == [0] else "on")
    await chat.turn()
    return chat.end(reward=0.0)


async def episode(env, prompt, path, weights):
    """The pieces of the episode in which the policy takes the actions of `path`, their number, and log p of them."""
    total, left = torch.zeros((), dtype=torch.float64), iter(path)

    async def sample(prompt_ids, *, max_new_tokens=None, stop=(), images=None):
        nonlocal total
        action = next(left)
        logp = tabular_logp(weights, prompt_ids)[action]
        total = total + logp
        return Completion([action], [logp.item()], [0], "stop")

    pieces = await sample_group(prompt, [sample], env=env)
    return pieces, total


def surrogate(weights, groups):
    """The loop's policy gradient loss of a batch of groups, with the log-probs of its own packed tokens."""
    batch = with_advantages(pack(groups), leave_one_out)
    logp = torch.zeros(batch.num_tokens, dtype=torch.float64)
    for i in range(batch.num_seqs):
        g, start, end = int(batch.prefix_ids[i]), int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1])
        prefix = batch.prefix_tokens[batch.prefix_cu[g] : batch.prefix_cu[g + 1]].tolist()
        for t in range(start, end):
            if batch.mask[t]:
                context = prefix + batch.tokens[start : t + 1].tolist()
                logp = logp.index_put((torch.tensor(t),), tabular_logp(weights, context)[batch.targets[t]])
    return (per_length(batch, max_length=1) * reinforce(logp, batch.advantages)).sum()


@pytest.mark.slow
@pytest.mark.parametrize("trains_summaries", [True, False])
async def test_the_expected_gradient_is_that_of_the_expected_reward(trains_summaries):
    """All pairs of episodes, weighted by their probabilities, against autograd of sum_paths p(path) R(path)."""
    tokenizer = tokenizer_with("chatml")
    prompt, generator = prompt_of(tokenizer), torch.Generator().manual_seed(0)
    weights = torch.randn(len(tokenizer), 2, dtype=torch.float64, generator=generator).div(4).requires_grad_()
    env = compacted(partial(game, tokenizer=tokenizer), at=60, max_new_tokens=1, ask="?", carry="! ")
    paths = [*itertools.product([0], [0, 1], [0, 1], [0, 1]), *itertools.product([1], [0, 1], [0, 1])]
    rewards = torch.rand(len(paths), dtype=torch.float64, generator=generator).tolist()
    played = [await episode(env, prompt, path, weights) for path in paths]
    assert [len(pieces) for pieces, _ in played] == [2] * 8 + [1] * 4
    probs = torch.stack([logp for _, logp in played]).exp()
    torch.testing.assert_close(probs.sum(), torch.ones((), dtype=torch.float64))
    (expected,) = torch.autograd.grad(probs @ torch.tensor(rewards, dtype=torch.float64), weights, retain_graph=True)

    paid = [
        [_paid(t, r, trains_summaries or len(pieces) == 1 or t.continues) for t in pieces]
        for (pieces, _), r in zip(played, rewards, strict=True)
    ]
    p = probs.tolist()  # a pair comes in two orders; an episode paired with itself has advantage 0
    pairs = itertools.combinations(range(len(paths)), 2)
    loss = sum(2 * p[i] * p[j] * surrogate(weights, [[*paid[i], *paid[j]]]) for i, j in pairs)
    got = -torch.autograd.grad(loss, weights)[0]
    assert torch.allclose(got, expected, rtol=1e-5, atol=1e-8) == trains_summaries


def _paid(trajectory, reward, trains_summary):
    """The trajectory with its reward; without its last turn, the summary, where that does not train."""
    mask = trajectory.mask if trains_summary else [*trajectory.mask[:-1], False]
    return replace(trajectory, reward=reward, mask=mask)
