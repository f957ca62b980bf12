"""Weights by the values that changed: a copy has the bits of the trainer's; one that is wrong is found and healed."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from fake_server import running
from safetensors.torch import load_file

from rlkit._util.changes import changes, follow, patch
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.rollout.engines import EngineError
from rlkit.rollout.engines.servers.tensors import FromChanges, FromDisk
from rlkit.rollout.engines.sglang import SGLang
from rlkit.rollout.engines.vllm import VLLM
from rlkit.scripts.args import Model
from rlkit.scripts.engines import EngineSpec, check_engine, open_engine
from rlkit.settings import SERVERS, Engines

pytestmark = pytest.mark.filterwarnings("ignore:rlkit cannot read the checkpoint")


@pytest.mark.parametrize("places", [[], [0], [254, 510], [255], [256], [1, 2, 3, 1021, 1022], [*range(5000)], [4999]])
def test_a_patched_file_has_the_bits_of_the_new_one(tmp_path: Path, places: list[int]) -> None:
    old = np.random.default_rng(0).integers(0, 1 << 16, 5000, dtype=np.uint16)
    new = old.copy()
    new[places] ^= 0x8001
    data = changes(old.tobytes(), new.tobytes())
    gaps = np.diff([0, *places]) if places else np.empty(0, int)
    assert len(data) == 8 + 3 * len(places) + sum(int(gap) // 255 for gap in gaps)
    (tmp_path / "x").write_bytes(old.tobytes())
    for _ in range(2):
        patch(tmp_path / "x", data)
        assert (tmp_path / "x").read_bytes() == new.tobytes()


def weights(step: int) -> dict[str, torch.Tensor]:
    """Of a model: each step changes 1% of the values in bf16, and one of a tensor in fp32."""
    made = {f"layer.{i}": torch.randn(64, 100, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3)}
    made["scale"] = torch.arange(8.0)
    for now in range(1, step + 1):
        draw = torch.Generator().manual_seed(100 + now)
        for x in made.values():
            places = torch.randperm(x.numel(), generator=draw)[: max(1, x.numel() // 100)]
            x.view(-1)[places] *= 1.5
    return made


@asynccontextmanager
async def server() -> AsyncIterator[tuple[str, list[str]]]:
    """Answers everything, and lists the folders that it is told to load."""
    loaded: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        told: Any = await request.json() if request.method == "POST" and request.can_read_body else {}
        told = told or {}
        path = told.get("model_path") or told.get("kwargs", {}).get("weights_path")
        loaded.extend([path] if path else [])
        return web.json_response({"vllm_config": {"model_config": {}, "parallel_config": {}}})

    app = web.Application()
    app.router.add_route("*", "/{page:.*}", answer)
    async with running(app) as url:
        yield url, loaded


async def update(engine: Any, folder: Path, copy: Path, version: int, *, times: int = 1) -> list[str]:
    """An update by an engine whose server's machine answers `times`; what is told there."""
    told = []

    async def beside_the_server() -> None:
        for _ in range(times):
            told.append(await asyncio.to_thread(follow, folder, copy, name="there"))

    await asyncio.gather(beside_the_server(), engine.update_weights(weights(version).items(), version=version))
    return told


def held(copy: Path) -> dict[str, torch.Tensor]:
    return {name: x for file in sorted(copy.iterdir()) for name, x in load_file(file).items()}


def assert_equal(copy: Path, version: int) -> None:
    expected = weights(version)
    assert held(copy).keys() == expected.keys()
    for name, x in held(copy).items():
        assert x.dtype == expected[name].dtype
        assert torch.equal(x, expected[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SGLang, VLLM])
async def test_five_steps_carry_the_changed_values_and_the_server_loads_the_copy(kind: Any, tmp_path: Path) -> None:
    folder, copy = tmp_path / "shared", tmp_path / "local" / "copy"
    async with server() as (url, loaded), kind(url, transport=FromChanges(folder, file_bytes=15_000)) as engine:
        for version in range(6):
            await update(engine, folder, copy, version)
            assert_equal(copy, version)
            sizes = [file.stat().st_size for file in max(folder.iterdir()).glob("0*")]
            whole = sum(file.stat().st_size for file in copy.iterdir())
            assert len(sizes) == len([*copy.iterdir()]) > 2
            assert sum(sizes) < 0.03 * whole if version else sum(sizes) == whole
        assert loaded == [str(copy)] * 6
        assert len([*folder.iterdir()]) == 2
    assert [*folder.iterdir()] == []


@pytest.mark.slow_cases("sglang")
@pytest.mark.parametrize("kind", SERVERS)
async def test_the_flags_open_an_engine_that_sends_changes(kind: str, tmp_path: Path) -> None:
    tiny_model(tiny_tokenizer()).save_pretrained(tmp_path / "model")
    folder, copy = tmp_path / "shared", tmp_path / "copy"
    async with server() as (url, loaded):
        engines = Engines(kind, engine_urls=(url,), weight_sync="changes", weight_sync_folder=folder)
        check_engine(engines, device="cpu")
        spec = EngineSpec(engines, Model(str(tmp_path / "model"), device="cpu"), tmp_path / "run", max_len=128)
        async with open_engine(spec, None, None) as engine:
            for version in range(2):
                await update(engine, folder, copy, version)
                assert_equal(copy, version)
            assert [file.suffix for file in max(folder.iterdir()).glob("0*")] == [".changes"] * len([*copy.iterdir()])
        assert loaded == [str(copy)] * 2


@pytest.mark.slow
async def test_a_lost_step_and_every_other_wrong_copy_gets_whole_files(tmp_path: Path, caplog: Any) -> None:
    folder, copy = tmp_path / "shared", tmp_path / "copy"
    async with server() as (url, loaded), SGLang(url, transport=FromChanges(folder, file_bytes=15_000)) as engine:
        await update(engine, folder, copy, 0)
        shutil.copytree(copy, tmp_path / "earlier")
        await update(engine, folder, copy, 1)

        def earlier() -> None:
            shutil.rmtree(copy)
            (tmp_path / "earlier").rename(copy)

        def shorter() -> None:
            (copy / "00000.safetensors").write_bytes(b"1234")

        faults = {
            earlier: "00000.safetensors was not the version that the changes are of",
            (copy / "00001.safetensors").unlink: "00001.safetensors is missing",
            shorter: "00000.safetensors is another file than the changes are of",
        }
        for version, (damage, fault) in enumerate(faults.items(), 2):
            damage()
            (copy / "of_others.safetensors").write_bytes(b"")
            told = await update(engine, folder, copy, version, times=2)
            assert fault in told[0]
            assert "up to date" in told[1]
            assert_equal(copy, version)
            assert f"{fault}" in caplog.text
        assert len(loaded) == 5, "nothing is loaded from a copy that is wrong"


async def test_an_answer_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    async def half_an_answer() -> None:
        while not (update := [*tmp_path.glob("*/manifest.json")]):
            await asyncio.sleep(0.01)
        (update[0].parent / ".tmp_there.answer").write_bytes(b'{"copy": "/da')

    async with server() as (url, loaded):
        engine = SGLang(url, transport=FromChanges(tmp_path, wait_s=0.5))
        with pytest.raises(EngineError, match="0 of 1 machines"):
            await asyncio.gather(half_an_answer(), engine.update_weights(weights(0).items(), version=0))
        await engine.close()
        assert loaded == []


async def test_an_update_without_a_copy_names_the_command(tmp_path: Path) -> None:
    async with server() as (url, loaded):
        engine = SGLang(url, transport=FromChanges(tmp_path, wait_s=0.1))
        fault = rf"0 of 1 machines \(127.0.0.1\) answer .*: run `rlkit patch {tmp_path} COPY` on each"
        with pytest.raises(EngineError, match=fault):
            await engine.update_weights(weights(0).items(), version=0)
        await engine.close()
        assert loaded == []


async def test_files_of_a_version_that_is_sent_again_stay(tmp_path):
    async def load(server, path, version):
        assert sorted(x.name for x in path.iterdir()) == ["00000.safetensors"]

    server, disk = SimpleNamespace(api=SimpleNamespace(load=load)), FromDisk(tmp_path / "weights")
    for version in (1, 2, 2, 2):  # tried again after a server failed
        await disk.send([server], [("x", torch.ones(2))], version=version)
    assert sorted(x.name for x in (tmp_path / "weights").iterdir()) == ["1", "2"]
    await disk.close()
    assert not (tmp_path / "weights").exists()
