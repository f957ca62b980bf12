"""What the kinds of inference servers share: facts, limits, prompts with images, versions.

`Api` is the type of a kind; one client serves all of them.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from rlkit.data.images import Image
from rlkit.rollout.engines.http import check_prompt, whole_number
from rlkit.types import SamplingParams

MAX_VERSION, MAX_RANKS = 2**31 - 1, 1 << 16
PauseMode = Literal["retract", "in_place", "abort"]


class ServerLimits(NamedTuple):
    """Context length and vocabulary size of the served model, in tokens; infinite where unknown.

    `experts`: how many experts a token goes to, where servers report which ones (`Completion.experts`); 0: they do not.
    """

    max_len: float
    vocab_size: float
    experts: int = 0


class Facts(NamedTuple):
    """What a server reports of itself: tensor, pipeline and data parallel sizes, context, checkpoint, adapters, whether
    it reports the experts of each token, whether it drafts tokens by weights of their own (EAGLE, MTP, a model), and
    whether it has quantized its weights at the start and would not quantize new ones."""

    num_ranks: int = 1
    num_stages: int = 1
    num_copies: int = 1
    max_len: float = math.inf
    model_path: str | None = None
    max_lora_rank: int = 0  # 0: it takes no adapter
    experts: bool = False
    has_draft: bool = False
    quantized: bool = False


LogProbs = list[tuple[list[int], list[float]]]  # at each token: ids, and log-probs of them
Scoring = tuple[str, dict[str, Any], Callable[[Any], LogProbs]]  # path and body of a request, and what reads its reply


if TYPE_CHECKING:
    from rlkit.rollout.engines.sglang.api import SGLangApi
    from rlkit.rollout.engines.vllm.api import VLLMApi

    Api: TypeAlias = SGLangApi | VLLMApi  # one kind of server; the docstrings of SGLangApi are those of each


def degree(info: Mapping[str, Any], name: str, *, least: int = 1) -> int:
    """A number of ranks that a server reports, `least` where it reports none."""
    return whole_number(info.get(name) or least, name, low=least, high=MAX_RANKS)


def max_new_tokens(prompt_ids: list[int], params: SamplingParams, limits: ServerLimits) -> float:
    """Tokens that the completion may have: cut at the context limit, which servers would refuse to do.

    Errors: ValueError for a prompt that is empty, too long or has ids out of range.
    """
    check_prompt(prompt_ids, vocab_size=limits.vocab_size)
    if len(prompt_ids) >= limits.max_len:
        raise ValueError(f"prompt_ids must be shorter than the context of {limits.max_len}, got {len(prompt_ids)}")
    return min(params.max_new_tokens, limits.max_len - len(prompt_ids))


def collapsed(prompt_ids: Sequence[int], images: Sequence[Image]) -> list[int]:
    """The prompt with one placeholder for each image: servers expand it by their own image processor.

    Errors: ValueError for more or fewer runs of placeholders than images.
    """
    token = images[0].placeholders[0]
    runs = [(is_image, [*run]) for is_image, run in groupby(prompt_ids, key=token.__eq__)]
    if (num := sum(is_image for is_image, _ in runs)) != len(images):
        raise ValueError(f"prompt_ids have {num} runs of placeholders (token {token}) for {len(images)} images")
    return [i for is_image, run in runs for i in (run[:1] if is_image else run)]


def unsampled(body: dict[str, Any], images: Sequence[Image]) -> dict[str, Any]:
    """The sampling parameters of a request with images, with which no placeholder is sampled.

    As an input it would ask for another image. Servers then report the distribution without these tokens, to which a
    trained model gives no mass.
    """
    never = dict.fromkeys(map(str, images[0].placeholders), -100.0)
    return {"sampling_params": body["sampling_params"] | {"logit_bias": never}}


def data_urls(images: Sequence[Image]) -> list[str]:
    """The images as servers take them."""
    return [f"data:image/png;base64,{b64encode(image.png()).decode()}" for image in images]


def check_expanded(told: Sequence[int] | None, prompt_ids: Sequence[int], *, url: str) -> None:
    """ValueError unless the prompt that a server has read, with its images, is the one that is trained."""
    if told is not None and list(told) != list(prompt_ids):
        fault = f"has read other tokens than the prompt with images has ({len(told)} and {len(prompt_ids)})"
        raise ValueError(f"{url} {fault}: serve the checkpoint that is trained, with its tokenizer and image processor")


def parse_version(told: Any, missing: int, *, start: int = 0) -> int:
    """A served version, a string or an integer, as a number; "default", what a server starts with, is `start`.

    Errors: ValueError for any other value.
    """
    if told is None or told == "default":
        return missing if told is None else start
    served = int(told) if isinstance(told, str) else told
    return whole_number(served, "weight_version", low=0, high=MAX_VERSION)


def versions_of(spans: Any, num_tokens: int, *, start: int = 0) -> list[int]:
    """The version of each token, "default" as `start`. The spans of a reply must be disjoint and cover all tokens:
    nothing else is built."""
    edges = []
    for span in spans:
        first = whole_number(span["start"], "start", low=0, high=num_tokens)
        edges.append((first, whole_number(span["end"], "end", low=first, high=num_tokens), span["version"]))
    if sum(end - first for first, end, _ in edges) != num_tokens:
        raise ValueError(f"weight_versions do not cover {num_tokens} tokens once")
    none = MAX_VERSION + 1
    versions = [none] * num_tokens
    for first, end, served in edges:
        versions[first:end] = [parse_version(served, 0, start=start)] * (end - first)
    if none in versions:
        raise ValueError(f"weight_versions do not cover {num_tokens} tokens once")
    return versions
