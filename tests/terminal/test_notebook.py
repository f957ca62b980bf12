"""A real notebook, where an event loop runs in every cell: the README's loop, the plain `grpo`, and a script's main."""

from __future__ import annotations

import base64
import json
import re
import sys
from functools import partial
from pathlib import Path

import nbformat
import pytest
import warm
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).parents[2]


class Kernel(AsyncKernelManager):
    """This interpreter, whatever kernels are installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, language="python")


def notebook(folder: Path, monkeypatch: pytest.MonkeyPatch, *cells: str, plots: bool = False) -> NotebookClient:
    if not plots:  # IPython chooses how matplotlib draws before that is imported, which a warm process has done
        monkeypatch.setattr("jupyter_client.launcher.Popen", partial(warm.Popen, plots=False))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "runtime"))
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    return NotebookClient(book, kernel_manager_class=Kernel, timeout=250, resources={"metadata": {"path": str(folder)}})


def printed(cell: nbformat.NotebookNode, stream: str = "stdout") -> str:
    return "".join(o["text"] for o in cell["outputs"] if o["output_type"] == "stream" and o["name"] == stream)


def readme_loop() -> str:
    """The README's loop as a reader pastes it, up to the call."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    code, _, call = next(c for c in blocks if "asyncio.run" in c).partition("\nasyncio.run(main())")
    assert "await main()" in call, "the README says how a notebook calls it"
    return code


@pytest.mark.slow
def test_the_quickstart_shows_progress_curves_and_samples(tmp_path, monkeypatch):
    book = nbformat.read(ROOT / "examples" / "quickstart.ipynb", 4)
    cells = [cell["source"] for cell in book["cells"] if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in book["cells"])
    short = [cell.replace("steps=40", "steps=3").replace("[1, 40]", "[1, 3]") for cell in cells]
    assert short != cells
    done = notebook(tmp_path, monkeypatch, *short, "len(rewards), 0 <= min(rewards)", plots=True).execute()["cells"]
    shown = [[o["data"] for o in cell["outputs"] if "data" in o] for cell in done]
    plot, run, table, rewards = shown[-4:]
    assert rewards[0]["text/plain"] == "(3, True)"
    assert "image/png" in plot[0]
    assert re.fullmatch(r"step 3/3, \d+:\d\d", run[0]["text/plain"])
    picture = base64.b64decode(run[1]["image/png"])
    assert picture == (tmp_path / "runs/quickstart/metrics.png").read_bytes()
    columns = re.findall("<th>([a-z]+)</th>", table[0]["text/html"])
    assert columns == ["step", "prompt", "completion", "reward", "advantage"]
    assert set(re.findall(r"<td>([13])</td>", table[0]["text/html"])) == {"1", "3"}


TASK = """
import json, sys
from functools import partial
from pathlib import Path
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.loops.grpo import grpo, grpo_sync
from rlkit.loops.rl import Task
from rlkit.model.forward import prepare_model
from rlkit.rewards.scoring import scorer
from rlkit.rollout.engines.local import LocalEngine
from rlkit.settings import Optim, Rollouts, Schedule

tokenizer = tiny_tokenizer()
sizes = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 32}
model = prepare_model(tiny_model(tokenizer, **sizes))
model.save_pretrained("model"), tokenizer.save_pretrained("model")
Path("train.jsonl").write_text("".join(json.dumps({"prompt": str(i)}) + chr(10) for i in range(20)))
Path("reward.py").write_text("def score(completion, row):\\n    return len(set(completion)) / 8\\n")
rollouts = Rollouts(prompts_per_step=2, group_size=4, max_new_tokens=8)
prompts = [Prompt(ids=tokenizer.encode(f"{i}: "), row={}, index=i) for i in range(8)]
task = Task(prompts, scorer(lambda completion, row: len(set(completion)) / 8, tokenizer=tokenizer, timeout_s=5))
engine = LocalEngine(model)
await engine.generate(prompts[0].ids, params=SamplingParams(max_new_tokens=2))
"""
PLAIN = """
where = ContextVar("where")
where.set("in the cell")
def seen(step):
    print("lr", where.get(), threading.current_thread() is threading.main_thread())
    return 1e-3
print(grpo_sync(model, tokenizer, engine, task, rollouts, Schedule(Path("plain"), steps=2), Optim(lr_at=seen)))
"""
SCRIPT = """
from rlkit.scripts import grpo as script
from rlkit.scripts.args import Data, Model
from rlkit.scripts.args import Episodes
flags = dict(episodes=Episodes(reward="reward.py:score", max_prompt_tokens=32), rollouts=rollouts)
schedule = Schedule(Path("script"), steps=2)
print(script.main(script.Args(model=Model("model"), data=Data("train.jsonl"), schedule=schedule, **flags)))
"""
AWAITED = """
print(await grpo(model, tokenizer, engine, task, rollouts, Schedule(Path("awaited"), steps=1), Optim(lr=1e-3)))
"""


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


MISTAKE = """
from rlkit.scripts.cli import run
try:
    run(script.main, script.Args, None, argv=["--model", "m", "--data", "d", "--steps", "1e3"])
except SystemExit as ended:
    print(ended.code, sys.stdout.encoding)
"""


def test_a_notebook_runs_the_loop_the_plain_grpo_and_a_script(tmp_path, monkeypatch):
    imports = "import threading\nfrom contextvars import ContextVar\n"
    cells = (imports + readme_loop(), "await main(steps=2)", TASK, PLAIN, SCRIPT, AWAITED, MISTAKE)
    book = notebook(tmp_path, monkeypatch, *cells).execute()
    loop, _, plain, script, awaited, mistake = (printed(cell) for cell in book["cells"][1:])
    assert mistake == "2 UTF-8\n"
    assert printed(book["cells"][-1], "stderr") == "error: --steps must be a whole number, got '1e3'\n"
    assert [line.split()[0] for line in loop.splitlines()] == ["0", "1"]
    assert plain.splitlines().count("lr in the cell False") >= 2, "another thread, the same context"
    for text, name, num in ((plain, "plain", 2), (script, "script", 2), (awaited, "awaited", 1)):
        assert text.splitlines()[-1] == str(tmp_path / name / "model")
        assert (tmp_path / name / "model" / "model.safetensors").exists()
        assert steps(tmp_path / name) == list(range(1, num + 1))
        assert [line.split()[0] for line in text.splitlines() if line[:6].strip().isdigit()] == list("12"[:num])


INTERRUPTED = """
import os, signal
from rlkit.run import signals
told, scored, judge = [], [], task.score
signals._tell = told.append
async def interrupting(prompt, group):  # while groups are sampled, in a task of its own
    scored.append(1)
    for number in range(1, NUM_SIGNALS + 1) if len(scored) == 7 else ():  # of the fourth step
        os.kill(os.getpid(), signal.SIGINT)
        while len(told) < number:
            pass
    return await judge(prompt, group)
before = signal.getsignal(signal.SIGINT)
try:
    CALL
except KeyboardInterrupt as error:
    print("ended by", type(error).__name__)
print("handler", signal.getsignal(signal.SIGINT) is before)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("form", "again"), [
    pytest.param("grpo_sync", False, id="grpo_sync-once"),
    pytest.param("await grpo", True, id="await grpo-twice"),
    pytest.param("grpo_sync", True, id="grpo_sync-twice"),
    pytest.param("await grpo", False, id="await grpo-once"),
])  # fmt: skip
def test_one_interrupt_of_a_cell_saves_and_a_second_aborts(tmp_path, monkeypatch, form, again):
    how = 'Task(prompts, interrupting), rollouts, Schedule(Path("run"), steps=500), Optim(lr=1e-3)'
    code = INTERRUPTED.replace("NUM_SIGNALS", "2" if again else "1")
    code = code.replace("CALL", f"{form}(model, tokenizer, engine, {how})")
    imports = "from rlkit.data.prompts import Prompt\nfrom rlkit.types import SamplingParams\n"
    client = notebook(tmp_path, monkeypatch, imports + TASK, code, "print('the kernel lives')")
    cells = client.execute()["cells"]
    text = printed(cells[1])
    if again:
        assert "ended by KeyboardInterrupt" in text
        assert steps(tmp_path / "run") == [1, 2, 3]
    else:
        assert "saved after step 4; go on with: the same call with resume=True" in text
        assert "ended by Stopped" in text
        assert steps(tmp_path / "run") == [1, 2, 3, 4]
    assert "handler True" in text
    assert printed(cells[2]) == "the kernel lives\n"


@pytest.mark.slow
def test_a_stopped_run_stops_the_notebook(tmp_path, monkeypatch):
    """The cells after it would train on from a model that is not done."""
    stop = "from rlkit._util.ranks import Stopped\nraise Stopped(2)"
    with pytest.raises(CellExecutionError, match="stopped after saving a checkpoint; resume it"):
        notebook(tmp_path, monkeypatch, stop, "print('next')").execute()
