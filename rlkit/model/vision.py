"""Vision-language models: what an image adds to the forward of a batch, and the classes that read images.

An image stands in the token ids as a run of placeholders, which the model replaces by its vision tower's features. In a
packed stream an image is encoded once for all documents that share the tokens up to it. Where rotary positions have
three axes (M-RoPE), those of an image are its grid's, and text goes on from the largest of them. Gemma 3 lets the
tokens of an image see one another in both directions: its batches with images run unpacked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from inspect import signature
from pathlib import Path
from shutil import copyfile
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from rlkit._util.files import model_file
from rlkit.parallel.attention import IMPLEMENTATION
from rlkit.types import Batch, Picture

TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "gemma3")


def reads_images(config: Any) -> bool:
    """Whether models of this config are trained on images."""
    return config.model_type in TYPES and getattr(config, "vision_config", None) is not None


def placeholder_ids(config: Any) -> tuple[int, ...]:
    """Tokens that stand for an image or a video; as an input, a sampled one would ask the model for an image."""
    names = ("image_token_id", "video_token_id") if reads_images(config) else ()
    return tuple(i for name in names if isinstance(i := getattr(config, name, None), int))


def auto_class(config: Any) -> Any:
    """The class of transformers that builds a model of this config: with its vision tower where images are trained."""
    from transformers.models.auto import modeling_auto

    return modeling_auto.AutoModelForImageTextToText if reads_images(config) else modeling_auto.AutoModelForCausalLM


def has_images(batch: Batch) -> bool:
    """Whether a prompt of the batch shows an image."""
    return batch.images is not None and any(batch.images)


def packs_images(model: Any) -> bool:
    """Whether a batch with images runs packed: attention between the tokens of an image is causal."""
    return hasattr(model.base_model, "get_rope_index")


def image_inputs(images: Iterable[Picture], device: torch.device) -> dict[str, Tensor]:
    """The arguments of the model's forward for these images, in the order of their placeholders; {} for none."""
    inputs = [image.inputs() for image in images]
    return {name: torch.cat([x[name] for x in inputs]).to(device) for name in (inputs[0] if inputs else ())}


def token_types(model: Any, ids: Int[Tensor, "*shape"]) -> dict[str, Tensor]:
    """The argument that marks placeholders by 1, under the name that the model gives it."""
    takes = signature(type(model.base_model).forward).parameters
    name = next((x for x in ("mm_token_type_ids", "token_type_ids") if x in takes), None)
    return {} if name is None else {name: (ids == model.config.image_token_id).int()}


class Shown(NamedTuple):
    """The images of a batch, and which of them each row of `[prefixes, sequences]` stands for (-1: none)."""

    images: list[Picture]
    of_row: Int[Tensor, "S"]

    @property
    def names(self) -> Int[Tensor, "S"]:
        """The same number for rows of equal images."""
        first: dict[str, int] = {}
        return torch.tensor([*(first.setdefault(x.digest, i) for i, x in enumerate(self.images)), -1])[self.of_row]

    def at(self, rows: Int[Tensor, "R"] | None) -> list[Picture]:
        """The images at these rows, in their order."""
        rows = torch.arange(len(self.of_row)) if rows is None else rows
        rows = rows[self.of_row[rows] >= 0]
        index = self.of_row[rows]
        starts = (index.diff() != 0) | (rows.diff() <= 0)  # a prompt that several samples have a copy of repeats rows
        return [self.images[i] for i in index[torch.cat((torch.ones(min(1, len(index))).bool(), starts))].tolist()]


def shown_images(model: Any, batch: Batch, tokens: Int[Tensor, "S"]) -> Shown:
    """The images of the batch, of which `join` gives the tokens.

    Errors: ValueError for a prefix or sequence with other than the placeholders that its images take.
    """
    ends = torch.cat([batch.prefix_cu, batch.cu_seqlens[1:] + batch.prefix_cu[-1]]).tolist()
    pictures: list[Picture] = []
    index = torch.full(tokens.shape, -1)
    for images, start, end in zip(batch.images or (), ends, ends[1:]):
        if images:
            which = len(pictures) + _placeholders(model, tokens[start:end], images)
            index[start:end][(tokens[start:end] == model.config.image_token_id).cpu()] = which
            pictures += images
    return Shown(pictures, index)


def rotary_positions(
    model: Any, batch: Batch, tokens: Int[Tensor, "S"], positions: Int[Tensor, "S"]
) -> Int[Tensor, "3 S"]:
    """The positions under M-RoPE, on three axes, of a batch with images, of which `join` gives tokens and positions."""
    num = batch.prefix_cu.numel() - 1
    ends = [*batch.prefix_cu.tolist(), *(batch.cu_seqlens[1:] + batch.prefix_cu[-1]).tolist()]
    out = positions.repeat(3, 1)
    shift = [0] * num  # of what follows a prefix: images take fewer positions than tokens
    for i, (images, start, end) in enumerate(zip(batch.images or (), ends, ends[1:])):
        before = 0 if i < num else shift[int(batch.prefix_ids[i - num])]
        out[:, start:end] += before
        if images:
            local = document_positions(model, tokens[start:end], images)
            out[:, start:end] = local + int(out[0, start])
            if i < num:
                shift[i] = int(local.max()) + 1 - (end - start)
    return out


def document_positions(model: Any, ids: Int[Tensor, "L"], images: Sequence[Picture]) -> Int[Tensor, "3 L"]:
    """The positions of a document that begins at 0."""
    _placeholders(model, ids, images)
    types = (ids == model.config.image_token_id).int()[None]
    positions, _ = model.base_model.get_rope_index(ids[None], types, image_grid_thw=_grids(images))
    return positions[:, 0].to(ids)


def _grids(images: Sequence[Picture]) -> Int[Tensor, "K 3"]:
    return torch.cat([image.inputs()["image_grid_thw"] for image in images])


def _placeholders(model: Any, ids: Int[Tensor, "L"], images: Sequence[Picture]) -> Int[Tensor, "P"]:
    """Which of the images each placeholder of a document stands for."""
    places = int((ids == model.config.image_token_id).sum())
    needed = _grids(images).prod(-1) // _merge(model.config) ** 2
    if places != (total := int(needed.sum())):
        raise ValueError(f"a document has {places} placeholders of images, and its {len(images)} images take {total}")
    return torch.arange(len(images)).repeat_interleave(needed)


@contextmanager
def own_attention(model: Any) -> Iterator[None]:
    """Inside the block a packed model has transformers' attention, which differentiates, too."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = "sdpa" if before == IMPLEMENTATION else before
    try:
        yield
    finally:
        config._attn_implementation = before


def tower_parts(model: Any) -> list[str]:
    """The parts of the base model beside its language model: the vision tower and its projector."""
    if not reads_images(model.config):
        return []
    return [name for name, _ in model.base_model.named_children() if name != "language_model"]


def freeze_tower(model: Any) -> None:
    """Do not train the vision tower and its projector."""
    for name in tower_parts(model):
        model.base_model.get_submodule(name).requires_grad_(False)


def with_tower(model: Any, hidden: Tensor) -> Tensor:
    """The hidden states of a batch without images, with a gradient of 0 for what trains of the tower.

    FSDP sums gradients over the ranks, and each must have the same ones; and an optimizer does the same step wherever
    the batches with images are.
    """
    parts = (model.base_model.get_submodule(name) for name in tower_parts(model))
    trained = [p.sum() for part in parts for p in part.parameters() if p.requires_grad]
    return hidden + 0 * torch.stack(trained).sum() if trained and torch.is_grad_enabled() else hidden


def copy_processor(model: Any, folder: Path) -> None:
    """Put the files of the model's own image processor beside an export."""
    if not reads_images(model.config) or not model.config.name_or_path:
        return
    for name in ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"):
        if file := model_file(model.config.name_or_path, name):
            copyfile(file, folder / name)


@dataclass(frozen=True)
class Noise:
    """A picture of random numbers with the smallest grid, for checks of a model. `ids` are its placeholders."""

    config: Any
    seed: int = 0

    @property
    def digest(self) -> str:
        """Its seed."""
        return sha256(str(self.seed).encode()).hexdigest()

    @property
    def ids(self) -> list[int]:
        """Its placeholders, in the marks that M-RoPE looks for."""
        config = self.config
        num = getattr(config, "mm_tokens_per_image", None) or self._grid.prod().item() // _merge(config) ** 2
        return [config.image_token_id] * int(num)

    @property
    def _grid(self) -> Tensor:
        side = _merge(self.config)
        return torch.tensor([[1, side, (2 + self.seed % 2) * side]])

    def inputs(self) -> dict[str, Tensor]:
        """See `rlkit.types.Picture`."""
        vision, generator = self.config.vision_config, torch.Generator().manual_seed(self.seed)
        if hasattr(vision, "image_size"):
            size = (1, 3, vision.image_size, vision.image_size)
            return {"pixel_values": torch.randn(size, generator=generator)}
        width = 3 * vision.temporal_patch_size * vision.patch_size**2
        pixels = torch.randn((int(self._grid.prod()), width), generator=generator)
        return {"pixel_values": pixels, "image_grid_thw": self._grid}


def _merge(config: Any) -> int:
    return getattr(config.vision_config, "spatial_merge_size", 1)
