"""What training must do on a CUDA device; tools/gpu/programme.py runs it.

RLKIT_GPU_TESTS_ON=cpu rehearses every line on the CPU: `tests/test_gpu_rehearsal.py` does so.
"""

import asyncio
import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import varlen
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model.checkpoint import BackgroundSaver, latest_checkpoint, load_checkpoint, save_checkpoint
from rlkit.model.forward import forward, prepare_model
from rlkit.model.lora import add_lora
from rlkit.model.optim import adamw, optimizer_step
from rlkit.model.parallelize import parallelize
from rlkit.model.small_copy import shrunk
from rlkit.model.weights import stream_weights
from rlkit.packing import pack
from rlkit.parallel import attention
from rlkit.parallel.attention import Segment, plan
from rlkit.parallel.mesh import Parallel, make_mesh, start
from rlkit.rollout.engines.local import LocalEngine
from rlkit.rollout.engines.local.fused import FusedDecoder
from rlkit.types import SamplingParams, Trajectory

DEVICE = os.environ.get("RLKIT_GPU_TESTS_ON", "cuda")
ROOT = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(),
        reason="no CUDA device: run tools/gpu/programme.py A on a machine that has one",
    ),
]


def batch(share=True):
    g = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(0, 263, (n,), generator=g).tolist()
    groups = []
    for n in (9, 4, 17):
        prompt = draw(n)
        groups.append([Trajectory(prompt, draw(k), [True] * k, [0.0] * k, [0] * k) for k in (3, 8, 5)])
    return pack(groups, share_prompts=share)


def close(x, y, tolerance):
    torch.testing.assert_close(x.detach().cpu().double(), y.detach().cpu().double(), atol=tolerance, rtol=tolerance)


def alike(x, y):
    """Cosine of the angle between two gradients."""
    return torch.nn.functional.cosine_similarity(x.flatten().cpu().float(), y.flatten().cpu().float(), dim=0).item()


def test_the_forward_is_the_cpus_shared_or_not():
    model = prepare_model(tiny_model(tiny_tokenizer()))
    shared, unshared = batch(), batch(share=False)
    true = forward(model, shared)
    true.logp.sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model = model.to(DEVICE)
    for given in (shared, shared.to(DEVICE)):  # a loop gives batches that are on the CPU
        ours = forward(model, given)
        close(ours.logp, true.logp, 1e-3)
        close(ours.entropy, true.entropy, 1e-3)
    plain = forward(model, unshared.to(DEVICE)).logp
    close(plain.cpu()[unshared.mask], ours.logp.cpu()[shared.mask], 1e-4)
    ours.logp.sum().backward()
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert alike(p.grad, grad) > 0.9999


def test_bf16_is_near_fp32():
    """Flash attention over shared prompts, autocast, and the fused head, against the CPU in fp32."""
    model = prepare_model(tiny_model(tiny_tokenizer()))
    true = forward(model, batch())
    true.logp.sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model = model.to(DEVICE)
    for share in (True, False):
        given = batch(share)
        ours = forward(model, given, dtype="bf16")
        assert ours.logp.dtype == torch.float32
        close(ours.logp.cpu()[given.mask], true.logp[batch().mask], 0.1)
        model.zero_grad()
        ours.logp.sum().backward()
        for p, grad in zip(model.parameters(), grads, strict=True):
            assert p.grad.dtype == torch.float32
            assert alike(p.grad, grad) > 0.98


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("prompt", [100, 700])
def test_flash_attention_is_the_reference(prompt, window, head_dim, monkeypatch):
    """Segments with a prefix and without, of one query and of many; values and gradients against fp64 buckets. Without
    a window, the samples of the long prompt attend to one copy of its keys."""
    if DEVICE == "cpu":
        varlen.on_the_cpu(monkeypatch)
    spans, end = [Segment(0, prompt, [(0, prompt)])], prompt
    for n in (1, 70, 33, 128, 5):
        spans.append(Segment(end, n, [(0, prompt), (end, n)]))
        end += n
    flash = plan(spans, flash=True).to(DEVICE)
    assert (flash.shared is not None) == (prompt == 700)
    torch.manual_seed(0)
    true = [torch.randn(end, h, head_dim, dtype=torch.double, requires_grad=True) for h in (4, 2, 2)]
    ours = [x.detach().to(DEVICE, torch.bfloat16).requires_grad_() for x in true]
    g = torch.randn(end, 4, head_dim, dtype=torch.double)
    options = {"scale": head_dim**-0.5, "window": window}
    want = attention.attend(*true, plan(spans)._replace(shared=None), **options)
    got = attention.attend(*ours, flash, **options)
    close(got, want, 3e-2)
    grads = torch.autograd.grad(got, ours, g.to(DEVICE, torch.bfloat16)), torch.autograd.grad(want, true, g)
    for x, y in zip(*grads, strict=True):
        assert alike(x, y) > 0.999
    if DEVICE != "cpu":
        assert attention.has_flash(torch.device(DEVICE), torch.bfloat16, head_dim=head_dim, softcap=False)


def test_the_engine_samples_with_the_trainers_log_probs():
    model = prepare_model(tiny_model(tiny_tokenizer()).to(DEVICE))
    engine = LocalEngine(model, max_batch=16, max_len=64)

    async def many():
        params = [SamplingParams(max_new_tokens=12, seed=i) for i in range(12)]
        return await asyncio.gather(*(engine.generate([1, 2, 3 + i % 3], params=p) for i, p in enumerate(params)))

    done = asyncio.run(many())
    groups = [
        [Trajectory([1, 2, 3 + i % 3], c.ids, [True] * len(c.ids), c.logp, c.versions)] for i, c in enumerate(done)
    ]
    packed = pack(groups)
    close(forward(model, packed).logp, packed.rollout_logp, 1e-3)


def sampled_from_a_copy():
    """A model, and an engine that records its steps."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = CONFIG_MAPPING["qwen3"](vocab_size=263, num_key_value_heads=2, head_dim=32, **sizes)
    torch.manual_seed(0)
    model = prepare_model(AutoModelForCausalLM.from_config(config).to(DEVICE))
    engine = LocalEngine(model, max_len=300, dtype=torch.bfloat16, eos_token_ids=())
    assert type(engine._decoder) is FusedDecoder
    return model, engine


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7}, {"top_p": 0.9}])
def test_a_recorded_step_samples_with_the_trainers_log_probs(params):
    """FusedDecoder: kernels, graphs of several numbers of rows, a cache that grows, new weights under old graphs."""
    model, engine = sampled_from_a_copy()

    async def many(longest):
        every = [SamplingParams(max_new_tokens=3 + i * longest // 12, seed=i, **params) for i in range(12)]
        return await asyncio.gather(*(engine.generate([1, 2, 3 + i % 3], params=p) for i, p in enumerate(every)))

    for longest in (12, 120):
        done = asyncio.run(many(longest))
        groups = [
            [Trajectory([1, 2, 3 + i % 3], c.ids, [True] * len(c.ids), c.logp, c.versions)] for i, c in enumerate(done)
        ]
        packed = pack(groups)
        temperature = params.get("temperature", 1.0)
        close(forward(model, packed, temperature=temperature).logp, packed.rollout_logp, 5e-2)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.02 * torch.randn_like(p))
        asyncio.run(engine.update_weights(stream_weights(model), version=1))


def test_a_step_is_recorded_while_another_thread_takes_memory(monkeypatch):
    """As a reward model does that runs in a thread."""
    _, engine = sampled_from_a_copy()
    decode, taken = engine._decoder.decode, []
    take = lambda: taken.append(torch.zeros(1 << 20 if DEVICE == "cpu" else 1 << 28, device=DEVICE))

    def beside(*args):
        out = decode(*args)
        if DEVICE == "cpu" or torch.cuda.is_current_stream_capturing():
            thread = threading.Thread(target=take)
            thread.start()
            thread.join()
        return out

    monkeypatch.setattr(engine._decoder, "decode", beside)
    done = asyncio.run(engine.generate([1, 2, 3], params=SamplingParams(max_new_tokens=4, seed=0)))
    assert len(done.ids) == 4
    assert taken


@pytest.fixture
def mesh():
    start(device=DEVICE, timeout_s=120)
    yield make_mesh(Parallel(), device=DEVICE)
    dist.destroy_process_group()


def steps(model, optimizer, num=2, **options):
    norms = []
    for _ in range(num):
        (-forward(model, batch(), **options).logp.sum()).backward()
        norms.append(optimizer_step(optimizer, max_norm=1.0)["grad_norm"].total)
    return norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fsdp_on_one_device_trains_like_a_plain_model_and_resumes(mesh, dtype, tmp_path):
    """FSDP2 and NCCL with one rank, fused AdamW, both ways to save, the weights gathered into a plain model."""
    new = lambda: parallelize(tiny_model(tiny_tokenizer()).to(DEVICE), mesh, dtype=dtype)
    plain, model = prepare_model(tiny_model(tiny_tokenizer()).to(DEVICE)), new()
    optimizers = adamw(plain, lr=1e-3), adamw(model, lr=1e-3)
    norms = steps(plain, optimizers[0]), steps(model, optimizers[1])
    for x, y in zip(*norms, strict=True):
        close(x, y, 1e-3 if dtype == torch.float32 else 5e-2)
    save_checkpoint(tmp_path / "a", step=2, model=model, optimizer=optimizers[1], state={"x": 1}, keep=1)
    with BackgroundSaver(tmp_path / "b", keep=1) as saver:
        saver.save(step=2, model=model, optimizer=optimizers[1], state={"x": 1})
        after = steps(model, optimizers[1])  # while it is written
    for folder in ("a", "b"):
        again = new()
        optimizer = adamw(again, lr=1e-3)
        state = load_checkpoint(latest_checkpoint(tmp_path / folder), model=again, optimizer=optimizer)
        assert state["step"] == 2
        for x, y in zip(steps(again, optimizer), after, strict=True):
            close(x, y, 1e-4 if dtype == torch.float32 else 1e-2)
    plain.load_state_dict({name: x.clone() for name, x in stream_weights(model)}, strict=True)
    close(forward(plain, batch()).logp, forward(model, batch()).logp, 1e-4 if dtype == torch.float32 else 0.1)


def test_an_offloaded_model_trains_like_a_plain_one(mesh):
    """Parameters and optimizer states in the host's memory, a layer at a time on the device."""
    plain, model = prepare_model(tiny_model(tiny_tokenizer())), tiny_model(tiny_tokenizer())
    model = parallelize(model, mesh, dtype=torch.float32, offload=True)
    norms = steps(plain, adamw(plain, lr=1e-3)), steps(model, adamw(model, lr=1e-3))
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    for x, y in zip(*norms, strict=True):
        close(x, y, 1e-3)
    for name, x in stream_weights(model):
        close(x, plain.state_dict()[name], 1e-4)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_base_in_few_bits_is_the_cpus(kind):
    logps, gradients = [], []
    for device in ("cpu", DEVICE):
        model = add_lora(tiny_model(tiny_tokenizer()), rank=4, base=kind)
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in adapter_parameters(model):
                p.copy_(0.05 * torch.randn(p.shape, generator=draw))
        model = prepare_model(model.to(device))
        logps.append(forward(model, batch()).logp)
        logps[-1].sum().backward()
        gradients.append(torch.cat([p.grad.flatten().cpu() for p in adapter_parameters(model)]))
    close(*logps, 1e-3)
    assert alike(*gradients) > 0.9999


def adapter_parameters(model):
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_demos_task_learns_and_resumes(dtype, tmp_path, monkeypatch):
    """The scripts as a user calls them: SFT, GRPO, a checkpoint, and a run that goes on from it."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import demo

    from rlkit.model.weights import export_hf
    from rlkit.scripts import grpo, sft
    from rlkit.scripts.args import Data, Episodes, Evaluation, Model
    from rlkit.settings import Engines, Optim, Penalties, Rollouts, Schedule

    demo.make_data(tmp_path, seed=0)
    tokenizer = tiny_tokenizer()
    export_hf(tiny_model(tokenizer), tokenizer, tmp_path / "random")
    num_sft, num_grpo = (300, 12) if DEVICE != "cpu" else (3, 4)
    warm = sft.main(
        sft.Args(
            model=Model(str(tmp_path / "random"), device=DEVICE), data=Data(str(tmp_path / "sft.jsonl")),
            schedule=Schedule(tmp_path / "sft", steps=num_sft),
            optim=Optim(lr=1e-3, lr_schedule="linear", warmup_steps=20, dtype=dtype),
        )
    )  # fmt: skip
    reward = str(ROOT / "examples/sorting_reward.py") + ":score"
    args = {
        "model": Model(str(warm), device=DEVICE),
        "data": Data(str(tmp_path / "train.jsonl"), eval_data=str(tmp_path / "eval.jsonl")),
        "episodes": Episodes(reward=reward, max_prompt_tokens=32),
        "evaluation": Evaluation(eval_limit=16),
        "rollouts": Rollouts(prompts_per_step=8, minibatches=2, max_new_tokens=8), "engine": Engines(max_batch=64),
        "optim": Optim(lr=1.5e-4, dtype=dtype), "penalties": Penalties(kl_coef=0.01),
    }  # fmt: skip
    when = Schedule(tmp_path / "grpo", steps=num_grpo // 2, eval_steps=4, save_steps=2)
    grpo.main(grpo.Args(schedule=when, **args))
    trained = grpo.main(grpo.Args(schedule=replace(when, steps=num_grpo, resume=True), **args))
    lines = [json.loads(line) for line in (tmp_path / "grpo/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(num_grpo + 1))
    assert all(line["skipped_step"] == 0 for line in lines[1:])
    assert all(abs(line["mismatch/k3"]) < (1e-4 if dtype == "fp32" else 0.02) for line in lines[1:])
    assert (Path(trained) / "model.safetensors").exists()
    if DEVICE != "cpu":
        assert lines[-1]["eval/sampled"] > 0.1


def test_sinks_and_values_of_another_size_by_flash_are_those_in_fp32():
    spans = [Segment(0, 40, [(0, 40)]), Segment(40, 8, [(0, 40), (40, 8)]), Segment(48, 30, [(0, 40), (48, 30)])]
    draw = torch.Generator().manual_seed(0)
    sizes = ((78, 4, 32), (78, 2, 32), (78, 2, 16), (4,))
    exact = [torch.randn(n, generator=draw).to(DEVICE).requires_grad_() for n in sizes]
    half = [x.detach().bfloat16().requires_grad_() for x in exact]
    for sinks in (True, False):
        for window in (None, 9):
            options = {"scale": 32**-0.5, "window": window}
            outs = []
            for inputs, flash in ((exact, False), (half, DEVICE == "cuda")):
                *qkv, sink = inputs
                made = plan(spans, flash=flash).to(DEVICE)
                outs.append(attention.attend(*qkv, made, sinks=sink if sinks else None, **options))
            close(outs[1], outs[0], 3e-2)
            some = [inputs[: 3 + sinks] for inputs in (exact, half)]
            grads = [torch.autograd.grad(out.float().square().sum(), x) for out, x in zip(outs, some, strict=True)]
            assert all(alike(a, b) > 0.999 for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("kind", ["qwen3_5_text", "bamba", "lfm2"])
def test_recurrent_layers_are_the_cpus(kind):
    """With the kernels that transformers finds here (flash-linear-attention, causal-conv1d, mamba-ssm) or torch's."""
    torch.manual_seed(0)
    config = shrunk(CONFIG_MAPPING[kind]())
    config.vocab_size = 263
    model, found = AutoModelForCausalLM.from_config(config).eval(), []
    for device in ("cpu", DEVICE):
        prepare_model(model.to(device)).zero_grad()
        out = forward(model, batch())
        (out.logp - 0.1 * out.entropy).sum().backward()
        found.append((out.logp, [p.grad.cpu() for p in model.parameters() if p.grad is not None]))
    (logp, grads), (logp_there, grads_there) = found
    close(logp_there, logp, 1e-3)
    assert all(alike(a, b) > 0.999 for a, b in zip(grads, grads_there, strict=True) if a.abs().max() > 1e-6)
