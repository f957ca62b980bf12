"""Adapters of peft and of runs: loaded with peft's log-probs, trained on and exported, or refused in one line."""

from __future__ import annotations

import importlib.util
import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model.adapter_files import read_adapter
from rlkit.model.forward import Policy, load_model, make_policy, reference_policy
from rlkit.model.launch import load_critic, load_policy, reference_of
from rlkit.model.lora import adapters, add_lora, load_adapter, merge_adapter, save_adapter, snapshot
from rlkit.model.weights import export_hf
from rlkit.packing import pack
from rlkit.settings import ParallelArgs
from rlkit.types import Trajectory

pytestmark = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
IDS = [5, 9, 3, 20, 31, 8, 77, 2]
BATCH = pack([[Trajectory(IDS[:3], IDS[3:], [True] * 5, [0.0] * 5, [0] * 5)]])
KINDS = {
    "plain": {},
    "some layers": {"target_modules": r".*layers\.1\..*(q|v)_proj"},
    "rslora": {"use_rslora": True},
    "anchors": {"rank_pattern": {"^model.layers.1.self_attn.q_proj": 4}, "alpha_pattern": {"^model.layers.0.*": 64}},
    "patterns": {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"layers.0.self_attn.v_proj": 9}},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "base"
    torch.manual_seed(0)
    tiny_model(tiny_tokenizer(), hidden=32, layers=2, heads=2, kv_heads=1).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def by_peft(base, folder, **options):
    """An adapter that peft makes and saves, with numbers that change the log-probs; and peft's log-probs."""
    import peft
    from transformers import AutoModelForCausalLM

    given = {"r": 2, "lora_alpha": 7, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(**given | options))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(std=0.3) if ".lora_" in name else None
    model.save_pretrained(folder)
    return log_probs(model), folder


def log_probs(model):
    """Of the answer's tokens, by transformers' own forward."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0, 2:-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(IDS[3:])[:, None])[:, 0]


def ours(model):
    with torch.no_grad():
        return Policy(model)(BATCH).logp


def close(one, other):
    return torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@pytest.mark.slow_cases("plain", "rslora")
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_peft_has_its_log_probs_on_every_road(kind, base, tmp_path):
    import peft
    from transformers import AutoModelForCausalLM

    truth, folder = by_peft(base, tmp_path / "adapter", **KINDS[kind])
    plain = ours(load_model(base))
    assert (plain - truth).abs().max() > 0.01
    model = load_policy(folder, ParallelArgs())
    close(ours(model), truth)
    close(ours(load_policy(base, ParallelArgs(), adapter=folder, lora_rank=0)), truth)
    close(ours(merge_adapter(load_model(base), folder)), truth)
    save_adapter(model, tmp_path / "again")
    assert json.loads((tmp_path / "again/adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    close(log_probs(peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "again")), truth)
    close(ours(load_policy(tmp_path / "again", ParallelArgs())), truth)
    export_hf(model, None, tmp_path / "merged")
    close(log_probs(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), truth)


@pytest.mark.parametrize("model_type", ["mixtral", "gpt2"])
def test_adapters_of_experts_and_transposed_layers_load_as_peft_saves_them(model_type, tmp_path):
    import peft
    from test_lora import built, logits

    logging.getLogger("transformers").setLevel(logging.ERROR)
    model, target = built(model_type), {"target_modules": ["c_attn"]}
    if model_type == "mixtral":
        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        target = {"target_modules": ["q_proj"], "target_parameters": names}
    adapted = peft.get_peft_model(built(model_type), peft.LoraConfig(r=2, **target))
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            p.normal_(std=0.3) if ".lora_" in name else None
    adapted.save_pretrained(tmp_path)
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(tmp_path)}))
    truth = logits(adapted)
    assert (logits(model) - truth).abs().max() > 0.01
    for of in (load_adapter, merge_adapter):
        found = of(built(model_type), tmp_path)
        assert (logits(found) - truth).abs().max() < 1e-5 * truth.abs().max(), of
        assert bool(adapters(found)) is (of is load_adapter)
    assert all(p.requires_grad for p in found.parameters())


def test_the_reference_is_the_model_with_the_adapter_as_it_was(base, tmp_path):
    truth, folder = by_peft(base, tmp_path / "adapter")
    model = load_policy(folder, ParallelArgs())
    load = lambda path, **options: load_policy(path, ParallelArgs(), **{"lora_rank": None} | options)
    reference = reference_of(model, None, path=str(base), load=load, adapter=str(folder))
    with torch.no_grad():
        for adapter in adapters(model).values():
            adapter.b.add_(0.5)
    moved = ours(model)
    assert (moved - truth).abs().max() > 0.01
    close(reference_policy(make_policy(model), reference)(BATCH).logp, truth)
    close(ours(model), moved), "and the policy is as before"
    merged = load_policy(base, ParallelArgs(), adapter=folder, lora_rank=0)
    other = reference_of(merged, None, path=str(base), load=load, adapter=str(folder))
    close(ours(other), truth)
    close(reference_policy(make_policy(model), model)(BATCH).logp, ours(load_model(base))), "as ever without a snapshot"


def test_a_reference_at_a_snapshot_leaves_a_gradient_alone(base, tmp_path):
    """Log-probs of the reference may be computed between the forward and the backward of the policy."""
    _, folder = by_peft(base, tmp_path / "adapter")
    grads = []
    for between in (False, True):
        model = load_policy(folder, ParallelArgs())
        reference = reference_policy(make_policy(model), snapshot(model))
        with torch.no_grad():
            next(iter(adapters(model).values())).b.add_(0.5)
        loss = Policy(model)(BATCH).logp.sum()
        if between:
            reference(BATCH)
        loss.backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]))
    assert torch.equal(*grads)


def test_a_critic_starts_from_the_merged_weights(base, tmp_path):
    _, folder = by_peft(base, tmp_path / "adapter")
    truth = dict(merge_adapter(load_model(base), folder).named_parameters())
    for given in ({"path": folder}, {"path": base, "adapter": folder}):
        critic = load_critic(args=ParallelArgs(), **given)
        for name, p in critic.named_parameters():
            assert name.startswith("score") or torch.equal(p, truth[name])
    critic = load_critic(base, ParallelArgs(), adapter=folder, lora_rank=3)
    assert {adapter.a.shape[0] for adapter in adapters(critic).values()} == {3}


def edited(folder, **changes):
    config = folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))


def test_the_base_is_found_from_here_and_from_the_adapter(base, tmp_path, monkeypatch):
    _, folder = by_peft(base, tmp_path / "adapter")
    (tmp_path / "here").symlink_to(base)
    for name in ("../here", "here"):  # from the adapter's folder; from the current one
        edited(folder, base_model_name_or_path=name)
        if name == "here":
            monkeypatch.chdir(tmp_path)
        assert load_policy(folder, ParallelArgs()).name_or_path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"base_model_name_or_path": "/gone/model"},
            r"base model '/gone/model', which is not there: give it: --model BA",
        ),
        ({"base_model_name_or_path": None}, r"names no base model: give it: --model BASE --adapter"),
        ({"peft_type": "PROMPT_TUNING"}, "is of peft's type PROMPT_TUNING, and rlkit trains LORA: merge it"),
        ({"use_dora": True}, "has use_dora, which rlkit does not train: merge it into its model by peft"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save, which rlkit does not train"),
        ({"new_in_peft": {"x": 1}}, "has new_in_peft, which rlkit does not train"),
        ({"bias": "all"}, r"has trained biases \(bias 'all'\)"),
        ({"init_lora_weights": "pissa"}, r"began with pissa \(init_lora_weights\), which changes the base weights"),
        ({"r": "2"}, r"adapter_config.json is damaged: r is '2'"),
        ({"r": 10**9}, r"adapter_config.json is damaged: r is 1000000000"),
        ({"rank_pattern": {"q_proj": 10**9}}, r"adapter_config.json is damaged: rank_pattern is"),
        ({"alpha_pattern": [1]}, r"adapter_config.json is damaged: alpha_pattern is \[1\]"),
        ({"lora_dropout": "a"}, r"adapter_config.json is damaged: lora_dropout is 'a'"),
        ({"r": 3}, r"is of another model: .*q_proj.lora_A.weight is \[2, 32\], not \[3, 32\]"),
    ],
)
def test_what_rlkit_does_not_compute_is_refused_in_one_line(changes, message, base, tmp_path):
    _, folder = by_peft(base, tmp_path / "adapter", target_modules=["q_proj"])
    edited(folder, **changes)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as found:
        load_policy(folder, ParallelArgs())
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "base_model.model.model.embed_tokens.weight",
            r"holds base_model.model.model.embed_tokens.weight beside adapters",
        ),
        ("base_model.model.model.layers.7.mlp.up_proj.lora_A.weight", "does not fit Qwen3ForCausalLM: model.layers.7"),
        ("base_model.model.lm_head.lora_A.weight", r"does not fit .*: LoRA does not adapt lm_head \(the head\)"),
    ],
)
def test_weights_that_have_no_place_are_refused(name, message, base, tmp_path):
    _, folder = by_peft(base, tmp_path / "adapter", target_modules=["q_proj"])
    file = folder / "adapter_model.safetensors"
    save_file(load_file(file) | {name: torch.zeros(2, 32)}, file)
    with pytest.raises(ValueError, match=message):
        load_policy(folder, ParallelArgs())


@pytest.mark.parametrize("options", [{}, {"layers_to_transform": [0]}], ids=["cut short", "chosen layers"])
def test_layers_that_the_config_names_and_the_file_lacks_are_told(options, base, tmp_path, caplog):
    _, folder = by_peft(base, tmp_path / "adapter", target_modules=["q_proj"], **options)
    load_policy(folder, ParallelArgs())
    assert "has no weights for" not in caplog.text
    file = folder / "adapter_model.safetensors"
    save_file({name: x for name, x in load_file(file).items() if "layers.0." in name}, file)
    load_policy(folder, ParallelArgs())
    said = "has no weights for 1 of the 2 layers that its target_modules name, as model.layers.1.self_attn.q_proj"
    assert (said in caplog.text) == (not options)


def test_layers_of_the_file_that_its_config_does_not_name_are_told(base, tmp_path, caplog):
    _, folder = by_peft(base, tmp_path / "adapter", target_modules=["q_proj", "v_proj"])
    load_policy(folder, ParallelArgs())
    assert "do not name" not in caplog.text
    edited(folder, target_modules=["q_proj"])
    load_policy(folder, ParallelArgs())
    assert "do not name 2 of its 4 layers, as model.layers.0.self_attn.v_proj: peft leaves those out" in caplog.text


def test_no_pickle_of_an_adapter_is_read(base, tmp_path):
    _, folder = by_peft(base, tmp_path / "adapter", target_modules=["q_proj"])
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(FileNotFoundError, match=r"has no adapter_model.safetensors: save the adapter"):
        read_adapter(folder)


def test_an_adapter_that_changes_nothing_is_named(base, tmp_path, caplog):
    model = add_lora(load_model(base), rank=2)
    for name, value in (("untrained", 0.0), ("trained", 1e-3)):
        with torch.no_grad():
            [*adapters(model).values()][-1].b.fill_(value)
        save_adapter(model, tmp_path / name)
        load_adapter(load_model(base), tmp_path / name)
    said = [line for line in caplog.messages if "all its lora_B are 0, as before any training" in line]
    assert len(said) == 1
    assert "untrained' changes nothing" in said[0]
