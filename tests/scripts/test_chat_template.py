"""--chat-template: a base model trains on messages, and everything that follows renders the same tokens."""

from __future__ import annotations

import importlib
import io
import json
import shutil
import sys

import nightly
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlkit.data.chat import render
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.rollout.engines.local import LocalEngine
from rlkit.scripts.cli import run

pytestmark = pytest.mark.usefixtures("no_pictures")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
START, END, USER, ASSISTANT = 257, 258, 260, 261
ASK = [{"role": "user", "content": "hi"}]
PROMPT = [START, USER, *b":hi", END, START, ASSISTANT, *b":"]
ROWS = {
    "sft": [{"messages": [*ASK, {"role": "assistant", "content": "ho"}]}],
    "dpo": [{"messages": ASK, "chosen": "ho", "rejected": "ha"}],
    "kto": [
        {"messages": ASK, "completion": "ho", "label": True},
        {"messages": ASK, "completion": "ha", "label": False},
    ],
    "grpo": [{"messages": ASK}],
}
ROWS |= {"reward_model": ROWS["dpo"], "ppo": ROWS["grpo"]}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat_template")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template, tokenizer.eos_token = None, "<|endoftext|>"
    sizes = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 48}
    tiny_model(tokenizer, **sizes).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    for script, rows in ROWS.items():
        (folder / f"{script}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text("def score(completion, row):\n    return len(completion) % 3\n")
    (folder / "turns.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def asked(monkeypatch):
    """Prompt ids and stop ids of every call of the engine."""
    found = []
    real = LocalEngine.generate

    async def generate(self, prompt_ids, **options):
        found.append((prompt_ids, set(options["params"].stop_token_ids)))
        return await real(self, prompt_ids, **options)

    monkeypatch.setattr(LocalEngine, "generate", generate)
    return found


def call(task, script, output, *flags, steps=1):
    module = importlib.import_module(f"rlkit.scripts.{script}")
    given = ["--model", str(task / "base"), "--output", str(output), "--steps", str(steps), "--warmup-steps", "0"]
    given += ["--data", str(task / f"{script}.jsonl"), "--eval-data", str(task / f"{script}.jsonl")]
    if script in ("grpo", "ppo"):
        given += ["--reward", str(task / "reward.py:score"), "--prompts-per-step", "1", "--max-new-tokens", "4"]
        given += ["--group-size", "2"]
    else:
        given += ["--batch-size", "2"]
    return run(module.main, module.Args, None, argv=[*given, *flags])


def chat(monkeypatch, *flags):
    from rlkit.scripts.tools import chat

    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    run(chat.main, chat.Args, None, argv=[*map(str, flags), "--prompt", "hi", "--max-new-tokens", "2"])


def refused(capsys, *given):
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        call(*given)
    assert ended.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.slow_cases("dpo")
@pytest.mark.parametrize("script", nightly.only(ROWS, "grpo", "dpo"))
def test_a_base_model_trains_on_messages_and_exports_the_template(task, tmp_path, script):
    call(task, script, tmp_path / "run", "--chat-template", str(task / "turns.jinja"))
    exported = tmp_path / "run" / "model"
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert render(tokenizer, ASK, add_generation_prompt=True) == PROMPT
    assert tokenizer.eos_token == "<|endoftext|>"
    if script == "reward_model":
        return
    model = AutoModelForCausalLM.from_pretrained(exported)
    assert model.generation_config.eos_token_id == [256, END]
    ends = {}
    for end in (END, 256, 0):  # generate alone stops there, without a word about stop tokens
        model.lm_head.weight.data.zero_()
        model.model.norm.weight.data.fill_(1.0)
        model.lm_head.weight.data[end] = 0
        bias = model.lm_head.weight.new_zeros(model.config.vocab_size)
        bias[end] = 9.0
        hook = model.lm_head.register_forward_hook(lambda _m, _i, out, bias=bias: out + bias)
        ids = model.generate(tokenizer("hi", return_tensors="pt").input_ids, max_new_tokens=3, do_sample=False)
        ends[end] = ids[0, 2:].tolist()
        hook.remove()
    assert ends == {END: [END], 256: [256], 0: [0, 0, 0]}


def test_an_export_stops_at_the_end_of_the_models_own_template(task, tmp_path):
    """Models are published with an eos that their template never writes."""
    shutil.copytree(task / "base", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text((task / "turns.jinja").read_text())
    call(task, "sft", tmp_path / "run", "--model", str(tmp_path / "model"))
    config = json.loads((tmp_path / "run" / "model" / "generation_config.json").read_text())
    assert config["eos_token_id"] == [256, END]


@pytest.mark.slow
def test_training_sampling_chat_and_resume_render_the_same_tokens(task, tmp_path, asked, capsys, monkeypatch):
    file = tmp_path / "own.jinja"
    shutil.copy(task / "turns.jinja", file)
    output = tmp_path / "run"
    flags = ("--chat-template", str(file), "--save-steps", "1")
    call(task, "grpo", output, *flags)
    file.unlink()
    call(task, "grpo", output, *flags, "--resume", steps=2)  # with the copy in the run folder
    assert len(asked) > 8
    chat(monkeypatch, output)
    shutil.rmtree(output / "model")  # as while the run goes on: a checkpoint, and the tokenizer of the base model
    chat(monkeypatch, output)
    chat(monkeypatch, task / "base", "--chat-template", task / "turns.jinja")
    assert {tuple(ids) for ids, _ in asked} == {tuple(PROMPT)}
    assert all(stop >= {256, END} for _, stop in asked)
    capsys.readouterr()
    file.write_text(TEMPLATE.replace(":{{", "={{"))
    call(task, "grpo", output, *flags, "--resume", steps=3)
    assert f"resumed with the chat template of {file}, which has changed" in capsys.readouterr().out
    assert asked[-1][0] == [START, USER, *b"=hi", END, START, ASSISTANT, *b":"]


def test_supervised_tokens_begin_with_those_that_are_sampled_from(task):
    from rlkit.data.examples import sft_examples
    from rlkit.scripts.start import load_tokenizer

    tokenizer = load_tokenizer(str(task / "base"), chat_template=task / "turns.jinja")
    ((example,), _) = sft_examples(ROWS["sft"], tokenizer=tokenizer, max_example_tokens=99)
    assert example.ids == [*PROMPT, *b"ho", END]
    assert example.mask == [False] * len(PROMPT) + [True] * 3


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.slow
def test_a_run_that_was_kept_with_a_switch_resumes(task, tmp_path, kept, capsys):
    shutil.copytree(task / "base", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "data.jsonl").write_text('{"prompt": "hi", "response": "ho"}\n')
    data = str(tmp_path / "data.jsonl")
    flags = ["--model", str(tmp_path / "model"), "--data", data, "--eval-data", data]
    flags += [] if kept else ["--no-chat-template"]
    call(task, "sft", tmp_path / "run", *flags)
    assert json.loads((tmp_path / "run" / "args.json").read_text())["chat_template"] is kept
    capsys.readouterr()
    call(task, "sft", tmp_path / "run", *flags, "--resume", steps=2)
    assert "resumed with chat_template" not in capsys.readouterr().out


def test_what_is_wrong_is_one_line_and_names_the_flag(task, tmp_path, capsys):
    output = tmp_path / "run"
    said = refused(capsys, task, "sft", output)
    assert "sft.jsonl, line 1: a chat template is needed, and the tokenizer has none: give one with --chat-temp" in said
    assert "--chat-template FILE" in refused(capsys, task, "sft", output, "--no-chat-template")
    (tmp_path / "bad.jinja").write_text("\n{% if %}")
    for file, message in (
        ("bad.jinja", f"error: {tmp_path / 'bad.jinja'}, line 2: the chat template does not parse: "),
        ("none.jinja", f"error: {tmp_path / 'none.jinja'}: no such file of a chat template"),
    ):
        assert refused(capsys, task, "sft", output, "--chat-template", str(tmp_path / file)).startswith(message)
    both = refused(capsys, task, "sft", output, "--chat-template", "x", "--no-chat-template")
    assert both == "error: give --chat-template FILE or --no-chat-template"
    call(task, "sft", output, "--chat-template", str(task / "turns.jinja"))  # nothing of these is in the way


@pytest.mark.parametrize("flag", ["--chat_template_path", "--data.input_template", "model.custom_chat_template=x"])
def test_flags_of_other_systems_name_it(task, tmp_path, flag, capsys):
    prefix = "" if flag.startswith("--") else "actor_rollout_ref."
    said = refused(capsys, task, "grpo", tmp_path / "run", prefix + flag)
    assert "is --chat-template FILE" in said
