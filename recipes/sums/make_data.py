"""Sums of two two-digit numbers, from reasoning-gym: 1,565 to train on, 200 held out.

pip install reasoning-gym==0.1.25
python recipes/sums/make_data.py
"""

import argparse
import json
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    try:
        import reasoning_gym
    except ModuleNotFoundError:
        raise SystemExit("error: reasoning-gym is not installed here: pip install reasoning-gym==0.1.25") from None
    items = reasoning_gym.create_dataset(
        "chain_sum", size=4000, min_terms=2, max_terms=2, min_digits=2, max_digits=2, seed=0
    )
    sums = {item["question"]: item["answer"] for item in items if "+" in item["question"]}
    rows = [json.dumps({"prompt": question, "answer": answer}) for question, answer in sums.items()]
    for name, part in (("test", rows[:200]), ("train", rows[200:])):
        (HERE / f"{name}.jsonl").write_text("\n".join(part) + "\n")
        print(f"{name}.jsonl: {len(part)} rows")


if __name__ == "__main__":
    main()
