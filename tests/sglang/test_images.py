"""Images on a real SGLang server."""

from __future__ import annotations

from pathlib import Path

import pytest
from served import check_images, make_vision_checkpoint

from rlkit.rollout.engines.sglang import SGLang, launch

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]


async def test_prompts_show_images(sglang_python: str, tmp_path: Path) -> None:
    checkpoint = make_vision_checkpoint(tmp_path / "model")
    options = {"args": ["--max-total-tokens", "16384"], "env": {"SGLANG_VLM_CACHE_SIZE_MB": "0"}}
    with launch(checkpoint, device="cpu", python=sglang_python, log=tmp_path / "log.txt", **options) as server:
        async with SGLang(server.url) as engine:
            await check_images(engine, checkpoint, tmp_path)
