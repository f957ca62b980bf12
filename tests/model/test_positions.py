"""The positions of a model: those that its card promises, whatever its config writes them in."""

import json
import re

import nightly
import pytest
import torch
import transformers as hf

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model.forward import forward, prepare_model
from rlkit.model.positions import check_positions, positions
from rlkit.packing import pack
from rlkit.rollout.engines.local import LocalEngine
from rlkit.scripts import cli
from rlkit.types import Trajectory


def rotary(kind, factor=None, original=None, **more):
    """Rotary parameters as a config.json has them."""
    given = {"rope_type": kind, "rope_theta": 1e6, "factor": factor, "original_max_position_embeddings": original}
    return {name: x for name, x in (given | more).items() if x is not None}


LLAMA3 = rotary("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
LONG = rotary("longrope", short_factor=[1.0] * 48, long_factor=[1.0] * 48)
DYNAMIC = hf.LlamaConfig(max_position_embeddings=32768, rope_parameters=rotary("dynamic", 2.0))
CARDS = [  # config as published, tokens that its card or vLLM names, tokens that a pack may train on
    (hf.LlamaConfig(max_position_embeddings=131072, rope_parameters=LLAMA3), 131072, 131072),
    (hf.Qwen2Config(max_position_embeddings=32768, rope_parameters=rotary("yarn", 4.0, 32768)), 131072, 131072),
    (hf.Qwen3Config(max_position_embeddings=40960, rope_parameters=rotary("yarn", 4.0, 32768)), 131072, 131072),
    (hf.DeepseekV3Config(max_position_embeddings=163840, rope_parameters=rotary("yarn", 40.0, 4096)), 163840, 163840),
    (hf.GptOssConfig(), 131072, 131072),
    (hf.LlamaConfig(max_position_embeddings=4096, rope_parameters=rotary("linear", 4.0)), 16384, 16384),
    (DYNAMIC, 65536, 32768),
    (hf.Phi3Config(max_position_embeddings=131072, original_max_position_embeddings=4096, rope_parameters=LONG),
     131072, 4096),
    (hf.Gemma3TextConfig(), 131072, 131072),
    (hf.GPT2Config(), 1024, 1024),
    (hf.CodeGenConfig(n_positions=512), 512, 512),
    (hf.OPTConfig(), 2048, 2048),
    (hf.FalconConfig(alibi=True), None, None),
    (hf.BloomConfig(), None, None),
    (hf.MambaConfig(), None, None),
    (hf.NemotronHConfig(), None, None),
    (hf.GraniteMoeHybridConfig(position_embedding_type="nope"), None, None),
]  # fmt: skip


@pytest.mark.parametrize(("config", "of_card", "of_pack"), CARDS, ids=lambda x: getattr(x, "model_type", ""))
def test_the_positions_are_those_of_the_model_card(config, of_card, of_pack):
    assert positions(config) == of_card
    assert positions(config, packed=True) == of_pack


def test_the_table_of_a_model_without_rotary_positions_has_as_many_rows():
    config = hf.GPT2Config(n_positions=24, n_embd=8, n_layer=1, n_head=2, vocab_size=32)
    assert hf.GPT2LMHeadModel(config).transformer.wpe.num_embeddings == positions(config) == 24


@pytest.mark.parametrize(
    ("config", "num", "fix"),
    [
        (hf.Qwen3Config(max_position_embeddings=64), 130, r'"yarn", "factor": 3\.0, "original_max_.*": 64'),
        (hf.GPT2Config(n_positions=64), 130, "no setting adds rows to its table"),
        (DYNAMIC, 40000, "replace dynamic in config.json"),
    ],
)
def test_a_refusal_says_what_raises_the_positions(config, num, fix):
    with pytest.raises(ValueError, match=rf"x is {num}, .*lower it, or .*{fix}"):
        check_positions(num, config, setting="x")


def test_the_advice_of_a_refusal_works():
    """Rotary parameters as the refusal writes them give as many positions as were asked for."""
    with pytest.raises(ValueError, match="yarn") as error:
        check_positions(130, hf.Qwen3Config(max_position_embeddings=64), setting="x")
    rope = json.loads(re.search(r"rope_parameters (\{.*), \.\.\.\}", str(error.value))[1] + ', "rope_theta": 1e4}')
    assert positions(hf.Qwen3Config(max_position_embeddings=64, rope_parameters=rope)) == 192


YARN = rotary("yarn", 4.0, 64)
SIZES = {"hidden": 32, "layers": 1, "intermediate": 32, "heads": 2, "kv_heads": 1, "head_dim": 16}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A tiny model of 64 positions, and the same with YaRN, which reads 256."""
    folder = tmp_path_factory.mktemp("positions")
    for name, rope in (("plain", None), ("yarn", YARN)):
        tokenizer = tiny_tokenizer()
        tiny_model(tokenizer, **SIZES).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        config = json.loads((folder / name / "config.json").read_text()) | {"max_position_embeddings": 64}
        config |= {"rope_parameters": rope} if rope else {}
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "r.py").write_text("def score(completion, row):\n    return float(len(completion))\n")
    for name, keys in (("d", ["response"]), ("pairs", ["chosen", "rejected"])):
        rows = [{"prompt": "p"} | {key: key[0] * n for key in keys} for n in (3, 120)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


RL = ["--max-prompt-tokens", "60", "--max-new-tokens", "100", "--reward", "r.py:score"]
COMMANDS = {
    "grpo": ["--model", "MODEL", "--data", "d.jsonl", *RL, "--group-size", "2", "--prompts-per-step", "2"],
    "ppo": ["--model", "MODEL", "--data", "d.jsonl", *RL, "--prompts-per-step", "2"],
    "distill": ["--model", "MODEL", "--data", "d.jsonl", "--teacher", "MODEL", *RL[:4], "--prompts-per-step", "2"],
    "eval": ["MODEL", "--eval-data", "d.jsonl", "--max-prompt-tokens", "60", "--max-new-tokens", "100", *RL[4:]],
    "sft": ["--model", "MODEL", "--data", "d.jsonl", "--batch-size", "1"],
    "dpo": ["--model", "MODEL", "--data", "pairs.jsonl", "--batch-size", "1"],
    "kto": ["--model", "MODEL", "--data", "pairs.jsonl", "--batch-size", "2"],
    "reward_model": ["--model", "MODEL", "--data", "pairs.jsonl", "--batch-size", "1"],
}


def command_line(folder, command, model, output):
    paths = {"MODEL": model, **{name: name for name in ("d.jsonl", "pairs.jsonl", "r.py:score")}}
    given = [str(folder / paths[x]) if x in paths else x for x in COMMANDS[command]]
    more = [] if command == "eval" else ["--output", str(output), "--device", "cpu", "--steps", "1"]
    return [command, *given, *more]


@pytest.mark.slow_cases("dpo", "grpo", "sft")
@pytest.mark.parametrize("command", nightly.only(COMMANDS, "grpo", "eval", "sft", "dpo"))
def test_each_command_asks_for_the_positions_of_the_model(command, models, tmp_path, capfd, caplog):
    """160 tokens of an episode, or an example of 130, do not fit 64 positions; they fit the 256 of YaRN."""
    cli.main(command_line(models, command, "yarn", tmp_path / "fits"))
    capfd.readouterr()
    caplog.clear()
    if command in ("grpo", "ppo", "distill", "eval"):
        with pytest.raises(SystemExit) as end:
            cli.main(command_line(models, command, "plain", tmp_path / "o"))
        assert end.value.code
        found = " ".join(capfd.readouterr().err.split())
        assert "`max_prompt_tokens` + `max_new_tokens` is 160" in found or "--max-prompt-tokens" in found
        assert "has 64 positions" in found
        assert '"factor": 3.0' in found
        return
    cli.main(command_line(models, command, "plain", tmp_path / "o"))
    said = " ".join([*caplog.messages, *capfd.readouterr()])
    assert "--max-example-tokens is 2048, and the model has 64 positions: longer examples count as too long" in said
    assert "64" in said


@pytest.mark.slow
def test_a_model_of_few_positions_is_named_where_examples_are_dropped_or_the_limit_was_set(models, tmp_path, caplog):
    words = command_line(models, "sft", "plain", tmp_path / "o")
    (tmp_path / "short.jsonl").write_text("".join(f'{{"prompt": "p", "response": "{x}"}}\n' for x in "ab"))
    words[words.index(str(models / "d.jsonl"))] = str(tmp_path / "short.jsonl")
    cli.main(words)
    assert not [x for x in caplog.messages if "has 64 positions" in x]
    words[words.index(str(tmp_path / "o"))] = str(tmp_path / "set")
    cli.main([*words, "--max-example-tokens", "2047"])
    assert len([x for x in caplog.messages if "--max-example-tokens is 2047, and the model has 64 positions" in x]) == 1


def test_engines_and_the_forward_ask_too(models):
    of = {name: hf.AutoModelForCausalLM.from_pretrained(models / name) for name in ("plain", "yarn")}
    assert LocalEngine(of["plain"]).max_len == 64  # what `rlkit chat` and sampled evaluations take
    assert LocalEngine(of["yarn"]).max_len == 256
    with pytest.raises(ValueError, match="max_len is 65, and the model has 64 positions"):
        LocalEngine(of["plain"], max_len=65)
    ids = torch.arange(100).tolist()
    batch = pack([[Trajectory(ids[:10], ids[10:], [True] * 90, [0.0] * 90, [0] * 90)]])
    assert torch.isfinite(forward(prepare_model(of["yarn"]), batch).logp).all()
    with pytest.raises(ValueError, match=r"longest sequence of a batch is \d+, and the model has 64 positions"):
        forward(prepare_model(of["plain"]), batch)
