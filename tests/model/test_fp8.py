"""FP8 checkpoints: what is read, trained, sampled and exported is scale times code, as loops over the files say."""

from __future__ import annotations

import asyncio
import importlib.util
import json

import pytest
import torch
import transformers as hf
from fp8_files import E4M3, FORMS, written
from safetensors.torch import load_file, save_file

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model.forward import Policy, load_model
from rlkit.model.heads import load_reward_model
from rlkit.model.launch import load_policy, report_model
from rlkit.model.lora import adapters, add_lora, only_adapter_trains, save_adapter
from rlkit.model.quantized import Quantized, dequantized
from rlkit.model.weights import export_hf, stream_weights
from rlkit.packing import pack
from rlkit.rollout.engines.local import LocalEngine
from rlkit.rollout.engines.servers.checks import checked, shapes
from rlkit.settings import ParallelArgs
from rlkit.types import SamplingParams, Trajectory

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")


def with_adapters(model, targets="all-linear"):
    model = add_lora(model, rank=3, targets=targets)
    torch.manual_seed(1)
    with torch.no_grad():
        for adapter in adapters(model).values():
            adapter.b.normal_(std=0.05)
    return model


def logp_of(model, prompt, ids):
    t = Trajectory(prompt, ids, [True] * len(ids), [0.0] * len(ids), [0] * len(ids), reward=0.0)
    batch = pack([[t]])
    return Policy(model)(batch).logp[batch.mask]


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_codes_times_scales_held_or_in_fp32(form, tmp_path):
    whole = written(tmp_path, form)
    held, plain = load_model(tmp_path, dtype="auto"), load_model(tmp_path)
    assert len(whole) == 14
    for (name, x), y in zip(held.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(x, Quantized) is (name in whole)
        assert (x.dtype, y.dtype, type(y)) == (torch.float32, torch.float32, torch.nn.Parameter)
        assert torch.equal(dequantized(x), y)
        if name in whole:
            torch.testing.assert_close(y.double(), whole[name], atol=0, rtol=1e-7)
            assert x.codes.dtype == E4M3
            assert not x.requires_grad
    assert not hasattr(held.config, "quantization_config")


@needs_peft
def test_adapters_train_on_codes_as_on_a_dense_copy(tmp_path):
    """Log-probs and gradients, also in bf16."""
    written(tmp_path)
    held, plain = (with_adapters(load_model(tmp_path, dtype=kind)) for kind in ("auto", torch.float32))
    for model in (held, plain):
        logp_of(model, [5, 9], [3, 20, 31]).sum().backward()
    for name, (a, b, *_) in adapters(held).items():
        torch.testing.assert_close(a.grad, adapters(plain)[name].a.grad, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(b.grad, adapters(plain)[name].b.grad, atol=1e-6, rtol=1e-5)
        assert b.grad.any()
    batch = pack([[Trajectory([5], [9, 3], [True] * 2, [0.0] * 2, [0] * 2, reward=0.0)]])
    half = [Policy(model, dtype="bf16")(batch).logp for model in (held, plain)]
    torch.testing.assert_close(*half, atol=0, rtol=0)


@needs_peft
@pytest.mark.parametrize("form", ["blocks", "rows"])
def test_what_trains_is_sampled_streamed_and_exported(form, tmp_path):
    """transformers reads the export as a plain bf16 checkpoint."""
    whole = written(tmp_path / "base", form)
    model = with_adapters(load_model(tmp_path / "base", dtype="auto"))
    engine = LocalEngine(model, max_batch=2, max_len=64, eos_token_ids=())
    answer = asyncio.run(engine.generate([5, 9, 3], params=SamplingParams(max_new_tokens=8, temperature=1.0, seed=3)))
    logp = logp_of(model, [5, 9, 3], list(answer.ids)).detach()
    torch.testing.assert_close(torch.tensor(answer.logp), logp, atol=1e-5, rtol=0)
    sent = dict(stream_weights(model))
    for name, (a, b, scale, *_) in adapters(model).items():
        torch.testing.assert_close(sent[name].double(), whole[name] + scale * (b @ a).double(), atol=1e-6, rtol=1e-6)
    export_hf(model, None, tmp_path / "model")
    files = load_file(tmp_path / "model" / "model.safetensors")
    assert {x.dtype for x in files.values()} == {torch.bfloat16}
    assert files.keys() == sent.keys()
    assert "quantization_config" not in json.loads((tmp_path / "model" / "config.json").read_text())
    for name, x in sent.items():
        assert torch.equal(files[name], x.bfloat16())


@needs_peft
def test_peft_adds_the_adapter_to_what_transformers_reads(tmp_path):
    import peft

    written(tmp_path / "base", "powers of 2", tiny_model(tiny_tokenizer(), hidden=64, intermediate=96, layers=2))
    model = with_adapters(load_model(tmp_path / "base", dtype="auto"))
    assert only_adapter_trains(model), "servers of the same checkpoint have these weights"
    save_adapter(model, tmp_path / "adapter")
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32)
    expected = loaded(torch.tensor([[5, 9, 3, 20]])).logits.log_softmax(-1)[0, [0, 1, 2], [9, 3, 20]]
    torch.testing.assert_close(logp_of(model, [5], [9, 3, 20]), expected, atol=1e-5, rtol=1e-5)


@needs_peft
def test_fused_experts_are_held_and_have_no_adapters(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 44, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_experts": 3}
    moe = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(vocab_size=99, num_experts_per_tok=2, **sizes))
    whole = written(tmp_path, "blocks", moe)
    assert len(whole) == 4 + 3 * 3
    held, plain = (with_adapters(load_model(tmp_path, dtype=kind), ["q_proj"]) for kind in ("auto", torch.float32))
    assert [p.ndim for p in held.parameters() if isinstance(p, Quantized)] == [2, 2, 2, 2, 3, 3]
    for name, x in stream_weights(held):
        if name in whole and "q_proj" not in name:
            torch.testing.assert_close(x.double(), whole[name], atol=0, rtol=1e-7)
    copies = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: copies.append(t.shape) or t, lambda t: t):
        logp = logp_of(held, [5, 9], [3, 20, 31, 8])
    assert not {(3, 88, 64), (88, 64), (64, 44)} & set(copies)
    logp.sum().backward()
    expected = logp_of(plain, [5, 9], [3, 20, 31, 8])
    expected.sum().backward()
    torch.testing.assert_close(logp, expected, atol=1e-5, rtol=1e-5)
    for name, adapter in adapters(held).items():
        torch.testing.assert_close(adapter.a.grad, adapters(plain)[name].a.grad, atol=1e-6, rtol=1e-4)
    with pytest.raises(ValueError, match="no such module; choose from: k_proj, o_proj, q_proj, v_proj"):
        add_lora(load_model(tmp_path, dtype="auto"), targets=["gate_up_proj"])


@needs_peft
def test_flags_choose_between_codes_and_copies(tmp_path, capsys):
    """LoRA holds them, a full training and a reward model train copies, which the line of the model says."""
    whole = written(tmp_path)
    num = sum(w.numel() for w in whole.values())
    for lora, ending in (
        ({"lora_rank": 2}, f"; {num:,} parameters are held in fp8"),
        ({}, "; its FP8 weights are deq"),
    ):
        report_model(load_policy(tmp_path, ParallelArgs(), **lora), dtype="fp32")
        assert ending in capsys.readouterr().out
    four_bits = load_policy(tmp_path, ParallelArgs(), lora_rank=2, lora_base="nf4")
    assert {p.kind for p in four_bits.parameters() if isinstance(p, Quantized)} == {"nf4"}
    judge = load_reward_model(tmp_path)
    for name, w in whole.items():
        torch.testing.assert_close(judge.get_parameter(name).double(), w, atol=0, rtol=1e-7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: {k: x for k, x in t.items() if "up_proj.weight_scale" not in k},
            r"up_proj.* without `weight_scale`",
        ),
        (lambda t: t | {k: x[:1] for k, x in t.items() if "up_proj.weight_s" in k}, r"\[100, 48\] has scales \[1, 2\]"),
        (lambda t: {k: x.to(torch.float8_e5m2) if x.dtype == E4M3 else x for k, x in t.items()}, "is F8_E5M2"),
        (lambda t: t | {"model.layers.0.mlp.up_proj.scales": torch.ones(1)}, "1 tensors of quantized weights"),
    ],
)
def test_codes_that_cannot_be_read_are_refused(change, message, tmp_path):
    written(tmp_path)
    save_file(
        change(load_file(tmp_path / "model.safetensors")), tmp_path / "model.safetensors", metadata={"format": "pt"}
    )
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)


def test_plain_weights_are_not_sent_to_a_server_of_codes(tmp_path):
    written(tmp_path)
    with pytest.raises(
        ValueError, match=r"the served model has FP8 weights .*, which plain ones cannot replace: train an"
    ):
        checked([], shapes(str(tmp_path)))


@needs_peft
@pytest.mark.slow
def test_a_run_resumes_and_its_export_is_what_was_evaluated(tmp_path, monkeypatch):
    from rlkit.run.folder import read_metrics
    from rlkit.scripts import cli

    monkeypatch.chdir(tmp_path)
    written(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"{i}", "response": "yes" * (1 + i % 2)} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [
        "--data",
        "rows.jsonl",
        "--eval-data",
        "rows.jsonl",
        "--batch-size",
        "4",
        "--warmup-steps",
        "0",
        "--device",
        "cpu",
        "--lr",
        "0.02",
    ]
    lora = ["--lora-rank", "4", "--eval-steps", "4", "--save-steps", "2", "--output", "run"]
    cli.main(["sft", "--model", "model", *flags, *lora, "--steps", "2"])
    cli.main(["sft", "--model", "model", *flags, *lora, "--steps", "4", "--resume"])
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    for again, atol in (("run/adapter", 1e-6), ("run/model", 5e-3)):  # the export is in bf16
        cli.main(["sft", "--model", again, *flags, "--steps", "1", "--eval-steps", "1", "--output", f"{again}-again"])
        assert read_metrics(tmp_path / f"{again}-again")[0]["eval/loss"] == pytest.approx(
            lines[-1]["eval/loss"], abs=atol
        )
