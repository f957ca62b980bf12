"""A model that one process trains in bf16, against FSDP2 on one rank."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch
import transformers as hf
from torch.distributed.fsdp import FSDPModule

from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model.forward import forward, prepare_model
from rlkit.model.lora import add_lora
from rlkit.model.optim import adamw, optimizer_step
from rlkit.model.parallelize import parallelize, shard
from rlkit.model.sharding import ShardedModel
from rlkit.packing import pack
from rlkit.parallel.attention import as_inference
from rlkit.parallel.mesh import Parallel, make_mesh
from rlkit.rollout.engines.local import LocalEngine
from rlkit.rollout.engines.local.backends import CachedForward, Decoder
from rlkit.rollout.engines.local.fused import FusedDecoder
from rlkit.types import SamplingParams, Trajectory

SIZES = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 48}


def new_model(**options):
    torch.manual_seed(0)
    return tiny_model(tiny_tokenizer(), **(SIZES | options))


def batches():
    g = torch.Generator().manual_seed(1)
    draw = lambda n: torch.randint(0, 263, (n,), generator=g).tolist()
    return [pack([[Trajectory(draw(4), draw(k), [True] * k, [0.0] * k, [0] * k) for k in (3, 8)]]) for _ in range(2)]


def two_steps(model):
    """Norms of the gradients of two steps of two micro-batches, and the weights after them."""
    optimizer, norms = adamw(model, lr=1e-2), []
    for _ in range(2):
        for batch in batches():
            (-forward(model, batch).logp.sum()).backward()
        norms.append(optimizer_step(optimizer, max_norm=1.0)["grad_norm"].total.item())
    plain = lambda p: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
    return norms, {name: plain(p) for name, p in model.named_parameters()}


def beside_fsdp(rank, world):
    mesh, half = make_mesh(Parallel()), torch.bfloat16
    for checkpointing in (False, True):
        cut = ShardedModel(prepare_model(new_model().eval()), mesh, dtype=half)
        shard(cut, mesh, dtype=half, reduce_dtype=torch.float32, reshard_after_forward=True, offload=False)
        alone = parallelize(new_model(), mesh, dtype=half, activation_checkpointing=checkpointing)
        assert isinstance(cut, FSDPModule)
        assert not isinstance(alone, FSDPModule)
        (norms, weights), (fsdp_norms, fsdp_weights) = two_steps(alone), two_steps(cut)
        assert norms == fsdp_norms
        assert weights.keys() == fsdp_weights.keys()
        for name, x in weights.items():
            assert x.dtype == torch.float32
            assert torch.equal(x, fsdp_weights[name]), name
        assert not torch.equal(weights["model.embed_tokens.weight"], new_model().model.embed_tokens.weight)


@pytest.mark.slow
def test_it_trains_bit_for_bit_like_fsdp2(pool):
    pool(1).run(beside_fsdp)


def weights_written_by_others(rank, world):
    model = parallelize(new_model(), make_mesh(Parallel()), dtype=torch.bfloat16)
    first, batch = batches()[0], batches()[1]
    logp = lambda: forward(model, batch).logp.detach()
    before, weight = logp(), model.model.layers[0].mlp.up_proj.weight
    version = weight._version
    weight.data.mul_(1.5)  # as kernels of other optimizers do
    assert weight._version == version
    assert not torch.equal(logp(), before)
    weight.data.div_(1.5)
    assert torch.equal(logp(), before)
    losses = [forward(model, x).logp.sum() for x in (first, batch)]  # two graphs that wait
    sum(losses).backward()
    once = weight.grad.clone()
    weight.grad = None
    for x in (first, batch):
        forward(model, x).logp.sum().backward()
    assert torch.equal(once.sign(), weight.grad.sign())
    assert torch.allclose(once, weight.grad, rtol=2**-6, atol=1e-2)  # the first was added in bf16
    with pytest.raises(RuntimeError, match="stop here"):
        model(torch.tensor([[1]]), work=lambda *_: (_ for _ in ()).throw(RuntimeError("stop here")))
    assert model.model.layers[0].mlp.up_proj.weight is weight


def test_weights_written_without_a_count_are_seen_and_graphs_may_wait(pool):
    pool(1).run(weights_written_by_others)


def other_models(rank, world):
    mesh, batch = make_mesh(Parallel()), batches()[0]
    model = parallelize(new_model(), mesh, dtype=torch.bfloat16)
    forward(model, batch).logp.sum().backward()
    twin = copy.deepcopy(model)
    twin.zero_grad()
    forward(twin, batch).logp.sum().backward()
    for (name, a), (_, b) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert a is not b
        assert torch.equal(a.grad, b.grad), name
    lora = parallelize(add_lora(new_model(), rank=2), mesh, dtype=torch.bfloat16)
    forward(lora, batch).logp.sum().backward()
    have = {name for name, p in lora.named_parameters() if p.grad is not None}
    assert have == {name for name, _ in lora.named_parameters() if ".lora_" in name}
    frozen = parallelize(new_model(), mesh, dtype=torch.bfloat16, frozen=True)
    with torch.no_grad():
        assert torch.equal(forward(frozen, batch).logp, forward(model, batch).logp)
    tied = parallelize(new_model(tie_word_embeddings=True), mesh, dtype=torch.bfloat16)
    forward(tied, batch).logp.sum().backward()
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert type(LocalEngine(model, max_len=16)._decoder) is Decoder  # from the fp32 weights of a process on its own


def test_copies_adapters_frozen_and_tied_models(pool):
    pool(1).run(other_models)


TINY = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.25, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = [
    (hf.LlamaConfig(**TINY), FusedDecoder),
    (hf.LlamaConfig(**TINY, mlp_bias=True), CachedForward),
    (hf.MistralConfig(**TINY, sliding_window=8), CachedForward),
    (hf.Gemma2Config(**TINY, head_dim=8, sliding_window=8), CachedForward),
    (hf.Gemma3TextConfig(**TINY, head_dim=8, sliding_window=8), CachedForward),
    (hf.Qwen3MoeConfig(**TINY, head_dim=8, **EXPERTS), CachedForward),
]


def sampled_by(rank, world):
    """What decodes each family, with and without a copy; how far its log-probs are from the model's own in bf16."""
    found = []
    for config, _ in FAMILIES:
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(config)
        model = parallelize(model, make_mesh(Parallel()), dtype=torch.bfloat16)
        plain = LocalEngine(model, max_len=32)
        engine = LocalEngine(model, max_len=32, dtype=torch.bfloat16, keep_turns=True, eos_token_ids=tuple(range(67)))
        first = asyncio.run(engine.generate([1, 2, 3], params=SamplingParams(seed=0)))
        prompt = [1, 2, 3, *first.ids, 4, 5, 6]  # after the keys of the turn before
        ids = asyncio.run(plain.generate(prompt, params=SamplingParams(max_new_tokens=12, seed=1))).ids
        off = []
        for n in range(len(ids)):  # one token at a time, so that both are asked for the same one
            done = [*prompt, *ids[:n]]
            out = asyncio.run(engine.generate(done, params=SamplingParams(max_new_tokens=1, seed=n)))
            with torch.no_grad(), as_inference(model):
                logits = model(input_ids=torch.tensor([done]), use_cache=False).logits[0, -1].float()
            off.append(abs(out.logp[0] - logits.log_softmax(-1)[out.ids[0]].item()))
        found.append((type(engine._decoder).__name__, type(plain._decoder).__name__, sum(off) / len(off)))
    return found


def test_every_family_keeps_its_keys_in_bf16(pool):
    for (config, decoder), (own, plain, off) in zip(FAMILIES, pool(1).run(sampled_by)[0], strict=True):
        assert own == decoder.__name__, config.model_type
        assert plain == ("Decoder" if decoder is FusedDecoder else "CachedForward"), config.model_type
        assert off < 0.05, (config.model_type, off)
