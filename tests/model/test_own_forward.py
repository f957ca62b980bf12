"""Log-probs, entropies and gradients of a step equal those of the model's own forward, one sequence at a time."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from model_types import config_of, filled
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rlkit.model import families, recurrent
from rlkit.model.families import Verdict, runs_packed, set_packed
from rlkit.model.forward import forward, prepare_model
from rlkit.model.small_copy import shrunk
from rlkit.packing import pack
from rlkit.parallel.attention import recomputing
from rlkit.types import Trajectory

PACKED = [
    "qwen3_5_text", "nemotron_h", "falcon_h1", "lfm2", "jamba", "minimax", "deepseek_v3", "gpt_oss", "gemma4_text",
    "stablelm",
]  # fmt: skip
STATES = PACKED[:4]  # of layers that start from a state at any depth
UNPACKED = ["mamba", "rwkv", "llama4_text", "bloom", "bart", "modernbert-decoder"]
REST = [
    "qwen3_5_moe_text", "mamba2", "bamba", "granitemoehybrid", "olmo_hybrid", "lfm2_moe", "kimi_linear",
    "bailing_hybrid", "xlstm",
]  # fmt: skip


def groups():
    """Prompts of 1 to 30 tokens; the last two continue a sample of the group before."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda n: torch.randint(3, 60, (n,), generator=generator).tolist()
    out = []
    for prompt_len, lens in [(1, [1, 5]), (30, [2, 9, 21]), (3, [9, 4]), (1, [12])]:
        before = [*out[-1][1].prompt_ids, *out[-1][1].ids] if len(out) > 1 else []
        prompt = [*before, *draw(prompt_len)]
        out.append([Trajectory(prompt, draw(n), [i != 1 for i in range(n)], [0.0] * n, [0] * n) for n in lens])
    return out


def built(model_type):
    return filled(model_type, seed=5)


def coefficients(batch):
    """Coefficients of the log-probs and entropies in the loss, a pair for each trained token."""
    return torch.randn(2, int(batch.mask.sum()), generator=torch.Generator().manual_seed(1))


def own_step(model, samples):
    """Log-probs and gradients by the model's own eager forward."""
    model.set_attn_implementation("eager")
    found = []
    for t in (t for group in samples for t in group):
        logits = model(input_ids=torch.tensor([t.prompt_ids + t.ids]), use_cache=False).logits[0].float()
        rows = logits[len(t.prompt_ids) - 1 : -1].log_softmax(-1)[torch.tensor(t.mask)]
        ids = torch.tensor(t.ids)[torch.tensor(t.mask)]
        found.append(torch.stack([rows.gather(1, ids[:, None])[:, 0], -(rows.exp() * rows).sum(-1)]))
    out = torch.cat(found, 1)
    (out * coefficients(pack(samples))).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return out.detach(), grads


def compare(model, samples, *, packed, states=False):
    """`forward` and its gradients, shared (with `states`: at all depths, too) and not, against the own forward."""
    true, grads = own_step(model, samples)
    assert true[0].std() > 0.03
    prepare_model(model)
    assert runs_packed(model) == packed
    found = []
    for share, toll in [(True, recurrent.TOLL), (False, recurrent.TOLL), (True, 0)][: 2 + states]:
        batch = pack(samples, share_prompts=share)
        if states:
            set_packed(model, toll=toll)
            _, padded = recurrent.plan_rows(model, batch)
            assert sum(bool(block.after) for block in padded.blocks) >= (4 if toll == 0 else share)
        out = torch.stack(forward(model, batch))[:, batch.mask]
        assert (out - true).abs().max() < 1e-4
        (out * coefficients(batch)).sum().backward()
        for name, p in model.named_parameters():
            if name in grads:
                scale = grads[name].abs().max().clamp(min=1e-4)
                assert (p.grad - grads[name]).abs().max() < 2e-3 * scale, (name, share)
        found.append((out.detach(), {name: p.grad for name, p in model.named_parameters() if name in grads}))
        model.zero_grad(set_to_none=True)
    if states:
        _, (apart, true), (shared, ours) = found
        assert (shared - apart).abs().max() < 1e-5
        largest = max(x.abs().max() for x in true.values())
        assert max((x - true[name]).abs().max() for name, x in ours.items()) < 1e-5 * largest


@pytest.mark.slow_cases("falcon_h1", "gpt_oss", "jamba", "nemotron_h", "qwen3_5_text", "minimax")
@pytest.mark.parametrize("model_type", PACKED)
def test_packed(model_type):
    compare(built(model_type), groups(), packed=True, states=model_type in STATES)


@pytest.mark.slow_cases("llama4_text", "rwkv")
@pytest.mark.parametrize("model_type", UNPACKED)
def test_unpacked(model_type):
    compare(built(model_type), groups(), packed=False)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", REST)
def test_rarer_types(model_type):
    if model_type not in CONFIG_MAPPING:
        pytest.skip("not in this version of transformers")
    compare(built(model_type), groups(), packed=model_type != "xlstm", states=model_type in REST[:6])


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "nemotron_h"])
def test_gradient_checkpointing_of_transformers_has_the_plan_or_is_refused(model_type):
    model, batch = prepare_model(built(model_type)), pack(groups())
    forward(model, batch).logp.sum().backward()
    true = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    model.train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="would recompute layers without the plan of the pack"):
        forward(model, batch)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": recomputing})
    forward(model, batch).logp.sum().backward()
    for p, grad in zip(model.parameters(), true, strict=True):
        assert (p.grad is None) == (grad is None)
        assert grad is None or torch.allclose(p.grad, grad, atol=1e-4, rtol=1e-3)


def first_only(states, x, _layer=0, state_idx=0, **_):
    """`update_recurrent_state` of a layer whose final state is right at the start of a document only."""
    states.recurrent.setdefault(state_idx, x)
    return x


WRONG = {"of_rows": lambda *_: recurrent.States(), "update_recurrent_state": first_only}


@pytest.mark.slow_cases("of_rows")
@pytest.mark.parametrize("name", WRONG)
def test_kernels_of_a_device_that_differ_leave_the_model_unpacked(monkeypatch, name):
    """The CPU in place of a device: what the recurrent layers return is as its kernels would have it."""
    config, cpu = shrunk(config_of("qwen3_5_text")), torch.device("cpu")
    assert families.verdict_on(cpu, config, Verdict(True), forward) == Verdict(True)
    monkeypatch.setattr(recurrent.States, name, WRONG[name])
    found = families.verdict_on(cpu, config, Verdict(True), forward)
    assert not found.packed
    assert found.reason.startswith("on cpu, its packed log-probs differ from its own forward by")


def test_a_packed_model_samples_and_saves_as_before(tmp_path):
    """Outside of a packed forward the recurrent layers are transformers' own; the weights have their names."""
    model = built("qwen3_5_text")
    ids, names = torch.tensor([[5, 7, 9, 11]]), list(model.state_dict())
    before = model(input_ids=ids).logits
    prepare_model(model)
    assert list(model.state_dict()) == names
    model.set_attn_implementation("eager")
    assert torch.allclose(model(input_ids=ids).logits, before, atol=1e-5)
    model.save_pretrained(tmp_path)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.allclose(again(input_ids=ids).logits, before, atol=1e-5)
