"""The scripts from the command line: base and chat models train, and what a user gets wrong ends in one line."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import socket
import sys
from pathlib import Path

import nightly
import pytest
import screens
import torch
import warm

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.scripts.cli import module_of, run

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
DATA = {"sft": "sft", "dpo": "pairs", "reward_model": "pairs", "kto": "labelled", "grpo": "rl", "ppo": "rl"}
FIXED = ("sft", "dpo", "kto", "reward_model")
ROWS = {
    "sft": [{"prompt": f"{i}+1=", "response": f"{i + 1}"} for i in range(8)],
    "pairs": [{"prompt": f"{i}+1=", "chosen": f"{i + 1}", "rejected": "x"} for i in range(8)],
    "labelled": [{"prompt": f"{i}+1=", "completion": f"{i + 1}", "label": i % 2 == 0} for i in range(8)],
    "rl": [{"prompt": f"{i}+1=", "answer": f"{i + 1}"} for i in range(8)],
}
REWARD = "def score(completion, row):\n    return len(completion) % 3\n"


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripts")
    for name in ("base", "chat"):
        tokenizer = tiny_tokenizer()
        if name == "base":
            tokenizer.chat_template, tokenizer.eos_token = None, "<|endoftext|>"
        sizes = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 48}
        tiny_model(tokenizer, **sizes).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for name, rows in ROWS.items():
        write(folder / f"{name}.jsonl", rows)
    (folder / "reward.py").write_text(REWARD)
    return folder


def flags_of(task, script, output, *flags, model="chat", data=None):
    """Two steps of a script on the CPU; `flags` come last and win."""
    data = str(data or task / f"{DATA[script]}.jsonl")
    given = ["--model", str(task / model), "--data", data, "--eval-data", str(task / f"{DATA[script]}.jsonl")]
    given += ["--output", str(output), "--steps", "2", "--warmup-steps", "0"]
    if script in FIXED:
        return [*given, "--batch-size", "4", *flags]
    given += ["--reward", f"{task / 'reward.py'}:score", "--prompts-per-step", "2", "--max-new-tokens", "6"]
    return [*given, "--group-size", "2", *flags]


def call(script, flags):
    """The script's last lines, in this process."""
    module = importlib.import_module(module_of(script))
    return run(module.main, module.Args, None, argv=flags)


def refused(script, flags):
    """The one line on stderr that a script ends with, on every kind of stream."""
    return screens.refused(call, script, flags)


def steps_of(folder):
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("script", DATA)
def test_a_base_model_trains_from_the_command_line(task, tmp_path, script):
    command = [sys.executable, "-m", f"rlkit.scripts.{script}"]
    command += flags_of(task, script, tmp_path, "--no-chat-template", model="base")
    plots = script in ("dpo", "ppo")  # the two have every panel
    done = warm.run(command, env=ENV, plots=plots, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "LOAD REPORT" not in done.stdout + done.stderr
    assert steps_of(tmp_path) == [0, 1, 2]
    assert (tmp_path / "metrics.png").exists() == plots
    size = 24_032 if script == "reward_model" else 32_416
    assert done.stdout.splitlines()[0] == (f"model: {size:,} parameters on cpu, fp32; trains all weights")


@pytest.mark.slow_cases("grpo")
@pytest.mark.parametrize("script", nightly.only(DATA, "grpo", "sft"))
def test_a_chat_model_trains(task, tmp_path, script, capsys):
    lora = [] if script in ("reward_model", "ppo") else ["--lora-rank", "2"]
    template = ["--template-args", '{"enable_thinking": false}']
    call(script, flags_of(task, script, tmp_path, *lora, *template, "--device", "cpu"))
    assert steps_of(tmp_path) == [0, 1, 2]
    said = capsys.readouterr().out.splitlines()
    if lora:
        trained = sum(2 * (a + b) for a, b in SHAPES) * 2
        names = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
        text = f"on cpu, fp32; trains LoRA of rank 2 on 14 modules ({trained:,} parameters): {names}"
        assert any(line.endswith(text) for line in said[:2])
    assert said[1].startswith("critic: ") == (script == "ppo")


SHAPES = [(32, 32), (32, 16), (32, 16), (32, 32), (32, 48), (32, 48), (48, 32)]  # q k v o gate up down


@pytest.mark.slow
def test_a_base_model_without_the_flag_is_an_error_that_names_it(task, tmp_path):
    for script in ("sft", "dpo", "kto", "grpo"):
        said = refused(script, flags_of(task, script, tmp_path, model="base"))
        assert "line 1: " in said
        assert "--no-chat-template" in said


BAD = {
    "responses that are empty": ("sft", [{"prompt": "a", "response": ""}] * 2, "all 2 rows have an empty response"),
    "responses that are null": ("sft", [{"prompt": "a", "response": None}], "line 1: no response to train on"),
    "turns that are null": (
        "sft",
        [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": None}]}],
        "all 1 rows have an empty response",
    ),
    "an unknown role": (
        "sft",
        [*ROWS["sft"], {"messages": [{"role": "user", "content": "q"}, {"role": "asistant", "content": "a"}]}],
        "line 9: ",
    ),
    "an image": (
        "sft",
        [{"messages": [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "a"}]}],
        "line 1: 1 images of its messages have no source, and there is no column",
    ),
    "no difference": ("dpo", [{"prompt": "a", "chosen": "b", "rejected": "b"}], "all 1 pairs have the same chosen"),
    "no difference to reward": (
        "reward_model", [{"prompt": "a", "chosen": "b", "rejected": "b"}] * 3, "all 3 pairs have the same chosen",
    ),
    "a pair without one": ("dpo", [*ROWS["pairs"], {"prompt": "a", "chosen": "b"}], "line 9: no column 'rejected'"),
    "labels that are none": ("kto", [*ROWS["labelled"], {**ROWS["labelled"][0], "label": None}], "line 9: column 'lab"),
    "completions that are empty": (
        "kto", [{**row, "completion": " "} for row in ROWS["labelled"]], "all 8 examples have an empty response",
    ),
    "prompts that are empty": ("grpo", [{"prompt": "", "answer": "1"}], "all 1 prompts have no text"),
    "prompts under another name": ("ppo", [{"question": "a"}], "line 1: neither 'messages' nor 'prompt' is there"),
}  # fmt: skip


EVALUATED = ("an unknown role", "no difference", "labels that are none", "prompts that are empty")  # one a reader


@pytest.mark.slow_cases(
    "--data-completions that are empty",
    "--data-no difference",
    "--data-no difference to reward",
    "--data-prompts that are empty",
    "--data-prompts under another name",
    "--data-responses that are empty",
    "--data-turns that are null",
    "--eval-data-no difference",
    "--eval-data-prompts that are empty",
)
@pytest.mark.parametrize(("where", "case"), [
    *(("--data", case) for case in BAD),
    *(pytest.param("--eval-data", case, marks=[] if case in EVALUATED else pytest.mark.slow) for case in BAD),
])  # fmt: skip
def test_data_that_cannot_train_ends_in_one_line(task, tmp_path, case, where):
    script, rows, message = BAD[case]
    path = write(tmp_path / "bad.jsonl", rows)
    said = refused(script, flags_of(task, script, tmp_path / "run", where, str(path)))
    assert said.startswith(f"error: {path}")
    assert re.search(message, said), said


def test_a_row_of_a_csv_file_is_named_by_the_line_where_it_begins(task, tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text('sep=;\nprompt;completion;label\n"a\nb";"c\nd";1\n"a\nb";"c\nd";good\n')
    said = refused("kto", flags_of(task, "kto", tmp_path / "run", data=path))
    assert said == (
        f"error: {path}, line 6: column 'label' must be true or false, got 'good'; columns found: "
        "['completion', 'label', 'prompt']"
    )


@pytest.mark.slow
def test_wrong_flags_and_files_end_in_one_line(task, tmp_path, capsys):
    cut = tmp_path / "cut"
    shutil.copytree(task / "chat", cut)
    os.truncate(cut / "model.safetensors", 3000)
    swapped = tmp_path / "swapped"  # two tokens have exchanged their ids
    shutil.copytree(task / "chat", swapped)
    tokens = json.loads((swapped / "tokenizer.json").read_text())
    vocab = tokens["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (swapped / "tokenizer.json").write_text(json.dumps(tokens))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{unused.getsockname()[1]}"  # bound, and nobody listens
    for script, flags, message in [
        ("sft", ["--model", str(tmp_path / "nothing")], "no folder; give a folder saved by save_pretrained"),
        ("sft", ["--data", str(tmp_path / "no.jsonl")], "no.jsonl: no such file"),
        ("grpo", ["--stop-token-ids", "3", "999999"], "--stop-token-ids [999999]: the model's token ids are 0 to "),
        ("sft", ["--lora-rank", "1000000"], "--lora-rank 1000000 is more than the model's width 32"),
        ("sft", ["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        ("sft", ["--template-args", "[1]"], "--template-args must be a JSON object"),
        ("sft", ["--device", "gpu"], "--device gpu: torch 2"),
        ("sft", ["--model", str(cut)], "its safetensors are damaged"),
        ("sft", ["--output", ""], "--output must be a folder other than the current one, got ."),
        (
            "grpo",
            ["--model", "m", "--engine", "sglang", "--engine-urls", nowhere],
            f"error: --engine-urls: no SGLang server answers at {nowhere} (Connection refused): start one with",
        ),
        ("sft", ["--max-tokens", "5"], "max_tokens=5 is what a micro-batch holds"),
        ("dpo", ["--loss", "ipo", "--label-smoothing", "0.1"], "exo_pair, not ipo"),
        ("grpo", ["--reward", f"{task / 'reward.py'}:other"], "has no 'other'; it has ['score']"),
        ("grpo", ["--reward", f"{task / 'no.py'}:score"], f"error: --reward {task / 'no.py'}:score: no file"),
        ("grpo", ["--reward", "no_such_module:score"], "error: --reward no_such_module:score: no module 'no_such_mod"),
        ("sft", ["--lora-rank", "2", "--lora-targets", "nope"], "error: --lora-targets nope: the model has no such"),
        ("sft", ["--model", str(task / "chat/config.json")], f"is a file: give its folder, '{task / 'chat'}'"),
        ("ppo", ["--critic", str(tmp_path / "nothing")], f"error: --critic '{tmp_path / 'nothing'}': no folder; give"),
        ("ppo", ["--critic", str(swapped)], "has other tokens"),
    ]:
        assert message in refused(script, flags_of(task, script, tmp_path / "run", *flags))
    (task / "cannot.py").write_text("1 / 0\n")
    with pytest.raises(SystemExit):
        call("grpo", flags_of(task, "grpo", tmp_path / "run", "--reward", f"{task / 'cannot.py'}:score"))
    assert f"error: --reward {task / 'cannot.py'}:score: {task / 'cannot.py'} failed" in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    for script, flags, message in [
        (["examples/tool_use.py"], ["--task", "code"], "--task code needs --data"),
        (["-m", "rlkit.scripts.tools.sweep"], [], "nothing to search over"),
    ]:
        command = [sys.executable, *script, "--output", str(tmp_path / "other"), *flags]
        done = warm.run(command, env=ENV, capture_output=True, text=True, timeout=280, check=False, cwd=ROOT)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert done.stderr.startswith(f"error: {message}")


def test_a_model_that_is_neither_a_folder_nor_to_be_had_is_refused_at_once(tmp_path, monkeypatch):
    """transformers asks the hub six times, for 35 s, and prints each."""
    from huggingface_hub import constants

    for name in ("first", "second"):
        (tmp_path / "own" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        why = "and no hub id in the cache, and 127.0.0.1 cannot be reached (Connection refused)"
        rows = str(write(tmp_path / "rows.jsonl", ROWS["sft"]))
        for script, flags in (("sft", ["--data", rows, "--model"]), ("chat", [])):
            said = refused(script, [*flags, "own/nope"])
            assert said == f"error: model 'own/nope': no folder (own/ holds first, second), {why}"
            assert refused(script, [*flags, "other/nope"]) == f"error: model 'other/nope': no folder, {why}"
            message = "no folder; give a folder saved by save_pretrained, or a hub id a/b (own/first/ holds "
            (tmp_path / "own/first/x").mkdir(exist_ok=True)
            assert refused(script, [*flags, "own/first/nope"]).startswith(f"error: model 'own/first/nope': {message}x)")


def test_a_model_with_nearly_the_name_of_a_folder_beside_it_names_that(tmp_path, monkeypatch):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "runs" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    rows = str(write(tmp_path / "rows.jsonl", ROWS["sft"]))
    for given, near in (("tinny", "tiny"), ("./tinny", "tiny"), (str(tmp_path / "tin"), tmp_path / "tiny")):
        said = refused("sft", ["--data", rows, "--model", given])
        assert said.endswith(f"a hub id a/b (perhaps {near})"), said
    assert "perhaps" not in refused("sft", ["--data", rows, "--model", "other"])
    assert "perhaps" not in refused("sft", ["--data", rows, "--model", "tiny"]), "it is there, without a config"


@pytest.mark.slow
def test_a_run_folder_in_use_ends_in_one_line_and_a_failing_reward_in_its_message(task, tmp_path, capsys):
    flags = flags_of(task, "grpo", tmp_path / "run")
    (task / "breaks.py").write_text("def score(completion, row):\n    raise ValueError('mine')\n")
    broken = [*flags, "--reward", f"{task / 'breaks.py'}:score", "--no-trial"]
    with pytest.raises(SystemExit) as ended:
        call("grpo", broken)
    said = capsys.readouterr().err
    assert ended.value.code == 1
    assert said.startswith("error: reward function breaks.py:score failed on row ")
    assert "ValueError: mine (breaks.py, line 2)" in said
    assert re.search(r"^  row (\d+) is .*\.jsonl, line \1$", said, re.M), said
    assert f"the run folder is {tmp_path / 'run'}\n  --debug shows the traceback\n" in said
    assert "Traceback" not in said
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(RuntimeError, match="mine") as caught:
        call("grpo", [*broken, "--debug"])
    assert any(str(tmp_path / "run") in note for note in caught.value.__notes__)
    assert "error:" not in capsys.readouterr().err
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    assert "already holds a run: resume it (--resume)" in refused("grpo", flags)


def test_debug_shows_the_traceback(task, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no\.jsonl"):
        call("sft", flags_of(task, "sft", tmp_path, "--debug", "--data", str(tmp_path / "no.jsonl")))


@pytest.mark.slow_cases("ppo")
@pytest.mark.parametrize("script", ["sft", "ppo"])
def test_no_step_exports_no_model(task, tmp_path, capfd, script):
    """It wrote a copy of the whole model, and said that it had exported it."""
    sent = flags_of(task, script, tmp_path / "run", "--device", "cpu")
    call(script, [*sent, "--steps", "0"])
    assert {path.name for path in (tmp_path / "run").iterdir()}.isdisjoint({"model", "critic"})
    assert "exported" not in capfd.readouterr().out
    message = refused("chat", [str(tmp_path / "run")])
    assert "nothing was trained there (--steps 0): talk to its model, rlkit chat" in message


@pytest.mark.slow
def test_flags_that_make_a_run_learn_little_are_warned_of(task, tmp_path, caplog, capfd):
    one = write(tmp_path / "one.jsonl", [{**row, "label": True} for row in ROWS["labelled"]])
    call("kto", flags_of(task, "kto", tmp_path / "kto", "--data", str(one), "--warmup-steps", "3", "--device", "cpu"))
    assert [x for x in caplog.messages if "warmup" in x or "KTO" in x] == [
        "--warmup-steps 3 is not below --steps 2: the learning rate never reaches --lr",
        f"{one}: all 8 responses are desirable: KTO learns from the contrast, so add some of the other label",
    ]
    caplog.clear()
    call("sft", flags_of(task, "sft", tmp_path / "no-eval", "--eval-steps", "0", "--device", "cpu"))
    assert "--eval-data is not used with --eval-steps 0" in caplog.text
    caplog.clear()
    call("sft", flags_of(task, "sft", tmp_path / "none", "--steps", "0", "--eval-data", "None", "--device", "cpu"))
    assert "nothing is trained or measured" in caplog.text
    caplog.clear()
    short = [x for x in flags_of(task, "sft", tmp_path / "short", "--device", "cpu") if x != "--warmup-steps"]
    call("sft", [x for x, before in zip(short, ["", *short]) if (x, before) != ("0", "2")])
    assert "--warmup-steps 20 (the default) is not below --steps 2: the learning rate never reaches" in caplog.text
    caplog.clear()
    capfd.readouterr()
    ends = ["--stop", r"\n", r"Q:\neq", "\n"]
    call("grpo", flags_of(task, "grpo", tmp_path / "rl", "--eval-steps", "0", "--device", "cpu", *ends))
    assert [
        r.getMessage() for r in caplog.records if r.getMessage().startswith(("--stop", "--eval-data is not used"))
    ] == [
        r"--stop '\n' has a backslash and the letter n; for a line break write --stop $'\n'",
        "--eval-data is not used with --eval-steps 0",
    ]
    assert "eval_prompts" not in capfd.readouterr().out
    caplog.clear()
    call("ppo", flags_of(task, "ppo", tmp_path / "ppo", "--critic-steps", "2", "--device", "cpu"))
    assert "--critic-steps 2 is not below --steps 2: only the critic learns, never the policy" in caplog.messages


@pytest.mark.skipif(torch.cuda.is_available(), reason="trains there")
@pytest.mark.parametrize("script", DATA)
def test_every_script_goes_to_the_gpu_where_there_is_one(task, tmp_path, monkeypatch, script):
    """This torch has none, and says so when the model is moved there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not including_emulation)
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        call(script, flags_of(task, script, tmp_path))
    said = json.loads((tmp_path / "args.json").read_text())
    assert (said["device"], said["dtype"]) == ("cuda", "bf16")


@pytest.mark.parametrize("name", ["chat", "base"])
@pytest.mark.slow
def test_an_adapter_loads_by_its_folder_alone(task, tmp_path, monkeypatch, name):
    """Also after a resume, and where the model was given by a relative path."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shutil.copytree(task / name, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    flags = ["--lora-rank", "2", "--lr", "0.05", "--device", "cpu", *["--no-chat-template"] * (name == "base")]
    flags = flags_of(task, "sft", "run", "--model", "model", *flags)
    for more in ([], ["--resume", "--steps", "3"]):
        call("sft", [*flags, *more])
        merged = AutoModelForCausalLM.from_pretrained("run/model")
        monkeypatch.chdir(tmp_path / "run")
        loaded = peft.AutoPeftModelForCausalLM.from_pretrained("adapter")
        tokenizer = AutoTokenizer.from_pretrained("adapter")
        monkeypatch.chdir(tmp_path)
        assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained("model").get_vocab()
        ids = torch.tensor([tokenizer.encode("1+1=")])
        base = AutoModelForCausalLM.from_pretrained("model")
        torch.testing.assert_close(loaded(ids).logits, merged(ids).logits, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(loaded(ids).logits, base(ids).logits, atol=1e-2)
