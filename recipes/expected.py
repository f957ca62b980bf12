"""What runs of one recipe with different seeds have reached: a table for its README, and `expected.json`.

    python recipes/expected.py recipes/sums/expected.json runs/sums-0 runs/sums-1

Share of right answers before and after training with its 95% interval (Wilson), KL to the start, minutes.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any


def interval(share: float, num: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share of `num` items."""
    centre = (share + z * z / (2 * num)) / (1 + z * z / num)
    half = z / (1 + z * z / num) * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num))
    return centre - half, centre + half


def right_at(run: Path, kind: str, step: int) -> tuple[float, int]:
    """Share of right answers of an evaluation, and how many there were: `exact` where the reward names it."""
    lines = (run / f"trajectories/eval_{kind}_{step:06d}.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines]
    return sum(a["rewards"].get("exact", a["reward"]) == 1 for a in answers) / len(answers), len(answers)


def result(run: Path) -> dict[str, Any]:
    """The figures of one run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    args = json.loads((run / "args.json").read_text())
    evaluated = [line["step"] for line in lines if "eval/greedy" in line]
    found: dict[str, Any] = {"seed": args["seed"], "steps": lines[-1]["step"]}
    for kind in ("sampled", "greedy"):
        for name, step in (("before", evaluated[0]), ("after", evaluated[-1])):
            share, num = right_at(run, kind, step)
            found[f"{kind}_{name}"] = round(share, 3)
            found[f"{kind}_{name}_95"] = [round(x, 3) for x in interval(share, num)]
    found["kl_after"] = round(next(line["eval/kl"] for line in lines[::-1] if "eval/kl" in line), 3)
    found["minutes"] = round(sum(v for line in lines for k, v in line.items() if k == "time/step") / 60, 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="expected.json to write")
    parser.add_argument("runs", type=Path, nargs="+", help="run folders, one for each seed")
    args = parser.parse_args()
    try:
        target, found = args.target, [result(run) for run in args.runs]
    except OSError as error:
        raise SystemExit(f"error: {error}") from None
    ranges = {key: sorted(r[key] for r in found) for key in ("sampled_after", "greedy_after", "kl_after", "minutes")}
    about = {"runs": found, "range": {key: [values[0], values[-1]] for key, values in ranges.items()}}
    target.write_text(json.dumps(about, indent=1) + "\n")
    for run in found:
        print(json.dumps(run))


if __name__ == "__main__":
    main()
