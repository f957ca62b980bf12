"""A checkpoint goes out as it came in: its weights without a place, their dtypes, their permissions, a true config."""

import json
import os
import re
import shutil
import stat

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model.forward import load_model, read_pretrained
from rlkit.model.heads import load_reward_model
from rlkit.model.lora import add_lora, save_adapter
from rlkit.model.pretrained import load_config
from rlkit.model.source import said_of, source_of
from rlkit.model.weights import export_hf
from rlkit.scripts import cli

SMALL = {"hidden": 32, "layers": 2, "intermediate": 64, "heads": 2, "kv_heads": 1, "head_dim": 16}
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "n_routed_experts": 4, "num_experts": 4, "head_dim": 16,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
KINDS = {  # model type -> its layers, a weight of multi-token prediction
    "qwen3_next": (4, "mtp.layers.0.mlp.experts.{}.up_proj.weight"),
    "glm4_moe": (2, "model.layers.2.mlp.experts.{}.up_proj.weight"),
    "deepseek_v3": (2, "model.layers.2.mlp.experts.{}.up_proj.weight"),
}


def tensors_of(folder):
    return {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def edit(folder, **changes):
    (folder / "config.json").write_text(json.dumps(config_of(folder) | changes))


def predicting(folder, model, names, *, dtype=torch.bfloat16):
    """The model in two files, with weights of multi-token prediction."""
    model.to(dtype).save_pretrained(folder)
    whole = tensors_of(folder) | {name: torch.full((3, 5), 0.1, dtype=dtype) for name in names}
    (folder / "model.safetensors").unlink()
    names = sorted(whole)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, some in halves.items():
        save_file({name: whole[name] for name in some}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, some in halves.items() for name in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    edit(folder, num_nextn_predict_layers=1)
    return whole


@pytest.fixture
def tiny(tmp_path):
    """A tiny Llama in bf16 with `mtp.*`, two files; its tensors."""
    folder = tmp_path / "in"
    whole = predicting(folder, tiny_model(tiny_tokenizer(), **SMALL), ["mtp.fc.weight", "mtp.norm.weight"])
    tiny_tokenizer().save_pretrained(folder)
    return folder, whole


@pytest.mark.slow_cases("qwen3_next")
@pytest.mark.parametrize("kind", [pytest.param(x, marks=[pytest.mark.slow] * (x == "deepseek_v3")) for x in KINDS])
def test_weights_of_multi_token_prediction_leave_as_they_came(kind, tmp_path):
    layers, name = KINDS[kind]
    sizes = SIZES | ({"head_dim": 8} if kind == "deepseek_v3" else {})
    config = hf.AutoConfig.for_model(kind, **sizes, num_hidden_layers=layers)
    model = hf.AutoModelForCausalLM.from_config(config)
    before = predicting(tmp_path / "in", model, [name.format(i) for i in range(4)])
    export_hf(load_model(tmp_path / "in"), None, tmp_path / "out", shard_bytes=20_000)
    after = tensors_of(tmp_path / "out")
    assert after.keys() == before.keys()
    assert {name: x.dtype for name, x in after.items()} == {name: x.dtype for name, x in before.items()}
    assert all(torch.equal(after[name], x) for name, x in before.items())
    assert config_of(tmp_path / "out")["num_nextn_predict_layers"] == 1
    assert config_of(tmp_path / "out")["dtype"] == "bfloat16"


def test_a_merged_adapter_carries_them_too(tiny, tmp_path):
    folder, before = tiny
    model = add_lora(load_model(folder), rank=2, alpha=4, targets="all-linear")
    export_hf(model, None, tmp_path / "out")
    after = tensors_of(tmp_path / "out")
    assert after.keys() == before.keys()
    assert torch.equal(after["mtp.fc.weight"], before["mtp.fc.weight"])


def test_the_names_of_an_older_layout_are_no_other_weights(tmp_path):
    """GPT-2's files of the hub have no `transformer.` before their names."""
    model = hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=64, n_positions=32))
    model.save_pretrained(tmp_path / "in")
    old = {name.removeprefix("transformer."): x for name, x in tensors_of(tmp_path / "in").items()}
    save_file(old, tmp_path / "in/model.safetensors", metadata={"format": "pt"})
    assert source_of(load_model(tmp_path / "in")).left == ()


@pytest.mark.parametrize("why", ["gone", "never there", "a reward model"])
def test_what_is_not_carried_is_not_promised(why, tiny, tmp_path, caplog):
    folder, _ = tiny
    if why == "never there":
        tiny_model(tiny_tokenizer(), **SMALL).save_pretrained(folder)
        for file in folder.glob("model-*"):
            file.unlink()
        (folder / "model.safetensors.index.json").unlink()
        edit(folder, num_nextn_predict_layers=1)
    model = (load_reward_model if why == "a reward model" else load_model)(folder)
    if why == "gone":
        shutil.rmtree(folder)
    export_hf(model, None, tmp_path / "out")
    assert not any("mtp" in name for name in tensors_of(tmp_path / "out"))
    assert config_of(tmp_path / "out")["num_nextn_predict_layers"] == 0
    assert "config.json has num_nextn_predict_layers 0 (it was 1), like its weights" in caplog.messages[-1]
    assert ("is gone" in caplog.text) == (why == "gone")


DTYPES = {None: torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.parametrize("given", DTYPES)
def test_weights_leave_in_the_dtype_of_the_files_or_in_that_which_is_asked_for(given, tiny, tmp_path):
    """Weights that train are fp32; bf16 files are half that."""
    folder, _ = tiny
    dtype = None if given is None else DTYPES[given]
    model = load_model(folder)
    assert model.dtype == torch.float32
    out = export_hf(model, None, tmp_path / "out", dtype=dtype)
    assert {x.dtype for name, x in tensors_of(out).items() if "mtp" not in name} == {DTYPES[given]}
    assert config_of(out)["dtype"] == str(DTYPES[given]).removeprefix("torch.")
    assert hf.AutoModelForCausalLM.from_pretrained(out).dtype == DTYPES[given]
    assert model.dtype == torch.float32, "the run's own weights stay"


def test_each_weight_has_its_own_dtype(tiny, tmp_path):
    """Qwen3-Next keeps A_log in fp32 beside bf16, DeepSeek the router's bias."""
    folder, before = tiny
    name = next(name for name in before if name.endswith("model.norm.weight"))
    for file in folder.glob("*.safetensors"):
        some = load_file(file)
        save_file({k: x.float() if k == name else x for k, x in some.items()}, file, metadata={"format": "pt"})
    after = tensors_of(export_hf(load_model(folder), None, tmp_path / "out"))
    assert {k for k, x in after.items() if x.dtype == torch.float32} == {name}


def test_weights_that_fp16_cannot_hold_are_refused(tiny, tmp_path):
    model = load_model(tiny[0])
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 1e5
    with pytest.raises(ValueError, match=r"lm_head\.weight has weights above 65504"):
        export_hf(model, None, tmp_path / "out", dtype=torch.float16)
    assert not (tmp_path / "out").exists()


def test_files_are_for_everyone_who_may_read_new_files(tiny, tmp_path):
    before = os.umask(0o022)
    try:
        export_hf(load_model(tiny[0]), tiny_tokenizer(), tmp_path / "out")
        save_adapter(add_lora(load_model(tiny[0]), rank=2, alpha=4, targets="all-linear"), tmp_path / "adapter")
    finally:
        os.umask(before)
    files = [file for name in ("out", "adapter") for file in (tmp_path / name).iterdir()]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o644}
    assert any(file.suffix == ".safetensors" for file in files)


def test_head_and_embedding_that_differ_stay_two_matrices(tiny, tmp_path, caplog):
    """The config ties them: a server would load one of both in place of the other."""
    folder, before = tiny
    edit(folder, tie_word_embeddings=True)
    model = load_model(folder)
    assert "config.json ties head and embedding, which differ in its files: both train" in caplog.text
    out = export_hf(model, None, tmp_path / "out")
    assert config_of(out)["tie_word_embeddings"] is False
    after = tensors_of(out)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert torch.equal(after[name], before[name])


def test_a_config_that_contradicts_the_weights_is_corrected(tmp_path, caplog):
    model = tiny_model(tiny_tokenizer(), **SMALL)
    rows = model.config.vocab_size
    model.model.embed_tokens = torch.nn.Embedding(rows + 3, 32)
    model.lm_head = torch.nn.Linear(32, rows + 3, bias=False)
    model.model.layers = model.model.layers[:1]
    out = export_hf(model, None, tmp_path / "out")
    assert (config_of(out)["vocab_size"], config_of(out)["num_hidden_layers"]) == (rows + 3, 1)
    assert f"vocab_size {rows + 3} (it was {rows})" in caplog.text
    _, info = hf.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())


def test_a_true_config_is_left_alone(tmp_path, caplog):
    for tied in (False, True):
        export_hf(tiny_model(tiny_tokenizer(), **SMALL, tie_word_embeddings=tied), None, tmp_path / str(tied))
    assert not caplog.messages


RL = ["--reward", "r.py:score", "--max-new-tokens", "4", "--prompts-per-step", "2", "--max-prompt-tokens", "64"]
COMMANDS = {
    "grpo": ["--data", "d.jsonl", *RL, "--group-size", "2"],
    "ppo": ["--data", "d.jsonl", *RL],
    "distill": ["--data", "d.jsonl", *RL[2:], "--teacher", "in"],
    "sft": ["--data", "d.jsonl", "--batch-size", "2"],
    "dpo": ["--data", "pairs.jsonl", "--batch-size", "2"],
    "kto": ["--data", "pairs.jsonl", "--batch-size", "2"],
    "reward_model": ["--data", "pairs.jsonl", "--batch-size", "2"],
}


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_exports_what_it_read(command, tiny, tmp_path, monkeypatch, capfd):
    """Also the second half of a run that is resumed."""
    _, before = tiny
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.py").write_text("def score(completion, row):\n    return float(len(completion))\n")
    for name, keys in (("d", ["response"]), ("pairs", ["chosen", "rejected"])):
        rows = [{"prompt": f"{i}"} | {key: f"{key} {i}" for key in keys} for i in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = [command, "--model", "in", "--device", "cpu", "--output", "o", "--eval-steps", "0", "--lr", "1e-3"]
    line += [*COMMANDS[command], "--warmup-steps", "0"]
    cli.main([*line, "--steps", "1"])
    assert "2 tensors of in (mtp.fc.weight, mtp.norm.weight) have no place in" in capfd.readouterr().out or (
        command == "reward_model"
    )
    cli.main([*line, "--steps", "2", "--resume", "--dtype-export", "bf16"])
    after = tensors_of(tmp_path / "o/model")
    if command == "reward_model":
        assert config_of(tmp_path / "o/model")["num_nextn_predict_layers"] == 0
        return
    assert after.keys() == before.keys()
    assert {x.dtype for x in after.values()} == {torch.bfloat16}
    assert torch.equal(after["mtp.fc.weight"], before["mtp.fc.weight"])
    assert not torch.equal(after["lm_head.weight"], before["lm_head.weight"])


def neox(folder, change=lambda weights: weights, file="model.safetensors"):
    """A GPT-NeoX, whose files call the head `embed_out`, after `change` of its weights."""
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**sizes, intermediate_size=32, bos_token_id=0, eos_token_id=1))
    model.save_pretrained(folder)
    weights = change(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    if file.endswith(".bin"):
        torch.save(weights, folder / file)
    else:
        save_file(weights, folder / file, metadata={"format": "pt"})
    return folder


def read(folder):
    return read_pretrained(hf.AutoModelForCausalLM, folder, load_config(folder), dtype=torch.float32)[0]


def test_a_head_that_files_call_otherwise_is_no_tied_one(tmp_path, caplog):
    folder = neox(tmp_path / "model")
    assert "embed_out.weight" in tensors_of(folder)
    export_hf(read(folder), None, tmp_path / "out")
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is False
    assert "tie_word_embeddings" not in caplog.text
    assert torch.equal(tensors_of(tmp_path / "out")["embed_out.weight"], tensors_of(folder)["embed_out.weight"])


OF_NAMES = {
    "a layer": (lambda w: {k: x for k, x in w.items() if "layers.1." not in k}, "layers.1.attention.dense.bias, 12 of"),
    "a prefix": (lambda w: {f"module.{k}": x for k, x in w.items()}, "save them without the prefix 'module.'"),
    "a checkpoint": (lambda w: {"model": w, "step": 3}, "its file has a dict of model, step in place of weights: save"),
    "zeros": (
        lambda w: {k: 0 * x for k, x in w.items()},
        "its embedding is 0 everywhere: copy or download its weights again",
    ),
    "zeros of the head": (
        lambda w: {k: 0 * x if k == "embed_out.weight" else x for k, x in w.items()},
        "its head is 0 everywhere: copy or download its weights again",
    ),
    "8 bits": (
        lambda w: {k: x.to(torch.float8_e4m3fn) for k, x in w.items()},
        " is F8_E4M3, quantized, and config.json has no quantization_config: load the bf16 or fp32 checkpoint",
    ),
}


@pytest.mark.parametrize("what", OF_NAMES)
def test_files_that_are_not_the_weights_say_why(what, tmp_path):
    change, message = OF_NAMES[what]
    folder = neox(tmp_path / "model", change, "pytorch_model.bin" if what == "a checkpoint" else "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read(folder)
    assert str(error.value).startswith(f"model {str(folder)!r}")


def test_a_stop_token_outside_the_vocabulary_is_named(tmp_path, caplog):
    said = {}
    for end in (63, 64):
        folder = tmp_path / str(end)
        hf.GPTNeoXConfig(vocab_size=64, bos_token_id=0, eos_token_id=1).save_pretrained(folder)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, end]}))
        load_config(folder)
        said[end] = caplog.text
        caplog.clear()
    assert not said[63]
    assert "eos_token_id 64 is not one of the 64 tokens of the vocabulary, and ends no answer" in said[64]


def test_a_layer_beyond_the_config_is_asked_about(tiny):
    """One that config.json does not count trains no more; layers that predict are beyond by design."""
    folder, _ = tiny
    beyond = "config.json has num_hidden_layers 1, and layer 1 of the files is beyond: is it meant?"
    for changes, told in (
        ({"num_hidden_layers": 1, "layer_types": ["full_attention"]}, False),
        ({"num_nextn_predict_layers": 0}, True),
    ):
        edit(folder, **changes)
        said = said_of(source_of(load_model(folder)), load_config(folder))
        assert "do not train, and exports have them unchanged" in said
        assert (beyond in said) == told


def test_a_generation_config_that_was_changed_is_exported_as_it_is(tmp_path):
    """Sampling fields without `do_sample`, as checkpoints have them, and another end of turn."""
    tiny_model(tiny_tokenizer()).save_pretrained(tmp_path / "in")
    (tmp_path / "in" / "generation_config.json").write_text(json.dumps({"temperature": 0.9, "top_p": 0.6}))
    model = load_model(tmp_path / "in")
    model.generation_config.update(eos_token_id=[1, 2])
    export_hf(model, tiny_tokenizer(), tmp_path / "out")
    kept = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (kept["temperature"], kept["top_p"], kept["eos_token_id"]) == (0.9, 0.6, [1, 2])
