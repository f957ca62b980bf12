"""The environments that packages publish, as they are: two steps of `rlkit grpo --env ...` with a tiny random model.

`make adopt` installs the packages and runs these; without them each test is skipped. A row of `LINES` is one line of
docs/environments.md: the package, what is typed, and what the policy must have read.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from rlkit.data.tiny import tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.adopt, pytest.mark.slow]
ROOT, FILES = Path(__file__).parents[2], Path(__file__).parent / "files"
STEPS = "--steps 2 --prompts-per-step 2 --group-size 4 --eval-steps 0 --save-steps 0 --device cpu"
LIMITS = "--max-new-tokens 24 --max-prompt-tokens 2048 --max-turns 3 --max-total-tokens 6000"


class Line(NamedTuple):
    """A package, the words after `rlkit grpo`, texts that the policy must have read, and other expectations."""

    package: str
    words: str
    read: tuple[str, ...]
    roles: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    older: bool = False


LINES = {
    "gem": Line("gem-llm", "--env gem:game:GuessTheNumber-v0-easy", ("You are playing Guess The Number",)),
    "gem-board": Line("gem-llm", "--env gem:game:FifteenPuzzle-v0-easy", ("Here is the current board layout",)),
    "gem-rg": Line("gem-llm", "--env gem:rg:leg_counting", ("legs",)),
    "gem-tools": Line("gem-llm", "--env with_gem.py:make", ("You are playing Guess", "<python>")),
    "textarena": Line("textarena", "--env textarena:GuessTheNumber-v0", ("You are playing Guess The Number",)),
    "textarena-self": Line(
        "textarena", "--env textarena:SimpleNegotiation-v0 --opponent self", ("You are Player 0", "You are Player 1"),
        roles=("player_0", "player_1"),
    ),
    "textarena-poker": Line("textarena", "--env textarena:KuhnPoker-v0 --opponent self", ("You are Player 1",)),
    "textarena-file": Line(
        "textarena", "--env textarena:KuhnPoker-v0 --opponent with_textarena.py:first", ("You are Player 0",)
    ),
    "gymnasium": Line("gymnasium", "--env gymnasium:with_gymnasium:Echo-v0", ("Say your name.",)),
    "aviary": Line("fhaviary", "--env aviary:dummy", ("Write a 5 word story", "Story to print.")),
    "aviary-dataset": Line("fhaviary", "--env with_aviary.py:tasks", ("about cats", "Story to print.")),
    "openenv": Line(
        "openenv-core", "--env openenv:{url}",
        ("Guess my number.", '"number": {"description": "from 0 to 9"', "Error: "),
    ),
    "verifiers": Line(
        "verifiers", "--env with_verifiers.py:Sums", ("What is 3+1?",), metrics=("reward/brief", "reward/right")
    ),
    "verifiers-name": Line("verifiers", "--env verifiers:with_verifiers", ("What is 3+1?",)),
    "verifiers-0.1": Line(
        "verifiers", "--env with_older_verifiers.py:load_environment", ("What is 3+1?", "Answer with a number."),
        metrics=("reward/brief", "reward/right"), older=True,
    ),
    "verifiers-0.1-name": Line("verifiers", "--env verifiers:with-older-verifiers(n=4)", ("What is 3+1?",), older=True),
    "verifiers-0.1-tools": Line(
        "verifiers", "--env with_older_verifiers.py:with_tools", ("What is 3+1?", "Double a number."), older=True
    ),
    "verifiers-0.1-turns": Line(
        "verifiers", "--env with_older_verifiers.py:turns", ("What is 3+1?", "Try again."), older=True
    ),
}  # fmt: skip


@pytest.fixture(scope="session")
def folder() -> Path:
    from cpu_environment import cache_folder

    made = cache_folder(ROOT / "tools" / "adopt", "adopt")
    if not (made / "bin" / "python").exists():
        pytest.skip("the packages are not here: make adopt")
    return made


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A random model, whose template lists tools."""
    where = tmp_path_factory.mktemp("adopt") / "tiny"
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (ROOT / "tests/rollout/templates/qwen3.jinja").read_text()
    sizes = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 48}
    tiny_model(tokenizer, **sizes).save_pretrained(where)
    tokenizer.save_pretrained(where)
    return where


def environment(folder: Path, *, older: bool) -> dict[str, str]:
    site = next((folder / "lib").glob("python3*/site-packages"))
    paths = [*([folder / "older"] if older else []), site, FILES, ROOT]
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    return {**os.environ, "PYTHONPATH": ":".join(map(str, paths)), "PATH": path, "OMP_NUM_THREADS": "1"}


def version(package: str, variables: dict[str, str]) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture
def url(request, folder):
    """A server of OpenEnv's own, with one session."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(FILES / "with_openenv.py"), str(port)]
    with subprocess.Popen(command, env=environment(folder, older=False)) as server:
        for _ in range(300):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
        server.terminate()


@pytest.mark.parametrize("name", LINES)
def test_two_steps(name, folder, model, tmp_path, request):
    """The line trains; its prompts, boards, tools and rewards are those of the package."""
    line = LINES[name]
    variables = environment(folder, older=line.older)
    what = f"{line.package} {version(line.package, variables)}"
    words = line.words.split()
    if "{url}" in line.words:
        words = line.words.format(url=request.getfixturevalue("url")).split()
    words = [str(FILES / word) if ".py:" in word else word for word in words]
    command = [sys.executable, "-m", "rlkit", "grpo", "--model", str(model), *words, *STEPS.split(), *LIMITS.split()]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "run")], env=variables, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{what}: {done.stdout[-1500:]}{done.stderr[-3000:]}"
    files = sorted((tmp_path / "run/trajectories").glob("train_*.jsonl"))
    pieces = [json.loads(row) for file in files for row in file.read_text().splitlines()]
    seen = "\n".join(f"{one['prompt']}{json.dumps(one['info'], ensure_ascii=False)}" for one in pieces)
    seen += seen.replace('\\"', '"')
    missing = [text for text in line.read if text not in seen]
    assert not missing, f"{what}: the policy did not read {missing}: {seen[:3000]}"
    steps = [json.loads(row) for row in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(pieces) >= 16, what
    for metric in (*line.metrics, *(f"reward/{role}" for role in line.roles)):
        assert any(metric in step for step in steps), f"{what}: no {metric} in {sorted(steps[0])}"


def test_the_documents_name_these_versions(folder):
    text = (ROOT / "docs/migrating.md").read_text()
    for package, older in {(line.package, line.older) for line in LINES.values()}:
        there = version(package, environment(folder, older=older))
        assert re.search(rf"{re.escape(package)} \| [^|]*\b{re.escape(there)}\b", text), f"{package} {there}"
