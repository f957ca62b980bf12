"""LoRA on every model type that is trained: what is exported is what was trained, or it is refused before training."""

from __future__ import annotations

import copy
import importlib.util
import logging
import re
import warnings
from pathlib import Path

import pytest
import torch
import transformers as hf
from model_types import config_of
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model import checkpoint
from rlkit.model.checkpoint import load_checkpoint, save_checkpoint
from rlkit.model.lora import adapters, add_lora, only_adapter_trains, write_adapter
from rlkit.model.optim import adamw
from rlkit.model.small_copy import shrunk
from rlkit.model.weights import Form, export_hf, stream_weights
from rlkit.scripts.args import Lora

pytestmark = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
TRAINED = re.findall(r"^\| `([\w-]+)` \| (?:un)?packed", PAGE.read_text(), re.MULTILINE)
REFUSED = {"gpt2", "gpt-sw3", "phimoe", "mixtral", "qwen3_moe", "olmoe", "jamba", "nemotron_h"}  # known by hand
IN_CI = ["llama", "qwen2_moe", "gpt2", "phimoe", "mixtral", "qwen3_moe", "jamba", "nemotron_h", "qwen3_5_text", "lfm2"]
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
        model = hf.AutoModelForCausalLM.from_config(small, dtype=torch.float32, attn_implementation="eager")
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


def check_export(model, folder):
    """transformers' own model of the exported folder has the logits of the model with its adapters."""
    after = trained(model)
    export_hf(model, None, folder)
    loaded, info = hf.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert (logits(loaded.eval()) - after).abs().max() < 1e-4 * after.abs().max()


def check(model_type, folder):
    """Exported as trained, or refused in one line; then so with the layers that the message names. True: refused."""
    model = built(model_type)
    plain = {name: x.shape for name, x in stream_weights(copy.deepcopy(model))}
    try:
        add_lora(model, rank=2)
    except ValueError as error:
        (message,) = str(error).splitlines()
        found = re.fullmatch(
            r"LoRA adapts linear layers only, not .+ \([^()]+\); layers to name as targets \(--lora-targets\): (.+)",
            message,
        )
        assert found, message
        if not found[1].startswith("none"):
            model = add_lora(built(model_type), rank=2, targets=found[1].split(", "))
            check_export(model, folder)
        return True
    assert {name: x.shape for name, x in stream_weights(model)} == plain
    check_export(model, folder)
    return False


@pytest.mark.parametrize("model_type", IN_CI)
def test_a_model_with_adapters_is_exported_as_it_was_trained_or_refused(model_type, tmp_path):
    assert check(model_type, tmp_path / "model") == (model_type in REFUSED)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_trained_model_type_is_exported_with_adapters_or_refused(tmp_path):
    refused = {name for name in TRAINED if name in CONFIG_MAPPING and check(name, tmp_path / name)}
    assert refused >= REFUSED & set(TRAINED)
    assert len(refused) < len(TRAINED) / 3


def test_the_message_names_modules_and_what_can_be_adapted():
    with pytest.raises(ValueError, match=r"model\.layers\.\*\.mlp\.experts \(MixtralExperts\)") as error:
        add_lora(built("mixtral"), rank=2)
    assert str(error.value).endswith("(--lora-targets): k_proj, o_proj, q_proj, v_proj")
    with pytest.raises(ValueError, match=r"attn\.c_attn \(Conv1D\).*: none, so train all weights"):
        add_lora(built("gpt2"), rank=2)
    with pytest.raises(ValueError, match=r"not model\.layers\.\*\.mlp\.router \(PhimoeTopKRouter\)"):
        add_lora(built("phimoe"), rank=2)


def test_an_adapter_that_the_forward_would_pass_by_is_refused():
    """Jamba computes with `dt_proj.weight`: the adapter trained nothing, and the export had it."""
    with pytest.raises(ValueError, match=r"not model\.layers\.\*\.mamba\.dt_proj \(JambaMambaMixer reads its weight\)"):
        add_lora(built("jamba"), rank=2, targets=["dt_proj", "x_proj"])


@pytest.mark.parametrize("targets", [["lm_head"], ["q_proj", "lm_head"]])
def test_an_adapter_of_the_head_is_refused(targets):
    """The fused log-probs read the head's weight, so its adapter would train nothing."""
    with pytest.raises(ValueError, match=r"not lm_head \(the head\)"):
        add_lora(built("llama"), rank=2, targets=targets)


def test_a_target_that_no_module_has_is_refused():
    """peft ignores it, where another one fits."""
    with pytest.raises(
        ValueError, match=r"`lora_targets` qproj: the model has no such module; its linear layers: .*q_proj"
    ):
        add_lora(built("llama"), rank=2, targets=["qproj", "v_proj"])
    with pytest.raises(ValueError, match=r"^LoRA on LlamaForCausalLM: [^\n]+$"):
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
    apart = stream.in_form(Form.BASE)
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
    rest = alone.in_form(Form.ADAPTER)
    assert rest.base is None
    assert len(list(rest)) == 2 * len(adapters(model))
    assert whole.in_form(Form.MERGED) is whole
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
    model, _ = adapted_model()
    model.get_input_embeddings().weight.requires_grad_(True)
    assert not only_adapter_trains(model)
