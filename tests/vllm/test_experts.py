"""A mixture of experts on vLLM: the experts that a server reports, which the CPU build cannot (it needs Triton)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from routed import check_experts, make_moe

from rlkit.rollout.engines.servers.api import ServerLimits
from rlkit.rollout.engines.vllm import VLLM, launch
from rlkit.rollout.engines.vllm.api import VLLMApi
from rlkit.types import SamplingParams

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
REPLY = """
import numpy as np
from vllm.config.aux_output import AuxOutputConfig
from vllm.entrypoints.scale_out.token_in_token_out.protocol import (
    GenerateLogProbs, GenerateLogProbsContent, GenerateTokensChoice, GenerateTokensResponse,
)
from vllm.utils.serial_utils import numpy2base64

assert AuxOutputConfig(enable_return_routed_experts=True).enabled
ids = [7, 8, 9]
for rows in (4, 2):
    experts = numpy2base64(np.arange(rows * 4, dtype=np.uint8).reshape(rows, 2, 2))
    logp = GenerateLogProbs(content=[GenerateLogProbsContent(token_id=i, logprob=-1.0) for i in ids])
    what = {"finish_reason": "length", "token_ids": ids, "logprobs": logp, "routed_experts": experts}
    choice = GenerateTokensChoice(index=0, **what)
    print(GenerateTokensResponse(choices=[choice]).model_dump_json())
"""


def test_a_reply_has_the_experts_of_the_tokens_that_were_read(vllm_python: str) -> None:
    """Made by vLLM's own classes. It has read 2 + 3 - 1 tokens; the second reply lacks those of the last two."""
    done = subprocess.run([vllm_python, "-c", REPLY], capture_output=True, text=True, check=True)
    request = VLLMApi().body([5, 6], SamplingParams(max_new_tokens=3), ServerLimits(64, 64), None)
    replies = [json.loads(line) for line in done.stdout.splitlines()[-2:]]
    whole, half = (
        VLLMApi().completion(reply, request, ServerLimits(64, 64), url="http://one", version=0) for reply in replies
    )
    assert whole.experts.dtype == np.int16
    assert whole.experts.tolist() == np.arange(16).reshape(4, 2, 2).tolist()
    assert half.experts.tolist() == [*np.arange(8).reshape(2, 2, 2).tolist(), *[[[-1, -1], [-1, -1]]] * 2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
async def test_a_server_reports_the_experts_that_its_tokens_went_to(vllm_python: str, tmp_path: Path) -> None:
    moe, args = make_moe(tmp_path / "model"), ["--enable-return-routed-experts", "--gpu-memory-utilization", "0.3"]
    with launch(moe, dtype="float32", python=vllm_python, args=args, log=tmp_path / "log.txt") as server:
        async with VLLM(server.url) as engine:
            await check_experts(engine, moe)
