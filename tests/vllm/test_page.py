"""The code of docs/vllm.md, on the server of these tests."""

from contextlib import nullcontext

import pytest
from snippets import blocks, run

from rlkit.types import SamplingParams

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
LAUNCH = 'launch("Qwen/Qwen3-4B", args=["--tensor-parallel-size", "2"])'


def test_the_page_samples_and_updates_weights(server, models, tmp_path):
    (code,) = blocks("docs/vllm.md")
    assert LAUNCH in code
    names = {
        "launch_here": lambda: nullcontext(server),
        "prompt_ids": [3, 4, 5],
        "params": SamplingParams(max_new_tokens=8),
    }
    left = run(
        code.replace(LAUNCH, "launch_here()").replace("/dev/shm/weights", str(tmp_path)), names | {"model": models[1]}
    )
    assert left["completion"].ids
