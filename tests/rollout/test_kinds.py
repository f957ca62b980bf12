"""The table of server kinds: each row has its folder, and a server is started with the options of the run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import LlamaConfig

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.rollout.engines.servers.kinds import Lora, Start, kind_named
from rlkit.settings import SERVERS, Engines


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model(tiny_tokenizer()).save_pretrained(folder)
    flags = Engines("sglang", engine_tp=2, engine_memory=0.3, engine_release=True)
    return Start(
        str(folder), flags, on_cpu=False, gpus=[2, 3], deterministic=False, train_vision=False, max_len=64, sync="ipc",
        lora=Lora(12, ["q_proj"]),
    )  # fmt: skip


@pytest.mark.parametrize("name", SERVERS)
def test_a_kind_has_a_row_and_a_folder(name, start):
    kind = kind_named(name)
    assert kind.api().name == SERVERS[name].name
    on_gpus, on_cpu = kind.options(start), kind.options(start._replace(on_cpu=True, lora=None))
    assert {"0.3", "2"} < {*on_gpus[0]}
    assert "0.3" not in on_cpu[0]


def test_adapters_and_gpus_are_named_as_each_kind_takes_them(start, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    args, env = kind_named("sglang").options(start)
    assert args[args.index("--max-lora-rank") + 1] == "12"
    assert args[args.index("--base-gpu-id") + 1] == "2"
    assert not env
    args, env = kind_named("vllm").options(start)
    assert args[args.index("--max-lora-rank") + 1] == "16"
    assert env["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert '{"backend": "ipc"}' in args


def test_the_servers_of_a_vision_tower_keep_no_features(start):
    vision = start._replace(train_vision=True, on_cpu=True, lora=None)
    for name in SERVERS:
        kind = kind_named(name)
        assert kind.api().vision_env.items() <= kind.options(vision)[1].items()


def test_servers_quantize_at_every_update_where_they_can(start):
    """The names are those of vLLM 0.32 and SGLang 0.5.23, whose loader `flash_rl` has two families."""
    start = start._replace(flags=replace(start.flags, engine_quantization="fp8"))
    args = kind_named("vllm").options(start)[0]
    assert args[args.index("--quantization") + 1] == "fp8_per_channel"
    sglang = kind_named("sglang").options
    args = sglang(start)[0]
    assert args[args.index("--quantization") + 1] == "fp8"
    assert args[args.index("--load-format") + 1] == "flash_rl"
    for other, why in (({"sync": "disk"}, "it takes no files"), ({"on_cpu": True}, "its kernels for it need a GPU")):
        with pytest.raises(ValueError, match=f"`engine_quantization` fp8 with SGLang: {why}"):
            sglang(start._replace(**other))


def test_sglang_quantizes_two_families(start, tmp_path):
    LlamaConfig().save_pretrained(tmp_path)
    flags = replace(start.flags, engine_quantization="fp8")
    with pytest.raises(ValueError, match="it quantizes qwen2 and qwen3 only, not llama; try `engine` vllm"):
        kind_named("sglang").options(start._replace(model=str(tmp_path), flags=flags))
