"""Requests and buckets in wire format; no server is needed."""

from __future__ import annotations

import math

import pytest
import torch

from rlkit.rollout.engines.servers.api import ServerLimits
from rlkit.rollout.engines.servers.tensors import Memory, flatten, groups
from rlkit.rollout.engines.sglang.api import SGLangApi
from rlkit.types import SamplingParams

body = SGLangApi().body
NONE = ServerLimits(math.inf, math.inf)


def test_sampling_parameters() -> None:
    params = SamplingParams(5, temperature=0.3, top_p=0.8, top_k=0, stop_token_ids=(3,), stop=("x",), seed=2**63 + 9)
    request = body([1, 2], params, NONE, None)
    assert request == {
        "input_ids": [1, 2],
        "return_logprob": True,
        "stream": False,
        "sampling_params": {
            "max_new_tokens": 5,
            "temperature": 0.3,
            "top_p": 0.8,
            "top_k": -1,
            "min_p": 0.0,
            "stop_token_ids": [3],
            "stop": ["x"],
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "sampling_seed": 9,
        },
    }
    salted = body([1], SamplingParams(top_k=7, min_p=0.1), NONE, "rlkit-3")
    assert salted["sampling_params"]["top_k"] == 7
    assert salted["sampling_params"]["min_p"] == 0.1
    assert salted["extra_key"] == "rlkit-3"
    assert "sampling_seed" not in salted["sampling_params"]


def test_a_completion_ends_at_the_context_limit() -> None:
    limits = ServerLimits(10, 100)
    assert body([1] * 8, SamplingParams(max_new_tokens=5), limits, None)["sampling_params"]["max_new_tokens"] == 2
    assert body([1] * 2, SamplingParams(max_new_tokens=5), limits, None)["sampling_params"]["max_new_tokens"] == 5
    with pytest.raises(ValueError, match="shorter than the context of 10, got 10"):
        body([1] * 10, SamplingParams(), limits, None)
    with pytest.raises(ValueError, match=r"in \[0, 100\), got 1 to 100"):
        body([1, 100], SamplingParams(), limits, None)


def test_buckets_hold_every_tensor_once_aligned_and_within_their_size() -> None:
    torch.manual_seed(0)
    dtypes = [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32, torch.int64, torch.float32]
    shapes = [(3, 5), (7,), (2, 3), (), (4,), (400,)]
    named = [(f"t{i}", torch.randn(s).to(d)) for i, (s, d) in enumerate(zip(shapes, dtypes, strict=True))]
    memory, seen, lasts = Memory(), {}, []
    for group, last in groups(named, max_bytes=100):
        bucket = flatten(group, memory)
        assert bucket.flat.numel() <= 100 or len(group) == 1
        lasts.append(last)
        for place in bucket.metadata:
            assert place.start_idx % place.dtype.itemsize == 0
            tensor = bucket.flat[place.start_idx : place.end_idx].view(place.dtype).reshape(place.shape)
            assert place.name not in seen
            seen[place.name] = tensor.clone()  # the next bucket is laid out in the same memory
    assert lasts == [False] * (len(lasts) - 1) + [True]
    assert [*seen] == [name for name, _ in named]
    assert all(torch.equal(seen[name], tensor) for name, tensor in named)
