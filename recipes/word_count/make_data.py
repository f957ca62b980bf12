"""Sentences with a given number of words about everyday things: 1,177 requests to train on, 200 held out.

    python recipes/word_count/make_data.py

The things of the held-out requests do not occur in training.
"""

import argparse
import json
import random
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    rng = random.Random(0)
    things = (HERE / "things.txt").read_text().split()
    rng.shuffle(things)
    rows = [{"prompt": ask(thing, n), "num_words": n} for thing in things for n in range(5, 16)]
    held_out = rows[: 20 * 11]
    train = rows[20 * 11 :]
    rng.shuffle(held_out)
    rng.shuffle(train)
    for name, part in (("train", train), ("test", held_out[:200])):
        (HERE / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        print(f"{name}.jsonl: {len(part)} rows")


def ask(thing: str, num_words: int) -> str:
    return f"Write one sentence about {thing}. It must have exactly {num_words} words."


if __name__ == "__main__":
    main()
