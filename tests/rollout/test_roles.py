"""Several roles in one environment: pieces, rewards and baselines of each; several environments in one run."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import product

import pytest
import torch

from rlkit.advantages import group_centered
from rlkit.controllers import moving_average
from rlkit.loops import roles
from rlkit.loops.estimators import returns, with_estimates
from rlkit.loops.evaluate import _parts, joined, rollout_metrics
from rlkit.metrics import finalize, mean
from rlkit.packing import pack, select, with_advantages
from rlkit.rollout.envs.turns import Turns
from rlkit.rollout.groups import Prompt, pieces_of, sample_group
from rlkit.run.folder import open_run
from rlkit.scripts import grpo
from rlkit.scripts.args import Episodes
from rlkit.scripts.cli import run
from rlkit.types import Completion, Trajectory

PAYS = {"seller": [3.0, 1.0, 2.0], "buyer": [-1.0, 5.0, 5.0]}  # of three games


async def trade(prompt, sample):
    """Two players, each with a context of its own, take turns; the seller's second turn starts a new piece."""
    game = (await sample([9])).ids[0]
    seller, buyer = Turns([1], sample), Turns([2], sample)
    await seller.sample()
    await buyer.sample()
    seller.restart([1, 7])
    await seller.sample()
    found = []
    for name, turns in (("seller", seller), ("buyer", buyer)):
        found += [replace(t, role=name) for t in turns.pieces(reward=PAYS[name][game], turn_rewards=None)]
    return [found[0], found[2], found[1]]  # in any order: of a role they stay in theirs


def group():
    async def sample_of(game):
        async def sample(prompt_ids, *, max_new_tokens=None):
            ids = [game] if prompt_ids == [9] else [50 + game, 60]
            return Completion(ids, [-1.0] * len(ids), [0] * len(ids), "stop")

        return sample

    async def played():
        samplers = [await sample_of(i) for i in range(3)]
        return await sample_group(Prompt([5], {}, 0), samplers, env=trade)

    return asyncio.run(played())


def test_each_role_is_an_episode_with_its_own_reward_and_baseline():
    found = group()
    assert [(t.role, t.continues, t.reward) for t in found] == [
        (role, piece > 0, PAYS[role][game])
        for game in range(3) for role, pieces in (("seller", 2), ("buyer", 1)) for piece in range(pieces)
    ]  # fmt: skip
    batch = with_advantages(pack([found]), group_centered)
    assert batch.episode_ids.tolist() == [0, 0, 1, 2, 2, 3, 4, 4, 5]
    ends = batch.advantages[batch.cu_seqlens[1:] - 1].tolist()
    assert ends == pytest.approx([1, 1, -4, -1, -1, 2, 0, 0, 2])  # seller: mean 2; buyer: mean 3
    of_buyers = with_advantages(select(batch, [2, 5]), group_centered)
    assert of_buyers.advantages[of_buyers.cu_seqlens[1:] - 1].tolist() == pytest.approx([-3, 3])
    assert pack([[replace(t, role="") for t in found[:1]]]).roles is None


def test_a_number_named_as_a_role_is_logged_beside_its_reward():
    about = {"metrics": {"seller": 100.0, "other": 7.0}}
    found = [replace(t, info=about) for t in group()]
    line = finalize(rollout_metrics([found], version=0))
    assert (line["reward/seller"], line["reward/own/seller"], line["reward/other"]) == (2.0, 100.0, 7.0)
    assert _parts([found], "eval/") == {
        "eval/reward/own/seller": 100.0, "eval/reward/other": 7.0, "eval/reward/seller": 2.0, "eval/reward/buyer": 3.0,
    }  # fmt: skip
    named = [replace(t, role={"seller": "mean"}.get(t.role, t.role)) for t in group()]
    line = finalize(rollout_metrics([named], version=0))
    assert (line["reward/own/mean"], line["reward/mean"]) == (2.0, 2.5)


def test_numbers_that_rlkit_logs_itself_are_refused_from_others(tmp_path):
    own = rollout_metrics([group()], version=0)
    assert joined(own, {"loss": mean(1.0)}).keys() == {*own, "loss"}
    with pytest.raises(ValueError, match=r"`update` returned 'length/mean', a metric of rlkit's own"):
        joined(own, {"length/mean": mean(1.0)})
    with pytest.raises(ValueError, match=r"row 1: info\['metrics'\] has 'failed', a metric of rlkit's own"):
        pieces_of(replace(group()[0], info={"metrics": {"failed": 1.0}}), "row 1: ")
    with open_run(tmp_path / "run", steps=1) as run, pytest.raises(ValueError, match=r"'step' is a metric of rlkit's"):
        run.log(1, {"step": 7})


def test_a_moving_average_is_a_baseline_of_each_role():
    found = group()
    rule, averages = moving_average(decay=0.5), {}
    averages = roles.advance(rule, averages, [found])
    assert {name: x.coef for name, x in averages.items()} == {"seller": 1.0, "buyer": 1.5}  # half of 2 and of 3
    averages = roles.advance(rule, averages, [[t for t in found if t.role == "buyer"]])
    now = {name: x.coef for name, x in averages.items()}
    assert now == {"seller": 1.0, "buyer": 2.25}
    batch = with_advantages(pack([found[:3], found[3:]]), roles.against(now, [found[:3], found[3:]]))
    ends = batch.advantages[batch.cu_seqlens[1:] - 1].tolist()
    expected = [PAYS[name][game] - now[name] for game in range(3) for name in ("seller", "seller", "buyer")]
    assert ends == pytest.approx(expected)
    assert roles.start(rule, {name: x._asdict() for name, x in averages.items()}) == averages
    failed = [replace(t, reward=100.0, info={"metrics": {"failed": 1.0}}) for t in found]
    assert roles.advance(rule, averages, [failed]) == averages
    half = [replace(t, info={"metrics": {"failed": float(t.role == "buyer")}}) for t in found]
    assert roles.advance(rule, averages, [half])["buyer"] == averages["buyer"]
    assert roles.start(rule, {"seller": {"coef": 1.0, "more": 2.0}}) == {}  # of another rule
    assert roles.start(None, {"seller": {"coef": 1.0}}) == {}


def test_the_average_of_earlier_steps_leaves_the_gradient_of_each_role_unbiased():
    """Two roles with policies softmax(logits) over 3 moves each, one game: all 9 games weighed by their probability."""
    logits = {"X": torch.tensor([0.3, -1.0, 0.5]), "O": torch.tensor([-0.2, 0.1, 0.7])}
    pay = torch.tensor([[1.0, -1.0, 0.0], [0.0, 1.0, -1.0], [-1.0, 0.5, 1.0]])  # of X; O has its negative
    probs = {name: x.double().softmax(0) for name, x in logits.items()}
    now = {"X": 0.4, "O": -0.7}  # of earlier steps, whatever they were
    estimate = {name: torch.zeros(3, dtype=torch.float64) for name in logits}
    for x, o in product(range(3), range(3)):
        moves, rewards = {"X": x, "O": o}, {"X": float(pay[x, o]), "O": -float(pay[x, o])}
        game = [
            replace(Trajectory([1], [moves[name]], [True], [0.0], [0], reward=rewards[name]), role=name)
            for name in "XO"
        ]
        advantages = with_advantages(pack([game]), roles.against(now, [game])).advantages
        for name, a in zip("XO", advantages.tolist(), strict=True):
            score = torch.eye(3, dtype=torch.float64)[moves[name]] - probs[name]
            estimate[name] += probs["X"][x] * probs["O"][o] * a * score
    for name, sign, axis in (("X", 1, 1), ("O", -1, 0)):
        theta = logits[name].double().requires_grad_()
        other = probs["O" if name == "X" else "X"]
        value = sign * (theta.softmax(0) * (pay.double() * other.unsqueeze(1 - axis)).sum(axis)).sum()
        (true,) = torch.autograd.grad(value, theta)
        torch.testing.assert_close(estimate[name], true, atol=1e-6, rtol=1e-6)


def test_rewards_of_turns_join_the_role_s_own():
    found = [replace(t, token_rewards=[0.5, 0.0]) for t in group()]
    batch = with_estimates(pack([found]), baseline=group_centered, advantage=returns)
    ends = batch.advantages[batch.cu_seqlens[1:] - 1].tolist()
    firsts = batch.advantages[batch.cu_seqlens[:-1]]
    assert ends == pytest.approx([1, 1, -4, -1, -1, 2, 0, 0, 2])
    torch.testing.assert_close(firsts, torch.tensor(ends) + 0.5)


ENVS = """
from dataclasses import replace
from rlkit.rollout.groups import single_turn
def of(name, pay):
    async def env(prompt, sample):
        t = await single_turn(prompt, sample)
        return [replace(t, reward=pay * (1 + t.ids[0] % 3), role=name)]
    return env
one, two = of("first", 1.0), of("second", -1.0)
"""


def two_games(make_task, *, num):
    """The flags of a run on `num` rows, every other of each game."""
    task = make_task(train=[{"prompt": str(i), "game": "ab"[i % 2]} for i in range(num)], reward=ENVS)
    env = [f"{name}={task / 'reward.py'}:{f}" for name, f in (("a", "one"), ("b", "two"))]
    return [
        "--model", str(task / "model"), "--data", str(task / "train.jsonl"), "--device", "cpu", "--max-new-tokens", "4",
        "--prompts-per-step", str(num), "--env", *env, "--env-column", "game",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_a_column_of_the_row_chooses_the_environment(make_task, tmp_path):
    flags = [
        *two_games(make_task, num=8), "--steps", "2", "--group-size", "2", "--output", str(tmp_path / "run"),
    ]  # fmt: skip
    run(grpo.main, grpo.Args, None, argv=flags)
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert 1 <= line["reward/first"] <= 3
    assert -3 <= line["reward/second"] <= -1
    kept = (tmp_path / "run" / "trajectories").glob("train_*.jsonl")
    found = [json.loads(x) for path in kept for x in path.read_text().splitlines()]
    assert {(row["group"] % 2, row["role"]) for row in found} == {(0, "first"), (1, "second")}


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.slow
def test_averages_of_roles_train_single_games_and_go_on_after_a_resume(make_task, tmp_path):
    flags = [
        *two_games(make_task, num=4), "--group-size", "1", "--lr", "0.02", "--baseline", "role_average",
        "--baseline-decay", "0.5", "--warmup-steps", "0",
    ]  # fmt: skip
    found = {}
    for name, parts in {"whole": ("4",), "resumed": ("2", "4"), "other decay": ("4",)}.items():
        for steps in parts:
            more = ["--steps", steps, "--output", str(tmp_path / name), *["--resume"] * (steps != parts[0])]
            decay = ["--baseline-decay", "0"] if name == "other decay" else []
            run(grpo.main, grpo.Args, None, argv=[*flags, *more, *decay])
        lines = [json.loads(x) for x in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        found[name] = [line["grad_norm"] for line in lines]
    assert found["resumed"] == found["whole"]
    assert min(found["whole"]) > 0, "a single game has an advantage"
    assert found["other decay"][0] == found["whole"][0], "no role has an average yet"
    assert found["other decay"][1] != found["whole"][1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"env": ("a.py:f", "b.py:g")}, "`env` a.py:f: of several each has a name, as in math=a.py:f"),
        ({"env": ("a=a.py:f", "a=b.py:g")}, "`env` has two of the name a: rename one"),
        ({"env": "a.py:f", "env_column": "x"}, "`env_column` chooses among several: give `env` more than one"),
    ],
)
def test_environments_that_cannot_be_told_apart_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Episodes(**given)


def test_a_row_of_no_environment_is_refused_before_a_model_is_loaded(make_task, capsys):
    task = make_task(train=[{"prompt": "1", "env": "a"}, {"prompt": "2", "env": "c"}], reward=ENVS)
    env = [f"{name}={task / 'reward.py'}:{f}" for name, f in (("a", "one"), ("b", "two"))]
    with pytest.raises(SystemExit):
        run(
            grpo.main,
            grpo.Args,
            None,
            argv=["--model", "none/at-all", "--data", str(task / "train.jsonl"), "--env", *env],
        )
    assert "train.jsonl, line 2: 'env' is 'c', and the environments are a, b" in capsys.readouterr().err
