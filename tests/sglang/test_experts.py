"""A mixture of experts on a real SGLang server: the experts that it reports are replayed by the trainer."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from routed import check_experts, make_moe
from served import check_trained, train

from rlkit.rollout.engines.servers.api import ServerLimits
from rlkit.rollout.engines.sglang import SGLang, launch
from rlkit.rollout.engines.sglang.api import SGLangApi
from rlkit.types import SamplingParams

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_moe(tmp_path_factory.mktemp("moe") / "model")


@pytest.mark.slow
async def test_a_server_reports_the_experts_that_its_tokens_went_to(moe: Path, sglang_python: str, tmp_path: Path):
    args = ["--max-total-tokens", "8192", "--enable-return-routed-experts"]
    with launch(moe, device="cpu", python=sglang_python, args=args, log=tmp_path / "log.txt") as server:
        async with SGLang(server.url) as engine:
            await check_experts(engine, moe)


@pytest.mark.slow
def test_a_server_that_reports_none_is_not_asked() -> None:
    params = SamplingParams(max_new_tokens=4)
    for experts, asked in ((0, False), (2, True)):
        limits = ServerLimits(math.inf, math.inf, experts)
        assert ("return_routed_experts" in SGLangApi().body([3], params, limits, None)) == asked


@pytest.mark.slow
def test_a_run_starts_its_server_so(moe: Path, sglang_python: str, tmp_path: Path) -> None:
    check_trained(tmp_path, train("sglang", tmp_path, moe, sglang_python))
    (log,) = (tmp_path / "run").glob("sglang_*.log")
    assert "'enable_return_routed_experts': True" in log.read_text()
