"""Training on truncated samples: the mass that top-p and top-k kept, and an update that allows for what was cut."""

from __future__ import annotations

import asyncio
import json
from functools import partial

import pytest
import torch

from rlkit.data.prompts import Prompt
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.loops.grpo import grpo
from rlkit.loops.rl import Task
from rlkit.loops.updates import PolicyLoss, grpo_update
from rlkit.model.forward import Policy, forward, prepare_model, with_kept_mass, with_ref_logp
from rlkit.packing import pack, with_streams
from rlkit.parallel.attention import as_inference
from rlkit.rewards.scoring import scorer
from rlkit.rollout.engines.local import LocalEngine
from rlkit.settings import Optim, Rollouts, SamplingParams, Schedule
from rlkit.types import Trajectory

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


@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
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


def test_what_cannot_be_corrected_for_is_refused():
    for settings, match in (
        ({"top_p": 0.9, "staleness": 0.5}, "`top_p` excludes `staleness`: the kept probability mass"),
        ({"top_k": 5, "overlap": True}, "`top_k` excludes `overlap`: the kept probability mass"),
        ({"top_k": 5, "top_p": 0.9}, "use one$"),
    ):
        with pytest.raises(ValueError, match=match):
            Rollouts(**settings)
    Rollouts(top_p=0.9), Rollouts(overlap=True), Rollouts(staleness=0.5)
