"""Tokens that were added to the tokenizer and not to the model: found before step 1, named, and given rows."""

import json

import nightly
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from rlkit.data.examples import Example, Labelled, Pair
from rlkit.data.prompts import Prompt
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.data.vocabulary import check_vocabulary
from rlkit.model.forward import load_model, resized
from rlkit.model.heads import load_value_model
from rlkit.scripts import cli

SMALL = {"hidden": 32, "layers": 2, "intermediate": 64, "heads": 2, "kv_heads": 1, "head_dim": 16}
RL = ["--reward", "r.py:score", "--max-new-tokens", "4", "--prompts-per-step", "2", "--max-prompt-tokens", "64"]
COMMANDS = {
    "grpo": ["--data", "d.jsonl", *RL, "--group-size", "2"],
    "ppo": ["--data", "d.jsonl", *RL],
    "distill": ["--data", "d.jsonl", *RL[2:], "--teacher", "in"],
    "sft": ["--data", "d.jsonl", "--batch-size", "2"],
    "sft --stream": ["--data", "d.jsonl", "--batch-size", "2", "--stream"],
    "dpo": ["--data", "pairs.jsonl", "--batch-size", "2"],
    "kto": ["--data", "pairs.jsonl", "--batch-size", "2"],
    "reward_model": ["--data", "pairs.jsonl", "--batch-size", "2"],
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model of 263 rows whose tokenizer has 265 tokens, and rows of which the last one has an added token."""
    monkeypatch.chdir(tmp_path)
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer, **SMALL).save_pretrained("in")
    tokenizer.add_tokens(["<plan>", "</plan>"])
    tokenizer.save_pretrained("in")
    (tmp_path / "r.py").write_text("def score(completion, row):\n    return float(len(completion))\n")
    for name, keys in (("d", ["prompt", "response"]), ("pairs", ["prompt", "chosen", "rejected"])):
        rows = [{key: f"{key} {i}" for key in keys} for i in range(4)]
        rows[3] = {key: f"{key} <plan>" for key in keys}
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def line(command):
    shared = ["--model", "in", "--device", "cpu", "--output", "o", "--eval-steps", "0", "--lr", "1e-9"]
    return [command.split()[0], *shared, *COMMANDS[command], "--warmup-steps", "0"]


def refused(capfd, *argv):
    with pytest.raises(SystemExit) as end:
        cli.main([*argv])
    assert end.value.code in (1, 2)
    return " ".join(capfd.readouterr().err.split())


@pytest.mark.parametrize("command", nightly.only(COMMANDS, "grpo", "sft", "dpo"))
def test_a_token_without_a_row_is_named_before_the_first_step(command, folder, capfd):
    said = refused(capfd, *line(command), "--steps", "1")
    file = "pairs" if "pairs.jsonl" in COMMANDS[command] else "d"
    assert f"{file}.jsonl, line 4: token '<plan>' has id 263, and the model's embedding has 263 rows" in said
    assert "--resize-embeddings adds rows for the 2 tokens" in said
    assert not (folder / "o/metrics.jsonl").exists()


@pytest.mark.parametrize(
    "argv", [["eval", "in", "--eval-data", "d.jsonl", *RL[:4]], ["data", "d.jsonl", "--model", "in"]]
)
def test_so_do_the_commands_that_do_not_train(argv, folder, capfd):
    with pytest.raises(SystemExit):
        cli.main(argv)
    said = " ".join("".join(capfd.readouterr()).split())
    assert "line 4: token '<plan>' has id 263" in said


@pytest.mark.slow_cases("grpo", "dpo")
@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("command", nightly.only(COMMANDS, "grpo", "sft", "dpo"))
def test_new_rows_are_the_mean_of_the_others_and_are_exported(command, folder, capfd):
    """At a learning rate of 0 the export still has the mean rows; also where the run is resumed."""
    cli.main([*line(command), "--steps", "1", "--resize-embeddings"])
    cli.main([*line(command), "--steps", "2", "--resize-embeddings", "--resume"])
    config = json.loads((folder / "o/model/config.json").read_text())
    assert config["vocab_size"] == 265
    before = load_file(folder / "in/model.safetensors")
    after = load_file(folder / "o/model/model.safetensors")
    for name in ("model.embed_tokens.weight", *(["lm_head.weight"] if "lm_head.weight" in after else [])):
        assert after[name].shape == (265, 32)
        assert torch.allclose(after[name][:263], before[name], atol=1e-6)
        assert torch.allclose(after[name][263:], before[name].mean(0).expand(2, -1), atol=1e-6)
    if command != "reward_model":
        model, tokenizer = (x.from_pretrained(folder / "o/model") for x in (AutoModelForCausalLM, AutoTokenizer))
        assert torch.isfinite(model(torch.tensor([tokenizer.encode("<plan>x</plan>")])).logits).all()


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--lora-rank", "2"], "excludes --lora-rank: it adds rows that adapters do not train"),
        (["--overlap"], "is for one process with the model in it"),
        (["--engine", "sglang"], "is for one process with the model in it"),
    ],
)
def test_rows_that_would_not_train_or_are_elsewhere_are_refused(argv, why, folder, capfd):
    assert why in refused(capfd, *line("grpo"), "--resize-embeddings", *argv)


@pytest.mark.parametrize("tied", [False, True])
def test_a_resized_model_is_the_old_one_on_old_tokens(tied):
    model = tiny_model(tiny_tokenizer(), **SMALL, tie_word_embeddings=tied).eval()
    ids, rows = torch.arange(40)[None], model.config.vocab_size
    before = model(ids).logits
    after = resized(model, rows + 3)(ids).logits
    assert model.config.vocab_size == rows + 3
    assert torch.equal(after[..., :rows], before)
    assert torch.allclose(after[..., rows:], before.mean(-1, keepdim=True).expand(-1, -1, 3), atol=1e-5)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert resized(model, rows) is model
    assert model.config.vocab_size == rows + 3, "rows are never taken away"


def test_a_critic_has_the_rows_too(folder):
    assert load_value_model("in", min_rows=265).get_input_embeddings().num_embeddings == 265
    assert load_model("in", min_rows=265).get_output_embeddings().weight.shape[0] == 265


@pytest.mark.parametrize(
    ("items", "found"),
    [
        ([Example([0, 3, 0, 1], [False, True, True, True])], "1 of 3 trained tokens"),
        ([Example([0, 3], [False, True])], ""), ([Pair([0], [0, 3], [3])], "1 of 3 trained tokens"),
        ([Labelled([0], [0, 0], True)], "2 of 2 trained tokens"), ([Labelled([0], [3], True)], ""),
        ([Prompt([0, 3, 3], {}, 0), Prompt([0], {}, 1)], "2 of 4 tokens of the prompts"),
    ],
)  # fmt: skip
def test_trained_tokens_that_are_unknown_are_counted(items, found, caplog):
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3}
    for unknown, why in (("<unk>", found), ("</s>", ""), ("<s>", "")):  # GPT-2's is its eos
        model = Tokenizer(models.WordLevel(words, unk_token=unknown))
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=model, unk_token=unknown, bos_token="<s>", eos_token="</s>"
        )
        caplog.clear()
        check_vocabulary(items, tokenizer=tokenizer, num_rows=4)
        lack = " are <unk>: the tokenizer lacks the characters there, or the texts hold it"
        assert caplog.messages == [why + lack] * bool(why)


@pytest.mark.parametrize(("num_rows", "said"), [(263, 0), (384, 0), (520, 1)])
def test_an_embedding_that_is_far_larger_than_the_tokenizer_is_named_once(num_rows, said, caplog):
    tokenizer = tiny_tokenizer()
    for _ in range(2):
        check_vocabulary([Prompt([1], {}, 0)], tokenizer=tokenizer, num_rows=num_rows)
    line = f"the model's embedding has {num_rows} rows for 263 tokens: is the tokenizer that of the model?"
    assert caplog.messages == [line] * said
