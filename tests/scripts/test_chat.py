"""`rlkit chat` in a terminal and in pipes, against greedy decoding by transformers."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import screens
import torch
import warm
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.scripts import cli, sft
from rlkit.scripts.tools import chat

sys.path.append(str(Path(__file__).parents[1] / "terminal"))
from screen import Terminal

ROOT = Path(__file__).parents[2]
CHAT = [sys.executable, "-m", "rlkit.scripts", "chat"]


def save_model(folder, *, positions):
    """A random model whose likeliest token is always a letter, so that answers are readable and never end early."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=48)
    model.config.max_position_embeddings = positions
    letters = torch.zeros(len(tokenizer), 1)
    letters[ord("a") : ord("z") + 1] = 20
    with torch.no_grad():
        model.lm_head.weight *= letters
    for x in (model, tokenizer):
        x.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("chat") / "model", positions=160)


def greedy(path, messages, n, **template):
    """The answer by transformers; `messages` may be plain text."""
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    text = messages
    if not isinstance(messages, str):
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **template)
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=isinstance(messages, str))])
    out = model.generate(ids, max_new_tokens=n, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def turns(*texts, system=None):
    start = [{"role": "system", "content": system}] if system else []
    return start + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def wait(terminal, pattern):
    terminal.wait_for(pattern, seconds=90)


def call(capsys, monkeypatch, *flags, stdin=""):
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    cli.run(chat.main, chat.Args, None, argv=[*flags])
    return capsys.readouterr().out


def refused(capsys, monkeypatch, *flags):
    return screens.refused(call, capsys, monkeypatch, *flags)


@pytest.mark.slow
def test_a_pipe_gets_answers_only_one_for_each_line(model):
    done = warm.run(
        [*CHAT, model, "--temperature", "0", "--max-new-tokens", "12"], input="one\n\ntwo\n", text=True,
        capture_output=True, check=True,
    )  # fmt: skip
    assert done.stdout == "".join(greedy(model, turns(line), 12) + "\n" for line in ("one", "two"))


@pytest.mark.slow
def test_flags_and_args_json_reach_template_and_sampling(model, tmp_path, capsys, monkeypatch):
    flags = ["--temperature", "0", "--max-new-tokens", "8", "--prompt", "one"]
    assert call(capsys, monkeypatch, model, *flags) == greedy(model, turns("one"), 8) + "\n"
    found = call(capsys, monkeypatch, model, *flags, "--system-prompt", "Be kind.")
    assert found == greedy(model, turns("one", system="Be kind."), 8) + "\n"
    plain = greedy(model, "one", 8) + "\n"
    assert call(capsys, monkeypatch, model, *flags, "--no-chat-template") == plain != found

    run = tmp_path / "run"
    shutil.copytree(model, run / "model")
    config = run / "model" / "chat_template.jinja"
    config.write_text(config.read_text().replace("assistant\n{% endif %}", "assistant\n{{ mood }}{% endif %}"))
    kept = {
        "script": "grpo.py", "model": model, "system_prompt": "Be kind.", "template_args": '{"mood": "sad"}',
        "chat_template": True, "temperature": 0.0, "max_new_tokens": 9, "stop": [],
    }  # fmt: skip
    (run / "args.json").write_text(json.dumps(kept))
    truth = greedy(run / "model", turns("one", system="Be kind."), 9, mood="sad")
    assert call(capsys, monkeypatch, str(run), "--prompt", "one") == truth + "\n"
    other = call(capsys, monkeypatch, str(run), "--prompt", "one", "--template-args", '{"mood": "joy"}')
    assert other == greedy(run / "model", turns("one", system="Be kind."), 9, mood="joy") + "\n" != truth + "\n"
    (run / "args.json").write_text(json.dumps({**kept, "stop": [truth[3:5]]}))
    assert call(capsys, monkeypatch, str(run), "--prompt", "one") == truth[: truth.index(truth[3:5]) + 2] + "\n"
    (run / "args.json").write_text(json.dumps({**kept, "chat_template": False}))
    assert call(capsys, monkeypatch, str(run), "--prompt", "one") == greedy(model, "one", 9) + "\n"


@pytest.mark.slow
def test_in_a_terminal_the_history_is_sent_and_its_oldest_turns_are_dropped(model):
    """160 positions: a turn takes 5 tokens besides its text, and the generation prompt 3."""
    terminal = Terminal([*CHAT, model, "--temperature", "0", "--max-new-tokens", "20"], columns=200)
    wait(terminal, r"^>$")
    terminal.press("one\n")
    first = greedy(model, turns("one"), 20)
    wait(terminal, rf"^> one\n{first}\n\(stopped after 20 tokens\)\n>$")
    terminal.press("twoo\x7f\n")  # backspace edits the line
    second = greedy(model, turns("one", first, "two"), 20)
    wait(terminal, rf"^> two\n{second}\n\(stopped after 20 tokens\)\n>$")
    long = "x" * 80
    terminal.press(long + "\n")
    third = greedy(model, turns("two", second, long), 20)
    wait(terminal, rf"^> {long}\n\(dropped 1 of the oldest turns: the model has 160 positions\)\n{third}\n.*\n>$")
    terminal.press("y" * 160 + "\n")
    wait(terminal, r"^error: the prompt has 168 tokens, and the model 160 positions: shorten it\n>$")
    terminal.press("one\n")  # after both were dropped the conversation goes on
    wait(terminal, rf"^> one\n{first}\n.*\n>$")
    terminal.press("\x04")
    assert terminal.wait() == 0
    assert "Traceback" not in terminal.text
    assert terminal.cursor_is_visible


@pytest.mark.slow
def test_tokens_show_as_they_are_sampled_and_ctrl_c_stops_the_answer_only(tmp_path):
    path = save_model(tmp_path / "model", positions=60_000)
    terminal = Terminal([*CHAT, path, "--temperature", "0", "--max-new-tokens", "50000"], columns=200)
    wait(terminal, r"^>$")
    terminal.press("one\n")
    wait(terminal, r"^> one\n[a-z]{30,}")
    terminal.press("\x03")
    wait(terminal, r"^> one\n[a-z^C\n]+\n>$")
    terminal.press("half a line")
    wait(terminal, r"^> half a line$")
    terminal.press("\x03")
    wait(terminal, r"^> half a line(\^C)?\n>$")
    terminal.press("two\n")
    wait(terminal, r"^> two\n[a-z]{30,}")
    terminal.press("\x03")
    wait(terminal, r"^> two\n[a-z^C\n]+\n>$")
    terminal.press("\n")
    assert terminal.wait() == 0
    assert "Traceback" not in terminal.text


@pytest.mark.slow
def test_ctrl_c_ends_an_answer_in_a_pipe(tmp_path):
    path = save_model(tmp_path / "model", positions=60_000)
    flags = ["--temperature", "0", "--max-new-tokens", "50000", "--prompt", "one"]
    script = (
        "import os, signal, threading, time\nfrom rlkit.scripts import cli\nfrom rlkit.scripts.tools import chat\n"
        f"flags = {[path, *flags]}\n"
        "main = chat.Chat.ask\n"
        "def ask(self, prompt):\n"
        "    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "    main(self, prompt)\n"
        "chat.Chat.ask = ask\n"
        "cli.run(chat.main, chat.Args, None, argv=flags)\n"
    )
    done = warm.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == -signal.SIGINT
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--lora-rank", "2"]], ids=["all weights", "LoRA"])
def test_a_run_answers_with_its_model_or_newest_checkpoint(tmp_path, capsys, monkeypatch, flags):
    if flags:
        pytest.importorskip("peft")
    tokenizer = tiny_tokenizer()
    start = tiny_model(tokenizer, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=48)
    for x in (start, tokenizer):
        x.save_pretrained(tmp_path / "start")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "one", "response": "abcabc"}\n' * 4)
    train = ["--model", str(tmp_path / "start"), "--data", str(tmp_path / "rows.jsonl"), "--device", "cpu"]
    train += ["--output", str(tmp_path / "run"), "--steps", "3", "--lr", "0.05", "--batch-size", "4", *flags]
    cli.run(sft.main, sft.Args, None, argv=[*train, "--lr-schedule", "constant", "--warmup-steps", "0"])
    capsys.readouterr()
    run, asked = tmp_path / "run", ["--prompt", "one", "--temperature", "0", "--max-new-tokens", "6"]
    truth = greedy(run / "model", turns("one"), 6) + "\n"
    assert truth != greedy(tmp_path / "start", turns("one"), 6) + "\n"
    assert call(capsys, monkeypatch, str(run), *asked) == truth
    shutil.rmtree(run / "model")
    assert call(capsys, monkeypatch, str(run), *asked) == truth
    shutil.rmtree(run / "checkpoints")
    line = f"error: {run}: no model/ yet, and no checkpoint of the policy alone: wait for the run's end, or resume it"
    assert refused(capsys, monkeypatch, str(run), *asked) == line + " (--resume)"


@pytest.mark.slow
def test_mistakes_end_in_one_line(model, tmp_path, capsys, monkeypatch):
    nothing = str(tmp_path / "nothing")
    cases = [
        ([nothing], f"model '{nothing}': no folder; give a folder saved by save_pretrained, or a hub id a/b"),
        ([model, "--template-args", "[1]"], "--template-args must be a JSON object like"),
        ([model, "--prompt", ""], "--prompt is empty: give a value, or leave it out"),
        ([model, "--temperature", "-1"], "--temperature must be at least 0, got -1.0"),
        (
            [model, "--system-prompt", "x", "--no-chat-template"],
            "--system-prompt requires --chat-template: drop it, or --no-",
        ),
        ([model, "--device", "no"], "--device no: torch 2"),
        ([model, "--prompt", "x" * 200], "the prompt has 208 tokens, and the model 160 positions: shorten it"),
    ]
    for flags, message in cases:
        assert refused(capsys, monkeypatch, *flags).startswith(f"error: {message}"), flags
    with pytest.raises(SystemExit):
        call(capsys, monkeypatch, model, stdin="a\udcff\n")
    assert capsys.readouterr().err.startswith("error: the prompt is not UTF-8 text: 'a\\udcff'")
    bare = shutil.copytree(model, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    found = refused(capsys, monkeypatch, str(bare), "--prompt", "one")
    assert re.search(r"has no chat_template: .*--no-chat-template", found)
