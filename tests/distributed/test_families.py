"""Every covered architecture, with what makes it special, against transformers' own eager forward, and over ranks."""

from __future__ import annotations

import pytest
import torch
import transformers
from fp8_files import written

from rlkit.model.forward import forward, load_model, prepare_model
from rlkit.model.parallelize import load_parallel, parallelize
from rlkit.model.small_copy import shrunk
from rlkit.packing import pack
from rlkit.parallel.data import each_stage, of_last_stage, rank_microbatches
from rlkit.parallel.mesh import Parallel, make_mesh
from rlkit.types import Trajectory

COMMON = dict(
    vocab_size=67, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    intermediate_size=44, pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.2,
)  # fmt: skip
WINDOW = ["sliding_attention", "full_attention"]
FAMILIES = {
    "Llama": dict(attention_bias=True, mlp_bias=True),
    "Mistral": dict(sliding_window=5),
    "Qwen2": dict(use_sliding_window=True, sliding_window=4, layer_types=WINDOW, tie_word_embeddings=True),
    "Qwen3": dict(use_sliding_window=True, sliding_window=6, layer_types=WINDOW),
    "Gemma2": dict(sliding_window=5, attn_logit_softcapping=2.0, final_logit_softcapping=3.0, query_pre_attn_scalar=17),
    "Gemma3": dict(sliding_window=5, layer_types=WINDOW, query_pre_attn_scalar=9),
}
LAYOUTS = [dict(tp=2, cp=2), dict(pp=2)]
OTHERS = [dict(tp=2), dict(cp=2, ulysses=True)]
CASES = [pytest.param(family, LAYOUTS, id=family) for family in FAMILIES]
CASES += [pytest.param(family, OTHERS, id=f"{family}-others", marks=pytest.mark.slow) for family in FAMILIES]
CASES += [pytest.param("Gemma2", OTHERS[1:], id="Gemma2-ulysses")]  # windows and softcaps of some heads


def build(family: str):
    config = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config(**COMMON, **FAMILIES[family])).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model


def groups():
    generator = torch.Generator().manual_seed(1)
    draw = lambda n: torch.randint(3, 67, (n,), generator=generator).tolist()
    out = []
    for prompt_len, lens in [(9, [14, 3]), (1, [11]), (4, [2, 6])]:
        prompt = draw(prompt_len)
        out.append([Trajectory(prompt, draw(n), [True] * n, [0.0] * n, [0] * n) for n in lens])
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_eager_per_sequence(family):
    model, samples = build(family), groups()
    model.set_attn_implementation("eager")
    true = []
    for t in (t for g in samples for t in g):
        ids = torch.tensor([t.prompt_ids + t.ids])
        logp = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)[len(t.prompt_ids) - 1 : -1]
        true.append(logp.gather(1, torch.tensor(t.ids)[:, None])[:, 0])
    prepare_model(model)
    for share in (True, False):
        out = forward(model, batch := pack(samples, share_prompts=share))
        torch.testing.assert_close(out.logp[batch.mask], torch.cat(true), atol=2e-5, rtol=1e-5)


def on_rank(rank, world, family, layouts):
    """Largest errors of log-probs and gradients per layout, relative to the largest entry."""
    batch = pack(groups())
    weights = torch.sin(torch.arange(batch.num_tokens) + 1.0) * batch.mask

    def run(model, share):
        out = forward(model, batch, temperature=0.8)
        (share * weights * (out.logp - 0.1 * out.entropy)).sum().backward()
        return out.logp.detach(), {n: whole(p.grad) for n, p in model.named_parameters()}

    logp, grads = run(prepare_model(build(family)), 1.0)
    errors = {}
    for sizes in layouts:
        mesh = make_mesh(Parallel(**sizes))
        found, found_grads = run(parallelize(build(family), mesh), 1 / mesh.dp)
        found_grads = added(each_stage(found_grads, mesh=mesh))
        name = " ".join(sizes)
        errors[f"{name} logp"] = error(of_last_stage(found, mesh=mesh), logp)
        assert found_grads.keys() == grads.keys()
        for n in grads:
            errors[f"{name} {n}"] = error(found_grads[n], grads[n])
    return errors


def sharded_on_rank(rank, world, folder):
    """The largest error of a gradient, relative to its largest entry, of a model that each rank reads whole and shards.

    Micro-batches differ between ranks, also in their number of padded blocks.
    """
    batch = pack(groups())
    weights = torch.sin(torch.arange(batch.num_tokens) + 1.0) * batch.mask

    def gradients(model, mesh):
        for micro, w in rank_microbatches((batch, weights), mesh=mesh, max_tokens=26):
            out = forward(model, micro)
            (w * (out.logp - 0.1 * out.entropy)).sum().backward()
        return {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}

    one = gradients(load_model(folder), None)
    mesh = make_mesh(Parallel(shard=world))
    found = gradients(load_parallel(folder, mesh, activation_checkpointing=True), mesh)
    return max(error(found[n], one[n]) for n in one if one[n].abs().max() > 1e-6), found.keys() == one.keys()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "bloom"])
def test_other_types_train_sharded(ranks, tmp_path, model_type):
    """Recurrent layers in a pack, and a model that runs unpacked."""
    torch.manual_seed(0)
    config = shrunk(transformers.CONFIG_MAPPING[model_type](initializer_range=0.2))
    config.vocab_size = COMMON["vocab_size"]
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for worst, same in ranks.run(sharded_on_rank, tmp_path):
        assert same
        assert worst < 1e-4


@pytest.mark.slow
def test_an_fp8_checkpoint_trains_sharded(ranks, tmp_path):
    written(tmp_path, model=transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON)))
    for worst, same in ranks.run(sharded_on_rank, tmp_path):
        assert same
        assert worst < 1e-4


def added(stages):
    """The gradients of all stages; that of a tied weight is in two parts."""
    out = {}
    for name, x in (item for stage in stages for item in stage.items()):
        out[name] = out[name] + x if name in out else x
    return out


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def error(a, b):
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.slow_cases("Gemma2", "Gemma3", "Qwen3", "Llama", "Mistral", "Qwen2")
@pytest.mark.parametrize(("family", "layouts"), CASES)
def test_every_layout_equals_one_process(ranks, family, layouts):
    for errors in ranks.run(on_rank, family, layouts):
        worst = max(errors, key=errors.get)
        assert errors[worst] < 1e-5, (worst, errors[worst])
