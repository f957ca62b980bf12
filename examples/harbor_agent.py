"""One trial of a Harbor task as an episode: Harbor's sandbox and agent, the policy as its model, the verifier's reward.

python3.12 -m venv harbor && harbor/bin/pip install harbor    # its sandboxes: Docker, Podman, Modal, Daytona, E2B, ...
rlkit grpo --model MODEL --data TASKS --agent-timeout 1800 --max-turns 20 --max-total-tokens 16384 \
    --agent "python examples/harbor_agent.py {task} harbor/bin/harbor run -a terminus-2 -m openai/policy"

TASKS is a folder of tasks; what follows the task is Harbor's own command, here with its agent that runs on this
machine. One that runs in the sandbox reaches the policy by `--agent-address` (docs/environments.md). Of a verifier that
writes several rewards, `--reward NAME` before the task chooses one, else `reward`; all of them are metrics. A trial
that Harbor could not finish is a failed episode. By hand: `OPENAI_BASE_URL=http://localhost:8000/v1 python
examples/harbor_agent.py TASK harbor run ...` prints the rewards.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def trial(task: Path, command: list[str], folder: str) -> dict[str, Any]:
    """What Harbor wrote about a trial of the task; the program ends where there is none."""
    line = [*command, "-p", str(task), "-o", folder, "--yes", "-q"]
    try:
        ended = subprocess.run(line, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    except OSError as error:
        sys.exit(f"error: {command[0]}: {error.strerror}: give Harbor's command after the task")
    written = sorted(Path(folder).glob("*/*/result.json"))
    if len(written) != 1:
        sys.exit(f"error: {' '.join(line)} ended with {ended.returncode} and wrote {len(written)} results of a trial")
    return json.loads(written[0].read_text())


def reward_of(result: dict[str, Any], name: str | None) -> tuple[float, dict[str, float]]:
    """The reward of a trial and all that its verifier wrote; the program ends where it has none, with Harbor's error."""
    rewards = (result.get("verifier_result") or {}).get("rewards") or {}
    name = name or ("reward" if "reward" in rewards or len(rewards) != 1 else next(iter(rewards)))
    error = result.get("exception_info") or {}
    timed_out = error.get("exception_type") == "AgentTimeoutError"  # the verifier has looked at what is there
    if name not in rewards or (error and not timed_out):
        what = f"{error['exception_type']}: {error['exception_message']}" if error else f"it has {[*rewards]}"
        sys.exit(f"error: no reward {name!r} of the trial: {what}")
    return float(rewards[name]), rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reward", help="which of several rewards of the verifier")
    parser.add_argument("task", type=Path, help="folder of the task")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="harbor run -a AGENT -m openai/policy ...")
    args = parser.parse_args()
    if not args.command:
        parser.error("give Harbor's command after the task: harbor run -a terminus-2 -m openai/policy")
    with tempfile.TemporaryDirectory() as folder:
        reward, every = reward_of(trial(args.task, args.command, folder), args.reward)
    metrics = {f"harbor/{name}": value for name, value in every.items()}
    if result := os.environ.get("RLKIT_RESULT"):
        Path(result).write_text(json.dumps({"reward": reward, "info": {"metrics": metrics}}))
    print(json.dumps(every))


if __name__ == "__main__":
    main()
