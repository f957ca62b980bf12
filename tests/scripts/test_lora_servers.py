"""The arguments with which a LoRA run starts its servers, and what it does where they do not start with them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model.lora import add_lora
from rlkit.rollout.engines import EngineError
from rlkit.scripts.args import Model
from rlkit.scripts.engines import EngineSpec, open_engine
from rlkit.settings import SERVERS, Engines

pytest.importorskip("peft")
STAND_IN = f"""#!{sys.executable}
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
folder = os.path.dirname(sys.argv[0])
with open(folder + "/started", "a") as file:
    file.write(json.dumps([sys.argv[1:], os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING")]) + "\\n")
if os.path.exists(folder + "/old") and "--enable-lora" in sys.argv:
    sys.exit("unrecognized arguments: --enable-lora")
class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{{"vllm_config": {{"model_config": {{}}, "parallel_config": {{}}}}}}')
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answer).serve_forever()
"""


@pytest.fixture
def model(tmp_path: Path) -> Any:
    tokenizer = tiny_tokenizer()
    tiny = tiny_model(tokenizer, hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, intermediate=64)
    tiny.save_pretrained(tmp_path / "model")
    return tiny


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter that stands in for SGLang's and vLLM's; with the file `old` beside it, for ones without LoRA."""
    path = tmp_path / "python"
    path.write_text(STAND_IN)
    path.chmod(0o755)
    for name in ("SGLANG", "VLLM"):
        monkeypatch.setenv(f"RLKIT_{name}_PYTHON", str(path))
    return path


def args_of(folder: Path, **engine: Any) -> Any:
    return EngineSpec(Engines(**engine), Model(str(folder / "model"), device="cpu"), folder / "run", max_len=128)


def started(python: Path) -> list[tuple[str, str | None]]:
    """The arguments from --enable-lora on, of each start, and whether vLLM may load adapters."""
    lines = [json.loads(line) for line in python.with_name("started").read_text().splitlines()]
    return [("".join(" ".join(given).partition("--enable-lora")[1:]), may) for given, may in lines]


async def opened(args: Any, model: Any) -> None:
    async with open_engine(args, model, None):
        pass


SGLANG = "--enable-lora --max-lora-rank 9 --lora-target-modules q_proj v_proj --max-loras-per-batch 2"
VLLM = "--enable-lora --max-lora-rank 16 --max-loras 1 --max-cpu-loras 1 --max-model-len 128"


@pytest.mark.slow_cases("sglang-expected0")
@pytest.mark.parametrize(
    ("engine", "expected"), [("sglang", (f"{SGLANG} --lora-strict-loading", None)), ("vllm", (VLLM, "1"))]
)
async def test_servers_are_started_for_the_adapter_of_the_model(
    engine: str, expected: tuple[str, str | None], python: Path, model: Any, tmp_path: Path
) -> None:
    await opened(args_of(tmp_path, engine=engine), model)
    adapted = add_lora(model, rank=9, targets=["q_proj", "v_proj"])
    await opened(args_of(tmp_path, engine=engine), adapted)
    await opened(args_of(tmp_path, engine=engine, weight_sync_lora="merged"), adapted)
    assert started(python) == [("", None), expected, ("", None)]


async def test_a_layer_that_sglang_s_flag_does_not_name_takes_all(python: Path, model: Any, tmp_path: Path) -> None:
    model.model.layers[0].mlp.add_module("in_proj", torch.nn.Linear(4, 4))
    await opened(args_of(tmp_path, engine="sglang"), add_lora(model, rank=9, targets=["in_proj"]))
    assert "--lora-target-modules all " in started(python)[0][0]


@pytest.mark.slow_cases("sglang")
@pytest.mark.parametrize("engine", SERVERS)
async def test_servers_that_do_not_start_with_adapters_start_without_and_one_line_says_so(
    engine: str, python: Path, model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    python.with_name("old").touch()
    adapted = add_lora(model, rank=9, targets=["q_proj", "v_proj"])
    await opened(args_of(tmp_path, engine=engine), adapted)
    assert [bool(given) for given, _ in started(python)] == [True, False]
    [line] = [record.getMessage() for record in caplog.records if "LoRA" in record.getMessage()]
    assert line.startswith("the servers are started without LoRA, and get merged weights: the ")
    assert line.endswith(f"exited at its start; its log {tmp_path / 'run' / f'{engine}_0_0.log'}")
    with pytest.raises(EngineError, match="unrecognized arguments: --enable-lora"):
        await opened(args_of(tmp_path, engine=engine, weight_sync_lora="adapter"), adapted)


async def test_servers_take_no_adapter_of_layers_that_are_transposed(model: Any, tmp_path: Path) -> None:
    sizes = {"vocab_size": 263, "n_embd": 32, "n_layer": 1, "n_head": 2}
    adapted = add_lora(GPT2LMHeadModel(GPT2Config(**sizes)), rank=2)
    with pytest.raises(ValueError, match=r"^`weight_sync_lora` adapter: servers take adapters of linear layers only"):
        await opened(args_of(tmp_path, engine="sglang", weight_sync_lora="adapter"), adapted)
