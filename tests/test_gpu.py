"""What must hold on a CUDA device; `make gpu` runs it."""

import asyncio

import pytest
import torch

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.kernels.linear_logp import linear_logp
from rlkit.packing import pack
from rlkit.parallel.model import forward, prepare
from rlkit.rollout.local import LocalEngine
from rlkit.types import SamplingParams, Trajectory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device: run `make gpu` on a machine that has one"
    ),
]


def batch():
    g = torch.Generator().manual_seed(0)
    groups = []
    for n in (9, 4, 17):
        prompt = torch.randint(0, 263, (n,), generator=g).tolist()
        lens = (3, 8, 5)
        groups.append(
            [
                Trajectory(prompt, torch.randint(0, 263, (k,), generator=g).tolist(), [True] * k, [0.0] * k, [0] * k)
                for k in lens
            ]
        )
    return pack(groups), pack(groups, share_prompts=False)


def test_the_forward_is_the_cpus_shared_or_not():
    model = prepare(tiny_model(tiny_tokenizer()))
    shared, unshared = batch()
    true = forward(model, shared).logp.detach()
    model = model.cuda()
    ours = forward(model, shared.to("cuda"))
    torch.testing.assert_close(ours.logp.cpu(), true, atol=1e-3, rtol=1e-3)
    plain = forward(model, unshared.to("cuda")).logp
    torch.testing.assert_close(plain[unshared.mask.cuda()], ours.logp[shared.mask.cuda()], atol=1e-4, rtol=1e-4)
    ours.logp.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_logp_against_fp64(dtype):
    torch.manual_seed(0)
    hidden, weight = torch.randn(100, 64, device="cuda", dtype=dtype), torch.randn(1003, 64, device="cuda", dtype=dtype)
    targets = torch.randint(0, 1003, (100,), device="cuda")
    out = linear_logp(hidden, weight, targets, temperature=4.0)
    logits = hidden.double() @ weight.double().T / 4.0
    true = logits.log_softmax(-1)
    tolerance = 1e-3 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(
        out.logp.double(), true.gather(1, targets[:, None])[:, 0], atol=tolerance, rtol=tolerance
    )
    torch.testing.assert_close(out.entropy.double(), -(true.exp() * true).sum(-1), atol=tolerance, rtol=tolerance)


def test_the_engine_samples_with_the_trainers_log_probs():
    model = prepare(tiny_model(tiny_tokenizer()).cuda())
    engine = LocalEngine(model, max_batch=16, max_len=64)

    async def many():
        params = [SamplingParams(max_new_tokens=12, seed=i) for i in range(12)]
        return await asyncio.gather(*(engine.generate([1, 2, 3 + i % 3], params=p) for i, p in enumerate(params)))

    done = asyncio.run(many())
    groups = [
        [Trajectory([1, 2, 3 + i % 3], c.ids, [True] * len(c.ids), c.logp, c.versions)] for i, c in enumerate(done)
    ]
    packed = pack(groups).to("cuda")
    logp = forward(model, packed).logp
    torch.testing.assert_close(logp, packed.rollout_logp, atol=1e-3, rtol=1e-3)
