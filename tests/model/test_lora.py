"""LoRA on every model type that is trained: what is exported is what was trained, or it is refused before training."""

from __future__ import annotations

import importlib.util
import logging
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from model_types import config_of
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model import checkpoint
from rlkit.model.checkpoint import load_checkpoint, save_checkpoint
from rlkit.model.lora import adapters, add_lora, only_adapter_trains, save_adapter, write_adapter
from rlkit.model.optim import adamw
from rlkit.model.parallelize import parallelize
from rlkit.model.small_copy import shrunk
from rlkit.model.vision import auto_class
from rlkit.model.weights import Payload, export_hf, in_names_of, stream_weights
from rlkit.scripts.args import Lora
from rlkit.settings import Parallel

pytestmark = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
TRAINED = re.findall(r"^\| `([\w-]+)` \| (?:un)?packed", PAGE.read_text(), re.MULTILINE)
REFUSED = {"falcon"}  # its layers have a forward of their own
PEFT_LOSES = {"laguna", "inkling2_text", "inkling2_loop_text"}  # peft 0.21 renames layers of its own files, too
IN_CI = ["llama", "gpt2", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_vl_moe", "nemotron_h", "falcon", "moshi"]
IDS = torch.tensor([[5, 9, 3, 20, 31, 8]])


def built(model_type):
    """A small model with large weights."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip("not in this version of transformers")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        small = shrunk(config_of(model_type))
        model = auto_class(small).from_config(small, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.2) if p.ndim > 1 else p.add_(0.2 * torch.randn_like(p))
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def trained(model):
    """Adapters that are no longer 0, which change the logits."""
    before = logits(model)
    with torch.no_grad():
        for adapter in adapters(model).values():
            adapter.b.normal_(std=0.3)
    after = logits(model)
    assert (after - before).abs().max() > 0.01 * before.abs().max()
    return after


def check_export(model, folder, tolerance):
    """transformers' own model of the exported folder has the logits of the model."""
    truth = logits(model)
    export_hf(model, None, folder)
    loaded, info = auto_class(model.config).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert (logits(loaded.eval()) - truth).abs().max() < tolerance * truth.abs().max()


def check(model_type, folder, tolerance=1e-5):
    """Exported as it is, and merged as it was trained, which peft loads too; or refused in one line."""
    import peft

    model, plain = built(model_type), built(model_type)
    check_export(plain, folder / "plain", tolerance)
    weights = dict(stream_weights(plain))
    shapes, again = {name: x.shape for name, x in weights.items()}, in_names_of(plain, weights)
    assert all(torch.equal(p, again[name]) for name, p in plain.named_parameters())
    if model_type in REFUSED:
        with pytest.raises(ValueError, match=r"^LoRA adapts linear layers and experts, and \w+ has none: train"):
            add_lora(model, rank=2)
        return
    add_lora(model, rank=2)
    assert {name: x.shape for name, x in stream_weights(model)} == shapes
    after = trained(model)
    check_export(model, folder / "merged", tolerance)
    save_adapter(model, folder / "adapter")
    if model_type not in PEFT_LOSES:
        loaded = peft.PeftModel.from_pretrained(plain, folder / "adapter")
        assert (logits(loaded) - after).abs().max() < tolerance * after.abs().max()


@pytest.mark.slow_cases("qwen3_vl_moe", "nemotron_h")
@pytest.mark.parametrize("model_type", IN_CI)
def test_a_model_with_adapters_is_exported_as_it_was_trained_or_refused(model_type, tmp_path):
    check(model_type, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_trained_model_type_is_exported_plain_and_with_adapters_or_refused(tmp_path):
    for name in (name for name in TRAINED if name in CONFIG_MAPPING):
        check(name, tmp_path / name, tolerance=2e-4)  # a router or an indexer may choose others


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_the_gradients_of_experts_are_those_of_a_loop_over_tokens(model_type):
    """In fp64, from the documented layout of a and b; gpt_oss' weights are [experts, in, out]."""
    model = add_lora(built(model_type), rank=3, alpha=6, targets=["gate_up_proj", "down_proj"])
    trained(model)
    experts = model.model.layers[0].mlp.experts
    plain, width = experts.get_base_layer(), model.config.hidden_size
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, width, generator=generator, requires_grad=True)
    chosen = torch.randint(0, 4, (7, 2), generator=generator)
    weights, upstream = (torch.rand(size, generator=generator) for size in ((7, 2), (7, width)))
    (experts(hidden, chosen, weights) * upstream).sum().backward()
    ours = {name.rpartition(".")[2]: a for name, a in adapters(model).items() if ".layers.0." in name}
    found = [hidden.grad, *(p.grad for a in ours.values() for p in (a.a, a.b))]
    leaves = {name: [p.detach().double().requires_grad_() for p in (a.a, a.b)] for name, a in ours.items()}

    def matrix(name, expert):
        a, b = leaves[name]
        w = getattr(plain, name)[expert].double()
        update = 2 * b[:, expert::4] @ a[3 * expert : 3 * expert + 3]
        return w.T + update if model_type == "gpt_oss" else w + update

    x, out = hidden.detach().double().requires_grad_(), []
    for t, k in ((t, k) for t in range(7) for k in range(2)):
        e = int(chosen[t, k])
        if model_type == "gpt_oss":
            both = matrix("gate_up_proj", e) @ x[t] + plain.gate_up_proj_bias[e]
            gate, up = both[::2].clamp(max=plain.limit), both[1::2].clamp(-plain.limit, plain.limit)
            inner = matrix("down_proj", e) @ ((up + 1) * gate * torch.sigmoid(plain.alpha * gate))
            inner = inner + plain.down_proj_bias[e]
        else:
            gate, up = (matrix("gate_up_proj", e) @ x[t]).chunk(2)
            inner = matrix("down_proj", e) @ (torch.nn.functional.silu(gate) * up)
        out.append((weights[t, k] * inner * upstream[t]).sum())
    torch.stack(out).sum().backward()
    true = [x.grad, *(p.grad for pair in leaves.values() for p in pair)]
    assert len(found) == len(true) == 5
    for a, b in zip(found, true, strict=True):
        assert (a - b).abs().max() < 1e-6 * b.abs().max()


def test_experts_are_named_as_in_the_model_or_as_in_their_checkpoint():
    def names(model_type, targets):
        return {re.sub(r".*\.layers\.\d+\.", "", x) for x in adapters(add_lora(built(model_type), targets=targets))}

    both = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    assert names("qwen3_moe", ["gate_proj", "up_proj", "down_proj"]) == both
    assert names("qwen3_moe", ["gate_up_proj", "down_proj"]) == both
    assert names("mixtral", ["w1", "w3", "w2"]) == both
    assert names("mixtral", ["w2", "k_proj"]) == {"mlp.experts.down_proj", "self_attn.k_proj.weight"}
    assert names("qwen3_moe", r".*\.[qk]_proj") == {"self_attn.q_proj.weight", "self_attn.k_proj.weight"}
    shared = {f"mlp.shared_expert.{part}.weight" for part in ("gate_proj", "up_proj")}
    assert names("qwen2_moe", ["gate_proj", "up_proj"]) == shared | {"mlp.experts.gate_up_proj"}
    with pytest.raises(ValueError, match=r"`lora_targets` up_proj: the model has no such module.* down_proj, gate_up_"):
        names("qwen3_moe", ["up_proj", "q_proj"])
    with pytest.raises(
        ValueError, match=r"does not adapt model\.layers\.\*\.mlp\.experts \(MixtralExperts\); .* gate_up_proj, k_pr"
    ):
        names("mixtral", ["experts"])
    with pytest.raises(ValueError, match=r"does not adapt model\.layers\.\*\.mlp\.router \(PhimoeTopKRouter\)"):
        names("phimoe", ["router"])


def test_dropout_of_experts_is_refused():
    with pytest.raises(
        ValueError, match=r"^`lora_dropout` must be 0 for fused experts \(down_proj, gate_up_proj\), .*: k_proj, o_"
    ):
        add_lora(built("mixtral"), rank=2, dropout=0.1)
    add_lora(built("mixtral"), rank=2, dropout=0.1, targets=["q_proj"])


def test_an_adapter_that_the_forward_would_pass_by_is_refused():
    """Jamba computes with `dt_proj.weight`: the adapter trained nothing, and the export had it."""
    with pytest.raises(
        ValueError, match=r"does not adapt model\.layers\.\*\.mamba\.dt_proj \(JambaMambaMixer reads its weight\)"
    ):
        add_lora(built("jamba"), rank=2, targets=["dt_proj", "x_proj"])


def test_layers_that_share_one_weight_have_no_adapters():
    """Each had its own, and an export, which has the weight once, the first one's for all."""
    config = CONFIG_MAPPING["zamba2"](
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, pad_token_id=0,
        layers_block_type=["mamba", "hybrid"] * 2, mamba_d_state=8, n_mamba_heads=4, mamba_headdim=16, chunk_size=8,
    )  # fmt: skip
    model = auto_class(config).from_config(config)
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in adapters(add_lora(model, rank=2))} == {
        "linear", "in_proj"
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"shared_transformer\.self_attn\.q_proj \(it has one weight with another"):
        add_lora(auto_class(config).from_config(config), rank=2, targets=["q_proj"])
    with pytest.raises(ValueError, match=r"Zamba2ForCausalLM has layers that share weights \(model\.layers\.1\.shared"):
        parallelize(auto_class(config).from_config(config), SimpleNamespace(sizes=Parallel()))


@pytest.mark.parametrize("targets", [["lm_head"], ["q_proj", "lm_head"]])
def test_an_adapter_of_the_head_is_refused(targets):
    """The fused log-probs read the head's weight, so its adapter would train nothing."""
    with pytest.raises(ValueError, match=r"does not adapt lm_head \(the head\)"):
        add_lora(built("llama"), rank=2, targets=targets)


def test_a_target_that_no_module_has_is_refused():
    """peft ignores it, where another one fits."""
    with pytest.raises(ValueError, match=r"`lora_targets` qproj: the model has no such module; choose from: .*q_proj"):
        add_lora(built("llama"), rank=2, targets=["qproj", "v_proj"])
    with pytest.raises(
        ValueError, match=r"does not adapt model\.embed_tokens \(Embedding\) and model\.norm \(LlamaRMSNorm\); "
    ):
        add_lora(built("llama"), rank=2, targets=["embed_tokens", "norm"])


def test_targets_need_a_rank():
    with pytest.raises(ValueError, match="`lora_targets` requires `lora_rank`"):
        Lora(lora_targets=("q_proj",))
    message = "`lora_targets` q_proj,v_proj: several names are separated by blanks: q_proj v_proj"
    with pytest.raises(ValueError, match=message):
        Lora(lora_rank=4, lora_targets=("q_proj,v_proj",))


def adapted_model(seed: int = 0):
    """The demo's model with adapters, and an optimizer that has taken a step."""
    model = add_lora(tiny_model(tiny_tokenizer(), seed=seed), rank=4)
    optimizer = adamw(model, lr=1e-2)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@pytest.mark.slow
def test_a_checkpoint_of_adapters_leaves_out_what_never_changes(tmp_path, monkeypatch):
    model, optimizer = adapted_model()
    path = save_checkpoint(tmp_path / "a", step=1, model=model, optimizer=optimizer, state={}, keep=1)
    other = add_lora(tiny_model(tiny_tokenizer(), seed=0), rank=4, seed=7)
    load_checkpoint(path, model=other, optimizer=adamw(other, lr=1e-2))
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
    monkeypatch.setattr(checkpoint, "base_weights", lambda _: {})  # as up to version 0.1: all weights
    full = save_checkpoint(tmp_path / "b", step=1, model=model, optimizer=optimizer, state={}, keep=1)
    monkeypatch.undo()
    assert size_of(path) < size_of(full) / 4
    changed = add_lora(tiny_model(tiny_tokenizer(), seed=5), rank=4)
    load_checkpoint(full, model=changed, optimizer=None)
    for (name, a), b in zip(model.named_parameters(), changed.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_adapters_are_not_loaded_onto_other_weights(tmp_path):
    model, optimizer = adapted_model()
    path = save_checkpoint(tmp_path, step=1, model=model, optimizer=optimizer, state={}, keep=1)
    other = add_lora(tiny_model(tiny_tokenizer(), seed=5), rank=4)
    with pytest.raises(
        ValueError, match=r"trained on other weights than the model has now \(\S+ and \d+ others differ\)"
    ):
        load_checkpoint(path, model=other, optimizer=adamw(other, lr=1e-2))


def test_a_moving_reference_beside_a_model_with_adapters_is_kept(tmp_path):
    model, _ = adapted_model()
    both = torch.nn.ModuleDict(
        {"policy": model, "reference": tiny_model(tiny_tokenizer(), seed=2).requires_grad_(False)}
    )
    path = save_checkpoint(tmp_path, step=1, model=both, optimizer=None, state={}, keep=1)
    fresh = add_lora(tiny_model(tiny_tokenizer(), seed=0), rank=4)
    other = torch.nn.ModuleDict({"policy": fresh, "reference": tiny_model(tiny_tokenizer(), seed=3)})
    load_checkpoint(path, model=other, optimizer=None)
    for (name, a), b in zip(both.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_base_and_adapter_apart_are_what_peft_merges(tmp_path, dtype):
    import peft

    model, _ = adapted_model()
    stream = stream_weights(model, dtype=dtype)
    assert stream.has_adapter
    apart = stream.in_form(Payload.BASE)
    assert not stream.has_adapter, "the form is chosen once"
    base, adapter = dict(apart.base), dict(apart.adapter)
    original = dict(stream_weights(tiny_model(tiny_tokenizer(), seed=0), dtype=dtype))
    assert base.keys() == original.keys()
    assert all(torch.equal(x, original[name]) for name, x in base.items())
    assert {x.dtype for x in adapter.values()} == {dtype or torch.float32}
    assert stream.num_bytes == sum(x.nbytes for x in [*base.values(), *adapter.values()])
    if dtype is None:
        write_adapter(model, adapter, tmp_path)
        loaded = peft.PeftModel.from_pretrained(tiny_model(tiny_tokenizer(), seed=0), tmp_path).merge_and_unload()
        torch.testing.assert_close(logits(loaded), logits(model), atol=1e-5, rtol=1e-5)


def test_the_adapter_alone_and_all_weights_have_their_bytes():
    model, _ = adapted_model()
    alone, whole = stream_weights(model), stream_weights(model)
    rest = alone.in_form(Payload.ADAPTER)
    assert rest.base is None
    assert len(list(rest)) == 2 * len(adapters(model))
    assert whole.in_form(Payload.MERGED) is whole
    assert whole.num_bytes == 0
    list(whole)
    size = sum(p.nbytes for name, p in model.named_parameters() if ".lora_" not in name)
    assert whole.num_bytes == size
    assert alone.num_bytes == sum(p.nbytes for p in model.parameters() if p.requires_grad) < size / 4


def of_peft(**options):
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **options)
    return peft.inject_adapter_in_model(config, tiny_model(tiny_tokenizer(), seed=0).requires_grad_(False))


@pytest.mark.parametrize(
    ("options", "alone"),
    [
        ({}, True), ({"lora_alpha": 3}, True), ({"use_dora": True}, False), ({"lora_bias": True}, False),
        ({"use_rslora": True}, False), ({"rank_pattern": {"v_proj": 8}}, False), ({"bias": "none"}, True),
        ({"alpha_pattern": {"v_proj": 1}}, False), ({"modules_to_save": ["embed_tokens"]}, False),
    ],
)  # fmt: skip
def test_an_adapter_stands_alone_if_nothing_else_trains_and_all_layers_have_one_form(options, alone):
    assert only_adapter_trains(of_peft(**options)) == alone


def test_a_model_without_adapter_and_one_with_a_trained_embedding_have_none_alone():
    assert not only_adapter_trains(tiny_model(tiny_tokenizer()))
    assert not only_adapter_trains(add_lora(built("mixtral"), rank=2))  # servers take no adapters of experts
    assert only_adapter_trains(add_lora(built("mixtral"), rank=2, targets=["q_proj"]))
    model, _ = adapted_model()
    model.get_input_embeddings().weight.requires_grad_(True)
    assert not only_adapter_trains(model)
