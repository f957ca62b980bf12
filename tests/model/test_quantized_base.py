"""Frozen weights in 8 or 4 bits under adapters: what trains, samples, is saved and exported is one function."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
from statistics import NormalDist

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model.checkpoint import load_checkpoint, save_checkpoint
from rlkit.model.forward import Policy, load_model, prepare_model
from rlkit.model.launch import load_judge, report_model
from rlkit.model.lora import adapter_off, adapters, add_lora, merged, only_adapter_trains
from rlkit.model.optim import adamw
from rlkit.model.quantized import NF4, Quantized, dequantized, quantized
from rlkit.model.weights import export_hf, stream_weights
from rlkit.packing import pack
from rlkit.rollout.engines.local import LocalEngine
from rlkit.settings import ParallelArgs
from rlkit.types import SamplingParams, Trajectory

KINDS = ["int8", "nf4"]
IDS = torch.tensor([[5, 9, 3, 20, 31, 8]])
CODES = {  # of bitsandbytes 0.50.2: quantize_4bit(blocksize=64, quant_type="nf4") and int8_vectorwise_quant
    "nf4": (
        "04c16e29f3b05d17e29f3c05d18e2af4c16e18e3b05d17e29f3b05d18e2af4c16d18e3b04c17e29f3b05d17e2af4c06d18e2"
        "a04c16e29f3b05d17e29f3c05d18"
    ),
    "int8": (
        "81df3d9af856b41270cd2b89e745a2005ebb1977d53390ee4caa0866c3217fdc3a98f654b10f6dcb2986e4429ffd5bb91775"
        "d2308eec4aa70563c01e7cda3895f351af0d6bc82684e2409dfb59b61472d02e8be947a50361be1c7ad73593f14fac0a68c6"
        "2481df3d9af856b41270cd2b89e745a2005ebb1977d53390ee4caa08"
    ),
}
needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")


def test_codes_are_those_of_bitsandbytes():
    w = (torch.arange(128) * 37 % 101 - 50).view(2, 64) / torch.tensor([[64.0], [7.0]])
    for kind, codes in CODES.items():
        assert bytes(quantized(w, kind).codes.flatten().view(torch.uint8).tolist()).hex() == codes


def test_nf4_has_the_quantiles_of_a_normal_distribution():
    """arXiv:2305.14314, appendix E: 8 quantiles above 0, 7 below, and 0, from 1 - (1/30 + 1/32) / 2 to 1/2."""
    end = 1 - (1 / 30 + 1 / 32) / 2
    above = [NormalDist().inv_cdf(end + (0.5 - end) * i / 8) for i in range(8)]
    below = [-NormalDist().inv_cdf(end + (0.5 - end) * i / 7) for i in range(7)]
    levels = sorted([*above, 0.0, *below])
    torch.testing.assert_close(torch.tensor(NF4), torch.tensor([x / max(levels) for x in levels]), atol=2e-6, rtol=0)


@pytest.mark.parametrize("shape", [(48, 96), (7, 13), (64, 64)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_becomes_the_nearest_level_of_its_block(kind, shape):
    torch.manual_seed(0)
    w = torch.randn(shape)
    w[1] = 0
    got = dequantized(quantized(w, kind))
    blocks = w.double().unbind() if kind == "int8" else w.double().flatten().split(64)
    levels = torch.arange(-127, 128) / 127 if kind == "int8" else torch.tensor(NF4)
    nearest = [x.abs().max() * levels.double()[(x[:, None] - x.abs().max() * levels).abs().argmin(1)] for x in blocks]
    torch.testing.assert_close(got.double().flatten(), torch.cat(nearest), atol=1e-6, rtol=0)
    assert got.shape == w.shape


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_multiplies_by_the_dequantized_weight_and_keeps_no_copy(kind):
    torch.manual_seed(0)
    layer = nn.Linear(40, 24)
    layer.weight = nn.Parameter(quantized(layer.weight, kind), requires_grad=False)
    plain, x, grad = dequantized(layer.weight), torch.randn(5, 40, requires_grad=True), torch.randn(5, 24)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        y = layer(x)
    assert plain.shape not in kept
    y.backward(grad)
    torch.testing.assert_close(y, x @ plain.T + layer.bias)
    torch.testing.assert_close(x.grad, grad @ plain)
    with torch.autocast("cpu", torch.bfloat16):
        half = layer(x)
    torch.testing.assert_close(half, F.linear(x.bfloat16(), plain.bfloat16()) + layer.bias.bfloat16())
    torch.testing.assert_close(layer.weight.sum(dtype=torch.float64), plain.sum(dtype=torch.float64))
    for write in (lambda: layer.weight.data.zero_(), lambda: layer.weight.data.copy_(plain)):
        with pytest.raises(TypeError, match="quantized weights are frozen"):
            write()
    other = copy.deepcopy(layer).to("meta", torch.float32)
    assert other.weight.codes.dtype == layer.weight.codes.dtype
    assert {x.device.type for x in (other.weight.codes, other.weight.scales)} == {"meta"}
    assert torch.equal(dequantized(copy.deepcopy(layer).weight), plain)
    with pytest.raises(ValueError, match="can be int8 or nf4, got 'fp4'"):
        quantized(plain, "fp4")


def on_base(kind, **options):
    """A tiny model with trained adapters on a quantized base, and one whose weights are the sum of both."""
    model = prepare_model(tiny_model(tiny_tokenizer(), tie_word_embeddings=True))
    whole, model = copy.deepcopy(model), add_lora(model, rank=3, base=kind, **options)
    torch.manual_seed(1)
    of_layer = dict(model.named_parameters())
    with torch.no_grad():
        for adapter in adapters(model).values():
            adapter.b.normal_(std=0.05)
        for name, p in whole.named_parameters():
            base = of_layer.get(name, of_layer.get(name.replace(".weight", ".base_layer.weight")))
            adapter = adapters(model).get(name)
            p.copy_(dequantized(base) if adapter is None else merged(dequantized(base), adapter))
    return model, whole


def logp_of(model, prompt, ids):
    t = Trajectory(prompt, ids, [True] * len(ids), [0.0] * len(ids), [0] * len(ids), reward=0.0)
    batch = pack([[t]])
    return Policy(model)(batch).logp[batch.mask]


@pytest.mark.slow_cases("int8-options0")
@needs_peft
@pytest.mark.parametrize(("kind", "options"), [("int8", {}), ("nf4", {"targets": ["q_proj", "down_proj"]})])
def test_what_trains_is_sampled_streamed_and_exported(kind, options, tmp_path):
    model, whole = on_base(kind, **options)
    held = {name.split(".")[-2 - (".base_layer." in name)] for name, p in model.named_parameters()
            if isinstance(p, Quantized)}  # fmt: skip
    assert held == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    engine = LocalEngine(model, max_batch=2, max_len=64, eos_token_ids=())
    params = SamplingParams(max_new_tokens=8, temperature=1.0, seed=3)
    answer = asyncio.run(engine.generate([5, 9, 3], params=params))
    expected = logp_of(whole, [5, 9, 3], list(answer.ids)).detach()
    torch.testing.assert_close(torch.tensor(answer.logp), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(logp_of(model, [5, 9, 3], list(answer.ids)), expected, atol=1e-4, rtol=0)
    assert not only_adapter_trains(model), "servers do not have these base weights"
    sent = dict(stream_weights(model))
    assert {type(x) for x in sent.values()} <= {torch.Tensor, nn.Parameter}
    for name, x in dict(stream_weights(whole)).items():
        torch.testing.assert_close(sent[name], x)
    export_hf(model, None, tmp_path / "model")
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    sdpa = copy.deepcopy(whole)
    sdpa.set_attn_implementation("sdpa")
    torch.testing.assert_close(loaded(IDS).logits, sdpa(IDS).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.slow_cases("int8")
@needs_peft
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_have_the_gradients_of_the_dequantized_model(kind):
    model, whole = on_base(kind)
    logp_of(model, [5, 9], [3, 20, 31]).sum().backward()
    logp_of(whole, [5, 9], [3, 20, 31]).sum().backward()
    of_whole = dict(whole.named_parameters())
    for name, (a, b, scale, *_) in adapters(model).items():
        torch.testing.assert_close(b.grad, scale * of_whole[name].grad @ a.T, atol=1e-4, rtol=1e-3)
    with adapter_off(model), torch.no_grad():
        assert not torch.allclose(logp_of(model, [5, 9], [3, 20, 31]), logp_of(whole, [5, 9], [3, 20, 31]), atol=1e-3)


@pytest.mark.slow
@needs_peft
def test_a_checkpoint_is_of_one_base(tmp_path):
    model, _ = on_base("nf4")
    path = save_checkpoint(tmp_path, step=1, model=model, optimizer=adamw(model, lr=0.1), state={}, keep=1)
    fresh = add_lora(prepare_model(tiny_model(tiny_tokenizer(), tie_word_embeddings=True)), rank=3, base="nf4")
    load_checkpoint(path, model=fresh, optimizer=adamw(fresh, lr=0.1))
    assert torch.equal(logp_of(fresh, [5], [9, 3]), logp_of(model, [5], [9, 3]))
    for kind in ("int8", None):
        other = add_lora(prepare_model(tiny_model(tiny_tokenizer(), tie_word_embeddings=True)), rank=3, base=kind)
        with pytest.raises(ValueError, match="trained on other weights than the model has now"):
            load_checkpoint(path, model=other, optimizer=None)


@needs_peft
def test_weights_are_quantized_as_the_files_hold_them(tmp_path):
    """Files in bf16 give the codes that their fp32 copies would; what stays is fp32, as is a judge's head."""
    tiny_model(tiny_tokenizer()).bfloat16().save_pretrained(tmp_path)
    small, plain = (add_lora(load_model(tmp_path, dtype=d), rank=2, base="nf4") for d in ("auto", torch.float32))
    for (name, x), y in zip(small.named_parameters(), plain.parameters(), strict=True):
        assert x.dtype == torch.float32
        assert type(x) is type(y)
        assert torch.equal(dequantized(x), dequantized(y)), name
    judge = load_judge(tmp_path, ParallelArgs(), lora_rank=2, lora_base="nf4")
    kept = {name for name, p in judge.named_parameters() if p.ndim == 2 and ".lora_" not in name}
    assert {name for name in kept if not isinstance(judge.get_parameter(name), Quantized)} == {
        "model.embed_tokens.weight", "score.weight",
    }  # fmt: skip


@needs_peft
def test_what_is_held_in_few_bits_is_printed(capsys):
    model, _ = on_base("nf4")
    report_model(model, dtype="fp32")
    num = sum(m.weight.numel() for name, m in model.named_modules() if name.endswith("proj.base_layer"))
    assert capsys.readouterr().out.endswith(f"; {num:,} parameters are held in nf4\n")
    transposed = hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32))
    with pytest.raises(ValueError, match="`lora_base` quantizes linear layers, and GPT2LMHeadModel has none: drop it"):
        add_lora(transposed, rank=2, base="int8")
