"""LoRA: only the adapter trains, the same on four ranks as on one; merged, saved and switched off exactly."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import DTensor

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.loops.sft import sft
from rlkit.model import launch
from rlkit.model.checkpoint import load_checkpoint, save_checkpoint
from rlkit.model.forward import Policy, compute_log_probs, forward, load_model, prepare_model, reference_policy
from rlkit.model.lora import (
    adapter_off,
    adapter_weights,
    adapters,
    add_lora,
    dropping,
    save_adapter,
    snapshot,
    without_adapter,
)
from rlkit.model.optim import adamw, optimizer_step
from rlkit.model.parallelize import parallelize
from rlkit.model.quantized import Quantized
from rlkit.model.sharding import mesh_of
from rlkit.model.weights import export_hf, stream_weights
from rlkit.packing import pack
from rlkit.parallel.data import rank_microbatches
from rlkit.parallel.mesh import Parallel, make_mesh
from rlkit.rollout.engines.local import LocalEngine
from rlkit.settings import ParallelArgs, Schedule
from rlkit.types import SamplingParams, Trajectory

pytest.importorskip("peft")


def base():
    sizes = {"hidden": 32, "layers": 2, "heads": 8, "kv_heads": 4, "head_dim": 8, "intermediate": 44}
    return tiny_model(tiny_tokenizer(), **sizes)


def moe():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=263, hidden_size=32, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, head_dim=8,
        moe_intermediate_size=12, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, initializer_range=0.1,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).eval()


def batch():
    draw = lambda n: [(11 * i + n) % 263 for i in range(n)]
    groups = [[Trajectory(draw(p), draw(n), [True] * n, [-1.0] * n, [0] * n)] * 2 for p, n in [(5, 9), (3, 4), (8, 11)]]
    return pack(groups)


def train(model, mesh=None, steps=3):
    optimizer = adamw(model, lr=1e-2, eps=1e-4)
    losses = []
    for _ in range(steps):
        full = batch()
        for micro, w in rank_microbatches((full, full.mask / full.mask.sum()), mesh=mesh, max_tokens=64):
            loss = -(w * forward(model, micro).logp).sum()
            loss.backward()
            losses.append(loss.item())
        optimizer_step(optimizer, max_norm=0.5, model=model)
    return optimizer, losses


def logp(model):
    return compute_log_probs(partial(forward, model), batch(), max_tokens=64)


def trained_on_one(kind):
    model = add_lora(prepare_model(kind()), rank=4)
    assert torch.equal(logp(model), logp(prepare_model(kind()))), "b starts at 0"
    train(model)
    return model


@pytest.fixture(scope="module")
def trained():
    return trained_on_one(base)


def test_only_the_adapter_trains(trained):
    truth = dict(base().named_parameters())
    for name, p in trained.named_parameters():
        assert p.requires_grad == (".lora_" in name)
        if not p.requires_grad:
            assert torch.equal(p, truth[name.replace(".base_layer", "")])
    assert len(adapters(trained)) == 14
    assert not torch.allclose(logp(trained), logp(prepare_model(base())), atol=1e-2)


def test_reference_is_the_model_before_training(trained):
    policy = partial(forward, trained)
    reference = without_adapter(policy, trained)
    truth = logp(prepare_model(base()))
    assert torch.equal(compute_log_probs(reference, batch(), max_tokens=64), truth)
    assert not torch.equal(logp(trained), truth), "the adapter is on again"
    assert all(p.requires_grad for n, p in trained.named_parameters() if ".lora_" in n)
    with pytest.raises(ValueError, match="no adapter"), adapter_off(base()):
        pass


def test_merged_weights_compute_what_the_adapter_does(trained, tmp_path):
    plain = base()
    weights = dict(stream_weights(trained))
    assert weights.keys() == dict(plain.named_parameters()).keys()
    plain.load_state_dict(weights)
    torch.testing.assert_close(logp(prepare_model(plain)), logp(trained), atol=2e-5, rtol=1e-5)
    from transformers import AutoModelForCausalLM

    again = AutoModelForCausalLM.from_pretrained(export_hf(trained, None, tmp_path / "m"))
    torch.testing.assert_close(logp(prepare_model(again)), logp(trained), atol=2e-5, rtol=1e-5)


def test_saved_adapter_loads_with_peft(trained, tmp_path):
    import peft

    path = save_adapter(trained, tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(base(), path).merge_and_unload()
    torch.testing.assert_close(logp(prepare_model(loaded)), logp(trained), atol=2e-5, rtol=1e-5)


@pytest.mark.slow_cases("moe")
@pytest.mark.parametrize("kind", [base, moe])
def test_the_embedded_engine_samples_from_the_adapted_model(trained, kind):
    trained = trained if kind is base else trained_on_one(kind)
    engine = LocalEngine(trained, eos_token_ids=())
    done = asyncio.run(engine.generate([5, 6, 7], params=SamplingParams(max_new_tokens=9, seed=1)))
    sampled = pack([[Trajectory([5, 6, 7], done.ids, [True] * 9, done.logp, done.versions)]])
    torch.testing.assert_close(forward(trained, sampled).logp, sampled.rollout_logp, atol=1e-5, rtol=1e-5)


def lora_on_rank(rank, world, kind, sizes, options, folder):
    mesh = make_mesh(Parallel(**sizes))
    model = parallelize(add_lora(kind(), rank=4), mesh, **options)
    optimizer, _ = train(model, mesh)
    weights = {k: v.clone() for k, v in stream_weights(model)}
    path = save_checkpoint(folder / "c", step=3, model=model, optimizer=optimizer, state={}, keep=1)
    save_adapter(model, folder / "adapter")
    other = parallelize(add_lora(kind(), rank=4, seed=1), mesh, **options)
    load_checkpoint(path, model=other, optimizer=adamw(other, lr=1e-2))
    for (name, a), b in zip(stream_weights(other), weights.values(), strict=True):
        assert torch.equal(a, b), name
    truth = compute_log_probs(partial(forward, prepare_model(kind())), batch(), max_tokens=64)
    off = compute_log_probs(without_adapter(partial(forward, model), model), batch(), max_tokens=64)
    torch.testing.assert_close(off, truth, atol=2e-5, rtol=1e-5)
    return weights, logp(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes", "options"),
    [
        (base, {"cp": 2, "shard": 2}, {"activation_checkpointing": True}),
        (moe, {"cp": 2, "shard": 2}, {"activation_checkpointing": True}),
        (base, {"shard": 4}, {}),
        (moe, {"shard": 4}, {}),
        (base, {"replicate": 2}, {}),
    ],
)
def test_four_ranks_train_the_same_adapter(ranks, trained, tmp_path, kind, sizes, options):
    import peft

    trained = trained if kind is base else trained_on_one(kind)
    truth, expected = dict(stream_weights(trained)), logp(trained)
    for weights, found in ranks.run(lora_on_rank, kind, sizes, options, tmp_path):
        assert weights.keys() == truth.keys()
        for name, x in weights.items():
            torch.testing.assert_close(x, truth[name], atol=3e-6, rtol=1e-5)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    loaded = peft.PeftModel.from_pretrained(kind(), tmp_path / "adapter").merge_and_unload()
    torch.testing.assert_close(logp(prepare_model(loaded)), expected, atol=1e-4, rtol=1e-4)


def from_files_on_rank(rank, world, folder, sizes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "load_model", None)  # it would hold the whole model on every rank
        model = launch.load_policy(folder, ParallelArgs(**sizes), lora_rank=4)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        launch.report_model(model, dtype="fp32")
    before = {name: x.clone() for name, x in adapter_weights(model)}
    train(model, mesh_of(model))
    save_adapter(model, folder / "adapter", tokenizer=tiny_tokenizer())
    return said.getvalue(), before, {name: x.clone() for name, x in stream_weights(model)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (base, {"replicate": 2}),
        (base, {"pp": 2, "offload": True}),
        (moe, {"pp": 2}),
        (base, {"shard": 4}),
        (moe, {"shard": 4}),
    ],
)
def test_ranks_read_their_shards_and_start_with_the_adapter_of_one_process(ranks, tmp_path, kind, sizes):
    import peft
    from transformers import AutoTokenizer

    model = kind()
    model.save_pretrained(tmp_path)
    size = sum(p.numel() for p in model.parameters())
    adapted = {name: p for name, p in model.model.layers.named_parameters() if p.ndim > 1 and ".gate." not in name}
    trained = 4 * sum((len(p) if p.ndim == 3 else 1) * sum(p.shape[-2:]) for p in adapted.values())
    names = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in adapted})
    alone = launch.load_policy(tmp_path, ParallelArgs(), lora_rank=4)
    start = {name: x.clone() for name, x in adapter_weights(alone)}
    assert min(float(x.std()) for name, x in start.items() if "lora_A" in name) > 0.05
    train(alone)
    truth = dict(stream_weights(alone))
    for rank, (said, before, weights) in enumerate(ranks.run(from_files_on_rank, tmp_path, sizes)):
        text = f"model: {size:,} parameters on cpu and 3 other ranks, fp32; trains LoRA of rank 4 "
        text += f"on {len(adapted)} modules ("
        assert said == (f"{text}{trained:,} parameters): {', '.join(names)}\n" if rank == 0 else "")
        assert before.keys() == start.keys()
        assert all(torch.equal(x, start[name]) for name, x in before.items())
        assert weights.keys() == truth.keys()
        for name, x in weights.items():
            torch.testing.assert_close(x, truth[name], atol=3e-6, rtol=1e-5)
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").merge_and_unload()
    assert AutoTokenizer.from_pretrained(tmp_path / "adapter").get_vocab() == tiny_tokenizer().get_vocab()
    torch.testing.assert_close(logp(prepare_model(loaded)), logp(alone), atol=1e-4, rtol=1e-4)


def quantized_on_rank(rank, world, folder, sizes, lora):
    model = launch.load_policy(folder / "model", ParallelArgs(**sizes), **lora)
    assert all(isinstance(x, DTensor) for adapter in adapters(model).values() for x in (adapter.a, adapter.b))
    held = {name: p.codes.nbytes + p.scales.nbytes for name, p in model.named_parameters() if isinstance(p, Quantized)}
    optimizer, _ = train(model, mesh_of(model))
    path = save_checkpoint(folder / "c", step=3, model=model, optimizer=optimizer, state={}, keep=1)
    save_adapter(model, folder / "adapter")
    weights = {name: x.clone() for name, x in stream_weights(model)}
    other = launch.load_policy(folder / "model", ParallelArgs(**sizes), **lora)
    load_checkpoint(path, model=other, optimizer=adamw(other, lr=1e-2))
    again = launch.load_policy(folder / "model", ParallelArgs(**sizes), **lora, adapter=folder / "adapter")
    for restored in (other, again):
        assert all(torch.equal(x, weights[name]) for name, x in stream_weights(restored))
    return weights, held


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "bits", "world", "sizes"),
    [
        (base, "nf4", 2, {"activation_checkpointing": True}),
        (base, "int8", 4, {"pp": 2, "cp": 2, "offload": True}),
        (moe, "nf4", 4, {"replicate": 2}),
    ],
)
def test_adapters_on_a_quantized_base_are_those_of_one_process(pool, tmp_path, kind, bits, world, sizes):
    """Each rank holds the codes of its layers whole, and a shard of their adapters."""
    kind().bfloat16().save_pretrained(tmp_path / "model")
    lora = {"lora_rank": 4, "lora_base": bits}
    alone = launch.load_policy(tmp_path / "model", ParallelArgs(), **lora)
    codes = {name: p.codes.nbytes + p.scales.nbytes for name, p in alone.named_parameters() if isinstance(p, Quantized)}
    train(alone)
    truth = dict(stream_weights(alone))
    results = pool(world).run(quantized_on_rank, tmp_path, sizes, lora)
    assert {name: size for _, held in results for name, size in held.items()} == codes
    for weights, held in results:
        assert len(held) == len(codes) // sizes.get("pp", 1)
        assert weights.keys() == truth.keys()
        for name, x in weights.items():
            torch.testing.assert_close(x, truth[name], atol=3e-6, rtol=1e-5)


def experts_over_ep(rank, world):
    with pytest.raises(ValueError, match=r"ep=2 trains no adapters of experts \(\S+down_proj\): give other targets"):
        parallelize(add_lora(moe(), rank=4), make_mesh(Parallel(ep=2, shard=4)))
    cut = parallelize(add_lora(moe(), rank=4, targets=["q_proj"]), make_mesh(Parallel(ep=2, shard=4)))
    assert all(".lora_" in name for name, p in cut.named_parameters() if p.requires_grad)


@pytest.mark.slow
def test_adapters_of_experts_are_refused_with_expert_parallel(ranks):
    ranks.run(experts_over_ep)


def adapters_of_a_stage(rank, world):
    """The first layer, of two, is on the first of two stages: both refuse it."""
    mesh = make_mesh(Parallel(pp=2))
    with pytest.raises(ValueError, match="only 1 of pp=2 pipeline stages have adapters: give them to modules of all"):
        parallelize(add_lora(base(), rank=4, targets=["layers.0.self_attn.q_proj"]), mesh)
    both = add_lora(base(), rank=4, targets=["layers.0.self_attn.q_proj", "layers.1.mlp.up_proj"])
    return [*adapters(parallelize(both, mesh))]


def test_adapters_on_the_layers_of_some_stages_only_are_refused(pool):
    first, last = pool(2).run(adapters_of_a_stage)
    assert first == ["model.layers.0.self_attn.q_proj.weight"]
    assert last == ["model.layers.1.mlp.up_proj.weight"]


@pytest.mark.parametrize(("given", "kept"), [("owner/name", "owner/name"), ("", None)])
def test_a_saved_adapter_names_its_model(trained, tmp_path, monkeypatch, given, kept):
    monkeypatch.setattr(trained, "name_or_path", given)
    save_adapter(trained, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == kept


def adapter_on_rank(rank, world, folder, sizes):
    model = launch.load_policy(folder / "adapter", ParallelArgs(**sizes))
    start = {name: x.clone() for name, x in adapter_weights(model)}
    policy = Policy(model)
    reference = reference_policy(policy, snapshot(model))
    train(model, mesh_of(model))
    both = [compute_log_probs(p, batch(), max_tokens=64, mesh=mesh_of(model)) for p in (reference, policy)]
    return start, *both


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"shard": 2, "pp": 2}, {"shard": 4, "reshard_after_forward": False}])
def test_ranks_train_an_adapter_on_and_keep_it_as_it_was_for_a_reference(ranks, tmp_path, sizes):
    base().save_pretrained(tmp_path / "model")
    save_adapter(trained_on_one(lambda: load_model(tmp_path / "model")), tmp_path / "adapter")
    truth = adapter_on_rank(0, 1, tmp_path, {})
    assert (truth[1] - truth[2]).abs().max() > 0.01
    for start, *logps in ranks.run(adapter_on_rank, tmp_path, sizes):
        assert start.keys() == truth[0].keys()
        assert all(torch.equal(x, truth[0][name]) for name, x in start.items())
        for found, expected in zip(logps, truth[1:], strict=True):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def merged_on_rank(rank, world, folder, sizes):
    policy = launch.load_policy(folder / "adapter", ParallelArgs(**sizes), lora_rank=0)
    critic = launch.load_critic(folder / "adapter", ParallelArgs(**sizes), lora_rank=3)
    weights = [{name: x.clone() for name, x in stream_weights(model)} for model in (policy, critic)]
    return *weights, len(adapters(policy)), len(adapters(critic))


@pytest.mark.slow
def test_ranks_merge_an_adapter_and_cut_what_it_makes(ranks, tmp_path):
    base().save_pretrained(tmp_path / "model")
    trained = trained_on_one(lambda: load_model(tmp_path / "model"))
    save_adapter(trained, tmp_path / "adapter")
    truth = dict(stream_weights(trained))
    for policy, critic, adapted, of_critic in ranks.run(merged_on_rank, tmp_path, {"shard": 4}):
        assert (adapted, of_critic) == (0, 14)
        assert policy.keys() == truth.keys()
        for name, x in truth.items():
            torch.testing.assert_close(policy[name], x, atol=1e-6, rtol=1e-5)
            if name in critic:
                torch.testing.assert_close(critic[name], x, atol=1e-6, rtol=1e-5)


def dropped_on_rank(rank, world, checkpointing):
    torch.manual_seed(0)
    adapted = add_lora(base(), rank=2, dropout=0.5)
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if ".lora_B." in name:
                p.normal_()
    model = parallelize(adapted, make_mesh(Parallel()), activation_checkpointing=checkpointing)
    torch.manual_seed(1)
    with dropping(model):
        logp = forward(model, pack([[Trajectory([3, 4, 5], [6, 7, 8], [True] * 3, [-1.0] * 3, [0] * 3)]])).logp
        logp.sum().backward()
    return logp.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_dropped_inputs_are_the_same_where_layers_are_computed_again(pool):
    (kept,), (again,) = (pool(1).run(dropped_on_rank, checkpointing) for checkpointing in (False, True))
    torch.testing.assert_close(again[0], kept[0])
    assert kept[1].keys() == again[1].keys()
    for name, grad in kept[1].items():
        torch.testing.assert_close(again[1][name], grad)


def masks_on_rank(rank, world, folder, sizes):
    """Which of a layer's first inputs are dropped in the first forward of a run, of equal examples."""
    torch.manual_seed(0)
    model, masks = parallelize(add_lora(base(), rank=2, dropout=0.5), make_mesh(Parallel(**sizes))), []
    layer = next(m for name, m in model.named_modules() if name.endswith("q_proj.lora_dropout.default"))
    layer.register_forward_hook(lambda _m, _i, out: masks.append((out.flatten()[:64] == 0).tolist()))
    examples = [SimpleNamespace(ids=[3, 4, 5, 6], mask=[True] * 4) for _ in range(4)]
    sft(model, None, examples, Schedule(folder, steps=1), batch_size=4)
    return masks[0]


@pytest.mark.parametrize("sizes", [{"shard": 2}, {"cp": 2}])
def test_ranks_drop_other_inputs_than_each_other(pool, tmp_path, sizes):
    first, second = pool(2).run(masks_on_rank, tmp_path / "run", sizes)
    assert 8 < sum(first) < 56
    assert 8 < sum(second) < 56
    assert first != second


def resized_on_rank(rank, world, path, adapter):
    args = ParallelArgs(activation_checkpointing=True)
    rows = [launch.load_policy(path, args, min_rows=300), launch.load_judge(path, args, min_rows=300)]
    critic = launch.load_critic(path, args, adapter=adapter)
    return [int(model.get_input_embeddings().weight.shape[0]) for model in rows], type(critic).__name__


def test_an_embedding_is_resized_on_a_mesh_of_one_rank(pool, trained, tmp_path):
    save_adapter(trained, tmp_path / "adapter")
    base().save_pretrained(tmp_path / "base")
    ((rows, kind),) = pool(1).run(resized_on_rank, tmp_path / "base", tmp_path / "adapter")
    assert rows == [300, 300]
    assert kind == "ShardedModel"
