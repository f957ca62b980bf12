"""The scripts in a terminal of 80 or 120 columns, as a person runs, watches and interrupts them."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest
from screen import ROOT, Terminal, assert_clean, steps_on

SAMPLED = (
    "--reward REWARD --eval-steps 2 --eval-limit 4 --prompts-per-step 2 --group-size 2 --max-prompt-tokens 32 "
    "--max-new-tokens 6"
)
SCRIPTS = {
    "sft": "",
    "dpo": "",
    "kto": "",
    "reward_model": "",
    "grpo": SAMPLED,
    "ppo": SAMPLED,
    "grpo --overlap": SAMPLED,
}


def command(task: Path, script: str, output: Path, *flags: str) -> list[str]:
    data = str(task / ("labelled.jsonl" if script == "kto" else "rows.jsonl"))
    more = SCRIPTS[script].replace("REWARD", f"{task / 'reward.py'}:score").split() or ["--batch-size", "8"]
    line = [sys.executable, "-m", *f"rlkit.scripts.{script}".split(), "--model", str(task / "model"), "--data", data]
    return [*line, "--eval-data", data, "--output", str(output), "--lr", "1e-3", "--steps", "3", *more, *flags]


def logged(output: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (output / "metrics.jsonl").read_text().splitlines()]


def assert_a_line_a_step(terminal: Terminal, steps: list[int]) -> None:
    assert steps_on(terminal.text.splitlines()) == steps, terminal.text
    assert_clean(terminal)
    assert "Traceback" not in terminal.text


SIZES = [(script, columns) for columns in (80, 120) for script in SCRIPTS]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "columns"), SIZES)
def test_every_script_runs_in_a_terminal(task, tmp_path, script, columns):
    line = command(task, script, tmp_path / "run")
    if script == "grpo":  # a group takes longer than the bar is still
        line = [part.replace("reward.py:score", "reward.py:slowly") for part in line]
    terminal = Terminal(line, columns=columns, spawns="--overlap" in script)
    terminal.wait_for(r"^step \d/3 ━.* 0:\d\d:\d\d eta ")
    if script == "grpo":
        terminal.wait_for(r"^step \d/3 ━+ 0:\d\d:\d\d eta [-:\d]+ (train|eval_\w+): \d+ groups, reward \d")
    assert terminal.wait() == 0, terminal.text
    assert logged(tmp_path / "run") == [0, 1, 2, 3]
    assert_a_line_a_step(terminal, [0, 1, 2, 3])


@pytest.mark.slow
def test_the_demo_runs_in_a_terminal(tmp_path):
    flags = "--sft-steps 2 --grpo-steps 1 --hidden 64 --layers 1 --eval-limit 8"
    line = [sys.executable, ROOT / "examples/demo.py", "--output", tmp_path / "demo", *flags.split()]
    terminal = Terminal(line, plots=True)
    assert terminal.wait() == 0, terminal.text
    assert_clean(terminal)
    assert "Traceback" not in terminal.text
    assert logged(tmp_path / "demo/sft") == [1, 2]
    assert logged(tmp_path / "demo/grpo") == [0, 1]
    assert re.search(r"^greedy [\d.]+% -> [\d.]+% on 8 held-out prompts, \d+ GRPO steps, \d+ s$", terminal.text, re.M)
    assert (tmp_path / "demo/grpo/metrics.png").exists()


@pytest.mark.slow
def test_the_tool_example_runs_in_a_terminal(tmp_path):
    flags = "--sft-steps 2 --steps 1 --prompts-per-step 2 --group-size 2 --eval-limit 2 --max-new-tokens 16"
    terminal = Terminal([sys.executable, ROOT / "examples/tool_use.py", "--output", tmp_path / "run", *flags.split()])
    assert terminal.wait() == 0, terminal.text
    assert_clean(terminal)
    assert logged(tmp_path / "run/sft") == [1, 2]
    assert logged(tmp_path / "run/grpo") == [0, 1]


@pytest.mark.parametrize(("script", "shell"), [
    pytest.param("sft", False, marks=pytest.mark.slow),
    pytest.param("sft", True, marks=pytest.mark.slow),
    pytest.param("grpo", True, marks=pytest.mark.slow),
])  # fmt: skip
def test_ctrl_c_saves_and_the_printed_command_resumes(task, tmp_path, script, shell):
    """It ends by the signal, so that a shell's loop over runs ends with it."""
    output = tmp_path / "run"
    line = command(task, script, output, "--steps", "900")
    loop = f"for i in 1 2; do echo round $i; {shlex.join(line)}; done"
    terminal = Terminal(["bash", "-c", loop] if shell else line)
    terminal.wait_for(r"^     2 ")
    terminal.press("\x03")
    terminal.wait_for(r"^stopping after this step, then saving \(Ctrl-C again: without saving\)$")
    assert terminal.wait() == -signal.SIGINT
    steps = logged(output)
    assert 2 < len(steps) < 900
    assert_a_line_a_step(terminal, steps)
    assert "round 2" not in terminal.text
    said = terminal.text.partition(f"saved after step {steps[-1]}; go on with:")[2].replace("\\\n", " ").strip()
    said = said.splitlines()[0]
    assert (output / f"checkpoints/step_{steps[-1]:08d}/manifest.json").exists()
    assert (output / "model/model.safetensors").exists()
    again = shlex.split(said)
    assert again[-1] == "--resume"
    again[again.index("900")] = str(steps[-1] + 1)
    terminal = Terminal(again)
    assert terminal.wait() == 0, terminal.text
    assert logged(output) == [*steps, steps[-1] + 1]
    assert f"resumed with steps {steps[-1] + 1} (it was 900)" in terminal.text


@pytest.mark.slow
def test_the_second_ctrl_c_aborts(task, tmp_path):
    (task / "slow.py").write_text("import asyncio\nasync def score(completion, row):\n    await asyncio.sleep(600)\n")
    flags = ("--reward", f"{task / 'slow.py'}:score", "--eval-steps", "0", "--reward-timeout", "900")
    terminal = Terminal(command(task, "grpo", tmp_path / "run", "--no-trial", *flags))
    terminal.wait_for(r"^step 0/3 ")
    for said in (r"^stopping after this step", r"^aborting, nothing more is saved \(Ctrl-C again: without waiting"):
        terminal.press("\x03")
        terminal.wait_for(said)
    assert terminal.wait() == -signal.SIGINT
    assert_clean(terminal)
    assert not (tmp_path / "run/checkpoints").exists()
    assert re.search(r"^KeyboardInterrupt", terminal.text, re.M)
