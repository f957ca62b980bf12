"""Images of rows: gathered from columns and messages, checked, and turned into placeholders and the model's inputs.

A row has images as TRL, verl and OpenAI have them:

    {"images": ["a.png", ...], "messages": [...]}       a column `images` or `image`: files, bytes, {"bytes": ...}, PIL
    {"type": "image", "image": "a.png"}                 a part of a message's content; without a source, of the column
    {"type": "image_url", "image_url": {"url": ...}}    a data: URL, or a file

`<image>` in a text of the user or a tool places an image of the column. Images that nothing places stand before the
first user message.
Files are relative to the working directory, or to the folder of the data file. Nothing is fetched from a network.
"""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkit._util import untrusted
from rlkit._util.files import base_of, model_file
from rlkit.data.columns import is_empty
from rlkit.data.load import Row, Rows, column_error
from rlkit.data.schema import PAIRED, PROMPTS

if TYPE_CHECKING:
    from torch import Tensor

MARK = "<image>"
PLACE = "\ue000image\ue001"  # of an image that a row has: a text may hold the mark itself
COLUMNS = ("images", "image")
PARTS = ("image", "image_url", "input_image")
_TEXTS = (*PROMPTS, *PAIRED)
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "JPEG2000", "MPO", "PPM", "AVIF")  # none that runs a program
_KEPT = 256  # images whose pixels a process keeps


@dataclass(frozen=True)
class Image:
    """An `rlkit.types.Picture`: the bytes of a file, and the model whose image processor reads them.

    `num_tokens`: how many placeholders it has; `placeholders`: the tokens that stand for an image, first, and a video.
    """

    digest: str
    processor: str
    content: bytes = field(compare=False, repr=False)
    num_tokens: int = field(compare=False, default=0)
    placeholders: tuple[int, ...] = field(compare=False, default=())

    @property
    def url(self) -> str:
        """The image as a data: URL."""
        from PIL import Image as Pillow

        kind = Pillow.open(io.BytesIO(self.content), formats=_known()).get_format_mimetype()
        return f"data:{kind};base64,{base64.b64encode(self.content).decode()}"

    def inputs(self) -> dict[str, Tensor]:
        """`pixel_values`, and `image_grid_thw` where the model takes images of any size."""
        return _inputs(self)

    def png(self) -> bytes:
        """What a server is sent: a PNG of the pixels of `inputs`, in their size, so that its processor keeps them."""
        return _png(self)


@lru_cache(maxsize=_KEPT)
def _inputs(image: Image) -> dict[str, Any]:
    return _processed(image)


def _processed(image: Image, **options: Any) -> dict[str, Any]:
    tensors = processor_of(image.processor)(images=[_opened(image.content)], return_tensors="pt", **options)
    return {name: tensors[name] for name in ("pixel_values", "image_grid_thw") if name in tensors}


@lru_cache(maxsize=_KEPT)
def _png(image: Image) -> bytes:
    import torch
    from einops import rearrange
    from PIL import Image as Pillow

    tensors, processor = _processed(image, do_rescale=False, do_normalize=False), processor_of(image.processor)
    pixels = tensors["pixel_values"]
    if "image_grid_thw" in tensors:  # in patches, those of one token together
        _, height, width = tensors["image_grid_thw"][0].tolist()
        merge, size = processor.merge_size, processor.patch_size
        pixels = rearrange(
            pixels, "(h w mh mw) (c t ph pw) -> t c (h mh ph) (w mw pw)",
            h=height // merge, w=width // merge, mh=merge, t=processor.temporal_patch_size, ph=size, pw=size,
        )  # fmt: skip
    out = io.BytesIO()
    Pillow.fromarray(rearrange(pixels[0], "c h w -> h w c").to(torch.uint8).numpy()).save(out, "PNG")
    return out.getvalue()


@lru_cache
def processor_of(path: str) -> Any:
    """The image processor of a model's folder or hub id; on Pillow where torchvision is not installed."""
    from transformers import AutoImageProcessor

    from rlkit.model.pretrained import NO_CODE, explained

    if find_spec("PIL") is None:
        raise ImportError("images need Pillow: pip install pillow", name="PIL")
    backend = "torchvision" if find_spec("torchvision") else "pil"
    with explained(path, "image processor"):
        return AutoImageProcessor.from_pretrained(path, backend=backend, **NO_CODE)


def _check_size(content: bytes, max_pixels: float | None = None) -> None:
    """ValueError for an image with more pixels, or more than the limit `image_mpixels`, before any is decoded."""
    from PIL import Image as Pillow

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Pillow.DecompressionBombWarning)
        try:
            width, height = Pillow.open(io.BytesIO(content), formats=_known()).size
        except Pillow.DecompressionBombError as error:  # of Pillow's own limit
            raise untrusted.BadFile(str(error)) from None
    if max_pixels is not None and width * height > max_pixels:
        raise ValueError(f"it has {width} x {height} pixels, and may have {max_pixels / 1e6:g} million")
    if width * height > untrusted.limit("image_mpixels") * 1e6:
        raise untrusted.too_much("it", f"{width} x {height} pixels", "image_mpixels")


@lru_cache
def _known() -> list[str]:
    """The formats that this Pillow reads, of those that are read here."""
    from PIL import Image as Pillow

    Pillow.init()
    return [name for name in _FORMATS if name in Pillow.OPEN]


def _opened(content: bytes) -> Any:
    from PIL import Image as Pillow
    from PIL import ImageOps

    _check_size(content)
    picture = ImageOps.exif_transpose(Pillow.open(io.BytesIO(content), formats=_known()))  # as a viewer shows a photo
    return picture.convert("RGB")


class ImageReader:
    """Reads the images of rows for the model at `path`, whose config has a vision tower.

    An image becomes the text that the model's own processor writes for it: placeholders between two marks.
    `marked`: `<image>` places one; False, for data without images: it is text.
    """

    def __init__(self, path: str, tokenizer: Any, config: Any, *, marked: bool = True) -> None:
        from rlkit.model.vision import placeholder_ids

        self._path, self.marked = path, marked

        def text(*names: str) -> str:
            ids = [i for name in names if (i := getattr(config, name, None)) is not None]
            return str(tokenizer.convert_ids_to_tokens(ids[0])) if ids else ""

        self._placeholder, self._tokens = text("image_token_id"), placeholder_ids(config)
        self._never = tokenizer.convert_ids_to_tokens(list(self._tokens))
        self._start = text("vision_start_token_id", "boi_token_id", "boi_token_index")
        self._end = text("vision_end_token_id", "eoi_token_id", "eoi_token_index")
        self._fixed = getattr(config, "mm_tokens_per_image", None)

    def read(self, row: Row, rows: Sequence[Row], place: str) -> tuple[Image, ...]:
        """The images of a row (see `gathered`). ValueError, with the row, for one that cannot be read."""
        file = Path(place.rpartition(", ")[0] if isinstance(rows, Rows) else "")
        folder = file if file.is_dir() else file.parent
        images = []
        for number, source in enumerate(row["images"]):
            try:
                images.append(self.image(source, folder))
            except ImportError:
                raise
            except FileNotFoundError as error:
                raise ValueError(f"{place}: image {number + 1} is not there: {error.filename}") from None
            except Exception as error:  # of Pillow: any, of a damaged file
                raise ValueError(f"{place}: image {number + 1} cannot be read: {short(error)}") from None
        return tuple(images)

    def image(self, source: Any, folder: Path = Path(), *, max_pixels: float | None = None) -> Image:
        """The image of a file, bytes, a data: URL, `{"bytes": ..., "path": ...}`, or a picture of Pillow.

        ValueError where it has more than `max_pixels`, or is beyond a limit (docs/data.md); and errors of files and of
        Pillow.
        """
        content = _content(source, folder)
        _check_size(content, max_pixels)
        return Image(sha256(content).hexdigest(), self._path, content, self._count(content), self._tokens)

    def _count(self, content: bytes) -> int:
        """The placeholders of an image."""
        picture = _opened(content)
        if self._fixed:
            return int(self._fixed)
        processor = processor_of(self._path)
        num = processor.get_number_of_image_patches(picture.height, picture.width)
        return int(num) // processor.merge_size**2

    def placed(self, text: str, images: Sequence[Image], place: str) -> str:
        """The text with the placeholders of an image for each `PLACE`: of the first ones, where it has fewer."""
        first, *rest = text.split(PLACE)
        self.refuse_placeholders(text, place)
        return "".join([first, *(self._text(image) + part for image, part in zip(images, rest))])

    def refuse_placeholders(self, text: str, place: str) -> None:
        """ValueError for a text with placeholders of its own."""
        if placeholders := [token for token in self._never if token in text]:
            fault = f"{place}: the text holds {placeholders[0]!r}, which stands for an image or a video"
            raise ValueError(f"{fault}: drop it, or for an image of the row write {MARK}")

    def split_placeholders(self, text: str) -> str:
        """The text with a zero-width space in what would be read as a placeholder."""
        for token in self._never:
            text = text.replace(token, f"{token[0]}\u200b{token[1:]}")
        return text

    def _text(self, image: Image) -> str:
        inner = f"{self._start}{self._placeholder * image.num_tokens}{self._end}"
        return f"\n\n{inner}\n\n" if self._fixed else inner


@lru_cache(maxsize=4)
def reader_of(tokenizer: Any) -> ImageReader | None:
    """Reads images for the model whose tokenizer this is; None for a model of text, or where there is no model."""
    path = base_of(getattr(tokenizer, "name_or_path", ""))
    return reader_at(path, tokenizer) if path and model_file(path, "config.json", cached=True) else None


def reader_at(path: str, tokenizer: Any, *, marked: bool = True, config: Any = None) -> ImageReader | None:
    """Reads images for the model in this folder, with its `config` if loaded; None for a model of text."""
    from rlkit.model.pretrained import load_config
    from rlkit.model.vision import reads_images

    path, config = base_of(path), config or load_config(path)
    return ImageReader(path, tokenizer, config, marked=marked) if reads_images(config) else None


def shows_images(row: Row) -> bool:
    """Whether a row seems to have images: in a column, or in its messages, also in their JSON text."""
    if any(not is_empty(row.get(name)) and row[name] is not False for name in COLUMNS):
        return True
    texts = [row.get(name) for name in _TEXTS]
    return any(isinstance(x, str) and '"image' in x for x in texts) or any(next(_parts(x), None) for x in texts)


def gathered(row: Row, place: str) -> Row:
    """The columns of a row with images: texts with `PLACE` for each, and their sources in `images`, in that order.

    {} for a row without images. ValueError, with the row, for more places than images, or more images than places.
    """
    listed = [x for name in COLUMNS for x in _several(row.get(name))]
    by_column = {name: (text, sources) for name, text, sources in _asked(row) if sources}
    pair = [by_column[name][1] for name in PAIRED if name in by_column]
    if pair[1:] and pair[0] != pair[1]:
        raise column_error(place, "'chosen' and 'rejected' show different images", row)
    sources = next((sources for _, sources in by_column.values()), [])
    if not listed and all(source is None for source in sources):
        if sources and any(next(_parts(value), None) for value in map(row.get, _TEXTS)):
            fault = f"{len(sources)} images of its messages have no source, and there is no column 'images'"
            raise column_error(place, fault, row)
        return {}
    new = {name: text for name, (text, _) in by_column.items()}
    if not sources:
        first = next((column for column in _TEXTS if row.get(column)), None)
        for column in PAIRED if first == "chosen" else (first,) if first else ():
            new[column] = _before(row.get(column), PLACE * len(listed))
        sources = [None] * len(listed)
    left = iter(listed)
    images = [next(left, None) if source is None else source for source in sources]
    if None in images or next(left, None) is not None:
        fault = f"has {len(sources)} places for images ({MARK}, or parts of the messages) and {len(listed)} images"
        raise column_error(place, fault, row)
    return {**new, "images": images, "image": None}


def marks(row: Row) -> int:
    """The places for images in a row's prompt."""
    return max((len(sources) for *_, sources in _asked(row)), default=0)


def _asked(row: Row) -> Iterator[tuple[str, Any, list[Any]]]:
    """`_placed` of each column that is asked; a string `chosen` or `rejected` is an answer."""
    for name in _TEXTS:
        value = row.get(name)
        if not (isinstance(value, str) and name in PAIRED):
            yield name, *_placed(value)


def _several(value: Any) -> list[Any]:
    """The images in a column: one, or a list of them."""
    if is_empty(value) or value is False:
        return []
    return [*value] if isinstance(value, list | tuple) else [value]


def _parts(value: Any) -> Iterator[Mapping[str, Any]]:
    """The parts of messages that are images."""
    for message in value if isinstance(value, list | tuple) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list | tuple) else ():
            if isinstance(part, Mapping) and part.get("type") in PARTS:
                yield part


def _placed(value: Any) -> tuple[Any, list[Any]]:
    """The texts with a place for each image, and the source of each, None for one of the column.

    Places are marks and parts in the texts of users and tools; a string is a user's.
    """
    if isinstance(value, str):
        return value.replace(MARK, PLACE), [None] * value.count(MARK)
    sources: list[Any] = []
    out = []
    for message in value if isinstance(value, list | tuple) else ():
        role = message.get("role", message.get("from")) if isinstance(message, Mapping) else "assistant"
        key = "content" if "content" in message else "value"
        if role in ("assistant", "gpt", "system", "developer") or message.get(key) is None:
            out.append(message)
            continue
        content, texts = message[key], []
        for part in content if isinstance(content, list | tuple) else [content]:
            if isinstance(part, Mapping) and part.get("type") in PARTS:
                sources.append(source_of(part))
                texts.append(PLACE)
            elif isinstance(text := part.get("text") if isinstance(part, Mapping) else part, str):
                sources += [None] * text.count(MARK)
                texts.append(text.replace(MARK, PLACE))
            else:  # `joined_parts` says which part is not read
                return value, []
        out.append({**message, key: "".join(texts)})
    return out, sources


def source_of(part: Mapping[str, Any]) -> Any:
    """Where the image of a part is; None without a source."""
    value = next((part[name] for name in ("image", "image_url", "url", "path") if not is_empty(part.get(name))), None)
    return value.get("url") if isinstance(value, Mapping) and "url" in value else value


def _before(value: Any, marks: str) -> Any:
    """The marks at the beginning of a text, or of the first message of the user."""
    if isinstance(value, str):
        return marks + value
    if not isinstance(value, list | tuple):
        return value
    roles = [message.get("role", message.get("from")) for message in value]
    at = next((i for i, role in enumerate(roles) if role in ("user", "human")), 0)
    key = "content" if "content" in value[at] else "value"
    return [{**m, key: f"{marks}{m.get(key) or ''}"} if i == at else m for i, m in enumerate(value)]


def _content(source: Any, folder: Path) -> bytes:
    """The bytes of an image: of a file, a data: URL, `{"bytes": ..., "path": ...}`, or a picture of Pillow."""
    if isinstance(source, Mapping):
        source = source.get("bytes") or source.get("path") or source.get("url")
    if isinstance(source, bytes | bytearray):
        untrusted.check_length("it", len(source), "image_mib")
        return bytes(source)
    if hasattr(source, "save"):
        out = io.BytesIO()
        source.convert("RGB").save(out, "PNG")
        return out.getvalue()
    if not isinstance(source, str):
        raise TypeError(f"{repr(source)[:60]} is no file, bytes or picture")
    if source.startswith("data:"):
        untrusted.check_length("it", len(source) * 3 // 4, "image_mib")
        return base64.b64decode(source.partition(",")[2], validate=True)
    if "://" in source and not source.startswith("file://"):
        raise ValueError(f"{source[:60]} is on a network: download it and give the file")
    path = Path(source.removeprefix("file://"))
    return untrusted.read(path if path.is_absolute() or path.is_file() else folder / path, "image_mib")


def short(error: Exception) -> str:
    """The first line of an error of Pillow."""
    text = str(error).partition("\n")[0].partition(" <_io.BytesIO")[0]
    return text or type(error).__name__
