"""Images in the forward: log-probs and gradients against the model's own forward, one document at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rlkit.model import vision
from rlkit.model.families import own_log_probs
from rlkit.model.forward import forward, prepare_model
from rlkit.model.heads import load_reward_model, load_value_model, pack_whole, rewards, values
from rlkit.model.small_copy import shrunk
from rlkit.packing import microbatches, pack, select, unpack
from rlkit.types import Trajectory


def small(kind: str) -> Any:
    """A small model of this type, with large random weights."""
    config = shrunk(CONFIG_MAPPING[kind]())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = vision.auto_class(config).from_config(config).eval()
        for p in model.parameters():
            p.data.normal_(std=0.2) if p.ndim > 1 else p.data.add_(0.2 * torch.randn_like(p))
    return model


def shown(config: Any) -> list[list[Trajectory]]:
    """Groups with two images, with none, with another one, with a later turn of the first, and with its text only; in
    two of them a sample has a later image."""
    a, b, other = (vision.Noise(config, seed=seed) for seed in range(3))
    drawn = torch.Generator().manual_seed(1)

    def group(prompt: list[int], images: tuple[Any, ...], *lens: int) -> list[Trajectory]:
        ids = [torch.randint(3, 60, (n,), generator=drawn).tolist() for n in lens]
        return [Trajectory(prompt, x, [True] * len(x), [0.0] * len(x), [0] * len(x), images=images) for x in ids]

    first = group([5, *a.ids, 6, *b.ids, 7], (a, b), 7, 1, 3)
    return [
        [*first, later(first[1], a)], [*(second := group([9, 10, 11], (), 4, 2)), later(second[0], b)],
        group([*b.ids, 8], (b,), 5, 2),
        group([*first[0].prompt_ids, *first[0].ids, *b.ids, 7], (a, b, b), 2),
        group(first[0].prompt_ids, (other, b), 3),
    ]  # fmt: skip


def later(t: Trajectory, image: vision.Noise) -> Trajectory:
    """The trajectory, and after an image four further tokens."""
    ids, mask = [*t.ids, 12, *image.ids, 13, 14, 15, 16], [*t.mask, *[False] * (2 + len(image.ids)), *[True] * 3]
    versions = [0 if m else -1 for m in mask]
    return replace(t, ids=ids, mask=mask, logp=[0.0] * len(ids), versions=versions, later_images=(image,))


def sampled(groups: list[list[Trajectory]]) -> torch.Tensor:
    """Which of all tokens of `ids` were."""
    return torch.tensor([m for group in groups for t in group for m in t.mask])


@pytest.mark.slow
@pytest.mark.parametrize("kind", vision.TYPES)
def test_log_probs_and_gradients_are_those_of_the_own_forward(kind):
    model = small(kind)
    groups = shown(model.config)
    own = own_log_probs(model, groups)[sampled(groups)]
    slope = torch.randn(len(own), generator=torch.Generator().manual_seed(2))
    model.set_attn_implementation("eager")
    expected = gradients(model, lambda: (slope * true_logp(model, groups)[sampled(groups)]).sum())
    model = prepare_model(model)
    for shared in (True, False):
        batch = pack(groups, share_prompts=shared)
        logp = forward(model, batch).logp[batch.mask]
        assert (logp - own).abs().max() < 1e-4
        found = gradients(model, lambda: (slope * forward(model, batch).logp[batch.mask]).sum())  # noqa: B023
        assert found.keys() == expected.keys()
        assert any("visual" in name or "vision" in name for name in found)
        largest = max(float(x.abs().max()) for x in expected.values())
        assert max(float((found[name] - x).abs().max()) for name, x in expected.items()) < 2e-3 * largest


@pytest.mark.slow
@pytest.mark.parametrize("kind", vision.TYPES)
def test_values_and_rewards_are_of_the_own_hidden_states(kind, tmp_path):
    """Of the policy's checkpoint, from which a critic and a reward model start at 0."""
    body = small(kind)
    body.save_pretrained(tmp_path)
    critic, judge, groups = load_value_model(tmp_path), load_reward_model(tmp_path), shown(body.config)
    assert values(critic, pack(groups)).abs().max() == 0
    frozen = {judge.base_model.get_submodule(name) for name in vision.tower_parts(judge)}
    assert not any(p.requires_grad for part in frozen for p in part.parameters())
    weight = torch.randn(1, judge.score.in_features)
    critic.score.weight.data, judge.score.weight.data = weight, weight
    own = []
    for t in (t for group in groups for t in group):
        ids = torch.tensor([[*t.prompt_ids, *t.ids]])
        pictures = vision.image_inputs((*t.images, *t.later_images), torch.device("cpu"))
        options = pictures | vision.token_types(body, ids)
        with torch.no_grad():
            own.append(body.base_model(input_ids=ids, use_cache=False, **options).last_hidden_state[0] @ weight[0])
    batch, ends = pack(groups), [len(t.prompt_ids) - 1 for group in groups for t in group]
    true = torch.cat([x[start:-1] for x, start in zip(own, ends, strict=True)])[sampled(groups)]
    torch.testing.assert_close(values(critic, batch)[batch.mask], true, rtol=1e-4, atol=1e-4)
    true = torch.stack([x[-1] for x in own])
    torch.testing.assert_close(rewards(judge, pack_whole(groups)), true, rtol=1e-4, atol=1e-4)


def true_logp(model: Any, groups: list[list[Trajectory]]) -> torch.Tensor:
    """As `own_log_probs`, with a gradient."""
    out = []
    for t in (t for group in groups for t in group):
        ids = torch.tensor([[*t.prompt_ids, *t.ids]])
        options = vision.image_inputs((*t.images, *t.later_images), torch.device("cpu"))
        options |= vision.token_types(model, ids) if options else {}
        logp = model(input_ids=ids, use_cache=False, **options).logits[0].log_softmax(-1)
        out.append(logp[len(t.prompt_ids) - 1 : -1].gather(1, torch.tensor(t.ids)[:, None])[:, 0])
    return torch.cat(out)


def gradients(model: Any, loss: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_an_image_changes_what_follows_it():
    model = prepare_model(small("qwen3_vl"))
    groups = shown(model.config)
    other = [[Trajectory(**{**vars(t), "images": tuple(vision.Noise(model.config, x.seed + 2) for x in t.images)})
              for t in group] for group in groups]  # fmt: skip
    a, b = (pack(x) for x in (groups, other))
    differ = (forward(model, a).logp - forward(model, b).logp).abs() > 1e-3
    shows = torch.tensor([bool(t.images) for group in groups for t in group])
    assert torch.equal(differ[a.mask], shows.repeat_interleave(a.cu_seqlens.diff())[a.mask])


def test_an_image_is_encoded_once_for_all_that_begin_alike():
    model, grids = prepare_model(small("qwen3_vl")), []
    watch = lambda _, __, inputs: grids.extend(inputs["grid_thw"].tolist())
    model.base_model.visual.register_forward_pre_hook(watch, with_kwargs=True)
    groups = shown(model.config)
    forward(model, pack(groups))
    assert len(grids) == 8, "of 10 in the prompts and samples of groups: a turn that goes on has the two before it"
    grids.clear()
    forward(model, pack(groups, share_prompts=False))
    assert len(grids) == sum(len(t.images) + len(t.later_images) for group in groups for t in group)


def test_a_batch_keeps_the_images_of_its_prompts():
    model = prepare_model(small("qwen3_vl"))
    groups = shown(model.config)
    batch = pack(groups)
    whole = forward(model, batch).logp
    assert unpack(batch) == groups
    parts = list(microbatches((batch, torch.arange(batch.num_tokens)), max_tokens=40))
    assert len(parts) > 1
    for micro, rows in parts:
        assert (forward(model, micro).logp - whole[rows]).abs().max() < 1e-5
    last = unpack(select(batch, [7, 3]))
    assert [(len(group[0].images), len(group[0].later_images)) for group in last] == [(2, 1), (1, 0)]


@pytest.mark.slow
def test_a_prompt_with_an_image_is_copied_where_a_recurrent_model_shares_a_longer_one():
    model, drawn = small("qwen3_5"), torch.Generator().manual_seed(3)
    image, text = vision.Noise(model.config), torch.randint(3, 60, (300,), generator=drawn).tolist()
    sample = lambda prompt, ids, **k: Trajectory(prompt, ids, [True] * len(ids), [0.0] * len(ids), [0] * len(ids), **k)
    groups = [
        [sample([text[0], *image.ids, 5], text[i : i + 3], images=(image,)) for i in range(2)],  # too short for a state
        [sample(text[:100], text[100:200]), sample(text[:200], text[200:205]), sample(text[:200], text[205:210])],
    ]
    own, batch = own_log_probs(model, groups), pack(groups)
    assert (forward(prepare_model(model), batch).logp[batch.mask] - own).abs().max() < 1e-4
