"""Images on a real vLLM server."""

from __future__ import annotations

from pathlib import Path

import pytest
from served import check_images, make_vision_checkpoint

from rlkit.rollout.engines.vllm import VLLM, FromDisk, launch

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


async def test_prompts_show_images(vllm_python: str, tmp_path: Path) -> None:
    checkpoint = make_vision_checkpoint(tmp_path / "model")
    args, log = ["--max-model-len", "4096"], tmp_path / "log.txt"
    with launch(checkpoint, device="cpu", python=vllm_python, args=args, log=log) as server:
        async with VLLM(server.url, transport=FromDisk(tmp_path / "weights")) as engine:
            await check_images(engine, checkpoint, tmp_path)
