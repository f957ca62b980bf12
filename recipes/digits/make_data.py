"""Write the pictures, the rows and the model of this recipe: `python recipes/digits/make_data.py FOLDER`."""

from __future__ import annotations

import argparse
import json
import random
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    main(parser.parse_args().folder)
