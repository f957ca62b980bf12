"""The code of docs/sglang.md, on the server of these tests."""

from contextlib import nullcontext

import pytest
from snippets import blocks, run

from rlkit.types import SamplingParams

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]
LAUNCH = 'launch("Qwen/Qwen3-4B", args=["--tp", "2"])'


@pytest.mark.slow
def test_the_page_samples_and_updates_weights(server, models):
    (code,) = blocks("docs/sglang.md")
    assert LAUNCH in code
    names = {"launch_here": lambda: nullcontext(server), "prompt_ids": [3, 4, 5], "SamplingParams": SamplingParams}
    left = run(code.replace(LAUNCH, "launch_here()").replace("512", "8"), names | {"model": models[1]})
    assert left["completion"].ids
