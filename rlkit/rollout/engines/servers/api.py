"""Protocol of a kind of inference server, so that one client serves all kinds."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from rlkit.data.images import Image
from rlkit.rollout.engines.http import check_prompt, whole_number
from rlkit.types import Completion, SamplingParams

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


class Api(Protocol):
    """The protocol of one kind of server. `server` is a `Replica`; each call awaits the server's answer."""

    name: str
    start: str  # a command that starts one
    generate: str  # path of a completion
    alive: str  # path that a paused server answers too
    info: str  # path that reports the version of its weights
    lora_root: str  # before the paths that load and unload adapters
    lora: str  # what starts one that takes adapters
    positional_noise: bool  # the noise of a token is a function of its seed and position
    vision_env: Mapping[str, str]  # variables with which it keeps no features of images, for a tower that trains

    def body(
        self, prompt_ids: list[int], params: SamplingParams, limits: ServerLimits, salt: str | None
    ) -> dict[str, Any]:
        """The request; ValueError for one that the server cannot do. Another `salt` is another prefix cache."""
        ...

    def showing(self, body: dict[str, Any], images: Sequence[Image]) -> dict[str, Any]:
        """The request with the images of its prompt, in which each is one placeholder (`collapsed`).

        The reply then has the prompt's tokens, as the server has expanded it, for `completion` to compare.
        """
        ...

    def named(self, body: dict[str, Any], wire: str) -> dict[str, Any]:
        """The request under the name by which it can be aborted."""
        ...

    def completion(
        self, reply: Any, request: dict[str, Any], limits: ServerLimits, *, url: str, version: int
    ) -> Completion:
        """The completion of a reply, or ReplicaError; `version` is for servers that do not report theirs."""
        ...

    def num_verified(self, reply: Any) -> int:
        """Forwards that verified drafts for a completion; 0 without speculative decoding, or where it does not say."""
        ...

    def scoring(self, prompt: list[int], ids: list[int], k: int, *, model: str) -> Scoring:
        """A request for log-probs of temperature 1 at each of `ids` after the prompt: of the `k` most likely tokens
        there, or with 0 of `ids` themselves. `model` is the name in /v1/models."""
        ...

    async def learn(self, server: Any, *, timeout: float) -> Facts:
        """What the server reports of itself."""
        ...

    async def pause(self, server: Any, mode: PauseMode) -> None:
        """Stop sampling; see `ServerEngine`."""
        ...

    async def resume(self, server: Any) -> None:
        """Sample again."""
        ...

    async def flush(self, server: Any) -> None:
        """Forget all keys and values, also those of requests in flight, which are then computed again."""
        ...

    async def abort(self, server: Any, wire: str | None, *, timeout: float) -> None:
        """End the request of that name (None: all), whose caller gets the tokens so far."""
        ...

    async def begin(self, server: Any) -> None:
        """Before the first weights of an update."""
        ...

    async def end(self, server: Any) -> None:
        """After the last ones."""
        ...

    async def load(self, server: Any, folder: Path, version: int) -> None:
        """Load the safetensors of a folder and stamp the version, in one step."""
        ...

    def adapted(self, body: dict[str, Any], adapter: str) -> dict[str, Any]:
        """The request to the adapter of that name."""
        ...

    async def stamp(self, server: Any, version: int) -> None:
        """Set the version of what is sampled from here on."""
        ...

    async def waiting(self, server: Any) -> int:
        """Requests that wait in its queue; 0 where it does not say."""
        ...

    async def release(self, server: Any, tags: Sequence[str]) -> None:
        """Free GPU memory; see `ServerEngine.release_memory`."""
        ...

    async def take_back(self, server: Any, tags: Sequence[str]) -> None:
        """Take it back."""
        ...


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


def parse_version(told: Any, missing: int) -> int:
    """A served version, a string or an integer, as a number; "default", what a server starts with, is 0.

    Errors: ValueError for any other value.
    """
    if told is None:
        return missing
    served = 0 if told == "default" else int(told) if isinstance(told, str) else told
    return whole_number(served, "weight_version", low=0, high=MAX_VERSION)


def versions_of(spans: Any, num_tokens: int) -> list[int]:
    """The version of each token. The spans of a reply must be disjoint and cover all tokens: nothing else is built."""
    edges = []
    for span in spans:
        start = whole_number(span["start"], "start", low=0, high=num_tokens)
        edges.append((start, whole_number(span["end"], "end", low=start, high=num_tokens), span["version"]))
    if sum(end - start for start, end, _ in edges) != num_tokens:
        raise ValueError(f"weight_versions do not cover {num_tokens} tokens once")
    versions = [-1] * num_tokens
    for start, end, served in edges:
        versions[start:end] = [parse_version(served, 0)] * (end - start)
    if -1 in versions:
        raise ValueError(f"weight_versions do not cover {num_tokens} tokens once")
    return versions
