"""GRPO's update logs the same on one rank, two and four: every metric of four optimizer steps, to 1e-5."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from rlkit.advantages import group_centered
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.loops.updates import PolicyLoss, clipped, grpo_update
from rlkit.metrics import finalize
from rlkit.model.forward import Policy, prepare_model, with_kept_mass, with_old_logp, with_ref_logp
from rlkit.model.optim import adamw
from rlkit.model.parallelize import parallelize
from rlkit.packing import pack, with_advantages
from rlkit.parallel.mesh import Parallel, make_mesh
from rlkit.settings import Optim, Rollouts
from rlkit.types import SamplingParams, Support, Trajectory


def model(seed):
    sizes = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 44}
    return tiny_model(tiny_tokenizer(), seed=seed, **sizes)


def sampled(support=False):
    """Six groups of three, of lengths from 1 to 15; one has no advantage. The engine was off by up to 0.5. With
    `support` each was sampled from a set of 1 to 9 tokens."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(0, 263, (n,), generator=generator).tolist()

    def trajectory(prompt, reward):
        n = 1 + int(torch.randint(0, 15, (), generator=generator))
        logp = (-5.5 + torch.rand(n, generator=generator)).tolist()
        ids = draw(n)
        kept = [[a, *({*draw(8)} - {a})][: 1 + i % 9] for i, a in enumerate(ids)] if support else []
        rows = np.array([[*x, *[-1] * (9 - len(x))] for x in kept], np.int32).reshape(-1, 9)
        of_engine = Support(rows, np.full(n, 0.8, np.float32)) if support else None
        return Trajectory(prompt, ids, [True] * n, logp, [0] * n, reward=reward, support=of_engine)

    rewards = [(0.0, 1.0, 0.5), (1.0, 1.0, 0.0), (0.3, 0.3, 0.3), (0.0, 0.0, 1.0), (2.0, 0.1, 0.0), (1.0, 0.0, 1.0)]
    return [[trajectory(prompt, r) for r in group] for group in rewards for prompt in [draw(4)]]


def logged(sizes, max_tokens=60, support=False, **options):
    """What is logged of two passes over two mini-batches, in micro-batches of a few sequences."""
    mesh = None if sizes is None else make_mesh(Parallel(**sizes))
    made = [
        prepare_model(model(seed)) if mesh is None else parallelize(model(seed), mesh, **options) for seed in (0, 1)
    ]
    policy, reference = map(Policy, made)
    batch = with_advantages(pack(sampled(support)), group_centered)
    batch = with_ref_logp(reference, batch, max_tokens=max_tokens, mesh=mesh)
    batch = with_old_logp(policy, batch, max_tokens=max_tokens, mesh=mesh)
    params = SamplingParams(max_new_tokens=15, top_p=0.9)
    batch = with_kept_mass(policy, batch, params=params, max_tokens=max_tokens, mesh=mesh)
    metrics = grpo_update(
        batch, policy=policy, optimizer=adamw(made[0], lr=1e-3, eps=1e-4), lr=1e-3,
        loss=PolicyLoss(partial(clipped, clip_low=0.01, clip_high=0.01)), rollouts=Rollouts(minibatches=2, epochs=2),
        optim=Optim(max_norm=0.5, max_tokens=max_tokens), kl_coef=0.1, entropy_coef=0.01, seed=3,
    )  # fmt: skip
    return {name: x for name, x in finalize(metrics).items() if not name.startswith("time/")}


def logged_on_rank(rank, world, sizes, options):
    return logged(sizes, **options)


@pytest.fixture(scope="module")
def alone():
    return logged(None)


LAYOUTS = [
    (2, {"tp": 2}, {"activation_checkpointing": True, "max_tokens": 400}),
    (4, {"shard": 4}, {}),
    (4, {"replicate": 2, "cp": 2}, {"offload": True}),
    pytest.param(2, {"shard": 2}, {}, marks=pytest.mark.slow),
    pytest.param(2, {"tp": 2}, {}, marks=pytest.mark.slow),
    pytest.param(4, {"tp": 2}, {"activation_checkpointing": True}, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"cp": 2}])
def test_recorded_tokens_give_every_rank_the_log_probs_of_one_process(pool, sizes):
    alone = logged(None, support=True)
    assert alone["kept_mass"] == pytest.approx(0.8)
    assert alone["grad_norm"] > 0.01
    for found in pool(2).run(logged_on_rank, sizes, {"support": True}):
        found["ratio/ratio_is_one"] = alone["ratio/ratio_is_one"]
        assert found == pytest.approx(alone, rel=1e-5, abs=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "sizes", "options"), LAYOUTS)
def test_the_update_logs_what_one_process_logs(pool, alone, world, sizes, options):
    assert {"grad_norm", "entropy", "kl/ref", "mismatch/k3", "mismatch/abs_max"} <= alone.keys()
    assert alone["grad_norm"] > 0.01
    assert 0.9 < alone["kept_mass"] < 0.99
    assert alone["ratio/clip_low"] + alone["ratio/clip_high"] > 0.01, "the policy moved away from old_logp"
    for found in pool(world).run(logged_on_rank, sizes, options):
        assert found.keys() == alone.keys()
        found["ratio/ratio_is_one"] = alone["ratio/ratio_is_one"]  # counts bits: which ratios round to exactly 1
        assert found == pytest.approx(alone, rel=1e-5, abs=1e-7)
