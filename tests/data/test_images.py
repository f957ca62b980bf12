"""Images of rows: the forms in which they come, what is refused, and the tokens and pixels that they become."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from transformers import Gemma3ImageProcessorPil

from rlkit.compat.rows import read
from rlkit.data.examples import labelled_examples, preference_pairs, sft_examples
from rlkit.data.images import Image, ImageReader
from rlkit.data.load import load_rows
from rlkit.data.prompts import rl_prompts
from rlkit.data.tiny import tiny_vision_model
from rlkit.data.turns import PROMPT, SFT
from rlkit.model.pretrained import load_config, load_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_vision_model(folder)
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> list[Path]:
    """Two pictures, of 24 x 16 and 16 x 16 pixels: 6 and 4 tokens."""
    folder, draw = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for name, width in (("a", 24), ("b", 16)):
        Pillow.fromarray(draw.integers(0, 256, (16, width, 3), dtype=np.uint8)).save(folder / f"{name}.png")
    return [folder / "a.png", folder / "b.png"]


@pytest.fixture(scope="module")
def made(model) -> dict[str, Any]:
    """Arguments of the functions that make examples."""
    tokenizer = load_tokenizer(model)
    return {"tokenizer": tokenizer, "images": ImageReader(str(model), tokenizer, load_config(model))}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def url(path: Path) -> dict[str, Any]:
    data = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": data}}


def part(source: str) -> dict[str, Any]:
    return {"type": "image", "image": source}


TEXT = {"type": "text", "text": "What?"}
FORMS = {  # two pictures before a text
    "a column": lambda a, b: {"prompt": "What?", "images": [a, b]},
    "marks in the text": lambda a, b: {"prompt": "<image><image>What?", "images": [a, b]},
    "TRL": lambda a, b: {"prompt": [user([{"type": "image"}, {"type": "image"}, TEXT])], "images": [a, b]},
    "TRL, Pillow": lambda a, b: {"prompt": [user("What?")], "images": [Pillow.open(a), Pillow.open(b)]},
    "verl": lambda a, b: {
        "data_source": "x", "prompt": [user("<image><image>What?")], "reward_model": {"ground_truth": "1"},
        "images": [{"bytes": Path(a).read_bytes()}, {"path": b}], "extra_info": {"question": "<image><image>What?"},
    },
    "OpenAI": lambda a, b: {"messages": [user([url(Path(a)), url(Path(b)), TEXT])]},
    "Qwen": lambda a, b: {"messages": [user([part(a), part(f"file://{b}"), TEXT])]},
    "parts and a column": lambda a, b: {"messages": [user([part(a), {"type": "image"}, TEXT])], "image": b},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_prompt(form, pictures, made, caplog):
    row = FORMS[form](*map(str, pictures))
    (prompt, _), _ = rl_prompts(read([row, row]), **made, max_prompt_tokens=99)
    assert "placeholder" not in caplog.text  # each mark has its picture
    assert "extra_info" not in caplog.text
    tokenizer = made["tokenizer"]
    text = "<|im_start|>user\n"
    text += "".join(f"<|vision_start|>{'<|image_pad|>' * n}<|vision_end|>" for n in (6, 4))
    text += "What?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(prompt.ids) == text
    assert [x.inputs()["image_grid_thw"].tolist() for x in prompt.images] == [[[1, 4, 6]], [[1, 4, 4]]]
    truth = [Pillow.open(path) for path in pictures]
    for image, picture in zip(prompt.images, truth, strict=True):
        assert torch.equal(image.inputs()["pixel_values"], patches(picture))


def patches(picture: Pillow.Image) -> torch.Tensor:
    """The rows of Qwen's tower: 2 x 2 patches of 4 x 4 pixels together, twice in time, normalised as CLIP."""
    x = torch.from_numpy(np.asarray(picture, np.float32) / 255)
    mean, std = torch.tensor([0.48145466, 0.4578275, 0.40821073]), torch.tensor([0.26862954, 0.26130258, 0.27577711])
    x = ((x - mean) / std).permute(2, 0, 1)
    c, h, w = x.shape
    x = x.reshape(c, h // 8, 2, 4, w // 8, 2, 4).permute(1, 4, 2, 5, 0, 3, 6)  # blocks, patches, channels, pixels
    x = x.reshape(-1, c, 1, 4, 4).repeat(1, 1, 2, 1, 1)
    return x.reshape(len(x), -1)


def test_examples_of_every_kind_carry_their_images(pictures, made):
    a, b = map(str, pictures)
    options = {**made, "max_example_tokens": 99}
    shown = {"prompt": "What?", "images": [a]}
    (example,), _ = sft_examples([{**shown, "response": "yo"}], **options)
    (pair,), _ = preference_pairs([{**shown, "chosen": "yo", "rejected": "no"}], **options)
    examples, _ = labelled_examples(
        [
            {**shown, "chosen": "yo", "rejected": "no"},
        ],
        **options,
    )
    (labelled,), _ = labelled_examples([{**shown, "completion": "yo", "label": True}], **options)
    (prompt,), _ = rl_prompts([shown], **made, max_prompt_tokens=99)
    assert example.ids[: len(prompt.ids)] == pair.prompt == labelled.prompt == prompt.ids
    assert example.mask.index(True) == len(prompt.ids)
    assert example.images == pair.images == labelled.images == examples[1].images == prompt.images
    talk = [
        user("<image>What?"),
        {"role": "assistant", "content": "x"},
        user("<image>And?"),
        {"role": "assistant", "content": "y"},
    ]
    (example,), _ = sft_examples([{"messages": talk, "images": [a, b]}], **options)
    image = made["tokenizer"].convert_tokens_to_ids("<|image_pad|>")
    assert (example.ids.count(image), len(example.images), sum(example.mask)) == (10, 2, 4)
    chosen = [user([{"type": "image"}, TEXT]), {"role": "assistant", "content": "yo"}]
    rejected = [chosen[0], {"role": "assistant", "content": "no"}]
    assert preference_pairs([{"chosen": chosen, "rejected": rejected, "images": [a]}], **options)[0] == [pair]


def test_files_are_relative_to_the_data(pictures, made):
    path = pictures[0].parent / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "What?", "image": "a.png"}) + "\n")
    (prompt,), _ = rl_prompts(load_rows(path), **made, max_prompt_tokens=99)
    assert prompt.images[0].content == pictures[0].read_bytes()


def test_too_large_a_picture_is_made_smaller_and_a_long_prompt_dropped(tmp_path, pictures, made, caplog):
    Pillow.new("RGB", (4000, 3000)).save(tmp_path / "large.png")
    rows = [{"prompt": "What?", "images": [str(x)]} for x in (tmp_path / "large.png", pictures[0])]
    prompts, dropped = rl_prompts(rows, **made, max_prompt_tokens=99)
    assert (len(prompts), dropped) == (1, 1)
    (large,), _ = rl_prompts(rows[:1], **made, max_prompt_tokens=9999)
    assert 512 < len(large.ids) <= 65536 // 64 + 30


PLACES = "for images (<image>, or parts of the messages)"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"images": ["none.png"]}, "row 1: image 1 is not there: none.png"),
        ({"images": ["{damaged}"]}, "row 1: image 1 cannot be read: cannot identify image file"),
        ({"images": ["https://a.b/c.png"]}, "row 1: image 1 cannot be read: https://a.b/c.png is on a network: downl"),
        ({"images": [3.5]}, "row 1: image 1 cannot be read: 3.5 is no file, bytes or picture"),
        ({"images": [b"x"], "prompt": "<image><image>"}, f"row 1: has 2 places {PLACES} and 1 images"),
        ({"images": [b"x", b"y"], "prompt": "<image>"}, f"row 1: has 1 places {PLACES} and 2 images"),
        ({"prompt": [user([{"type": "image"}, TEXT])]}, "row 1: 1 images of its messages have no source, and"),
        ({"images": ["{good}"], "prompt": "<|image_pad|>?"}, "the text holds '<|image_pad|>', which stands for an im"),
        ({"videos": ["a.mp4"]}, "column 'videos' holds media"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line_with_the_row(row, message, tmp_path, pictures, made):
    (tmp_path / "damaged").write_bytes(pictures[0].read_bytes()[:30])
    places = {"{damaged}": str(tmp_path / "damaged"), "{good}": str(pictures[0])}
    row = {"prompt": "What?", **row}
    row |= {"images": [places.get(x, x) for x in row["images"]]} if "images" in row else {}
    with pytest.raises(ValueError) as error:  # noqa: PT011
        rl_prompts([row], **made, max_prompt_tokens=99)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_only_users_place_images(pictures, made):
    """A mark in an answer or in the system's message is text."""
    a = str(pictures[0])
    options = {**made, "max_example_tokens": 199}
    talk = [{"role": "system", "content": "At <image> look."}, user("<image>What?")]
    row = {"messages": [*talk, {"role": "assistant", "content": "Write <image>."}], "images": [a]}
    (example,), _ = sft_examples([row], **options)
    text = made["tokenizer"].decode(example.ids)
    assert (len(example.images), text.count("<image>"), text.count("<|image_pad|>")) == (1, 2, 6)
    (pair,), _ = preference_pairs(
        [{"prompt": "What?", "chosen": "a <image>", "rejected": "b", "images": [a]}], **options
    )
    assert made["tokenizer"].decode(pair.chosen).startswith("a <image>")
    assert len(pair.images) == 1


def test_the_two_sides_of_a_pair_show_the_same_images(pictures, made):
    sides = [[user([part(str(x)), TEXT]), {"role": "assistant", "content": x.stem}] for x in pictures]
    with pytest.raises(ValueError, match="row 1: 'chosen' and 'rejected' show different images"):
        preference_pairs([{"chosen": sides[0], "rejected": sides[1]}], **made, max_example_tokens=99)


@pytest.mark.parametrize("empty", [{"images": None}, {"images": []}, {"images": [None]}, {"image": {"bytes": None}}])
def test_empty_columns_are_no_images(empty, made):
    (prompt,), _ = rl_prompts([{"prompt": "What?", **empty}], **made, max_prompt_tokens=99)
    assert not prompt.images


def test_a_place_without_an_image_is_refused(made):
    with pytest.raises(ValueError, match=r"row 1: has 1 places for images \(<image>\) and no images"):
        rl_prompts([{"prompt": "the tag <image>"}], **made, max_prompt_tokens=99)
    for token in ("<|image_pad|>", "<|video_pad|>"):
        with pytest.raises(ValueError, match=rf"row 1: the text holds '{re.escape(token)}', which stands for an image"):
            rl_prompts([{"prompt": f"{token}?"}], **made, max_prompt_tokens=99)


def test_data_without_images_may_hold_the_mark_as_text(model, made):
    reader = ImageReader(str(model), made["tokenizer"], load_config(model), marked=False)
    (prompt,), _ = rl_prompts([{"prompt": "the tag <image>"}], **{**made, "images": reader}, max_prompt_tokens=99)
    assert "the tag <image>" in made["tokenizer"].decode(prompt.ids)
    with pytest.raises(ValueError, match=r"the text holds '<\|image_pad\|>', which stands for an image"):
        sft_examples(
            [{"prompt": "a", "response": "<|image_pad|>"}], **{**made, "images": reader}, max_example_tokens=99
        )


@pytest.mark.parametrize("size", [(16, 24), (37, 51), (3, 3), (500, 700)])  # as it is, resized, enlarged, made smaller
def test_a_server_is_sent_the_pixels_that_the_model_reads(size, model, made, tmp_path):
    """Its processor keeps them: whatever it resizes with, and without a thought about the file's orientation."""
    picture, exif = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8), Pillow.Exif()
    exif[0x0112] = 6
    Pillow.fromarray(picture).save(tmp_path / "a.jpg", exif=exif)
    (prompt,), _ = rl_prompts([{"prompt": "a", "images": str(tmp_path / "a.jpg")}], **made, max_prompt_tokens=9999)
    (image,) = prompt.images
    again = Image(f"png {size}", str(model), image.png()).inputs()
    assert all(torch.equal(x, again[name]) for name, x in image.inputs().items())


def test_a_server_is_sent_pictures_of_one_size(tmp_path):
    Gemma3ImageProcessorPil(size={"height": 56, "width": 56}).save_pretrained(tmp_path)
    Pillow.fromarray(np.random.default_rng(0).integers(0, 256, (40, 90, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    image = Image("a", str(tmp_path), (tmp_path / "a.png").read_bytes())
    again = Image("png", str(tmp_path), image.png()).inputs()
    torch.testing.assert_close(image.inputs(), again)


def test_a_photo_is_turned_as_its_file_says(made, tmp_path):
    """EXIF orientation 6: a quarter turn."""
    picture, exif = Pillow.new("RGB", (24, 16)), Pillow.Exif()
    exif[0x0112] = 6
    picture.save(tmp_path / "photo.jpg", exif=exif)
    row = {"prompt": "What?", "images": [str(tmp_path / "photo.jpg")]}
    (prompt,), _ = rl_prompts([row], **made, max_prompt_tokens=99)
    assert prompt.images[0].inputs()["image_grid_thw"].tolist() == [[1, 6, 4]]


def test_equal_contents_are_one_image():
    out = io.BytesIO()
    Pillow.new("RGB", (8, 8)).save(out, "PNG")
    assert Image("a", "m", out.getvalue()) == Image("a", "m", b"")


def test_files_of_several_folders_are_relative_to_their_own(made, tmp_path):
    for name, size in (("a", 16), ("b", 32)):
        (tmp_path / name).mkdir()
        Pillow.new("RGB", (size, 16)).save(tmp_path / name / "x.png")
        (tmp_path / name / "rows.jsonl").write_text(json.dumps({"prompt": "What?", "image": "x.png"}) + "\n")
    for source in ([tmp_path / "a" / "rows.jsonl", tmp_path / "b" / "rows.jsonl"], tmp_path / "b"):
        prompts, _ = rl_prompts(load_rows(source), **made, max_prompt_tokens=99)
        assert [p.images[0].inputs()["image_grid_thw"][0, 2].item() for p in prompts] == [4, 8][-len(prompts) :]


@pytest.mark.parametrize("make", [rl_prompts, sft_examples])
def test_one_image_in_all_rows_is_named(make, pictures, made, caplog):
    of_row = lambda i, picture: {"prompt": f"What? {i}", "response": f"{i}!", "images": [str(picture)]}
    limit = {"max_prompt_tokens" if make is rl_prompts else "max_example_tokens": 99}
    rows = [{**of_row(i, pictures[0]), "n": i} for i in range(10)]
    forms = (PROMPT,) if make is rl_prompts else SFT
    make(read(rows, *forms), **made, **limit)
    assert "all 10 rows show the same image" in caplog.text
    caplog.clear()
    make(read([*rows[1:], of_row(0, pictures[1])], *forms), **made, **limit)
    assert "show the same image" not in caplog.text
