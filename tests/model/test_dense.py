"""The dense forward equals the model's own packed forward in values and gradients, and steps aside where it may not."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from rlkit.model import dense
from rlkit.model.forward import forward, prepare, token_outputs
from rlkit.model.heads import values
from rlkit.packing import pack, select
from rlkit.types import Trajectory

SIZE = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
CONFIGS = {
    "qwen3": (Qwen3Config, {}),
    "qwen3 with biases": (Qwen3Config, {"attention_bias": True}),
    "qwen2": (Qwen2Config, {}),
    "llama": (LlamaConfig, {"tie_word_embeddings": False}),
    "llama with biases": (LlamaConfig, {"attention_bias": True}),
    "llama with scaled frequencies": (LlamaConfig, {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "heads wider than the model": (Qwen3Config, {"head_dim": 24}),
    "one key head": (LlamaConfig, {"num_key_value_heads": 1}),
}  # fmt: skip


def make(name="qwen3", dtype=torch.float32, **more):
    kind, settings = CONFIGS[name]
    torch.manual_seed(0)
    model = prepare(AutoModelForCausalLM.from_config(kind(**{**SIZE, **settings, **more})).to(dtype))
    with torch.no_grad():
        for p in model.parameters():  # norms are 1 and biases 0 otherwise
            p.add_(0.1 * torch.randn_like(p))
    return model


def make_batch(*, share=True, prompts=(5, 1, 20)):
    generator = torch.Generator().manual_seed(1)

    def draw(n):
        return torch.randint(0, 61, (n,), generator=generator).tolist()

    groups = []
    for length in prompts:
        prompt, lens = draw(length), (3, 1, 18)
        groups.append([Trajectory(prompt, draw(n), [True] * n, [-1.0] * n, [0] * n) for n in lens])
    return pack(groups, share_prompts=share)


def outputs(model, batch, dtype="fp32"):
    out = forward(model, batch, dtype=dtype)
    places = torch.linspace(-1, 2, batch.num_tokens)
    grads = torch.autograd.grad((places * out.logp + out.entropy).sum(), list(model.parameters()))
    return [out.logp.detach(), out.entropy.detach(), *grads]


def distance(a, b):
    return max((x - y).norm().item() / (1e-6 + y.norm().item()) for x, y in zip(a, b, strict=True))


def own(monkeypatch, function, *args, **kwargs):
    with monkeypatch.context() as patch:
        patch.setattr(dense, "covers", lambda model: False)
        return function(*args, **kwargs)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_values_and_gradients_equal_those_of_transformers(monkeypatch, name, share):
    model, batch = make(name, torch.float64), make_batch(share=share)
    assert dense.covers(model)
    truth = own(monkeypatch, outputs, model, batch)
    assert distance(outputs(model, batch), truth) < 1e-5  # transformers' norms are fp32 for any dtype


@pytest.mark.parametrize("prompts", [(5, 1, 20), (4, 2), (40, 30)])
@pytest.mark.parametrize("name", ["qwen3", "qwen2", "one key head"])
def test_the_same_in_fp32(monkeypatch, name, prompts):
    """With segments of few queries only, of many, and of both."""
    model, batch = make(name), make_batch(prompts=prompts)
    assert distance(outputs(model, batch), own(monkeypatch, outputs, model, batch)) < 2e-5


def test_layers_of_different_sizes(monkeypatch):
    """As after structured pruning."""
    model, batch = make(), make_batch(prompts=(4, 2))
    mlp = model.model.layers[-1].mlp
    for linear, dim in ((mlp.gate_proj, 0), (mlp.up_proj, 0), (mlp.down_proj, 1)):
        linear.weight = torch.nn.Parameter(linear.weight.detach().narrow(dim, 0, 5).contiguous())
    assert dense.covers(model)
    assert distance(outputs(model, batch), own(monkeypatch, outputs, model, batch)) < 2e-5


def test_bf16_products_are_as_exact_as_those_of_transformers(monkeypatch):
    model, batch = make(), make_batch()
    truth = outputs(model, batch)
    theirs = distance(own(monkeypatch, outputs, model, batch, "bf16"), truth)
    assert 1e-4 < distance(outputs(model, batch, "bf16"), truth) <= 1.5 * theirs


def test_a_second_derivative_is_refused():
    model, batch = make(), make_batch()
    parameters = list(model.parameters())
    hidden = token_outputs(model, batch, lambda hidden, _: (hidden.float().square().sum(-1),))[0]
    first = torch.autograd.grad(hidden.sum(), parameters[1], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_a_head_of_values_reads_the_same_hidden_states(monkeypatch):
    model, batch = make(), make_batch()
    model.score = nn.Linear(32, 1)
    assert torch.allclose(values(model, batch), own(monkeypatch, values, model, batch), atol=1e-5)


def test_an_empty_batch_gives_no_rows_and_a_gradient_of_zeros():
    model, batch = make(), make_batch()
    empty = select(batch, torch.tensor([], dtype=torch.long))
    out = forward(model, empty)
    assert out.logp.shape == (0,)
    assert not any(g.any() for g in torch.autograd.grad(out.logp.sum(), list(model.parameters())))


def test_three_fifths_of_the_activations_are_saved(monkeypatch):
    model, batch = make(), make_batch(prompts=(40,) * 8)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def saved():
        sizes = {}

        def keep(x):
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = forward(model, batch)  # kept until the sizes are summed, so that no address is used twice
        assert out.logp.requires_grad
        return sum(size for address, size in sizes.items() if address not in weights)

    assert saved() < 0.6 * own(monkeypatch, saved)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def replaced(model):
    layer = model.model.layers[1].mlp
    layer.up_proj.__class__ = Doubled


CHANGES = {
    "a hook": lambda m: m.model.layers[0].mlp.register_forward_hook(lambda *_: None),
    "a hook before": lambda m: m.model.layers[2].self_attn.q_proj.register_forward_pre_hook(lambda *_: None),
    "a hook of the backward": lambda m: m.model.norm.register_full_backward_hook(lambda *_: None),
    "another forward": lambda m: setattr(m.model.layers[0], "forward", m.model.layers[0].forward),
    "another class": replaced,
    "checkpointed layers": lambda m: m.gradient_checkpointing_enable(),
    "a frozen parameter": lambda m: m.model.layers[0].input_layernorm.weight.requires_grad_(False),
    "two dtypes": lambda m: m.model.layers[0].mlp.double(),
    "bf16 parameters": lambda m: m.to(torch.bfloat16),
    "a wrapped module": lambda m: setattr(m.model.layers[0], "mlp", nn.Sequential(m.model.layers[0].mlp)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_runs_its_own_forward(change):
    model = make()
    assert dense.covers(model)
    CHANGES[change](model)
    assert not dense.covers(model)


@pytest.mark.parametrize("settings", [
    {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "use_sliding_window": True},
    {"hidden_act": "gelu"},
    {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
])  # fmt: skip
def test_other_architectures_run_their_own_forward(settings):
    assert not dense.covers(AutoModelForCausalLM.from_config(Qwen3Config(**{**SIZE, **settings})))


def test_a_frozen_model_and_scoring_take_the_same_forward_as_training():
    model, batch = make(), make_batch()
    trained = forward(model, batch).logp
    with torch.no_grad():
        assert torch.equal(forward(model, batch).logp, trained)
    model.requires_grad_(False)
    assert dense.covers(model)
    assert torch.equal(forward(model, batch).logp, trained)


def test_a_partly_frozen_model_takes_its_own_forward_for_scoring_too():
    model, batch = make(), make_batch()
    model.model.layers[0].requires_grad_(False)
    trained = forward(model, batch).logp
    with torch.no_grad():
        assert torch.equal(forward(model, batch).logp, trained)
