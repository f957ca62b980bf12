"""The engine's log-probs equal the model's own forward for any model, mix of lengths and order of requests."""

from __future__ import annotations

import asyncio
import logging

import nightly
import peft
import pytest
import torch
import transformers as hf
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from rlkit.model.lora import adapter_off, add_lora
from rlkit.model.weights import stream_weights
from rlkit.rollout.engines.local import LocalEngine
from rlkit.rollout.engines.local.backends import CachedForward, Decoder, Recompute
from rlkit.types import SamplingParams

VOCAB = 67
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
HEAD = {"head_dim": 12}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 24}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GEMMA2 = {
    "sliding_window": 8,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "query_pre_attn_scalar": 9,
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96, "initializer_range": 0.25}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
BLOOM = {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.25}

DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8, "attn_layer_indices": [1]}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}

CASES = {
    "qwen3": (hf.Qwen3Config(**SIZES, **HEAD), Decoder),
    "qwen3, tied": (hf.Qwen3Config(**SIZES, **HEAD, tie_word_embeddings=True), Decoder),
    "qwen2 with qkv bias": (hf.Qwen2Config(**SIZES), Decoder),
    "llama": (hf.LlamaConfig(**SIZES), Decoder),
    "llama, all biases, multi-query": (
        hf.LlamaConfig(**SIZES | {"num_key_value_heads": 1}, attention_bias=True),
        Decoder,
    ),
    "llama, every head its own keys": (hf.LlamaConfig(**SIZES | {"num_key_value_heads": 4}), Decoder),
    "llama, yarn": (hf.LlamaConfig(**SIZES, rope_parameters=YARN), Decoder),
    "llama 3 rope": (hf.LlamaConfig(**SIZES, rope_parameters=LLAMA3), Decoder),
    "mistral": (hf.MistralConfig(**SIZES, sliding_window=None), Decoder),
    "mistral, window longer than max_len": (hf.MistralConfig(**SIZES, sliding_window=96), Decoder),
    "mistral, sliding": (hf.MistralConfig(**SIZES, sliding_window=8), CachedForward),
    "qwen3, sliding": (
        hf.Qwen3Config(**SIZES, **HEAD, use_sliding_window=True, sliding_window=8, max_window_layers=1),
        CachedForward,
    ),
    "llama, biased mlp": (hf.LlamaConfig(**SIZES, mlp_bias=True), CachedForward),
    "gemma2": (hf.Gemma2Config(**SIZES, **HEAD, **GEMMA2), CachedForward),
    "gemma3": (hf.Gemma3TextConfig(**SIZES, **HEAD, sliding_window=8), CachedForward),
    "gpt2": (hf.GPT2Config(**GPT2, bos_token_id=None, eos_token_id=None), CachedForward),
    "mixtral": (hf.MixtralConfig(**SIZES, **MIXTRAL, sliding_window=None), CachedForward),
    "qwen3.5, a gated delta net": (
        hf.Qwen3_5TextConfig(**SIZES, **HEAD, **DELTA, layer_types=["linear_attention", "full_attention"]),
        CachedForward,
    ),
    "bamba, mamba 2": (hf.BambaConfig(**SIZES, **MAMBA2), CachedForward),
    "lfm2, convolutions": (hf.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]), CachedForward),
    "gpt-oss, sinks": (
        hf.GptOssConfig(**SIZES, **HEAD, num_local_experts=2, num_experts_per_tok=1, sliding_window=8),
        CachedForward,
    ),
    "deepseek v3, latent attention": (
        hf.DeepseekV3Config(**SIZES | {"num_key_value_heads": 4}, **LATENT, first_k_dense_replace=2),
        CachedForward,
    ),
    "bloom": (hf.BloomConfig(**BLOOM, bos_token_id=None, eos_token_id=None, pad_token_id=None), Recompute),
}


def build(config: hf.PretrainedConfig, *, seed: int = 0) -> hf.PreTrainedModel:
    """A random model; norms and biases are random too, so that omitting one changes the result."""
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(config)
    for name, p in model.named_parameters():
        if p.ndim == 1:
            torch.nn.init.normal_(p, 0.0 if "bias" in name else 1.0, 0.3)
    return model


def true_logp(model: hf.PreTrainedModel, prompt: list[int], ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of `ids` after `prompt`, by the model's own forward over the whole sequence."""
    training = model.training
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    model.train(training)
    return (logits.float() / temperature).log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


async def busy(engine: LocalEngine, *, temperature: float) -> list:
    """14 requests of mixed lengths on few slots, arriving at different times; some share a prompt."""
    g = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, VOCAB, (n,), generator=g).tolist() for n in (1, 2, 3, 5, 8, 13, 21, 30, 4, 17)]
    prompts += [prompts[6], prompts[6], prompts[3], prompts[0]]

    async def one(i: int, prompt: list[int]):
        for _ in range(i % 4 * 3):
            await asyncio.sleep(0)
        params = SamplingParams(max_new_tokens=2 + i * 5 % 23, temperature=temperature, seed=i)
        return prompt, await engine.generate(prompt, params=params)

    return await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts)))


NOW = (  # a case of each decoder and kind of layer
    "qwen3", "llama, all biases, multi-query", "llama 3 rope", "mistral, sliding", "gemma2", "gemma3", "mixtral",
    "qwen3.5, a gated delta net", "gpt-oss, sinks", "deepseek v3, latent attention", "bloom",
)  # fmt: skip


@pytest.mark.slow_cases(
    "bloom",
    "deepseek v3, latent attention",
    "gemma2",
    "gemma3",
    "gpt-oss, sinks",
    "mistral, sliding",
    "mixtral",
    "qwen3.5, a gated delta net",
)
@pytest.mark.parametrize("case", nightly.only(CASES, *NOW))
def test_logp_equals_the_models_own_forward(case):
    config, decoder = CASES[case]
    model = build(config)
    engine = LocalEngine(model, max_batch=5, max_len=96, eos_token_ids=())
    found = type(engine._decoder)  # in transformers 5.17 Gemma 2 with a cache differs from itself: the probe finds it
    assert found is decoder or (case == "gemma2" and hf.__version__ < "5.23" and found is Recompute)
    out = asyncio.run(busy(engine, temperature=0.8))
    assert model.training  # left as it was
    for prompt, completion in out:
        truth = true_logp(model, prompt, completion.ids, 0.8)
        assert (torch.tensor(completion.logp) - truth).abs().max() < 1e-4
    assert torch.cat([torch.tensor(c.logp) for _, c in out]).std() > 0.5  # not a uniform model


@pytest.mark.parametrize("name", nightly.only(["qwen3", "gemma2", "qwen2 with qkv bias", "gpt2"], "qwen3"))
def test_greedy_is_hf_greedy(name):
    model = build(CASES[name][0]).eval()
    engine = LocalEngine(model, max_batch=3, max_len=96, eos_token_ids=())
    prompts = [[5, 9, 2, 44], [7], list(range(20)), [5, 9, 2, 44]]
    params = SamplingParams(max_new_tokens=20, temperature=0.0)

    async def ours() -> list:
        return await asyncio.gather(*(engine.generate(p, params=params) for p in prompts))

    for prompt, completion in zip(prompts, asyncio.run(ours()), strict=True):
        ids = torch.tensor([prompt])
        truth = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        assert completion.ids == truth[0, len(prompt) :].tolist()
        assert (torch.tensor(completion.logp) - true_logp(model, prompt, completion.ids)).abs().max() < 1e-4


@pytest.mark.parametrize("name", nightly.only(["qwen3", "gemma3"], "qwen3"))
def test_bf16_is_as_close_to_fp32_as_the_models_own_bf16(name):
    model = build(CASES[name][0])
    exact = build(CASES[name][0])
    model.bfloat16()
    exact.load_state_dict(model.state_dict())  # the same rounded weights, computed in fp32
    engine = LocalEngine(model, max_batch=5, max_len=96, eos_token_ids=())
    assert type(engine._decoder) is CASES[name][1]
    ours, theirs = [], []
    for prompt, completion in asyncio.run(busy(engine, temperature=1.0)):
        truth = true_logp(exact, prompt, completion.ids)
        ours.append(torch.tensor(completion.logp) - truth)
        theirs.append(true_logp(model, prompt, completion.ids) - truth)
    assert torch.cat(ours).square().mean().sqrt() < 1.25 * torch.cat(theirs).square().mean().sqrt()


def test_a_model_that_fails_the_probe_is_decoded_by_its_own_forward(caplog):
    class Scaled(hf.Qwen3ForCausalLM):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            return type(out)(logits=2 * out.logits)

    torch.manual_seed(0)
    model = Scaled(CASES["qwen3"][0])
    with caplog.at_level(logging.WARNING):
        engine = LocalEngine(model, max_batch=5, eos_token_ids=())
    assert type(engine._decoder) is CachedForward
    assert len(caplog.records) == 1
    assert "differ by" in caplog.text
    for prompt, completion in asyncio.run(busy(engine, temperature=1.0)):
        assert (torch.tensor(completion.logp) - true_logp(model, prompt, completion.ids)).abs().max() < 1e-4


def test_a_modified_linear_layer_is_not_bypassed():
    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = build(CASES["llama"][0])
    up = model.model.layers[1].mlp.up_proj
    model.model.layers[1].mlp.up_proj = Doubled(up.in_features, up.out_features, bias=False)
    assert type(LocalEngine(model, max_batch=2)._decoder) is CachedForward
    dynamic = hf.LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    assert type(LocalEngine(build(dynamic), max_batch=2)._decoder) is not Decoder


@pytest.mark.slow_cases("qwen3, tied")
@pytest.mark.parametrize("name", ["llama, all biases, multi-query", "qwen3, tied"])
def test_an_adapter_is_decoded_like_the_weights_it_changes(name):
    model = add_lora(build(CASES[name][0]), rank=3)
    engine = LocalEngine(model, max_batch=5, max_len=96, eos_token_ids=())
    assert type(engine._decoder) is Decoder
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "lora_B" in key:
                p.normal_(0, 0.1)
    asyncio.run(engine.update_weights(version=1))
    for prompt, completion in asyncio.run(busy(engine, temperature=1.0)):
        assert (torch.tensor(completion.logp) - true_logp(model, prompt, completion.ids)).abs().max() < 1e-4
    with adapter_off(model):
        assert (torch.tensor(completion.logp) - true_logp(model, prompt, completion.ids)).abs().max() > 1e-2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*lora_bias=True", "ignore:Already found a `peft_config`")
def test_an_adapter_that_is_not_just_low_rank_takes_the_general_path():
    """`Decoder` multiplies by W + scale B A, which is not what DoRA or a second adapter computes."""
    for options in ({"use_dora": True}, {"lora_bias": True}):
        model = build(CASES["qwen3, tied"][0])
        peft.inject_adapter_in_model(peft.LoraConfig(r=3, target_modules="all-linear", **options), model)
        assert type(LocalEngine(model, max_batch=2)._decoder) is CachedForward
    model = add_lora(build(CASES["qwen3, tied"][0]), rank=3)
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj"]), model, adapter_name="second")
    assert type(LocalEngine(model, max_batch=2)._decoder) is CachedForward


def test_layers_of_different_sizes():
    """As after structured pruning."""
    model = build(CASES["qwen3, tied"][0])
    mlp = model.model.layers[-1].mlp
    for linear, dim in ((mlp.gate_proj, 0), (mlp.up_proj, 0), (mlp.down_proj, 1)):
        linear.weight = torch.nn.Parameter(linear.weight.detach().narrow(dim, 0, 5).contiguous())
    engine = LocalEngine(model, max_batch=5, max_len=96, eos_token_ids=())
    for prompt, completion in asyncio.run(busy(engine, temperature=1.0)):
        assert (torch.tensor(completion.logp) - true_logp(model, prompt, completion.ids)).abs().max() < 1e-4


def test_an_optimizer_step_in_place_is_seen_by_the_next_token():
    model = build(CASES["qwen3, tied"][0])
    engine = LocalEngine(model, max_batch=5, max_len=96, eos_token_ids=())
    before = asyncio.run(busy(engine, temperature=1.0))
    addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model(input_ids=torch.arange(20)[None]).logits.square().mean().backward()
    optimizer.step()
    asyncio.run(engine.update_weights(version=1))
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == addresses
    after = asyncio.run(busy(engine, temperature=1.0))
    worst = 0.0
    for (prompt, old), (_, new) in zip(before, after, strict=True):
        assert set(old.versions) == {0}
        assert set(new.versions) == {1}
        assert (torch.tensor(new.logp) - true_logp(model, prompt, new.ids)).abs().max() < 1e-4
        worst = max(worst, (torch.tensor(old.logp) - true_logp(model, prompt, old.ids)).abs().max().item())
    assert worst > 0.1  # the step did change the model


@pytest.mark.slow
def test_a_model_sharded_over_one_rank_is_read_in_place():
    """FSDP2 replaces parameters by DTensors and frees gathered ones after a forward."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = build(CASES["qwen3, tied"][0])
        engine = LocalEngine(model, max_batch=5, max_len=96, eos_token_ids=())
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        for layer in (*model.model.layers, model):
            fully_shard(layer, mesh=mesh)
        true_logp(model, [1], [2])  # leaves the root gathered
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        for version in (1, 2):
            asyncio.run(engine.update_weights(version=version))
            for prompt, completion in asyncio.run(busy(engine, temperature=1.0)):
                truth = true_logp(model, prompt, completion.ids)
                assert (torch.tensor(completion.logp) - truth).abs().max() < 1e-4
            model(input_ids=torch.arange(20)[None]).logits.square().mean().backward()
            optimizer.step()
        assert type(LocalEngine(model, max_batch=5)._decoder) is Decoder  # the probe of a sharded model
    finally:
        torch.distributed.destroy_process_group()


def test_a_weight_that_is_not_dense_is_read_all_the_same():
    model = build(CASES["llama"][0])
    up = model.model.layers[0].mlp.up_proj
    up.weight = torch.nn.Parameter(up.weight.t().contiguous().t())
    for prompt, completion in asyncio.run(busy(LocalEngine(model, max_batch=5, eos_token_ids=()), temperature=1.0)):
        assert (torch.tensor(completion.logp) - true_logp(model, prompt, completion.ids)).abs().max() < 1e-4


@pytest.mark.slow
def test_the_weights_of_another_model_come_under_the_names_of_its_checkpoint():
    """In which experts are apart and layers have other names: what a trainer on several ranks sends."""
    model, other = build(CASES["mixtral"][0]), build(CASES["mixtral"][0], seed=1)
    engine = LocalEngine(model, max_batch=5, max_len=96, eos_token_ids=())
    weights = dict(stream_weights(other))
    assert weights.keys() != model.state_dict().keys()
    with pytest.raises(ValueError, match=r"the new weights lack \['model\.layers\.1\."):
        asyncio.run(
            engine.update_weights({k: x for k, x in weights.items() if ".layers.1." not in k}.items(), version=1)
        )
    asyncio.run(engine.update_weights(weights.items(), version=1))
    for prompt, completion in asyncio.run(busy(engine, temperature=1.0)):
        assert (torch.tensor(completion.logp) - true_logp(other, prompt, completion.ids)).abs().max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen3, tied", "llama, all biases, multi-query"])
def test_the_compiled_step_is_one_graph_and_the_same_function(case):
    torch._dynamo.reset()
    model = build(CASES[case][0])
    plain = asyncio.run(busy(LocalEngine(model, max_batch=5, max_len=96, eos_token_ids=()), temperature=0.8))
    engine = LocalEngine(model, max_batch=5, max_len=96, eos_token_ids=(), compile=True)
    torch._dynamo.utils.counters.clear()
    for (prompt, expected), (_, completion) in zip(plain, asyncio.run(busy(engine, temperature=0.8)), strict=True):
        assert completion.ids == expected.ids
        assert (torch.tensor(completion.logp) - true_logp(model, prompt, completion.ids, 0.8)).abs().max() < 1e-4
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0  # none but the probe's
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    for prompt, completion in asyncio.run(busy(engine, temperature=0.8)):
        assert (torch.tensor(completion.logp) - true_logp(model, prompt, completion.ids, 0.8)).abs().max() < 1e-4


def test_parameters_that_were_replaced_are_found_by_update_weights():
    model, other = build(CASES["llama"][0]), build(CASES["llama"][0], seed=1)
    engine = LocalEngine(model, max_batch=5, max_len=96, eos_token_ids=())
    model.load_state_dict(other.state_dict(), assign=True)
    asyncio.run(engine.update_weights(version=1))
    for prompt, completion in asyncio.run(busy(engine, temperature=1.0)):
        assert (torch.tensor(completion.logp) - true_logp(other, prompt, completion.ids)).abs().max() < 1e-4


def test_the_engine_does_not_modify_the_model(tmp_path):
    model = build(CASES["qwen3"][0])
    keys = list(model.state_dict())
    asyncio.run(busy(LocalEngine(model, max_batch=5, eos_token_ids=()), temperature=1.0))
    assert list(model.state_dict()) == keys
    assert all(p.requires_grad and p.grad is None and not p.is_inference() for p in model.parameters())
    model.save_pretrained(tmp_path)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    model(input_ids=torch.arange(9)[None]).logits.sum().backward()


async def talk(engine: LocalEngine, stop: list[int]) -> list:
    """Conversations of three turns, several at once on few slots; two begin alike. Each turn goes on from the last."""
    g = torch.Generator().manual_seed(2)
    starts = [torch.randint(0, VOCAB, (n,), generator=g).tolist() for n in (3, 9, 14, 2, 6, 11)]
    starts.append(starts[2])

    async def one(i: int, prompt: list[int]) -> list:
        turns = []
        for turn in range(3):
            params = SamplingParams(max_new_tokens=6, temperature=0.9, seed=10 * i + turn, stop_token_ids=tuple(stop))
            out = await engine.generate(prompt, params=params)
            turns.append((prompt, out))
            prompt = [*prompt, *out.ids, *starts[(i + turn) % 6][: 1 + (i + turn) % 4]]
            for _ in range(i % 3):
                await asyncio.sleep(0)
        return turns

    talks = await asyncio.gather(*(one(i, p) for i, p in enumerate(starts)))
    return [turn for turns in talks for turn in turns]


TALKS = ["qwen3", "llama 3 rope", "mistral, sliding", "gemma3", "mixtral", "qwen3.5, a gated delta net", "bloom"]


@pytest.mark.slow_cases("qwen3")
@pytest.mark.parametrize("case", nightly.only(TALKS, "qwen3", "bloom"))
def test_a_next_turn_reads_only_what_is_new_and_gives_the_same(case):
    model, stop, read = build(CASES[case][0]), [*range(0, VOCAB, 2)], dict.fromkeys((False, True), 0)
    found = {}
    for keep in read:
        engine = LocalEngine(model, max_batch=3, max_len=96, eos_token_ids=(), keep_turns=keep)
        decoder = engine._decoder
        for name in ("prefill", "extend"):

            def counted(tokens, *args, work=getattr(decoder, name), keep=keep):
                read[keep] += sum(map(len, tokens))
                work(tokens, *args)

            setattr(decoder, name, counted)
        found[keep] = asyncio.run(talk(engine, stop))
    for (prompt, a), (_, b) in zip(found[True], found[False], strict=True):
        assert a.ids == b.ids
        assert (torch.tensor(a.logp) - true_logp(model, prompt, a.ids, 0.9)).abs().max() < 1e-4
    assert read[True] < 0.7 * read[False]


def test_kept_turns_end_with_the_weights_and_are_bounded():
    model, stop = build(CASES["qwen3"][0]), tuple(range(VOCAB))

    async def main() -> None:
        engine = LocalEngine(model, max_batch=2, max_len=96, eos_token_ids=(), keep_turns=True)
        params = SamplingParams(max_new_tokens=2, temperature=0.0, stop_token_ids=stop)
        outs = [await engine.generate([n, n + 1], params=params) for n in range(5)]
        assert len(engine._ended) == 2
        following = [4, 5, *outs[4].ids, 7]
        with torch.no_grad():
            model.lm_head.weight.mul_(-1.0)
            model.model.layers[0].self_attn.v_proj.weight.mul_(-1.0)
        await engine.update_weights(version=1)
        assert not engine._ended
        last = await engine.generate(following, params=params)
        assert (torch.tensor(last.logp) - true_logp(model, following, last.ids)).abs().max() < 1e-4

    asyncio.run(main())


def bytes_of(held) -> int:
    """Of all tensors in nested lists, dicts and objects."""
    if isinstance(held, torch.Tensor):
        return held.untyped_storage().nbytes()
    inner = held.values() if isinstance(held, dict) else held if isinstance(held, (list, tuple)) else []
    inner = vars(held).values() if type(held).__name__ == "States" else inner
    return sum(map(bytes_of, inner))


HELD = [("qwen3", None), ("qwen3", torch.float32), ("mixtral", None), ("qwen3.5, a gated delta net", None)]


@pytest.mark.parametrize(("case", "dtype"), HELD)
def test_kept_turns_take_at_most_half_of_the_free_memory(monkeypatch, case, dtype):
    """On a device that has room for `total` bytes of copies; a copy is made where there is room for it already."""
    engine = LocalEngine(build(CASES[case][0]), max_batch=4, eos_token_ids=range(VOCAB), keep_turns=True, dtype=dtype)
    hold, room, found = engine._decoder.hold, [], []
    free = lambda _: room[0] - bytes_of([*engine._ended.values()])
    monkeypatch.setattr("rlkit.rollout.engines.local.free_bytes", free)

    def counted(slot, length):
        held = hold(slot, length)
        assert bytes_of(held) == engine._decoder.held_bytes(length)
        found.append(bytes_of([*engine._ended.values(), held]))
        return held

    monkeypatch.setattr(engine._decoder, "hold", counted)

    def kept(total: float, length: int) -> int:
        room[:], engine._ended = [total], {}
        found.clear()
        for n in range(6):
            asyncio.run(engine.generate([n, *[1] * (length - 1)], params=SamplingParams(max_new_tokens=1, seed=n)))
        assert all(2 * size <= total for size in found)
        return len(engine._ended)

    assert kept(1e9, 10) == 4
    one = max(found) // 4
    assert [kept(n * one, 10) for n in (8, 7.9, 4, 2, 1.9, 0)] == [4, 3, 2, 1, 0, 0]


@pytest.mark.parametrize("case", ["qwen3", "mixtral"])
def test_rest_frees_kept_turns_and_spares_requests_in_flight(case):
    model = build(CASES[case][0])
    engine = LocalEngine(model, max_batch=4, max_len=96, eos_token_ids=(), keep_turns=True)
    stop = SamplingParams(max_new_tokens=3, stop_token_ids=tuple(range(VOCAB)))

    async def main() -> None:
        first = await engine.generate([1, 2, 3], params=stop)
        await engine.generate([4, 5, 6], params=stop)
        assert len(engine._ended) == 2
        turn = [1, 2, 3, *first.ids, 9]
        calls = [
            asyncio.ensure_future(engine.generate(p, params=SamplingParams(max_new_tokens=20, seed=i)))
            for i, p in enumerate((turn, [7, 8]))
        ]
        await asyncio.sleep(0)  # the calls wait, one of them with the keys of its first turn
        await engine.rest()
        while engine.progress.num_tokens < 8:
            await asyncio.sleep(0)
        await engine.rest()
        assert not engine._ended
        for prompt, call in zip((turn, [7, 8]), calls, strict=True):
            out = await call
            assert len(out.ids) == 20
            assert (torch.tensor(out.logp) - true_logp(model, prompt, out.ids)).abs().max() < 1e-4
        await engine.generate([4, 5, 6], params=stop)
        assert len(engine._ended) == 1
        await engine.close()
        assert not engine._ended

    asyncio.run(main())


class Waits(TorchDispatchMode):
    """Counts the numbers that the host reads, for each of which it waits for a GPU."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_the_host_waits_for_a_step_not_for_each_recurrent_layer():
    waits = []
    for layers in (2, 5):
        kinds = {"num_hidden_layers": layers, "layer_types": ["linear_attention"] * (layers - 1) + ["full_attention"]}
        decoder = LocalEngine(build(hf.Qwen3_5TextConfig(**SIZES | HEAD | DELTA | kinds)), max_batch=2)._decoder
        assert type(decoder) is CachedForward
        decoder.reserve(2, 8, keep=0)
        decoder.prefill([[1, 2, 3], [4, 5, 6]], [0, 1])
        with Waits() as found:
            decoder.decode(torch.tensor([7, 8]), torch.tensor([3, 3]))
        waits.append(found.count)
    assert waits[0] == waits[1] > 0
