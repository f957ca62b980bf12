"""Routing replay: the engine's experts reach the trainer's routers, which weigh them by their own scores."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from model_types import filled
from routed import own_experts

from rlkit.losses.kl import k3
from rlkit.model.forward import forward, make_policy, prepare_model
from rlkit.model.heads import load_value_model, values
from rlkit.model.routing import Chosen, num_experts, own_routing, replays, routers
from rlkit.model.teachers import LocalTeacher
from rlkit.packing import microbatches, pack, select
from rlkit.rollout.engines.local import LocalEngine
from rlkit.rollout.envs.turns import Turns
from rlkit.rollout.stream import NOTHING, Journal, joined, resumable
from rlkit.types import Completion, SamplingParams, Trajectory

FAMILIES = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "glm4_moe", "qwen3_5_moe_text", "nemotron_h"]


def built(model_type, std=0.1):
    return filled(model_type, seed=1, std=std)


def drawn(model, *, experts=True):
    """Groups with random tokens and random experts, those of a prompt equal for all its samples."""
    rng = np.random.default_rng(0)
    layers, count = len(routers(model)), num_experts(model.config)
    choices = lambda n: np.stack([rng.permutation(count)[:2] for _ in range(n * layers)]).reshape(n, layers, 2)
    groups = []
    for prompt_len, lens in ((6, (4, 9)), (1, (5,)), (3, (2, 7))):
        prompt, of_prompt, group = rng.integers(3, 60, prompt_len).tolist(), choices(prompt_len), []
        for n in lens:
            rows = np.concatenate((of_prompt, choices(n)[1:])).astype(np.int16)
            t = Trajectory(prompt, rng.integers(3, 60, n).tolist(), [True] * n, [0.0] * n, [0] * n)
            group.append(replace(t, experts=rows) if experts else t)
        groups.append(group)
    return groups


async def sample(engine, prompts, *, num_tokens):
    params = [SamplingParams(max_new_tokens=num_tokens, seed=i) for i in range(len(prompts))]
    return await asyncio.gather(*(engine.generate(p, params=x) for p, x in zip(prompts, params, strict=True)))


def trajectories(prompts, outs):
    found = zip(prompts, outs, strict=True)
    return [[Trajectory(p, o.ids, [True] * len(o.ids), o.logp, o.versions, experts=o.experts)] for p, o in found]


@pytest.mark.slow_cases("glm4_moe", "nemotron_h", "qwen3_5_moe_text", "gpt_oss")
@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_engine_reports_what_its_routers_chose_and_the_trainer_replays_it(model_type):
    model = built(model_type)
    engine = LocalEngine(model, max_batch=3, max_len=64, eos_token_ids=())
    prompts = [[5, 6, 7, 8, 9], [5, 6, 7, 8, 9], [11], [13, 14, 15], [5, 6, 7, 8, 9]]
    outs = asyncio.run(sample(engine, prompts, num_tokens=6))
    for prompt, out in zip(prompts, outs, strict=True):
        assert out.experts.dtype == np.int16
        found, own = np.sort(out.experts, -1), np.sort(own_experts(model, [*prompt, *out.ids[:-1]]), -1)
        assert found.shape == own.shape
        assert (found == own).mean() > 0.97  # but for ties
    batch = pack(trajectories(prompts, outs))
    off = forward(prepare_model(model), batch).logp - batch.rollout_logp
    assert off[batch.mask].abs().max() < 1e-4


@pytest.mark.slow_cases("nemotron_h", "qwen3_5_moe_text")
@pytest.mark.parametrize("model_type", FAMILIES)
def test_other_experts_are_used_with_shared_prompts_or_not_and_have_gradients(model_type):
    model = prepare_model(built(model_type))
    batches = [pack(drawn(model), share_prompts=share) for share in (True, False)]
    one, two = (forward(model, batch).logp[batch.mask] for batch in batches)
    torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)
    free = pack(drawn(model, experts=False))
    assert (one - forward(model, free).logp[free.mask]).abs().max() > 1e-3
    one.sum().backward()
    for router in routers(model):
        assert any(p.grad is not None and p.grad.abs().max() > 0 for p in router.parameters())


def test_the_weights_are_the_trainers_scores_of_the_given_experts():
    """By hand: Qwen3's softmax over all experts, renormalised over the chosen ones; -1 is the router's own choice."""
    model = built("qwen3_moe")
    router = routers(model)[0]
    hidden = torch.randn(5, router.weight.shape[1], generator=torch.Generator().manual_seed(0))
    given, own = torch.tensor([[3, 0], [1, 2], [2, 3], [-1, -1], [0, 1]]), router(hidden)[2]
    with Chosen(num_experts(model.config), given):
        _, weights, indices = router(hidden)
    want = torch.where(given < 0, own, given)
    assert torch.equal(indices, want)
    scores = (hidden @ router.weight.T).softmax(-1).gather(-1, want)
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True) if router.norm_topk_prob else scores)


def test_replay_brings_the_log_probs_of_another_precision_closer():
    """The rollout in bf16, the trainer in fp32: k3 falls severalfold (arXiv:2510.11370)."""
    model = built("qwen3_moe", std=0.15)
    engine = LocalEngine(copy.deepcopy(model).bfloat16(), max_batch=32, max_len=64, eos_token_ids=())
    prompts = [[3 + i % 7, 9, 4] for i in range(32)]
    outs = asyncio.run(sample(engine, prompts, num_tokens=40))
    batch, found = pack(trajectories(prompts, outs)), []
    prepare_model(model)
    for used in (batch, replace(batch, experts=None, prefix_experts=None)):
        with torch.no_grad():
            found.append(float(k3(forward(model, used).logp, batch.rollout_logp)[batch.mask].mean()))
    assert found[0] < 0.5 * found[1], found


def test_experts_follow_their_tokens_through_pack_select_and_microbatches():
    samples = drawn(built("qwen3_moe"))
    batch = pack(samples)
    assert batch.experts.shape == (batch.num_tokens, 2, 2)
    flat = [t for group in samples for t in group]
    for part in (batch, select(batch, [3, 0, 4]), *(micro for (micro,) in microbatches((batch,), max_tokens=20))):
        ends = part.cu_seqlens.tolist()
        for p, a, b in zip(part.prefix_ids.tolist(), ends, ends[1:]):
            rows = slice(*part.prefix_cu[p : p + 2].tolist())
            ids = [*part.prefix_tokens[rows].tolist(), *part.tokens[a:b].tolist()]
            (t,) = [t for t in flat if [*t.prompt_ids, *t.ids[:-1]] == ids]
            assert np.array_equal(torch.cat((part.prefix_experts[rows], part.experts[a:b])).numpy(), t.experts)


def test_what_is_not_known_is_left_to_the_trainer():
    model = prepare_model(built("qwen3_moe"))
    known, unknown = drawn(model), drawn(model, experts=False)
    mixed, free = pack([known[0], unknown[1], known[2]]), pack([unknown[0], unknown[1], unknown[2]])
    one = slice(*mixed.cu_seqlens[2:4].tolist())
    assert (mixed.experts[one] == -1).all()
    torch.testing.assert_close(forward(model, mixed).logp[one], forward(model, free).logp[one], atol=1e-5, rtol=1e-5)
    cut = Trajectory([3, 4], [5, 6], [True] * 2, [0.0] * 2, [0] * 2, truncated=True, experts=known[1][0].experts[:3])
    assert (pack([[cut]]).experts[-1] == -1).all()  # the engine has not read the last token
    other = Trajectory([3, 4], [5], [True], [0.0], [0], experts=np.zeros((2, 1, 2), np.int16))
    with pytest.raises(ValueError, match=r"experts of \[layers, k\] \[1, 2\] and \[2, 2\]"):
        pack([known[0], [other]])


def test_experts_of_all_layers_may_be_given_where_some_are_dense():
    """As SGLang reports them: DeepSeek's first layer is dense."""
    model = prepare_model(built("deepseek_v3"))
    assert len(routers(model)) == 1 < len(model.model.layers) == 2
    batch = pack(drawn(model))
    pad = lambda x: torch.cat((torch.zeros_like(x), x), 1)
    wide = replace(batch, experts=pad(batch.experts), prefix_experts=pad(batch.prefix_experts))
    assert torch.equal(forward(model, wide).logp, forward(model, batch).logp)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda x: x[..., :1], r"`experts` must .* MixtralTopKRouter chooses k = 2 of 4, got \[\d+, 2, 1\]"),
        (lambda x: torch.cat((x, x[..., :1]), -1), r"k of the model: .* k = 2 of 4, got \[\d+, 2, 3\]"),
        (lambda x: x[:, :1], r"with 2 layers for model type 'mixtral', got \[\d+, 1, 2\]"),
        (lambda x: torch.cat((x, x[:, :1]), 1), r"with 2 layers for model type 'mixtral', got \[\d+, 3, 2\]"),
        (lambda x: x + 5 * (x == x.max()), "`experts` must be below 4, .* got 0 to 8"),
        (lambda x: x - 2, "or -1 .unknown.: got -2 to 1"),
    ],
    ids=["k too small", "k too large", "a layer missing", "a layer more", "an id too high", "an id too low"],
)  # fmt: skip
def test_experts_that_are_not_the_models_are_refused(change, match):
    model = prepare_model(built("mixtral"))
    batch = pack(drawn(model))
    with pytest.raises(ValueError, match=match):
        forward(model, replace(batch, experts=change(batch.experts), prefix_experts=change(batch.prefix_experts)))


@pytest.mark.parametrize("model_type", ["phimoe", "qwen3"])
def test_a_model_that_replays_nothing_refuses_experts(model_type):
    batch = pack(drawn(built("mixtral")))
    model = prepare_model(built(model_type))
    with pytest.raises(ValueError, match=f"`experts`: model type '{model_type}' has no router that replays them"):
        forward(model, batch)
    assert not replays(model.config)
    assert forward(model, own_routing(batch)).logp.isfinite().all()


@pytest.mark.slow_cases("mixtral")
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3"])
def test_critics_and_teachers_choose_for_themselves(model_type, tmp_path):
    """They did not sample the batch, and may be dense."""
    model = built(model_type)
    model.save_pretrained(tmp_path)
    batch, free = (pack(drawn(built("mixtral"), experts=x)) for x in (True, False))
    teacher = LocalTeacher(make_policy(prepare_model(model)))
    assert torch.equal(teacher.logp(batch), forward(model, free).logp.detach())
    assert torch.equal(teacher.top_logp(batch, 2)[1], teacher.top_logp(free, 2)[1])
    assert torch.equal(teacher.hidden(batch)[0], teacher.hidden(free)[0])
    critic = load_value_model(tmp_path)
    torch.nn.init.normal_(critic.score.weight)
    found = values(critic, batch)
    assert found[batch.mask].all()
    assert torch.equal(found, values(critic, free))


def numbered(n, start=0):
    """[n, 2 layers, 2 choices], all equal to the token's place."""
    return np.broadcast_to((start + np.arange(n))[:, None, None], (n, 2, 2)).astype(np.int16)


def places(experts):
    return experts[:, 0, 0].tolist()


def test_pauses_turns_and_journals_keep_them(tmp_path):
    first = Completion([7, 8], [0.0] * 2, [0] * 2, "abort", numbered(4))  # after a prompt of 3
    second = Completion([9], [0.0], [1], "stop", numbered(5, start=100))
    assert places(joined(joined(NOTHING, first), second).experts) == [0, 1, 2, 3, 104]
    cut = resumable(first, SamplingParams(max_new_tokens=9, stop=("ab",)))
    assert (cut.ids, places(cut.experts)) == ([7], [0, 1, 2])
    assert joined(first, Completion([9], [0.0], [1], "stop")).experts is None

    async def main():
        found = [replace(first, finish_reason="stop"), Completion([9, 3], [0.0] * 2, [0] * 2, "stop", numbered(8, 50))]

        async def turn(_prompt_ids, *, max_new_tokens=None):
            return found.pop(0)

        episode = Turns([1, 2, 3], turn)
        await episode.sample()
        episode.append([4, 5])
        await episode.sample()
        (piece,) = episode.pieces(reward=1.0)
        assert places(piece.experts) == [0, 1, 2, 3, 54, 55, 56, 57]

        async def generate(prompt_ids, *, params, rid=None):
            return first if len(prompt_ids) == 3 else second

        params = SamplingParams(max_new_tokens=9, seed=4)
        await Journal(tmp_path, generate).generate([1, 2, 3], params=params)
        again = await Journal(tmp_path, generate, version=9).generate([1, 2, 3], params=params)
        assert (again.ids, places(again.experts)) == ([7, 8, 9], [0, 1, 2, 3, 104])

    asyncio.run(main())
