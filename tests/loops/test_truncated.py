"""Training on truncated samples: the mass that top-p and top-k kept, and an update that allows for what was cut."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import partial

import nightly
import numpy as np
import pytest
import torch

from rlkit.data.prompts import Prompt
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.loops.checks import check_support
from rlkit.loops.grpo import grpo
from rlkit.loops.rl import Task
from rlkit.loops.updates import PolicyLoss, grpo_update
from rlkit.model.forward import Policy, forward, prepare_model, with_kept_mass, with_ref_logp
from rlkit.packing import pack, select, unpack, with_streams, without_support
from rlkit.parallel.attention import as_inference
from rlkit.rewards.scoring import scorer
from rlkit.rollout.engines.local import LocalEngine
from rlkit.rollout.envs.turns import Turns
from rlkit.rollout.groups import rollout
from rlkit.rollout.stream import Journal, continue_aborted
from rlkit.scripts.args import Evaluation
from rlkit.scripts.engines import check_truncation
from rlkit.settings import Engines, Optim, Rollouts, SamplingParams, Schedule
from rlkit.testing import FakeEngine
from rlkit.types import Support, Trajectory

SIZES = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 64}
PROMPT = [5, 60, 7]


def small_model(seed=0):
    """Logits three times as wide as at random, so that a nucleus leaves something out."""
    model = prepare_model(tiny_model(tiny_tokenizer(), seed=seed, **SIZES))
    with torch.no_grad():
        model.lm_head.weight.mul_(3)
    return model


def own_probs(model, ids, temperature):
    """Next-token probabilities after every token, from transformers' own forward, in fp64."""
    with as_inference(model):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return (logits.double() / temperature).softmax(-1)


def kept_by_hand(p, params):
    """Ids that are kept: of falling probability, until top_k of them, until they have top_p together, or until one has
    less than min_p times the largest."""
    kept, mass = [], 0.0
    for i in p.argsort(descending=True).tolist():
        few = p[i] < params.min_p * p.max()
        if kept and (mass >= params.top_p or len(kept) == (params.top_k or len(p)) or few):
            break
        kept.append(i)
        mass += p[i].item()
    return kept


@pytest.mark.parametrize("limits", [{"top_p": 0.8}, {"top_k": 7}, {"min_p": 0.5}])
def test_kept_mass_is_what_the_sampler_kept(limits):
    model, params = small_model(), SamplingParams(max_new_tokens=4, temperature=0.7, **limits)
    samples = [Trajectory(PROMPT, ids, [True, False, True], [0.0] * 3, [0] * 3) for ids in ([9, 10, 11], [12, 13, 14])]
    batch = pack([samples])
    found = with_kept_mass(Policy(model), batch, params=params, max_tokens=5).kept_mass
    for i, sample in enumerate(samples):
        with torch.no_grad():
            p = own_probs(model, PROMPT + sample.ids, params.temperature)[len(PROMPT) - 1 : -1]
        true = [row[kept_by_hand(row, params)].sum().item() for row in p]
        assert found[3 * i : 3 * i + 3][batch.mask[:3]].tolist() == pytest.approx([true[0], true[2]], rel=1e-5)
        assert max(true) < 0.95
    assert with_kept_mass(Policy(model), batch, params=SamplingParams(max_new_tokens=4), max_tokens=5) is batch


@pytest.mark.slow_cases("limits2-0.5", "limits0-0.5")
@pytest.mark.parametrize("kl_coef", nightly.only([0.0, 0.5], 0.5))
@pytest.mark.parametrize("limits", [{"top_p": 0.6}, {"top_k": 5}, {"min_p": 0.2}])
def test_the_expected_gradient_under_truncated_sampling_is_that_of_the_whole_distribution(limits, kl_coef):
    """Every kept token once, its advantage times N times the probability with which it is drawn: the update's gradient
    is then its expectation, and must be that of sum over kept a of p(a) A(a) - kl_coef p(a) log(p(a) / ref(a))."""
    model, reference = small_model(), small_model(seed=1)
    params = SamplingParams(max_new_tokens=1, temperature=0.7, **limits)
    p, ref = own_probs(model, PROMPT, 0.7)[-1], own_probs(reference, PROMPT, 0.7)[-1].detach()
    kept = kept_by_hand(p.detach(), params)
    drawn = p.detach()[kept] / p.detach()[kept].sum()
    values = torch.linspace(-1, 2, len(kept), dtype=torch.float64)
    log_ratio = (p / ref).log()[kept].detach()
    objective = (p[kept] * values).sum() - kl_coef * (p[kept].detach() * log_ratio * p[kept].log()).sum()
    weights = list(model.parameters())
    true = torch.autograd.grad(-objective, weights)

    samples = [Trajectory(PROMPT, [a], [True], [p[a].log().item()], [0]) for a in kept]
    batch = pack([samples])
    policy = Policy(model, temperature=0.7)
    batch = with_ref_logp(partial(forward, reference, temperature=0.7), batch, max_tokens=64)
    batch = with_kept_mass(policy, batch, params=params, max_tokens=64)
    found = [torch.zeros_like(w) for w in weights]
    for i in range(len(kept)):  # one sample at a time: the mean over tokens is the sample itself
        one = pack([samples[i : i + 1]])
        streams = {name: getattr(batch, name)[i : i + 1] for name in ("ref_logp", "kept_mass")}
        one = with_streams(one, advantages=values[i : i + 1].float(), **streams)
        before = [w.detach().clone() for w in weights]
        grpo_update(
            one, policy=policy, optimizer=torch.optim.SGD(model.parameters()), loss=PolicyLoss(), rollouts=Rollouts(),
            optim=Optim(max_norm=1e9, max_tokens=64), lr=1.0, kl_coef=kl_coef, entropy_coef=0.0, seed=0,
        )  # fmt: skip
        with torch.no_grad():
            for total, w, old in zip(found, weights, before, strict=True):
                total += drawn[i] * (old - w)
                w.copy_(old)
    for got, want in zip(found, true, strict=True):
        assert (got - want).abs().max() <= 2e-4 * want.abs().max() + 1e-6


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]


def test_grpo_on_a_nucleus_logs_what_was_kept_and_learns(tmp_path):
    tokenizer, model = tiny_tokenizer(), small_model()
    score = scorer(lambda text, row: sum(map(str.isascii, text)) / max(1, len(text)), tokenizer=tokenizer, timeout_s=60)
    task = Task([Prompt([20 + i, 60], {}, i) for i in range(100)], score)
    rollouts = Rollouts(prompts_per_step=4, group_size=8, minibatches=2, max_new_tokens=6, top_p=0.9)
    engine, schedule = LocalEngine(model, max_len=64), Schedule(tmp_path, steps=5)
    training = grpo(model, tokenizer, engine, task, rollouts, schedule, Optim(lr=5e-3))
    asyncio.run(training)
    lines = lines_of(tmp_path)
    assert all(0.9 <= line["kept_mass"] < 1 for line in lines)
    assert all(line["mismatch/abs_max"] < 1e-4 for line in lines), "the engine's log-probs are of all tokens, as ours"
    assert lines[-1]["reward/mean"] > lines[0]["reward/mean"]


SAMPLED = [{"top_p": 0.6}, {"top_k": 5}, {"min_p": 0.2}]


def sampled(model, limits, *, n=6, seed=0):
    """A group of the embedded engine, packed."""
    params = SamplingParams(max_new_tokens=5, temperature=0.7, seed=seed, **limits)
    engine = LocalEngine(model, max_len=64, eos_token_ids=())
    prompts = [Prompt(PROMPT, {}, 0)]
    sampling = rollout(prompts, generate=engine.generate, params=params, group_size=n, seed=seed)
    return pack([[replace(t, truncated=False) for t in group] for group in asyncio.run(sampling)]), params


@pytest.mark.parametrize("limits", SAMPLED)
def test_the_engine_records_the_kept_tokens_and_all_log_probs_are_renormalised_over_them(limits):
    """Against transformers' own forward in fp64: at the weights that sampled, and at others over the old sets."""
    model, newer = small_model(), small_model(seed=1)
    batch, params = sampled(model, limits)
    assert batch.mask.all()
    with torch.no_grad():
        ours = [Policy(x, temperature=0.7)(batch).logp for x in (model, newer)]
        after = [Policy(newer, temperature=0.7)(x).logp for x in (select(batch, [4, 1]), without_support(batch))]
    untruncated = []
    for i in range(batch.num_seqs):
        rows = slice(5 * i, 5 * i + 5)
        ids = batch.targets[rows].tolist()
        with torch.no_grad():
            first, second = (own_probs(x, PROMPT + ids, 0.7)[len(PROMPT) - 1 : -1] for x in (model, newer))
        untruncated += second[range(5), ids].log().tolist()
        for t, kept in enumerate(kept_by_hand(p, params) for p in first):
            assert {x for x in batch.support[rows][t].tolist() if x >= 0} == {*kept}
            assert batch.kept_mass[rows][t].item() == pytest.approx(first[t][kept].sum().item(), rel=1e-5)
            for p, logp in ((first, ours[0]), (first, batch.rollout_logp), (second, ours[1])):
                truth = (p[t][ids[t]] / p[t][kept].sum()).log().item()
                assert logp[rows][t].item() == pytest.approx(truth, abs=2e-5)
    torch.testing.assert_close(after[0], torch.cat([ours[1][20:25], ours[1][5:10]]))
    assert after[1].tolist() == pytest.approx(untruncated, abs=2e-5)
    again = pack(unpack(batch))  # the log-probs before truncation
    torch.testing.assert_close(again.rollout_logp, batch.rollout_logp + batch.kept_mass.log())


def test_a_completion_without_truncation_has_no_support_and_its_batch_is_as_before():
    batch, _ = sampled(small_model(), {})
    assert batch.support is None
    assert batch.kept_mass is None
    assert without_support(batch) is batch


def test_the_update_of_recorded_samples_has_the_gradient_of_the_truncated_policy():
    """Each kept token once, weighted by its probability: the gradient is that of sum over the set of pi_S(a) A(a), at
    weights that are not those that sampled."""
    model, params = small_model(seed=2), SamplingParams(max_new_tokens=1, top_p=0.6)
    p = own_probs(small_model(), PROMPT, 1.0)[-1].detach()
    kept = kept_by_hand(p, params)
    drawn, values = p[kept] / p[kept].sum(), torch.linspace(-1, 2, len(kept), dtype=torch.float64)
    new = own_probs(model, PROMPT, 1.0)[-1][kept]
    weights = list(model.parameters())
    true = torch.autograd.grad((new / new.sum() * values).sum(), weights)
    support = Support(np.array([kept], np.int32), np.array([p[kept].sum()], np.float32))
    group = [Trajectory(PROMPT, [a], [True], [p[a].log().item()], [0], support=support) for a in kept]
    batch = pack([group])
    logp = Policy(model)(batch).logp
    ratio = (logp - batch.rollout_logp).exp()
    found = torch.autograd.grad((drawn * values * ratio).sum(), weights)
    for got, want in zip(found, true, strict=True):
        assert (got - want).abs().max() <= 2e-4 * want.abs().max() + 1e-6


def test_older_weights_may_sample_a_nucleus_where_the_engine_records_it(tmp_path):
    tokenizer, model = tiny_tokenizer(), small_model()
    score = scorer(lambda text, row: sum(map(str.isascii, text)) / max(1, len(text)), tokenizer=tokenizer, timeout_s=60)
    task = Task([Prompt([20 + i, 60], {}, i) for i in range(100)], score)
    rollouts = Rollouts(prompts_per_step=2, group_size=4, max_new_tokens=6, top_p=0.9, staleness=1.0)
    engine = LocalEngine(model, max_len=64)
    asyncio.run(grpo(model, tokenizer, engine, task, rollouts, Schedule(tmp_path, steps=2), Optim(lr=5e-3)))
    lines = lines_of(tmp_path)
    assert all(0.9 <= line["kept_mass"] < 1 for line in lines)
    assert [line["staleness/max"] for line in lines] == [0, 1]
    assert lines[0]["mismatch/abs_max"] < 1e-4 < lines[1]["mismatch/abs_max"]

    async def bare(prompt, sample):
        out = await sample(prompt.ids)
        return Trajectory(prompt.ids, out.ids, [True] * len(out.ids), out.logp, out.versions, truncated=True)

    wrong = grpo(model, tokenizer, engine, replace(task, env=bare), rollouts, Schedule(tmp_path / "b", steps=1))
    with pytest.raises(ValueError, match=r"older weights need the tokens .* passes on `Completion.support`"):
        asyncio.run(wrong)


def test_a_journal_and_continuations_keep_the_support(tmp_path):
    model, params = small_model(), SamplingParams(max_new_tokens=8, seed=3, top_p=0.8)
    engine = LocalEngine(model, max_len=64, eos_token_ids=())
    whole = asyncio.run(engine.generate(PROMPT, params=params))
    first = asyncio.run(Journal(tmp_path, engine.generate).generate(PROMPT, params=params))
    again = asyncio.run(Journal(tmp_path, engine.generate).generate(PROMPT, params=params))

    async def part(context, left):
        out = await engine.generate(context, params=replace(left, max_new_tokens=min(3, left.max_new_tokens)))
        return replace(out, finish_reason="abort")

    parts = asyncio.run(continue_aborted(part, PROMPT, params, again=lambda: True, positional_noise=True))
    assert parts.ids == whole.ids
    for other in (first, again, parts):
        assert [*map(set, other.support.ids.tolist())] == [*map(set, whole.support.ids.tolist())]
        assert other.support.mass.tolist() == pytest.approx(whole.support.mass.tolist(), rel=1e-5)


def test_turns_have_no_support_between_them():
    engine = LocalEngine(small_model(), max_len=64, eos_token_ids=())
    params = SamplingParams(max_new_tokens=3, seed=3, top_k=4)

    async def play():
        turns = Turns(PROMPT, lambda ids, **_: engine.generate(ids, params=params))
        await turns.sample()
        turns.append([9, 9])
        await turns.sample()
        return turns.pieces(reward=1.0)

    [piece] = asyncio.run(play())
    assert (piece.support.ids >= 0).sum(1).tolist() == [4 * x for x in piece.mask] == [4, 4, 4, 0, 0, 4, 4, 4]
    with pytest.raises(ValueError, match=r"sample 1 has no `support` and sample 0 has one: .* passes on"):
        pack([[piece, replace(piece, support=None)]])


def test_what_cannot_be_corrected_for_is_refused(caplog):
    for settings, match in (
        ({"top_k": 5, "top_p": 0.9}, "use one$"),
        ({"min_p": 0.1, "top_p": 0.9}, "use one$"),
    ):
        with pytest.raises(ValueError, match=match):
            Rollouts(**settings)
    engine = FakeEngine()
    with pytest.raises(ValueError, match=r"FakeEngine does not report the tokens .* older weights kept others"):
        check_support(engine, Rollouts(top_p=0.9, staleness=0.5))
    check_support(engine, Rollouts(staleness=0.5))
    assert not caplog.messages
    check_support(engine, Rollouts(top_p=0.9))
    assert "multiplied by the probability that the policy keeps (docs/losses.md)" in caplog.text
    with pytest.raises(ValueError, match=r"`min_p` with `overlap` or `staleness` needs the tokens .* `engine` local"):
        check_truncation(Engines(engine="sglang"), Rollouts(min_p=0.1, overlap=True))
    check_truncation(Engines(), Rollouts(min_p=0.1, overlap=True))
    with pytest.raises(ValueError, match="`top_k`: log-probs of vllm are those after the limit"):
        check_truncation(Engines(engine="vllm"), Rollouts(top_k=5))
    for engines in (Engines(engine="sglang"), Engines(engine="vllm", engine_urls=("http://localhost:1",)), Engines()):
        check_truncation(engines, Rollouts(top_k=5))
    held_out = Evaluation(eval_sampling=("a=temperature:0.6,top_p:0.95",))
    with pytest.raises(ValueError, match=r"`eval_sampling` a=.*,top_p:0\.95: log-probs of vllm"):
        check_truncation(Engines(engine="vllm"), Rollouts(), held_out)
    check_truncation(Engines(engine="sglang"), Rollouts(overlap=True), held_out)
    for text in ("top_p=temperature:0.5", "a=top_p:1.0,min_p:0"):  # a name, and no limit
        check_truncation(Engines(engine="vllm"), Rollouts(), Evaluation(eval_sampling=(text,)))
