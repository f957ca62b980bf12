"""How often a letter occurs in a few words: questions of reasoning-gym, 1,240 to train on and 201 held out.

    pip install reasoning-gym==0.1.25
    python recipes/letter_counting/make_data.py

`sft.jsonl` has 800 further questions with an answer that spells the text and counts along, for `rlkit sft`.
"""

import argparse
import json
from pathlib import Path

HERE = Path(__file__).parent


def spelled(text: str, letter: str) -> str:
    """`w e l1 l2 = 2`: every letter, with the count so far after those that are asked for."""
    count, out = 0, []
    for character in text.lower().replace(" ", ""):
        count += character == letter
        out.append(f"{character}{count}" if character == letter else character)
    return f"{' '.join(out)} = {count}"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    try:
        import reasoning_gym
    except ModuleNotFoundError:
        raise SystemExit("error: reasoning-gym is not installed here: pip install reasoning-gym==0.1.25") from None
    items = reasoning_gym.create_dataset("letter_counting", size=60_000, seed=0, min_words=2, max_words=4)
    rows: dict[str, list[dict[str, str]]] = {"1": [], "2": [], "3": []}
    seen = set()
    for item in items:
        text, answer = " ".join(item["metadata"]["span"]), item["answer"]
        if (
            text.replace(" ", "").isalpha()
            and text.isascii()
            and len(text) <= 20
            and answer in rows
            and text not in seen
        ):
            seen.add(text)
            told = spelled(text, item["metadata"]["target_letter"])
            rows[answer].append({"prompt": item["question"], "answer": answer, "completion": told})
    mixed = [row for same in zip(*rows.values(), strict=False) for row in same]  # each answer a third of the time
    parts = {"test": mixed[:201], "sft": mixed[201:1001], "train": mixed[1001:3001]}
    for name, part in parts.items():
        drop = "answer" if name == "sft" else "completion"
        lines = [json.dumps({key: value for key, value in row.items() if key != drop}) for row in part]
        (HERE / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        print(f"{name}.jsonl: {len(part)} rows")


if __name__ == "__main__":
    main()
