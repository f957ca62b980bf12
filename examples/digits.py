"""A vision-language model that learns to read digits: data, a small random Qwen3-VL, and the commands that train it.

    python examples/digits.py /tmp/digits
    rlkit sft --model /tmp/digits/model --data /tmp/digits/sft.jsonl --steps 300 --batch-size 32 --lr 1e-3 \
        --output /tmp/digits/run-sft --train-vision
    rlkit grpo --model /tmp/digits/run-sft/model --data /tmp/digits/rl.jsonl --eval-data /tmp/digits/eval.jsonl \
        --reward rlkit.rewards.text:exact_match --steps 40 --lr 3e-4 --max-new-tokens 4 --output /tmp/digits/run-grpo --train-vision

Pictures of two digits in random places, sizes and shades are drawn with Pillow's own font. The model has half a million
weights and has never seen anything: supervised training shows it what the task is, GRPO makes it better at it.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from rlkit.data.tiny import tiny_vision_model

SIZES = {"sft": 4000, "rl": 2000, "eval": 200}


def draw(text: str, rng: random.Random) -> Image.Image:
    """A picture of 32 x 24 pixels with the text in it."""
    picture = Image.new("L", (32, 24), rng.randrange(170, 256))
    font = ImageFont.load_default(size=18)
    place = rng.randrange(4, 7), rng.randrange(1, 4)
    ImageDraw.Draw(picture).text(place, text, fill=rng.randrange(0, 80), font=font)
    return picture


def main(folder: Path) -> None:
    """Write the pictures, the rows and the model."""
    rng = random.Random(0)
    for name, count in SIZES.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        with (folder / f"{name}.jsonl").open("w") as file:
            for i in range(count):
                text = f"{rng.randrange(100):02d}"
                draw(text, rng).save(folder / name / f"{i}.png")
                row = {"prompt": "Read it.", "images": [f"{name}/{i}.png"], "answer": text}
                row |= {"response": text} if name == "sft" else {}
                file.write(json.dumps(row) + "\n")
    tiny_vision_model(folder / "model")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
