"""Rank a model's own samples: best against worst of each prompt for `rlkit dpo`, the best alone for `rlkit sft`.

    W=recipes/word_count
    rlkit grpo --steps 0 --model M --data $W/train.jsonl --eval-data $W/train.jsonl --reward $W/reward.py:close \
        --eval-limit 200 --eval-samples 8 --max-new-tokens 40 --output runs/samples
    python $W/make_pairs.py runs/samples runs/pairs.jsonl runs/best.jsonl
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, what in (("run", "run folder"), ("pairs", "file to write"), ("best", "file to write")):
        parser.add_argument(name, type=Path, help=what)
    args = parser.parse_args()
    run, pairs, best = args.run, args.pairs, args.best
    asked = [json.loads(line)["prompt"] for line in (HERE / "train.jsonl").read_text().splitlines()]
    samples = defaultdict(list)
    path = run / "trajectories" / "eval_sampled_000000.jsonl"
    if not path.exists():
        raise SystemExit(f"error: {path} is missing: see --help for the command that writes it")
    for line in path.read_text().splitlines():
        sample = json.loads(line)
        text = sample["completion"].removesuffix("<|im_end|>")
        samples[sample["group"]].append((sample["reward"], text, asked[sample["group"]]))
    ranked = [sorted(group) for group in samples.values()]
    ranked = [group for group in ranked if group[-1][0] - group[0][0] >= 0.4]
    rows = [{"prompt": group[0][2], "chosen": group[-1][1], "rejected": group[0][1]} for group in ranked]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    best.write_text("".join(json.dumps({"prompt": r["prompt"], "completion": r["chosen"]}) + "\n" for r in rows))
    print(f"{len(rows)} of {len(samples)} prompts")


if __name__ == "__main__":
    main()
