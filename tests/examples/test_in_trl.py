"""examples/in_trl.py in TRL: loss, gradient and advantages equal TRL's own where both are defined."""

import importlib
from functools import partial

import pytest
import torch
from snippets import blocks, run

from rlkit import advantages, losses
from rlkit.data.tiny import tiny_model, tiny_tokenizer

pytest.importorskip("trl", reason="pip install trl==1.16.0")
pytestmark = pytest.mark.slow
TOKENIZER = tiny_tokenizer()
SMALL = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 48}


@pytest.fixture(scope="module")
def example():
    return importlib.import_module("in_trl")


@pytest.fixture
def make(example, tmp_path):
    """A trainer on the same small model each time, ours (with `surrogate`, `baseline`) or TRL's own."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def make(*, ours=None, kind=GRPOTrainer, reward=example.digits, **settings):
        base = {"use_cpu": True, "bf16": False, "report_to": "none", "per_device_train_batch_size": 8}
        rows = Dataset.from_list([{"prompt": "a" * (i % 5 + 1)} for i in range(16)])
        kind, options = (kind, {}) if ours is None else (example.Trainer, ours)
        args = GRPOConfig(str(tmp_path / "run"), **(base | settings))
        return kind(tiny_model(TOKENIZER, **SMALL), reward, args, rows, processing_class=TOKENIZER, **options)

    return make


def inputs(seed=0, *, old=True):
    """A ragged batch in TRL's layout: prompts padded left, completions right, tool output in between."""
    rng = torch.Generator().manual_seed(seed)
    prompt_lens, lens = torch.tensor([3, 1, 4, 2]), torch.tensor([6, 1, 4, 5])
    real = torch.arange(6) < lens[:, None]
    batch = {
        "prompt_ids": torch.randint(0, 256, (4, 4), generator=rng),
        "prompt_mask": (torch.arange(4) >= 4 - prompt_lens[:, None]).long(),
        "completion_ids": torch.where(real, torch.randint(0, 256, (4, 6), generator=rng), TOKENIZER.pad_token_id),
        "completion_mask": real.long(),
        "tool_mask": (torch.rand(4, 6, generator=rng) > 0.3).long().index_fill(1, torch.tensor([0]), 1),
        "advantages": torch.randn(4, generator=rng),
        "num_items_in_batch": torch.tensor(23.0),
        "ref_per_token_logps": -5.5 + torch.randn(4, 6, generator=rng),
    }
    if old:
        batch["old_per_token_logps"] = -5.5 + 0.4 * torch.randn(4, 6, generator=rng)
    return batch


def value_and_gradient(trainer, batch, *, beta=0.0):
    trainer.beta = beta  # in GRPOConfig it would load a reference model, by name
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    trainer.model.train()
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


CASES = {  # TRL's settings, our surrogate
    "dapo": ({"loss_type": "dapo"}, losses.ppo_clip),
    "clip-higher": ({"epsilon": 0.1, "epsilon_high": 0.28}, partial(losses.ppo_clip, clip_low=0.1, clip_high=0.28)),
    "accumulated": ({"gradient_accumulation_steps": 2, "steps_per_generation": 4}, losses.ppo_clip),
    "temperature": ({"temperature": 0.7}, losses.ppo_clip),
}


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("old", [True, False], ids=["off-policy", "on-policy"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_trl(make, case, old, beta):
    settings, surrogate = CASES[case]
    theirs, their_gradient = value_and_gradient(make(**settings), inputs(old=old), beta=beta)
    shared = {k: v for k, v in settings.items() if k not in ("epsilon", "epsilon_high")}
    trainer = make(ours={"surrogate": surrogate}, **shared)
    ours, gradient = value_and_gradient(trainer, inputs(old=old), beta=beta)
    relative = (gradient - their_gradient).norm() / their_gradient.norm()
    print(f"{case}, KL {beta}: loss {ours:.9f}, TRL {theirs:.9f}; relative difference of the gradient {relative:.1e}")
    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    assert their_gradient.norm() > 1e-3
    assert relative < 1e-5


@pytest.mark.parametrize("old", [True, False], ids=["off-policy", "on-policy"])
def test_the_loss_of_the_page_is_that_of_trl(make, old):
    """docs/own-trainer.md: one method, with TRL's log-probs and advantages."""
    (code,) = [code for code in blocks("docs/own-trainer.md") if "GRPOTrainer" in code]
    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 4}
    theirs, their_gradient = value_and_gradient(make(epsilon_high=0.28, **settings), inputs(old=old))
    ours, gradient = value_and_gradient(make(kind=run(code, {})["Trainer"], **settings), inputs(old=old))
    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    assert (gradient - their_gradient).norm() < 1e-5 * their_gradient.norm()


def test_cispo_has_the_gradient_of_trls(make):
    """TRL writes log-probs where ours has log-ratios: another constant, the same gradient."""
    settings = {"loss_type": "cispo", "epsilon_high": 1.3}
    _, theirs = value_and_gradient(make(**settings), inputs())
    _, ours = value_and_gradient(make(ours={"surrogate": partial(losses.cispo, max_weight=1.3)}), inputs())
    print(f"cispo: relative difference of the gradient {(ours - theirs).norm() / theirs.norm():.1e}")
    assert (ours - theirs).norm() < 1e-5 * theirs.norm()


def test_log_probs_and_entropies_are_those_of_trl(make):
    batch = inputs()
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attended = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    results = []
    for trainer in (make(), make(ours={})):
        logps = trainer._get_per_token_logps_and_entropies
        results.append(logps(trainer.model, ids, attended, 6, batch_size=3, compute_entropy=True)[:2])
    real = batch["completion_mask"].bool()
    for name, theirs, ours in zip(("logp", "entropy"), *results, strict=True):
        print(f"{name}: largest difference {(ours - theirs)[real].abs().max():.1e}")
        torch.testing.assert_close(ours[real], theirs[real], rtol=1e-5, atol=1e-5)


def test_advantages_are_those_of_the_baseline(make):
    """From the rewards that TRL computed, in groups of consecutive completions; unscaled, they equal TRL's own."""
    recorded = []

    def reward(completions, **_):
        recorded.append([float(len(text) % 3) for text in completions])
        return recorded[-1]

    for settings in ({"ours": {"baseline": advantages.leave_one_out}}, {"scale_rewards": "none"}):
        trainer = make(reward=reward, max_completion_length=4, num_generations=4, **settings)
        trainer.model.train()
        prompts = [{"prompt": "ab"}] * 4 + [{"prompt": "c"}] * 4
        got = trainer._generate_and_score_completions(prompts)["advantages"].tolist()
        groups = [recorded[-1][:4], recorded[-1][4:]]
        factor = 4 / 3 if "ours" in settings else 1
        assert got == pytest.approx([factor * (r - sum(group) / 4) for group in groups for r in group], abs=1e-5)


def test_settings_without_effect_and_missing_rewards_are_refused(make):
    with pytest.raises(ValueError, match="epsilon_high has no effect here"):
        make(ours={}, epsilon_high=0.28)
    trainer = make(ours={}, reward=lambda completions, **_: [None] * len(completions), max_completion_length=2)
    trainer.model.train()
    with pytest.raises(ValueError, match="a completion has no reward"):
        trainer._generate_and_score_completions([{"prompt": "ab"}] * 8)


ON_TWO_RANKS = """
import sys, torch
import in_trl as example
from trl import GRPOTrainer
settings = {"max_steps": 2, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0,
    "gradient_accumulation_steps": 2, "per_device_train_batch_size": 8, "ddp_backend": "gloo", "use_cpu": True}

class Stock(GRPOTrainer):
    def __init__(self, *args, surrogate, **kwargs):
        super().__init__(*args, **kwargs)

ours = example.main(output=sys.argv[1] + "/ours", **settings)
example.Trainer = Stock
theirs = example.main(output=sys.argv[1] + "/theirs", scale_rewards="none", **settings)
if torch.distributed.get_rank() == 0:
    torch.save([[p.detach() for p in trainer.model.parameters()] for trainer in (ours, theirs)], sys.argv[1] + "/after")
torch.distributed.destroy_process_group()
"""


def test_training_on_two_ranks_is_that_of_trl(tmp_path, on_two_ranks):
    """Two SGD steps of two micro-batches on each rank, with generation: the same parameters as TRL's."""
    on_two_ranks(ON_TWO_RANKS, tmp_path)
    ours, theirs = torch.load(tmp_path / "after")
    start = tiny_model(TOKENIZER)
    moved = max((p - q.detach()).abs().max().item() for p, q in zip(theirs, start.parameters(), strict=True))
    difference = max((p - q).abs().max().item() for p, q in zip(ours, theirs, strict=True))
    print(f"two ranks: largest step {moved:.1e}, largest difference of the parameters {difference:.1e}")
    assert moved > 1e-3
    assert difference < 1e-5 * moved + 1e-7


@pytest.mark.parametrize("surrogate", ["ppo_clip", "cispo"])
def test_it_trains(example, tmp_path, surrogate):
    trainer = example.main(surrogate, steps=30, output=str(tmp_path), use_cpu=True)
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    print(surrogate, "reward", [round(reward, 3) for reward in rewards])
    assert rewards[0] < 0.2
    assert rewards[-1] > 0.6
