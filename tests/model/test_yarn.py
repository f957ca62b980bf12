"""A longer context by YaRN: the frequencies, and who reads them."""

import asyncio
import json
import math
import subprocess
from pathlib import Path

import pytest
import torch
import transformers as hf
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rlkit._util.extras import interpreter
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model.forward import forward, load_model
from rlkit.model.positions import positions
from rlkit.model.weights import export_hf
from rlkit.model.yarn import yarn_config, yarn_folder
from rlkit.packing import pack
from rlkit.rollout.engines.local import LocalEngine
from rlkit.scripts import cli
from rlkit.types import SamplingParams, Trajectory

POSITIONS, FACTOR = 64, 4.0
SIZES = {"hidden": 32, "layers": 2, "intermediate": 32, "heads": 2, "kv_heads": 1, "head_dim": 16}
SMALL = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 40,
    "intermediate_size": 32, "max_position_embeddings": POSITIONS,
}  # fmt: skip
KINDS = {
    "llama": hf.LlamaConfig(**SMALL),
    "qwen2": hf.Qwen2Config(**SMALL),
    "of a vision model": hf.Qwen2VLConfig(text_config=SMALL),
    "a part of the head": hf.GPTNeoXConfig(**{n: x for n, x in SMALL.items() if "key_value" not in n}),
    "layers of Mamba": hf.FalconH1Config(**SMALL),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny model of 64 positions, and the same in a folder with YaRN, which reads 256."""
    plain = tmp_path_factory.mktemp("yarn") / "plain"
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer, **SIZES).save_pretrained(plain)
    tokenizer.save_pretrained(plain)
    config = json.loads((plain / "config.json").read_text()) | {"max_position_embeddings": POSITIONS}
    (plain / "config.json").write_text(json.dumps(config))
    return plain, yarn_folder(plain, FACTOR, plain.with_name("extended"))


def of_paper(dim, base, factor, original):
    """The frequencies of arXiv:2309.00071 (equations 20 to 23, with whole dimensions as bounds), in fp64."""
    at = lambda turns: dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))
    low, high = max(math.floor(at(32)), 0), min(math.ceil(at(1)), dim - 1)
    for i in range(dim // 2):
        theta = base ** (-2 * i / dim)
        ramp = min(1.0, max(0.0, (i - low) / (high - low)))
        yield theta * (1 - ramp) + theta / factor * ramp


@pytest.mark.parametrize("kind", KINDS)
def test_the_config_gives_the_frequencies_of_transformers_and_of_the_paper(kind):
    before = KINDS[kind].to_dict()
    text = yarn_config(KINDS[kind], FACTOR).get_text_config()
    frequencies, scale = ROPE_INIT_FUNCTIONS["yarn"](text)
    rope = text.rope_parameters
    dim = int(text.hidden_size // text.num_attention_heads * (rope.get("partial_rotary_factor") or 1))
    expected = torch.tensor([*of_paper(dim, rope["rope_theta"], FACTOR, POSITIONS)])
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert scale == pytest.approx(0.1 * math.log(FACTOR) + 1)
    assert positions(text) == positions(text, packed=True) == 256
    assert KINDS[kind].to_dict() == before


def test_training_the_engine_and_the_export_have_what_transformers_has(folders, tmp_path):
    """A sequence of 200 tokens, against transformers with a config written by hand."""
    plain, extended = folders
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": FACTOR, "original_max_position_embeddings": POSITIONS}
    config = hf.AutoConfig.from_pretrained(plain)
    rope["rope_theta"] = config.rope_parameters["rope_theta"]
    config.rope_parameters, config.max_position_embeddings = rope, 256
    truth = hf.AutoModelForCausalLM.from_pretrained(plain, config=config, attn_implementation="eager").eval()
    model, ids = load_model(extended), (torch.arange(200) * 7 % 250).tolist()
    expected_frequencies, scale = ROPE_INIT_FUNCTIONS["yarn"](config)
    for rotary in (model.model.rotary_emb, truth.model.rotary_emb):
        assert torch.equal(rotary.inv_freq, expected_frequencies)
        assert rotary.attention_scaling == scale
    with torch.no_grad():
        expected = truth(torch.tensor([ids])).logits[0].log_softmax(-1)
        batch = pack([[Trajectory(ids[:100], ids[100:], [True] * 100, [0.0] * 100, [0] * 100)]])
        logp = forward(model, batch).logp[batch.mask]
    torch.testing.assert_close(logp, expected[99:-1].gather(1, torch.tensor(ids[100:])[:, None])[:, 0])
    engine = LocalEngine(model, max_batch=2)
    assert engine.max_len == 256
    params = SamplingParams(max_new_tokens=3, temperature=0.0)
    out = asyncio.run(engine.generate(ids, params=params))
    assert out.ids[0] == int(expected[-1].argmax())
    assert out.logp[0] == pytest.approx(float(expected[-1].max()), abs=1e-5)
    exported = hf.AutoConfig.from_pretrained(export_hf(model, tiny_tokenizer(), tmp_path / "model"))
    assert exported.rope_parameters == rope
    assert exported.max_position_embeddings == 256
    torch.testing.assert_close(load_model(tmp_path / "model").model.rotary_emb.inv_freq, expected_frequencies)


def test_the_folder_has_links_and_may_be_written_again(folders):
    plain, extended = folders
    assert yarn_folder(plain, FACTOR, extended) == extended
    assert {x.name for x in extended.iterdir()} == {x.name for x in plain.iterdir()}
    assert [x.name for x in extended.iterdir() if not x.is_symlink()] == ["config.json"]
    assert json.loads((plain / "config.json").read_text())["max_position_embeddings"] == POSITIONS


@pytest.mark.parametrize("other", ["os.getpid", "socket.gethostname"])
def test_the_ranks_of_a_run_write_the_folder_at_once(folders, tmp_path, monkeypatch, other):
    """Another rank, of this machine or with this number on another one, comes before each rename."""
    (plain, _), rename, links = folders, Path.replace, len([*folders[0].iterdir()])

    def late(path, target):
        monkeypatch.setattr(Path, "replace", rename)
        with monkeypatch.context() as there:
            there.setattr(other, lambda: 7)
            yarn_folder(plain, FACTOR, tmp_path)
        monkeypatch.setattr(Path, "replace", late)
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", late)
    yarn_folder(plain, FACTOR, tmp_path)
    assert len([*tmp_path.iterdir()]) == links, "nothing is left"
    assert json.loads((tmp_path / "config.json").read_text())["max_position_embeddings"] == FACTOR * POSITIONS


READ = {  # the length that a server takes from a folder
    "vllm": "from vllm.config import ModelConfig; print('LEN', ModelConfig(model=sys.argv[1]).max_model_len)",
    "sglang": "from sglang.srt.utils.hf_transformers_utils import get_config, get_context_length; "
    "print('LEN', get_context_length(get_config(sys.argv[1], trust_remote_code=False)))",
}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=getattr(pytest.mark, kind)) for kind in READ])
def test_servers_derive_the_same_length(folders, kind):
    python = interpreter(kind)
    words = [python, "-c", f"import sys; {READ[kind]}", str(folders[1])]
    said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    assert int(said.rpartition("LEN ")[2].split()[0]) == 256


SCALED = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 8}
SCALED |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
REFUSED = [
    (hf.GPT2Config(), 2.0, "scales rotary positions, and models of type 'gpt2' have none"),
    (hf.MambaConfig(), 2.0, "models of type 'mamba' have none"),
    (hf.Gemma3TextConfig(), 2.0, "'gemma3_text' has one per layer type"),
    (hf.LlamaConfig(rope_parameters=SCALED), 2.0, "`yarn` 2: the model's config.json has llama3 of factor 8 already"),
    (hf.LlamaConfig(rope_parameters=YARN), 4.0, "`yarn` 4: .* has yarn of factor 2 already"),
    (hf.Phi3Config(), 4.0, "transformers has no YaRN for models of type 'phi3'"),
    (hf.LlamaConfig(), 1.0, "must be above 1, got 1.0"),
]


@pytest.mark.parametrize(("config", "factor", "fault"), REFUSED)
def test_a_model_that_yarn_does_not_fit_is_refused_in_one_line(config, factor, fault):
    with pytest.raises(ValueError, match=fault) as error:
        yarn_config(config, factor)
    assert "\n" not in str(error.value)


def test_a_config_with_the_same_yarn_stays_as_it_is():
    config = hf.LlamaConfig(rope_parameters=YARN, max_position_embeddings=128)
    assert yarn_config(config, 2.0).to_dict() == config.to_dict()


def command(model, command, output, *more):
    """Words of a command on rows whose episodes may have 160 tokens, of a model with 64 positions."""
    (output.parent / "d.jsonl").write_text('{"prompt": "p", "answer": "1"}\n{"prompt": "q", "answer": "2"}\n')
    (output.parent / "r.py").write_text("def score(completion, row):\n    return float(len(completion))\n")
    words = [command, "--model", str(model), "--data", str(output.parent / "d.jsonl"), "--output", str(output)]
    words += ["--max-prompt-tokens", "60", "--max-new-tokens", "100", "--prompts-per-step", "2", "--group-size", "2"]
    return [*words, "--steps", "1", "--device", "cpu", *more]


@pytest.mark.slow
def test_the_flag_trains_exports_and_measures_the_longer_context(folders, tmp_path, capsys, no_pictures):
    plain, run = folders[0], tmp_path / "run"
    reward = ("--reward", f"{tmp_path / 'r.py'}:score")
    with pytest.raises(SystemExit):
        cli.main(command(plain, "grpo", run, *reward))
    refusal = " ".join(capsys.readouterr().err.split())
    assert "has 64 positions: lower it, or extend it by --yarn 3 of a training" in refusal
    cli.main(command(plain, "grpo", run, *reward, "--yarn", "3"))
    assert "model: YaRN of factor 3 over 64 positions: 192" in capsys.readouterr().out
    config = hf.AutoConfig.from_pretrained(run / "model")
    assert (config.max_position_embeddings, config.rope_parameters["factor"]) == (192, 3.0)
    saved = json.loads((run / "args.json").read_text())
    assert (saved["model"], saved["yarn"]) == (str(plain), 3.0)
    assert "`yarn` 3.0" in (run / "model/README.md").read_text()
    for exported in (True, False):  # without model/ it is the newest checkpoint
        cli.main(["eval", str(run), "--eval-data", str(tmp_path / "d.jsonl"), *reward, "--max-prompt-tokens", "60"])
        assert "held-out data: 2 prompts" in capsys.readouterr().out
        if exported:
            (run / "model").rename(tmp_path / "moved")


@pytest.mark.slow
def test_a_teacher_that_is_the_model_itself_has_the_longer_context(folders, tmp_path):
    teacher = ("--teacher", "self", "--teacher-ema", "0.5", "--teacher-prompt", "{prompt} Hint: {answer}")
    cli.main(command(folders[0], "distill", tmp_path / "run", *teacher, "--yarn", "3"))
    assert positions(hf.AutoConfig.from_pretrained(tmp_path / "run/model")) == 192


@pytest.mark.slow
def test_an_adapter_names_a_base_with_the_longer_context(folders, tmp_path):
    pytest.importorskip("peft")
    reward = ("--reward", f"{tmp_path / 'r.py'}:score", "--lora-rank", "2", "--overlap")  # an engine of its own
    cli.main(command(folders[0], "grpo", tmp_path / "run", *reward, "--yarn", "3"))
    base = json.loads((tmp_path / "run/adapter/adapter_config.json").read_text())["base_model_name_or_path"]
    assert positions(hf.AutoConfig.from_pretrained(base)) == 192


def test_plan_knows_the_longer_context(folders, capsys):
    """On the line of the model, and in the command that it prints."""
    cli.main(["plan", "--model", str(folders[0]), "--gpus", "1", "--yarn", "4"])
    said = " ".join(capsys.readouterr().out.split())
    assert "256 positions" in said
    assert f"--model {folders[0]} --yarn 4 --data" in said
