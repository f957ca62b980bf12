"""Models of a script's flags."""

from __future__ import annotations

import pytest
import torch

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model import launch
from rlkit.model.forward import forward
from rlkit.model.launch import choose_device, load_policy, report_model
from rlkit.packing import pack
from rlkit.parallel.mesh import local_gpu
from rlkit.settings import ParallelArgs
from rlkit.types import Trajectory


def test_with_a_lora_rank_adapters_are_all_that_trains_and_change_nothing_at_first(tmp_path):
    sizes = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 64}
    tiny_model(tiny_tokenizer(), **sizes).save_pretrained(tmp_path)
    plain, model = (load_policy(tmp_path, ParallelArgs(), lora_rank=rank) for rank in (0, 3))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7 * 2
    assert all("lora_" in name and 3 in p.shape for name, p in trained.items())
    assert all(p.requires_grad for p in plain.parameters())
    batch = pack([[Trajectory([1, 2, 3], [4, 5], [True, True], [-1.0, -1.0], [0, 0])]])
    torch.testing.assert_close(forward(model, batch).logp, forward(plain, batch).logp)


@pytest.mark.parametrize(
    ("device", "dtype", "cuda", "bf16", "expected"),
    [
        (None, None, True, True, ("cuda", "bf16")),
        (None, None, True, False, ("cuda", "fp32")),
        (None, None, False, False, ("cpu", "fp32")),
        (None, "bf16", False, False, ("cpu", "bf16")),
        (None, "fp32", True, True, ("cuda", "fp32")),
        ("cpu", None, True, True, ("cpu", "fp32")),
        ("cuda:1", None, True, True, ("cuda:1", "bf16")),
        ("mps", None, False, False, ("mps", "fp32")),
    ],
)
def test_a_gpu_is_taken_where_there_is_one_and_flags_decide(device, dtype, cuda, bf16, expected):
    assert choose_device(device, dtype, cuda=cuda, bf16=bf16) == expected


def test_a_gpu_alone_is_a_mesh_of_one_rank(monkeypatch):
    """The same code on a CPU: what is asked for is a mesh."""
    made = []
    monkeypatch.setattr(launch, "start", lambda **options: made.append(options))
    monkeypatch.setattr(launch, "make_mesh", lambda args, *, device: device)
    assert launch.open_mesh(ParallelArgs(), device="cpu", alone=False) is None
    assert launch.open_mesh(ParallelArgs(), device="cuda:1", alone=True) is None
    assert launch.open_mesh(ParallelArgs(timeout_s=9.0), device="cuda", alone=False) == "cuda"
    assert made == [{"device": "cuda", "timeout_s": 9.0}]


def test_each_rank_of_a_machine_takes_its_own_gpu(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert [local_gpu(device, num_gpus=2) for device in ("cuda", "cuda:1")] == [0, 1]
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert local_gpu("cuda", num_gpus=2) == 1
    with pytest.raises(ValueError, match="rank 1 of this machine has no GPU of its own, there are 1: start --nproc-pe"):
        local_gpu("cuda", num_gpus=1)


def test_what_trains_is_counted_once(tmp_path, capsys):
    sizes = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 64}
    model = tiny_model(tiny_tokenizer(), **sizes, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    size = sum(x.numel() for name, x in model.state_dict().items() if name != "lm_head.weight")
    report_model(load_policy(tmp_path, ParallelArgs()), dtype="fp32")
    assert capsys.readouterr().out == (f"model: {size:,} parameters on cpu, fp32; trains all weights\n")
    model.config.update({"attention_dropout": 0.5})
    model.save_pretrained(tmp_path / "drops")
    report_model(load_policy(tmp_path / "drops", ParallelArgs()), dtype="fp32")
    assert capsys.readouterr().out.endswith("; trains all weights; the dropout of its config is off\n")
    shapes = [p.shape for name, p in model.named_parameters() if name.endswith("proj.weight")]
    trained = 3 * sum(map(sum, shapes))
    report_model(load_policy(tmp_path, ParallelArgs(), lora_rank=3), dtype="bf16", name="critic")
    assert capsys.readouterr().out == (
        f"critic: {size:,} parameters on cpu, bf16; trains LoRA of rank 3 on 14 modules ({trained:,} parameters): "
        "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj\n"
    )
